"""The oracle: plain PyTorch, a loop as anybody writes it, and all that is left of the training to look at."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import anyfit

from .case import CASES


@dataclass(frozen=True)
class Result:
    losses: list[float]
    weights: dict[str, Tensor]  # parameters and buffers, as state_dict names them
    seen: dict[str, Any]  # what else lies in the modules: buffers that are not saved, numbers, flags
    drawn: tuple[Any, ...]  # the state of torch's, Python's and numpy's generators


def seed_everything(seed: int = 7) -> None:
    """As the first lines of a script do."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


@cache
def trained_plainly(name: str, sizes: tuple[int, ...] = ()) -> Result:
    """Plain training of a case; in micro-batches of these sizes, where there are any."""
    seed_everything()
    made = CASES[name].make()
    job = made.job
    torch.manual_seed(job.seed)
    model = job.build()
    before = {each: tensor.detach().clone() for each, tensor in model.named_parameters() if tensor_is_known(tensor)}
    losses = (made.plainly or plainly)(job, model, made.batches) if not sizes else plainly(job, model, made.batches, sizes)
    result = Result(losses, saved(model), seen(model), generators())
    assert all(loss == loss for loss in losses), f"{name}: plain PyTorch's own loss is not a number"
    assert any(each not in before or not torch.equal(before[each], tensor) for each, tensor in model.named_parameters()), (
        f"{name} trains nothing"
    )
    return result


def tensor_is_known(tensor: Tensor) -> bool:
    return not isinstance(tensor, nn.parameter.UninitializedParameter)


def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any], sizes: Sequence[int] = ()) -> list[float]:
    optimizer = job.optimizer(model)
    scheduler = job.scheduler(optimizer) if job.scheduler else None
    losses = []
    for batch in batches:
        parts = [batch] if not sizes else list(cut(batch, sizes))
        total = 0.0
        for part, rows in zip(parts, sizes or (job.batch_size,), strict=True):
            loss = job.loss(model, part)
            if isinstance(loss, tuple):
                loss = loss[0] / loss[1]
            if len(parts) > 1:
                loss = loss * (rows / job.batch_size)
            loss.backward()
            total += float(loss.detach())
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        model.zero_grad()
        losses.append(total)
    return losses


def cut(batch: Any, sizes: Sequence[int]) -> Iterator[Any]:
    """Consecutive rows of tensors, alone or in a mapping."""
    at = 0
    for size in sizes:
        rows = slice(at, at + size)
        yield {key: value[rows] for key, value in batch.items()} if isinstance(batch, Mapping) else batch[rows]
        at += size


def saved(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in model.state_dict().items() if isinstance(tensor, Tensor)}


def seen(model: nn.Module) -> dict[str, Any]:
    """Buffers of all kinds, and every number, flag and tensor that a module has as an attribute."""
    found: dict[str, Any] = {f"buffer {name}": tensor.detach().clone() for name, tensor in model.named_buffers()}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name.startswith("_torchdynamo"):  # an address
                continue
            if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                found[f"attribute {path}.{name}"] = value.detach().clone()
            elif isinstance(value, int | float | str) or (isinstance(value, list | tuple) and all_plain(value)):
                found[f"attribute {path}.{name}"] = value if not isinstance(value, list) else list(value)
    return found


def all_plain(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int | float | str) for value in values)


def generators() -> tuple[Any, ...]:
    return torch.get_rng_state(), random.getstate(), str(np.random.get_state())


def assert_equal(mine: Result, plain: Result, tolerance: float, *, same_draws: bool) -> None:
    """Losses, weights and whatever else is there to see, normwise."""
    assert_near("the losses", torch.tensor(mine.losses), torch.tensor(plain.losses), tolerance)
    assert mine.weights.keys() == plain.weights.keys()
    for name, expected in plain.weights.items():
        assert_near(name, mine.weights[name], expected, tolerance)
    for name, expected in plain.seen.items():
        assert name in mine.seen, f"{name} is gone"
        if isinstance(expected, Tensor):
            assert_near(name, mine.seen[name], expected, tolerance)
        elif isinstance(expected, float):
            assert_near(name, torch.tensor(mine.seen[name]), torch.tensor(expected), tolerance)
        else:
            assert mine.seen[name] == expected, f"{name} is {mine.seen[name]!r}, plain PyTorch has {expected!r}"
    if same_draws:
        for what, own, theirs in zip(("torch", "Python", "numpy"), mine.drawn, plain.drawn, strict=True):
            alike = torch.equal(own, theirs) if isinstance(own, Tensor) else own == theirs
            assert alike, f"{what}'s generator has drawn other numbers"


def assert_near(name: str, mine: Tensor, plain: Tensor, tolerance: float) -> None:
    assert mine.dtype == plain.dtype, f"{name}: {mine.dtype} instead of {plain.dtype}"
    assert mine.shape == plain.shape, f"{name}: shape {tuple(mine.shape)} instead of {tuple(plain.shape)}"
    wide = torch.complex128 if plain.is_complex() else torch.float64
    mine, plain = (each.to_dense() if each.layout != torch.strided else each for each in (mine, plain))
    difference, scale = float((mine.to(wide) - plain.to(wide)).norm()), float(plain.to(wide).norm())
    assert difference <= tolerance * max(scale, 1e-2), f"{name}: off by {difference:.1e}, of {scale:.1e}"
