"""Memory that stays where it is, as recordings read and write it, and copies to it and out of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from .chunks import quietly

ALIGNED = 512  # bytes: where a tensor begins in memory that several share


class Arena:
    """Memory that recordings share. What one has in it is read before the next is replayed."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._buffers: list[Tensor] = []

    def fixed(self, *groups: Sequence[Tensor]) -> list[Fixed]:
        """Fixed memory like each of these groups, apart from each other."""
        made = [Fixed(each) for each in groups]
        sizes = [-(-home.nbytes // ALIGNED) * ALIGNED for each in made for home in each.shapes]
        buffer = next((each for each in self._buffers if each.nbytes >= sum(sizes)), None)
        if buffer is None:
            buffer = torch.empty(sum(sizes), dtype=torch.uint8, device=self._device)
            self._buffers.append(buffer)
        places = iter(buffer.split([*sizes, buffer.nbytes - sum(sizes)]))
        for each, like in zip(made, groups, strict=True):
            each.settle([next(places) for _ in each.shapes])
            each.take(like)
        return made


@dataclass(frozen=True)
class Extent:
    """Of a tensor in memory; what is expanded is there once."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    part: tuple[slice, ...] | None  # of the tensor, that is there; None: all

    @staticmethod
    def of(tensor: Tensor) -> Extent:
        is_expanded = 0 in tensor.stride()
        part = tuple(slice(1) if step == 0 else slice(None) for step in tensor.stride()) if is_expanded else None
        known = tensor if part is None else tensor[part]
        return Extent(tuple(known.shape), tuple(known.stride()), tensor.dtype, part)

    @property
    def nbytes(self) -> int:
        if 0 in self.shape:
            return 0
        span = 1 + sum((size - 1) * step for size, step in zip(self.shape, self.stride, strict=True))
        return span * self.dtype.itemsize

    def at(self, place: Tensor) -> Tensor:
        return place[: self.nbytes].view(self.dtype).as_strided(self.shape, self.stride)


class Fixed:
    """Tensors whose memory stays where it is, like some others, and which take what those hold."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        with torch.no_grad(), quietly():
            self.shapes = [Extent.of(each) for each in like]
            self._sizes = [each.shape for each in like]
        self.tensors: list[Tensor] = []
        self._homes: dict[torch.dtype, list[Tensor]] = {}

    @staticmethod
    def alone(like: Sequence[Tensor], device: torch.device) -> Fixed:
        """In memory of its own."""
        return Arena(device).fixed(like)[0]

    def settle(self, places: Sequence[Tensor]) -> None:
        with torch.no_grad():
            homes = [each.at(place) for each, place in zip(self.shapes, places, strict=True)]
            self.tensors = [home.expand(size) for home, size in zip(homes, self._sizes, strict=True)]
        for home in homes:
            self._homes.setdefault(home.dtype, []).append(home)

    def take(self, given: Sequence[Tensor]) -> None:
        """In one launch for each dtype."""
        sources: dict[torch.dtype, list[Tensor]] = {dtype: [] for dtype in self._homes}
        with torch.no_grad(), quietly():
            for tensor, each in zip(given, self.shapes, strict=True):
                sources[each.dtype].append(tensor if each.part is None else tensor[each.part])
            for dtype, homes in self._homes.items():
                torch._foreach_copy_(homes, sources[dtype])


def fresh(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies of these, each in memory of its own, which goes when it is used."""
    found = [torch.empty(each.shape, dtype=each.dtype, device=each.device) for each in tensors]
    for dtype in {each.dtype for each in found}:
        pairs = [(into, of) for into, of in zip(found, tensors, strict=True) if of.dtype == dtype]
        torch._foreach_copy_([into for into, _ in pairs], [of for _, of in pairs])
    return found
