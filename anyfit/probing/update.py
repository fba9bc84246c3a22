"""How many parameters a second the CPU updates, by threads: alone, and while the rest of a training step keeps memory busy.

The update is the engine's own (kernels/adamw.py) of bf16 weights into a second generation, 26 bytes of memory traffic a
parameter, chunk after chunk so that no cache holds them, the next begun before the last is over. In an offloaded step it runs
beside copies in both directions and matmuls, which share the memory bus with it; on a machine without a GPU a thread that copies
memory stands in for them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy
import torch
from torch.nn import functional

from anyfit.kernels.adamw import Begun, Settings, State, adamw
from anyfit.kernels.pages import in_huge_pages, nodes, touch
from anyfit.values.machine import update_threads

from .copies import directions
from .cuda import new_event, new_stream
from .meters import Effort, Ladder, Load, Meter, beside, on_threads

LOAD_COPY_BYTES = 32 * 2**20
LOAD_EDGE = 4096
CHUNKS = 4
LEAST_UPDATES = 4
PARAMETERS_A_CORE = 2**20


def update_ladders(cores: int, effort: Effort, load: Load) -> tuple[Ladder, Ladder]:
    """Parameters/s by threads: alone, and under the load."""
    parameters = _parameters(cores, effort)
    step = _adamw(parameters)
    alone, loaded = Ladder(), Ladder()
    for threads in thread_counts(cores):
        read = functools.partial(_per_second, step, parameters, effort)
        on_so_many = functools.partial(on_threads, threads, read)
        alone.rungs[threads] = Meter("CPU update", on_so_many)
        loaded.rungs[threads] = Meter("CPU update under load", functools.partial(beside, load, on_so_many))
    return alone, loaded


def _per_second(step: Callable[[], object], parameters: int, effort: Effort) -> float:
    """The mean of a reading, and not its best part: a step waits for all of its updates."""
    step()  # the one under way is on other threads
    count, began = 0, time.perf_counter()
    while count < LEAST_UPDATES or time.perf_counter() - began < effort.reading_seconds:
        step()
        count += 1
    return count * parameters / (time.perf_counter() - began)


def _parameters(cores: int, effort: Effort) -> int:
    """Of a chunk: enough that waking its threads does not count."""
    return max(effort.update_parameters, cores * PARAMETERS_A_CORE)


def updating(cores: int, effort: Effort) -> Load:
    """A load of updates, on as many threads as a run has for them."""
    step = _adamw(_parameters(cores, effort))
    return lambda: _repeating(lambda: on_threads(update_threads(cores), step))


def thread_counts(cores: int) -> list[int]:
    """1, 2, 4, … and all of them; three quarters of many, where memory is often saturated already."""
    counts = {2**power for power in range(cores.bit_length())} | {cores}
    if cores >= 8:
        counts.add(cores * 3 // 4)
    return sorted(counts)


@contextlib.contextmanager
def host_load() -> Iterator[None]:
    """A thread that copies memory. numpy, because its copies run on one thread and without Python's lock."""
    source, target = (numpy.ones(LOAD_COPY_BYTES, dtype=numpy.uint8) for _ in range(2))
    with _repeating(lambda: numpy.copyto(target, source)):
        yield


@dataclass(frozen=True)
class DeviceLoads:
    """What keeps a GPU's links busy: copies in both directions, and these with matmuls besides."""

    copies: Load
    all: Load


@contextlib.contextmanager
def device_loads(device: torch.device) -> Iterator[DeviceLoads]:
    """Their buffers live as long as this context."""
    generator = torch.Generator(device).manual_seed(0)
    inputs, weight = (torch.randn(LOAD_EDGE, LOAD_EDGE, device=device, generator=generator).to(torch.bfloat16) for _ in range(2))
    with directions(device, LOAD_COPY_BYTES) as (up, down):
        compute = new_stream(device)

        def copy() -> None:
            up.copy(4)
            down.copy(4)

        def copy_and_multiply() -> None:
            copy()
            with torch.no_grad(), torch.cuda.stream(compute):
                for _ in range(8):
                    functional.linear(inputs, weight)

        ways = (up.stream, down.stream)
        yield DeviceLoads(_queued(device, copy, *ways), _queued(device, copy_and_multiply, *ways, compute))


def _queued(device: torch.device, portion: Callable[[], None], *streams: torch.cuda.Stream) -> Load:
    """A load that queues one more portion, and waits for the portion before it: the streams never run dry."""
    # Who waits for a blocking event sleeps: a spinning one would take a core from what is measured.
    ends = [[new_event(blocking=True) for _ in streams] for _ in range(2)]

    def feed() -> None:
        ends.reverse()
        portion()
        for event, stream in zip(ends[0], streams, strict=True):
            event.record(stream)
        for event in ends[1]:
            event.synchronize()

    @contextlib.contextmanager
    def load() -> Iterator[None]:
        with _repeating(feed):
            yield
        torch.cuda.synchronize(device)  # what is still queued would disturb the next meter

    return load


@contextlib.contextmanager
def _repeating(portion: Callable[[], object]) -> Iterator[None]:
    """Runs `portion` again and again on a thread; what fails there fails here."""
    running, stop = threading.Event(), threading.Event()
    failures: list[BaseException] = []

    def repeat() -> None:
        try:
            portion()
            running.set()
            while not stop.is_set():
                portion()
        except BaseException as failure:
            failures.append(failure)
            running.set()

    thread = threading.Thread(target=repeat, name="anyfit-probe-load", daemon=True)
    thread.start()
    running.wait()
    try:
        yield
    finally:
        stop.set()
        thread.join()
    if failures:
        raise failures[0]


def _adamw(parameters: int) -> Callable[[], object]:
    """Updates the next of some chunks, on as many threads as torch has."""
    here = nodes()

    def generation() -> State:
        weights, low, m, v = (touch(in_huge_pages(size * parameters), here).zero_() for size in (2, 2, 4, 4))
        return State(weights.view(torch.bfloat16), low.view(torch.int16), m.view(torch.float32), v.view(torch.float32))

    def slopes() -> torch.Tensor:
        return touch(in_huge_pages(2 * parameters), here).view(torch.bfloat16).fill_(1e-3)

    chunks = itertools.cycle([(generation(), slopes(), generation()) for _ in range(CHUNKS)])
    settings = Settings(lr=1e-4, weight_decay=0.01)
    under_way: deque[Begun | None] = deque()

    def step() -> None:
        old, gradient, new = next(chunks)
        under_way.append(adamw(old, gradient, settings, 1, out=new, threads=torch.get_num_threads(), waits=False))
        last = under_way.popleft() if len(under_way) > 1 else None
        if last is not None:
            last.synchronize()

    return step
