"""A block is compiled, and run beside eager on the inputs of a real call: whether it may take eager's place.

Both run forward and backward from the same inputs, state and random numbers, with gradients only of this block. In fp32 all
outputs and gradients have to lie within 1e-5 of eager's. In bf16 they may be no farther from the block's fp32 result than 1.1
times what eager's are. The call itself, the model's state and its random numbers are as if nothing had been tried.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from .forward_state import ForwardState, Note, version_of
from .recompute import Inputs

NEAR = 1e-5  # of fp32, relative
NO_FARTHER = 1.1  # than eager from the fp32 result, of bf16
DRAWN_APART, NEAR_ROUNDED = 0.1, 0.02  # so far from eager, fp32 has drawn other random numbers: bf16 is compared with itself
LEAST_SCALE = 0.1  # of the largest gradient: what is smaller is compared as if it were as large, as it may be rounding alone
MOST_COMPARED = 2**16  # elements of a tensor
MOST_VARIANTS = 4  # of the code of one distinct block, as where its first layer's input needs no gradient
MOST_CODES = 64  # of one function, which blocks of many shapes may share
LOW = (torch.bfloat16, torch.float16)


class Tried(Protocol):
    """A block that is run beside eager."""

    name: str
    module: nn.Module
    device: torch.device
    eager_forward: Callable[..., Any]


class Block(Tried, Protocol):
    """One that is compiled."""

    key: Any
    backend: Any
    is_rounded: bool
    compile: Callable[..., Any]
    run: Callable[..., Any]


@contextmanager
def compiling() -> Iterator[None]:
    """Around what may compile. Hooks that are added later are to be seen, and a second backward is to work."""
    dynamo, functorch = torch._dynamo.config, torch._functorch.config
    few: dict[str, Any] = {
        "recompile_limit": MOST_CODES,
        "accumulated_recompile_limit": 4 * MOST_CODES,
        "skip_nnmodule_hook_guards": False,
    }
    with dynamo.patch(few), functorch.patch(donated_buffer=False):
        yield


@dataclass(frozen=True)
class Outcome:
    outputs: list[Tensor | None]  # a sample of each, in fp64
    gradients: list[Tensor | None]


def reason_against(block: Block, trial: Trial) -> str | None:
    """Compiles the block, where no code is there that serves this call; why that is not to be used, or None."""
    backend = block.backend
    try:
        runs = backend.runs
        trial.call_twice(block.run)
        if trial.is_written:
            return "it writes into its input in place"
        if block.key in backend.equal and backend.runs == runs + 2:  # with code that was tried
            return None
        if backend.variants[block.key] >= MOST_VARIANTS:
            return f"blocks like it were compiled in {MOST_VARIANTS} forms already, and it needs another"
        start, compiles = time.perf_counter(), backend.compiles
        with compiling():
            compiled = trial.outcome(block.compile)
        backend.seconds += time.perf_counter() - start
        backend.variants[block.key] += backend.compiles - compiles
        runs = backend.runs
        trial.call_twice(block.run)
        if backend.runs < runs + 2:
            return "it would be compiled anew at every call"
        if backend.numerics == "fast":
            return None
        eager = trial.outcome(block.eager_forward)
        return _difference(eager, compiled, trial.wide() if block.is_rounded else None)
    except torch.OutOfMemoryError:
        return "there was no room to try it"
    except Exception as error:
        return _said(error)


class Trial:
    """Inputs and state of one call, to run the block with again and again."""

    def __init__(self, block: Tried, args: Any, kwargs: Any) -> None:
        self._block = block
        with torch.no_grad():
            self.inputs = Inputs((args, kwargs), _copied, lambda packed: packed)
        self._note: Note = ForwardState(block.module, block.name, block.device, block.eager_forward).note(self.inputs.objects)
        self._slopes: dict[Any, Tensor] = {}  # by shape and number
        self._grown: list[tuple[Tensor, int]] = []  # inputs of the last call, and how often each was written before it

    @contextmanager
    def inside(self, hooks: saved_tensors_hooks | None = None) -> Iterator[None]:
        """State and random numbers are as they were; hooks that save tensors elsewhere see nothing, nor modes that watch ops."""
        with (
            _disable_current_modes(),
            hooks or saved_tensors_hooks(without_history, as_it_is),
            torch.enable_grad(),
            self._note.again(),
        ):
            yield

    def wanted(self, leaves: Sequence[Tensor]) -> list[Tensor]:
        """What has a gradient: inputs and parameters."""
        return [*leaves, *(each for each in self._block.module.parameters() if each.requires_grad)]

    def slopes(self, outputs: Sequence[Tensor]) -> list[Tensor]:
        """Gradients of the outputs: the same for every outcome, and none of the user's random numbers."""
        found = []
        for index, each in enumerate(outputs):
            key = index, each.shape
            if key not in self._slopes:
                generator = torch.Generator(each.device).manual_seed(index)
                self._slopes[key] = torch.randn(each.shape, generator=generator, device=each.device).to(torch.bfloat16)
            found.append(self._slopes[key].to(each.dtype))
        return found

    def call_twice(self, forward: Callable[..., Any]) -> None:
        """One call after another, each from the state that the one before has left."""
        with self.inside():
            for _ in range(2):
                args, kwargs = self.given()[1]
                forward(*args, **kwargs)

    def given(self, *, widens: bool = False) -> tuple[list[Tensor], Any]:
        """Leaves that want a gradient, and the arguments made of them: a call in the model has none that are leaves."""
        arguments = self.inputs.give()
        if widens:
            arguments = tree_map_only(Tensor, _Wider(), arguments)
        grown: dict[int, tuple[Tensor, Tensor]] = {}

        def grow(tensor: Tensor) -> Tensor:
            if tensor.requires_grad and tensor.is_leaf and not isinstance(tensor, nn.Parameter):
                if id(tensor) not in grown:
                    grown[id(tensor)] = tensor, _copied(tensor)
                return grown[id(tensor)][1]
            return tensor

        arguments = tree_map_only(Tensor, grow, arguments)
        self._grown = [(each, version_of(each)) for _, each in grown.values()]
        return [leaf for leaf, _ in grown.values()], arguments

    @property
    def is_written(self) -> bool:
        """Whether the last call wrote into its inputs."""
        return self.inputs.are_changed or any(version_of(each) != version for each, version in self._grown)

    def outcome(self, forward: Callable[..., Any], *, widens: bool = False) -> Outcome:
        """What a forward and its backward give."""
        with self.inside(), _widened(self._block.module) if widens else nullcontext():
            leaves, (args, kwargs) = self.given(widens=widens)
            found = [each for each in tree_leaves(forward(*args, **kwargs)) if isinstance(each, Tensor)]
            learning, wanted = [each for each in found if each.requires_grad], self.wanted(leaves)
            gradients: Sequence[Tensor | None] = ()
            if learning and wanted:
                gradients = torch.autograd.grad(learning, wanted, self.slopes(learning), allow_unused=True)
            return Outcome([_sample(each) for each in found], [_sample(each) for each in gradients])

    def wide(self) -> Outcome:
        """In fp32, from the same weights and inputs."""
        return self.outcome(self._block.eager_forward, widens=True)


