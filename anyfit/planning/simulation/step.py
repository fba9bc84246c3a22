"""What the parts of a simulated step share: its chunks, resources, exchanges with other ranks, and the account of waits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from anyfit.planning.candidate import Candidate, Rates
from anyfit.values.plan import Placement
from anyfit.values.precision import SUM_BYTES
from anyfit.values.profile import ChunkCost

from .clock import Call, Clock, Resources, Signal, Work
from .launching import Launching

Waits = Literal["fetch", "update", "disk", "gradients", "activations", "exchange", "launch"]
Kind = Waits | Literal["link"]
KINDS: tuple[Kind, ...] = (*get_args(Waits), "link")


@dataclass(eq=False)
class Chunk:
    index: int
    cost: ChunkCost
    placement: Placement
    shards: int
    gathers: bool
    speculates: bool
    missing: int = 0  # backward segments of this micro-batch until its gradients are complete
    fresh: Signal = field(default_factory=lambda: Signal(happened=True))  # its weights are those of the last step
    updated: Signal | None = None  # they are made, and are copied to the device in turn
    is_two_phase: bool = False
    whole: Signal = field(default_factory=lambda: Signal(happened=True))  # and so are its moments

    def __post_init__(self) -> None:
        self.is_on_host = self.placement.weights == "host"
        self.gathers = self.gathers or (self.shards > 1 and self.is_on_host)
        self.is_away = self.is_on_host or self.gathers
        self.route = self.placement.route
        self.is_resident = self.route == "resident" and self.cost.is_updated
        self.is_updated_elsewhere = self.cost.is_updated and (self.route != "resident" or self.shards > 1) and not self.is_away
        # What this rank has of it.
        self.elements = self.cost.elements / self.shards
        self.weights_bytes = self.cost.weights_bytes / self.shards
        self.optimizer_bytes = self.cost.optimizer_bytes / self.shards


class Ledger:
    """Seconds of the step under way: that the computation waits, by what for, and that the link between ranks is used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.seconds = dict.fromkeys(KINDS, 0.0)

    def wait(self, kind: Waits, signal: Signal) -> Work:
        began = self._clock.now
        yield signal
        self.seconds[kind] += self._clock.now - began

    def count_again(self, times: int, before: Mapping[Kind, float]) -> None:
        """What has come to the account since, so many times more."""
        for kind, seconds in before.items():
            self.seconds[kind] += times * (self.seconds[kind] - seconds)


class Exchanges:
    """What one of several ranks exchanges with the others, one exchange at a time. A device alone exchanges nothing."""

    def __init__(self, candidate: Candidate, resources: Resources, ledger: Ledger) -> None:
        self._resources, self._ledger, division = resources, ledger, candidate.division
        self._gather_seconds = [division.gather.seconds(each.weights_bytes) for each in candidate.chunks]
        self._reduce_seconds = [
            division.reduction(is_cut=each.is_cut).seconds(SUM_BYTES * each.elements) for each in candidate.chunks
        ]

    def all_gather(self, chunk: Chunk, done: Call) -> None:
        """Weights that are sharded, for a use."""
        self._exchange("gather", self._gather_seconds[chunk.index], done)

    def reduce(self, chunk: Chunk, done: Call) -> None:
        """Sums gradients, of which each rank keeps its shard."""
        self._exchange("reduce", self._reduce_seconds[chunk.index], done)

    def share(self, chunk: Chunk) -> None:
        """Fresh weights, where they are whole on every rank: each has updated its shard of them."""
        if chunk.shards == 1 or chunk.gathers:
            chunk.fresh.fire()
            return
        if chunk.fresh.happened:
            chunk.fresh = Signal()
        self._exchange("all_gather", self._gather_seconds[chunk.index], chunk.fresh.fire)

    def _exchange(self, queue: str, seconds: float, done: Call) -> None:
        self._ledger.seconds["link"] += seconds
        self._resources.use("link", queue, seconds, done)


class Step:
    """One candidate's, with its resources and accounts."""

    def __init__(self, candidate: Candidate, rates: Rates) -> None:
        self.candidate, self.rates, self.clock = candidate, rates, Clock()
        self.resources = Resources(self.clock, rates, shares_copies=candidate.division.shares_copies)
        self.ledger = Ledger(self.clock)
        self.launching = Launching(self.clock, self.resources, rates)
        self.exchanges = Exchanges(candidate, self.resources, self.ledger)
        self.chunks = [
            Chunk(index, cost, placement, candidate.shards, candidate.gathers, placement.speculates)
            for index, (cost, placement) in enumerate(zip(candidate.chunks, candidate.placements, strict=True))
        ]
        self.uses = [[self.chunks[index] for index in used] for used in candidate.uses]  # by segment
