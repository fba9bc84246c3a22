"""What torch's CUDA allocator reserves for a sequence of allocations: its rules, played through without a GPU.

The rules (c10/cuda/CUDACachingAllocator.cpp): sizes are rounded up to 512 bytes. Up to 1 MiB come from segments of 2 MiB, up to
10 MiB from segments of 20 MiB, larger ones from a segment of their own rounded up to 2 MiB. The smallest free block that is
large enough is taken and split, if what is left is worth keeping. Freed blocks merge with free neighbours of their segment. A
segment, once taken, stays.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIB = 2**20
ROUND = 512
SMALL = MIB
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB
OWN_SEGMENT, OWN_ROUND = 10 * MIB, 2 * MIB


@dataclass(eq=False)
class Piece:
    """A stretch of one segment, free or taken, and its neighbours."""

    size: int
    number: int  # of the segment, then address: ties among equal sizes go to the lower one, as in torch
    address: int
    small: bool
    before: Piece | None = None
    after: Piece | None = None
    free: bool = False


Entry = tuple[int, int, int, Piece]  # size, segment, address: no two are alike, so pieces themselves are never compared


class CachingAllocator:
    def __init__(self) -> None:
        self.reserved_bytes = 0
        self._free: dict[bool, list[Entry]] = {True: [], False: []}  # small and large, ascending
        self._segments = 0

    def take(self, size: int) -> Piece:
        size = max(-(-size // ROUND) * ROUND, ROUND)
        small = size <= SMALL
        pool = self._free[small]
        place = bisect_left(pool, (size,))
        if place < len(pool):
            piece = pool.pop(place)[3]
            piece.free = False
        else:
            piece = self._new_segment(size, small)
        left = piece.size - size
        if left >= ROUND if small else left > SMALL:
            rest = Piece(left, piece.number, piece.address + size, small, before=piece, after=piece.after)
            if piece.after is not None:
                piece.after.before = rest
            piece.after, piece.size = rest, size
            self._put(rest)
        return piece

    def give(self, *pieces: Piece) -> None:
        for piece in pieces:
            for neighbour in (piece.before, piece.after):
                if neighbour is not None and neighbour.free:
                    self._drop(neighbour)
                    piece = _merged(piece, neighbour)
            self._put(piece)

    def _new_segment(self, size: int, small: bool) -> Piece:
        if small:
            whole = SMALL_SEGMENT
        elif size < OWN_SEGMENT:
            whole = LARGE_SEGMENT
        else:
            whole = -(-size // OWN_ROUND) * OWN_ROUND
        self.reserved_bytes += whole
        self._segments += 1
        return Piece(whole, self._segments, 0, small)

    def _put(self, piece: Piece) -> None:
        piece.free = True
        insort(self._free[piece.small], (piece.size, piece.number, piece.address, piece))

    def _drop(self, piece: Piece) -> None:
        pool = self._free[piece.small]
        place = bisect_left(pool, (piece.size, piece.number, piece.address))
        assert pool[place][3] is piece
        del pool[place]
        piece.free = False


def _merged(piece: Piece, neighbour: Piece) -> Piece:
    first, second = (neighbour, piece) if neighbour.address < piece.address else (piece, neighbour)
    first.size += second.size
    first.after = second.after
    if second.after is not None:
        second.after.before = first
    return first
