"""Ranks that are threads, and a wire between them whose sends end only when their receives are posted."""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor


@dataclass
class Rendezvous:
    """The wires of some ranks that are threads. A send ends when the other end has taken it."""

    slots: dict[tuple[int, int], queue.Queue[tuple[Tensor, threading.Event]]] = field(default_factory=dict)
    broken: threading.Event = field(default_factory=threading.Event)

    def of(self, rank: int) -> End:
        return End(rank, self)

    def prepare(self, ranks: int) -> None:
        for source, to in itertools.product(range(ranks), repeat=2):
            self.slot(source, to)

    def slot(self, source: int, to: int) -> queue.Queue[tuple[Tensor, threading.Event]]:
        return self.slots.setdefault((source, to), queue.Queue())


@dataclass
class End:
    rank: int
    all: Rendezvous

    def send(self, tensor: Tensor, to: int) -> Callable[[], object]:
        taken = threading.Event()
        self.all.slot(self.rank, to).put((tensor, taken))

        def wait() -> None:
            assert taken.wait(20), f"nobody takes what {self.rank} sends to {to}"

        return wait

    def receive(self, into: Tensor, source: int) -> None:
        while True:
            try:
                tensor, taken = self.all.slot(source, self.rank).get(timeout=0.05)
            except queue.Empty:
                if self.all.broken.is_set():
                    raise RuntimeError("Connection closed by peer") from None
                continue
            assert (tensor.shape, tensor.dtype) == (into.shape, into.dtype)
            into.copy_(tensor)
            taken.set()
            return


def in_threads(work: list[Callable[[], None]]) -> list[BaseException]:
    errors: list[BaseException] = []

    def run(each: Callable[[], None]) -> None:
        try:
            each()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(each,)) for each in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert not any(thread.is_alive() for thread in threads)
    return errors
