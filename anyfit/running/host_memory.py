"""When host memory runs out, a run is planned anew with less of it, or stops before the kernel ends the process.

A thread looks at what is left. A plan takes its host memory at the start; what grows is the user's data, the loader's processes
and other programs. The floor is a small share of what the plan may take, and less where little was free at the start.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

from anyfit.values.no_plan import NoPlan
from anyfit.values.units import show_bytes

from .engine import Engine, Progress
from .rescue import said_of_host

EVERY_SECONDS = 0.25
FLOOR_SHARE, MOST_FLOOR_BYTES = 0.02, 2 * 2**30  # of the plan's limit
FREE_SHARE = 0.25  # of what was free at the start: a run that begins with little is not stopped at once


class HostMemory:
    def __init__(self, engine: Engine, progress: Progress, watch: HostWatch | None) -> None:
        self._engine, self._progress, self._watch = engine, progress, watch
        self.lacking: list[float] = []  # by rank, bytes that are left, where they are too few

    def heed(self, make_room: Callable[[int], None], saved: Callable[[], str]) -> None:
        """Before a step. Several ranks hear of a shortage after a step, and end together. `make_room` plans with so many bytes
        less; `saved` saves a run that has to stop, and says where."""
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
        """The bytes left, where they are too few; else 0."""
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


class HostWatch:
    """Watches `free_bytes`, what this process may still take, from a thread."""

    def __init__(self, free_bytes: Callable[[], float], limit_bytes: int, every_seconds: float = EVERY_SECONDS) -> None:
        self.floor_bytes = floor = int(min(FLOOR_SHARE * limit_bytes, MOST_FLOOR_BYTES, FREE_SHARE * free_bytes()))
        self._free_bytes = free_bytes
        self._low = low = threading.Event()
        stop = threading.Event()

        def look() -> None:  # knows nothing of this object, so that it can be freed
            while not stop.wait(every_seconds):
                if free_bytes() < floor:
                    low.set()

        def end() -> None:
            stop.set()
            thread.join()

        thread = threading.Thread(target=look, name="anyfit host memory", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, end)

    def shortage(self) -> float | None:
        """The bytes left, where they were under the floor and still are."""
        if not self._low.is_set():
            return None
        self._low.clear()
        left = self._free_bytes()
        return left if left < self.floor_bytes else None
