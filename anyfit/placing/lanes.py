"""Lanes: where copies and updates run beside the computation, in an order that tickets keep.

A lane does one job after another on a thread of its own. With a stream (on a GPU) the thread only issues the job; without one
it does the work itself, or begins it on the threads of a kernel. A copy that waits for nothing but the GPU is issued by whoever
asks for it: threads that take turns at Python's lock slow down the one that launches the model's ops. Either way a job starts
after the tickets it was given, and its own ticket says when it is done. The computation is not a lane: it is whatever the calling
thread does, on its current stream.

The jobs of a lane of several tracks have as many parts, each on a stream of its own: the first part of one job then runs beside
the second of the job before. Tests give a `delay`, called before every job: an order that only held by luck gives wrong numbers.

Jobs have labels, which timelines sort by and a waiting rank tells. A timeline (timeline.py) sets `mark` while it records, and is
then told when each job begins and ends.
"""

from __future__ import annotations

import math
import queue
import sys
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from anyfit.kernels.across import Sender, read
from anyfit.kernels.adamw import Begun
from anyfit.values.engine import STREAMED_DEPTH

from .labels import Label as Label
from .labels import Task as Task

_cuda: Any = torch.cuda  # whose streams and events have untyped constructors
SWITCH_SECONDS = 1e-4
TOGETHER = ("gathering", "reducing", "all-gathering")
HOST_DEPTH = 2  # one is updated; the next is there when the first of the threads is done with it
UNNAMED = Label()
MOST_AT_ONCE = 192 * 2**20  # bytes of a copy that yields
Work = Callable[[], Begun | None]  # what it returns is under way on the host when the thread goes on
Part = tuple[Work, Label]
Ended = Callable[[tuple[float, float] | None], None]  # with the host's times of it, where the clock is not to be asked
Mark = Callable[[Label], Ended]  # told of a label that it begins; gives what is to be called when it ends


class Ticket:
    """A job under way."""

    def __init__(self, label: Label = UNNAMED) -> None:
        self.label = label
        self._reached = threading.Event()  # the lane has come to it: done, or issued to the GPU, or failed
        self._event: Any = None  # of the GPU
        self._error: BaseException | None = None
        self.is_dropped = False

    def drop(self) -> None:
        """Nobody wants the job any more: where it has not begun, it is not done, and counts as over."""
        self.is_dropped = True

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
    def is_over(self) -> bool:
        """Done, or failed."""
        return self._reached.is_set() and (self._event is None or bool(self._event.query()))

    @property
    def is_issued(self) -> bool:
        """What is left of it is the GPU's."""
        if not self._reached.is_set() or self._error is not None:
            return False
        return not isinstance(self._event, Begun) or self._event.query()


class Wanted(Ticket):
    """A job that is done also when nobody wants it any more: it has something to give back, and asks for `is_dropped` itself."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__(ticket.label)
        self._ticket = ticket

    @property
    def is_over(self) -> bool:
        return self._ticket.is_over

    @property
    def is_issued(self) -> bool:
        return self._ticket.is_issued

    def reach(self) -> Any:
        return self._ticket.reach()


class Over(Wanted):
    """A job that is done or has failed: for whoever only needs it out of the way."""

    def reach(self) -> Any:
        try:
            return self._ticket.reach()
        except BaseException:  # whoever waits for the job itself gets it
            return None


@dataclass(frozen=True, eq=False)
class Job:
    parts: Sequence[Part]
    after: tuple[Ticket, ...]
    ticket: Ticket
    order: float

    @property
    def is_ready(self) -> bool:
        return self.ticket.is_dropped or all(ticket.is_over for ticket in self.after)


class Track:
    """Where one part of a lane's jobs is done: a stream, or the lane's thread itself."""

    def __init__(self, name: str, stream: Any) -> None:
        self.name, self.stream = name, stream
        self.mark: Mark | None = None
        self._yielded: Any = None  # event of the last copy that yields

    def uses(self, tensors: Iterable[Tensor]) -> None:
        """To be said inside a job of tensors that the computation made: their memory is not reused before the job is done."""
        if self.stream is not None:
            for tensor in tensors:
                if tensor.is_cuda:
                    tensor.record_stream(self.stream)

    def copy(self, copies: Sequence[tuple[Tensor, Tensor]], *, yields: bool = False) -> None:
        """To be called inside a job: copies each source to its target. A GPU's copy engine serves one stream until that has
        nothing left, however long others have waited. So copies that are in no hurry yield: each is issued when the one before
        is done. The last of a job is waited for by the next job's first: meanwhile the thread issues what comes after it."""
        if self.stream is None or not yields:
            if copies:  # in one call: Python's lock is asked for once, and not by each of them
                torch._foreach_copy_([target for target, _ in copies], [source for _, source in copies], non_blocking=True)
            return
        for target, source in copies:
            most = MOST_AT_ONCE // target.element_size()
            for part, of in zip(target.split(most), source.split(most), strict=True):
                if self._yielded is None:
                    self._yielded = _cuda.Event(blocking=True)
                else:
                    self._yielded.synchronize()
                part.copy_(of, non_blocking=True)
                self._yielded.record(self.stream)

    def do(self, work: Work, label: Label, events: Iterable[Any]) -> list[Any]:
        """Starts a part after these events; the event of its end, where the GPU or threads of the host's kernels do it."""
        if self.stream is None:
            for event in events:
                event.synchronize()
            return self._on_host(work, label)
        for event in events:
            _hold(self.stream, event)
        with _cuda.stream(self.stream), NOT_MARKED if self.mark is None else _marking(self.mark, label):
            work()
        done = _cuda.Event(blocking=True)  # whoever waits on the host leaves its core to others
        done.record(self.stream)
        return [done]

    def _on_host(self, work: Work, label: Label) -> list[Begun]:
        ended = (lambda _times: None) if self.mark is None else self.mark(label)
        begun = None
        try:
            begun = work()
        finally:
            if begun is None:
                ended(None)
        if begun is None:
            return []
        begun.then(ended)
        return [begun]


