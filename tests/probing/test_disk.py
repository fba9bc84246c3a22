"""The disk measure: what it leaves behind, and what it does where a file system says no."""

from __future__ import annotations

import dataclasses
import itertools
import os
import threading
import types
from pathlib import Path

import pytest

from anyfit.probing import disk
from anyfit.probing.meters import FULL, QUICK, Effort
from anyfit.values.engine import DISK_REQUESTS

EFFORT = dataclasses.replace(FULL, disk_bytes=64 * 2**20)


def measured(folders: list[Path], effort: Effort = EFFORT) -> disk.Disk | None:
    with disk.disk_ladders(folders, effort) as ladders:
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
    assert [depth for depth, _ in result.both.points] == [DISK_REQUESTS]
    assert result.free_bytes.value > 0
    assert list(tmp_path.iterdir()) == []


def test_both_at_once_count_the_bytes_of_both_ways(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock on which every reading takes a second, so that rates are bytes."""
    with disk.disk_ladders([tmp_path], EFFORT) as ladders:
        assert ladders is not None
        readings = itertools.count()

        def clock() -> float:
            return next(readings) if threading.current_thread() is threading.main_thread() else 0

        monkeypatch.setattr(disk, "time", types.SimpleNamespace(perf_counter=clock))
        (both,) = (meter.read() for meter in ladders.both.meters)
        assert both == 2 * disk.MOST_REQUESTS * disk.REQUEST_BYTES
        assert {meter.read() for meter in ladders.read.meters + ladders.write.meters} == {both / 2}


@pytest.mark.parametrize("effort", [QUICK, FULL], ids=["quick", "full"])
def test_a_few_gib_are_written_at_most_and_a_quick_look_has_the_engines_requests_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, effort: Effort
) -> None:
    written: list[int] = []
    monkeypatch.setattr(os, "pwritev", lambda _file, buffers, _at: (written.append(len(buffers[0])), len(buffers[0]))[1])
    monkeypatch.setattr(os, "preadv", lambda _file, buffers, _at: len(buffers[0]))
    with disk.disk_ladders([tmp_path], effort) as ladders:
        assert ladders is not None
        for _ in range(effort.rounds):
            for meter in ladders.meters:
                meter.read()
        assert (len(ladders.read.rungs) == 1) == (effort is QUICK)
        assert max(ladders.both.rungs) == DISK_REQUESTS
    assert sum(written) <= 4 * 2**30


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
