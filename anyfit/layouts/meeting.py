"""Ranks as threads of one process, which meet at every exchange: so the checker runs forms that exchange something."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

Result = TypeVar("Result")


@dataclass(frozen=True)
class Seat:
    """One rank at the meeting."""

    n: int
    rank: int
    barrier: threading.Barrier
    brought: list[Any]

    def counted(self, own: int) -> tuple[int, int]:
        return own * self.rank, own * self.n

    def stacked(self, x: Tensor) -> Tensor:
        self.brought[self.rank] = x
        self.barrier.wait()
        found = torch.stack(list(self.brought))
        self.barrier.wait()  # before anyone brings the next one
        return found

    def all_reduce(self, x: Tensor) -> Tensor:
        return self.stacked(x).sum(0)


def met(n: int, run: Callable[[Seat], Result]) -> list[Result]:
    """What each rank returns. Where one fails, those that wait for it fail too, and its error is raised.

    >>> met(3, lambda seat: int(seat.all_reduce(torch.tensor(seat.rank))))
    [3, 3, 3]
    """
    barrier, brought = threading.Barrier(n), [None] * n
    errors: list[Exception] = []

    def attend(rank: int) -> Result:
        try:
            with torch.no_grad():
                return run(Seat(n, rank, barrier, brought))
        except Exception as error:
            if not isinstance(error, threading.BrokenBarrierError):
                errors.append(error)
            barrier.abort()
            raise

    with ThreadPoolExecutor(n) as pool:
        results: Sequence[Any] = [pool.submit(attend, rank) for rank in range(n)]
    if errors:
        raise errors[0]
    return [each.result() for each in results]
