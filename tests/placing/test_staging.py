"""Models whose stages cannot be placed on the ranks of a pipeline, by name."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.placing.ranks import Ranks
from anyfit.placing.staging import staged_by
from anyfit.staging import look
from tests.plans import hand_written


class Again(nn.Module):
    """Goes through its blocks twice."""

    def __init__(self, *, with_norm: bool = False) -> None:
        super().__init__()
        last = nn.BatchNorm1d(8) if with_norm else nn.Tanh()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), last if at else nn.Tanh()) for at in range(2))
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        found: Tensor = self.head(x)
        return found


class Compiled(Again):
    def __init__(self) -> None:
        super().__init__()
        self.compile(backend="eager")


def staged(model: Callable[[], nn.Module]) -> dict[str, tuple[int, ...]]:
    job = anyfit.Job(
        model=model,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.randn(4, 8),
        batch_size=4,
        precision="fp32",
    )
    plan = hand_written(job, ranks=2, pipeline=2, stages=((0, 1), (2, 3)), accumulation=2)
    return dict(staged_by(plan, job.build(), Ranks(0, 2), look(job, plan)).places)


def test_a_module_that_two_stages_call_is_on_both_of_their_places() -> None:
    places = staged(Again)
    assert places["blocks.1.0.weight"] == (0, 1)
    assert places["head.weight"] == (1,)


def test_running_statistics_that_two_places_would_keep_are_refused() -> None:
    with pytest.raises(ValueError, match=r"'blocks\.1' is called on places 0, 1 of the pipeline and writes into its buffer"):
        staged(lambda: Again(with_norm=True))


def test_a_compiled_module_around_the_blocks_is_refused() -> None:
    with pytest.raises(ValueError, match="the model is compiled, and a pipeline is cut between the modules inside of it"):
        staged(Compiled)


def test_stages_that_are_not_the_calls_of_the_model_are_refused_before_anything_is_placed() -> None:
    job = anyfit.Job(
        model=Again,
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.randn(4, 8),
        batch_size=4,
        precision="fp32",
    )
    with pytest.raises(ValueError, match=r"the stages end with block call 2, and a forward makes 4"):
        look(job, hand_written(job, ranks=2, pipeline=2, stages=((0, 1), (2, 2))))
