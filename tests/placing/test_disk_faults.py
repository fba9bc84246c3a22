"""A disk that fails: the step says what, where and why, and nothing is lost that was there."""

from __future__ import annotations

import errno
import functools
import os
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import anyfit
from anyfit.placing import disk
from anyfit.placing.disk import DiskError
from anyfit.placing.place import place
from anyfit.running.run import Run
from anyfit.values.disk_folder import DiskFolder
from anyfit.values.graph import PAGE_BYTES
from tests.conftest import FULL
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import PlainBf16, PlainFp32, assert_bit_equal
from tests.plans import ALL_ON_DISK, AWAY, AWAY_ON_DISK, hand_written, placed_of, random_delays, started

ROWS, STEPS = 4, 5
HARMLESS = ("short", "slow")
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
}


def job_for(optimizer: str, precision: Any, clip_norm: float = 0.5) -> anyfit.Job:
    return anyfit.Job(
        model=tiny_gpt, loss=next_byte_loss, optimizer=OPTIMIZERS[optimizer], sample=byte_batches(1, ROWS)[0], batch_size=ROWS,
        clip_norm=clip_norm, precision=precision,
    )  # fmt: skip


@functools.cache
def plain(optimizer: str, precision: str, clip_norm: float = 0.5) -> list[dict[str, Tensor]]:
    """Weights of plain PyTorch, after so many steps."""
    job = job_for(optimizer, precision, clip_norm)
    torch.manual_seed(job.seed)
    trainer = (PlainFp32 if precision == "fp32" else PlainBf16)(job, job.build())
    found = [trainer.weights()]
    for batch in byte_batches(STEPS, ROWS):
        trainer.step(batch, 1)
        found.append({name: each.clone() for name, each in trainer.weights().items()})
    return found


class Failing:
    """The system's calls, of which the nth fails: that one alone, or with every other of its way after it."""

    def __init__(self, at: int, kind: str, *, goes_on: bool) -> None:
        self._at, self._kind, self.goes_on = at, kind, goes_on
        self._calls, self._lock, self.way = 0, threading.Lock(), ""
        self.has_failed = False

    def __enter__(self) -> Failing:
        disk._read_at, disk._write_at = functools.partial(self._call, "read"), functools.partial(self._call, "write")
        return self

    def __exit__(self, *_error: object) -> None:
        disk._read_at, disk._write_at = os.preadv, os.pwritev

    def _fails(self, way: str) -> bool:
        if way == "read" and self._kind in ("ENOSPC", "lost write"):
            return False
        if way == "write" and self._kind == "bit":
            return False
        with self._lock:
            self._calls += 1
            if self._calls == self._at:
                self.has_failed, self.way = True, way
                return True
            return self.goes_on and self._calls > self._at and way == self.way

    def _call(self, way: str, file: int, views: Sequence[memoryview], at: int) -> int:
        call = os.preadv if way == "read" else os.pwritev
        if not self._fails(way):
            return call(file, views, at)
        if self._kind in ("EIO", "ENOSPC"):
            code = getattr(errno, self._kind)
            raise OSError(code, os.strerror(code))
        if self._kind == "ends":
            return 0
        if self._kind == "slow":
            time.sleep(0.01)
            return call(file, views, at)
        if self._kind == "short":
            return call(file, [views[0][:PAGE_BYTES]], at)
        if self._kind == "lost write":  # said to be done
            return len(views[0])
        moved = call(file, views, at)
        views[0][len(views[0]) // 3] ^= 16
        return moved


def checked(run: Run, optimizer: str, precision: str, clip_norm: float = 0.5) -> None:
    """The state is that of the completed steps."""
    assert_bit_equal(run.state_dict(), plain(optimizer, precision, clip_norm)[run.steps])


def stepped(run: Run, batch: Tensor, says: str) -> bool:
    """Whether the step was made, and not broken off with an error of the disk, which says this."""
    try:
        run.step(batch)
    except DiskError as error:
        if says not in str(error):
            raise
        return False
    return True


def save(run: Run, folder: Path) -> None:
    """Of each chunk that could not be read, that is told once."""
    for _ in placed_of(run).state.chunks:
        try:
            return run.save(folder)
        except DiskError as error:
            if "could not be read from" not in str(error):
                raise
    return run.save(folder)


def start(job: anyfit.Job, plan: anyfit.Plan, folder: Path, delay: int) -> Run:
    torch.manual_seed(job.seed)
    run = Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), random_delays(delay), disk=DiskFolder(folder)))
    placed_of(run).updates.pace._most_clipped = 1.0  # what is to speculate does, however many steps clip
    return run


