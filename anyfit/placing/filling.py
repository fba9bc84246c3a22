"""First weights on their way into chunks, a piece at a time: read where they lie in files, cast, and split into halves.

Several threads work at the pieces, a few ahead of the first that is not done. What only torch can write they leave to the calling
thread: it would wake a team of threads for each of them. Elements that are made of several tensors, or come from other ranks, are
asked for when it is their turn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from ..kernels.bytes import copy, split
from ..kernels.split import put
from .weights import AT_ANY_TIME, Elements

THREADS = 8  # which keep a fast disk busy, and the memory
PIECES_AHEAD = 16  # of a few MiB each

Owner = TypeVar("Owner")


@dataclass(frozen=True, eq=False)
class Piece:
    """Some elements of a parameter, and where they go: into buffers that are zero."""

    given: Elements
    start: int
    end: int
    homes: Sequence[Tensor]
    low: Tensor | None
    is_split: bool

    @property
    def is_in_turn(self) -> bool:
        return not isinstance(self.given, AT_ANY_TIME)

    def write(self) -> None:
        put(self.given(self.start, self.end), self.homes, self.low, is_split=self.is_split)

    def move(self) -> Callable[[], None] | None:
        """Written, without torch's threads. What they have to write, the calling thread is left to."""
        values, low = self.given(self.start, self.end), self.low
        home, *others = sorted(self.homes, key=lambda each: not each.is_cpu)
        if not all(each.is_cpu and each.is_contiguous() for each in (values, home)):
            return partial(put, values, self.homes, low, is_split=self.is_split)
        if values.dtype == home.dtype:
            copy(values, home)  # of bf16 weights the low halves are zero
        elif values.dtype == torch.float32 and low is not None and low.is_cpu:
            split(values, home, low)
        else:
            return partial(put, values, self.homes, low, is_split=self.is_split)
        for other in (each for each in others if each.is_cpu):
            copy(home, other)
        left = [each for each in others if not each.is_cpu]
        return partial(put, home, left, None, is_split=False) if left else None


def filled(owners: Iterable[tuple[Owner, Iterable[Piece]]]) -> Iterator[Owner]:
    """Each owner, once all its pieces are written."""
    waiting: deque[tuple[Owner, Future[Callable[[], None] | None] | None]] = deque()  # None: the owner has all its pieces

    def written(ahead: int) -> Iterator[Owner]:
        """Waits until so few are left; an owner that has all does not wait."""
        while waiting and (len(waiting) > ahead or waiting[0][1] is None):
            owner, moved = waiting.popleft()
            if moved is None:
                yield owner
            elif (rest := moved.result()) is not None:
                rest()

    with ThreadPoolExecutor(THREADS, "anyfit filling") as threads:
        for owner, pieces in owners:
            for piece in pieces:
                yield from written(0 if piece.is_in_turn else PIECES_AHEAD)
                if piece.is_in_turn:
                    piece.write()
                else:
                    waiting.append((owner, threads.submit(piece.move)))
            waiting.append((owner, None))
            yield from written(PIECES_AHEAD)
        yield from written(0)
