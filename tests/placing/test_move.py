"""A placed model is lifted and placed again as another plan says: the same bits, in the same memory, or nothing has changed."""

from __future__ import annotations

import gc
import weakref
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import anyfit
from anyfit.demo import GPT
from anyfit.placing import place
from anyfit.placing.tiers import HostSlabs
from anyfit.running.run import Run
from anyfit.values.plan import Plan
from tests.models import Normalised, Scaled, Tangled, byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, random_delays, started

ROWS = 4
PLACEMENTS = [
    RESIDENT,
    STREAMED,
    ON_HOST,
    AWAY,
    AWAY_STREAMED,
    replace(AWAY, speculates=True),
    replace(STREAMED, speculates=True),
]
OPTIMIZERS: dict[str, Any] = {
    "AdamW": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "amsgrad": lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, amsgrad=True),
    "momentum": lambda model: torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9),
    "Adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
}


def job_for(model: Any = tiny_gpt, optimizer: str = "AdamW", **options: Any) -> anyfit.Job:
    options = {"precision": "bf16", "clip_norm": 0.5} | options
    sample = byte_batches(1, ROWS)[0]
    return anyfit.Job(model, next_byte_loss, OPTIMIZERS[optimizer], sample=sample, batch_size=ROWS, **options)


def moved(run: Run, plan: Plan) -> None:
    engine = run._engine
    carried, delay = engine.placed.lift(), engine.placed.delay
    del engine.placed
    engine.placed = place(run.job, plan, run.model, engine.device, delay, carried)
    engine.plan = plan


@st.composite
def plans(draw: st.DrawFn, job: anyfit.Job, accumulation: int) -> Plan:
    chunk_bytes = draw(st.sampled_from([1, 4096, 16384]))
    count = len(started_chunks(job, chunk_bytes))
    chunks = draw(st.lists(st.sampled_from(PLACEMENTS), min_size=count, max_size=count))
    return hand_written(job, *chunks, chunk_bytes=chunk_bytes, slots=16, accumulation=accumulation)


def started_chunks(job: anyfit.Job, chunk_bytes: int) -> list[Any]:
    with started(job, hand_written(job, chunk_bytes=chunk_bytes)) as run:
        return placed_of(run).state.chunks


@given(
    data=st.data(),
    model=st.sampled_from([tiny_gpt, Tangled, Normalised]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    accumulation=st.sampled_from([1, 2]),
    after=st.integers(0, 3),
)
def test_training_goes_on_as_if_nothing_had_been_moved(
    data: st.DataObject, model: Any, optimizer: str, precision: Any, accumulation: int, after: int
) -> None:
    job = job_for(model, optimizer, precision=precision)
    first, second = (data.draw(plans(job, accumulation)) for _ in range(2))
    batches = byte_batches(6, ROWS)
    with started(job, first, random_delays(after)) as run:
        objects = run.model, run.optimizer, [id(parameter) for parameter in run.model.parameters()]
        for index, batch in enumerate(batches):
            if index == after:
                moved(run, second)
            run.step(batch)
        assert objects == (run.model, run.optimizer, [id(parameter) for parameter in run.model.parameters()])
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches, accumulation)[1])


def test_moments_of_a_parameter_that_is_one_number_are_moved() -> None:
    job, batches = job_for(Scaled, precision="fp32"), byte_batches(5, ROWS)
    with started(job, hand_written(job, AWAY, slots=16)) as run:
        for index, batch in enumerate(batches):
            if index == 2:
                moved(run, hand_written(job, ON_HOST, slots=16))
            run.step(batch)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches, 1)[1])


@given(data=st.data(), second=st.sampled_from([AWAY, ON_HOST, STREAMED]))
def test_a_move_that_fails_leaves_the_state_for_the_next(data: st.DataObject, second: Any) -> None:
    """Host memory ends somewhere in it, and the model is put back as it was."""
    job = job_for()
    batches = byte_batches(4, ROWS)
    plan = hand_written(job, second, slots=8)
    with started(job, plan) as run:
        needed = placed_of(run).host_bytes
    short = replace(plan, limit_bytes={**plan.limit_bytes, "host": data.draw(st.integers(0, needed - 1))})
    with started(job, hand_written(job)) as run:
        run.step(batches[0])
        run.step(batches[1])
        engine, carried, device, before = run._engine, placed_of(run).lift(), placed_of(run).device, run.plan
        del engine.placed
        with pytest.raises(MemoryError, match="host memory"):
            place(job, short, run.model, device, None, carried)
        engine.placed = place(job, before, run.model, device, None, carried)
        for batch in batches[2:]:
            run.step(batch)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_a_move_holds_little_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every buffer of the host is its own here, so that what is held of old and new ones can be counted."""
    held: dict[int, int] = {}
    most = [0]

    def zeros(_slabs: HostSlabs, elements: int, dtype: torch.dtype, *, crosses: bool) -> Tensor:
        flat = torch.zeros(elements, dtype=dtype)
        storage: Any = flat.untyped_storage()
        held[id(storage)] = flat.nbytes
        weakref.finalize(storage, held.pop, id(storage))
        most[0] = max(most[0], sum(held.values()))
        return flat

    monkeypatch.setattr(HostSlabs, "zeros", zeros)
    job = job_for(lambda: GPT(width=64, layers=6, heads=2, length=16))
    with started(job, hand_written(job, AWAY, slots=8, chunk_bytes=8192)) as run:
        run.step(byte_batches(1, ROWS)[0])
        placed_of(run).residency.settle_all()
        gc.collect()
        before, most[0] = sum(held.values()), 0
        moved(run, hand_written(job, AWAY, slots=8, chunk_bytes=16384))
        run.step(byte_batches(1, ROWS)[0])
        assert before < most[0] < 1.2 * before


@pytest.mark.parametrize("is_kept", [False, True], ids=["nobody", "somebody"])
def test_a_step_after_a_move_waits_for_updates_where_it_needs_them(is_kept: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """And at its begin only where somebody keeps a view of the weights, which nobody could hold back."""
    job, batches = job_for(clip_norm=None), byte_batches(4, ROWS)
    plan = hand_written(job, ON_HOST, chunk_bytes=4096)
    with started(job, plan) as run:
        run.step(batches[0])
        moved(run, plan)
        run.step(batches[1])
        residency = placed_of(run).residency
        pending: list[tuple[int, int]] = []  # chunks whose update is not waited for, before and after
        settle_kept = residency.settle_kept

        def count() -> int:
            return sum(chunk.update.fresh is not None for chunk in placed_of(run).state.chunks)

        def counted() -> None:
            before = count()
            settle_kept()
            pending.append((before, count()))

        monkeypatch.setattr(residency, "settle_kept", counted)
        with torch.no_grad():
            view = next(run.model.parameters())[:1] if is_kept else None
        run.step(batches[2])
        run.step(batches[3])
    before, after = pending[-1]
    assert before > 1
    assert after == before - (view is not None)
