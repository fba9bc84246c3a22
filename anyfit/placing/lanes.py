"""Lanes: where copies and updates run beside the computation, in an order that tickets keep.

A lane does one job after another on a thread of its own. With a stream (on a GPU) the thread only issues the job, and the GPU
does it in its own time; without one the thread does the work itself. Either way a job starts after the tickets it was given,
and its own ticket says when it is done. The computation is not a lane: it is whatever the calling thread does, on its
current stream.

Tests give a `delay`, called before every job: an ordering that only held by luck then shows as wrong numbers.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # whose streams and events have untyped constructors
Job = tuple[Callable[[], None], tuple["Ticket", ...], "Ticket"]


class Ticket:
    """A job under way."""

    def __init__(self) -> None:
        self._reached = threading.Event()  # the lane has come to it: done, or issued to the GPU, or failed
        self._event: Any = None  # of the GPU
        self._error: BaseException | None = None

    def resolve(self, event: Any = None, error: BaseException | None = None) -> None:
        self._event, self._error = event, error
        self._reached.set()

    def reach(self) -> Any:
        """Waits until the lane has come to the job; the GPU's event where there is one. Raises what the job raised."""
        self._reached.wait()
        if self._error is not None:
            raise self._error
        return self._event

    def wait(self) -> None:
        """The host waits until the job is done."""
        event = self.reach()
        if event is not None:
            event.synchronize()

    @property
    def is_reached(self) -> bool:
        return self._reached.is_set()


class Lane:
    def __init__(self, name: str, stream: Any, delay: Callable[[], None] | None) -> None:
        self._stream, self._delay = stream, delay
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"anyfit {name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], after: Iterable[Ticket | None] = ()) -> Ticket:
        """Queues a job, to start when all of `after` are done."""
        ticket = Ticket()
        self._jobs.put((work, tuple(each for each in after if each is not None), ticket))
        return ticket

    def uses(self, tensors: Iterable[Tensor]) -> None:
        """To be said inside a job of tensors that the computation made: their memory is not reused before the job is done."""
        if self._stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self._stream)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self._stream is not None:
            _cuda.set_device(self._stream.device)
        while (job := self._jobs.get()) is not None:
            work, after, ticket = job
            event, error = None, None
            try:
                events = [each.reach() for each in after]
                if self._delay is not None:
                    self._delay()
                event = self._do(work, [each for each in events if each is not None])
            except BaseException as raised:  # the thread lives on, and whoever waits for the ticket gets it
                error = raised
            del job, work, after  # whatever tensors they hold are let go before anybody is told
            ticket.resolve(event, error)
            del ticket, error

    @torch.no_grad()
    def _do(self, work: Callable[[], None], events: list[Any]) -> Any:
        if self._stream is None:
            for event in events:
                event.synchronize()
            work()
            return None
        for event in events:
            self._stream.wait_event(event)
        with _cuda.stream(self._stream):
            work()
        done = _cuda.Event()
        done.record(self._stream)
        return done


class Lanes:
    """The lanes of one run, and the computation's side of their order."""

    def __init__(self, device: torch.device, delay: Callable[[], None] | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self.device = device

        def stream() -> Any:
            return _cuda.Stream(device) if self._on_gpu else None

        self.up = Lane("uploads", stream(), delay)
        self.down = Lane("downloads", stream(), delay)
        self.update = Lane("updates", stream(), delay)
        self.host = Lane("host updates", None, delay)

    def so_far(self) -> Ticket:
        """All that the computation has been given up to now."""
        ticket = Ticket()
        event = None
        if self._on_gpu:
            event = _cuda.Event()
            event.record()
        ticket.resolve(event)
        return ticket

    def hold_computation(self, ticket: Ticket | None) -> None:
        """What the computation is given from here on starts after the ticket."""
        if ticket is None:
            return
        event = ticket.reach()
        if event is not None:
            _cuda.current_stream().wait_event(event)

    def close(self) -> None:
        for lane in (self.up, self.down, self.update, self.host):
            lane.close()