def _hold(stream: Any, event: Any) -> None:
    """What the stream is given from here on starts after the event; for one of the host this thread waits."""
    if isinstance(event, Begun):
        event.synchronize()
    else:
        stream.wait_event(event)


class Lane:
    """Jobs are done in the order they were given. With a `depth` they are done by urgency: fewer than so many are under way when
    the next is chosen, the most urgent of those that could start at once. Jobs of a `direct` lane only issue work to the GPU."""

    def __init__(self, delay: Callable[[], None] | None, *tracks: Track, depth: int | None = None, direct: bool = False) -> None:
        self.tracks, self._delay, self._depth = tracks, delay, depth
        self._is_direct = direct and delay is None and tracks[0].stream is not None
        self._lock = threading.Lock()
        self._open = 0  # jobs that the thread has been given and has not come to the end of
        self._held: tuple[int, list[Job]] | None = None  # those that a thread gives it later, all at once
        self._under_way: deque[Any] = deque()  # events
        self._given: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._waiting: list[Job | None] = []  # given, and looked at
        self._thread = threading.Thread(target=self._work, name=f"anyfit {tracks[0].name}", daemon=True)
        self._thread.start()

    def run(self, work: Work, after: Iterable[Ticket | None] = (), label: Label = UNNAMED, order: float = 0) -> Ticket:
        """Queues a job, to start when all of `after` are done. The least `order` is the most urgent."""
        return self.run_parts([(work, label)], after, order)

    def run_parts(self, parts: Sequence[Part], after: Iterable[Ticket | None] = (), order: float = 0) -> Ticket:
        """The same, with a part for each track."""
        ticket = Ticket(parts[-1][1])
        job = Job(parts, tuple(each for each in after if each is not None), ticket, order)
        may_issue = self._is_direct and all(each.is_issued for each in job.after) and _is_unobserved()
        with self._lock:
            if not (may_issue and self._open == 0):
                self._open += 1
                self._give(job)
                return ticket
            with torch._C.DisableTorchFunction(), torch.no_grad():
                self._do(job)
        return ticket

    def _give(self, job: Job) -> None:
        if self._held is not None and self._held[0] == threading.get_ident():
            self._held[1].append(job)
        else:
            self._given.put(job)

    @contextmanager
    def holding(self) -> Iterator[None]:
        """Inside, nobody waits for a job of this lane; its thread gets those of the caller at the end, all at once. A thread that
        is woken for each of many would take Python's lock from the one that has more to give."""
        self._held = threading.get_ident(), []
        try:
            yield
        finally:
            with self._lock:
                (_, jobs), self._held = self._held, None
                for job in jobs:
                    self._given.put(job)

    def uses(self, tensors: Iterable[Tensor]) -> None:
        self.tracks[0].uses(tensors)

    def drain(self) -> None:
        """Waits until all that it was given is done."""

        def finish() -> None:
            while self._under_way:
                self._under_way.popleft().synchronize()

        self.run(finish, order=math.inf).wait()

    def close(self) -> None:
        self._given.put(None)
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _work(self) -> None:
        stream = self.tracks[0].stream
        torch.set_grad_enabled(False)  # on this thread
        if stream is not None:
            _cuda.set_device(stream.device)
        while (job := self._next()) is not None:
            given, job = [job], None
            self._do(given.pop())
            with self._lock:
                self._open -= 1

    def _do(self, job: Job) -> None:
        ticket, events, error = job.ticket, [], None
        after, parts = ((), ()) if ticket.is_dropped else (job.after, job.parts)
        try:
            events = [event for event in (each.reach() for each in after) if event is not None]
            for track, (work, label) in zip(self.tracks, parts, strict=False):
                if self._delay is not None:
                    self._delay()
                events = track.do(work, label, events)
                del work
        except BaseException as raised:  # whoever waits for the ticket gets it
            error = raised
        del job, after, parts  # whatever tensors it holds are let go before anybody is told
        self._under_way.extend(events if self._depth is not None else ())
        ticket.resolve(events[0] if events and error is None else None, error)

    def _next(self) -> Job | None:
        if self._depth is None:
            return self._given.get()
        while len(self._under_way) >= self._depth:
            self._under_way.popleft().synchronize()
        while True:
            while not self._waiting or not self._given.empty():
                self._waiting.append(self._given.get())
            ready = [job for job in self._waiting if job is not None and job.is_ready]
            first = self._waiting[0]
            if ready or first is None:
                job = min(ready, key=lambda job: job.order, default=None)
                self._waiting.remove(job)
                return job
            for ticket in first.after:  # what was given first can start first
                Over(ticket).wait()


