"""Few blocks and chunks, each chosen by itself: one step of a knob is much of so little.

Starts are the best of the knobs, and the best with any chunks resident, all others alike, and as much kept as there is room for;
where neither fits, what is changed until it does. Each start is changed block by block and chunk by chunk for as long as that
helps, and gets of all choices for its blocks those that cost least and fit; the best few are changed by two at once too. Last,
all plans are gone through as a tree (tree.py): what is found is the best there is if that comes to its end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import chain, combinations, product
from operator import attrgetter
from typing import TypeVar

from anyfit.values.plan import Placement

from .bound import least_seconds
from .candidate import Candidate
from .evaluation import Evaluation, Offer
from .knobs import FROZEN_AWAY, PLACED, RESIDENT, Knobs
from .local_search import WORTH, most
from .simulation import simulate
from .tree import SLACK, Tree

SMALL = 16  # blocks and chunks together: few enough to change each by itself
MOST_SUBSETS_OF = 9  # chunks: few enough to try any of them
SUBSETS = 4  # of resident chunks that are started from, for every other start
BEST_PAIRS = 2  # after single changes, try changing the best ones in pairs
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
        movable = self._candidates.movable(micro_batch)
        for moved in chain.from_iterable(combinations(movable, count) for count in range(len(movable) + 1)):
            best = self._tree.best(micro_batch, (1 - SLACK) * enough, moved) or best
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
        for placements in self._any_resident(first.accumulation):
            placed = candidates.placed(first, placements)
            fullest = self._fullest([replace(placed, activations=rung) for rung in rungs])
            if fullest is not None:
                bounds.append((least_seconds(fullest, evaluation.rates), fullest))
        found: dict[tuple[bool, ...], Offer] = {}  # by which are resident: starts that differ in more than the others' placement
        for bound, candidate in sorted(bounds, key=lambda pair: pair[0]):
            slowest = sorted(each.seconds for each in found.values())[starts - 1 : starts]
            if slowest and bound >= slowest[0]:
                break
            stay = tuple(placement == RESIDENT for placement in candidate.placements)
            offer = Offer(candidate, evaluation.footprint_of(candidate), simulate(candidate, evaluation.rates))
            found[stay] = min(offer, found.get(stay, offer), key=_seconds)
        return sorted(found.values(), key=_seconds)[:starts]

    def _fullest(self, candidates: list[Candidate]) -> Candidate | None:
        """The last that fits, of such that each needs more than the one before it."""

        def fits(index: int) -> bool:
            return self._evaluation.fits(self._evaluation.footprint_of(candidates[index]))

        last = most(len(candidates) - 1, fits)
        return candidates[last] if fits(last) else None

    def _any_resident(self, accumulation: int) -> dict[tuple[Placement, ...], None]:
        """Placements, each once."""
        chunks = self._candidates.chunks
        return {
            tuple(
                RESIDENT if resident else away if chunk.is_updated else frozen
                for chunk, resident in zip(chunks, stays, strict=True)
            ): None
            for away, frozen in product(PLACED.values(), (RESIDENT, FROZEN_AWAY))
            if (self._candidates.is_gpu or away.update == "host") and (accumulation == 1 or not away.speculates)
            for stays in product((True, False), repeat=len(chunks))
        }

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
                if least_seconds(candidate, self._evaluation.rates) < enough:
                    other = self._evaluation.fitting(candidate)
                    if other is not None and other.seconds < enough:
                        better = other
                        break
        return offer

    def _with_least_recomputed(self, offer: Offer) -> Offer:
        """Of all choices for a few blocks those that cost least and fit, with the chunks, and with what is offloaded, as they
        are."""
        moved = tuple(sorted(offer.candidate.offloaded))
        for seconds, activations in self._tree.all_activations(offer.candidate.micro_batch, moved):
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
            for placement in self._candidates.places(candidate.chunks[index], candidate.accumulation):
                if placement != candidate.placements[index]:
                    yield place, self._candidates.placed(candidate, _with(candidate.placements, index, placement))


def _with(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return *items[:index], item, *items[index + 1 :]
