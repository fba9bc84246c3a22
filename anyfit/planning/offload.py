"""Plans with blocks made again or their activations moved, and with part of the model state on the host: the space of them, and
the best of it.

A point of the space (Knobs), for one micro-batch size:

    a   rung of the ladder of activation choices: which blocks keep, recompute in part, recompute
    o   of them, blocks whose activations move to the host and back instead, evenly spread, so that each has time to
    r   chunks, the first in order of use, whose optimizer is on the device: their gradients come last in backward and their
        weights are needed first in forward, so that nothing could hide their update elsewhere
    w   chunks, the last, whose weights are on the host
    f   share of the other updates that the host does, after those r: it is back with a chunk soonest
    s   share of what is left that is streamed through the device, in turns with the host
    g   whether updates speculate, into a second generation

    minimise    simulated seconds (simulate.py)
    over        a, o, r, w, s, f, g
    subject to  (1 + error) * reserved(a, o, r, w, s, f, g) <= device limit
                host(o, r, w, s, g) <= host limit

For each (a, s, f, g) the device is filled: as many r as fit; where not even r = 0 does, as few w as it takes, and, for a host
that is short, all w with as many r as fit. So it is with half of the blocks and all of them moved, the others kept. These are
taken in the order of a bound that no simulation can be under, until it passes the best simulation; the best few are then improved
by single steps of every knob for as long as they help, of o where it is not 0, and tried with a few other o. On a CPU nothing
moves: its copies are its own cores', when they find the time.

The ladder is greedy: from all kept, the block and the choice that free most bytes for a second they cost, early blocks first,
whose activations live longest. It gives up at most one block's worth against the best for its bytes, which the steps at the end
make up for.

Of few blocks and chunks one step of a knob is much, so each is chosen by itself. Starts are the best of the above, and the best
with any chunks resident, all others alike, and as much kept as there is room for; where neither fits, what is changed until it
does. Each start is changed block by block and chunk by chunk for as long as that helps, and gets of all choices for its blocks
those that cost least and fit; the best few are changed by two at once too. Last, all plans are gone through as a tree, but for
branches that do not fit or are no better by their bound (bound.py), first those of which nothing moves: what is found is the best
there is if that comes to its end.

Of several ranks (`Profile.division`) the first is what has nothing on the host, with as much kept as there is room for. It is
left for what is faster by WORTH_LEAVING at least, in search of which the knobs are turned as above.
"""

from __future__ import annotations

import copy
import heapq
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, combinations, product
from typing import TypeVar

from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import BlockCost, ChoiceCost, ChunkCost, Pass, Profile

from .bound import least_seconds
from .simulate import BESIDE, Candidate, Rates, Simulated, simulate
from .weigh import Weight, live_of_rank, weigh

RESIDENT = Placement()
FROZEN_AWAY = Placement(weights="host", optimizer="host")
LEAST_SLOTS = 4
AGAIN: tuple[Activations, ...] = ("selective", "recompute")
SMALL = 16  # blocks and chunks together: few enough to change each by itself
MOST_SUBSETS_OF = 9  # chunks: few enough to try any of them
MOST_BRANCHES = 12_000  # of the trees of all plans: two seconds
MOST_MOVING_BRANCHES = 6_000  # of those of which something moves
SLACK = 0.005  # of a step: the tree is not searched for less
TWICE = 2  # of those that were changed one by one: the best, that are changed two by two
SUBSETS = 4  # of resident chunks that are started from, for every other start
MOST_ACTIVATIONS = 3**7  # choices for all blocks: few enough to try them all
RUNGS = 9  # of a ladder that are tried at first
STREAMED = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MORE_STREAMED = (0.0, 0.05, 0.1, 0.15)  # where that is too much for the host, which has no gradients of what is streamed
HOST_FIRST = (0.0, 0.12)
LINES = 6  # that are drawn through what was weighed; then it is halved
TRIED = 48  # that are simulated at first, of all STARTS
STARTS, ROUNDS = 4, 10  # that are improved, and by how many single steps at most
CLOSE = 1.1  # times the best before it: what may become better still
WORTH = 0.002  # of a step: less is no reason to change a plan
WORTH_LEAVING = 0.05  # of a step of several ranks: for less, nothing goes to the host
# Of the host, besides the plan's: of a process with a GPU, and of each byte of the plan's, which the kernel keeps pinned. With
# 120 GiB 1.4 GiB and 0.8 % were seen on an H200; the rest stays free.
PROCESS_BYTES, PINNED_SHARE = 2 * 2**30, 0.02
PAGES_BYTES = 10 * PAGE_BYTES  # of the host, at most, for a chunk's arrays to begin on pages
FRAGMENTATION = 0.21  # of what is live beyond the pools: the most that torch's allocator was seen to add, with segments that grow
NORM_BYTES, UPDATE_BYTES, GATHER_BYTES = 2, 30, 4  # read and written of a parameter on the device
# Of a gradient that is added up over passes: a sum in fp32 is read and written in each but the first, which only writes it; and
# the norm and the update read it in place of a bf16 gradient. Where gradients are fp32, the first pass makes the sum itself.
ADD_BYTES = {"bf16": 10, "fp32": 8}


Item = TypeVar("Item")


