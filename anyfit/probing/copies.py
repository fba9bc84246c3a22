"""Copies between host and device by size: each direction alone, each with the other busy, and with the host's updates as well.

To read one direction while the other is busy, the other is given twice as many copies first: its queue then outlasts
ours. A batch comes from memory that is not pinned: the host copies it to some that is, from which a kernel reads it.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from anyfit.kernels.across import Sender
from anyfit.values.machine import Copies

from .cuda import new_event, new_stream, pinned, seconds_between
from .meters import Effort, Ladder, Load, Meter, beside

READING_BYTES = 128 * 2**20  # copied in one burst
BURSTS = 3
PAGEABLE_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Direction:
    """One way between host and device, on its own stream."""

    stream: torch.cuda.Stream
    source: torch.Tensor
    target: torch.Tensor

    def first(self, size: int) -> Direction:
        """The same way for the first `size` bytes, sliced once: slicing costs more than a small copy."""
        return Direction(self.stream, self.source[:size], self.target[:size])

    def copy(self, times: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(times):
                self.target.copy_(self.source, non_blocking=True)


@dataclass(frozen=True)
class CopyLadders:
    """By field of Copies."""

    ladders: Mapping[str, Ladder]  # of copies from and to pinned memory
    others: Mapping[str, Meter]

    @property
    def meters(self) -> list[Meter]:
        return [*(meter for ladder in self.ladders.values() for meter in ladder.meters), *self.others.values()]

    def copies(self) -> Copies:
        found: dict[str, Any] = {name: ladder.curve() for name, ladder in self.ladders.items()}
        return Copies(**found | {name: meter.figure() for name, meter in self.others.items()})


@contextlib.contextmanager
def copy_ladders(device: torch.device, effort: Effort, updating: Load) -> Iterator[CopyLadders]:
    """Bytes/s by bytes of one copy. The buffers live as long as the context; `updating` keeps the host busy."""
    with directions(device, max(effort.copy_bytes)) as (up, down):

        def ladder(label: str, ours: Direction, other: Direction | None) -> Ladder:
            return Ladder({float(size): Meter(label, functools.partial(_rate, ours, other, size)) for size in effort.copy_bytes})

        def loaded(ours: Direction, other: Direction) -> Meter:
            read = functools.partial(_rate, ours, other, max(effort.copy_bytes))
            return Meter("copies beside updates", functools.partial(beside, updating, read))

        ladders = {
            "up": ladder("copies to the device", up, None),
            "down": ladder("copies from the device", down, None),
            "up_both": ladder("copies both ways", up, down),
            "down_both": ladder("copies both ways", down, up),
        }
        others = {"up_loaded": loaded(up, down), "down_loaded": loaded(down, up), "pageable": _pageable_meter(device)}
        yield CopyLadders(ladders, others)


@contextlib.contextmanager
def directions(device: torch.device, size: int) -> Iterator[tuple[Direction, Direction]]:
    """Up and down, each with buffers of its own."""
    with pinned(size) as sent, pinned(size) as received:
        on_device = [torch.ones(size, dtype=torch.uint8, device=device) for _ in range(2)]
        torch.cuda.synchronize(device)  # the fills run on another stream than the copies
        yield Direction(new_stream(device), sent, on_device[0]), Direction(new_stream(device), on_device[1], received)


def _pageable_meter(device: torch.device) -> Meter:
    source, send = torch.ones(PAGEABLE_BYTES // 4), Sender(device)
    send(source)  # the first time takes longest

    def seconds() -> float:
        torch.cuda.synchronize(device)
        began = time.perf_counter()
        send(source)
        torch.cuda.synchronize(device)
        return time.perf_counter() - began

    return Meter("copies of a batch", lambda: PAGEABLE_BYTES / statistics.median(seconds() for _ in range(BURSTS)))


def _rate(ours: Direction, other: Direction | None, size: int) -> float:
    ours = ours.first(size)
    ours.copy(1)  # wakes the link from its power-saving state
    times = max(2, min(256, READING_BYTES // size))
    return statistics.median(_burst_rate(ours, other and other.first(size), times) for _ in range(BURSTS))


def _burst_rate(ours: Direction, other: Direction | None, times: int) -> float:
    start, end = new_event(enable_timing=True), new_event(enable_timing=True)
    torch.cuda.synchronize()
    if other is not None:
        other.copy(2 * times)
    start.record(ours.stream)
    ours.copy(times)
    end.record(ours.stream)
    return ours.source.numel() * times / seconds_between(start, end)
