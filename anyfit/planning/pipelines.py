"""Pipelines: the fastest way through stages that fits, and the plan of it.

The profile is that of one rank of the data axis, and of a tensor axis where there is one, that has all of the model: a rank has
some of its calls (stage_cuts.py). For every micro-batch size, number of stages a rank and way to hold the optimizer's state the
best cuts are found; what comes out is estimated, and the best of them are played stage by stage on one clock, with sends
(values/schedule.py). Then come the sums of gradients over the data axis, those of tables that several places hold, the norm and
the update:

    step = max over places of (its end in the play + sums that its last backward does not hide)
         + shared tables + norm + update and all-gather of the place that has most

Where it is simpler than the search without stages:

    pessimistic   an all-gather of fresh weights hides behind nothing, nor do updates of what is on the host; sums of gradients
                  hide behind the last backward alone, and behind nothing where a place has several stages, as the engine does;
                  weights stay on the device, and what is done with the state is the same for all chunks
    optimistic    what a border within a cut sequence has to put together before it is sent is left out; sends take what the
                  machine's links and copies do, and the engine's go through gloo

As on any ranks, exchanges beside the computation slow it, and all passes have some beside them.

Estimates leave sends out. A long schedule is played for a few rounds, and goes on as those do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, reduce

from anyfit.values.called import Elements, Pipeline
from anyfit.values.doing import doing
from anyfit.values.no_plan import NoPlan
from anyfit.values.precision import SUM_BYTES
from anyfit.values.profile import Division, Pass, Profile
from anyfit.values.schedule import Span, Table, in_flight, played, refuse, table
from anyfit.values.units import show_bytes

from .stage_cuts import Call, Cutting, Held, calls_of
from .stage_state import Holding, Memory, holdings_of

PLAYED = 6  # of the best estimates
BEHIND = 1.5  # times the best so far: what cannot be under that is not cut
ROUNDS = (3, 4)  # as many micro-batches as ranks, that a long schedule is played for


@dataclass(frozen=True, eq=False)
class Way:
    """One that fits."""

    each: Pass
    micro_batches: int
    stages_a_rank: int
    memory: Memory
    borders: tuple[tuple[int, int], ...]
    stages: tuple[Held, ...]
    estimate: float  # seconds of a step
    needed_bytes: int
    host_bytes: int

    @property
    def holding(self) -> Holding:
        return self.memory.holding

    @property
    def division(self) -> Division:
        return self.holding.division


@dataclass(frozen=True)
class Played:
    way: Way
    split: Mapping[str, float]  # of a step's seconds
    linked: float  # of a step, that links are busy

    @property
    def step_seconds(self) -> float:
        return sum(self.split.values())


class StageSearch:
    """Over all ways through the stages of a pipeline."""

    def __init__(self, profile: Profile, pipeline: Pipeline) -> None:
        self.profile, self.pipeline, self.called = profile, pipeline, pipeline.called
        self.share = profile.batch_size // profile.ranks
        self.least_bytes = 2**62
        self.refusals: list[str] = []
        self.played = cache(self._played)
        if len(self.called.paths) < pipeline.ranks:
            raise ValueError(
                f"a pipeline of {pipeline.ranks} ranks, and a forward calls {len(self.called.paths)} blocks; use a shorter axis"
            )

    @property
    def slowness(self) -> float:
        """Of computing, beside exchanges."""
        overlaps = self.profile.host is not None and self.profile.host.overlaps
        return self.profile.calibration.overlap_slowdown.value if overlaps else 1.0

    def best(self) -> tuple[Played, list[Way]]:
        """The fastest, and all, by their estimates."""
        with doing("looking for the best stages"):
            ways = sorted(self._ways(), key=lambda way: way.estimate)
            if not ways:
                raise self._nothing()
            return min((self.played(way) for way in ways[:PLAYED]), key=lambda each: each.step_seconds), ways

    def _nothing(self) -> Exception:
        profile, ranks = self.profile, self.pipeline.ranks
        if self.least_bytes == 2**62:
            return ValueError(self.refusals[0])
        beside = f" beside a tensor axis of {profile.tensor}" if profile.tensor > 1 else ""
        return NoPlan(
            f"{profile.described} does not fit on {ranks} stages of a pipeline{beside}: a rank needs "
            f"{show_bytes(self.least_bytes)} of device memory at least, and has {show_bytes(profile.device_limit_bytes)}",
            max(self.least_bytes - profile.device_limit_bytes, 1),
        )

    def _ways(self) -> Iterator[Way]:
        """But those that cannot be near the best by even stages."""
        least = math.inf
        for each in sorted(self.profile.passes, key=lambda each: each.micro_batch):
            if self.share % each.micro_batch:
                self.refusals.append(f"micro-batches of {each.micro_batch} do not divide a rank's share of {self.share} samples")
                continue
            calls = [call.slowed(self.slowness) for call in calls_of(each, self.called)]
            micro_batches = self.share // each.micro_batch
            for stages_a_rank in self.pipeline.stages_a_rank:
                if not self._has_schedule(stages_a_rank, micro_batches):
                    continue
                turns = micro_batches + (self.pipeline.ranks - 1) / stages_a_rank
                if turns * each.seconds / self.pipeline.ranks > BEHIND * least:
                    continue
                for way in self._held_ways(each, calls, stages_a_rank):
                    least = min(least, way.estimate)
                    yield way

    def _has_schedule(self, stages_a_rank: int, micro_batches: int) -> bool:
        ranks, calls = self.pipeline.ranks, len(self.called.paths)
        if ranks * stages_a_rank > calls:
            self.refusals.append(
                f"{stages_a_rank} stages a rank on {ranks} ranks are {ranks * stages_a_rank}, "
                f"and a forward calls {calls} blocks; chunks {calls // ranks} is the most"
            )
            return False
        try:
            refuse(ranks, ranks * stages_a_rank, micro_batches)
        except ValueError as refusal:  # so many micro-batches do not make rounds
            self.refusals.append(str(refusal))
            return False
        return True

    def _held_ways(self, each: Pass, calls: Sequence[Call], stages_a_rank: int) -> Iterator[Way]:
        """By what is held of the state. What frees memory takes longer, unless it spares recomputing."""
        fits, holdings = False, holdings_of(self.profile, stages_a_rank, self.share // each.micro_batch)
        if not holdings:
            self.refusals.append("gradients and weights are sharded where each rank has one stage; chunks 1 does that")
        for holding in holdings:
            if holding.is_plain or not fits:
                way = self._way(each, calls, stages_a_rank, holding)
                if way is not None:
                    fits |= all(stage.added <= 0 for stage in way.stages)
                    yield way

    def _way(self, each: Pass, calls: Sequence[Call], stages_a_rank: int, holding: Holding) -> Way | None:
        ranks, micro_batches = self.pipeline.ranks, self.share // each.micro_batch
        held = in_flight(self._table(ranks * stages_a_rank, _few(ranks, micro_batches)[-1]), ranks * stages_a_rank)
        memory = Memory(self.profile, self.called, holding, micro_batches > 1)
        cutting = Cutting(calls, held, memory, ranks)
        found = cutting.best()
        if found.borders is None:
            self.least_bytes = min(self.least_bytes, found.least_bytes)
            return None
        needed = memory.needed(cutting.rank_bytes(found.stages) + memory.fixed)
        way = Way(each, micro_batches, stages_a_rank, memory, found.borders, found.stages, 0.0, needed, 0)
        on_host = max(map(memory.on_host, self._of_places(way)))
        if on_host > self.profile.host_limit_bytes:
            return None
        return replace(way, estimate=self._estimated(way), host_bytes=on_host)

    def _table(self, stages: int, micro_batches: int) -> Table:
        return _table(self.pipeline.ranks, stages, micro_batches)

    def _own(self, stages: Sequence[Held]) -> list[float]:
        """Seconds of a micro-batch, by rank."""
        return [sum(stage.seconds for stage in stages[rank :: self.pipeline.ranks]) for rank in range(self.pipeline.ranks)]

    def _estimated(self, way: Way) -> float:
        own, slowest = self._own(way.stages), max(stage.seconds for stage in way.stages)
        passes = way.micro_batches * max(own) + (self.pipeline.ranks - 1) * slowest
        updated = (way.memory.updating(each) for each in self._of_places(way))
        after = max(map(sum, zip(self._summed(way), updated, strict=True)))
        return passes + after

    def _of_places(self, way: Way) -> list[Elements]:
        ranks = self.pipeline.ranks
        held = [self.called.held(*border) for border in way.borders]
        return [reduce(Elements.plus, held[rank::ranks]) for rank in range(ranks)]

    def _summed(self, way: Way) -> list[float]:
        """By place, seconds to sum its gradients over the data axis once all are there."""
        if way.memory.by_micro_batch:
            return [0.0] * self.pipeline.ranks
        return [way.memory.summing(each) for each in self._of_places(way)]

    def _shared(self, way: Way) -> float:
        """To sum gradients of what several places hold: each sends and receives all of it."""
        largest = max(self.called.shared(*border) for border in way.borders)
        across = max((self.pipeline.send(place) for place in range(self.pipeline.ranks)), key=lambda each: each.seconds_per_byte)
        return 2 * across.seconds(SUM_BYTES * largest) if largest else 0.0

    def _played(self, way: Way) -> Played:
        ranks, stages, micro_batches = self.pipeline.ranks, way.stages, way.micro_batches
        over = self._ends(way)
        summed, own = self._summed(way), self._own(stages)
        hidden = [stages[rank].backward * (1 - 1 / len(stages[rank].choices)) for rank in range(ranks)]
        if way.stages_a_rank > 1:
            hidden = [0.0] * ranks
        exposed = [max(sums - behind, 0.0) for sums, behind in zip(summed, hidden, strict=True)]
        last = max(range(ranks), key=lambda rank: over[rank] + exposed[rank])
        added = micro_batches * sum(stage.added for stage in stages[last::ranks])
        exchanged = micro_batches * sum(stage.exchanged for stage in stages[last::ranks])
        places, shared = self._of_places(way), self._shared(way)
        update, gathered = max(map(way.memory.updating, places)), max(map(way.memory.sharing, places))
        split = {
            "compute": micro_batches * own[last] - added - exchanged,
            "recompute": added,
            "pipeline bubble": over[last] - micro_batches * own[last],
            "exposed communication": exchanged + exposed[last] + shared + way.division.norm_seconds + gathered,
            "update": update,
        }
        return Played(way, split, exchanged + summed[last] + shared + gathered)

    def _ends(self, way: Way) -> list[float]:
        """By rank, when its passes are through."""
        few = _few(self.pipeline.ranks, way.micro_batches)
        played = [[spans[-1].ends for spans in self._spans(way, count)] for count in few]
        if len(few) == 1:
            return played[0]
        rounds = (way.micro_batches - few[1]) / (few[1] - few[0])
        return [late + rounds * (late - early) for early, late in zip(*played, strict=True)]

    def _spans(self, way: Way, micro_batches: int) -> tuple[tuple[Span, ...], ...]:
        stages = way.stages
        seconds = [stage.forward for stage in stages], [stage.backward for stage in stages]
        return played(self._table(len(stages), micro_batches), *seconds, self.pipeline.sending(way.each.micro_batch))

    def drawn(self, way: Way) -> tuple[tuple[Span, ...], ...]:
        """Of as many of its micro-batches as tell what a step looks like: by rank, who does what when."""
        return self._spans(way, _few(self.pipeline.ranks, way.micro_batches)[0])


@cache
def _table(ranks: int, stages: int, micro_batches: int) -> Table:
    return table(ranks, stages, micro_batches)


def _few(ranks: int, micro_batches: int) -> list[int]:
    """Of so many micro-batches, those to play: all, or two numbers of whole rounds, after which one more round takes as long."""
    few = [times * ranks for times in ROUNDS]
    return [micro_batches] if micro_batches <= few[-1] or micro_batches % ranks else few
