"""What the ranks of a pool do through anyfit.start: all of it can be sent to them, and sent back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from anyfit.values.plan import Placement, Plan
from tests.machines import small_machine
from tests.plans import hand_written

from .script import ROWS, data, job_for


def plan_for(job: anyfit.Job, placement: Placement | None, ranks: int) -> Plan | None:
    return None if placement is None else hand_written(job, placement, chunk_bytes=2048, ranks=ranks)


def start(placement: Placement | None, ranks: int, resume: Path | None = None, **options: Any) -> anyfit.Run:
    job = job_for(**options)
    return anyfit.start(job, plan_for(job, placement, ranks), None if placement else small_machine(), resume)


def share_of(batch: Tensor, run: anyfit.Run) -> Tensor:
    return batch.view(run.ranks.count, -1, batch.shape[1])[run.ranks.index]


def decisions(**options: Any) -> dict[str, Any]:
    """What a start without a plan comes to."""
    machine = small_machine()
    if "limit" in options:
        machine = machine.with_limits(device_memory=options.pop("limit"))
    run = anyfit.start(job_for(**options), machine=machine)
    with run:
        losses = [float(run.step(batch)) for batch in run.loader(list(data(40)))]
        return {"plan": run.plan.to_json(), "losses": losses, "weights": run.state_dict(), "drawn": float(torch.rand(1))}


def refusal(what: str, rank_that_differs: int) -> str:
    """The error of a start whose ranks do not have the same."""
    import torch.distributed as dist

    is_other = dist.get_rank() == rank_that_differs
    job, machine, plan = job_for(), small_machine(), None
    if what == "seed":
        job = replace(job, seed=int(is_other))
    elif what == "plan":
        plan = hand_written(job, Placement(), chunk_bytes=4096 if is_other else 2048, ranks=dist.get_world_size())
    elif what == "model":
        job = replace(job, model=lambda: nn.Sequential(nn.Linear(16, 4 + is_other))) if is_other else job
    elif what == "memory":
        machine = machine.with_limits(device_memory=1024)
    elif what == "batch":
        job = job_for(7)
    try:
        anyfit.start(job, plan, None if plan else machine)
    except (ValueError, anyfit.NoPlan) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def uneven(placement: Placement, batches: list[int], weighted: bool, evaluates: bool) -> tuple[list[float], dict[str, Tensor]]:
    """Each rank has so many batches of its own."""
    ranks = len(batches)
    job = job_for(clip_norm=1.0)
    if weighted:
        job = replace(job, loss=weighted_loss)
    with anyfit.start(job, plan_for(job, placement, ranks)) as run:
        whole = data(ROWS * max(batches)).split(ROWS)
        losses = [float(run.step(share_of(batch, run))) for batch in whole[: batches[run.ranks.index]]]
        if evaluates and run.steps == max(batches):
            run.evaluate(data(3))
            run.state_dict()
        run.await_others()
        return losses, run.state_dict()


def weighted_loss(model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
    """Labels of 0 do not count."""
    labels = batch[:, 16].long()
    each = nn.functional.cross_entropy(model(batch[:, :16]), labels, reduction="none")
    counts = (labels > 0).float()
    return (each * counts).sum(), counts.sum()


def evaluated(placement: Placement, sizes: list[int], weighted: bool) -> float:
    """The mean over the batches of all ranks, of so many samples."""
    job = job_for()
    if weighted:
        job = replace(job, loss=weighted_loss)
    with anyfit.start(job, plan_for(job, placement, len(sizes))) as run:
        mine = data(sum(sizes)).split(sizes)[run.ranks.index]
        return float(run.evaluate(mine))


def saved(placement: Placement | None, ranks: int, folder: Path, first: int, last: int, resume: Path | None) -> dict[str, Any]:
    """Trains from one step to another, saves, and says where that led."""
    with start(placement, ranks, resume, dropout=0.1) as run:
        assert run.steps == first
        for batch in run.loader(list(data(80))):
            run.step(batch)
            if run.steps == last:
                break
        run.save(folder)
        return {"weights": run.state_dict(), "drawn": float(torch.rand(1))}


def saved_in_vain(placement: Placement, folder: Path) -> str:
    """Rank 0 cannot write; the ranks go on all the same."""
    with start(placement, 2) as run:
        try:
            run.save(folder)
        except OSError as error:
            said = str(error)
        run.step(share_of(data(ROWS), run))
        return said
