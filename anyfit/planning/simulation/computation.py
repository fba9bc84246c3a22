"""The computation of a step: the segments of its passes, the norm and resident updates; it drives all other parts.

The first steps fill the servers; the last one is the figure, or the one before it where both take as long up to the first
backward: that is where all that was left of a step is over. Of many micro-batches a few are played: once one has left everything
as the one before it did, those up to the last are alike.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import get_args

from anyfit.planning.candidate import Candidate, Rates
from anyfit.values.profile import Segment, Timing

from .clock import Signal, State, Work
from .fetches import Fetches, OffloadedActivations
from .gradients import Gradients
from .step import KINDS, Chunk, Step, Waits
from .updates import Updates

STEPS = 3
ALIKE = 1e-9  # of a step, by which times differ that are the same
PASSES_ALIKE = 1e-6  # of a pass
AFTER_CLIPPED = 2  # steps after a clipped one that are played for what is left of it
RANK_STEPS = 2  # where nothing is on the host, whose servers fill slowly
RANK_PASSES = 4  # of a step of a rank that are played at most, whether they are alike or not


@dataclass(frozen=True)
class Simulated:
    step_seconds: float
    compute_seconds: float  # without what is recomputed
    recompute_seconds: float
    update_seconds: float  # that the device works on updates: resident and streamed ones, the norm, staged gradients
    waits_seconds: Mapping[Waits, float]
    exchange_seconds: float = 0.0  # that the link between ranks is busy


def simulate(candidate: Candidate, rates: Rates) -> Simulated:
    """Of a step like all others, none of which is clipped."""
    return Computation(candidate, rates).result()


def simulated_under(candidate: Candidate, rates: Rates, seconds: float) -> Simulated | None:
    """The same, but None where a step takes as long as this, which is mostly known sooner: no step is shorter than those before
    it, as what they leave to do only delays it."""
    computation = Computation(candidate, rates, under=seconds)
    result = computation.result()
    return None if computation.is_over else result


def redone_seconds(candidate: Candidate, rates: Rates, step_seconds: float) -> float:
    """Of a clipped step among others that are not and take so many seconds, with what those after it take longer for it."""
    steps = Computation(candidate, rates, clips=True).steps()
    return max(sum(steps[STEPS:]) - (len(steps) - STEPS - 1) * step_seconds, step_seconds)


Span = tuple[str, float, float, str, Segment | None]  # lane, from, to, what kind of work; of the computation, which stretch


def played(candidate: Candidate, rates: Rates) -> tuple[list[Span], float, int]:
    """What each server does in one step like all others, from its beginning on; seconds of it, as far as it was played; and of
    how many passes that is."""
    computation, spans = Computation(candidate, rates), list[Span]()
    for lane, server in computation.servers.items():
        server.heard = partial(computation.note, spans, lane)
    count = len(computation.steps())
    began, *after = computation.beginnings[count - 1 : count + 1]
    ended = after[0] if after else computation.now
    found = [(lane, max(start, began) - began, end - began, kind, of) for lane, start, end, kind, of in spans]
    return [each for each in found if each[2] > 0 and each[1] < ended - began], ended - began, computation.passes


class Computation:
    def __init__(self, candidate: Candidate, rates: Rates, *, clips: bool = False, under: float = math.inf) -> None:
        step, self._candidate, self._clips, self._under = Step(candidate, rates), candidate, clips, under
        self._clock, self._ledger, self._resources = step.clock, step.ledger, step.resources
        self._chunks, self._uses, self._exchanges = step.chunks, step.uses, step.exchanges
        self._fetches = Fetches(step)
        self._activations = OffloadedActivations(step)
        self._gradients = Gradients(step)
        self._updates = Updates(step, self._fetches)
        self._device_work = DeviceWork.of(step)
        uses = zip(candidate.profile_pass.segments, candidate.uses, strict=True)
        self._backward_segments = Counter(index for segment, used in uses if segment.phase == "backward" for index in used)
        self._launching, self._engine_seconds = step.launching, engine_seconds(step)
        self._start_seconds = rates.calibration.update_launch_seconds.value  # of the update of a chunk
        self._slowness, self._rates = candidate.slowness(rates), rates
        self._steps: list[float] = []
        self.passes = 0  # of a step, that were played
        self.is_over = False  # a step takes `under` seconds or more, which is not of interest
        self._began = 0.0  # the step at hand
        self._forwards: list[float] = []  # by step, seconds up to its first backward
        self.beginnings: list[float] = []  # of steps, by the clock
        self._at: Segment | None = None  # the stretch of a pass that it is at
        self.servers = self._resources.servers

    @property
    def now(self) -> float:
        return self._clock.now

    def note(self, spans: list[Span], lane: str, kind: str, start: float, end: float) -> None:
        spans.append((lane, start, end, kind, self._at if lane == "compute" else None))

    def result(self) -> Simulated:
        steps = self.steps()
        candidate, work = self._candidate, self._device_work
        seconds = self._ledger.seconds
        return Simulated(
            step_seconds=steps[-1],
            compute_seconds=self._slowness * candidate.accumulation * candidate.profile_pass.played.device_seconds,
            recompute_seconds=self._slowness * candidate.accumulation * candidate.recompute_seconds,
            update_seconds=work.norm + work.resident + work.beside,
            waits_seconds={kind: seconds[kind] for kind in get_args(Waits)},
            exchange_seconds=seconds["link"],
        )

    def steps(self) -> list[float]:
        """Seconds of some that are not clipped, then, where one is to be, of that and of some after it."""
        over = Signal()
        self._resume(self._run(over))
        self._clock.run(over)
        return self._steps

    def _resume(self, work: Work) -> None:
        """Lets the computation go on to where it next takes time, or waits."""
        self._resources.go_on()
        for wanted in work:
            if isinstance(wanted, Signal):
                if not wanted.happened:
                    self._resources.wait()
                    wanted.then(partial(self._resume, work))
                    return
            elif self._resources.compute(wanted, partial(self._resume, work)):
                return

    def _run(self, over: Signal) -> Work:
        candidate, ledger = self._candidate, self._ledger
        accumulation, is_alone = candidate.accumulation, candidate.division.is_alone
        played = accumulation if is_alone else min(accumulation, RANK_PASSES)
        uses_host = bool(candidate.offloaded) or any(each.is_on_host or each.route != "resident" for each in self._chunks)
        count = STEPS if is_alone or uses_host else RANK_STEPS
        for number in range(STEPS + 1 + AFTER_CLIPPED if self._clips else count):
            began = self._began = self._clock.now
            self.beginnings.append(began)
            self._updates.begin_step()
            last, ledger.seconds = ledger.seconds, dict.fromkeys(KINDS, 0.0)
            left, state = accumulation, State()
            for micro_batch in range(accumulation):
                if self._clock.now - began >= self._under:
                    break
                self._fetches.begin_pass()
                before, state_before, waited = self._clock.now, state, dict(ledger.seconds)
                yield from self._one_pass(is_last=left == 1)
                if self._is_like_the_last:
                    ledger.seconds = last
                    over.fire()
                    return
                left -= 1
                took, state = self._clock.now - before, self._resources.state(self._launching.behind_seconds)
                if left > 1 and (micro_batch == played - 2 or state.is_like(state_before, PASSES_ALIKE * took)):
                    ledger.count_again(left - 1, waited)
                    began -= (left - 1) * took
                    left = 1
                if left == 0:
                    self.passes = micro_batch + 1
                    break
            self._at = None
            yield from self._gradients.all_added()
            yield self._device_work.norm
            self._updates.norm_known(clips=self._clips and number == STEPS)
            self._launching.wait()
            self._launching.spend(self._start_seconds * sum(chunk.route != "resident" for chunk in self._chunks))
            resident = self._device_work.resident
            yield resident
            for chunk in self._chunks if candidate.shards > 1 and not candidate.gathers else ():
                if chunk.is_resident:
                    self._exchanges.share(chunk)
            yield candidate.ending_seconds(resident, self._rates) - resident
            if not is_alone:
                self._launching.wait()
            self._steps.append(self._clock.now - began)
            self.is_over = self._steps[-1] >= self._under
            if self.is_over:
                break
        over.fire()

    @property
    def _is_like_the_last(self) -> bool:
        """The step under way, of which no more has to be played."""
        if self._clips or len(self._steps) < STEPS - 1 or len(self._forwards) <= len(self._steps):
            return False
        return abs(self._forwards[-1] - self._forwards[-2]) <= ALIKE * self._steps[-1]

    def _one_pass(self, *, is_last: bool) -> Work:
        candidate = self._candidate
        self._activations.begin_pass()
        for chunk in self._chunks:
            chunk.missing = self._backward_segments[chunk.index]
        segments = zip(candidate.profile_pass.segments, self._uses, candidate.timings, self._engine_seconds, strict=True)
        for segment, used, timing, engine in segments:
            block, self._at = segment.block, segment
            if segment.phase == "forward":
                yield from self._activations.begin(block)
                yield from self._fetches.ready(used)
                self._launching.spend(engine)
                yield self._ops(timing)
                self._activations.forward_over(block)
                continue
            if len(self._forwards) == len(self._steps):
                self._forwards.append(self._clock.now - self._began)
                if self._is_like_the_last:
                    return
            yield from self._fetches.ready(used)
            if candidate.activations[block] == "offload":
                yield from self._activations.back(block)
            self._launching.spend(engine)
            yield from self._backward(used, self._ops(timing), is_last=is_last)

    def _ops(self, timing: Timing) -> float:
        """Seconds that the computation takes for them, with waits for their launches."""
        seconds, waited = self._launching.run(timing, self._slowness)
        self._ledger.seconds["launch"] += waited
        return seconds

    def _backward(self, used: Sequence[Chunk], seconds: float, *, is_last: bool) -> Work:
        """Of a rank, gradients come one chunk after another, the last first: more of them than there are staging buffers at once
        would look as if the computation had to wait for each block's."""
        is_alone = self._candidate.division.is_alone
        complete = []
        for chunk in used if is_alone else reversed(used):
            chunk.missing -= 1
            if chunk.missing == 0 and chunk.cost.gradient_bytes:
                complete.append(chunk)
        if is_alone or not complete:
            yield seconds
        for chunk in complete:
            if not is_alone:
                yield seconds / len(complete)
            arrived = yield from self._gradients.complete(chunk, is_last=is_last)
            if is_last:
                self._updates.begin(chunk, arrived)
                self._launching.spend(self._start_seconds * chunk.speculates)


