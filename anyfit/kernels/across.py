"""Small things to a GPU and back, by a kernel of the computation's own stream that reads or writes pinned host memory.

A copy would wait for its turn: a GPU's copy engine serves one stream until that has nothing left for it. After a step a run
uploads gigabytes of fresh weights, and the next batch would come behind all of them. A kernel does not wait for the engines.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda
WORDS = {1: (torch.uint8, "|u1"), 4: (torch.int32, "<i4"), 8: (torch.int64, "<i8")}  # by bytes: what a kernel moves


class Sender:
    """Brings tensors of the host to one device. Pinned memory is kept until the GPU has read it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._sent: deque[tuple[Any, Tensor]] = deque()  # with the event after which it has been read

    def __call__(self, tensor: Tensor) -> Tensor:
        is_plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.requires_grad
        if self._device.type != "cuda" or tensor.device.type != "cpu" or not is_plain or not tensor.numel():
            return tensor.to(self._device, non_blocking=True)
        while self._sent and self._sent[0][0].query():
            self._sent.popleft()
        pinned = tensor
        if not (tensor.is_pinned() and tensor.is_contiguous()):
            pinned = torch.empty_like(tensor, pin_memory=True).copy_(tensor)  # torch keeps such memory for the next
        there = seen(pinned, self._device)
        if there is None:
            return pinned.to(self._device, non_blocking=True)
        found = there.bitwise_or(0)
        event = _cuda.Event()
        event.record()
        self._sent.append((event, pinned))
        return found.view(tensor.dtype).as_strided(pinned.shape, pinned.stride())


def read(tensor: Tensor) -> Callable[[], Tensor]:
    """Begins to bring a tensor of a few numbers to the host; what it returns waits for it, and leaves its core to others."""
    found = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    place = seen(found, tensor.device)
    if place is None:
        found.copy_(tensor.detach(), non_blocking=True)
    else:
        torch.bitwise_or(tensor.detach().reshape(-1).view(place.dtype), 0, out=place)
    done = _cuda.Event(blocking=True)
    done.record()

    def there() -> Tensor:
        done.synchronize()
        return found

    return there


def seen(pinned: Tensor, device: torch.device) -> Tensor | None:
    """A dense pinned tensor as the GPU sees it: flat, in the largest words that fit. None where another GPU pinned it."""
    flat = pinned.as_strided((pinned.numel(),), (1,))
    words, code = WORDS[next(size for size in (8, 4, 1) if flat.nbytes % size == 0 and flat.data_ptr() % size == 0)]
    found = torch.as_tensor(_Seen(flat.view(words), code), device=device)
    return found if found.data_ptr() == flat.data_ptr() else None


class _Seen:
    """What torch makes a tensor of a GPU from without a copy, and keeps as long as that."""

    def __init__(self, flat: Tensor, code: str) -> None:
        self._flat = flat
        facts = {"version": 2, "shape": (flat.numel(),), "typestr": code, "data": (flat.data_ptr(), False)}
        self.__cuda_array_interface__ = facts