def _is_unobserved() -> bool:
    """Whether ops of this thread are seen by nobody else, and make tensors as on any other."""
    is_seen = torch._C._len_torch_dispatch_stack() or torch._C._functorch.peek_interpreter_stack() is not None
    return not is_seen and not torch.is_inference_mode_enabled()


class Lanes:
    """The lanes of one run, and the computation's side of their order."""

    def __init__(
        self, device: torch.device, delay: Callable[[], None] | None = None, *, several: bool = False, disk: bool = False
    ) -> None:
        self._on_gpu = device.type == "cuda"
        self.device = device
        self.send = Sender(device)  # what the computation reads of the host
        self._reading: Callable[[], Tensor] | None = None  # the last that the host reads of it
        self.mark: Mark | None = None  # of the computation

        def stream() -> Any:
            return _cuda.Stream(device) if self._on_gpu else None

        self.up = Lane(delay, Track("uploads", stream()), direct=True)
        self.down = Lane(delay, Track("downloads", stream()), direct=True)
        self.host = Lane(delay, Track("host updates", None), depth=HOST_DEPTH)
        # In one queue with these, what waits for its update would keep back a weight that the computation waits for.
        self.fresh = Lane(delay, Track("fresh weights", stream()), direct=True)
        tracks = (Track(name, stream()) for name in ("state uploads", "updates", "state downloads"))
        self.streamed = Lane(delay, *tracks, depth=STREAMED_DEPTH)
        self.all = [self.up, self.down, self.host, self.fresh, self.streamed]
        # What ranks do together, in the order that they are asked to and not behind anything else; nobody asks one that is alone.
        self.gather, self.reduce, self.all_gather = self.up, self.down, self.fresh
        if several:
            self.gather, self.reduce, self.all_gather = (Lane(delay, Track(name, stream())) for name in TOGETHER)
            self.all += [self.gather, self.reduce, self.all_gather]
        # The disk; nobody asks where no state lies there.
        self.from_disk, self.to_disk = self.host, self.host
        if disk:
            self.from_disk, self.to_disk = (Lane(delay, Track(name, None)) for name in ("disk reads", "disk writes"))
            self.all += [self.from_disk, self.to_disk]
        # A thread that wants Python's lock gets it after 5 ms if its holder does not rest: an age for a lane, and for backward.
        sys.setswitchinterval(min(sys.getswitchinterval(), SWITCH_SECONDS))
        # Threads that are still there when Python ends are torn out of whatever C++ they are in, which ends the process badly.
        self.close = weakref.finalize(self, _close, self.all)

    def so_far(self) -> Ticket:
        """All that the computation has been given up to now."""
        ticket = Ticket()
        event = _cuda.Event() if self._on_gpu else None
        if event is not None:
            event.record()
        ticket.resolve(event)
        return ticket

    def hold_computation(self, ticket: Ticket | None) -> None:
        """What the computation is given from here on starts after the ticket."""
        if ticket is None:
            return
        with self._waiting_for(ticket):
            event = ticket.reach()
            if event is not None:
                _hold(_cuda.current_stream() if self._on_gpu else None, event)

    def wait(self, ticket: Ticket | None) -> None:
        """The computation's thread waits until the job is done."""
        if ticket is not None:
            with self._waiting_for(ticket):
                ticket.wait()

    def reading(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Begins to bring what the computation made to the host; what it returns waits for it. A copy would wait for gradients
        and states that go down; and one to memory that is not pinned would keep all threads from the driver until then."""
        self._reading = read(tensor) if tensor.is_cuda else lambda: tensor  # kept, should nobody wait: the GPU will write to it
        return self._reading

    def computing(self, task: Task, chunk: int | None = None) -> AbstractContextManager[None]:
        """Around a part of the computation, for whoever records it."""
        return NOT_MARKED if self.mark is None else _marking(self.mark, Label(task, chunk))

    def _waiting_for(self, ticket: Ticket) -> AbstractContextManager[None]:
        return NOT_MARKED if self.mark is None else _marking(self.mark, ticket.label.awaited)

    @property
    def tracks(self) -> list[Track]:
        return [track for lane in self.all for track in lane.tracks]


def _close(lanes: Sequence[Lane]) -> None:
    for lane in lanes:
        lane.close()


NOT_MARKED = nullcontext()


@contextmanager
def _marking(mark: Mark, label: Label) -> Iterator[None]:
    ended = mark(label)
    try:
        yield
    finally:
        ended(None)
