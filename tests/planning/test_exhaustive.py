"""The search against all there is: of small chains, every choice for every block and every placement of every chunk."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfit.planning.offload import CHOICES, FROZEN_AWAY, PLACED, RESIDENT, Space
from anyfit.planning.simulate import Candidate, simulate
from anyfit.planning.weigh import weigh
from anyfit.values.profile import HostRates, Profile, StateBytes
from tests.conftest import FULL
from tests.planning.profiles import candidates, small_profile

GIB = 2**30


def profile_of(candidate: Candidate, device_share: float, host_share: float) -> Profile:
    """A machine with a share of what all resident and kept would take, and of what all on the host would."""
    profile = small_profile(
        precision="bf16",
        batch_size=4,
        passes=(candidate.each,),
        blocks=len(candidate.each.blocks),
        chunks=candidate.chunks,
        state=StateBytes(0, 0, 0, 0, 0, gradients=0, accumulators=0),
        trainable=sum(chunk.elements for chunk in candidate.chunks),
        host=HostRates(1e9, 1e9, 1e9, overlaps=True),
        memory_bytes_per_second=1e11,
    )
    count = len(candidate.chunks)
    resident = replace(candidate, accumulation=1, placements=(RESIDENT,) * count, slots=0, prefetch=0)
    resident = replace(resident, activations=("keep",) * len(candidate.each.blocks))
    away = replace(resident, placements=(PLACED[False, True, True],) * count, slots=count)
    return replace(
        profile,
        device_limit_bytes=int(device_share * 1.35 * weigh(profile, resident).device_bytes),
        host_limit_bytes=3 * GIB + int(host_share * weigh(profile, away).host_bytes),
    )


def everything(space: Space, candidate: Candidate) -> Iterator[Candidate]:
    blocks = [[choice for choice in CHOICES if choice in block.choices] or ["keep"] for block in candidate.each.blocks]
    placements = [
        [RESIDENT, *PLACED.values()] if chunk.optimizer_bytes else [RESIDENT, FROZEN_AWAY] for chunk in candidate.chunks
    ]
    for activations, placed in product(product(*blocks), product(*placements)):
        slots = space._slots_for(placed)
        each = replace(candidate, accumulation=1, activations=activations, placements=placed)  # type: ignore[arg-type]
        yield replace(each, slots=slots, prefetch=space._prefetch(slots))


@settings(max_examples=100 if FULL else 12)
@given(candidates(most_blocks=2, most_chunks=1, parameters=2_000_000), st.floats(0.15, 1.0), st.floats(0.3, 1.0))
def test_the_search_is_within_one_percent_of_the_best_and_never_over_a_limit(
    candidate: Candidate, device_share: float, host_share: float
) -> None:
    space = Space(profile_of(candidate, device_share, host_share))
    offer = space.best(4, float("inf"))
    fitting = [each for each in everything(space, candidate) if space.fits(weigh(space.profile, each))]
    if offer is None:
        assert not fitting
        return
    assert space.fits(offer.weight)
    assert offer.weight == weigh(space.profile, offer.candidate)
    best = min(simulate(each, space._rates).step_seconds for each in fitting)
    assert offer.simulated.step_seconds <= 1.01 * best
    assert offer.simulated.step_seconds == pytest.approx(simulate(offer.candidate, space._rates).step_seconds)
