"""The disk measure: what it leaves behind, and what it does where a file system says no."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest

from anyfit.probing import disk
from anyfit.probing.meters import QUICK

EFFORT = dataclasses.replace(QUICK, disk_bytes=64 * 2**20)


def measured(folders: list[Path]) -> disk.Disk | None:
    with disk.disk_ladders(folders, EFFORT) as ladders:
        if ladders is None:
            return None
        for meter in ladders.meters:
            meter.readings += [meter.read(), meter.read()]
        return ladders.disk()


def test_rates_by_requests_in_flight_and_no_file_left(tmp_path: Path) -> None:
    result = measured([tmp_path])
    assert result is not None
    assert [depth for depth, _ in result.read.points] == [1, 4, 8]
    assert [depth for depth, _ in result.write.points] == [1, 4, 8]
    assert result.free_bytes.value > 0
    assert list(tmp_path.iterdir()) == []


def test_a_failure_in_the_middle_leaves_no_file(tmp_path: Path) -> None:
    descriptors = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
    with pytest.raises(RuntimeError), disk.disk_ladders([tmp_path], EFFORT):
        raise RuntimeError
    assert list(tmp_path.iterdir()) == []
    assert len(os.listdir("/proc/self/fd")) == descriptors  # noqa: PTH208


def test_without_direct_access_the_page_cache_is_measured_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_open = os.open

    def refuse_direct(path, flags, *rest):
        if flags & os.O_DIRECT:
            raise OSError(22, "Invalid argument")
        return real_open(path, flags, *rest)

    monkeypatch.setattr(os, "open", refuse_direct)
    result = measured([tmp_path])
    assert result is not None
    assert "refuses O_DIRECT" in result.read.source
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file where the folder should be: unlike permissions, that stops a superuser too."""
    (tmp_path / "file").write_text("in the way")
    assert measured([tmp_path / "file" / "cache"]) is None
    other = tmp_path / "other"
    assert measured([tmp_path / "file" / "cache", other]) is not None
    assert list(other.iterdir()) == []


def test_a_full_disk_is_not_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwritev", full)
    assert measured([tmp_path]) is None
    assert list(tmp_path.iterdir()) == []


def test_little_free_space_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    usage = type("Usage", (), {"free": 100 * 2**20})
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    monkeypatch.setattr(os, "pwritev", lambda *_: pytest.fail("wrote to a disk that is nearly full"))
    with disk.disk_ladders([tmp_path], dataclasses.replace(EFFORT, disk_bytes=2**30)) as ladders:
        assert ladders is None
