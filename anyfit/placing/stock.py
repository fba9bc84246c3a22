"""Host memory that is made ready before it is asked for: while a model is being built, and while its weights go into chunks.

A stock is one stretch of addresses, as long as the host memory of a plan. Threads touch it from its beginning, which is what
takes time, and leave as much untouched as the model that was built takes: both together are never more than the plan's. Slabs are
cut off at the beginning, and are memory like any other from then on: each goes back when nobody has anything of it any more.
"""

from __future__ import annotations

import ctypes
import threading

from torch import Tensor

from anyfit.values.graph import PAGE_BYTES

from ..kernels.bytes import touch
from ..kernels.pages import HUGE_PAGE_BYTES, MADV_POPULATE_WRITE, Mapped, advise

LEAST_BYTES = 2**26  # what is less is touched in no time
TAKEN_AT_ONCE = 2**26  # by a thread
POPULATED_AT_ONCE = HUGE_PAGE_BYTES  # while the kernel is at them, whoever else wants memory of this process waits
ADDRESSES = 1.02  # times what is planned: slabs are not full to the end


class Stock:
    """Of so many bytes, of which the model takes some at first. `close` gives back what was not taken."""

    def __init__(self, planned_bytes: int, model_bytes: int, threads: int) -> None:
        self._planned, self._allowed = planned_bytes, 0
        size = int(planned_bytes * ADDRESSES) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
        self._mapped: Mapped | None = Mapped.reserve(size)
        self._bytes = self._mapped.bytes()
        self._given: list[Tensor] = []  # to be there as long as threads may touch them
        self._cut = self._claimed = 0  # from the beginning: given out, and in the hands of threads or touched by them
        self.touched_bytes = 0
        self._change = threading.Condition()
        self._ends = ctypes.c_int32()
        self.model_takes(model_bytes)
        self._threads = [threading.Thread(target=self._touch, name="anyfit stock", daemon=True) for _ in range(threads)]
        for thread in self._threads:
            thread.start()

    def model_takes(self, size: int) -> None:
        """So much of the planned bytes is at present the model's, as it was built."""
        with self._change:
            self._allowed = max(self._planned - size, 0) // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
            self._change.notify_all()

    def take(self, size: int) -> Tensor | None:
        """A slab, all zero, touched or not; None where so much is not left."""
        with self._change:
            slab = None if self._mapped is None else self._mapped.cut(size)
            if slab is None:
                return None
            self._cut += size
            self._given.append(slab.bytes())
            return slab.bytes()

    def close(self) -> None:
        self._ends.value = 1
        with self._change:
            self._change.notify_all()
        for thread in self._threads:
            thread.join()
        with self._change:
            self._mapped, self._bytes = None, self._bytes[:0].clone()
            self._given.clear()

    def _touch(self) -> None:
        while (part := self._next_part()) is not None and self._is_touched(part):
            with self._change:
                self.touched_bytes += len(part)

    def _next_part(self) -> Tensor | None:
        """What nobody has touched; waits until there is some that may be, and is None at the end."""
        with self._change:
            # What is cut off already is for its owner to touch.
            self._change.wait_for(lambda: self._ends.value or max(self._claimed, self._cut) < self._allowed)
            if self._ends.value:
                return None
            start = max(self._claimed, self._cut)
            self._claimed = min(start + TAKEN_AT_ONCE, self._allowed)
            return self._bytes[start : self._claimed]

    def _is_touched(self, part: Tensor) -> bool:
        """By the kernel; False where it cannot."""
        if touch(part, PAGE_BYTES, self._ends):
            return True
        pieces = part.split(POPULATED_AT_ONCE)  # without a C++ compiler
        return all(not self._ends.value and advise(each, MADV_POPULATE_WRITE) for each in pieces)
