"""What a run, all ranks of it, has to know of each rank's disk: that it takes no more writes, or has become slow.

State that a disk would not take is in host memory, where the plan has room. A rank alone hears of it from whoever needs the chunk
next; several hear of it after a step, and all raise an error before the next, with a state that can be saved elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable

from anyfit.placing.disk import DiskError
from anyfit.placing.disk_rate import Slow
from anyfit.values.units import show_bytes

from .engine import Engine, Progress

WELL = Slow(0.0, 0.0)


class DiskHealth:
    def __init__(self, engine: Engine, progress: Progress) -> None:
        self._engine, self._progress = engine, progress
        self._failed: list[bool] = []  # by rank
        self._slow: list[Slow] = []

    def known(self) -> list[float]:
        """Of this rank's disk since it was last asked, for the others."""
        disk = self._engine.placed.disk
        slow = (None if disk is None else disk.file.rate.news()) or WELL
        return [float(disk is not None and disk.failed is not None), *slow]

    def note(self, of_ranks: list[list[float]]) -> None:
        """What all have told."""
        self._failed = [bool(failed) for failed, *_ in of_ranks]
        self._slow = [Slow(now, best) for _, now, best in of_ranks]

    def heed(self, saved: Callable[[], str]) -> None:
        """Before a step. `saved` saves a run that has to stop, and says where."""
        if not self._engine.ranks.are_several:
            self.note([self.known()])
        several = self._engine.ranks.are_several
        failed, self._failed = self._failed, []
        slow, self._slow = self._slow, []
        for rank, each in enumerate(slow):
            if each.best:
                whose = f"rank {rank}: the" if several else "the"
                now, best = (show_bytes(rate) for rate in each)
                self._progress.say(f"{whose} disk with optimizer state has become slow: {now} a second, where it did {best}")
        if any(failed):
            raise DiskError(f"{self._what_failed(failed.index(True))}; it is in host memory now, {saved()}")

    def _what_failed(self, rank: int) -> str:
        disk = self._engine.placed.disk
        if disk is None or disk.failed is None:
            return f"optimizer state of rank {rank} could not be written to its disk"
        error, disk.failed = disk.failed, None
        return f"rank {self._engine.ranks.index}: {error}"
