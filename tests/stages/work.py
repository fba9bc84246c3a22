"""A pipeline without an engine: plain torch parameters, all stages on one rank, and the plain loop that it is held to."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.stages.calls import Calls, Forward, callable_modules
from anyfit.stages.dry_run import Dry, dry_run
from anyfit.stages.keys import call_of_its_own, drawing
from anyfit.stages.pipe import Pipe, Plumbing
from anyfit.stages.post import Post
from anyfit.tracing.stand_in import FakeMode
from anyfit.values.schedule import table
from anyfit.values.stages import Stages

from .families import Batch, Family
from .others import family_of
from .wires import Rendezvous, in_threads

CPU = torch.device("cpu")
MICRO_BATCHES = 4


def in_double(batch: Batch) -> Batch:
    return {key: each.double() if each.is_floating_point() else each for key, each in batch.items()}


def parts_of(batch: Batch, count: int = MICRO_BATCHES) -> list[Batch]:
    return [dict(zip(batch, rows, strict=True)) for rows in zip(*(each.chunk(count) for each in batch.values()), strict=True)]


def faked(model: nn.Module, mode: FakeMode) -> nn.Module:
    """A copy with fake parameters, tied ones still one, and fake buffers."""
    found = copy.deepcopy(model)
    made = {id(each): nn.Parameter(mode.from_tensor(each.data), each.requires_grad) for each in found.parameters()}
    for module in found.modules():
        for name, parameter in module._parameters.items():
            module._parameters[name] = None if parameter is None else made[id(parameter)]
        for name, buffer in module._buffers.items():
            module._buffers[name] = None if buffer is None else mode.from_tensor(buffer)
    return found


def looked_at(model: nn.Module, blocks: list[str], loss: Callable[[nn.Module], Any]) -> Dry:
    mode = FakeMode()
    fake = faked(model, mode)
    return dry_run(fake, callable_modules(fake, blocks), frozenset(blocks), lambda: loss(fake), mode)


def evenly(dry: Dry, count: int) -> list[tuple[int, int]]:
    blocks = len(dry.flow.blocks)
    ends = [stage * blocks // count for stage in range(count + 1)]
    return [(first, last - 1) for first, last in itertools.pairwise(ends)]


def drawn_by_key(model: nn.Module, blocks: list[str]) -> Calls:
    """Each call of a plain model draws from a stream of its own."""

    def keyed(_path: str, forward: Forward, args: Any, kwargs: Any) -> Any:
        with call_of_its_own(CPU, elsewhere=True):
            return forward(*args, **kwargs)

    calls = Calls(callable_modules(model, blocks))
    calls.install()
    calls.handler = keyed
    return calls


@dataclass(frozen=True)
class Pass:
    losses: list[float]
    gradients: dict[str, Tensor | None]

    @classmethod
    def of(cls, model: nn.Module, losses: list[float]) -> Pass:
        return cls(losses, {name: each.grad for name, each in model.named_parameters()})


def through_a_pipe(family: Family, model: nn.Module, blocks: list[str], stages: Stages, dry: Dry, batch: Batch) -> Pass:
    """Forward and backward of all micro-batches, all stages on one rank."""
    calls, losses, parts = Calls(callable_modules(model, blocks)), dict[int, Tensor](), parts_of(batch)
    plays = table(1, stages.count, MICRO_BATCHES)
    with ExitStack() as closing:
        calls.install()
        closing.callback(calls.remove)
        pipe = Pipe(0, 1, calls, Post(0, 1, Rendezvous().of(0)), CPU)
        pipe.begin(Plumbing(stages, dry))
        for action in plays[0]:
            part, at = parts[action.micro_batch], action.micro_batch
            if action.of == "forward":
                with drawing(CPU, 0, 1, 0, at, elsewhere=True):
                    made = pipe.forward(action.stage, at, lambda part=part: family.loss(model, part))  # type: ignore[misc]
                if action.stage == stages.count - 1:
                    losses[at] = made.loss[0] if isinstance(made.loss, tuple) else made.loss
            else:
                pipe.backward(action.stage, at, losses[at] if action.stage == stages.count - 1 else None)
        pipe.end()
    return Pass.of(model, [float(losses[at].detach()) for at in range(MICRO_BATCHES)])


def on_threads(family: Family, model: nn.Module, blocks: list[str], stages: Stages, dry: Dry, batch: Batch, ranks: int) -> Pass:
    """The same by so many ranks, each a thread with a model of its own that has no numbers for what its stages do not use.
    Gradients are those of all together."""
    plays, plumbing, wires = table(ranks, stages.count, MICRO_BATCHES), Plumbing(stages, dry), Rendezvous()
    holders = {name: {stage % ranks for stage in held} for name, held in stages.holders({}).items()}
    models = [copy.deepcopy(model) for _ in range(ranks)]
    losses: dict[int, Tensor] = {}

    def play(rank: int) -> None:
        mine = models[rank]
        for name, each in mine.named_parameters():
            if rank not in holders.get(name, ()):
                each.data.fill_(math.nan)
        calls, parts = Calls(callable_modules(mine, blocks)), parts_of(batch)
        calls.install()
        pipe = Pipe(rank, ranks, calls, Post(rank, ranks, wires.of(rank)), CPU)
        pipe.begin(plumbing)
        for action in plays[rank]:
            at = action.micro_batch
            if action.of == "forward":
                made = pipe.forward(action.stage, at, lambda at=at: family.loss(mine, parts[at]))  # type: ignore[misc]
                if action.stage == stages.count - 1:
                    losses[at] = made.loss
            else:
                pipe.backward(action.stage, at, losses[at] if action.stage == stages.count - 1 else None)
        pipe.end()

    wires.prepare(ranks)
    errors = in_threads([partial(play, rank) for rank in range(ranks)])
    if errors:
        raise errors[0]
    gradients: dict[str, Tensor | None] = {}
    for each in models:
        for name, parameter in each.named_parameters():
            there = gradients.get(name)
            gradients[name] = parameter.grad if there is None else there if parameter.grad is None else there + parameter.grad
    return Pass([float(losses[at].detach()) for at in range(MICRO_BATCHES)], gradients)


def plainly(family: Family, model: nn.Module, blocks: list[str], batch: Batch) -> Pass:
    calls, losses = drawn_by_key(model, blocks), []
    try:
        for at, part in enumerate(parts_of(batch)):
            with drawing(CPU, 0, 1, 0, at, elsewhere=True):
                loss = family.loss(model, part)
            loss = loss[0] if isinstance(loss, tuple) else loss
            loss.backward()
            losses.append(float(loss.detach()))
    finally:
        calls.remove()
    return Pass.of(model, losses)


def built(name: str) -> tuple[Family, nn.Module, list[str], Batch]:
    from anyfit.staging import blocks_of

    torch.manual_seed(0)
    family = family_of(name)
    model = family.model().double().train()
    return family, model, blocks_of(model), in_double(family.batch())
