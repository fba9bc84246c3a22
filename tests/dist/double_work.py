"""What the ranks of a pipeline do in double precision, which a Job does not have: the stages alone, over real processes and gloo,
with plain torch parameters and torch's own optimizer."""

from __future__ import annotations

import copy
import math
import random
import time
from collections.abc import Collection
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from anyfit.stages.calls import Calls, callable_modules
from anyfit.stages.keys import drawing
from anyfit.stages.pipe import Pipe, Plumbing
from anyfit.stages.post import Post
from anyfit.stages.wires import GroupWire
from anyfit.values.schedule import table
from tests.stages.families import Batch, Family
from tests.stages.work import CPU, MICRO_BATCHES, built, drawn_by_key, evenly, in_double, looked_at, parts_of

STEPS = 5
CLIP = 0.1
LENGTHS = (12, 7, 12, 5, 9)  # of the steps' sequences
Trained = tuple[list[float], list[float], dict[str, Tensor]]  # losses, norms, weights


def batches_of(family: Family) -> list[Batch]:
    found = []
    for step, length in enumerate(LENGTHS):
        torch.manual_seed(100 + step)
        batch = in_double(family.batch())
        text = [key for key, each in batch.items() if not each.is_floating_point() and each.dim() > 1]
        found.append(batch | {key: batch[key][:, :length].contiguous() for key in text})
    return found


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-3)


def mean_of(loss: Any) -> Tensor:
    found: Tensor = loss[0] / loss[1] if isinstance(loss, tuple) else loss
    return found / MICRO_BATCHES


def plainly_in_double(name: str) -> Trained:
    family, model, blocks, _ = built(name)
    optimizer, calls = optimizer_of(model), drawn_by_key(model, blocks)
    losses, norms = [], []
    try:
        for step, batch in enumerate(batches_of(family)):
            total = 0.0
            for at, part in enumerate(parts_of(batch)):
                with drawing(CPU, 0, step, 0, at, elsewhere=True):
                    loss = mean_of(family.loss(model, part))
                loss.backward()
                total += float(loss.detach())
            losses.append(total)
            norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        calls.remove()
    return losses, norms, {key: each.detach() for key, each in model.named_parameters()}


def trained_in_double(name: str, chunks: int = 1, delays: int | None = None) -> Trained:
    """Each rank's: losses on the last, the norm on all, the weights that it holds. What it does not hold is not a number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    chance = random.Random(None if delays is None else 10 * delays + rank)
    family, model, blocks, _ = built(name)
    batches = batches_of(family)
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batches[0])[0]))
    stages = dry.flow.cut(evenly(dry, ranks * chunks))
    names = {id(each): key for key, each in model.named_parameters()}
    modules = callable_modules(model, blocks)
    called = {path: frozenset(names[id(each)] for each in module.parameters()) for path, module in modules.items()}
    holders = {key: sorted({stage % ranks for stage in held}) for key, held in stages.holders(called).items()}
    mine = {key: each for key, each in model.named_parameters() if rank in holders.get(key, [0])}
    for key, each in model.named_parameters():
        if key not in mine:
            each.data = torch.full_like(each, math.nan)
    optimizer, calls = optimizer_of(model), Calls(modules)
    calls.install()
    group = dist.new_group()
    pipe = Pipe(rank, ranks, calls, Post(rank, ranks, GroupWire(range(ranks), group)), CPU)
    plays, losses, norms = table(ranks, stages.count, MICRO_BATCHES)[rank], [], []
    for step, batch in enumerate(batches):
        pipe.begin(Plumbing(stages, dry))
        parts, totals, total = parts_of(batch), dict[int, Tensor](), 0.0
        for action in plays:
            if delays is not None:
                time.sleep(chance.random() * 0.005)
            at = action.micro_batch
            if action.of == "forward":
                with drawing(CPU, 0, step, 0, at, elsewhere=True):
                    made = pipe.forward(action.stage, at, lambda part=parts[at]: family.loss(model, part))  # type: ignore[misc]
                if action.stage == stages.count - 1:
                    totals[at] = mean_of(made.loss)
                    total += float(totals[at].detach())
            else:
                pipe.backward(action.stage, at, totals.pop(at, None) if action.stage == stages.count - 1 else None)
        pipe.end()
        losses.append(total)
        norms.append(_clipped(mine, holders, rank, group))
        optimizer.step()
        optimizer.zero_grad()
    calls.remove()
    dist.destroy_process_group(group)
    return losses, norms, {key: each.detach() for key, each in mine.items()}


def _clipped(mine: dict[str, nn.Parameter], holders: dict[str, list[int]], rank: int, group: Any) -> float:
    """Adds gradients up over those that hold a parameter, and clips by the norm of all, each counted once."""
    shared = sorted(key for key, held in holders.items() if len(held) > 1)
    sums: list[dict[str, Tensor]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(sums, _gradients(mine, shared), group=group)
    for key in set(shared) & set(mine):
        there = [each[key] for each in sums if key in each]
        mine[key].grad = torch.stack(there).sum(0) if there else None
    own = [key for key in mine if holders.get(key, [0])[0] == rank]
    squares = sum((each.square().sum() for each in _gradients(mine, own).values()), torch.zeros((), dtype=torch.float64))
    dist.all_reduce(squares, group=group)
    norm = squares.sqrt()
    torch.nn.utils.clip_grads_with_norm_(list(mine.values()), CLIP, norm)
    return float(norm)


def _gradients(parameters: dict[str, nn.Parameter], names: Collection[str]) -> dict[str, Tensor]:
    return {key: each.grad for key in names if key in parameters and (each := parameters[key]).grad is not None}


def weights_of(found: list[Trained]) -> dict[str, Tensor]:
    """Of all ranks together; those that hold one have the same."""
    joined: dict[str, Tensor] = {}
    for _, _, held in found:
        for key, each in held.items():
            torch.testing.assert_close(each, joined.setdefault(key, each), rtol=0, atol=0, msg=key)
    return copy.copy(joined)
