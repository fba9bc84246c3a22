"""The picture of a step: it shows the bytes and seconds that the plan was chosen by."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import pytest

from anyfit.planning import search
from anyfit.planning.candidate import rates_of
from anyfit.planning.fastest import fastest
from anyfit.planning.picture import MOST_SPANS, pictured
from anyfit.planning.simulation import played
from anyfit.values.no_plan import NoPlan
from anyfit.values.plan import Plan
from anyfit.values.profile import Profile
from tests.planning.chains import random_profile
from tests.planning.profiles import small_profile


def tight(seed: int) -> Profile:
    """A random job, on a device and a host that its state does not fit without moving."""
    profile = random_profile(Random(seed), 4)
    elements = sum(chunk.elements for chunk in profile.chunks)
    return replace(profile, parameters=elements, trainable=elements)


SEEDS = range(12)


@pytest.mark.parametrize("seed", SEEDS)
def test_memory_is_what_the_plan_reserves_at_its_peak_and_lanes_are_its_step(seed: int) -> None:
    profile = tight(seed)
    found = fastest(profile)
    if found is None:
        with pytest.raises(NoPlan):
            search(profile)
        return
    picture = pictured(found)
    assert picture.memory is not None
    columns = [picture.memory.moments, picture.memory.seconds, *picture.memory.bytes.values()]
    assert len({len(column) for column in columns}) == 1
    assert [each.path for each in picture.blocks] == [block.name for block in found.profile.passes[0].blocks if block.name]
    assert all(len(rows) <= MOST_SPANS for rows in picture.lanes.values())
    for rows in picture.lanes.values():
        ends = [end for _, end, _, _ in rows]
        assert ends == sorted(ends)
        assert all(start < end for start, end, _, _ in rows)
    if found.offer is not None:  # of the others, these profiles have sums that their chunks do not add up to
        assert max(picture.memory.totals) == pytest.approx(found.chosen.reserved_bytes, rel=1e-6)
        space, offer = found.in_space
        spans, seconds, passes = played(offer.candidate, rates_of(space.profile))
        if passes == offer.candidate.accumulation:
            assert picture.lanes_are_of == "a step"
            assert seconds == pytest.approx(offer.simulated.step_seconds, rel=1e-6)
        else:  # those in the middle are alike
            assert picture.lanes_are_of == f"{passes} of {offer.candidate.accumulation} passes, and the update"
            assert seconds < offer.simulated.step_seconds
        assert max(end for _, _, end, _, _ in spans if end) >= 0.5 * seconds
        busy = sum(min(end, seconds) - start for lane, start, end, _, _ in spans if lane == "compute" and start < seconds)
        assert busy <= seconds * (1 + 1e-9)


def test_some_of_these_jobs_move_state_and_recompute() -> None:
    found = [each for each in map(fastest, map(tight, SEEDS)) if each is not None]
    lanes = {lane for each in found for lane in pictured(each).lanes}
    assert {"compute", "up", "down", "host"} <= lanes
    assert any(part.activations != "keep" for each in found for part in pictured(each).blocks)


def test_a_plan_carries_its_picture_to_a_file_and_back() -> None:
    made = search(small_profile())
    assert made.picture is not None
    assert [kind for _, _, kind, _ in made.picture.lanes["compute"]] == ["forward", "backward", "update"]
    assert Plan.from_json(made.to_json()) == made


def test_a_plan_from_before_pictures_is_read_without_one() -> None:
    document = search(small_profile()).to_json()
    del document["picture"]
    assert Plan.from_json({**document, "version": 8}).picture is None
