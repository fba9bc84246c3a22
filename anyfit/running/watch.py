"""A watch on host memory: a thread that looks at what is left, so that a run hears of it before the kernel ends the process.

What a plan has on the host is taken at the start; what grows is other people's: the user's data, its loader's processes, others
on the machine. The floor is a small share of what the plan may take, and less where little was free to begin with.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable

EVERY_SECONDS = 0.25
FLOOR_SHARE, MOST_FLOOR_BYTES = 0.02, 2 * 2**30  # of the plan's limit
FREE_SHARE = 0.25  # of what was free at the start: a run that begins with little is not stopped at once


class HostWatch:
    """`free_bytes` says what this process may still take."""

    def __init__(self, free_bytes: Callable[[], float], limit_bytes: int, every_seconds: float = EVERY_SECONDS) -> None:
        self.floor_bytes = int(min(FLOOR_SHARE * limit_bytes, MOST_FLOOR_BYTES, FREE_SHARE * free_bytes()))
        self._free_bytes = free_bytes
        self._low, stop = threading.Event(), threading.Event()
        arguments = (free_bytes, self.floor_bytes, every_seconds, self._low, stop)
        thread = threading.Thread(target=_look, args=arguments, name="anyfit host memory", daemon=True)
        thread.start()
        self.close = weakref.finalize(self, _stop, thread, stop)

    def shortage(self) -> float | None:
        """What is left, where that has been under the floor and still is."""
        if not self._low.is_set():
            return None
        self._low.clear()
        left = self._free_bytes()
        return left if left < self.floor_bytes else None


def _look(
    free_bytes: Callable[[], float], floor_bytes: int, every_seconds: float, low: threading.Event, stop: threading.Event
) -> None:
    while not stop.wait(every_seconds):
        if free_bytes() < floor_bytes:
            low.set()


def _stop(thread: threading.Thread, stop: threading.Event) -> None:
    stop.set()
    thread.join()
