"""A disk that becomes slow is told of once, and again when it was well in between."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest

from anyfit.placing.disk_rate import WINDOW_BYTES, DiskRate, Slow
from tests.models import byte_batches
from tests.placing.test_disk import ROWS, job_for
from tests.plans import AWAY_ON_DISK, hand_written, placed_of, started

GIB = 2**30


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def moved(rate: DiskRate, clock: Clock, size: int, seconds: float) -> None:
    with rate.moving(size):
        clock.now += seconds
    clock.now += 1000  # when nobody waits for it


def test_it_is_told_once_until_it_was_well_again() -> None:
    clock = Clock()
    rate = DiskRate(clock)
    for seconds in (1, 1.5, 2, 2.9):
        moved(rate, clock, GIB, seconds)
        assert rate.news() is None
    moved(rate, clock, GIB, 4)
    assert rate.news() == Slow(GIB / 4, GIB)
    moved(rate, clock, GIB, 8)
    assert rate.news() is None
    moved(rate, clock, GIB, 1.2)
    moved(rate, clock, GIB, 5)
    assert rate.news() == Slow(GIB / 5, GIB)


def test_a_little_at_a_time_counts_together_and_a_stall_by_itself() -> None:
    clock = Clock()
    rate = DiskRate(clock)
    for _ in range(8):
        moved(rate, clock, WINDOW_BYTES // 4, 0.25)
    moved(rate, clock, 4096, 9)
    assert rate.news() is None
    moved(rate, clock, 4096, 2)
    found = rate.news()
    assert found is not None
    assert found.best == WINDOW_BYTES
    assert found.now < 1000


def test_what_moves_at_the_same_time_takes_its_time_once() -> None:
    clock = Clock()
    rate, both = DiskRate(clock), Barrier(3)

    def work() -> None:
        with rate.moving(WINDOW_BYTES // 2):
            both.wait(30)
            both.wait(30)

    with ThreadPoolExecutor(2) as pool:
        for seconds in (2, 8):
            working = [pool.submit(work) for _ in range(2)]
            both.wait(30)
            clock.now += seconds
            both.wait(30)
            for each in working:
                each.result()
    assert rate.news() == Slow(WINDOW_BYTES / 8, WINDOW_BYTES / 2)


def test_a_run_says_that_its_disk_has_become_slow(capsys: pytest.CaptureFixture[str]) -> None:
    job, batches, clock = job_for(), byte_batches(4, ROWS), Clock()
    with started(job, hand_written(job, AWAY_ON_DISK, slots=8)) as run:
        disk = placed_of(run).disk
        assert disk is not None
        run.step(batches[0])
        placed_of(run).settle()  # no read or write is under way when the clock is set
        disk.file.rate = DiskRate(clock)
        moved(disk.file.rate, clock, GIB, 0.5)
        moved(disk.file.rate, clock, GIB, 0.5)
        moved(disk.file.rate, clock, GIB, 20)
        capsys.readouterr()
        for batch in batches[1:]:
            run.step(batch)
    said = capsys.readouterr().err
    assert said.count("the disk with optimizer state has become slow: ") == 1
    assert " a second, where it did 2.00 GiB\n" in said
