"""A training script as a user would write one, which fails, dies or stalls where it is told to: what tests of whole processes
start. Each rank writes what it found into the folder."""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import anyfit
from tests.machines import small_machine

ROWS = 8
LAG_SECONDS = 2.0  # before a rank dies between two steps: the others have come to the next


class Model(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 16)) for _ in range(3))
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + self.dropout(block(x))
        out: Tensor = self.head(x)
        return out


WITHIN: list[str] = []  # what the second micro-batch of the step under way comes to


def end_within() -> None:
    if WITHIN and len(WITHIN) == 1:
        WITHIN.append("the first is through")
    elif WITHIN[:1] == ["kill"]:
        os.kill(os.getpid(), signal.SIGKILL)
    elif WITHIN[:1] == ["stall"]:
        time.sleep(3600)
    elif WITHIN:
        raise LookupError("a mistake of mine")


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    end_within()
    if batch.shape[1] > 17:
        raise LookupError("a mistake of mine")
    return nn.functional.cross_entropy(model(batch[:, :16]), batch[:, 16].long())


def data(count: int) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    labels = torch.randint(0, 4, (count, 1), generator=generator)
    return torch.cat([torch.randn(count, 16, generator=generator) + labels, labels], 1)


def job_for(rows: int = ROWS, dropout: float = 0.0, clip_norm: float | None = None) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: Model(dropout),
        loss=loss_of,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        sample=data(rows),
        batch_size=rows,
        precision="fp32",
        clip_norm=clip_norm,
    )


def digest(weights: dict[str, Tensor]) -> str:
    whole = torch.cat([weights[name].flatten().double() for name in sorted(weights)])
    return hashlib.sha256(whole.numpy().tobytes()).hexdigest()[:16]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--samples", type=int, default=80)
    parser.add_argument("--batch", type=int, default=ROWS)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--limit", help="of device memory")
    parser.add_argument("--steps-of-rank", type=int, nargs="*", default=[], help="each rank's own batches; else run.loader's")
    parser.add_argument("--fail", nargs=2, type=int, help="rank and step that end in an error")
    parser.add_argument("--kill", nargs=2, type=int, help="rank and step that end without a word")
    parser.add_argument("--stall", nargs=2, type=int, help="rank and step that do not end")
    parser.add_argument("--catch", nargs=2, type=int, help="rank and step whose loss raises an error that the script catches")
    parser.add_argument(
        "--within", nargs=3, help="kill, stall or fail, and rank and step, in whose second micro-batch it happens"
    )
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--save", action="store_true", help="after every step")
    parser.add_argument("--save-alone", action="store_true", help="on rank 0, in the middle")
    parser.add_argument("--hang-seconds", type=float)
    parser.add_argument("--end", choices=["with", "exit"], help="by a with block, or without a word to the run")
    parser.add_argument("--slow", type=float, default=0.0, help="seconds a step at least")
    given = parser.parse_args()

    machine = small_machine()
    if given.limit:
        machine = machine.with_limits(device_memory=given.limit)
    rank = int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))
    job = job_for(given.batch, dropout=given.dropout)
    run = anyfit.start(job, given.plan, machine, hang_seconds=given.hang_seconds)

    def train() -> None:
        if given.steps_of_rank:
            share = given.batch // run.ranks.count
            whole = data(given.samples).view(-1, run.ranks.count, share, 17)
            batches = [each[rank] for each in whole[: given.steps_of_rank[rank]]]
        else:
            batches = run.loader(list(data(given.samples)))
        for batch in batches:
            if given.fail == [rank, run.steps]:
                raise LookupError("a mistake of mine")
            if given.kill == [rank, run.steps]:
                time.sleep(LAG_SECONDS)
                os.kill(os.getpid(), signal.SIGKILL)
            if given.stall == [rank, run.steps]:
                time.sleep(3600)
            if given.catch == [rank, run.steps]:
                given.catch = None
                with contextlib.suppress(LookupError):
                    run.step(torch.cat([batch, batch], 1))
                continue
            if given.within and list(map(int, given.within[1:])) == [rank, run.steps]:
                WITHIN.append(given.within[0])
            run.step(batch)
            time.sleep(given.slow)
            if given.save:
                run.save(given.folder / str(run.steps))
            if given.save_alone and rank == 0 and run.steps == 3:
                run.save(given.folder / "alone")

    if given.end == "with":
        with run:
            train()
        return
    train()
    if given.end == "exit":
        return
    run.await_others()
    found = run.state_dict()
    drawn = float(torch.rand(1))
    said = {"steps": run.steps, "weights": digest(found), "drawn": drawn, "ranks": run.ranks.count}
    (given.folder / f"found{rank}.json").write_text(json.dumps(said))


if __name__ == "__main__":
    main()
