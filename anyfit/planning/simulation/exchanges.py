"""What one of several ranks exchanges with the others, one exchange at a time. A device alone exchanges nothing."""

from __future__ import annotations

from anyfit.planning.candidate import REDUCED_BYTES

from .clock import Call, Signal
from .step import Chunk, Step


class Exchanges:
    def __init__(self, step: Step) -> None:
        self._resources, self._ledger = step.resources, step.ledger
        chunks, division = step.candidate.chunks, step.candidate.division
        self._gather_seconds = [division.gather.seconds(each.weights_bytes) for each in chunks]
        self._reduce_seconds = [division.reduce.seconds(REDUCED_BYTES * each.elements) for each in chunks]

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
        self._exchange("spread", self._gather_seconds[chunk.index], chunk.fresh.fire)

    def _exchange(self, queue: str, seconds: float, done: Call) -> None:
        self._ledger.seconds["link"] += seconds
        self._resources.use("link", queue, seconds, done)
