"""Ghost execution: one rank's part of a forward, by running all of the user's Python.

A call of the stage's own is made. A call of an earlier stage returns what was received of it, and else *ghosts*: fake tensors of
the shapes that the call has returned this time, which take no memory and no work. Glue runs on numbers where all that it reads is
here, and on ghosts elsewhere. After the stage's last call the user's code is left: so no call of a later stage is ever met, and
the loss never sees a ghost that it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from anyfit.values.stages import Stages, Value

from .calls import Calls, Forward
from .dynamic import of_right_shape
from .keys import call_of_its_own, is_random

NEEDS_NUMBERS = DataDependentOutputException, DynamicOutputShapeException


@dataclass(frozen=True)
class Facts:
    """Of a tensor, without its numbers."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    needs_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Facts:
        return cls(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, tensor.requires_grad)


Returned: TypeAlias = tuple[Any, ...]  # of a call: facts of tensors, and other leaves as they are


class Done(BaseException):
    """A stage has made its last call. No Exception: code that catches those is not to see it."""


class Ghosts(FakeTensorMode):
    """Fake tensors by their facts, made once: each takes a third of a millisecond. A tensor with numbers that meets a ghost in an
    op is one there as well: none of its numbers is fetched for that."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._device = device
        self._known: dict[Facts, tuple[Tensor, int]] = {}  # with its version

    def of(self, facts: Facts) -> Tensor:
        known = self._known.get(facts)
        if known is not None and known[0]._version == known[1]:
            return known[0]
        with self:  # another, where glue has written into it: it has a history now
            made = torch.empty_strided(facts.shape, facts.stride, dtype=facts.dtype, device=self._device)
        self._known[facts] = made, made._version
        return made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if is_random(func, args, kwargs or {}):
            self._draw(func, args, kwargs or {})
        ghosts, named = pytree.tree_map_only(Tensor, self._ghost, (args, kwargs or {}))
        try:
            return super().__torch_dispatch__(func, types, ghosts, named)
        except DynamicOutputShapeException as error:
            return of_right_shape(func, args, kwargs or {}, error)

    def _draw(self, func: Any, args: Any, kwargs: Any) -> None:
        """As many numbers as where the tensors are real, so that what draws next between blocks draws the same on all ranks."""

        def real(tensor: Tensor) -> Tensor:
            return torch.ones(tensor.shape, dtype=tensor.dtype, device=self._device)

        with _disable_current_modes(), torch.no_grad():
            given, named = pytree.tree_map_only(Tensor, real, (args, kwargs))
            func(*given, **named)

    def _ghost(self, tensor: Tensor) -> Tensor:
        if isinstance(tensor, FakeTensor) or tensor.layout != torch.strided:
            return tensor
        return self.of(Facts(tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, needs_grad=False))


def _whole(tensor: Tensor) -> Tensor:
    """As others see it, of a tensor that is held in parts: any function of torch puts one together."""
    return tensor if type(tensor) is Tensor else tensor.view_as(tensor)


@dataclass(eq=False)
class Made:
    """What a stage has made of a micro-batch."""

    loss: Any = None  # of the last stage
    exports: dict[Value, Tensor] = field(default_factory=dict)
    returned: list[Returned] = field(default_factory=list)  # by all calls up to the stage's last


@dataclass(eq=False)
class StageRun:
    """One forward of one stage. `arrived` has what it receives, as leaves of its own graph; `returned`, what the calls of earlier
    stages have returned."""

    stages: Stages
    stage: int
    structures: Sequence[pytree.TreeSpec]
    draws_elsewhere: bool
    ghosts: Ghosts
    device: torch.device
    arrived: Mapping[Value, Tensor]
    returned: Sequence[Returned]

    def __post_init__(self) -> None:
        self._last = self.stages.last_call(self.stage)
        self._is_end = self.stage == self.stages.count - 1
        self._exported = {value for user in self.stages.users(self.stage) for value in self.stages.sent(self.stage, user)}
        self._versions: dict[Value, int] = {}
        self._at = 0
        self.made = Made(returned=list(self.returned))

    def run(self, calls: Calls, loss: Callable[[], Any]) -> Made:
        try:
            with calls.handled_by(self):
                self.made.loss = loss()
        except Done:
            pass
        except NEEDS_NUMBERS as error:
            raise RuntimeError(
                f"stage {self.stage} of the pipeline runs code between blocks that reads numbers of what another stage has made "
                f"({error.func}): another rank has them; move that code into a block, or train without a pipeline axis"
            ) from error
        else:
            self._check_end()
        for value, version in self._versions.items():
            if self.made.exports[value]._version != version:
                raise RuntimeError(
                    f"what {self._path(value.call)!r} returns is written into afterwards, which it was not when the model was "
                    "looked at; clone it before"
                )
        return self.made

    def _check_end(self) -> None:
        if not self._is_end or self._at <= self._last:
            told = "and it was to make more" if self._at <= self._last else "past its last call: does it catch BaseException?"
            raise RuntimeError(
                f"the forward of stage {self.stage} has ended after {self._at} calls of modules, {told}; it calls other modules "
                "than when the model was looked at, and a pipeline needs the same ones every time"
            )
        if any(isinstance(each, FakeTensor) for each in pytree.tree_leaves(self.made.loss)):
            raise RuntimeError(
                "the loss is made of something that the last stage has not received; it was not so when the model was looked at"
            )

    def __call__(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        index = self._at
        self._at += 1
        if index > self._last and not self._is_end:
            raise Done  # again: code on the way has caught the first
        if index >= len(self.stages.stage_of) or path != self._path(index):
            known = self._path(index) if index < len(self.stages.stage_of) else "no module"
            raise RuntimeError(
                f"call {index} of a forward is of {path!r}, and was of {known!r} when the model was looked at: which modules are "
                "called depends on data or on chance; a pipeline needs the same ones every time: train without a pipeline axis"
            )
        with call_of_its_own(self.device, elsewhere=self.draws_elsewhere):
            own = self.stages.stage_of[index] == self.stage
            result = self._own(index, forward, args, kwargs) if own else self._of_another(index)
        if index == self._last and not self._is_end:
            raise Done
        return result

    def _path(self, call: int) -> str:
        return self.stages.flow.calls[call].path

    def _own(self, index: int, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        result = forward(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(result)
        if structure != self.structures[index]:
            raise RuntimeError(
                f"{self._path(index)!r} returns {structure}, and returned {self.structures[index]} when the model was looked at"
            )
        self.made.returned.append(tuple(Facts.of(each) if isinstance(each, Tensor) else each for each in leaves))
        for at, leaf in enumerate(leaves):
            value = Value(index, at)
            if value in self._exported:
                if isinstance(leaf, FakeTensor):
                    raise RuntimeError(f"{self._path(index)!r} was given something that stage {self.stage} has not received")
                kept = leaf.clone() if at in self.stages.flow.calls[index].changed else _whole(leaf)
                self.made.exports[value] = kept
                self._versions[value] = kept._version
        return result

    def _of_another(self, index: int) -> Any:
        changed = self.stages.flow.calls[index].changed
        leaves = []
        for at, leaf in enumerate(self.returned[index]):
            arrived = self.arrived.get(Value(index, at))
            if arrived is not None:
                leaves.append(arrived.clone() if at in changed else arrived)
            else:
                leaves.append(self.ghosts.of(leaf) if isinstance(leaf, Facts) else leaf)
        return pytree.tree_unflatten(leaves, self.structures[index])
