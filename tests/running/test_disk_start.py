"""Runs with state on the disk, as users start them."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import anyfit
from anyfit import cli
from anyfit.values import disk_folder
from anyfit.values.plan import Plan
from anyfit.values.units import show_bytes
from tests.machines import small_machine
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY_ON_DISK, RESIDENT, hand_written

BATCHES = [torch.randn(4, 8, generator=torch.Generator().manual_seed(each)) for each in range(3)]
SCRIPT = """
import anyfit, torch
from torch import nn
job = anyfit.Job(
    model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), loss=lambda model, batch: model(batch).square().mean(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters()), sample=torch.ones(4, 8), batch_size=4, precision="fp32",
)
run = anyfit.start(job)
run.step(torch.ones(4, 8))
print(f"{run.metrics.peak_bytes['disk']} bytes of disk")
"""


def job() -> anyfit.Job:
    return anyfit.Job(
        model=lambda: nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)),
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=BATCHES[0],
        batch_size=4,
        precision="fp32",
    )


def plan(job: anyfit.Job) -> Plan:
    return hand_written(job, AWAY_ON_DISK, slots=8)


@pytest.fixture
def in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of which the system says that it lies in memory."""
    mounts, folder = tmp_path / "mountinfo", tmp_path / "ram"
    mounts.write_text(f"22 1 254:0 / / rw - ext4 /dev/root rw\n23 22 0:25 / {folder} rw - tmpfs tmpfs rw\n")
    monkeypatch.setattr(disk_folder.why_not, "__defaults__", (mounts,))
    folder.mkdir()
    return folder


def files_in(folder: Path) -> set[str]:
    """Of this process, files that were made in the folder, whether they have a name or not."""
    links = (each.readlink() for each in Path("/proc/self/fd").iterdir() if each.is_symlink())
    return {str(each) for each in links if str(each).startswith(f"{folder}/")}


def test_state_lies_in_the_folder_that_is_named_under_no_name(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    machine = small_machine()
    with anyfit.start(job(), plan(job()), machine, disk_folder=tmp_path / "made") as run:
        for batch in BATCHES:
            run.step(batch)
        assert list((tmp_path / "made").iterdir()) == []
        assert len(files_in(tmp_path / "made")) == 1
        size = run.metrics.peak_bytes["disk"]
        assert size > 0
        assert f"optimizer state on the disk: {show_bytes(size)} in {tmp_path}/made\n" in capsys.readouterr().err
        weights = run.state_dict()
    assert files_in(tmp_path / "made") == set()
    assert_bit_equal(weights, train_plainly(job(), BATCHES)[1])


def test_a_folder_in_memory_is_refused_unless_it_may_be(in_memory: Path) -> None:
    with pytest.raises(ValueError, match=r"ram lies in memory \(tmpfs\); name a folder on a disk .*any_file_system=True"):
        anyfit.start(job(), plan(job()), small_machine(), disk_folder=in_memory)
    with anyfit.start(job(), plan(job()), small_machine(), disk_folder=in_memory, any_file_system=True) as run:
        run.step(BATCHES[0])
        assert len(files_in(in_memory)) == 1


def test_a_folder_that_a_plan_has_no_use_for_is_said_to_be_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    anyfit.start(job(), hand_written(job(), RESIDENT), small_machine(), disk_folder=tmp_path).close()
    assert "the plan has nothing on the disk: --disk-folder" in capsys.readouterr().err


def test_the_command_line_names_the_folder(
    tmp_path: Path, in_memory: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    plan(job()).save(tmp_path / "plan.json")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))

    def fit(*options: str) -> tuple[object, str, str]:
        monkeypatch.setattr(sys, "argv", ["anyfit", "fit", "--plan", "plan.json", *options, "train.py"])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        return exit.value.code, *capsys.readouterr()

    status, _, said = fit("--disk-folder", str(in_memory), "--folder", "a")
    assert status == 2
    assert "lies in memory (tmpfs)" in said
    status, printed, said = fit("--disk-folder", str(in_memory), "--any-file-system", "--folder", "b")
    assert status in (0, None), said
    assert re.search(r"^[1-9]\d* bytes of disk$", printed, re.MULTILINE)
