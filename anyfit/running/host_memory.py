"""What a run does where host memory ends: it is planned anew with less there, or stops before the kernel ends the process."""

from __future__ import annotations

from collections.abc import Callable

from anyfit.values.plan import NoPlan
from anyfit.values.units import show_bytes

from .engine import Engine
from .progress import Progress
from .rescue import said_of_host
from .watch import HostWatch


class HostMemory:
    def __init__(self, engine: Engine, progress: Progress, watch: HostWatch | None) -> None:
        self._engine, self._progress, self._watch = engine, progress, watch
        self.lacking: list[float] = []  # by rank, bytes that are left, where they are too few

    def heed(self, make_room: Callable[[int], None], saved: Callable[[], str]) -> None:
        """Before a step. Ranks hear of each other's want after a step, and end together. `make_room` plans with so many bytes
        less; `saved` keeps the state of a run that has to stop, and says where."""
        if self._engine.ranks.are_several:
            rank = next((rank for rank, left in enumerate(self.lacking) if left), None)
            if rank is not None:
                why = f"on rank {rank}; a plan for several ranks is not changed"
                raise self._error(self.lacking[rank], why, saved)
            return
        left = None if self._watch is None else self._watch.shortage()
        if self._watch is None or left is None:
            return
        before = self._engine.plan
        try:
            make_room(int(2 * self._watch.floor_bytes - left))
        except (NoPlan, MemoryError) as why:
            raise self._error(left, why, saved) from None
        self._progress.say(said_of_host(self._progress.steps, left, before, self._engine.plan))

    def lacking_bytes(self) -> float:
        """What is left, where that is too little; else 0."""
        left = None if self._watch is None else self._watch.shortage()
        return 0.0 if left is None else max(left, 1.0)

    def _error(self, left: float, why: object, saved: Callable[[], str]) -> MemoryError:
        return MemoryError(
            f"{show_bytes(left)} of host memory are left after step {self._progress.steps}, and the kernel ends a process that "
            f"has none ({why}). The run stands as it was, {saved()}. What helps: fewer workers of the data loader, other "
            "processes that end, or a plan with less on the host (host_memory=)"
        )

    def close(self) -> None:
        if self._watch is not None:
            self._watch.close()
