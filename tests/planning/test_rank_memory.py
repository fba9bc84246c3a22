"""What one of many ranks holds is what the planner said. The engine places it under a process group that exchanges nothing."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing._internal.distributed.fake_pg import FakeStore

import anyfit
from anyfit import Machine
from anyfit.costing import cost
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.placing.tiers import HostSlabs, LiveBytes
from anyfit.placing.updates import stepper
from anyfit.planning.candidate import Candidate
from anyfit.planning.fastest import among
from anyfit.planning.footprint import footprint_of
from anyfit.profiling import traced
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import Division, Exchange
from tests.conftest import FULL
from tests.machines import small_machine
from tests.models import PlainLlama, Tangled, byte_batches, next_byte_loss, tiny_gpt
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written

NOTHING = Exchange(0.0, 0.0)
MODELS: dict[str, Any] = {"gpt": tiny_gpt, "tangled": lambda: Tangled(64)}
RANK = 3


@contextmanager
def ranks_of(count: int) -> Iterator[Ranks]:
    """One of so many, the others of which are not there."""
    dist.init_process_group("fake", rank=min(RANK, count - 1), world_size=count, store=FakeStore())
    try:
        yield Ranks.of_process_group()
    finally:
        dist.destroy_process_group()


def job_for(model: Any, precision: Any, batch_size: int, sample: torch.Tensor) -> anyfit.Job:
    return anyfit.Job(
        model=model,
        loss=next_byte_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=sample,
        batch_size=batch_size,
        precision=precision,
    )


def divide(ranks: int, shards: int, level: int) -> Division:
    """As ZeRO of that level does."""
    return Division(ranks, shards, level > 1, level > 2, NOTHING, NOTHING, 0.0, False)


@settings(max_examples=80 if FULL else 12)
@given(st.data())
def test_pools_of_a_rank_are_those_of_the_engine_to_the_byte(data: st.DataObject) -> None:
    ranks = data.draw(st.sampled_from([2, 4, 8, 512]), "ranks")
    shards = data.draw(st.sampled_from(sorted({1, 2, min(8, ranks), ranks} if ranks < 512 else {1, 8, ranks})), "shards")
    division = divide(ranks, shards, data.draw(st.integers(1, 3), "level") if shards > 1 else 1)
    accumulation = data.draw(st.integers(1, 2), "accumulation")
    job = job_for(
        MODELS[data.draw(st.sampled_from(sorted(MODELS)), "model")],
        data.draw(st.sampled_from(["fp32", "bf16"]), "precision"),
        ranks * accumulation,
        byte_batches(1, 2)[0],
    )
    profile = cost(
        traced(replace(job, micro_batch=1), "cpu", ranks), small_machine(), job.batch_size, (min(ranks, 8), max(ranks // 8, 1))
    )
    places = st.sampled_from([RESIDENT, RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED])
    placements = []
    for chunk in profile.chunks:
        placement = data.draw(places, "placement")
        if not chunk.trainable:
            placement = data.draw(st.sampled_from([RESIDENT, AWAY_STREAMED]), "frozen")
        elif placement.optimizer == "host":
            placement = replace(placement, speculates=data.draw(st.booleans(), "speculates"))
        placements.append(placement)
    slots = data.draw(st.integers(4, 6), "slots")
    each = profile.sharded(division).passes[0] if profile.sharded(division).passes else profile.passes[0]
    candidate = Candidate(
        each, accumulation, ("keep",) * len(each.blocks), profile.chunks, tuple(placements), slots, 2, division
    )  # fmt: skip
    footprint = footprint_of(profile, candidate)
    plan = hand_written(
        job,
        *(among(placement, division) for placement in placements),
        chunk_bytes=profile.offload_chunk_bytes,
        slots=slots,
        accumulation=accumulation,
        ranks=ranks,
    )
    with ranks_of(ranks) as there:
        placed = place(job, plan, job.build(), torch.device("cpu"), ranks=there)
        try:
            assert placed.device_bytes == footprint.pool_bytes
            assert footprint.host_bytes <= placed.host_bytes <= footprint.host_bytes + PAGE_BYTES * 10 * len(placements)
        finally:
            placed.close()


# ---------------------------------------------------------------------- a large model on many ranks

RANKS, LENGTH = 512, 1024
LLAMA_70B = {"width": 8192, "heads": 64, "shared": 8, "inner": 28672, "vocabulary": 128256}
PLANS: dict[str, tuple[Division, Placement, Activations, int]] = {  # and micro-batches a step
    "all divided over all": (divide(RANKS, 512, 3), RESIDENT, "keep", 1),
    "all divided over all, made again": (divide(RANKS, 512, 3), RESIDENT, "recompute", 2),
    "the optimizer divided over all": (divide(RANKS, 512, 1), RESIDENT, "recompute", 1),
    "the same in every node": (divide(RANKS, 8, 3), RESIDENT, "keep", 1),
    "all divided over all, the optimizer on the host": (divide(RANKS, 512, 3), ON_HOST, "keep", 1),
}


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is counted, on the host too, and nothing is computed with it."""

    def zeros(slabs: HostSlabs, elements: int, dtype: torch.dtype, *, crosses: bool) -> torch.Tensor:
        slabs.bytes += -(-elements * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        return torch.zeros(elements, dtype=dtype, device="meta")

    monkeypatch.setattr(HostSlabs, "zeros", zeros)
    monkeypatch.setattr(stepper, "adamw", lambda *_args, **_kwargs: None)


@pytest.mark.usefixtures("counted")
@pytest.mark.parametrize("name", PLANS if FULL else list(PLANS)[1:2])
def test_the_peak_of_one_of_512_ranks_is_forecast_within_three_percent(name: str) -> None:
    division, placement, choice, accumulation = PLANS[name]
    build = functools.partial(PlainLlama, layers=80 if FULL else 6, **LLAMA_70B)
    job = job_for(build, "bf16", RANKS * accumulation, torch.zeros(1, LENGTH + 1, dtype=torch.long))
    machine = Machine.load("h100-node").with_devices(nodes=RANKS // 8)
    profile = cost(traced(replace(job, micro_batch=1), "cuda", RANKS), machine, job.batch_size, machine.rank_grid())
    each, placements = profile.passes[0], (placement,) * len(profile.chunks)
    activations = tuple(choice if block.name and choice in block.choices else "keep" for block in each.blocks)
    slots = 9
    footprint = footprint_of(profile, Candidate(each, accumulation, activations, profile.chunks, placements, slots, 4, division))
    plan = hand_written(
        job,
        *(among(each, division) for each in placements),
        chunk_bytes=profile.offload_chunk_bytes,
        slots=slots,
        prefetch=4,
        accumulation=accumulation,
        activations={block.name: choice for block, choice in zip(each.blocks, activations, strict=True) if choice != "keep"},
        ranks=RANKS,
        host_bytes=2**50,
    )
    with ranks_of(RANKS) as ranks:
        with torch.device("meta"):
            model = job.build()
        placed = place(job, plan, model, torch.device("meta"), ranks=ranks)
        try:
            pools = placed.device_bytes
            live = peak_of_a_step(job, placed, accumulation)
        finally:
            placed.close()
    assert pools == footprint.pool_bytes - profile.workspace_bytes
    assert footprint.host_bytes <= placed.host_bytes <= footprint.host_bytes + PAGE_BYTES * 10 * len(placements)
    off = (footprint.device_bytes - profile.workspace_bytes) / (pools + live) - 1
    print(f"{name}: {(pools + live) / 2**30:.2f} GiB, forecast {off:+.2%}")
    assert abs(off) < 0.03


def peak_of_a_step(job: anyfit.Job, placed: Any, accumulation: int) -> int:
    """Bytes on top of what is held between steps."""
    with LiveBytes() as live:
        placed.residency.begin()
        for micro_batch in range(accumulation):
            placed.gradients.last = micro_batch == accumulation - 1
            batch = job.prepare(torch.zeros(1, LENGTH + 1, dtype=torch.long), placed.device)
            with placed.watching():
                total, _ = job.evaluate(placed.model, batch)
            total.backward()
            del total
            placed.gradients.end_backward()
        placed.updates.apply(None)
        placed.residency.settle_all()
    return live.peak_bytes