def without_history(tensor: Tensor) -> Tensor:
    """Which autograd keeps itself: an op's own output would tie the graph into a knot, also one that has no history yet."""
    return tensor.detach()


def as_it_is(tensor: Tensor) -> Tensor:
    return tensor


def _copied(tensor: Tensor) -> Tensor:
    """Of the same strides, which code is compiled for. One whose elements share memory cannot be written in place anyway."""
    is_plain = type(tensor) is Tensor and tensor.layout == torch.strided and not tensor.is_nested
    if not is_plain or any(stride == 0 and size > 1 for stride, size in zip(tensor.stride(), tensor.shape, strict=True)):
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _sample(tensor: Tensor | None) -> Tensor | None:
    if tensor is None or tensor.layout != torch.strided or tensor.is_complex():
        return None
    flat = tensor.detach().reshape(-1)
    return flat[:: max(flat.numel() // MOST_COMPARED, 1)].to("cpu", torch.float64)


class _Wider:
    """Tensors of few digits in fp32, and one that is given twice as one."""

    def __init__(self) -> None:
        self._made: dict[int, tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor) -> Tensor:
        if tensor.dtype not in LOW:
            return tensor
        if id(tensor) not in self._made:
            self._made[id(tensor)] = tensor, tensor.detach().float().requires_grad_(tensor.requires_grad)
        return self._made[id(tensor)][1]


@contextmanager
def _widened(module: nn.Module) -> Iterator[None]:
    """Inside, the block's weights are fp32."""
    wider = _Wider()
    homes = [
        (each._parameters, key, parameter)
        for each in module.modules()
        for key, parameter in each._parameters.items()
        if parameter is not None and parameter.dtype in LOW
    ]
    try:
        for home, key, parameter in homes:
            home[key] = wider(parameter)  # type: ignore[assignment]
        yield
    finally:
        for home, key, parameter in homes:
            home[key] = parameter


def _difference(eager: Outcome, compiled: Outcome, wide: Outcome | None) -> str | None:
    for what in ("outputs", "gradients"):
        one, other = getattr(eager, what), getattr(compiled, what)
        if [each is None for each in one] != [each is None for each in other]:
            return f"compiled, it gives other {what} than eager"
        near = max(_apart(other, one), default=0.0)
        if near <= NEAR:
            continue
        if wide is None:
            return f"compiled, its {what} differ from eager's by {near:.1g} of their size"
        own, its = (_together(_apart(each, getattr(wide, what))) for each in (one, other))
        if own > DRAWN_APART and near > NEAR_ROUNDED:
            return f"compiled, its {what} differ from eager's by {near:.1g} of their size"
        if own <= DRAWN_APART and not its <= NO_FARTHER * own:
            return f"compiled, its {what} are {its / max(own, 1e-30):.2f} times as far from those in fp32 as eager's"
    return None


def apart(one: Outcome, other: Outcome) -> float:
    """How far two outcomes are from each other, relative to the first."""
    found = [0.0]
    for what in ("outputs", "gradients"):
        ones, others = getattr(one, what), getattr(other, what)
        if [each is None for each in ones] != [each is None for each in others]:
            return math.inf
        found += _apart(others, ones)
    return max(found)


def _apart(ones: Sequence[Tensor | None], others: Sequence[Tensor | None]) -> list[float]:
    """Of each tensor, how far it lies from the other, relative to that."""
    pairs = [(one, other) for one, other in zip(ones, others, strict=True) if one is not None and other is not None]
    least = LEAST_SCALE * max((_rms(other) for _, other in pairs), default=0.0)
    return [_far(one, other) / max(_rms(other), least, 1e-30) for one, other in pairs]


def _far(one: Tensor, other: Tensor) -> float:
    if one.shape != other.shape or not torch.equal(one.isfinite(), other.isfinite()):
        return math.inf
    return _rms(one - other)


def _rms(values: Tensor) -> float:
    finite = values[values.isfinite()]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _together(errors: Sequence[float]) -> float:
    return math.sqrt(sum(each * each for each in errors) / max(len(errors), 1))


def _said(error: Exception) -> str:
    """The first lines of what torch says."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"it cannot be compiled in one piece: {type(error).__name__}: {' '.join(lines[:2]):.200}"
