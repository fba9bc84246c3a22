"""Few blocks and chunks, each chosen by itself: one step of a knob is much of so little.

Starts are the best of the knobs, and the best with any chunks resident, all others alike, and as much kept as there is room for;
where neither fits, what is changed until it does. Each start is changed block by block and chunk by chunk for as long as that
helps, and gets of all choices for its blocks those that cost least and fit; the best few are changed by two at once too. Last,
all plans are gone through as a tree, chunk by chunk and then block by block: what is found is the best there is if that comes to
its end.

A branch of the tree is left out where nothing in it fits, chunks that are not placed weighing nothing and blocks that are not
decided keeping the least they can; and where nothing in it is faster by its bound (bound.py), such chunks taking no time and such
blocks recomputing no more than the room takes that is left.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from itertools import chain, combinations, product
from operator import attrgetter
from typing import TypeVar

from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import BlockCost, ChoiceCost, ChunkCost, Pass

from .candidate import Candidate
from .evaluation import Evaluation, Offer
from .knobs import FROZEN_AWAY, ON_DISK, RESIDENT, Knobs
from .local_search import WORTH, most

SMALL = 16  # blocks and chunks together: few enough to change each by itself
MOST_SUBSETS_OF = 9  # chunks: few enough to try any of them
SUBSETS = 4  # of resident chunks that are started from, for every other start
BEST_PAIRS = 2  # after single changes, try changing the best ones in pairs
MOST_BRANCHES = 12_000  # of the trees of all plans: two seconds
MOST_MOVING_BRANCHES = 6_000  # of those in which something is offloaded
TREE_BRANCHES = 16  # whose time it takes to begin a tree
RANKED_A_BRANCH = 4  # choices for all blocks that are weighed in the time of a branch
MOST_ACTIVATIONS = 3**7  # choices for all blocks: few enough to try them all
SLACK = 0.005  # of a step: the tree is not searched for less
Branch = tuple[tuple[Placement, ...], tuple[Activations, ...]]  # of the first chunks, and of the first blocks
Ranked = list[tuple[float, tuple[Activations, ...]]]
Item = TypeVar("Item")
_seconds = attrgetter("seconds")  # of an offer


class Polish:
    def __init__(self, evaluation: Evaluation, tree: Tree) -> None:
        self._evaluation, self._candidates, self._tree = evaluation, evaluation.candidates, tree

    def is_for(self, micro_batch: int) -> bool:
        return len(self._candidates.chunks) + len(self._candidates.passes[micro_batch].blocks) <= SMALL

    def best(self, micro_batch: int, found: Offer | None, least: Knobs, under: float, starts: int) -> Offer | None:
        """The fastest of any choices for blocks and chunks, from what the knobs have come to. `least` needs least memory."""
        offers = [*([] if found is None else [found]), *self._of_any_chunks(micro_batch, SUBSETS * starts)]
        if not offers and (squeezed := self._squeezed(self._candidates.of(least))) is not None:
            offers.append(squeezed)
        once = [self._with_least_recomputed(self._polished(each, 1)) for each in offers]
        different = {(each.candidate.activations, each.candidate.placements): each for each in once}.values()
        twice = [self._polished(each, 2) for each in sorted(different, key=_seconds)[:BEST_PAIRS]]
        best = min(twice, key=_seconds, default=None)
        enough = min(under, best.seconds if best else under)
        offloadable = self._candidates.offloadable(micro_batch)
        for offloaded in chain.from_iterable(combinations(offloadable, count) for count in range(len(offloadable) + 1)):
            if self._tree.is_over(offloaded):
                continue
            best = self._tree.best(micro_batch, (1 - SLACK) * enough, offloaded) or best
            enough = min(enough, best.seconds if best else enough)
        return best if best is not None and best.seconds < under else None

    def _of_any_chunks(self, micro_batch: int, starts: int) -> list[Offer]:
        """With few chunks, any of them may be the resident ones, and the others all alike; as much is kept as there is room for.
        The fastest of these."""
        evaluation, candidates = self._evaluation, self._candidates
        if len(candidates.chunks) > MOST_SUBSETS_OF:
            return []
        first, rungs = candidates.of(Knobs(micro_batch)), candidates.ladders[micro_batch][::-1]
        bounds: list[tuple[float, Candidate]] = []
        for placements in self._any_resident():
            placed = candidates.placed(first, placements)
            fullest = self._fullest([replace(placed, activations=rung) for rung in rungs])
            if fullest is not None:
                bounds.append((evaluation.least_seconds(fullest), fullest))
        found: dict[tuple[bool, ...], Offer] = {}  # by which are resident: starts that differ in more than the others' placement
        for bound, candidate in sorted(bounds, key=lambda pair: pair[0]):
            slowest = sorted(each.seconds for each in found.values())[starts - 1 : starts]
            if slowest and bound >= slowest[0]:
                break
            stay = tuple(placement == RESIDENT for placement in candidate.placements)
            offer = evaluation.fitting(candidate)
            assert offer is not None  # as its bound was looked at
            found[stay] = min(offer, found.get(stay, offer), key=_seconds)
        return sorted(found.values(), key=_seconds)[:starts]

    def _fullest(self, candidates: list[Candidate]) -> Candidate | None:
        """The last that fits, of such that each needs more than the one before it."""

        def fits(index: int) -> bool:
            return self._evaluation.fits(self._evaluation.footprint_of(candidates[index]))

        last = most(len(candidates) - 1, fits)
        return candidates[last] if fits(last) else None

    def _any_resident(self) -> dict[tuple[Placement, ...], None]:
        """Placements with any chunks resident and the others alike, each once."""
        chunks = self._candidates.chunks
        return {
            tuple(
                RESIDENT if resident else _possible(away, chunk) if chunk.is_updated else frozen
                for chunk, resident in zip(chunks, stays, strict=True)
            ): None
            for away, frozen in product(self._ways_elsewhere, (RESIDENT, FROZEN_AWAY))
            for stays in product((True, False), repeat=len(chunks))
        }

    @property
    def _ways_elsewhere(self) -> list[Placement]:
        return [*self._candidates.elsewhere, *(ON_DISK.values() if self._evaluation.may_use_disk else ())]

    def _squeezed(self, candidate: Candidate) -> Offer | None:
        """Changed one by one, and two by two, until it fits."""
        excess = self._evaluation.excess(candidate)
        while excess > 0:
            less = next((each for each in self._changed(candidate, 2) if self._evaluation.excess(each) < excess), None)
            if less is None:
                return None
            candidate, excess = less, self._evaluation.excess(less)
        return self._evaluation.fitting(candidate)

    def _polished(self, offer: Offer, at_once: int) -> Offer:
        """Changed one by one, up to so many at once, for as long as that helps."""
        better: Offer | None = offer
        while better is not None:
            offer, better = better, None
            enough = (1 - WORTH) * offer.seconds
            for candidate in self._changed(offer.candidate, at_once):
                if self._evaluation.least_seconds(candidate) < enough:
                    other = self._evaluation.fitting(candidate)
                    if other is not None and other.seconds < enough:
                        better = other
                        break
        return offer

    def _with_least_recomputed(self, offer: Offer) -> Offer:
        """Of all choices for a few blocks those that cost least and fit, with the chunks, and with what is offloaded, as they
        are."""
        offloaded = tuple(sorted(offer.candidate.offloaded))
        for seconds, activations in self._tree.all_activations(offer.candidate.micro_batch, offloaded):
            if seconds >= offer.candidate.recompute_seconds:
                break
            other = self._evaluation.fitting(replace(offer.candidate, activations=activations))
            if other is not None:
                return min(offer, other, key=_seconds)
        return offer

    def _changed(self, candidate: Candidate, at_once: int) -> Iterator[Candidate]:
        """With one block or chunk changed, then with two, up to so many."""
        changed = [(-1, candidate)]
        for _ in range(at_once):
            changed = [other for place, each in changed for other in self._changed_after(place, each)]
            yield from (each for _, each in changed)

    def _changed_after(self, last: int, candidate: Candidate) -> Iterator[tuple[int, Candidate]]:
        """With one changed that comes after the last, of the blocks and then the chunks; and which it is."""
        blocks = candidate.profile_pass.blocks
        for place in range(last + 1, len(blocks)):
            for choice in self._candidates.choices(blocks[place]):
                if choice != candidate.activations[place]:
                    yield place, replace(candidate, activations=_with(candidate.activations, place, choice))
        for place in range(max(last + 1, len(blocks)), len(blocks) + len(candidate.chunks)):
            index = place - len(blocks)
            for placement in self._candidates.places(candidate.chunks[index], disk=self._evaluation.may_use_disk):
                if placement != candidate.placements[index]:
                    yield place, self._candidates.placed(candidate, _with(candidate.placements, index, placement))


def _possible(placement: Placement, chunk: ChunkCost) -> Placement:
    """The same; of state that cannot lie on the disk, on the host."""
    on_disk = placement.optimizer == "disk" and not chunk.state_parts
    return replace(placement, optimizer="host") if on_disk else placement


def _with(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return *items[:index], item, *items[index + 1 :]


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

    def is_over(self, offloaded: tuple[int, ...]) -> bool:
        """Whether no branch is left for such trees."""
        return self._branches_left[bool(offloaded)] <= 0

    def _all_activations(self, micro_batch: int, offloaded: tuple[int, ...]) -> Ranked:
        """By the seconds they cost, with these blocks offloaded and no others; none where there are too many."""
        candidates = self._evaluation.candidates
        first, choices = candidates.of(Knobs(micro_batch)), candidates.choices_with(micro_batch, offloaded)
        found = product(*choices) if math.prod(map(len, choices)) <= MOST_ACTIVATIONS else ()
        return sorted((replace(first, activations=each).recompute_seconds, each) for each in found)

    def best(self, micro_batch: int, under: float, offloaded: tuple[int, ...]) -> Offer | None:
        """Of all there is with these blocks offloaded, of what takes less than `under`; as far as the branches go."""
        evaluation, candidates, offloads = self._evaluation, self._evaluation.candidates, bool(offloaded)
        chunks, choices = candidates.chunks, candidates.choices_with(micro_batch, offloaded)
        ranked = self.all_activations(micro_batch, offloaded)
        self._branches_left[offloads] -= TREE_BRANCHES + len(ranked) // RANKED_A_BRANCH
        bounds = Bounds(evaluation, micro_batch, choices, ranked)
        first = bounds.first
        found: Offer | None = None
        start: Branch = ((), ())
        branches = [(bounds.of(start), start)]
        while branches and self._branches_left[offloads] > 0:
            least, (placements, activations) = branches.pop()
            if least >= under:
                continue
            if len(placements) < len(chunks):
                places = candidates.places(chunks[len(placements)], disk=evaluation.may_use_disk)
                nexts: list[Branch] = [((*placements, each), activations) for each in places]
            elif len(activations) < len(choices):
                nexts = [(placements, (*activations, each)) for each in choices[len(activations)]]
            else:
                candidate = candidates.placed(replace(first, chunks=chunks, activations=activations), placements)
                offer = evaluation.fitting(candidate)
                if offer is not None and offer.seconds < under:
                    found, under = offer, (1 - SLACK) * offer.seconds
                continue
            self._branches_left[offloads] -= len(nexts)
            bounded = [(bounds.of(each), each) for each in nexts]
            branches += sorted((each for each in bounded if each[0] < under), key=lambda each: each[0], reverse=True)
        return found


class Bounds:
    """Seconds that nothing in a branch is under; infinite where nothing in it fits."""

    def __init__(self, evaluation: Evaluation, micro_batch: int, choices: list[list[Activations]], ranked: Ranked) -> None:
        candidates = evaluation.candidates
        self._evaluation = evaluation
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
        wholes = ((seconds, max(live, footprint.live_bytes)) for seconds, live in self._front or [(0.0, 0)])
        fits = (seconds for seconds, live in wholes if evaluation.fits(replace(footprint, live_bytes=live)))
        recompute = next(fits, None)
        if recompute is None:
            return math.inf
        return evaluation.least_seconds(fastest, max(recompute - fastest.recompute_seconds, 0.0))

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
        lightest = ChoiceCost(min(block.choices[name].kept_bytes for name in names), 0, 0.0)
        return replace(block, choices={"keep": lightest}, replays={})

    pairs = zip(each.blocks[decided:], choices[decided:], strict=True)
    return replace(each, blocks=(*each.blocks[:decided], *(least(block, names) for block, names in pairs)))
