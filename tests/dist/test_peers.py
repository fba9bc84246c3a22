"""Beside torch's own: the same model, data and number of processes give the same losses under DDP, FSDP2 and anyfit."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch.distributed as dist

from benchmarks import ranks as benchmark
from benchmarks import record

from .pool import pool_of
from .test_use import ways
from .work import Case, part_of, train

PEERS: dict[str, Any] = {
    "ddp": benchmark.ddp,
    "fsdp2": functools.partial(benchmark.fsdp2, reshard_after_forward=True),
    "fsdp2, weights kept": functools.partial(benchmark.fsdp2, reshard_after_forward=False),
}
LIKE = {"ddp": "whole", "fsdp2": "all divided", "fsdp2, weights kept": "gradients divided"}


def losses_of_peer(case: Case, name: str) -> list[float]:
    step = benchmark.peer(case.job, PEERS[name])
    return [step(part_of(batch, dist.get_rank(), dist.get_world_size())) for batch in case.batches()]


@pytest.mark.parametrize(("name", "ranks"), [("ddp", 2), ("fsdp2", 2), ("fsdp2", 3), ("fsdp2, weights kept", 2)])
def test_the_losses_are_those_of_the_peer(name: str, ranks: int) -> None:
    case = Case(clip_norm=0.5, placements=(ways(ranks)[LIKE[name]],))
    theirs = pool_of(ranks).run(losses_of_peer, case, name)
    ours = pool_of(ranks).run(train, case)
    for rank in range(ranks):
        assert ours[rank].losses == pytest.approx(theirs[rank], rel=1e-5)


@pytest.mark.parametrize("recorded", record.recordings("ranks"), ids=lambda each: each.name)
def test_a_recorded_step_takes_no_longer_than_the_peers(recorded: record.Recording) -> None:
    rows = recorded.rows
    assert {(row["ranks"], row["peer"]) for row in rows} == {(2, "DDP"), (2, "FSDP2"), (4, "DDP"), (4, "FSDP2")}
    assert all(row["ratio"] <= 1.05 for row in rows)
