"""What is left of this host's memory."""

from __future__ import annotations

import psutil
import pytest

from anyfit.probing import cgroups, host


def test_what_is_free_is_less_than_all_there_is() -> None:
    assert 0 < host.free_memory_bytes() <= psutil.virtual_memory().total
    assert 0 < host.left_memory_bytes() <= psutil.virtual_memory().total


def test_a_control_groups_limit_leaves_what_this_process_has_not_taken_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    own = psutil.Process().memory_info().rss
    monkeypatch.setattr(cgroups, "memory_limit_bytes", lambda: own + 64.0 * 2**20)
    assert host.free_memory_bytes() == pytest.approx(64 * 2**20, abs=16 * 2**20)
    monkeypatch.setattr(cgroups, "memory_limit_bytes", lambda: own / 2)
    assert host.free_memory_bytes() == 0
