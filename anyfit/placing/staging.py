"""Staging: what of a model a rank of a pipeline holds, and the pipe that its stages run in.

A parameter is on every place of the pipeline whose stages use it, and on the first where none does. Elsewhere it has no memory,
and stands for no number. Of those on several places the gradients add up after all else, and they count once in the norm. A
buffer is the first place's that calls its module: the others learn what has become of it before anybody looks.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.stages.calls import Calls, Forward, callable_modules
from anyfit.stages.looked import Looked
from anyfit.stages.pipe import Pipe
from anyfit.stages.post import Post
from anyfit.values.demands import StaysInOneStage
from anyfit.values.layout import Placeable
from anyfit.values.plan import Plan

from .chunks import quietly
from .ranks import Ranks

T = TypeVar("T")
Form: TypeAlias = tuple[tuple[int, ...], torch.dtype]  # of a tensor


@dataclass(eq=False)
class StagedModel:
    """A rank's stages; all of the model, where there is no pipeline."""

    looked: Looked | None = None
    ranks: Ranks = field(default_factory=Ranks)
    places: Mapping[str, tuple[int, ...]] = field(default_factory=dict)  # by parameter, those that hold it
    trained: Collection[str] = ()  # parameters, on all places of a pipeline
    _owners: Mapping[str, int] = field(default_factory=dict)  # of buffers of modules that are called
    _calls: Calls | None = None
    _pipe: Pipe | None = None

    def holds(self, name: str) -> bool:
        return self.looked is None or self.ranks.place in self.places[name]

    @property
    def pipe(self) -> Pipe:
        assert self._pipe is not None
        return self._pipe

    @property
    def shared(self) -> set[tuple[int, ...]]:
        return {places for places in self.places.values() if len(places) > 1}

    def note_trained(self, placeables: Collection[Placeable]) -> None:
        if self.looked is not None:
            self.trained = {each.name for each in placeables if each.trainable and each.group >= 0}

    def here(self, placeables: Collection[Placeable], place: int) -> list[Placeable]:
        """Those that a place holds."""
        if self.looked is None:
            return list(placeables)
        found = ((each, self.places[each.name]) for each in placeables)
        return [replace(each, holders=at if len(at) > 1 else ()) for each, at in found if place in at]

    def make(self, model: nn.Module, optimizer: Optimizer, device: torch.device, known: Collection[str]) -> None:
        """Parameters become rank 0's, those of other places nothing. `known` are read from a folder, or there already."""
        if self.looked is None:
            return
        self._refuse_other_calls(self.looked)
        with quietly(), torch.no_grad():
            for name, each in model.named_parameters():
                if name not in known:
                    numbers = each.data.to(device, copy=True).contiguous()
                    self.ranks.broadcast(numbers)
                    each.data = numbers.to(each.device)
                if not self.holds(name):
                    each.data = nothing_like(each)
                    optimizer.state.pop(each, None)

    def _refuse_other_calls(self, looked: Looked) -> None:
        """Each rank has looked at the model with a sample of its own."""
        mine = looked.training.stages.flow
        for rank, theirs in enumerate(self.ranks.objects(mine)):
            if theirs != mine:
                raise StaysInOneStage(
                    f"rank {self.ranks.index} sees other calls of modules in a forward than rank {rank}, or results that pass "
                    "between others: which ones depends on the sample; give Job(sample=) the same on all ranks"
                )

    def install(self, model: nn.Module, device: torch.device) -> None:
        """Outermost of all that stands before a block's forward."""
        if self.looked is None:
            return
        calls = self._calls = Calls(callable_modules(model, self.looked.blocks))
        calls.install()
        calls.handler = _refused
        post = Post(self.ranks.place, self.ranks.pipeline, self.ranks.wire())
        self._pipe = Pipe(self.ranks.place, self.ranks.pipeline, calls, post, device)

    @contextmanager
    def trying(self, rehearsing: AbstractContextManager[T]) -> Iterator[T]:
        """Inside, what stands before a block's forward for a trial stands behind the stage's call."""
        assert self._calls is not None
        self._calls.remove()
        try:
            with rehearsing as found:
                self._calls.install()
                try:
                    yield found
                finally:
                    self._calls.remove()
        finally:
            self._calls.install()

    def share_buffers(self, model: nn.Module) -> None:
        """Every rank has what has become of them. All ranks do it together."""
        for name, buffer in model.named_buffers() if self.looked is not None else ():
            if name in self._owners:
                numbers = buffer.detach().clone(memory_format=torch.contiguous_format)
                self.ranks.from_place(numbers, self._owners[name])
                if self._owners[name] != self.ranks.place and not torch.equal(numbers, buffer):
                    buffer.copy_(numbers)

    def whole(self, held: Mapping[str, Tensor], model: nn.Module, device: torch.device) -> dict[str, Tensor]:
        """What places hold of all parameters, or of anything of their shape, on the host. All ranks do it together."""
        if self.looked is None:
            return dict(held)
        forms = {name: (tuple(each.shape), each.dtype) for name, each in held.items()}
        for theirs in self.ranks.objects(forms):
            forms |= theirs
        found = {}
        for name, _ in model.named_parameters():
            shape, dtype = forms[name]
            there = held[name].to(device).contiguous() if name in held else torch.empty(shape, dtype=dtype, device=device)
            self.ranks.from_place(there, self.places[name][0])
            found[name] = there.to("cpu")
        return found

    def fetch(
        self, model: nn.Module, held: Mapping[str, Form], mine: Callable[[str], Tensor], device: torch.device
    ) -> list[tuple[nn.Parameter, Tensor]]:
        """Gives each parameter of other places their numbers: which parameters these are, with what stood for the numbers. `held`
        and `mine`: those that are here. All ranks do it together."""
        absent, forms = [], dict(held)
        for theirs in self.ranks.objects(held):
            forms |= theirs
        for name, each in model.named_parameters():
            if len(self.places[name]) == self.ranks.pipeline:
                continue
            shape, dtype = forms[name]
            numbers = mine(name).contiguous() if name in held else torch.empty(shape, dtype=dtype, device=device)
            self.ranks.from_place(numbers, self.places[name][0])
            if name not in held:
                absent.append((each, each.data))
                each.data = numbers
        return absent

    def as_written(self) -> AbstractContextManager[None]:
        """Inside, calls of modules are made as the user wrote them."""
        assert self._calls is not None
        return self._calls.handled_by(None)

    def close(self) -> None:
        if self._calls is not None:
            self._calls.remove()


