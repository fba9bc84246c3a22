"""Updates that wait for the norm: the host makes weights first, and moments while it would have nothing to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing.lanes import Ended, Label
from anyfit.placing.updates.route import LESS, MORE
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, ON_HOST, RESIDENT, hand_written, placed_of, started

ROWS, STEPS = 4, 12
ONE_CHUNK = 2**26


def job_for(**options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3)} | options
    sample = byte_batches(1, ROWS)[0]
    return anyfit.Job(model=tiny_gpt, loss=next_byte_loss, sample=sample, batch_size=ROWS, clip_norm=0.1, **options)


def watch(run: anyfit.Run, called: Callable[[str], None]) -> None:
    """Of every update that the host begins, `called` is told the label before."""

    def mark(label: Label) -> Ended:
        called(str(label))
        return lambda _times: None

    placed_of(run).lanes.host.tracks[0].mark = mark


@pytest.mark.parametrize("placement", [ON_HOST, AWAY])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_moments_come_after_weights_and_are_plain_pytorchs(placement: Any, precision: Any) -> None:
    job, batches, labels = job_for(precision=precision), byte_batches(STEPS, ROWS), list[str]()
    with started(job, hand_written(job, placement, chunk_bytes=8192, slots=8)) as run:
        watch(run, labels.append)
        run.step(batches[0])
        placed_of(run).residency.settle_all()
        chunks = {label.split()[-1] for label in labels}
        assert len(chunks) > 3
        assert sorted(labels) == sorted(f"{what} chunk {chunk}" for what in ("update", "finish") for chunk in chunks)
        for chunk in chunks:
            assert labels.index(f"update chunk {chunk}") < labels.index(f"finish chunk {chunk}")
        for batch in batches[1:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_adams_own_weight_decay_is_not_parted() -> None:
    job = job_for(optimizer=lambda model: torch.optim.Adam(model.parameters(), lr=1e-3, weight_decay=0.1), precision="bf16")
    batches, labels = byte_batches(3, ROWS), list[str]()
    with started(job, hand_written(job, ON_HOST, chunk_bytes=8192)) as run:
        watch(run, labels.append)
        for batch in batches:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    assert {label.split()[0] for label in labels} == {"update"}


def test_fewer_chunks_are_parted_while_the_host_is_not_through_in_time() -> None:
    job, batches, gate = job_for(precision="bf16"), byte_batches(12, ROWS), threading.Event()
    with started(job, hand_written(job, ON_HOST, chunk_bytes=ONE_CHUNK)) as run:
        pace = placed_of(run).updates.pace
        watch(run, lambda label: (label.startswith("finish") and gate.wait()) or None)
        run.step(batches[0])  # parted, and its second part kept from its end
        assert pace.two_phase_share == 1.0
        opening = threading.Timer(0.5, gate.set)
        opening.start()
        run.step(batches[1])
        assert pace.two_phase_share == 1 - LESS
        for batch in batches[2:]:  # not parted, as the share of one chunk is none, until nothing has been late for long enough
            run.step(batch)
            placed_of(run).residency.settle_all()
        assert pace.two_phase_share == pytest.approx(min(1.0, 1 - LESS + 10 * MORE))
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
        opening.join()


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_what_is_saved_has_the_moments_of_its_step(tmp_path: Path, accumulation: int, wait: bool) -> None:
    job, batches = job_for(precision="bf16"), byte_batches(6, ROWS)
    with started(job, hand_written(job, ON_HOST, chunk_bytes=8192, accumulation=accumulation)) as run:
        watch(run, lambda label: time.sleep(0.01) if label.startswith("finish") else None)
        for batch in batches[:3]:
            run.step(batch)
        run.save(tmp_path / "3", wait=wait)
        assert wait or (run.saving is not None and run.saving.is_beside)
        run.step(batches[3])
        run.step(batches[4])
    with anyfit.start(job, hand_written(job, RESIDENT, accumulation=accumulation), resume=tmp_path / "3") as run:
        for batch in batches[3:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches, accumulation)[1])
