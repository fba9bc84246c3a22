"""What the ranks of a pool do through anyfit.start: all of it can be sent to them, and sent back."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from anyfit.running.loader import Loader
from anyfit.values.plan import Placement, Plan
from tests.machines import small_machine
from tests.plans import hand_written

from .script import ROWS, Model, data, job_for, loss_of


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


def apart(model: nn.Module) -> torch.optim.Optimizer:
    *most, bias = model.parameters()
    return torch.optim.AdamW([{"params": most}, {"params": [bias]}], lr=3e-3)


OTHERS: dict[str, dict[str, Any]] = {  # what a rank may have otherwise than the rest
    "lr in group 0": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=2e-3)},
    "weight_decay in group 0": {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.5)},
    "optimizer": {"optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=3e-3)},
    "group of head.bias": {"optimizer": apart},
    "scheduler": {"scheduler": lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 3)},
    "structure of the model": {"model": lambda: Model(0.5)},
    "options that were agreed to": {"agree": ["mean-of-micro-batches"]},
    "code of Job(loss=)": {"loss": lambda model, batch: loss_of(model, batch) * 2},
}


def trained_apart(what: str, rank: int) -> dict[str, Any]:
    """One rank does something else from the fourth step on; all hear of it, mend it, and go on."""
    job = job_for()
    with anyfit.start(job, plan_for(job, Placement(), 2)) as run:
        is_other, said, dataset = run.ranks.index == rank, [], list(data(80))
        loader = iter(run.loader(dataset, epochs=2 if what == "epochs" and is_other else 1))
        for step in range(6):
            batch = next(loader)
            if is_other and step == 3:
                if what == "lr":
                    run.optimizer.param_groups[0]["lr"] = 0.1
                elif what == "batch":
                    next(loader)
            try:
                run.step(batch)
            except ValueError as error:
                said.append(str(error))
                run.optimizer.param_groups[0]["lr"] = 3e-3
                if what != "lr":
                    break
        return {"said": said, "weights": run.state_dict(), "steps": run.steps}


def drawn() -> list[list[Tensor]]:
    """The batches that a loader gives a rank alone."""
    return [list(batch) for batch in Loader(list(data(80)), ROWS, 0, 1, shuffle=True)]


def without_weight(empty: int, ranks: int) -> dict[str, Any]:
    """Trains on five batches, of which one has no weight at all."""
    job = replace(job_for(clip_norm=1.0), loss=weighted_loss)
    with anyfit.start(job, plan_for(job, Placement(optimizer_shards=ranks), ranks)) as run:
        losses = []
        for index, batch in enumerate(data(ROWS * 5).split(ROWS)):
            if index == empty:
                batch[:, 16] = 0
            losses.append(float(run.step(share_of(batch, run))))
        return {"losses": losses, "skipped": run.skipped, "steps": run.steps, "weights": run.state_dict()}


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
    elif is_other:
        job = replace(job, **OTHERS[what])
    try:
        anyfit.start(job, plan, None if plan else machine, mesh={"tensor": 1} if what == "batch" else None)
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
