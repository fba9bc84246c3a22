"""Stages: where the calls of a pass are cut, and what becomes of their activations.

A dynamic program over the calls puts the borders:

    minimise    the seconds of the slowest stage, forward and backward of a micro-batch; then the sum of squares over stages
    such that   state + held micro-batches * what their blocks keep + the most that one pass needs besides <= the limit

`held` follows from the schedule: stage s of p has p - s micro-batches under way, more where it is interleaved. Inside a stage
blocks are recomputed one by one, the cheapest second per byte first, until it fits. A border lies at most half a stage and SLACK
calls from where even stages would have it.

The seconds of code outside of blocks before the first are the first stage's, all others the last's.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from anyfit.values.called import CalledBlocks
from anyfit.values.plan import Activations
from anyfit.values.profile import BlockCost, Pass, Segment

from .stage_state import Memory

SLACK = 4  # calls that a border may lie from an even one, beside half a stage
RECOMPUTED: tuple[Activations, ...] = ("selective", "recompute")


@dataclass(frozen=True)
class Call:
    """One call of a block in a micro-batch."""

    forward: float
    backward: float
    exchanged: float  # of these, along a tensor axis
    work_bytes: int  # the most that is live besides what is kept
    choices: Mapping[Activations, tuple[int, float]]  # bytes that stay for backward, seconds on top; the least of seconds first

    def slowed(self, times: float) -> Call:
        choices = {name: (kept, times * seconds) for name, (kept, seconds) in self.choices.items()}
        return Call(times * self.forward, times * self.backward, times * self.exchanged, self.work_bytes, choices)

    @cached_property
    def first(self) -> Activations:
        return next(iter(self.choices))

    @cached_property
    def least_kept(self) -> int:
        return min(kept for kept, _ in self.choices.values())

    @cached_property
    def steps(self) -> tuple[tuple[float, int, float, Activations], ...]:
        """From the first choice to the one that keeps least, each the cheapest for what it frees: by seconds a byte."""
        found: list[tuple[float, int, float, Activations]] = []
        kept, seconds = self.choices[self.first]
        while True:
            moves = [
                ((more - seconds) / (kept - less), kept - less, more - seconds, name)
                for name, (less, more) in self.choices.items()
                if less < kept
            ]
            if not moves:
                return tuple(found)
            found.append(min(moves))
            kept, seconds = self.choices[found[-1][3]]


@dataclass(frozen=True)
class Held:
    """One stage: the seconds of its passes, and what becomes of its calls' activations."""

    forward: float
    backward: float
    added: float  # of backward, recomputed
    exchanged: float  # of both, along a tensor axis, or waiting for ranks of the data axis
    bytes: int  # of the device, but for what all have and for work
    work_bytes: int
    choices: tuple[Activations, ...]

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


def calls_of(each: Pass, called: CalledBlocks) -> list[Call]:
    """What each call of a pass takes: a block that is called several times takes as much each time."""
    paths = called.paths
    seconds = {"forward": [0.0] * len(paths), "backward": [0.0] * len(paths)}
    work, exchanged = [0] * len(paths), [0.0] * len(paths)
    for segment, places in _placed(each, paths):
        for at in places:
            seconds[segment.phase][at] += segment.seconds / len(places)
            exchanged[at] += segment.exchange_seconds / len(places)
            work[at] = max(work[at], segment.work_bytes)
    blocks = {block.name: block for block in each.blocks}
    return [
        Call(seconds["forward"][at], seconds["backward"][at], exchanged[at], work[at], _choices(blocks[path], paths.count(path)))
        for at, path in enumerate(paths)
    ]


def _placed(each: Pass, paths: Sequence[str]) -> Iterator[tuple[Segment, Sequence[int]]]:
    """Which calls a stretch of the pass belongs to; of code outside of blocks, the first where it is before all of them."""
    called: dict[str, list[int]] = {}
    for place, path in enumerate(paths):
        called.setdefault(path, []).append(place)
    names = [each.blocks[segment.block].name for segment in each.segments]
    inside = [at for at, name in enumerate(names) if name in called]
    for at, (segment, name) in enumerate(zip(each.segments, names, strict=True)):
        if name in called:
            yield segment, called[name]
        else:
            yield segment, [0] if not inside or at < inside[0] or at > inside[-1] else [len(paths) - 1]


