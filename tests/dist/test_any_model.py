"""Any model means any: those that no rule was written for train over a tensor axis as one process, or are refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.values.cut_figures import LayoutName
from tests.machines import small_machine

from .any_model import NAMES, ROWS, any_model
from .pool import pool_of

STEPS = 3


def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    found: Any = model(**batch)
    first: Tensor = found["loss"] if isinstance(found, dict) and "loss" in found else found[0]
    if not first.dim():
        return first
    return (first * torch.linspace(-1, 1, first.shape[-1])).square().mean()


def job_of(name: str, *, drops: bool) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: any_model(name, drops=drops)[0],
        loss=loss_of,
        optimizer=lambda model: torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=3e-3, eps=1e-2),
        sample=any_model(name, drops=drops)[1],
        batch_size=ROWS,
        precision="fp32",
        clip_norm=1.0,
    )


def trained(name: str, drops: bool, layout: LayoutName | None) -> dict[str, Any] | str:
    """What comes of it, or what a user is told instead."""
    job = job_of(name, drops=drops)
    try:
        with anyfit.start(job, machine=small_machine(), mesh={"tensor": 2}, layout=layout) as run:
            losses = []
            for step in range(STEPS):
                torch.manual_seed(step)
                losses.append(float(run.step(job.sample)))
            return {"losses": losses, "weights": run.state_dict(), "cut": len(run.plan.cut), "tables": len(run.plan.tables)}
    except ValueError as error:
        return str(error)


def plainly(name: str, drops: bool) -> dict[str, Any]:
    job = job_of(name, drops=drops)
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer, losses = job.optimizer(model), []
    for step in range(STEPS):
        torch.manual_seed(step)
        loss = job.loss(model, job.sample)
        assert isinstance(loss, Tensor)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return {"losses": losses, "weights": {name: each.detach() for name, each in model.named_parameters()}}


REFUSED = {
    "albert": "the model has no chain of blocks that are built alike",
    "penalised": "a gradient is taken with create_graph=True through a block that is cut over the tensor axis",
}
LAYOUTS: list[LayoutName | None] = [None, "megatron", "sequence"]
FAST = [("mixer", True, None), ("distilbert", False, "megatron"), ("penalised", False, None)]
CASES = [(name, drops, layout) for name in NAMES for drops in (False, True) for layout in LAYOUTS]


@pytest.mark.parametrize(
    ("name", "drops", "layout"),
    [*FAST, *(pytest.param(*each, marks=pytest.mark.full) for each in CASES if each not in FAST)],
)
def test_a_model_that_nobody_prepared_trains_as_one_process_or_is_refused(
    name: str, drops: bool, layout: LayoutName | None
) -> None:
    found, wanted = pool_of(2).run(trained, name, drops, layout), plainly(name, drops)
    for each in found:
        if isinstance(each, str):
            said = (
                REFUSED.get(name)
                or "what enters it cannot be cut as Megatron with sequence parallelism does: 2 does not divide it"
            )
            assert said in each
            assert layout == "sequence" or name in REFUSED
            continue
        assert each["cut"] > 0
        assert each["losses"] == pytest.approx(wanted["losses"], rel=1e-5)
        for key, expected in wanted["weights"].items():  # those without a gradient but for rounding, such as keys' biases, are 0
            worst, largest = (float(x.abs().max()) for x in (each["weights"][key] - expected, expected))
            assert worst <= 1e-5 * max(largest, 1e-3), f"{key}: {worst:.2e} of {largest:.2e}"