@dataclass(frozen=True)
class Knobs:
    """A point of the space."""

    micro_batch: int
    rung: int = 0
    moved: int = 0
    resident: int = 0
    away: int = 0
    host_first: float = 0.0
    streamed: float = 0.0
    speculates: bool = False


@dataclass(frozen=True)
class Offer:
    """A candidate with all that is known of it."""

    candidate: Candidate
    weight: Weight
    simulated: Simulated
    knobs: Knobs | None = None  # None: changed block by block and chunk by chunk

    @property
    def uses_host(self) -> bool:
        return self.weight.host_bytes > 0


def beside_bytes(host_bytes: int) -> int:
    """That a process with a GPU takes of the host besides what its plan does."""
    return PROCESS_BYTES + int(PINNED_SHARE * host_bytes)


def add_seconds(profile: Profile) -> float:
    """Of one gradient and pass, where the device adds them up over passes."""
    return ADD_BYTES[profile.precision] / profile.memory_bytes_per_second


class Space:
    """All candidates of a profile, weighed and simulated when asked for."""

    def __init__(self, profile: Profile) -> None:
        assert profile.host is not None
        self.profile = profile
        self._host = profile.host
        self._passes = {each.micro_batch: each for each in profile.passes}
        self._ladders = {size: ladder(each) for size, each in self._passes.items()}
        self._candidates: dict[Knobs, Candidate] = {}
        self._placings: dict[tuple[object, ...], tuple[Placement, ...]] = {}  # by the knobs that they depend on
        self._weights: dict[Knobs, Weight] = {}
        self._simulated: dict[Knobs, Simulated] = {}
        self._played: dict[tuple[object, ...], Simulated] = {}
        self._bounds: dict[Knobs, float] = {}
        self._lives: dict[tuple[int, int, int, bool], int] = {}
        self._least: dict[int, Knobs] = {}
        self._moves: dict[int, list[int]] = {}
        self._branches_left = {False: MOST_BRANCHES, True: MOST_MOVING_BRANCHES}  # by whether something moves
        self._activations: dict[tuple[int, tuple[int, ...]], list[tuple[float, tuple[Activations, ...]]]] = {}
        memory = profile.memory_bytes_per_second
        norm, whole = NORM_BYTES / memory, profile.update.seconds / max(profile.trainable, 1)  # with what each parameter costs
        self.is_gpu = self._host.overlaps
        self._together = [sum(1 << index for index in each) for each in profile.together]  # bits of chunks
        update = max(UPDATE_BYTES / memory, whole - norm) if self.is_gpu else whole  # torch steps resident chunks on a CPU
        self.rates = Rates(self._host, norm, update, GATHER_BYTES / memory, add_seconds(profile))

        self.others = tuple(Space(profile.laid_out(layout)) for layout in profile.other_layouts)  # in chunks of other sizes

    def with_limits_of(self, profile: Profile) -> Space:
        """The same for a profile that differs in its limits alone: what was weighed and simulated holds there too."""
        other = copy.copy(self)
        other.profile = profile
        other.others = tuple(
            each.with_limits_of(profile.laid_out(layout)) for each, layout in zip(self.others, profile.other_layouts, strict=True)
        )
        return other

    def laid_out_like(self, candidate: Candidate) -> Space:
        """The space in whose chunks it is."""
        return next(each for each in self.sizes if each.profile.chunks == candidate.chunks)

    @property
    def sizes(self) -> tuple[Space, ...]:
        """Of chunks, the usual one first."""
        return self, *self.others

    # ------------------------------------------------------------------ one point

    @cached_property
    def _slots(self) -> int:
        """Enough for the weights of one block, all of which one that is made again holds, and for some that come."""
        counts = [0] * len(self.profile.passes[0].blocks)
        for chunk in self.profile.chunks:
            for block in chunk.blocks:
                counts[block] += 1
        named = [count for count, block in zip(counts, self.profile.passes[0].blocks, strict=True) if block.name]
        return max(LEAST_SLOTS, 2 * max(named, default=1) + 1 if self.is_gpu else max(named, default=1) + 1)

    def candidate(self, knobs: Knobs) -> Candidate:
        if knobs not in self._candidates:
            self._candidates[knobs] = self._candidate(knobs)
        return self._candidates[knobs]

    def _candidate(self, knobs: Knobs) -> Candidate:
        placing = knobs.resident, knobs.away, knobs.host_first, knobs.streamed, knobs.speculates
        if placing not in self._placings:
            self._placings[placing] = tuple(_placements(self.profile.chunks, knobs))
        placements = self._placings[placing]
        return Candidate(
            each=self._passes[knobs.micro_batch],
            accumulation=-(-self.profile.batch_size // knobs.micro_batch),
            activations=self._activations_of(knobs),
            chunks=self.profile.chunks,
            placements=placements,
            slots=(slots := self._slots_for(placements)),
            prefetch=self._prefetch(slots),
            division=self.profile.division,
        )

    def _activations_of(self, knobs: Knobs) -> tuple[Activations, ...]:
        choices = list(self._ladders[knobs.micro_batch][knobs.rung])
        movable = self._movable(knobs.micro_batch) if knobs.moved else []
        for place, block in enumerate(movable):
            if place * knobs.moved % len(movable) < knobs.moved:
                choices[block] = "offload"
        return tuple(choices)

    def _movable(self, micro_batch: int) -> list[int]:
        """Blocks."""
        if micro_batch not in self._moves:
            blocks = self._passes[micro_batch].blocks
            self._moves[micro_batch] = [index for index, block in enumerate(blocks) if "offload" in self.choices(block)]
        return self._moves[micro_batch]

    def choices(self, block: BlockCost) -> list[Activations]:
        """What can be done with its activations."""
        found: list[Activations] = ["keep", *(name for name in AGAIN if block.name and name in block.choices)]
        moves = self.is_gpu and block.name and "offload" in block.choices and block.choices["offload"].moved_bytes
        return [*found, "offload"] if moves else found

    def choices_with(self, micro_batch: int, moved: tuple[int, ...]) -> list[list[Activations]]:
        """By block, where these are moved and no others."""
        found: list[list[Activations]] = []
        for index, block in enumerate(self._passes[micro_batch].blocks):
            found.append(["offload"] if index in moved else [name for name in self.choices(block) if name != "offload"])
        return found

    def all_moved(self, micro_batch: int) -> int:
        return len(self._movable(micro_batch))

    def _some_moved(self, micro_batch: int) -> list[int]:
        """A few numbers of blocks, none first."""
        count = self.all_moved(micro_batch)
        return sorted({0, count // 4, count // 2, count})

    def _slots_for(self, placements: tuple[Placement, ...]) -> int:
        """As many as a block wants, and one more than are needed at once; but no more than there are chunks for them."""
        away = sum(1 << index for index, placement in enumerate(placements) if self.gathers or placement.weights == "host")
        needed = max(((each & away).bit_count() for each in self._together), default=0)
        return min(max(self._slots, needed + 1), away.bit_count())

    @property
    def gathers(self) -> bool:
        """Ranks divide weights, and put them together in slots."""
        return self.profile.division is not None and self.profile.division.weights

    def _prefetch(self, slots: int) -> int:
        return min(max(2, self._slots // 2), max(slots - 1, 0))

    def weight(self, knobs: Knobs) -> Weight:
        if knobs not in self._weights:
            self._weights[knobs] = weigh(self.profile, self.candidate(knobs), self._live_bytes(knobs))
        return self._weights[knobs]

    def _live_bytes(self, knobs: Knobs) -> int | None:
        """Of one of several ranks, whose chunks change nothing of it where all are reduced alike: found once for each choice of
        activations."""
        division, candidate = self.profile.division, self.candidate(knobs)
        if division is None or (candidate.accumulation > 1 and not division.gradients):
            return None
        streams = knobs.moved > 0 and any(placement.route == "streamed" for placement in candidate.placements)
        key = knobs.micro_batch, knobs.rung, knobs.moved, streams
        if key not in self._lives:
            self._lives[key] = live_of_rank(self.profile, candidate)
        return self._lives[key]

    def simulated(self, knobs: Knobs) -> Simulated:
        if knobs not in self._simulated:
            candidate = self.candidate(knobs)
            # Others may have come to the same, and a simulation takes far longer than to look.
            same = candidate.each.micro_batch, candidate.activations, candidate.placements, candidate.slots, candidate.prefetch
            if same not in self._played:
                self._played[same] = simulate(candidate, self.rates)
            self._simulated[knobs] = self._played[same]
        return self._simulated[knobs]

    def reserved_bytes(self, weight: Weight) -> int:
        added = int(FRAGMENTATION * weight.live_bytes) if self.is_gpu else 0
        return weight.device_bytes + added + self.profile.context_bytes

    def needed_bytes(self, weight: Weight) -> int:
        """Of the device, at the far end of the error band."""
        return int(self.reserved_bytes(weight) * (1 + self.profile.offload_error))

    def fits(self, weight: Weight) -> bool:
        return self._fits_device(weight) and self._host_bytes(weight) <= self.profile.host_limit_bytes

    def _host_bytes(self, weight: Weight) -> int:
        pages = PAGES_BYTES * len(self.profile.chunks) if weight.host_bytes else 0
        return weight.host_bytes + pages + (beside_bytes(weight.host_bytes) if self.is_gpu else 0)

    def _fits_device(self, weight: Weight) -> bool:
        return self.needed_bytes(weight) <= self.profile.device_limit_bytes

    def offer(self, knobs: Knobs) -> Offer:
        return Offer(self.candidate(knobs), self.weight(knobs), self.simulated(knobs), knobs)

    def least(self, micro_batch: int) -> Knobs:
        """What needs least of the device."""
        if micro_batch not in self._least:
            last = Knobs(micro_batch, rung=self.last_rung(micro_batch))
            ways = product(self._some_moved(micro_batch), self._before_larger_slots())
            points = [replace(last, moved=moved, away=away) for moved, away in ways]
            self._least[micro_batch] = min(points, key=lambda knobs: self.reserved_bytes(self.weight(knobs)))
        return self._least[micro_batch]

    def _before_larger_slots(self) -> Iterator[int]:
        """How many of the last chunks are no larger than those after them, and all: any number in between needs more of the
        device than one of these, whether slots are still taken for it, or weights leave that need no larger ones."""
        largest = 0
        for away, chunk in enumerate(reversed(self.profile.chunks)):
            if chunk.weights_bytes > largest:
                largest = chunk.weights_bytes
                yield away
        yield len(self.profile.chunks)

    def least_host_bytes(self, micro_batch: int) -> int | None:
        """What the host has to hold at least, of what fits the device; None where nothing does."""
        last, shares, least = self.last_rung(micro_batch), STREAMED if self.is_gpu else (0.0,), self.least(micro_batch)
        if not self._fits_device(self.weight(least)):
            return None
        for moved in (0, least.moved):  # what moves takes of the host, if only it fits without
            starts = [Knobs(micro_batch, last, moved, streamed=share) for share in shares]
            taken = [self._host_bytes(self.weight(knobs)) for start in starts for knobs in self._fillings(start)]
            if taken:
                return min(taken)
        return None

    # ------------------------------------------------------------------ the best

    def best(self, micro_batch: int, under: float = float("inf"), starts: int = STARTS, **forced: float) -> Offer | None:
        """The fastest that fits, with these knobs as they are; None where nothing fits, or nothing takes less than `under`."""
        if self.profile.division is not None:
            return self._best_of_rank(micro_batch, under, starts, **forced)
        offer = self.best_knobs(micro_batch, under, starts, **forced)
        is_small = len(self.profile.chunks) + len(self._passes[micro_batch].blocks) <= SMALL
        return offer if not is_small or forced else self._best_one_by_one(micro_batch, offer, under, starts)

    def _best_of_rank(self, micro_batch: int, under: float, starts: int, **forced: float) -> Offer | None:
        stays = self.on_device(micro_batch, **forced)
        if stays is not None:
            under = min(under, (1 - WORTH_LEAVING) * stays.simulated.step_seconds)
        moves = self.best_knobs(micro_batch, under, starts, **forced)
        return stays if moves is None or moves.simulated.step_seconds >= under else moves

    def on_device(self, micro_batch: int, **forced: float) -> Offer | None:
        """With nothing on the host, and as little made again as fits; None where nothing does."""
        if forced.get("moved"):
            return None
        last, all_stay = self.last_rung(micro_batch), {**forced, "resident": len(self.profile.chunks)}
        kept = [Knobs(micro_batch, **{**all_stay, "rung": last - more}) for more in range(last + 1)]  # type: ignore[arg-type]
        if "rung" in forced:
            kept = [kept[last - int(forced["rung"])]]
        if not self.fits(self.weight(kept[0])):
            return None
        return self.offer(kept[_most(len(kept) - 1, lambda more: self.fits(self.weight(kept[more])))])

    def least_on_device(self, micro_batch: int) -> Knobs:
        """What needs least of the device with nothing on the host."""
        return Knobs(micro_batch, rung=self.last_rung(micro_batch), resident=len(self.profile.chunks))

    def resident_seconds(self, micro_batch: int) -> float:
        """That the device takes to update all there is."""
        candidate = self.candidate(Knobs(micro_batch, resident=len(self.profile.chunks)))
        return self.rates.update_seconds * sum(each.elements for each in candidate.chunks) / candidate.shards

    def best_like(self, offer: Offer) -> Offer | None:
        """The fastest that fits with the knobs of an offer in chunks of another size, the device filled anew, or a step from
        there; of any knobs, where there is nothing so."""
        if self.profile.division is not None and not offer.uses_host:
            return self.on_device(offer.candidate.each.micro_batch)
        filled = [] if offer.knobs is None else self._fillings(replace(offer.knobs, resident=0, away=0))
        fitting = [near for each in filled if (near := self._near(each)) is not None]
        if not fitting:
            return self.best_knobs(offer.candidate.each.micro_batch, starts=1)
        return self.offer(self._improved(min(fitting, key=self._seconds), {}, rounds=1))

    def best_knobs(self, micro_batch: int, under: float = float("inf"), starts: int = STARTS, **forced: float) -> Offer | None:
        """The same of the knobs alone."""
        tried: list[Knobs] = []
        least = under
        for bound, knobs in sorted(self._filled(micro_batch, forced, under), key=lambda pair: pair[0]):
            if bound >= least or len(tried) == TRIED * starts // STARTS:
                break
            tried.append(knobs)
            least = min(least, self._seconds(knobs))
        first = sorted(tried, key=self._seconds)[:starts]
        rounds = ROUNDS * starts // STARTS
        improved = [self._improved(knobs, forced, rounds) for knobs in first if self._seconds(knobs) < CLOSE * least]
        if improved and not any(knobs.moved for knobs in improved):
            moved = self._moved(min(improved, key=self._seconds), forced)
            improved += [self._improved(knobs, forced, rounds) for knobs in moved]
        return self.offer(min(improved, key=self._seconds)) if improved else None

    def _best_one_by_one(self, micro_batch: int, offer: Offer | None, under: float, starts: int) -> Offer | None:
        """The fastest of any choices for a few blocks and chunks, from what the knobs have come to."""
        offers = [*([] if offer is None else [offer]), *self._of_any_chunks(micro_batch, SUBSETS * starts)]
        if not offers and (squeezed := self._squeezed(self.candidate(self.least(micro_batch)))) is not None:
            offers.append(squeezed)
        once = [self._with_least_again(self._polished(each, 1)) for each in offers]
        different = {(each.candidate.activations, each.candidate.placements): each for each in once}.values()
        twice = [self._polished(each, 2) for each in sorted(different, key=_offered_seconds)[:TWICE]]
        best = min(twice, key=_offered_seconds, default=None)
        least = min(under, best.simulated.step_seconds if best else under)
        for moved in _subsets(self._movable(micro_batch)):
            best = self._in_tree(micro_batch, (1 - SLACK) * least, moved) or best
            least = min(least, best.simulated.step_seconds if best else least)
        return best if best is not None and best.simulated.step_seconds < under else None

    def _in_tree(self, micro_batch: int, under: float, moved: tuple[int, ...]) -> Offer | None:
        """The best of all there is with these blocks moved, of what takes less than `under`: all plans of a few blocks and chunks
        gone through as a tree, chunk by chunk and then block by block, as far as MOST_BRANCHES go. One is left out where nothing
        in it fits, chunks that are not placed weighing nothing and blocks that are not decided keeping the least they can; and
        where nothing in it is faster, such chunks taking no time and such blocks making again no more than the room takes that
        is left."""
        first = replace(self.candidate(Knobs(micro_batch)), chunks=(), placements=(), slots=0, prefetch=0)
        blocks, chunks, moves = first.each.blocks, self.profile.chunks, bool(moved)
        choices = self.choices_with(micro_batch, moved)
        passes = [undecided(first.each, choices, decided) for decided in range(len(blocks) + 1)]
        kept = tuple(names[0] for names in choices)
        front: list[tuple[float, int]] = []  # seconds again, and bytes live: those that nothing beats in both
        for seconds, activations in self._all_activations(micro_batch, moved):
            live = weigh(self.profile, replace(first, activations=activations)).live_bytes
            if not front or live < front[-1][1]:
                front.append((seconds, live))

        def bound(placements: tuple[Placement, ...], activations: tuple[Activations, ...]) -> float:
            fastest = self._placed(replace(first, chunks=chunks[: len(placements)]), placements)
            fastest = replace(fastest, activations=(*activations, *kept[len(activations) :]))
            weight = weigh(self.profile, replace(fastest, each=passes[len(activations)]))
            if not self.fits(weight):
                return math.inf
            fits = (seconds for seconds, live in front if self.fits(replace(weight, live_bytes=max(live, weight.live_bytes))))
            again = next(fits, None) if front else 0.0
            if again is None:
                return math.inf
            return least_seconds(fastest, self.rates, max(again - fastest.seconds_again, 0.0))

        found: Offer | None = None
        branches = [(bound((), ()), tuple[Placement, ...](), tuple[Activations, ...]())]
        while branches and self._branches_left[moves] > 0:
            least, placements, activations = branches.pop()
            if least >= under:
                continue
            if len(placements) < len(chunks):
                places = self._places(chunks[len(placements)], first.accumulation)
                nexts = [((*placements, each), activations) for each in places]
            elif len(activations) < len(blocks):
                nexts = [(placements, (*activations, each)) for each in choices[len(activations)]]
            else:
                candidate = self._placed(replace(first, chunks=chunks, activations=activations), placements)
                offer = self._fitting(candidate)
                if offer is not None and offer.simulated.step_seconds < under:
                    found, under = offer, (1 - SLACK) * offer.simulated.step_seconds
                continue
            self._branches_left[moves] -= len(nexts)
            bounds = [(bound(*each), *each) for each in nexts]
            branches += sorted((each for each in bounds if each[0] < under), key=lambda each: each[0], reverse=True)
        return found

    def _places(self, chunk: ChunkCost, accumulation: int) -> list[Placement]:
        if not chunk.is_updated:
            return [RESIDENT, FROZEN_AWAY]
        streams = (False, True) if self.is_gpu else (False,)
        speculates = (False, True) if accumulation == 1 else (False,)
        return [RESIDENT, *(PLACED[key] for key in product(streams, (False, True), speculates))]

    def _of_any_chunks(self, micro_batch: int, starts: int) -> list[Offer]:
        """With few chunks, any of them may be the resident ones, and the others all alike; as much is kept as there is room for.
        The fastest of these."""
        count = len(self.profile.chunks)
        if count > MOST_SUBSETS_OF:
            return []
        first, rungs = self.candidate(Knobs(micro_batch)), self._ladders[micro_batch][::-1]
        placed = {
            tuple(
                RESIDENT if resident else away if chunk.is_updated else frozen
                for chunk, resident in zip(self.profile.chunks, stays, strict=True)
            ): None
            for away, frozen in product(PLACED.values(), (RESIDENT, FROZEN_AWAY))
            if (self.is_gpu or away.update == "host") and (first.accumulation == 1 or not away.speculates)
            for stays in product((True, False), repeat=count)
        }
        bounds: list[tuple[float, Candidate]] = []
        for placements in placed:
            on_rungs = [replace(self._placed(first, placements), activations=rung) for rung in rungs]
            fullest = on_rungs[_most(len(rungs) - 1, lambda kept: self.fits(weigh(self.profile, on_rungs[kept])))]  # noqa: B023
            if self.fits(weigh(self.profile, fullest)):
                bounds.append((least_seconds(fullest, self.rates), fullest))
        found: dict[
            tuple[bool, ...], Offer
        ] = {}  # by which are resident: starts that differ in more than how the others are placed
        for bound, candidate in sorted(bounds, key=lambda pair: pair[0]):
            slowest = sorted(each.simulated.step_seconds for each in found.values())[starts - 1 : starts]
            if slowest and bound >= slowest[0]:
                break
            stay = tuple(placement == RESIDENT for placement in candidate.placements)
            offer = Offer(candidate, weigh(self.profile, candidate), simulate(candidate, self.rates))
            found[stay] = min(offer, found.get(stay, offer), key=_offered_seconds)
        return sorted(found.values(), key=_offered_seconds)[:starts]

    def _placed(self, candidate: Candidate, placements: tuple[Placement, ...]) -> Candidate:
        """The same with its chunks so, and as many slots as that takes."""
        slots = self._slots_for(placements)
        return replace(candidate, placements=placements, slots=slots, prefetch=self._prefetch(slots))

    def _fitting(self, candidate: Candidate) -> Offer | None:
        weight = weigh(self.profile, candidate)
        return Offer(candidate, weight, simulate(candidate, self.rates)) if self.fits(weight) else None

    def _squeezed(self, candidate: Candidate) -> Offer | None:
        """Changed one by one, and two by two, until it fits."""
        over = self._over(candidate)
        while over > 0:
            less = next((each for each in self._changed(candidate, 2) if self._over(each) < over), None)
            if less is None:
                return None
            candidate, over = less, self._over(less)
        return self._fitting(candidate)

    def _over(self, candidate: Candidate) -> float:
        """By how much of each limit it is too large, together."""
        weight, profile = weigh(self.profile, candidate), self.profile
        if self.fits(weight):
            return 0.0
        needed = self.reserved_bytes(weight) * (1 + profile.offload_error)
        device = max(needed / profile.device_limit_bytes - 1, 0.0)
        return device + max(self._host_bytes(weight) / profile.host_limit_bytes - 1, 0.0)

    def _polished(self, offer: Offer, most: int) -> Offer:
        """A few blocks and chunks are also changed one by one, up to so many at once: one step of a knob is much of so little."""
        better: Offer | None = offer
        while better is not None:
            offer, better = better, None
            enough = (1 - WORTH) * offer.simulated.step_seconds
            for candidate in self._changed(offer.candidate, most):
                if least_seconds(candidate, self.rates) < enough:
                    other = self._fitting(candidate)
                    if other is not None and other.simulated.step_seconds < enough:
                        better = other
                        break
        return offer

    def _with_least_again(self, offer: Offer) -> Offer:
        """Of all choices for a few blocks those that cost least and fit, with the chunks, and with what moves, as they are."""
        moved = tuple(sorted(offer.candidate.offloaded))
        for seconds, activations in self._all_activations(offer.candidate.each.micro_batch, moved):
            if seconds >= offer.candidate.seconds_again:
                break
            other = self._fitting(replace(offer.candidate, activations=activations))
            if other is not None:
                return min(offer, other, key=_offered_seconds)
        return offer

    def _all_activations(self, micro_batch: int, moved: tuple[int, ...]) -> list[tuple[float, tuple[Activations, ...]]]:
        """By the seconds they cost, with these blocks moved and no others; none where there are too many."""
        key = micro_batch, moved
        if key not in self._activations:
            first, choices = self.candidate(Knobs(micro_batch)), self.choices_with(micro_batch, moved)
            found = product(*choices) if math.prod(map(len, choices)) <= MOST_ACTIVATIONS else ()
            self._activations[key] = sorted((replace(first, activations=each).seconds_again, each) for each in found)
        return self._activations[key]

    def _changed(self, candidate: Candidate, most: int) -> Iterator[Candidate]:
        """With one block or chunk changed, then with two, up to so many."""
        changed = [(-1, candidate)]
        for _ in range(most):
            changed = [other for place, each in changed for other in self._changed_after(place, each)]
            yield from (each for _, each in changed)

    def _changed_after(self, last: int, candidate: Candidate) -> Iterator[tuple[int, Candidate]]:
        """With one changed that comes after the last, of the blocks and then the chunks; and which it is."""
        blocks = candidate.each.blocks
        for place in range(last + 1, len(blocks)):
            for choice in self.choices(blocks[place]):
                if choice != candidate.activations[place]:
                    yield place, replace(candidate, activations=_with(candidate.activations, place, choice))
        for place in range(max(last + 1, len(blocks)), len(blocks) + len(candidate.chunks)):
            index = place - len(blocks)
            for placement in self._places(candidate.chunks[index], candidate.accumulation):
                if placement != candidate.placements[index]:
                    yield place, self._placed(candidate, _with(candidate.placements, index, placement))

    def _seconds(self, knobs: Knobs) -> float:
        return self.simulated(knobs).step_seconds

    def _is_better(self, knobs: Knobs, than: Knobs) -> bool:
        enough = self._seconds(than) * (1 - WORTH)
        return self.bound(knobs) < enough and self._seconds(knobs) < enough

    def last_rung(self, micro_batch: int) -> int:
        return len(self._ladders[micro_batch]) - 1

    def _filled(self, micro_batch: int, forced: Mapping[str, float], under: float) -> Iterator[tuple[float, Knobs]]:
        """For every choice of the other knobs, the device as full as it can be; but of those that take longer than `under` in
        any case."""
        taken = self.least_host_bytes(micro_batch)
        if taken is None or taken > self.profile.host_limit_bytes:
            return
        last = self.last_rung(micro_batch)
        some = sorted({min(2, last)} | {round(step * last / (RUNGS - 1)) for step in range(RUNGS)})  # all kept may just not fit
        alone = -(-self.profile.batch_size // micro_batch) == 1
        speculates = (False, True) if alone and self.is_gpu else (False,)
        kept = [*((rung, 0) for rung in some), *((0, moved) for moved in self._some_moved(micro_batch)[-2:] if moved)]
        kept = [each for each in kept if self._pass_seconds(Knobs(micro_batch, *each)) < under]
        for (rung, moved), streamed in product(kept, STREAMED if self.is_gpu else (0.0,)):
            for more in MORE_STREAMED if self.is_gpu else (0.0,):
                start = Knobs(micro_batch, rung, moved, streamed=round(streamed + more, 3))
                if start.streamed > 1 or not _is_forced(start, forced, "rung", "moved", "streamed"):
                    continue
                filled = product(self._fillings(start), HOST_FIRST if self.is_gpu else (0.0,), speculates)
                ways = [self._near(replace(knobs, host_first=first, speculates=guess)) for knobs, first, guess in filled]
                fitting = [near for near in ways if near is not None and _is_forced(near, forced)]
                yield from ((self.bound(near), near) for near in fitting)
                if fitting:
                    break

    def _pass_seconds(self, knobs: Knobs) -> float:
        """Of all passes of a step, and nothing else."""
        candidate = self.candidate(knobs)
        one = sum(each.seconds for each in candidate.each.segments) + candidate.seconds_again
        return candidate.accumulation * one * (BESIDE if self.profile.division is not None and self.is_gpu else 1.0)

    def _near(self, knobs: Knobs) -> Knobs | None:
        """The same, or with a chunk or two less on the device: who updates first, and into what, changes little of its memory."""
        for fewer in range(3):
            resident = max(knobs.resident - fewer, 0)
            away = knobs.away + fewer - (knobs.resident - resident) if knobs.away else 0
            near = replace(knobs, resident=resident, away=min(away, len(self.profile.chunks) - resident))
            if self.fits(self.weight(near)):
                return near
        return None

    def _fillings(self, knobs: Knobs) -> Iterator[Knobs]:
        filled = self._fill(knobs)
        if filled is not None:
            yield filled
        if filled is not None and filled.away:
            count = len(self.profile.chunks)
            far = [replace(knobs, resident=r, away=count - r) for r in range(count + 1)]
            yield far[_fullest(count, lambda r: self._excess_bytes(far[r]))]

    def _fill(self, knobs: Knobs) -> Knobs | None:
        count = len(self.profile.chunks)
        if self._excess_bytes(knobs) <= 0:
            stays = _fullest(count, lambda stays: self._excess_bytes(replace(knobs, resident=stays)))
            return replace(knobs, resident=stays)
        kept = _fullest(count, lambda kept: self._excess_bytes(replace(knobs, away=count - kept)))
        if self._excess_bytes(filled := replace(knobs, away=count - kept)) <= 0:
            return filled
        least = self.least(knobs.micro_batch)  # a few chunks away take more, in slots, than they leave
        return least if replace(knobs, away=least.away) == least and self._excess_bytes(least) <= 0 else None

    def _excess_bytes(self, knobs: Knobs) -> int:
        """By how much it is too large for the device."""
        return self.needed_bytes(self.weight(knobs)) - self.profile.device_limit_bytes

    def bound(self, knobs: Knobs) -> float:
        """Seconds that no simulation of this is under."""
        if knobs not in self._bounds:
            self._bounds[knobs] = least_seconds(self.candidate(knobs), self.rates)
        return self._bounds[knobs]

    def _improved(self, knobs: Knobs, forced: Mapping[str, float], rounds: int) -> Knobs:
        for _ in range(rounds):
            near = [each for each in set(self._neighbours(knobs)) if _is_forced(each, forced) and self._is_sound(each)]
            best = knobs
            for each in sorted(near, key=lambda each: (self.bound(each), str(each))):
                if self._is_better(each, best):
                    best = each
            if best == knobs:
                break
            knobs = best
        return knobs

    def _moved(self, knobs: Knobs, forced: Mapping[str, float]) -> list[Knobs]:
        """The same with some blocks moved, and the device filled anew, where that is better."""
        others = [replace(knobs, moved=moved, resident=0, away=0) for moved in self._some_moved(knobs.micro_batch)[1:]]
        filled = [near for each in others for full in self._fillings(each) if (near := self._near(full)) is not None]
        return [each for each in filled if _is_forced(each, forced) and self._is_better(each, knobs)]

    def _is_sound(self, knobs: Knobs) -> bool:
        """It fits, and weights are not away only to fill slots that take as much."""
        return not 0 < knobs.away <= self._slots and self.fits(self.weight(knobs))

    def _neighbours(self, knobs: Knobs) -> Iterator[Knobs]:
        """A step of one knob, or of two that share the memory; the device is filled again where that leaves room."""
        count, rungs = len(self.profile.chunks), len(self._ladders[knobs.micro_batch])
        for step in (-4, -2, -1, 1, 2, 4):
            if 0 <= knobs.resident + step <= count - knobs.away:
                yield replace(knobs, resident=knobs.resident + step)
            if 0 <= knobs.away + step <= count - knobs.resident:
                yield replace(knobs, away=knobs.away + step)
            if 0 <= knobs.rung + step < rungs:
                yield replace(knobs, rung=knobs.rung + step)
                filled = self._fill(replace(knobs, rung=knobs.rung + step, resident=0, away=0))
                if filled is not None:
                    yield filled
            if knobs.moved and 0 <= knobs.moved + step <= self.all_moved(knobs.micro_batch):
                filled = self._fill(replace(knobs, moved=knobs.moved + step, resident=0, away=0))
                yield replace(knobs, moved=knobs.moved + step)
                if filled is not None:
                    yield filled
        if not self.is_gpu:
            return
        for share in (-0.15, -0.05, -0.02, 0.02, 0.05, 0.15):
            for changed in (
                replace(knobs, streamed=round(min(max(knobs.streamed + share, 0.0), 1.0), 3)),
                replace(knobs, host_first=round(min(max(knobs.host_first + share, 0.0), 1.0), 3)),
            ):
                filled = self._fill(replace(changed, resident=0, away=0))
                yield changed
                if filled is not None:
                    yield filled


def _subsets(items: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """None, all of one, of two..."""
    return chain.from_iterable(combinations(items, count) for count in range(len(items) + 1))


def undecided(each: Pass, choices: Sequence[Sequence[Activations]], decided: int) -> Pass:
    """The same pass, but that of all blocks after so many, those that have a choice keep the least there is for them."""

    def least(block: BlockCost, names: Sequence[Activations]) -> BlockCost:
        if not block.name or len(names) == 1:
            return block
        return replace(block, choices={"keep": ChoiceCost(min(block.choices[name].kept_bytes for name in names), 0, 0.0)})

    pairs = zip(each.blocks[decided:], choices[decided:], strict=True)
    return replace(each, blocks=(*each.blocks[:decided], *(least(block, names) for block, names in pairs)))


def _offered_seconds(offer: Offer) -> float:
    return offer.simulated.step_seconds


def _is_forced(knobs: Knobs, forced: Mapping[str, float], *names: str) -> bool:
    """Whether these knobs, or all, are as they were to be."""
    return all(getattr(knobs, name) == value for name, value in forced.items() if not names or name in names)


def _most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, where all smaller ones do; 0 where none does."""
    low, high = 0, count
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return low


def _fullest(count: int, excess: Callable[[int], int]) -> int:
    """The same of what is not too large, and grows by about as much with each: where the line through the last two has it."""
    low, high = 0, count
    seen: list[tuple[int, int]] = []
    while low < high:
        middle = (low + high + 1) // 2
        if 2 <= len(seen) <= LINES:
            (one, its), (other, others) = seen[-2:]
            if (others - its) * (other - one) > 0:
                middle = min(max(math.floor(other - others * (other - one) / (others - its)), low + 1), high)
        seen.append((middle, excess(middle)))
        low, high = (middle, high) if seen[-1][1] <= 0 else (low, middle - 1)
    return low


def ladder(each: Pass) -> list[tuple[Activations, ...]]:
    """Choices for all blocks, from all kept to the least that can be kept and nothing moved."""
    now: list[Activations] = ["keep"] * len(each.blocks)
    found = [tuple(now)]
    heap: list[tuple[float, int, Activations]] = []

    def offer(index: int) -> None:
        """The choice that frees most for what it costs."""
        choices = each.blocks[index].choices
        here = choices[now[index]]
        steps: list[tuple[float, int, Activations]] = [
            ((choices[name].seconds - here.seconds) / (here.kept_bytes - choices[name].kept_bytes), index, name)
            for name in AGAIN
            if name in choices and choices[name].kept_bytes < here.kept_bytes
        ]
        if steps:
            heapq.heappush(heap, min(steps))

    for index, block in enumerate(each.blocks):
        if block.name and "keep" in block.choices:
            offer(index)
    while heap:
        _, index, name = heapq.heappop(heap)
        now[index] = name
        found.append(tuple(now))
        offer(index)
    return found


def _with(items: tuple[Item, ...], index: int, item: Item) -> tuple[Item, ...]:
    return *items[:index], item, *items[index + 1 :]


def _placements(chunks: tuple[ChunkCost, ...], knobs: Knobs) -> Iterator[Placement]:
    rest = sum(chunk.elements for chunk in chunks[knobs.resident :] if chunk.is_updated)
    others, streamed, first = 0, 0.0, 0
    for index, chunk in enumerate(chunks):
        is_away = index >= len(chunks) - knobs.away
        if not chunk.is_updated:
            yield FROZEN_AWAY if is_away else RESIDENT
            continue
        if index < knobs.resident:
            yield RESIDENT
            continue
        if first + chunk.elements / 2 <= knobs.host_first * rest:
            first += chunk.elements
            streams = False
        else:
            others += chunk.elements
            streams = streamed + chunk.elements / 2 <= knobs.streamed * others
            streamed += chunk.elements if streams else 0
        yield PLACED[streams, is_away, knobs.speculates]


PLACED = {
    (streams, is_away, guesses): Placement(
        weights="host" if is_away else "device",
        gradients="device" if streams else "host",
        optimizer="host",
        update="device" if streams else "host",
        speculates=guesses,
    )
    for streams, is_away, guesses in product((False, True), repeat=3)
}
