"""Pipe: the stages of one rank of a pipeline, which play a table's passes one by one.

State is keyed by (stage, micro-batch): what a stage has given to others, and what it has received, as leaves of its own graph.
A backward begins with the gradients of what was given, from all stages that have it, and ends with those of what was received.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyfit.values.schedule import rank_of
from anyfit.values.stages import Stages, Value

from .calls import Calls, Forward
from .dry_run import Dry
from .ghosts import Ghosts, Made, Returned, StageRun
from .keys import call_of_its_own
from .post import Key, Parcel, Post, packed


@dataclass(frozen=True, eq=False)
class Plumbing:
    """How one kind of forward is cut: in training, or in evaluation."""

    stages: Stages
    dry: Dry

    def givers_of_gradients(self, stage: int) -> tuple[int, ...]:
        return tuple(user for user in self.stages.users(stage) if self.stages.sent(stage, user))


@dataclass(eq=False)
class Waiting:
    """A micro-batch between the forward and the backward of a stage."""

    exports: Mapping[Value, Tensor]
    arrived: Mapping[Value, Tensor]


class Pipe:
    def __init__(self, rank: int, ranks: int, calls: Calls, post: Post, device: torch.device) -> None:
        self._rank, self._ranks, self._calls, self._post, self._device = rank, ranks, calls, post, device
        self._ghosts = Ghosts(device)
        self._waiting: dict[tuple[int, int], Waiting] = {}

    def begin(self, plumbing: Plumbing) -> None:
        """Passes of this kind of forward."""
        self._plumbing = plumbing

    def forward(self, stage: int, micro_batch: int, loss: Callable[[], Any]) -> Made:
        """Runs the user's loss as far as this stage goes; what the last stage makes of it comes back."""
        stages, returned = self._plumbing.stages, list[Returned]()
        arrived: dict[Value, Tensor] = {}
        for source in stages.sources(stage):
            parcel = self._post.take(Key("forward", source, stage, micro_batch))
            told, needs = parcel.word
            if source == stage - 1:
                returned = told
            for value, tensor, needs_grad in zip(stages.sent(source, stage), parcel.tensors, needs, strict=True):
                assert tensor is not None
                mine = tensor.to(self._device)
                arrived[value] = mine.requires_grad_(needs_grad and torch.is_grad_enabled())
        dry = self._plumbing.dry
        run = StageRun(stages, stage, dry.structures, dry.draws_elsewhere, self._ghosts, self._device, arrived, returned)
        made = run.run(self._calls, loss)
        for user in stages.users(stage):
            values = [made.exports[each] for each in stages.sent(stage, user)]
            word = (made.returned if user == stage + 1 else None, [each.requires_grad for each in values])
            self._give("forward", stage, user, micro_batch, values, word)
        if torch.is_grad_enabled():
            self._waiting[stage, micro_batch] = Waiting(made.exports, arrived)
        return made

    def backward(self, stage: int, micro_batch: int, total: Tensor | None) -> None:
        """From the gradients of what others have of this stage, and from the loss, on the last one."""
        stages, waiting = self._plumbing.stages, self._waiting.pop((stage, micro_batch))
        roots: list[Tensor] = [] if total is None else [total]
        given: list[Tensor | None] = [None] * len(roots)
        summed: dict[Value, Tensor] = {}
        for user in self._plumbing.givers_of_gradients(stage):
            parcel = self._post.take(Key("backward", user, stage, micro_batch))
            for value, tensor in zip(stages.sent(stage, user), parcel.tensors, strict=True):
                if tensor is not None:
                    mine = tensor.to(self._device)
                    summed[value] = summed[value] + mine if value in summed else mine
        for value, gradient in summed.items():
            if waiting.exports[value].requires_grad:
                roots.append(waiting.exports[value])
                given.append(gradient)
        if roots:
            with self._calls.handled_by(self._again):
                torch.autograd.backward(roots, given)
        for source in stages.sources(stage):
            values = stages.sent(source, stage)
            if values:
                gradients = [waiting.arrived[each].grad for each in values]
                self._give("backward", stage, source, micro_batch, gradients, None)

    def _again(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call that a checkpoint of the user's own makes once more."""
        stages = self._plumbing.stages
        called = {stage for stage, call in zip(stages.stage_of, stages.flow.calls, strict=True) if call.path == path}
        if not any(rank_of(each, self._ranks) == self._rank for each in called):
            raise RuntimeError(
                f"a checkpoint around {path!r} runs it again on a rank of the pipeline that has not run it; use "
                "checkpoint(use_reentrant=False)"
            )
        with call_of_its_own(self._device, elsewhere=self._plumbing.dry.draws_elsewhere):
            return forward(*args, **kwargs)

    def _give(self, of: Any, source: int, to: int, micro_batch: int, tensors: Sequence[Tensor | None], word: Any) -> None:
        rank = rank_of(to, self._ranks)
        sent = tuple(None if each is None else each.detach() for each in tensors)
        self._post.give(Parcel(Key(of, source, to, micro_batch), sent if rank == self._rank else packed(sent), word), rank)

    @property
    def waits(self) -> str:
        """What the computation waits for, if anything."""
        return self._post.waits

    def end(self) -> None:
        self._post.finish()

    def forget(self) -> None:
        """Forwards whose backward will not come."""
        self._waiting.clear()

    def fail(self, error: BaseException) -> None:
        self.forget()
        self._post.fail(error)
