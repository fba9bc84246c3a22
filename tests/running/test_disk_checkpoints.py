"""Checkpoints of runs with state on the disk: the same bytes as any other's, in little memory."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing import disk
from anyfit.placing.disk import DiskError, DiskFile
from anyfit.placing.disk_state import DiskTier
from anyfit.running import files
from anyfit.values.plan import Placement
from tests.models import byte_batches
from tests.oracle import assert_bit_equal, train_plainly
from tests.placing.test_disk import OPTIMIZERS, ROWS, job_for
from tests.plans import (
    ALL_ON_DISK,
    AWAY,
    AWAY_ON_DISK,
    DISK_STREAMED,
    ON_DISK,
    hand_written,
    placed_of,
    random_delays,
    started,
)

TIERS = {
    "device": Placement(), "host": AWAY, "disk": AWAY_ON_DISK, "disk, weights here": ON_DISK,
    "disk, streamed": replace(DISK_STREAMED, speculates=True),
}  # fmt: skip


@pytest.mark.parametrize(
    ("optimizer", "precision", "wait"),
    [
        ("adamw", "bf16", True),
        pytest.param("sgd", "bf16", False, marks=pytest.mark.full),
        pytest.param("adamw", "fp32", False, marks=pytest.mark.full),
        pytest.param("adagrad", "bf16", True, marks=pytest.mark.full),
    ],
)
def test_a_run_goes_on_from_any_tier_in_any_other(tmp_path: Path, optimizer: str, precision: Any, wait: bool) -> None:
    job = job_for(optimizer=OPTIMIZERS[optimizer], precision=precision)
    batches = byte_batches(6, ROWS)
    plans = {name: hand_written(job, each, chunk_bytes=4096, slots=8) for name, each in TIERS.items()}
    whole = train_plainly(job, batches)[1]
    for name, plan in plans.items():
        with started(job, plan) as run:
            for batch in batches[:3]:
                run.step(batch)
            run.save(tmp_path / name, wait=wait)
            for batch in batches[3:]:
                run.step(batch)
            assert_bit_equal(run.state_dict(), whole)
    first = tmp_path / "device" / "data-00000.safetensors"
    ways = [(name, "disk") for name in plans] + [("disk", name) for name in plans if name != "disk"]
    for saved, name in ways:
        assert (tmp_path / saved / first.name).read_bytes() == first.read_bytes()
        with started(job, plans[name]) as run:
            run.step(batches[5])  # whose traces the checkpoint replaces
            run.resume(tmp_path / saved)
            for batch in batches[3:]:
                run.step(batch)
            assert_bit_equal(run.state_dict(), whole)


def test_a_save_holds_little_of_what_lies_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = job_for(precision="bf16")
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=4096, slots=8)) as run:
        run.step(byte_batches(1, ROWS)[0])
        placed, most = placed_of(run), [0]
        before = disk.DiskFile.some

        def counted(file: DiskFile, *given: Any) -> torch.Tensor:
            found = before(file, *given)
            most[0] = max(most[0], sum(each.nbytes for each in file._looked_at.values()) + found.nbytes)
            return found

        monkeypatch.setattr(disk.DiskFile, "some", counted)
        run.save(tmp_path / "saved")
        assert placed.disk is not None
        assert 0 < most[0] <= (disk.LOOKED_AT + 2) * placed.disk.file.block_bytes


class Held:
    """Reads of a save wait until they may go on; those of updates do not."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.may_read, before = threading.Event(), DiskFile.some

        def held(file: DiskFile, *given: Any) -> torch.Tensor:
            assert self.may_read.wait(60)
            return before(file, *given)

        monkeypatch.setattr(DiskFile, "some", held)


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> Iterator[Held]:
    found = Held(monkeypatch)
    yield found
    found.may_read.set()


