"""First weights on their way into chunks, a piece at a time: cast, split into halves and written by all cores.

Pieces come in the order of the chunks. Those that lie in files are read by several threads, a few pieces ahead of the writing.
All others come when it is their turn: they may be made of several tensors, or come from another rank.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from ..kernels.split import put
from .weights import Elements, Stored

READERS = 8  # threads: one does not keep a fast disk busy
PIECES_AHEAD = 12  # that are read and not written yet, of a few MiB each

Owner = TypeVar("Owner")


@dataclass(frozen=True, eq=False)
class Piece:
    """Some elements of a parameter, and where they go."""

    given: Elements
    start: int
    end: int
    homes: Sequence[Tensor]
    low: Tensor | None
    is_split: bool

    def read(self) -> Tensor:
        return self.given(self.start, self.end)

    def write(self, values: Tensor) -> None:
        put(values, self.homes, self.low, is_split=self.is_split)


def filled(owners: Iterable[tuple[Owner, Iterable[Piece]]]) -> Iterator[Owner]:
    """Each owner, once all its pieces are written."""
    waiting: deque[tuple[Owner, Piece | None, Future[Tensor] | None]] = deque()  # without a piece: the owner has all

    def written(ahead: int) -> Iterator[Owner]:
        """Writes until so few are read ahead; an owner that has all does not wait."""
        while waiting and (len(waiting) > ahead or waiting[0][1] is None):
            owner, piece, read = waiting.popleft()
            if piece is None or read is None:
                yield owner
            else:
                piece.write(read.result())

    with ThreadPoolExecutor(READERS, "anyfit reading") as readers:  # which start when there is something to read
        for owner, pieces in owners:
            for piece in pieces:
                is_stored = isinstance(piece.given, Stored)
                yield from written(PIECES_AHEAD if is_stored else 0)
                if is_stored:
                    waiting.append((owner, piece, readers.submit(piece.read)))
                else:
                    piece.write(piece.read())
            waiting.append((owner, None, None))
            yield from written(PIECES_AHEAD)
        yield from written(0)
