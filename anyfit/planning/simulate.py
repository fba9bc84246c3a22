"""A step on its streams: what a candidate plan would take, played through event by event.

The computation goes through its segments, and waits where the engine would: for the weights of a block (their update, or their
way up), for a stage to put gradients in. Beside it work the two copy engines and the host's update, each on one thing at a time:

    up      weights to slots, fresh weights, activations that come back; these take turns, copy by copy; and states that are
            lifted, a part at a time where nothing else is to be copied
    down    gradients, states that are lowered, activations that move; these take turns
    host    updates, the most urgent of those whose gradients have come

All three use the host's memory: the host is slower while copies run, and copies are while the host updates.

One of several ranks has a link to the others besides, on which one exchange is under way at a time: weights that are divided are
put together for each use, gradients are summed when a chunk's are there, fresh weights that are whole on every rank are spread.
Where it goes through the link to the host, an exchange and a copy that meet are half as fast each.

A block's activations go down when its forward is over, and come back up when backward comes to the offloaded block after it.

Updates that do not speculate begin when the norm is known; the host's are in two parts then, of as many chunks as it is through
with in backward: weights, and moments when nobody waits for weights, before the chunk's next gradients come. A chunk's weights
are ready for the next forward when its update is over and they are where they live; on their way up each waits for those that
forward uses before it. The first steps fill the lanes; the last one is the figure, or the one before it where both take as long
up to the first backward: that is where all that was left of a step is over. Of many micro-batches of a rank a few are played:
those in the middle are alike.
"""

from __future__ import annotations

import functools
import heapq
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, get_args

from anyfit.values.engine import GRADIENT_STAGES, LATER, REDUCTION_STAGES, STREAMED_DEPTH, is_two_phase
from anyfit.values.plan import Activations, Placement
from anyfit.values.profile import ChunkCost, Division, HostRates, Pass

STEPS = 3
ALIKE = 1e-9  # of a step, by which times differ that are the same
RANK_STEPS = 2  # where nothing is on the host, whose lanes fill slowly
RANK_PASSES = 4  # of a step of a rank that are played at most; one before the last stands for those that are not
# What the computation takes where copies, updates and exchanges run beside it, on the same memory and behind the same Python
# lock: the planned steps of benchmarks/results/planned.json that were to wait for nothing took 1.04 to 1.14 of their own, most
# under 1.09. Of exchanges nobody has measured it.
BESIDE = 1.07
DOWN = 1.7  # times as much as a byte that goes up, one that comes down slows the host's updates: it is written to their memory
LIFT_SECONDS = 1.5e-3  # of a lift, beside its copies: its parts wait for each other
UPDATE_TRAFFIC = 26  # bytes of the host's memory that an update reads and writes
DONE = 1e-3  # of an update: what is left of it when it counts as done
# Of an update's traffic: to add a gradient up on the host, and, where the device is a CPU, to take its norm there; weights alone,
# or moments alone; what a gradient that was added up has more than one that was not.
ADDED, NORMED, PARTED, WIDER = 10 / UPDATE_TRAFFIC, 4 / UPDATE_TRAFFIC, 18 / UPDATE_TRAFFIC, 2 / UPDATE_TRAFFIC
REDUCED_BYTES = 4  # an element, of gradients that ranks sum
HAND_OUT_SECONDS = 1e-4  # that the host takes to start one chunk's update, while the device has nothing to do