@pytest.mark.parametrize("route", sorted(ALL_ON_DISK))
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("precision", ["bf16", pytest.param("fp32", marks=pytest.mark.full)])
def test_a_save_beside_the_steps_reads_what_was_there_when_it_began(
    tmp_path: Path, held: Held, route: str, speculates: bool, precision: Any
) -> None:
    """However many steps are made before it reads."""
    job, batches = job_for(precision=precision), byte_batches(8, ROWS)
    plan = hand_written(job, replace(ALL_ON_DISK[route], speculates=speculates), chunk_bytes=4096, slots=8)
    whole = train_plainly(job, batches)[1]
    with started(job, plan, random_delays(2)) as run:
        for batch in batches[:3]:
            run.step(batch)
        held.may_read.set()
        run.save(tmp_path / "waited for")
        held.may_read.clear()
        run.save(tmp_path / "beside", wait=False)
        for batch in batches[3:7]:
            run.step(batch)
        assert run.saving is not None
        assert run.saving.is_beside
        assert not run.saving.is_done
        file = tier_of(run).file
        assert file._late
        held.may_read.set()
        run.finish_saving()
        assert not file._held
        assert not file._late
        run.step(batches[7])
        assert_bit_equal(run.state_dict(), whole)
    name = "data-00000.safetensors"
    assert (tmp_path / "beside" / name).read_bytes() == (tmp_path / "waited for" / name).read_bytes()


def tier_of(run: anyfit.Run) -> DiskTier:
    found = placed_of(run).disk
    assert found is not None
    return found


def test_steps_wait_for_a_save_where_the_disk_has_no_room_for_what_it_holds(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, batches = job_for(precision="bf16"), byte_batches(6, ROWS)
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=4096, slots=8)) as run:
        least = placed_of(run).disk_bytes
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=4096, slots=8, disk_bytes=least)) as run:
        run.step(batches[0])
        run.save(tmp_path / "beside", wait=False)
        blocks, waits = tier_of(run).file._lock, threading.Event()
        wait = blocks.wait

        def told() -> bool:
            waits.set()
            return wait()

        monkeypatch.setattr(blocks, "wait", told)
        stepping = threading.Thread(target=lambda: [run.step(each) for each in batches[1:]])
        stepping.start()
        assert waits.wait(60)
        assert run.steps < len(batches)
        held.may_read.set()
        stepping.join()
        run.finish_saving()
        assert placed_of(run).disk_bytes == least
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_a_save_whose_reading_fails_lets_go_of_what_it_held_and_the_steps_go_on(
    tmp_path: Path, held: Held, monkeypatch: pytest.MonkeyPatch
) -> None:
    job, batches = job_for(precision="bf16"), byte_batches(4, ROWS)
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=4096, slots=8)) as run:
        for batch in batches[:2]:
            run.step(batch)
        run.save(tmp_path / "beside", wait=False)

        def fail(*_given: Any) -> torch.Tensor:
            raise DiskError("it broke")

        monkeypatch.setattr(DiskFile, "_look_at", fail)
        held.may_read.set()
        with pytest.raises(OSError, match=r"could not write a checkpoint to .*beside: it broke"):
            run.finish_saving()
        assert not tier_of(run).file._held
        assert not (tmp_path / "beside").exists()
        for batch in batches[2:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


def test_a_save_beside_the_steps_copies_weights_alone(tmp_path: Path) -> None:
    job = job_for(precision="bf16")
    taken = {}
    for name in ("host", "disk"):
        with started(job, hand_written(job, TIERS[name], chunk_bytes=4096, slots=8)) as run:
            run.step(byte_batches(1, ROWS)[0])
            before = placed_of(run).host_bytes
            run.save(tmp_path / name, wait=False)
            run.finish_saving()
            taken[name] = placed_of(run).host_bytes - before
            parameters = sum(state.own.elements for state in placed_of(run).state.chunks)
    assert taken["disk"] < 3 * parameters < 11 * parameters < taken["host"]


@pytest.mark.parametrize("wait", [True, False])
def test_a_save_that_would_not_fit_says_so_before_it_begins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, wait: bool) -> None:
    job, batches = job_for(precision="bf16"), byte_batches(3, ROWS)
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=4096, slots=8)) as run:
        run.step(batches[0])
        run.save(tmp_path / "saved")
        run.step(batches[1])
        monkeypatch.setattr(files, "free_bytes", lambda _folder: 2**16)
        with pytest.raises(OSError, match=r"saved: it takes .* KiB, and its disk has 64\.0 KiB left; .*is untouched in"):
            run.save(tmp_path / "saved", wait=wait)
        assert [each.name for each in tmp_path.iterdir()] == ["saved"]
        run.step(batches[2])
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])
    with started(job, hand_written(job, AWAY)) as run:
        run.resume(tmp_path / "saved")
        assert run.steps == 1
