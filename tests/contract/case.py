"""A hostile job: how to make it, and what is to become of it by column. Each function of `jobs` is one."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import anyfit

# What a job is tried under: every case in the first five, but those that it leaves out; in the others where it can matter.
ALWAYS = ("ample", "tight", "recomputed", "replayed", "host", "cut")
COLUMNS = (*ALWAYS, "both", "selective", "resumed", "ranks")
STEPS = 10
ROWS = 4


@dataclass(frozen=True)
class Refused:
    """Not trained: an error before the first step is through, whose message matches."""

    message: str  # a regular expression


@dataclass(frozen=True)
class Trial:
    """A job with its data, made anew for every run of it: models, closures and generators of its own."""

    job: anyfit.Job
    batches: Sequence[Any]
    train: Callable[[anyfit.Run, Sequence[Any]], list[float]] | None = None  # in place of run.step on each batch
    plainly: Callable[[anyfit.Job, nn.Module, Sequence[Any]], list[float]] | None = None  # the oracle's loop, where it is special


@dataclass(frozen=True)
class Case:
    name: str
    kind: str
    make: Callable[[], Trial]
    expected: Mapping[str, Refused] = field(default_factory=dict)  # by column; equal where nothing is said
    columns: tuple[str, ...] = ALWAYS
    tolerance_when_cut: float = 1e-5  # normwise, of losses and of every tensor
    draws: bool = False  # random numbers of torch, of which micro-batches take others than the whole batch
    blocks: tuple[str, ...] | None = None  # recomputed by a plan written by hand; the model's children, where not said

    def is_refused(self, column: str) -> bool:
        return column in self.expected


CASES: dict[str, Case] = {}


def hostile(
    *,
    also: Sequence[str] = (),
    without: Sequence[str] = (),
    tolerance_when_cut: float = 1e-5,
    draws: bool = False,
    blocks: Sequence[str] | None = None,
    **expected: Refused,
) -> Callable[[Callable[[], Trial]], Callable[[], Trial]]:
    """Puts a function that makes a trial into the catalogue, by its name."""

    def add(make: Callable[[], Trial]) -> Callable[[], Trial]:
        name = make.__name__.strip("_").replace("_", " ")
        assert name not in CASES, name
        left_out = {*without, *(("replayed",) if "recomputed" in without else ())}
        columns = tuple(column for column in COLUMNS if (column in ALWAYS or column in also) and column not in left_out)
        if "ample" in expected and "replayed" in columns:
            expected.setdefault("replayed", expected["ample"])  # which changes where ops are launched, and nothing else
        assert set(expected) <= set(columns), name
        CASES[name] = Case(
            name=name,
            kind=make.__module__.rpartition(".")[2].replace("_", " "),
            make=make,
            expected=expected,
            columns=columns,
            tolerance_when_cut=tolerance_when_cut,
            draws=draws,
            blocks=None if blocks is None else tuple(blocks),
        )
        return make

    return add


def catalogue() -> dict[str, Case]:
    """All cases, by name."""
    from . import jobs

    for module in sorted(pkgutil.iter_modules(jobs.__path__), key=lambda each: each.name):
        importlib.import_module(f"{jobs.__name__}.{module.name}")
    return CASES


# ---------------------------------------------------------------- what many cases share


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(trainable(model), lr=0.05, momentum=0.9)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(trainable(model), lr=1e-2)


def trainable(model: nn.Module) -> list[nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def squared(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return (model(batch["x"]) - batch["y"]).square().mean()


def classified(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


def trial(
    model: nn.Module | Callable[[], nn.Module],
    loss: Callable[[Any, Any], Any],
    batches: Sequence[Any],
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd,
    *,
    rows: int = ROWS,
    train: Callable[[anyfit.Run, Sequence[Any]], list[float]] | None = None,
    plainly: Callable[[anyfit.Job, nn.Module, Sequence[Any]], list[float]] | None = None,
    **options: Any,
) -> Trial:
    options = {"precision": "fp32", "sample": batches[0], "batch_size": rows} | options
    return Trial(anyfit.Job(model=model, loss=loss, optimizer=optimizer, **options), batches, train, plainly)


def vectors(wide: int = 8, out: int | None = None, rows: int = ROWS, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Regression: x, and y that can be learnt from it."""
    generator = torch.Generator().manual_seed(11)
    to = torch.randn(wide, wide if out is None else out, generator=generator) / wide**0.5
    inputs = [torch.randn(rows, wide, generator=generator) for _ in range(steps)]
    return [{"x": each, "y": torch.tanh(each @ to)} for each in inputs]


def labelled(wide: int = 8, classes: int = 5, rows: int = ROWS, steps: int = STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(12)
    return [
        {
            "x": torch.randn(rows, wide, generator=generator),
            "y": torch.randint(0, classes, (rows,), generator=generator),
        }
        for _ in range(steps)
    ]


def images(channels: int = 3, size: int = 8, classes: int = 5, rows: int = ROWS, steps: int = STEPS) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(13)
    return [
        {
            "x": torch.randn(rows, channels, size, size, generator=generator),
            "y": torch.randint(0, classes, (rows,), generator=generator),
        }
        for _ in range(steps)
    ]


def tokens(vocabulary: int = 50, length: int = 9, rows: int = ROWS, steps: int = STEPS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(14)
    return [torch.randint(3, vocabulary, (rows, length), generator=generator) for _ in range(steps)]


class Residual(nn.Module):
    """A block as most models have them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


class Chain(nn.Module):
    """A stem, blocks and a head: `block` makes each block."""

    def __init__(
        self, block: Callable[[int], nn.Module] = Residual, width: int = 16, wide: int = 8, out: int = 8, count: int = 3
    ) -> None:
        super().__init__()
        self.stem = nn.Linear(wide, width)
        self.blocks = nn.ModuleList(block(width) for _ in range(count))
        self.head = nn.Linear(width, out)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)
