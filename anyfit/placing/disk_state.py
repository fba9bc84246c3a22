"""The optimizer's state of chunks on the disk: low halves of the masters, and moments.

In memory a buffer that lies on the disk is a meta tensor: of its size, without a number, and whoever reads one by mistake gets an
error. The route of an update reads a chunk into a carrier and writes it back; who sets a few numbers between steps has a part of
it `at_hand`, and `put_away` writes what was changed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from anyfit.values.engine import DISK_DEPTH
from anyfit.values.units import show_bytes

from .disk import DiskError, DiskFile, Stored, room_for
from .lanes import Lanes
from .tiers import LOW, HostSlabs, Tier

AT_HAND = 3  # parts that are changed a little at a time: those of about one chunk


class DiskRoom(NamedTuple):
    """What a chunk is to have on the disk."""

    parts: tuple[int, ...]  # in bytes
    has_second: bool  # generation: it speculates


def disk_tier(folder: Path, chunks: Sequence[DiskRoom], limit_bytes: int, lanes: Lanes, slabs: HostSlabs) -> DiskTier:
    """With room for these, and for those that are written before what was there goes."""
    file = DiskFile(folder, max((size for chunk in chunks for size in chunk.parts), default=1), limit_bytes, slabs)
    try:
        blocks = [sum(map(file.blocks_of, chunk.parts)) for chunk in chunks]
        seconds = sum(count for count, chunk in zip(blocks, chunks, strict=True) if chunk.has_second)
        one = sum(blocks) + DISK_DEPTH * max(blocks, default=0)
        try:
            file.reserve(one + seconds)
        except DiskError as error:
            if not seconds:
                raise
            size, without = (show_bytes(count * file.block_bytes) for count in (seconds, one))
            raise DiskError(
                f"{error}; {size} of it are for updates that speculate: with speculates=False it is {without}"
            ) from error
    except BaseException:
        file.close()
        raise
    return DiskTier(lanes, file)


class DiskTier(Tier):
    def __init__(self, lanes: Lanes, file: DiskFile) -> None:
        super().__init__(lanes)
        self.file = file
        self._at_hand: OrderedDict[tuple[int, str], tuple[DiskChunk, Tensor]] = OrderedDict()
        self._is_told = False
        self.failed: DiskError | None = None  # why a part of it is in host memory, while several ranks do not know it

    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """What stands for it."""
        return torch.empty(elements, dtype=dtype, device="meta")

    def news(self) -> list[str]:
        """Once, what a person should know of it."""
        if self._is_told:
            return []
        self._is_told = True
        how = "" if self.file.is_direct else ", through the page cache: its file system refuses O_DIRECT"
        return [f"optimizer state on the disk: {show_bytes(self.file.bytes)} in {self.file.folder}{how}"]

    def at_hand(self, chunk: DiskChunk, key: str) -> Tensor:
        """A part in memory, to be changed until another is asked for."""
        name = chunk.index, key
        if name not in self._at_hand:
            while len(self._at_hand) >= AT_HAND:
                self._put_away_first()
            self._at_hand[name] = chunk, chunk.read_part(key)
        self._at_hand.move_to_end(name)
        return self._at_hand[name][1]

    def put_away(self) -> None:
        """What was at hand is on the disk."""
        while self._at_hand:
            self._put_away_first()

    def _put_away_first(self) -> None:
        (name, (chunk, flat)) = next(iter(self._at_hand.items()))
        chunk.write_part(name[1], flat)
        del self._at_hand[name]

    @property
    def is_put_away(self) -> bool:
        return not self._at_hand


class DiskChunk:
    """What a chunk has on the disk, by part. One that is not there is zero."""

    def __init__(self, tier: DiskTier, index: int, elements: int) -> None:
        self.tier, self.index, self._elements = tier, index, elements
        self._parts: dict[str, Stored] = {}

    def __str__(self) -> str:
        return f"optimizer state of chunk {self.index}"

    def dtype_of(self, key: str) -> torch.dtype:
        return torch.int16 if key == LOW else torch.float32

    def read(self, into: Mapping[str, Tensor]) -> None:
        """Parts into flat tensors that can be read past the page cache."""
        assert self.tier.is_put_away
        for key in into.keys() - self._parts.keys():
            into[key].zero_()
        self.tier.file.read([(self._parts[key], flat) for key, flat in into.items() if key in self._parts], str(self))

    def written(self, parts: Sequence[Tensor]) -> list[Stored]:
        """They lie on the disk as well, beside what counts until `take_over`."""
        return self.tier.file.write(parts, str(self))

    def take_over(self, parts: Mapping[str, Stored]) -> None:
        """These count from now on."""
        old = [self._parts[key] for key in parts if key in self._parts]
        self._parts |= parts
        self.tier.file.free(old)

    def room(self, key: str) -> Tensor:
        """Zeros in memory, of the part's size."""
        return room_for(self._elements, self.dtype_of(key))

    def read_part(self, key: str) -> Tensor:
        flat = self.room(key)
        if key in self._parts:
            self.tier.file.read([(self._parts[key], flat)], str(self))
        return flat

    def write_part(self, key: str, flat: Tensor) -> None:
        self.take_over({key: self.written([flat])[0]})

    def some(self, key: str, start: int, end: int) -> Tensor:
        """Some elements of a part."""
        assert self.tier.is_put_away
        return self._some(self._parts.get(key), key, start, end)

    def _some(self, stored: Stored | None, key: str, start: int, end: int) -> Tensor:
        dtype = self.dtype_of(key)
        if stored is None:
            return torch.zeros(end - start, dtype=dtype)
        size = dtype.itemsize
        return self.tier.file.some(stored, start * size, end * size, str(self)).view(dtype)

    def still(self, elements: Mapping[str, int]) -> Still:
        """It as it is now, of which so many elements of each part will be read beside the steps."""
        assert self.tier.is_put_away
        return Still(self, {key: self._parts[key] for key in elements if key in self._parts}, elements)

    def at_hand(self, key: str) -> Tensor:
        """A part in memory, to be changed until another is asked for; `tier.put_away` writes it."""
        return self.tier.at_hand(self, key)

    def forget(self, keys: Sequence[str]) -> None:
        """These are zero."""
        assert self.tier.is_put_away
        self.tier.file.free([self._parts.pop(key) for key in keys if key in self._parts])


class Still:
    """What a chunk had on the disk when this was made, for whoever reads it beside the steps: held until all is read."""

    def __init__(self, disk: DiskChunk, parts: Mapping[str, Stored], elements: Mapping[str, int]) -> None:
        self._disk, self._parts, self._left = disk, dict(parts), dict(elements)
        self._held, self._lock = dict(parts), threading.Lock()
        for stored in self._held.values():
            disk.tier.file.hold(stored)

    def some(self, key: str, start: int, end: int) -> Tensor:
        return self._disk._some(self._parts.get(key), key, start, end)

    def was_read(self, key: str, elements: int) -> None:
        """So many more of a part, which nobody reads again."""
        with self._lock:
            self._left[key] -= elements
            if not self._left[key]:
                self._let_go(key)

    def let_go(self) -> None:
        """Nobody reads any more of it."""
        with self._lock:
            for key in list(self._held):
                self._let_go(key)

    def _let_go(self, key: str) -> None:
        stored = self._held.pop(key, None)
        if stored is not None:
            self._disk.tier.file.let_go(stored)
