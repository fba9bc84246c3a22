"""The link measure on real processes, gloo in the place of NCCL: the same program, other devices."""

from __future__ import annotations

import dataclasses

import pytest

from anyfit.probing import links
from anyfit.probing.link_worker import group_sizes
from anyfit.probing.meters import QUICK

EFFORT = dataclasses.replace(QUICK, link_bytes=2**20)


def test_every_collective_of_two_ranks_is_measured() -> None:
    measured = links.measure_links("gloo", 2, EFFORT)
    assert [each.name for each in measured] == ["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]
    for each in measured:
        assert (each.across, each.group) == ("node", 2)
        assert 0 < each.latency_seconds.value < 60
        assert each.bytes_per_second.value > 0
        assert each.bytes_per_second.measurement_error > 0
        assert each.bytes_per_second.source == "measured"


def test_a_rank_that_fails_is_reported_with_its_last_words() -> None:
    with pytest.raises(links.LinksFailed, match=r"rank [01] ended with status 1: .*no-such-backend"):
        links.measure_links("no-such-backend", 2, EFFORT)  # type: ignore[arg-type]


def test_ranks_that_never_end_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links, "TIMEOUT_SECONDS", 0.0)
    with pytest.raises(links.LinksFailed, match="no end after"):
        links.measure_links("gloo", 2, EFFORT)


def test_groups_are_powers_of_two_and_all_ranks() -> None:
    assert group_sizes(2) == [2]
    assert group_sizes(6) == [2, 4, 6]
    assert group_sizes(8) == [2, 4, 8]