@hypothesis.settings(max_examples=240 if FULL else 8)
@given(
    at=st.integers(1, 150),
    kind=st.sampled_from(["EIO", "ENOSPC", "ends", "short", "bit", "slow"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    route=st.sampled_from(sorted(ALL_ON_DISK)),
    speculates=st.booleans(),
    clip_norm=st.sampled_from([0.5, 1e6]),
)
def test_a_fault_is_told_once_and_training_goes_on_as_if_there_had_been_none(
    at: int, kind: str, optimizer: str, precision: str, route: str, speculates: bool, clip_norm: float
) -> None:
    job, batches, errors = job_for(optimizer, precision, clip_norm), byte_batches(STEPS, ROWS), 0
    plan = hand_written(job, replace(ALL_ON_DISK[route], speculates=speculates), chunk_bytes=8192, slots=8)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with start(job, plan, folder, at) as run, Failing(at, kind, goes_on=False) as failing:
            for batch in batches:
                if not stepped(run, batch, f"anyfit's file in {folder}: "):
                    errors += 1
                    checked(run, optimizer, precision, clip_norm)
                    run.step(batch)
            try:
                weights = run.state_dict()
            except DiskError:  # of the last step's own update
                errors += 1
                weights = run.state_dict()
            assert list(folder.iterdir()) == []
        if speculates and clip_norm == 0.5:  # what was speculated for nothing may have failed
            assert errors <= (failing.has_failed and kind not in HARMLESS)
        else:
            assert errors == (failing.has_failed and kind not in HARMLESS)
    assert_bit_equal(weights, plain(optimizer, precision, clip_norm)[STEPS])


@hypothesis.settings(max_examples=40 if FULL else 3)
@given(
    at=st.integers(1, 80),
    kind=st.sampled_from(["EIO", "ENOSPC", "ends"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    route=st.sampled_from(sorted(ALL_ON_DISK)),
    speculates=st.booleans(),
)
def test_a_run_whose_disk_takes_no_more_writes_is_saved_elsewhere_and_resumed(
    at: int, kind: str, optimizer: str, precision: str, route: str, speculates: bool
) -> None:
    job, batches = job_for(optimizer, precision), byte_batches(STEPS, ROWS)
    plan = hand_written(job, replace(ALL_ON_DISK[route], speculates=speculates), chunk_bytes=8192, slots=8)
    with tempfile.TemporaryDirectory() as name:
        folder, saved = Path(name) / "disk", Path(name) / "saved"
        with start(job, plan, folder, at) as run, Failing(at, kind, goes_on=True) as failing:
            errors = 0
            try:
                for batch in batches:
                    run.step(batch)
                run.save(saved)
            except DiskError:
                errors += 1
                if failing.way == "read":  # what is to be saved cannot be read
                    with pytest.raises(DiskError, match="could not be read from"):
                        run.save(saved)
                    assert not saved.exists()
                    failing.goes_on = False
                save(run, saved)
            assert errors == failing.has_failed
            steps = run.steps
            failing.goes_on = False  # and what is in memory goes to the disk again
            for batch in batches[steps:]:
                run.step(batch)
            checked(run, optimizer, precision)
            assert list(folder.iterdir()) == []
        with started(job, hand_written(job, AWAY, chunk_bytes=8192, slots=8)) as run:
            run.resume(saved)
            assert run.steps == steps
            checked(run, optimizer, precision)
            for batch in batches[steps:]:
                run.step(batch)
            checked(run, optimizer, precision)


@hypothesis.settings(max_examples=80 if FULL else 4)
@given(
    at=st.integers(40, 150),
    kind=st.sampled_from(["EIO", "ENOSPC", "ends", "short", "bit", "slow"]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    route=st.sampled_from(sorted(ALL_ON_DISK)),
    speculates=st.booleans(),
    saved_after=st.integers(1, STEPS - 1),
)
def test_a_fault_while_a_save_is_under_way_leaves_a_whole_checkpoint_or_none(
    at: int, kind: str, optimizer: str, precision: str, route: str, speculates: bool, saved_after: int
) -> None:
    """Whether it meets the save or an update."""
    job, batches, errors = job_for(optimizer, precision, 1e6), byte_batches(STEPS, ROWS), list[str]()
    plan = hand_written(job, replace(ALL_ON_DISK[route], speculates=speculates), chunk_bytes=8192, slots=8)
    with tempfile.TemporaryDirectory() as name:
        folder, saved = Path(name) / "disk", Path(name) / "saved"
        with start(job, plan, folder, at) as run, Failing(at, kind, goes_on=False) as failing:

            def made(call: Any) -> Any:
                """Once more, where an error was told."""
                try:
                    return call()
                except OSError as error:
                    errors.append(str(error))
                    return call()

            for batch in batches:
                made(functools.partial(run.step, batch))
                if run.steps == saved_after:
                    made(functools.partial(run.save, saved, wait=False))
                    assert run.saving is not None
                    assert run.saving.is_beside
            made(run.finish_saving)
            weights = made(run.state_dict)
            assert len(errors) == (failing.has_failed and kind not in HARMLESS)
            assert all(f"anyfit's file in {folder}: " in each for each in errors)
            assert list(folder.iterdir()) == []
        assert_bit_equal(weights, plain(optimizer, precision, 1e6)[STEPS])
        assert {each.name for each in Path(name).iterdir()} <= {"disk", "saved"}
        if any("could not write a checkpoint" in each for each in errors):
            assert not saved.exists()
            return
        with started(job, hand_written(job, AWAY, chunk_bytes=8192, slots=8)) as run:
            run.resume(saved)
            assert run.steps == saved_after
            checked(run, optimizer, precision, 1e6)


def test_a_write_that_was_said_to_be_done_and_was_not_is_found_when_it_is_read() -> None:
    """The state is lost, and no weight is made of what is there instead."""
    job, batches = job_for("adamw", "bf16"), byte_batches(STEPS, ROWS)
    with (
        tempfile.TemporaryDirectory() as name,
        start(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=8192, slots=8), Path(name), 0) as run,
    ):
        with Failing(30, "lost write", goes_on=False) as failing:
            while stepped(run, batches[run.steps], "its checksum is"):
                assert run.steps < STEPS
        assert failing.has_failed
        for use in (run.state_dict, lambda: run.save(Path(name) / "saved"), lambda: run.step(batches[0])):
            with pytest.raises(DiskError, match="its checksum is"):
                use()
        with pytest.raises(DiskError, match="its checksum is"):
            run.close()


def test_a_step_whose_state_has_no_room_anywhere_says_so() -> None:
    """The disk takes no more writes, and the plan has no host memory for what it should have taken."""
    job, batches = job_for("adamw", "bf16"), byte_batches(STEPS, ROWS)
    with started(job, hand_written(job, AWAY_ON_DISK, chunk_bytes=8192, slots=8)) as run:
        least = placed_of(run).host_bytes
    plan = hand_written(job, AWAY_ON_DISK, chunk_bytes=8192, slots=8, host_bytes=least)
    with tempfile.TemporaryDirectory() as name, start(job, plan, Path(name), 0) as run:
        with Failing(30, "ENOSPC", goes_on=True):
            while stepped(run, batches[run.steps], "could not be written to"):
                assert run.steps < STEPS
            with pytest.raises(
                DiskError, match=r"could not be written to .*; and host memory has no room for it: the plan's host"
            ):
                run.save(Path(name) / "saved")
        for _ in placed_of(run).state.chunks:  # the disk takes writes again; of each chunk an error is told once
            if stepped(run, batches[run.steps], "could not be written to"):
                break
        checked(run, "adamw", "bf16")


def test_moments_that_nobody_knew_of_and_that_find_no_room_are_told_of_and_saved_elsewhere() -> None:
    """SGD makes its momentum in the first step, and the plan's disk has no room for it."""
    job, batches = job_for("sgd", "bf16"), byte_batches(STEPS, ROWS)
    plan = hand_written(job, AWAY_ON_DISK, chunk_bytes=8192, slots=8)
    with started(job, plan) as run:
        least = placed_of(run).disk_bytes
    plan = hand_written(job, AWAY_ON_DISK, chunk_bytes=8192, slots=8, disk_bytes=least)
    with tempfile.TemporaryDirectory() as name:
        with start(job, plan, Path(name) / "disk", 0) as run:
            while stepped(run, batches[run.steps], "the plan's disk is"):
                assert run.steps < STEPS
            assert run.steps == 1
            run.save(Path(name) / "saved")
            assert placed_of(run).disk_bytes == least
        with started(job, hand_written(job, AWAY, chunk_bytes=8192, slots=8)) as run:
            run.resume(Path(name) / "saved")
            for batch in batches[1:]:
                run.step(batch)
            checked(run, "sgd", "bf16")