def staged_by(plan: Plan, model: nn.Module, ranks: Ranks, looked: Looked | None) -> StagedModel:
    """What each place holds. Nothing is changed; raises where the plan cannot be followed."""
    if plan.pipeline == 1:
        return StagedModel()
    assert looked is not None, "a plan with a pipeline axis needs a look at the model"
    modules = callable_modules(model, looked.blocks)
    _refuse_compiled(model, modules)
    names = {id(each): name for name, each in model.named_parameters()}
    called = {path: frozenset(names[id(each)] for each in module.parameters()) for path, module in modules.items()}
    users = looked.places(called, plan.pipeline)
    places = {name: users.get(name, (0,)) for name in names.values()}
    callers = looked.callers(plan.pipeline)
    _refuse_shared_statistics(looked, callers)
    owners = {
        name: callers[path][0]
        for path, module in modules.items()
        if path in callers
        for name in (_joined(path, inner) for inner, _ in module.named_buffers())
    }
    return StagedModel(looked, ranks, places, (), owners)


def nothing_like(parameter: Tensor) -> Tensor:
    """Its shape, without memory or numbers."""
    number: Any = float("nan") if parameter.dtype.is_floating_point else 0
    return torch.full((), number, dtype=parameter.dtype, device=parameter.device).expand(parameter.shape)


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _refused(path: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    raise RuntimeError(
        f"{path or 'the model'!r} is called outside of run.step, run.evaluate and run.weights, and each rank of a pipeline has "
        "only its own stages of the model; use run.evaluate(batch), or `with run.weights() as model`"
    )


def _refuse_compiled(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    inside = {id(each) for each in modules.values()}
    for name, each in model.named_modules():
        is_compiled = each._compiled_call_impl is not None or hasattr(each.forward, "_torchdynamo_orig_callable")
        if is_compiled and any(id(inner) in inside for inner in each.modules()):
            raise StaysInOneStage(
                f"{name or 'the model'} is compiled, and a pipeline is cut between the modules inside of it; leave torch.compile "
                "out, or train without a pipeline axis"
            )


def _refuse_shared_statistics(looked: Looked, callers: Mapping[str, tuple[int, ...]]) -> None:
    written = {call.path: min(call.buffers) for call in looked.training.stages.flow.calls if call.buffers}
    for path, name in written.items():
        if len(callers[path]) > 1:
            raise StaysInOneStage(
                f"{path!r} is called on places {', '.join(map(str, callers[path]))} of the pipeline and writes into its buffer "
                f"{name}, of which each would have another; cut so that one place has all of its calls"
            )