@dataclass(frozen=True)
class Candidate:
    """All that decides the time of a step."""

    each: Pass
    accumulation: int
    activations: tuple[Activations, ...]  # a block each
    chunks: tuple[ChunkCost, ...]
    placements: tuple[Placement, ...]
    slots: int
    prefetch: int
    division: Division | None = None  # this is one rank of several

    @property
    def shards(self) -> int:
        """Ranks that divide the optimizer's state."""
        return 1 if self.division is None else self.division.shards

    @property
    def gathers(self) -> bool:
        """Weights on the device are put together for each use."""
        return self.division is not None and self.division.weights

    def reduces(self, placement: Placement, *, is_last: bool) -> bool:
        """Whether gradients of this micro-batch are summed over ranks; else they add up on each."""
        division = self.division
        return division is not None and (is_last or division.gradients or placement.gradients == "host")

    def slowness(self, rates: Rates) -> float:
        """What each second of the computation takes, beside all else."""
        stays = all(each.route == "resident" and each.weights != "host" for each in self.placements)
        is_alone = stays and not self.offloaded and self.division is None
        return 1.0 if is_alone or not rates.host.overlaps else BESIDE

    def ending_seconds(self, resident: float) -> float:
        """After the norm is known, where the device takes so many for resident updates: the host starts the others meanwhile. Of
        several ranks it starts them all, one after another."""
        handed_out = HAND_OUT_SECONDS * sum(placement.route != "resident" for placement in self.placements)
        return max(resident, handed_out) if self.division is None else resident + handed_out

    @cached_property
    def uses(self) -> tuple[tuple[int, ...], ...]:
        """By segment, which chunks it takes weights from."""
        of_block: list[list[int]] = [[] for _ in self.each.blocks]
        for index, chunk in enumerate(self.chunks):
            for block in chunk.blocks:
                of_block[block].append(index)
        return tuple(
            tuple(
                index
                for index in of_block[segment.block]
                if not segment.parameters or not set(segment.parameters).isdisjoint(self.chunks[index].parameters)
            )
            for segment in self.each.segments
        )

    @cached_property
    def offloaded(self) -> tuple[int, ...]:
        """Blocks whose activations move, in the order in which forward comes to them."""
        if "offload" not in self.activations:
            return ()
        order = dict.fromkeys(segment.block for segment in self.each.segments if segment.phase == "forward")
        return tuple(block for block in order if self.activations[block] == "offload")

    @cached_property
    def before(self) -> dict[int, int]:
        """By offloaded block, the one before it: it starts to come back when backward comes to this one."""
        return dict(zip(self.offloaded[1:], self.offloaded, strict=False))

    @property
    def seconds_again(self) -> float:
        """Of one pass: forward work that backward does once more."""
        pairs = zip(self.each.blocks, self.activations, strict=True)
        return sum(block.choices[choice].seconds for block, choice in pairs if choice in ("recompute", "selective"))


@dataclass(frozen=True)
class Rates:
    host: HostRates
    norm_seconds: float  # of gradients that are on the device, each parameter
    update_seconds: float  # of a resident parameter, or one that was lifted
    gather_seconds: float = 0.0  # of a gradient that is put beside its chunk's others, to go down with them
    add_seconds: float = 0.0  # of one that is added to those of earlier passes on the device

    @property
    def host_norm_seconds(self) -> float:
        """Of gradients that were added up on the host; for a GPU their squares are taken with the adding."""
        return 0.0 if self.host.overlaps else NORMED / self.host.updates_per_second


Waits = Literal["fetch", "update", "gradients", "activations", "exchange"]


@dataclass(frozen=True)
class Simulated:
    step_seconds: float
    compute_seconds: float  # without what is recomputed
    recompute_seconds: float
    update_seconds: float  # that the device works on updates: resident and streamed ones, the norm, gradients that are to go down
    waits_seconds: Mapping[Waits, float]
    exchange_seconds: float = 0.0  # that the link between ranks is busy


def simulate(candidate: Candidate, rates: Rates) -> Simulated:
    return _Play(candidate, rates).result()


class _Signal:
    """Something that will have happened."""

    def __init__(self, *, happened: bool = False) -> None:
        self.happened = happened
        self._then: list[Callable[[], None]] = []

    def fire(self) -> None:
        self.happened = True
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    def then(self, call: Callable[[], None]) -> None:
        if self.happened:
            call()
        else:
            self._then.append(call)


class _Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    def run(self, until: _Signal) -> None:
        while not until.happened:
            self.now, _, call = heapq.heappop(self._events)
            call()