@dataclass(frozen=True)
class DeviceWork:
    """Seconds of a step that the device works on gradients and updates."""

    norm: float
    resident: float
    beside: float  # while it computes

    @classmethod
    def of(cls, step: Step) -> DeviceWork:
        candidate, rates, chunks = step.candidate, step.rates, step.chunks
        given, passes = [chunk for chunk in chunks if chunk.cost.gradient_bytes], candidate.accumulation
        on_host = sum(chunk.elements for chunk in given if candidate.adds_up and chunk.placement.gradients == "host")
        on_device = sum(chunk.elements for chunk in given) - on_host
        staged = sum(
            chunk.cost.elements
            for chunk in given
            for number in range(passes)
            if candidate.stages(chunk.placement, is_last=number == passes - 1)
        )
        added = candidate.adds_up * (passes * sum(chunk.cost.elements for chunk in given) - staged)
        streamed = sum(chunk.elements for chunk in given if chunk.route == "streamed" and chunk.cost.is_updated)
        return cls(
            rates.norm_seconds * on_device + rates.host_norm_seconds * on_host + candidate.division.norm_seconds,
            rates.update_seconds * sum(chunk.elements for chunk in chunks if chunk.is_resident),
            rates.gather_seconds * staged + rates.add_seconds * added + rates.update_seconds * streamed,
        )


