"""Ranks whose state lies on disks that fail: all hear of it before the same step, and the run goes on from what they save."""

from __future__ import annotations

import errno
import os
import random
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.placing import disk
from anyfit.placing.disk import DiskError
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.oracle import assert_bit_equal
from tests.plans import AWAY_ON_DISK, DISK_STREAMED, ON_DISK

from .oracle import train_as_ranks
from .pool import pool_of
from .work import Case, Trained, part_of, started, told


def sharded(placement: Placement, *, weights: bool = False) -> Placement:
    gradients = 2 if placement.gradients == "host" else 1
    return replace(placement, optimizer_shards=2, gradient_shards=gradients, weight_shards=2 if weights else 1)


PLACEMENTS = {
    "host": sharded(ON_DISK),
    "away": sharded(AWAY_ON_DISK, weights=True),
    "away, speculates": replace(sharded(AWAY_ON_DISK, weights=True), speculates=True),
    "streamed": sharded(DISK_STREAMED),
    "streamed, speculates": replace(sharded(DISK_STREAMED), speculates=True),
}


class Faults:
    """The system's calls on one rank: some are slow, or move less than they were asked to, and from one on all writes fail."""

    def __init__(self, seed: int, fails_from: int | None) -> None:
        self._chance, self._fails_from, self._writes, self._lock = random.Random(seed), fails_from, 0, threading.Lock()
        self.have_failed = False

    def __enter__(self) -> Faults:
        disk._read_at, disk._write_at = self._read, self._write
        return self

    def __exit__(self, *_error: object) -> None:
        disk._read_at, disk._write_at = os.preadv, os.pwritev

    def _some(self, views: Sequence[memoryview]) -> list[memoryview]:
        with self._lock:
            what = self._chance.random()
        if what < 0.1:
            time.sleep(0.002)
        return [views[0][:PAGE_BYTES]] if what > 0.8 else list(views)

    def _read(self, file: int, views: Sequence[memoryview], at: int) -> int:
        return os.preadv(file, self._some(views), at)

    def _write(self, file: int, views: Sequence[memoryview], at: int) -> int:
        with self._lock:
            self._writes += 1
            fails = self._fails_from is not None and self._writes >= self._fails_from
        if fails:
            self.have_failed = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return os.pwritev(file, self._some(views), at)


def train_with_faults(
    case: Case, seed: int, fails_on: int | None, fails_from: int, folder: str
) -> tuple[Trained, list[str], int]:
    """Also the errors, and after how many steps it was saved, at the first of them; what was saved is resumed and trained on."""
    errors, saved = list[str](), -1
    with started(case) as run:
        fails = fails_from if run.ranks.index == fails_on else None
        losses: list[float] = []
        with Faults(seed + run.ranks.index, fails):
            for batch in case.batches():
                part = part_of(batch, run.ranks.index, run.ranks.count)
                try:
                    losses.append(float(run.step(part)))
                except DiskError as error:
                    errors.append(str(error))
                    saved = run.steps
                    break
            if saved >= 0:
                run.save(folder)
                left = [path for path in Path(tempfile.gettempdir()).glob(".anyfit-*") if path.is_file()]
                assert left == []
            else:
                return told(run, losses, [], 0), errors, saved
    on_host = replace(case.placements[0], optimizer="host")  # which adds gradients up in the same order
    with started(replace(case, placements=(on_host,))) as run:
        run.resume(folder)
        for batch in case.batches()[run.steps :]:
            losses.append(float(run.step(part_of(batch, run.ranks.index, run.ranks.count))))
        return told(run, losses, [], 0), errors, saved


@hypothesis.settings(max_examples=40 if FULL else 3, phases=[hypothesis.Phase.reuse, hypothesis.Phase.generate])
@given(
    seed=st.integers(0, 2**32),
    name=st.sampled_from(sorted(PLACEMENTS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    optimizer=st.sampled_from(["adamw", "sgd"]),
    accumulation=st.sampled_from([1, 2]),
    fails_on=st.sampled_from([None, 0, 1]),
    fails_from=st.integers(1, 60),
)
def test_a_disk_that_takes_no_more_writes_is_told_of_by_all_ranks_and_their_state_is_saved_elsewhere(
    seed: int, name: str, precision: Any, optimizer: str, accumulation: int, fails_on: int | None, fails_from: int
) -> None:
    case = Case(
        optimizer=optimizer, precision=precision, clip_norm=1e6, placements=(PLACEMENTS[name],), slots=16,
        accumulation=accumulation, delays=seed % 100,
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        found = pool_of(2).run(train_with_faults, case, seed, fails_on, fails_from, f"{folder}/saved")
    losses, weights = train_as_ranks(case, 2)
    for trained, errors, saved in found:
        assert trained.losses == pytest.approx(losses, rel=1e-6)
        assert_bit_equal(trained.weights, {each: weights[each] for each in trained.weights})
        assert saved == found[0][2]
        assert len(errors) == (saved >= 0)
    if found[0][2] >= 0:
        said = [errors[0] for _, errors, _ in found]
        assert fails_on is not None
        assert f"rank {fails_on}: optimizer state of chunk" in said[fails_on]
        assert "No space left on device" in said[fails_on]
        assert f"optimizer state of rank {fails_on} could not be written to its disk" in said[1 - fails_on]
        assert all("it is in host memory now, run.save keeps its state" in each for each in said)