class _Server:
    """One thing at a time; of several queues each in turn, of a queue the most urgent. One that yields waits for others."""

    def __init__(self, clock: _Clock, *queues: str, yields: str | None = None) -> None:
        self._clock = clock
        self._queues: dict[str, list[tuple[float, int, float, Callable[[], None]]]] = {name: [] for name in queues}
        self._in_turn = list(self._queues.values())
        self._last: list[tuple[float, int, float, Callable[[], None]]] = []
        if yields is not None:
            self._queues[yields] = self._last
        self._turn = 0
        self._count = 0
        self._since = self._speed = 0.0
        self._done = 0.0  # amount, but for what it is at now
        self.is_busy = False
        self.rate: Callable[[], float] = lambda: 1.0  # of what is begun now

    def add(self, queue: str, amount: float, done: Callable[[], None], order: float = 0) -> None:
        self._count += 1
        heapq.heappush(self._queues[queue], (order, self._count, amount, done))
        self._start()

    @property
    def done(self) -> float:
        """Amount, up to now."""
        return self._done + ((self._clock.now - self._since) * self._speed if self.is_busy else 0.0)

    def _start(self) -> None:
        if self.is_busy:
            return
        turn, queues = self._turn, self._in_turn
        for _ in queues:
            queue = queues[turn]
            turn = (turn + 1) % len(queues)
            if queue:
                self._turn = turn
                self._serve(queue)
                return
        if self._last:
            self._serve(self._last)

    def _serve(self, queue: list[tuple[float, int, float, Callable[[], None]]]) -> None:
        self.is_busy, self._since, self._speed = True, self._clock.now, self.rate()
        _, _, amount, done = heapq.heappop(queue)
        self._clock.at(amount / self._speed, functools.partial(self._finish, done))

    def _finish(self, done: Callable[[], None]) -> None:
        self._done, self.is_busy = self.done, False
        done()
        self._start()


class _Host:
    """Updates, the most urgent first; how fast they are is known when one ends, by what was copied meanwhile."""

    def __init__(self, clock: _Clock, rates: HostRates, up: _Server, down: _Server) -> None:
        self._clock, self._rates, self._copies = clock, rates, (up, down)
        self._waiting: list[tuple[int, int, float, Callable[[], None]]] = []
        self._count = 0
        self.is_busy = False

    def add(self, elements: float, done: Callable[[], None], order: int) -> None:
        self._count += 1
        heapq.heappush(self._waiting, (order, self._count, elements, done))
        self._start()

    def _start(self) -> None:
        if not self.is_busy and self._waiting:
            _, _, elements, done = heapq.heappop(self._waiting)
            self.is_busy = True
            self._go_on(elements, self._rates.updates_per_second, DONE * elements, done)

    def _go_on(self, left: float, rate: float, enough: float, done: Callable[[], None]) -> None:
        began, copied = self._clock.now, self._copied

        def look() -> None:
            took = self._clock.now - began
            found = self._rate_beside((self._copied - copied) / took)
            still = left - found * took
            if still > enough:
                self._go_on(still, found, enough, done)
                return
            self.is_busy = False
            done()
            self._start()

        self._clock.at(left / rate, look)

    def _rate_beside(self, copied_per_second: float) -> float:
        """Updates a second: the more is copied, the fewer. Measured is the rate with nothing copied, and with all that goes."""
        alone, loaded = self._rates.updates_per_second, self._rates.loaded
        if loaded is None:
            return alone
        share = copied_per_second / (loaded.up_bytes_per_second + DOWN * loaded.down_bytes_per_second)
        return max(alone - (alone - loaded.updates_per_second) * share, loaded.updates_per_second / 2)

    @property
    def _copied(self) -> float:
        """Bytes, as many as would go up in their place."""
        up, down = self._copies
        return up.done + DOWN * down.done


@dataclass(eq=False)
class _Chunk:
    index: int
    cost: ChunkCost
    placement: Placement
    shards: int = 1
    gathers: bool = False
    missing: int = 0  # backward segments of this micro-batch until its gradients are complete
    fresh: _Signal = field(default_factory=lambda: _Signal(happened=True))  # its weights are those of the last step
    updated: _Signal | None = None  # they are made, and go up in turn
    is_parted: bool = False
    whole: _Signal = field(default_factory=lambda: _Signal(happened=True))  # and so are its moments

    def __post_init__(self) -> None:
        self.is_on_host = self.placement.weights == "host"
        self.gathers = self.gathers or (self.shards > 1 and self.is_on_host)
        self.is_away = self.is_on_host or self.gathers
        self.route = self.placement.route
        # What this rank has of it.
        self.elements = self.cost.elements / self.shards
        self.weights_bytes = self.cost.weights_bytes / self.shards
        self.optimizer_bytes = self.cost.optimizer_bytes / self.shards