def engine_seconds(step: Step) -> list[float]:
    """By segment, of the host: the engine looks at ops that take weights which move, gives parameters fresh weights, and takes
    gradients over."""
    candidate, costs = step.candidate, step.rates.host.launching
    segments = list(zip(candidate.profile_pass.segments, step.uses, strict=True))
    uses = Counter((chunk.index, segment.phase) for segment, used in segments for chunk in used)
    is_recomputed = [choice in ("recompute", "selective") for choice in candidate.activations]
    found = []
    for segment, used in segments:
        is_forward, seconds = segment.phase == "forward", 0.0
        looks, is_replayed = is_forward or is_recomputed[segment.block], candidate.replays[segment.block] is not None
        for chunk in used:
            tensors = chunk.cost.tensors / uses[chunk.index, segment.phase]
            if looks and chunk.is_away and not is_replayed:
                seconds += tensors * costs.watched_seconds
            if is_forward and chunk.is_updated_elsewhere:
                seconds += tensors * costs.bind_seconds
            if not is_forward and chunk.cost.gradient_bytes and is_replayed:
                seconds += tensors * costs.taken_seconds
            elif not is_forward and chunk.cost.gradient_bytes and candidate.stages(chunk.placement, is_last=True):
                seconds += tensors * costs.gradient_seconds
        found.append(seconds)
    return found
