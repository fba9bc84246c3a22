"""Compiled blocks: torch.compile makes one graph of a block's forward, and one autograd node.

Every distinct block is tried at its first call that learns (`compiled_trial.py`): compiled in one piece, run forward and
backward beside eager, and used only where it gives the same. All blocks that are alike share its code. From then on nothing is
compiled: a call that the code does not serve (another length, evaluation, a hook that was added) runs eagerly. A block that
cannot be compiled, that gives other results, or whose calls keep changing stays eager, and `news` has a sentence that says so.

The order of wrappers, outermost first: recomputation and offloading (activations.py), the block's chunks made ready, its code.
The node's backward asks for all it saved at once, and hands out all gradients at its end: all chunks of a block lie in slots
together.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, Literal

import torch
from torch import nn
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from anyfit.values.compiled import BlockTime
from anyfit.values.job import Job
from anyfit.values.precision import PRECISIONS
from anyfit.values.record import nearest

from ..kernels import native
from .compiled_timing import times_of
from .compiled_trial import Trial, compiling, reason_against
from .recompute import may_be_recomputed, set_attribute
from .residency import Residency
from .watched import Watched
from .why_not import WhyNot

MOST_MISSED = 32  # calls in training that the code did not serve, of more than half
# What plain PyTorch would compute: random numbers in its order, and intermediate results rounded where it rounds them.
AS_EAGER = {"fallback_random": True, "emulate_precision_casts": True}

Numerics = Literal["eager", "fast"]


class Backend:
    """Inductor with fixed options. Counts what it compiled, and the calls of what it made."""

    def __init__(self, numerics: Numerics) -> None:
        self.numerics = numerics
        self._options = AS_EAGER if numerics == "eager" else {}
        self.compiles = self.runs = 0
        self.equal: set[Any] = set()  # distinct blocks that were found to give what eager gives
        self.reasons: dict[Any, str] = {}  # by distinct block, why it is not compiled
        self.variants: Counter[Any] = Counter()  # by distinct block
        self.seconds = 0.0  # spent compiling
        self.measures = False  # what is compiled is timed, eager beside it
        self.times: dict[Any, tuple[BlockTime, BlockTime, float]] = {}  # by distinct block: eager, compiled, seconds to compile

    def __call__(self, graph: Any, inputs: Sequence[Any]) -> Callable[..., Any]:
        from torch._inductor.compile_fx import compile_fx

        self.compiles += 1
        made: Any = compile_fx(graph, inputs, config_patches=dict(self._options))

        def counted(*args: Any) -> Any:
            self.runs += 1
            return made(*args)

        return counted


@functools.cache
def backend_for(numerics: Numerics) -> Backend:
    """One for all runs of a process: code is found again by the backend that made it."""
    return Backend(numerics)


def no_compiler(device: torch.device) -> str | None:
    """Why nothing can be compiled for the device."""
    if device.type == "cuda":
        from torch.utils._triton import has_triton

        return None if has_triton() else "no triton that works on this GPU"
    try:
        native.find_compiler()
    except native.NotBuilt as error:
        return str(error)
    return None


class CompiledBlocks(WhyNot):
    """The blocks that a plan compiles."""

    def __init__(self, model: nn.Module, names: Sequence[str], residency: Residency, device: torch.device, job: Job) -> None:
        super().__init__("without torch.compile")
        self._undo: list[Callable[[], None]] = []
        self.blocks: dict[str, CompiledBlock] = {}
        self.served: Counter[Any] = Counter()  # calls in training, by distinct block
        self.missed: Counter[Any] = Counter()  # those that the code which is there did not serve
        modules = dict(model.named_modules())
        for name in names:
            if name not in modules:
                raise ValueError(f"the plan compiles block {name!r}, and the model has none" + nearest(name, list(modules)))
            around = next((each for each in names if each != name and name.startswith(f"{each}.")), None)
            if around is not None:
                raise ValueError(f"the plan compiles {name!r}, and {around!r}, which it is part of; name one of them")
        none = no_compiler(device) if names else None
        backend = backend_for("fast" if job.compile == "fast" else "eager")
        for name in names:
            made = CompiledBlock(self, name, modules[name], residency, device, job.precision, backend, modules[name].forward)
            self.blocks[name] = made
            self._undo.append(set_attribute(modules[name], "forward", made))
            reason = none or made.unfit
            if reason is not None:
                self.stay_eager({name: reason})

    def is_of(self, name: str) -> bool:
        return name in self.blocks

    def close(self) -> None:
        while self._undo:
            self._undo.pop()()


class CompiledBlock:
    """Stands in for a block's forward."""

    def __init__(
        self,
        of: CompiledBlocks,
        name: str,
        module: nn.Module,
        residency: Residency,
        device: torch.device,
        precision: str,
        backend: Backend,
        forward: Callable[..., Any],  # the user's
    ) -> None:
        self.name, self.module, self.device, self.backend = name, module, device, backend
        self.eager_forward = forward
        self.is_rounded = PRECISIONS[precision].weight != "float32"
        self.unfit = _unfit(module, forward)
        self._of, self._residency = of, residency
        self._watched = [parameter for parameter in module.parameters() if isinstance(parameter, Watched)]
        self._chunks = {parameter.anyfit[2] for parameter in self._watched}
        # Ranks that shard weights use them in one order, which compiled code and eager code do not share.
        self._is_gathered = any(residency.is_gathered(index) for index in self._chunks)
        self._is_tried = self.is_served = False  # the last call, by compiled code
        if self.unfit is None:
            self.compile: Any = torch.compile(self.eager_forward, fullgraph=True, dynamic=False, backend=backend)
            self.run: Any = vars(torch._dynamo)["run"](self.compile)  # with code that is there, or eagerly
            self.key = distinct(module, self.eager_forward)

    @property
    def reason(self) -> str | None:
        """Why it stays eager."""
        return self._of.reasons.get(self.name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        learns = self.try_once(args, kwargs)
        if self.reason is not None or not self._is_tried:
            return self.again(args, kwargs, is_served=False)
        if self._is_gathered and learns:
            self.is_served = True
            with self.ready(), compiling():
                return self.compile(*args, **kwargs)
        before = self.backend.runs
        result = self.again(args, kwargs, is_served=True)
        self.is_served = self.backend.runs > before
        if learns:
            self._heed(is_served=self.is_served)
        return result

    def again(self, args: Any, kwargs: Any, *, is_served: bool) -> Any:
        """By compiled code that is there, or eagerly, whatever is known of the block by now: a forward that is recomputed has to
        save what it saved."""
        self.is_served = is_served
        with self.ready() if is_served or self._is_gathered else nullcontext():
            return (self.run if is_served else self.eager_forward)(*args, **kwargs)

    def try_once(self, args: Any, kwargs: Any) -> bool:
        """Compiles and tries it at its first call in training; whether this call is such a one."""
        learns = self.reason is None and self._learns()
        if learns and not self._is_tried:
            self._try(args, kwargs)
        return learns

    def _learns(self) -> bool:
        """Whether a call is one of training: compiled code for it is worth having."""
        return self.module.training and may_be_recomputed() and all(map(_ignores_compilers, _get_current_dispatch_mode_stack()))

    def _try(self, args: Any, kwargs: Any) -> None:
        backend, key = self.backend, self.key
        self._is_tried = True
        reason = backend.reasons.get(key)
        if reason is None:
            with self.ready():
                before, trial = backend.seconds, Trial(self, args, kwargs)
                reason = reason_against(self, trial)
                if reason is None and backend.measures and key not in backend.times:
                    backend.times[key] = *times_of(self, trial), backend.seconds - before
            if reason is None:
                backend.equal.add(key)
            elif key not in backend.equal:
                backend.reasons[key] = reason
        if reason is not None:
            self._of.stay_eager({self.name: reason})

    def _heed(self, *, is_served: bool) -> None:
        """Whether the code that is there served a call in training."""
        of, key = self._of, self.key
        if is_served:
            of.served[key] += 1
            return
        of.missed[key] += 1
        if of.missed[key] >= MOST_MISSED and of.missed[key] > of.served[key]:
            reason = f"{of.missed[key]} of its calls in training had other shapes, or other facts, than it was compiled for"
            self._of.stay_eager(
                {name: reason for name, each in self._of.blocks.items() if each.reason is None and each.key == key}
            )

    @contextmanager
    def ready(self) -> Iterator[None]:
        """Inside, all its weights are on the device, and are parameters as they were compiled for."""
        if not self._watched:
            yield
            return
        with self._residency.pinning(self._chunks), as_plain(self._residency, self._watched):
            yield


def _ignores_compilers(mode: Any) -> bool:
    """Of a mode that watches ops: compiled code may run beneath it, unseen."""
    return bool(getattr(mode, "ignore_compile_internals", bool)())


def _unfit(module: nn.Module, forward: Callable[..., Any]) -> str | None:
    if module._compiled_call_impl is not None:
        return "the model compiles it itself"
    if isinstance(module, torch.jit.ScriptModule):
        return "it is scripted"
    return None if hasattr(forward, "__code__") else "its forward is not a function"


def distinct(module: nn.Module, forward: Any) -> Any:
    """The same for blocks that are alike: their code, classes and parameters."""
    parameters = tuple((name, tuple(each.shape), each.dtype, each.requires_grad) for name, each in module.named_parameters())
    return forward.__code__, tuple(type(each) for each in module.modules()), parameters


@contextmanager
def as_plain(residency: Residency, watched: Sequence[Any]) -> Iterator[None]:
    """Inside, parameters are of the class that the user gave them."""
    kinds = [type(parameter) for parameter in watched]
    for parameter in watched:
        parameter.__class__ = residency.kinds[parameter.anyfit[1]]
    try:
        yield
    finally:
        for parameter, kind in zip(watched, kinds, strict=True):
            parameter.__class__ = kind


def watch_users_own(model: nn.Module, residency: Residency) -> None:
    """Ops of a module that the user compiled or scripted are not seen one by one: all its weights are ready before its call."""
    for module in model.modules():
        is_scripted = isinstance(module, torch.jit.ScriptModule)
        attribute = "forward" if is_scripted or module._compiled_call_impl is None else "_compiled_call_impl"
        call = getattr(module, attribute)
        watched = [parameter for parameter in module.parameters() if isinstance(parameter, Watched)]
        if watched and (is_scripted or attribute != "forward" or hasattr(call, "_torchdynamo_orig_callable")):
            residency.undo.append(set_attribute(module, attribute, _ready(residency, watched, call, is_scripted)))


def _ready(residency: Residency, watched: Sequence[Any], call: Callable[..., Any], is_scripted: bool) -> Callable[..., Any]:
    chunks = {parameter.anyfit[2] for parameter in watched}

    def ready(*args: Any, **kwargs: Any) -> Any:
        with residency.pinning(chunks), nullcontext() if is_scripted else as_plain(residency, watched):
            return call(*args, **kwargs)

    return ready
