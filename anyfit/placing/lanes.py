"""Lanes: where copies and updates run beside the computation, in an order that tickets keep.

A lane does one job after another on a thread of its own. With a stream (on a GPU) the thread only issues the job, and the GPU
does it in its own time; without one the thread does the work itself. Either way a job starts after the tickets it was given,
and its own ticket says when it is done. The computation is not a lane: it is whatever the calling thread does, on its
current stream.

Tests give a `delay`, called before every job: an ordering that only held by luck then shows as wrong numbers.

Jobs have labels, whose first word says what kind they are. A timeline (timeline.py) sets `mark` while it records, and is then
told when each begins and ends.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor

_cuda: Any = torch.cuda  # whose streams and events have untyped constructors
Job = tuple[Callable[[], None], tuple["Ticket", ...], "Ticket"]
Mark = Callable[[str], Callable[[], None]]  # told of a label that it begins; gives what is to be called when it ends


class Ticket:
    """A job under way."""

    def __init__(self, label: str = "") -> None:
        self.label = label
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


class Over(Ticket):
    """A job that is done or has failed: for whoever only needs it out of the way."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket.label)
        self._ticket = ticket

    def reach(self) -> Any:
        try:
            return self._ticket.reach()
        except BaseException:  # whoever waits for the job itself gets it
            return None


class Lane:
    def __init__(self, name: str, stream: Any, delay: Callable[[], None] | None) -> None:
        self.name, self.stream, self._delay = name, stream, delay
        self.mark: Mark | None = None
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"anyfit {name}", daemon=True)
        self._thread.start()

    def run(self, work: Callable[[], None], after: Iterable[Ticket | None] = (), label: str = "") -> Ticket:
        """Queues a job, to start when all of `after` are done."""
        ticket = Ticket(label)
        self._jobs.put((work, tuple(each for each in after if each is not None), ticket))
        return ticket

    def uses(self, tensors: Iterable[Tensor]) -> None:
        """To be said inside a job of tensors that the computation made: their memory is not reused before the job is done."""
        if self.stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)

    def close(self) -> None:
        self._jobs.put(None)
        self._thread.join()

    def _work(self) -> None:
        if self.stream is not None:
            _cuda.set_device(self.stream.device)
        while (job := self._jobs.get()) is not None:
            work, after, ticket = job
            event, error = None, None
            try:
                events = [each.reach() for each in after]
                if self._delay is not None:
                    self._delay()
                event = self._do(work, [each for each in events if each is not None], ticket.label)
            except BaseException as raised:  # the thread lives on, and whoever waits for the ticket gets it
                error = raised
            del job, work, after  # whatever tensors they hold are let go before anybody is told
            ticket.resolve(event, error)
            del ticket, error

    @torch.no_grad()
    def _do(self, work: Callable[[], None], events: list[Any], label: str) -> Any:
        if self.stream is None:
            for event in events:
                event.synchronize()
            with _marked(self.mark, label):
                work()
            return None
        for event in events:
            self.stream.wait_event(event)
        with _cuda.stream(self.stream), _marked(self.mark, label):
            work()
        done = _cuda.Event()
        done.record(self.stream)
        return done


class Lanes:
    """The lanes of one run, and the computation's side of their order."""

    def __init__(self, device: torch.device, delay: Callable[[], None] | None = None) -> None:
        self._on_gpu = device.type == "cuda"
        self.device = device
        self.mark: Mark | None = None  # of the computation

        def stream() -> Any:
            return _cuda.Stream(device) if self._on_gpu else None

        self.up = Lane("uploads", stream(), delay)
        self.down = Lane("downloads", stream(), delay)
        # Streamed updates have uploads and downloads of their own: in one queue with those of weights and gradients, a state that
        # waits for its turn would keep back a weight that the computation waits for.
        self.states_up = Lane("state uploads", stream(), delay)
        self.update = Lane("updates", stream(), delay)
        self.states_down = Lane("state downloads", stream(), delay)
        self.host = Lane("host updates", None, delay)
        self.all = (self.up, self.down, self.states_up, self.update, self.states_down, self.host)

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
        with _marked(self.mark, f"wait for {ticket.label}"):
            event = ticket.reach()
            if event is not None:
                _cuda.current_stream().wait_event(event)

    def wait(self, ticket: Ticket | None) -> None:
        """The computation's thread waits until the job is done."""
        if ticket is not None:
            with _marked(self.mark, f"wait for {ticket.label}"):
                ticket.wait()

    def computing(self, label: str) -> AbstractContextManager[None]:
        """Around a part of the computation, for whoever records it."""
        return _marked(self.mark, label)

    def close(self) -> None:
        for lane in self.all:
            lane.close()


NOT_MARKED = nullcontext()


def _marked(mark: Mark | None, label: str) -> AbstractContextManager[None]:
    return NOT_MARKED if mark is None else _marking(mark, label)


@contextmanager
def _marking(mark: Mark, label: str) -> Iterator[None]:
    ended = mark(label)
    try:
        yield
    finally:
        ended()
