"""Whether a disk has become slow: its rate while somebody waits for it, in windows, beside the best so far."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

SLOW_SHARE, WELL_SHARE = 1 / 3, 1 / 2  # of the best: slow under the one, well again over the other
WINDOW_SECONDS, WINDOW_BYTES = 1.0, 2**28  # at least so much of both, or
LONG_SECONDS = 10.0  # so long


class Slow(NamedTuple):
    """In bytes a second."""

    now: float
    best: float


class DiskRate:
    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._lock = clock, threading.Lock()
        self._moving, self._since = 0, 0.0  # calls at work, and from when on they count
        self._bytes, self._seconds = 0, 0.0  # of the window
        self._best, self._is_slow = 0.0, False
        self._news: Slow | None = None

    @contextmanager
    def moving(self, size: int) -> Iterator[None]:
        """Around so many bytes. Reads and writes at the same time count together."""
        with self._lock:
            self._count()
            self._moving += 1
        try:
            yield
        finally:
            with self._lock:
                self._count()
                self._moving -= 1
                self._bytes += size
                is_full = self._seconds >= WINDOW_SECONDS and self._bytes >= WINDOW_BYTES
                if is_full or self._seconds >= LONG_SECONDS:
                    self._judge()

    def _count(self) -> None:
        now = self._clock()
        self._seconds += now - self._since if self._moving else 0.0
        self._since = now

    def _judge(self) -> None:
        rate = self._bytes / self._seconds
        if rate < SLOW_SHARE * self._best and not self._is_slow:
            self._is_slow, self._news = True, Slow(rate, self._best)
        elif rate > WELL_SHARE * self._best:
            self._is_slow = False
        self._best = max(self._best, rate)
        self._bytes, self._seconds = 0, 0.0

    def news(self) -> Slow | None:
        """Once, where it has become slow."""
        with self._lock:
            news, self._news = self._news, None
        return news
