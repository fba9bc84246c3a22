"""What the parts of a simulated step share: its chunks, and the account of what the computation waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, get_args

from anyfit.planning.candidate import Candidate
from anyfit.values.plan import Placement
from anyfit.values.profile import ChunkCost

from .clock import Clock, Signal, Work

Waits = Literal["fetch", "update", "gradients", "activations", "exchange"]
Account = tuple[Mapping[Waits, float], float]


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
    updated: Signal | None = None  # they are made, and go up in turn
    is_two_phase: bool = False
    whole: Signal = field(default_factory=lambda: Signal(happened=True))  # and so are its moments

    def __post_init__(self) -> None:
        self.is_on_host = self.placement.weights == "host"
        self.gathers = self.gathers or (self.shards > 1 and self.is_on_host)
        self.is_away = self.is_on_host or self.gathers
        self.route = self.placement.route
        self.is_resident = self.route == "resident" and self.cost.is_updated
        # What this rank has of it.
        self.elements = self.cost.elements / self.shards
        self.weights_bytes = self.cost.weights_bytes / self.shards
        self.optimizer_bytes = self.cost.optimizer_bytes / self.shards


def chunks_of(candidate: Candidate) -> list[Chunk]:
    pairs = enumerate(zip(candidate.chunks, candidate.placements, strict=True))
    return [
        Chunk(index, cost, placement, candidate.shards, candidate.gathers, placement.speculates and not candidate.adds_up)
        for index, (cost, placement) in pairs
    ]


class Ledger:
    """Seconds of the step under way: that the computation waits, by what for, and that the link between ranks is used."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._waits: dict[Waits, float] = dict.fromkeys(get_args(Waits), 0.0)
        self.exchanged = 0.0

    def wait(self, kind: Waits, signal: Signal) -> Work:
        began = self._clock.now
        yield signal
        self._waits[kind] += self._clock.now - began

    @property
    def account(self) -> Account:
        return dict(self._waits), self.exchanged

    @account.setter
    def account(self, account: Account) -> None:
        self._waits, self.exchanged = dict(account[0]), account[1]

    def clear(self) -> None:
        self._waits, self.exchanged = dict.fromkeys(self._waits, 0.0), 0.0

    def count_again(self, times: int, before: Account) -> None:
        """What has come to the account since, so many times more."""
        waits, exchanged = before
        for kind, seconds in waits.items():
            self._waits[kind] += times * (self._waits[kind] - seconds)
        self.exchanged += times * (self.exchanged - exchanged)