def _choices(block: BlockCost, times: int) -> dict[Activations, tuple[int, float]]:
    names: list[Activations] = [name for name in ("keep", *RECOMPUTED) if name in block.choices]
    found = {name: (block.choices[name].kept_bytes // times, block.choices[name].seconds / times) for name in names}
    return found or {"keep": (block.kept_bytes // times, 0.0)}


@dataclass(frozen=True)
class Cut:
    """Without borders nothing fits, and a rank would need so many bytes at least."""

    borders: tuple[tuple[int, int], ...] | None
    stages: tuple[Held, ...]
    least_bytes: int


class Cutting:
    """best[stage][last call], over the first call of the stage."""

    def __init__(self, calls: Sequence[Call], held: Sequence[int], memory: Memory, ranks: int) -> None:
        self.calls, self.held, self.memory, self.ranks = calls, held, memory, ranks
        self.stages_a_rank = len(held) // ranks
        self.work = [
            int(memory.fragments * call.work_bytes + memory.gradient(memory.called.held(at, at))) for at, call in enumerate(calls)
        ]
        self._known: dict[tuple[int, int, int], Held | None] = {}
        firsts = [call.choices[call.first] for call in calls]
        self._kept, self._added = _sums(kept for kept, _ in firsts), _sums(seconds for _, seconds in firsts)
        self._forward, self._backward = _sums(call.forward for call in calls), _sums(call.backward for call in calls)
        self._exchanged = _sums(call.exchanged for call in calls)

    def best(self) -> Cut:
        """Where a rank has several stages, their work is not done at once; should the largest be too large for the others' even
        share, each counts in full."""
        found = self._best(self.stages_a_rank)
        if found.borders is not None and self.rank_bytes(found.stages) > self.memory.limit:
            found = self._best(1)
        return found

    def rank_bytes(self, stages: Sequence[Held]) -> int:
        """Of the rank that holds most."""
        own = (stages[rank :: self.ranks] for rank in range(self.ranks))
        return max(sum(each.bytes for each in mine) + max(each.work_bytes for each in mine) for mine in own)

    def _best(self, workers: int) -> Cut:
        self._known.clear()
        count, calls = len(self.held), len(self.calls)
        even = calls / count
        most, off = math.ceil(even * 1.5) + SLACK, math.ceil(even / 2) + SLACK
        best: list[dict[int, tuple[float, float, int]]] = [{} for _ in range(count)]  # slowest so far, squares, the first call
        for stage in range(count):
            middle = round(even * (stage + 1)) - 1
            lasts = range(max(stage, middle - off), min(calls - (count - 1 - stage), middle + off + 1))
            for last in [calls - 1] if stage == count - 1 else lasts:
                for first in [0] if stage == 0 else range(max(stage, last - most + 1), last + 1):
                    before = (0.0, 0.0, 0) if stage == 0 else best[stage - 1].get(first - 1)
                    made = None if before is None else self._stage(first, last, self.held[stage], workers)
                    if made is None or before is None:
                        continue
                    found = max(before[0], made.seconds), before[1] + made.seconds**2, first
                    if found < best[stage].get(last, (math.inf, 0.0, 0)):
                        best[stage][last] = found
        if calls - 1 not in best[-1]:
            return Cut(None, (), self._least_bytes())
        borders, last = [], calls - 1
        for stage in reversed(range(count)):
            borders.append((best[stage][last][2], last))
            last = borders[-1][0] - 1
        borders.reverse()
        stages = [self._stage(first, last, self.held[stage], workers) for stage, (first, last) in enumerate(borders)]
        return Cut(tuple(borders), tuple(stage for stage in stages if stage is not None), 0)

    def _least_bytes(self) -> int:
        """That a rank needs of even stages, with all recomputed that can be."""
        count, calls = len(self.held), len(self.calls)
        ends = [stage * calls // count for stage in range(count + 1)]
        of_ranks, work = [0.0] * self.ranks, [0] * self.ranks
        for stage, (first, after) in enumerate(itertools.pairwise(ends)):
            kept = self.held[stage] * self.memory.fragments * sum(call.least_kept for call in self.calls[first:after])
            of_ranks[stage % self.ranks] += self._state(first, after - 1) + kept
            work[stage % self.ranks] = max(work[stage % self.ranks], *self.work[first:after])
        return self.memory.needed(max(map(sum, zip(of_ranks, work, strict=True))) + self.memory.fixed)

    def _state(self, first: int, last: int) -> float:
        return self.memory.state(self.memory.called.held(first, last))

    def _stage(self, first: int, last: int, held: int, workers: int) -> Held | None:
        key = first, last, held
        if key not in self._known:
            self._known[key] = self._made(first, last, held, workers)
        return self._known[key]

    def _made(self, first: int, last: int, held: int, workers: int) -> Held | None:
        after, work, times = last + 1, max(self.work[first : last + 1]), held * self.memory.fragments
        own = self.calls[first:after]
        choices = [call.first for call in own]
        of_model = self.memory.called.held(first, last)
        size = self.memory.state(of_model) + times * (self._kept[after] - self._kept[first])
        added = self._added[after] - self._added[first]
        limit = self.memory.limit / self.stages_a_rank - work / workers
        if size > limit:
            steps = sorted((step[0], order, at) for at, call in enumerate(own) for order, step in enumerate(call.steps))
            for _, order, at in steps:
                if size <= limit:
                    break
                _, freed, seconds, name = own[at].steps[order]
                choices[at], size, added = name, size - times * freed, added + seconds
            if size > limit:
                return None
        adding, exchanged = self.memory.adding_seconds * of_model.trained, self._exchanged[after] - self._exchanged[first]
        forward, backward = self._forward[after] - self._forward[first], self._backward[after] - self._backward[first]
        backward += added + adding
        # beside the computation; what is gathered first has nothing to hide behind
        gathering, begin = self.memory.gathering(of_model)
        summing = self.memory.summing(of_model) if self.memory.by_micro_batch else 0.0
        waits = max(gathering - forward, begin), max(gathering + summing - backward, begin)
        return Held(forward + waits[0], backward + waits[1], added, exchanged + sum(waits), int(size), work, tuple(choices))


def _sums(each: Iterable[float]) -> list[float]:
    """Of the first so many."""
    return list(itertools.accumulate(each, initial=0.0))
