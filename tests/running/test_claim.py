"""A run folder is used by one launch at a time, and each run of a script has its own place in it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

import anyfit
from anyfit import fitting
from anyfit.running import claim
from anyfit.running.launch import Launch, launched
from tests.machines import small_machine
from tests.oracle import assert_bit_equal

GONE = claim.Holder(2**22 + 1, 1.0, claim._host())  # a number that no process has


@pytest.fixture(autouse=True)
def _released() -> Iterator[None]:
    yield
    claim.release_all()


def held_by(holder: claim.Holder, folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / claim.FILE).write_text(json.dumps(asdict(holder)))
    return folder


@pytest.fixture
def alive() -> Iterator[claim.Holder]:
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield claim.Holder(process.pid, psutil.Process(process.pid).create_time(), claim._host())
    process.communicate(b"\n")


def test_a_folder_in_use_is_refused_by_the_name_of_who_uses_it(tmp_path: Path, alive: claim.Holder) -> None:
    folder = held_by(alive, tmp_path / "run")
    for use in (fitting.new_folder, fitting.resumed_folder):
        with pytest.raises(FileExistsError, match=rf"run is in use by process {alive.pid} on .*; wait until it ends, or choose"):
            use(folder)
    assert json.loads((folder / claim.FILE).read_text()) == asdict(alive)


def test_a_claim_whose_process_is_gone_is_taken_over_and_told(
    tmp_path: Path, alive: claim.Holder, capsys: pytest.CaptureFixture[str]
) -> None:
    for number, holder in enumerate((GONE, replace(alive, started=1.0))):  # the second's number is another's by now
        folder = held_by(holder, tmp_path / str(number))
        fitting.resumed_folder(folder)
        assert f"took {folder} over from process {holder.pid} on " in capsys.readouterr().err
        assert json.loads((folder / claim.FILE).read_text())["pid"] == os.getpid()


def test_a_claim_is_given_up_at_the_end_and_serves_those_that_its_process_starts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    parent = psutil.Process().parent()
    assert parent is not None
    folder = held_by(claim.Holder(parent.pid, parent.create_time(), claim._host()), tmp_path)
    claim.take(folder, print)
    claim.release_all()
    assert (folder / claim.FILE).exists()  # it is the parent's
    (folder / claim.FILE).unlink()
    claim.take(folder, print)
    claim.take(folder, print)
    claim.release_all()
    assert list(folder.iterdir()) == []
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("is_alive", [True, False])
def test_a_process_elsewhere_is_gone_when_it_no_longer_touches_its_claim(
    is_alive: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(claim, "GONE_SECONDS", 0.05)
    folder = held_by(replace(GONE, host="elsewhere"), tmp_path)
    monkeypatch.setattr(claim.time, "sleep", lambda _: os.utime(folder / claim.FILE, (1, 1)) if is_alive else _wait())
    said: list[str] = []
    if is_alive:
        with pytest.raises(FileExistsError, match=r"in use by process .* on elsewhere"):
            claim.take(folder, said.append)
    else:
        claim.take(folder, said.append)
        assert said[-1].endswith("on elsewhere, which is gone")


def _wait() -> None:
    claim._over.wait(0.1)


def test_two_launches_in_one_second_get_a_folder_each(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting.time, "strftime", lambda _: "20260101-120000")
    made = [fitting.new_folder(None, tmp_path).name for _ in range(3)]
    assert made == ["20260101-120000", "20260101-120000.2", "20260101-120000.3"]


def test_a_folder_that_cannot_be_written_to_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise OSError(30, "Read-only file system")

    monkeypatch.setattr(claim.os, "open", refuse)
    with pytest.raises(OSError, match="Read-only file system; choose another --folder"):
        fitting.new_folder(tmp_path / "new")
    with pytest.raises(OSError, match="Read-only file system; a run that goes on writes there: --resume a copy of it"):
        fitting.resumed_folder(tmp_path)


# ---------------------------------------------------------------------- several runs of a script


def job(width: int) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: nn.Linear(4, width),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        sample=torch.ones(2, 4),
        batch_size=2,
        precision="fp32",
    )


def script(folder: Path, steps: tuple[int, ...], *, resume: bool = False) -> list[dict[str, torch.Tensor]]:
    """As a script of several runs does, each to so many steps; all are saved in the end."""
    found = []
    with launched(Launch(folder, resume=resume, say=lambda _: None)) as launch:
        runs = [anyfit.start(job(3 + index % 2), machine=small_machine()) for index in range(len(steps))]
        for run, last in zip(runs, steps, strict=True):
            for batch in run.loader(list(torch.randn(40, 4, generator=torch.Generator().manual_seed(1)))):
                run.step(batch)
                if run.steps == last:
                    break
            assert run.launch is not None
            run.launch.save(run)
            found.append(run.state_dict())
        assert launch.runs == runs or resume
        for run in runs:
            run.close()
    return found


def test_each_run_of_a_script_has_its_own_place_and_goes_on_from_it(tmp_path: Path) -> None:
    whole = script(tmp_path / "whole", (8, 9, 10))
    script(tmp_path / "parts", (3, 4, 5))
    again = script(tmp_path / "parts", (8, 9, 10), resume=True)
    for mine, theirs in zip(again, whole, strict=True):
        assert_bit_equal(mine, theirs)
    for folder, steps in (("", 8), ("run-2", 9), ("run-3", 10)):
        place = tmp_path / "parts" / folder
        lines = [json.loads(line)["step"] for line in (place / "metrics.jsonl").read_text().splitlines()]
        assert lines == list(range(1, steps + 1))
        assert max(int(path.name) for path in (place / "checkpoints").iterdir()) == steps
        assert (place / "plan.json").exists()


def test_a_start_that_fails_takes_no_place(tmp_path: Path) -> None:
    with launched(Launch(tmp_path)):
        with pytest.raises(anyfit.NoPlan):
            anyfit.start(job(3), machine=small_machine().with_limits(device_memory=64))
        with anyfit.start(job(3), machine=small_machine()) as run:
            assert run.launch is not None
            assert run.launch.folder == tmp_path


def test_a_full_disk_is_told_with_the_file_and_how_to_go_on(tmp_path: Path) -> None:
    with launched(Launch(tmp_path)), anyfit.start(job(3), machine=small_machine()) as run:
        (tmp_path / "metrics.jsonl").symlink_to("/dev/full")
        says = r"metrics.jsonl after step 1: No space left on device; when it can be written to, go on with: anyfit fit --resume"
        with pytest.raises(OSError, match=says):
            run.step(torch.ones(2, 4))
