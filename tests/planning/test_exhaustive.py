"""The search against all there is.

The plans of a chain are all combinations of a choice for every block (keep, selective, recompute, offload; as many as its profile
has) and a placement for every chunk: of one that is trained resident, or updated on the host or streamed, each with its weights
on the device or away, each waiting for the norm or not; of a frozen one on the device or away. That is all that a plan for one
micro-batch size can say but for the slots, which the placements decide. On a CPU no update is streamed, none speculates and no
activations are offloaded. Where a disk is allowed (test_disk.py), the state of any chunk that is trained may lie there besides.

Small chains are gone through plan by plan. For the others that would be up to 4^6 * 9^6 plans, so they are gone through as a
tree, first which blocks are offloaded, then chunk by chunk and block by block, and a branch is left out only where no plan in it
can be one to look for:

    it does not fit     chunks that are not placed yet weigh nothing, blocks that are not decided keep the least they can
    it is not faster    than what is looked for: chunks that are not placed yet take no time, blocks that are not decided keep

Both hold because no chunk more, no byte kept more and no second more makes a plan smaller or its bound less
(test_a_part_of_a_plan_...), and no simulation is under its bound (test_no_simulation_...). What is left at the leaves is weighed
and simulated. That nothing is lost so is shown once more where both ways can be gone (test_the_search_and_the_tree_...).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, product
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anyfit.planning.bound import least_seconds
from anyfit.planning.candidate import Candidate
from anyfit.planning.footprint import footprint_of
from anyfit.planning.knobs import FROZEN_AWAY, ON_DISK, PLACED, RESIDENT, Knobs
from anyfit.planning.polish import undecided
from anyfit.planning.simulation import simulate
from anyfit.planning.space import Space
from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import BlockCost, Profile
from tests.conftest import FULL
from tests.planning.chains import MICRO_BATCH, narrowed, random_profile

ROUNDING = 1 + 1e-9
seeds = st.integers(0, 2**32 - 1)


def _choices_of(block: BlockCost, *names: Activations) -> list[Activations]:
    return [name for name in names if name in block.choices or (name == "keep" and not block.choices)]


class Plans:
    """All plans of a profile."""

    def __init__(self, profile: Profile) -> None:
        self.space = Space(profile)
        self.rates = self.space.evaluation.rates
        self._profile = profile
        self._first = self.space.candidates.of(Knobs(MICRO_BATCH))
        blocks = profile.passes[0].blocks
        self.choices = [
            [*_choices_of(block, "keep", "selective", "recompute"), *(_choices_of(block, "offload") if self.space.is_gpu else ())]
            for block in blocks
        ]
        trained = [
            RESIDENT,
            *(
                placement
                for placement in PLACED.values()
                if self.space.is_gpu or (placement.update == "host" and not placement.speculates)
            ),
        ]
        trained += ON_DISK.values() if self.space.evaluation.may_use_disk else ()
        self.placements = [trained if chunk.is_updated else [RESIDENT, FROZEN_AWAY] for chunk in profile.chunks]

    def candidate(self, placements: tuple[Placement, ...], activations: tuple[Activations, ...]) -> Candidate:
        """With the first chunks so, and no others."""
        slots = self.space.candidates.slots_for(placements)
        return replace(
            self._first,
            chunks=self._profile.chunks[: len(placements)],
            placements=placements,
            activations=activations,
            slots=slots,
            prefetch=self.space.candidates.prefetch(slots),
        )

    def fits(self, candidate: Candidate) -> bool:
        return self.space.evaluation.fits(footprint_of(self._profile, candidate))

    def moving(self, offloaded: tuple[bool, ...]) -> Moving:
        """Those with these blocks offloaded and no others."""
        return Moving(self, offloaded)

    def ways_to_move(self) -> list[tuple[bool, ...]]:
        """By block, whether it is."""
        return list(product(*([False, True] if "offload" in names else [False] for names in self.choices)))

    def seconds(self, candidate: Candidate) -> float:
        return simulate(candidate, self.rates).step_seconds

    def one_by_one(self) -> Iterator[Candidate]:
        for placements, activations in product(product(*self.placements), product(*self.choices)):
            candidate = self.candidate(placements, activations)
            if self.fits(candidate):
                yield candidate

    def faster_than(self, seconds: float) -> Iterator[Candidate]:
        return chain.from_iterable(self.moving(offloaded).faster_than(seconds) for offloaded in self.ways_to_move())


class Moving:
    """The tree of all plans with some blocks offloaded and no others."""

    def __init__(self, plans: Plans, offloaded: tuple[bool, ...]) -> None:
        self._plans = plans
        self.choices: list[list[Activations]] = [
            ["offload"] if moves else [name for name in names if name != "offload"]
            for moves, names in zip(offloaded, plans.choices, strict=True)
        ]
        each = plans.space.profile.passes[0]
        self._undecided = [undecided(each, self.choices, decided) for decided in range(len(each.blocks) + 1)]

    def fastest(self, placements: tuple[Placement, ...], activations: tuple[Activations, ...]) -> Candidate:
        """With the first chunks and blocks so, and the others keeping all."""
        return self._plans.candidate(placements, (*activations, *(names[0] for names in self.choices[len(activations) :])))

    def lightest(self, placements: tuple[Placement, ...], activations: tuple[Activations, ...]) -> Candidate:
        """With the first chunks and blocks so, and the others keeping the least that they can."""
        return replace(self.fastest(placements, activations), profile_pass=self._undecided[len(activations)])

    def faster_than(
        self, seconds: float, placements: tuple[Placement, ...] = (), activations: tuple[Activations, ...] = ()
    ) -> Iterator[Candidate]:
        """Of the branch with these first chunks and blocks so."""
        plans, decided = self._plans, len(activations)
        if not plans.fits(self.lightest(placements, activations)):
            return
        fastest = self.fastest(placements, activations)
        if least_seconds(fastest, plans.rates) >= seconds:
            return
        if len(placements) < len(plans.placements):
            for placement in plans.placements[len(placements)]:
                yield from self.faster_than(seconds, (*placements, placement))
        elif decided < len(self.choices):
            for choice in self.choices[decided]:
                yield from self.faster_than(seconds, placements, (*activations, choice))
        elif plans.seconds(fastest) < seconds:
            yield fastest


@settings(max_examples=100 if FULL else 12)
@given(st.integers(1, 6), seeds)
def test_the_search_and_the_tree_find_the_best_of_all_plans(blocks: int, seed: int) -> None:
    random = Random(seed)
    plans = Plans(narrowed(random, random_profile(random, blocks), 3000))
    best = min(map(plans.seconds, plans.one_by_one()), default=None)
    offer = plans.space.best(MICRO_BATCH)
    if best is None:
        assert offer is None
        assert not any(plans.faster_than(float("inf")))
        return
    assert offer is not None
    assert offer.simulated.step_seconds <= 1.01 * best
    assert not any(plans.faster_than(best))
    assert any(plans.faster_than(best * ROUNDING))


@pytest.mark.timeout(1800)  # all of them beside other work
@pytest.mark.parametrize("blocks", [3, 4, *(pytest.param(each, marks=pytest.mark.full) for each in (5, 6))])
@settings(max_examples=5 if FULL else 4, derandomize=True)  # trees of five blocks take minutes each
@given(seeds)
def test_the_search_is_within_one_percent_of_the_best_and_never_over_a_limit(blocks: int, seed: int) -> None:
    plans = Plans(random_profile(Random(seed), blocks))
    offer = plans.space.best(MICRO_BATCH)
    if offer is None:
        assert not any(plans.faster_than(float("inf")))
        return
    assert plans.fits(offer.candidate)
    assert offer.footprint == footprint_of(plans.space.profile, offer.candidate)
    assert offer.simulated.step_seconds == plans.seconds(offer.candidate)
    assert not any(plans.faster_than(offer.simulated.step_seconds / 1.01))


@st.composite
def plans_of_chains(draw: st.DrawFn) -> tuple[Plans, Candidate]:
    random = Random(draw(seeds))
    plans = Plans(random_profile(random, draw(st.integers(1, 6))))
    placements = tuple(random.choice(each) for each in plans.placements)
    return plans, plans.candidate(placements, tuple(random.choice(each) for each in plans.choices))


@settings(max_examples=2000 if FULL else 150)
@given(plans_of_chains())
def test_no_simulation_is_under_its_bound(drawn: tuple[Plans, Candidate]) -> None:
    plans, candidate = drawn
    assert least_seconds(candidate, plans.rates) <= plans.seconds(candidate) * ROUNDING


@settings(max_examples=500 if FULL else 50)
@given(plans_of_chains(), st.integers(0, 8), st.integers(0, 6))
def test_a_part_of_a_plan_neither_weighs_more_nor_has_a_higher_bound(
    drawn: tuple[Plans, Candidate], placed: int, decided: int
) -> None:
    plans, whole = drawn
    profile, tree = plans.space.profile, plans.moving(tuple(choice == "offload" for choice in whole.activations))
    placements, activations = whole.placements[:placed], whole.activations[:decided]
    lightest = footprint_of(profile, tree.lightest(placements, activations))
    footprint = footprint_of(profile, whole)
    assert lightest.pool_bytes <= footprint.pool_bytes
    assert lightest.live_bytes <= footprint.live_bytes
    assert lightest.host_bytes <= footprint.host_bytes
    fastest = tree.fastest(placements, activations)
    assert least_seconds(fastest, plans.rates) <= least_seconds(whole, plans.rates) * ROUNDING