class _Play:
    def __init__(self, candidate: Candidate, rates: Rates) -> None:
        self._candidate, self._rates = candidate, rates
        self._clock = _Clock()
        self._up = _Server(self._clock, "fetch", "fresh", "activations", yields="lift")
        self._down = _Server(self._clock, "gradients", "lower", "activations")
        host, loaded = rates.host, rates.host.loaded or rates.host
        self._host = _Host(self._clock, host, self._up, self._down)
        self._up.rate = functools.partial(self._rate, self._down, host.up_bytes_per_second, loaded.up_bytes_per_second)
        self._down.rate = functools.partial(self._rate, self._up, host.down_bytes_per_second, loaded.down_bytes_per_second)
        self._chunks = [
            _Chunk(index, *pair, candidate.shards, candidate.gathers)
            for index, pair in enumerate(zip(candidate.chunks, candidate.placements, strict=True))
        ]
        division = candidate.division
        self._link = _Server(self._clock, "gather", "reduce", "spread")  # in seconds
        self._shares_copies = division is not None and division.shares_copies
        self._link.rate = lambda: 0.5 if self._shares_copies and (self._up.is_busy or self._down.is_busy) else 1.0
        self._part()
        self._gathers = [0.0 if division is None else division.gather.seconds(each.weights_bytes) for each in candidate.chunks]
        self._reduces = [
            0.0 if division is None else division.reduce.seconds(REDUCED_BYTES * each.elements) for each in candidate.chunks
        ]
        self._most_stages = GRADIENT_STAGES if division is None else REDUCTION_STAGES
        self._uses = [[self._chunks[index] for index in used] for used in candidate.uses]
        self._backward_segments = [0] * len(self._chunks)
        for segment, used in zip(candidate.each.segments, candidate.uses, strict=True):
            for index in used if segment.phase == "backward" else ():
                self._backward_segments[index] += 1
        self._norm = _Signal()
        self._stages = 0  # gradients under way
        self._stage_free = _Signal(happened=True)
        self._adding = 0  # gradients that are being added up on the host, or over ranks
        self._added = _Signal(happened=True)
        self._lifted: list[tuple[int, int, Callable[[], None]]] = []  # that wait for a carrier
        self._carriers = STREAMED_DEPTH
        self._is_lifting = False
        self._slowness = candidate.slowness(rates)
        self._uses_host = bool(candidate.offloaded) or any(
            chunk.is_on_host or chunk.route != "resident" for chunk in self._chunks
        )
        self._count = 0
        self._slots: dict[int, _Signal] = {}  # by chunk: its weights are there
        self._touches = [chunk for used in self._uses for chunk in used if chunk.is_away]
        self._positions: dict[int, list[int]] = {}  # in these, by chunk
        for position, chunk in enumerate(self._touches):
            self._positions.setdefault(chunk.index, []).append(position)
        self._position = 0
        self._forward_segments = Counter(segment.block for segment in candidate.each.segments if segment.phase == "forward")
        self._landed: dict[int, _Signal] = {}  # offloaded blocks: their activations are on the host
        self._returned: dict[int, _Signal] = {}  # and are back
        self._returning: set[int] = set()
        self._waits: dict[Waits, float] = dict.fromkeys(get_args(Waits), 0.0)
        self._exchanged = 0.0  # seconds of this step
        self._debt = 0.0  # seconds that host and copies take from the computation, where they share its cores
        self._steps: list[float] = []
        self._began = 0.0  # the step at hand
        self._forwards: list[float] = []  # by step, seconds up to its first backward

    def _part(self) -> None:
        """Chooses the chunks that the host updates in two parts."""
        candidate, rates = self._candidate, self._rates.host
        waiting = [
            chunk for chunk in self._chunks if chunk.route == "host" and chunk.cost.is_updated and not self._speculates(chunk)
        ]
        elements = sum(chunk.elements for chunk in waiting)
        if not rates.overlaps or not elements or candidate.accumulation > 1:  # to add gradients up keeps the host at work
            return
        backward = sum(segment.seconds for segment in candidate.each.segments if segment.phase == "backward")
        per_second = (rates.loaded or rates).updates_per_second
        share = min((backward + candidate.seconds_again) * per_second / (PARTED * elements), 1.0)
        for chunk in waiting:
            chunk.is_parted = is_two_phase(chunk.index, share)

    def _speculates(self, chunk: _Chunk) -> bool:
        return chunk.placement.speculates and self._candidate.accumulation == 1

    def _rate(self, other: _Server, unloaded: float, loaded: float) -> float:
        """Of a copy, beside what is under way."""
        share = 0.5 if self._shares_copies and self._link.is_busy else 1.0
        if not self._host.is_busy:
            return share * unloaded
        return share * (loaded if other.is_busy else (unloaded + loaded) / 2)

    def result(self) -> Simulated:
        over = _Signal()
        self._resume(self._compute(over))
        self._clock.run(over)
        candidate = self._candidate
        return Simulated(
            step_seconds=self._steps[-1],
            compute_seconds=self._slowness * candidate.accumulation * candidate.each.seconds,
            recompute_seconds=self._slowness * candidate.accumulation * candidate.seconds_again,
            update_seconds=self._norm_seconds() + self._resident_seconds() + self._beside_seconds(),
            waits_seconds=dict(self._waits),
            exchange_seconds=self._exchanged,
        )

    # ------------------------------------------------------------------ the computation

    def _resume(self, compute: Generator[float | _Signal]) -> None:
        """Lets the computation go on to where it next takes time, or waits."""
        for wanted in compute:
            if isinstance(wanted, _Signal):
                if not wanted.happened:
                    wanted.then(lambda: self._resume(compute))
                    return
            elif wanted + self._debt > 0:
                seconds, self._debt = wanted + self._debt, 0.0
                self._clock.at(seconds, lambda: self._resume(compute))
                return

    def _compute(self, over: _Signal) -> Generator[float | _Signal]:
        candidate = self._candidate
        passes = candidate.accumulation if candidate.division is None else min(candidate.accumulation, RANK_PASSES)
        steps = RANK_STEPS if candidate.division is not None and not self._uses_host else STEPS
        for _ in range(steps):
            began = self._began = self._clock.now
            self._norm = _Signal()
            last = self._waits, self._exchanged
            self._waits, self._exchanged = dict.fromkeys(self._waits, 0.0), 0.0
            for micro_batch in range(passes):
                self._position = 0
                if micro_batch == passes - 2:
                    before = self._clock.now, dict(self._waits), self._exchanged
                if micro_batch == passes - 1 and passes < candidate.accumulation:
                    began -= self._stand_for(candidate.accumulation - passes, *before)
                yield from self._one_pass(is_last=micro_batch == passes - 1)
                if self._is_like_the_last:
                    self._waits, self._exchanged = last
                    over.fire()
                    return
            yield from self._wait(self._summing, self._added)
            yield self._norm_seconds()
            self._norm.fire()
            self._send_in_turn(iter([chunk for chunk in self._chunks if chunk.updated is not None]))
            resident = self._resident_seconds()
            yield resident
            for chunk in self._chunks if self._candidate.shards > 1 and not self._candidate.gathers else ():
                if self._is_resident(chunk):
                    self._share(chunk)
            yield candidate.ending_seconds(resident) - resident
            self._steps.append(self._clock.now - began)
        over.fire()

    @property
    def _is_like_the_last(self) -> bool:
        """The step under way, of which no more has to be played."""
        if len(self._steps) < STEPS - 1 or len(self._forwards) <= len(self._steps):
            return False
        return abs(self._forwards[-1] - self._forwards[-2]) <= ALIKE * self._steps[-1]

    def _stand_for(self, times: int, began: float, waits: Mapping[Waits, float], exchanged: float) -> float:
        """Counts the pass that is over so many times more; seconds of these."""
        for kind, seconds in waits.items():
            self._waits[kind] += times * (self._waits[kind] - seconds)
        self._exchanged += times * (self._exchanged - exchanged)
        return times * (self._clock.now - began)

    def _one_pass(self, *, is_last: bool) -> Generator[float | _Signal]:
        candidate = self._candidate
        self._landed, self._returned = ({block: _Signal() for block in candidate.offloaded} for _ in range(2))
        self._returning, forwards = set(), Counter(self._forward_segments)
        for chunk in self._chunks:
            chunk.missing = self._backward_segments[chunk.index]
        for segment, used in zip(candidate.each.segments, self._uses, strict=True):
            block, choice = segment.block, candidate.activations[segment.block]
            if segment.phase == "backward" and len(self._forwards) == len(self._steps):
                self._forwards.append(self._clock.now - self._began)
                if self._is_like_the_last:
                    return
            yield from self._ready(used)
            costs = candidate.each.blocks[block].choices.get(choice)
            seconds = self._slowness * segment.seconds
            if segment.phase == "backward" and costs is not None:
                if choice == "offload":
                    self._bring_back(block)
                    before = candidate.before.get(block)
                    if before is not None:
                        self._bring_back(before)
                    yield from self._wait("activations", self._returned[block])
                else:
                    seconds += self._slowness * costs.seconds
            if segment.phase == "backward" and candidate.division is not None:
                yield from self._backward_of_rank(used, seconds, is_last=is_last)
                continue
            yield seconds
            if segment.phase == "forward":
                forwards[block] -= 1
                if choice == "offload" and costs is not None and forwards[block] == 0:
                    self._copy(self._down, "activations", costs.moved_bytes, self._landed[block].fire)
                continue
            for chunk in used:
                chunk.missing -= 1
                if chunk.missing == 0 and chunk.cost.gradient_bytes:
                    yield from self._complete(chunk, is_last=is_last)

    def _backward_of_rank(self, used: Sequence[_Chunk], seconds: float, *, is_last: bool) -> Generator[float | _Signal]:
        """Gradients come one chunk after another, the last first: more of them than there are stages at once would look as if the
        computation had to wait for each block's."""
        complete = []
        for chunk in reversed(used):
            chunk.missing -= 1
            if chunk.missing == 0 and chunk.cost.gradient_bytes:
                complete.append(chunk)
        for chunk in complete:
            yield seconds / len(complete)
            yield from self._complete(chunk, is_last=is_last)
        if not complete:
            yield seconds

    def _ready(self, used: Sequence[_Chunk]) -> Generator[float | _Signal]:
        """The weights of a segment are there."""
        for chunk in used:
            if not chunk.is_away:
                if not chunk.fresh.happened:
                    yield from self._wait("exchange" if chunk.route == "resident" else "update", chunk.fresh)
                continue
            if chunk.index not in self._slots:
                self._fetch(chunk, at_all_costs=True)
            yield from self._wait("fetch" if chunk.is_on_host else "exchange", self._slots[chunk.index])
            self._position += 1
        if self._touches:
            self._fetch_ahead()

    def _wait(self, kind: Waits, signal: _Signal) -> Generator[float | _Signal]:
        began = self._clock.now
        yield signal
        self._waits[kind] += self._clock.now - began

    def _norm_seconds(self) -> float:
        sums = self._candidate.accumulation > 1
        given = [chunk for chunk in self._chunks if chunk.cost.gradient_bytes]
        on_host = sum(chunk.elements for chunk in given if sums and chunk.placement.gradients == "host")
        on_device = sum(chunk.elements for chunk in given) - on_host
        together = 0.0 if self._candidate.division is None else self._candidate.division.norm_seconds
        return self._rates.norm_seconds * on_device + self._rates.host_norm_seconds * on_host + together

    def _resident_seconds(self) -> float:
        resident = (chunk.elements for chunk in self._chunks if self._is_resident(chunk))
        return self._rates.update_seconds * sum(resident)

    def _beside_seconds(self) -> float:
        """What the device does besides, while it computes."""
        given = [chunk for chunk in self._chunks if chunk.cost.gradient_bytes]
        passes = self._candidate.accumulation
        gathered = sum(
            chunk.cost.elements
            for chunk in given
            for number in range(passes)
            if self._is_staged(chunk, is_last=number == passes - 1)
        )
        added = (passes > 1) * (passes * sum(chunk.cost.elements for chunk in given) - gathered)
        streamed = sum(chunk.elements for chunk in given if chunk.route == "streamed" and chunk.cost.is_updated)
        rates = self._rates
        return rates.gather_seconds * gathered + rates.add_seconds * added + rates.update_seconds * streamed

    def _is_staged(self, chunk: _Chunk, *, is_last: bool) -> bool:
        """Its gradients are put side by side, to go elsewhere."""
        return chunk.placement.gradients == "host" or self._candidate.reduces(chunk.placement, is_last=is_last)

    @property
    def _summing(self) -> Waits:
        """What is waited for where gradients are."""
        return "gradients" if self._candidate.division is None else "exchange"

    @staticmethod
    def _is_resident(chunk: _Chunk) -> bool:
        return chunk.route == "resident" and chunk.cost.is_updated

    # ------------------------------------------------------------------ gradients and updates

    def _complete(self, chunk: _Chunk, *, is_last: bool) -> Generator[float | _Signal]:
        """All gradients of a chunk are there."""
        route, division = chunk.route, self._candidate.division
        arrived = _Signal()
        if self._is_staged(chunk, is_last=is_last):
            self._debt += self._rates.gather_seconds * chunk.cost.elements
            yield from self._wait(self._summing, self._stage_free)
            self._stages += 1
            if self._stages == self._most_stages:
                self._stage_free = _Signal()

            def landed() -> None:
                self._stages -= 1
                if not self._stage_free.happened:
                    self._stage_free.fire()
                if chunk.placement.gradients == "device":
                    added()
                elif self._candidate.accumulation == 1:
                    arrived.fire()
                    if division is not None:
                        added()
                else:
                    self._on_host(ADDED * chunk.elements, added, -1)

            def added() -> None:
                if not arrived.happened:
                    arrived.fire()
                self._adding -= 1
                if self._adding == 0:
                    self._added.fire()

            if self._candidate.accumulation > 1 or division is not None:  # the norm is taken when all are there
                if self._adding == 0:
                    self._added = _Signal()
                self._adding += 1

            def go_down() -> None:
                size = chunk.cost.gradient_bytes if division is None else REDUCED_BYTES * chunk.elements
                self._copy(self._down, "gradients", size, landed)

            if division is None:
                chunk.whole.then(go_down)
            else:
                after = functools.partial(chunk.whole.then, go_down) if chunk.placement.gradients == "host" else landed
                self._exchange("reduce", self._reduces[chunk.index], after)
        else:
            self._debt += (self._candidate.accumulation > 1) * self._rates.add_seconds * chunk.cost.elements
            arrived.fire()
        if not is_last or not chunk.cost.is_updated or route == "resident":
            if is_last and chunk.gathers and chunk.cost.is_updated:
                self._norm.then(lambda: self._drop(chunk))
            return
        chunk.fresh = _Signal()
        self._norm.then(lambda: self._drop(chunk))  # the weights that are there will be old
        speculates, norm = self._speculates(chunk), self._norm
        wider = WIDER if self._candidate.accumulation > 1 and self._rates.host.overlaps else 0.0
        updated = _Signal()
        if speculates or (route == "host" and not chunk.is_on_host):
            chunk.updated = updated
        else:  # they are where they live
            updated.then(lambda: self._share(chunk))

        def start() -> None:
            if speculates:
                update()
            elif chunk.is_parted:
                norm.then(lambda: self._on_host(PARTED * chunk.elements, finish, chunk.index))
            else:
                norm.then(update)

        def finish() -> None:
            chunk.whole = _Signal()
            self._on_host(PARTED * chunk.elements, chunk.whole.fire, LATER - chunk.index)
            updated.fire()

        def update() -> None:
            if route == "streamed":
                self._stream(chunk, updated.fire, speculates=speculates)
            else:
                self._on_host((1 + wider) * chunk.elements, updated.fire, chunk.index)

        arrived.then(start)

    def _send_in_turn(self, chunks: Iterator[_Chunk]) -> None:
        """Those that the next forward needs first go up first, each when its update is over."""
        for chunk in chunks:
            updated, chunk.updated = chunk.updated, None
            assert updated is not None
            if not updated.happened:
                updated.then(functools.partial(self._send_on, chunk, chunks))
                return
            self._send_up(chunk)

    def _send_on(self, chunk: _Chunk, chunks: Iterator[_Chunk]) -> None:
        self._send_up(chunk)
        self._send_in_turn(chunks)

    def _on_host(self, elements: float, done: Callable[[], None], order: int) -> None:
        if self._rates.host.overlaps:
            self._host.add(elements, done, order)
        else:
            self._debt += elements / self._rates.host.updates_per_second
            done()

    def _send_up(self, chunk: _Chunk) -> None:
        """Fresh weights to where they live."""
        if chunk.is_on_host:
            chunk.fresh.fire()
        else:
            self._copy(self._up, "fresh", chunk.weights_bytes, lambda: self._share(chunk))

    def _share(self, chunk: _Chunk) -> None:
        """The others' stretches of weights that are whole on every rank."""
        if chunk.shards == 1 or chunk.gathers:
            chunk.fresh.fire()
            return
        if chunk.fresh.happened:
            chunk.fresh = _Signal()
        self._exchange("spread", self._gathers[chunk.index], chunk.fresh.fire)

    def _exchange(self, queue: str, seconds: float, done: Callable[[], None]) -> None:
        """Between ranks."""
        self._exchanged += seconds
        if self._rates.host.overlaps:
            self._link.add(queue, seconds, done)
        else:
            self._debt += seconds
            done()

    def _stream(self, chunk: _Chunk, done: Callable[[], None], *, speculates: bool) -> None:
        up = chunk.optimizer_bytes + (chunk.weights_bytes if chunk.is_on_host else 0)
        down = chunk.optimizer_bytes + (chunk.weights_bytes if chunk.is_on_host or speculates else 0)

        def begin() -> None:
            self._carriers -= 1
            self._is_lifting = True
            self._in_parts(self._up, "lift", up, chunk.index, lifted)

        def lifted() -> None:
            self._debt += self._rates.update_seconds * chunk.elements  # the computation has less of the device meanwhile
            self._clock.at(LIFT_SECONDS, over)
            self._in_parts(self._down, "lower", down, chunk.index, free)

        def over() -> None:
            self._is_lifting = False
            self._lift_next()

        def free() -> None:
            self._carriers += 1
            done()
            self._lift_next()

        self._count += 1
        heapq.heappush(self._lifted, (chunk.index, self._count, begin))
        self._lift_next()

    def _lift_next(self) -> None:
        if self._lifted and self._carriers and not self._is_lifting:
            heapq.heappop(self._lifted)[2]()

    def _in_parts(self, server: _Server, queue: str, size: float, order: int, done: Callable[[], None]) -> None:
        """Moments and low halves are copies of their own: others come in between."""

        def part(left: int) -> None:
            self._copy(server, queue, size / 3, done if left == 1 else lambda: part(left - 1), order)

        part(3)

    def _copy(self, server: _Server, queue: str, size: float, done: Callable[[], None] = lambda: None, order: float = 0) -> None:
        if self._rates.host.overlaps:
            server.add(queue, size, done, order)
        else:
            self._debt += size / server.rate()
            done()

    # ------------------------------------------------------------------ slots

    def _next_use(self, index: int) -> int:
        """Position in the touches, of this pass or the next."""
        positions = self._positions[index]
        found = bisect_left(positions, self._position)
        return positions[found] if found < len(positions) else positions[0] + len(self._touches)

    def _used_last(self) -> tuple[int, int]:
        """Of the chunks in slots, the one whose next use is the last, and that use. One loop, as it is much of a simulation."""
        position, after = self._position, len(self._touches)
        last, used = -1, -1
        for index in self._slots:
            positions = self._positions[index]
            found = bisect_left(positions, position)
            use = positions[found] if found < len(positions) else positions[0] + after
            if use > used:
                last, used = index, use
        return last, used

    def _fetch_ahead(self) -> None:
        coming: dict[int, _Chunk] = {}
        for at in range(self._position, len(self._touches)):
            coming[self._touches[at].index] = self._touches[at]
            if len(coming) >= self._candidate.prefetch:
                break
        for chunk in coming.values():
            if chunk.index not in self._slots and not self._fetch(chunk, at_all_costs=False):
                return

    def _fetch(self, chunk: _Chunk, *, at_all_costs: bool) -> bool:
        if len(self._slots) >= self._candidate.slots:
            last, used = self._used_last()
            if not at_all_costs and used <= self._next_use(chunk.index):
                return False
            del self._slots[last]
        there = self._slots[chunk.index] = _Signal()

        def put_together() -> None:
            if chunk.gathers:
                self._exchange("gather", self._gathers[chunk.index], there.fire)
            else:
                there.fire()

        def come() -> None:
            if chunk.is_on_host:
                self._copy(self._up, "fetch", chunk.weights_bytes, put_together)
            else:
                put_together()

        chunk.fresh.then(come)
        return True

    def _drop(self, chunk: _Chunk) -> None:
        self._slots.pop(chunk.index, None)

    # ------------------------------------------------------------------ offloaded activations

    def _bring_back(self, block: int) -> None:
        if block not in self._returning:
            self._returning.add(block)
            size, back = self._candidate.each.blocks[block].choices["offload"].moved_bytes, self._returned[block].fire
            self._landed[block].then(lambda: self._copy(self._up, "activations", size, back))
