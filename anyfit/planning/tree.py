"""All plans of a few blocks and chunks, gone through as a tree: chunk by chunk and then block by block.

A branch is left out where nothing in it fits, chunks that are not placed weighing nothing and blocks that are not decided keeping
the least they can; and where nothing in it is faster by its bound (bound.py), such chunks taking no time and such blocks
recomputing no more than the room takes that is left.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from itertools import product

from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import BlockCost, ChoiceCost, Pass

from .bound import least_seconds
from .candidate import Candidate
from .evaluation import Evaluation, Offer
from .knobs import Knobs

MOST_BRANCHES = 12_000  # of the trees of all plans: two seconds
MOST_MOVING_BRANCHES = 6_000  # of those in which something is offloaded
MOST_ACTIVATIONS = 3**7  # choices for all blocks: few enough to try them all
SLACK = 0.005  # of a step: the tree is not searched for less
Branch = tuple[tuple[Placement, ...], tuple[Activations, ...]]  # of the first chunks, and of the first blocks
Ranked = list[tuple[float, tuple[Activations, ...]]]


class Tree:
    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation = evaluation
        self._branches_left = {False: MOST_BRANCHES, True: MOST_MOVING_BRANCHES}  # by whether something is offloaded
        self.all_activations = cache(self._all_activations)

    def at_limits(self, evaluation: Evaluation) -> Tree:
        """The same at the limits of another evaluation, with as many branches left."""
        other = copy.copy(self)
        other._evaluation = evaluation
        return other

    def _all_activations(self, micro_batch: int, moved: tuple[int, ...]) -> Ranked:
        """By the seconds they cost, with these blocks offloaded and no others; none where there are too many."""
        candidates = self._evaluation.candidates
        first, choices = candidates.of(Knobs(micro_batch)), candidates.choices_with(micro_batch, moved)
        found = product(*choices) if math.prod(map(len, choices)) <= MOST_ACTIVATIONS else ()
        return sorted((replace(first, activations=each).recompute_seconds, each) for each in found)

    def best(self, micro_batch: int, under: float, moved: tuple[int, ...]) -> Offer | None:
        """Of all there is with these blocks offloaded, of what takes less than `under`; as far as the branches go."""
        evaluation, candidates, moves = self._evaluation, self._evaluation.candidates, bool(moved)
        bounds = Bounds(
            evaluation, micro_batch, candidates.choices_with(micro_batch, moved), self.all_activations(micro_batch, moved)
        )
        first, chunks, choices = bounds.first, candidates.chunks, bounds.choices
        found: Offer | None = None
        start: Branch = ((), ())
        branches = [(bounds.of(start), start)]
        while branches and self._branches_left[moves] > 0:
            least, (placements, activations) = branches.pop()
            if least >= under:
                continue
            if len(placements) < len(chunks):
                places = candidates.places(chunks[len(placements)], first.accumulation)
                nexts: list[Branch] = [((*placements, each), activations) for each in places]
            elif len(activations) < len(choices):
                nexts = [(placements, (*activations, each)) for each in choices[len(activations)]]
            else:
                candidate = candidates.placed(replace(first, chunks=chunks, activations=activations), placements)
                offer = evaluation.fitting(candidate)
                if offer is not None and offer.seconds < under:
                    found, under = offer, (1 - SLACK) * offer.seconds
                continue
            self._branches_left[moves] -= len(nexts)
            bounded = [(bounds.of(each), each) for each in nexts]
            branches += sorted((each for each in bounded if each[0] < under), key=lambda each: each[0], reverse=True)
        return found


class Bounds:
    """Seconds that nothing in a branch is under; infinite where nothing in it fits."""

    def __init__(self, evaluation: Evaluation, micro_batch: int, choices: list[list[Activations]], ranked: Ranked) -> None:
        candidates = evaluation.candidates
        self._evaluation, self.choices = evaluation, choices
        self.first = replace(candidates.of(Knobs(micro_batch)), chunks=(), placements=(), slots=0, prefetch=0)
        each = self.first.profile_pass
        self._passes = [undecided(each, choices, decided) for decided in range(len(each.blocks) + 1)]
        self._kept = tuple(names[0] for names in choices)
        self._front: list[tuple[float, int]] = []  # seconds of recomputing, and bytes live: those that nothing beats in both
        for seconds, activations in ranked:
            live = evaluation.footprint_of(replace(self.first, activations=activations)).live_bytes
            if not self._front or live < self._front[-1][1]:
                self._front.append((seconds, live))

    def of(self, branch: Branch) -> float:
        evaluation, (placements, activations) = self._evaluation, branch
        fastest = self._fastest(placements, activations)
        lightest = replace(fastest, profile_pass=self._passes[len(activations)])
        footprint = evaluation.footprint_of(lightest)
        if not evaluation.fits(footprint):
            return math.inf
        recompute: float | None = 0.0
        if self._front:
            wholes = ((seconds, max(live, footprint.live_bytes)) for seconds, live in self._front)
            fits = (seconds for seconds, live in wholes if evaluation.fits(replace(footprint, live_bytes=live)))
            recompute = next(fits, None)
        if recompute is None:
            return math.inf
        return least_seconds(fastest, evaluation.rates, max(recompute - fastest.recompute_seconds, 0.0))

    def _fastest(self, placements: tuple[Placement, ...], activations: tuple[Activations, ...]) -> Candidate:
        """With the first chunks and blocks so, no other chunks, and all other blocks kept."""
        candidates = self._evaluation.candidates
        placed = candidates.placed(replace(self.first, chunks=candidates.chunks[: len(placements)]), placements)
        return replace(placed, activations=(*activations, *self._kept[len(activations) :]))


def undecided(each: Pass, choices: Sequence[Sequence[Activations]], decided: int) -> Pass:
    """The same pass, but that of all blocks after so many, those that have a choice keep the least there is for them."""

    def least(block: BlockCost, names: Sequence[Activations]) -> BlockCost:
        if not block.name or len(names) == 1:
            return block
        return replace(block, choices={"keep": ChoiceCost(min(block.choices[name].kept_bytes for name in names), 0, 0.0)})

    pairs = zip(each.blocks[decided:], choices[decided:], strict=True)
    return replace(each, blocks=(*each.blocks[:decided], *(least(block, names) for block, names in pairs)))
