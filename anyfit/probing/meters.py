"""What is measured again and again, and what its repeats say.

A `Meter` is one quantity; a `Ladder` is one quantity by size. All meters of a probe are read in rounds, each round reading every
meter once, so that the repeats of one meter lie seconds apart: what the neighbours on the machine do, and how its clocks drift,
then shows up in the error. The value is the median of the rounds; the measurement error is the widest distance of one from it.
Of a rate, rounds far under the fastest say what others left of the machine, not what it can do: they count in the error alone.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from anyfit.values.calibration import Figure
from anyfit.values.machine import Curve

from .cuda import kernel_seconds, paced_seconds

Report = Callable[[str, float], None]  # what is being measured, and the fraction done
Work = Callable[[], object]
Timer = Callable[[Work, int], float]  # seconds that one of so many runs takes
Load = Callable[[], AbstractContextManager[None]]  # what keeps the machine busy inside it
Size = TypeVar("Size")
Result = TypeVar("Result")

# A reading is its fastest quarter of bursts: what slows the others down is somebody else. Bursts are short, and broken off: when
# one thread has lost its core the others wait for it, and a small op is a thousand times slower.
BURST_SECONDS = 0.0015
LEAST_BURSTS = 4
LEAST_ROUNDS = 3  # fewer say nothing about the error
FAR_UNDER = 4  # times slower than the fastest round: two threads on one core, not clocks
LEAST_ERROR = 0.05  # what one process cannot see: memory layout and clocks differ from process to process


@dataclass(frozen=True)
class Effort:
    rounds: int
    stride: int  # every so manieth size of a ladder is looked at
    reading_seconds: float  # about how long one reading runs
    longest_seconds: float  # a size of which one run takes longer is left out: slow machines get shorter curves
    patience_seconds: float  # on a CPU; past this, rounds beyond the least number are left out
    update_parameters: int
    host_bytes: int  # of each buffer in the host memory measure
    copy_bytes: tuple[int, ...]
    disk_bytes: int  # of the measured file; 0 leaves the disk out
    link_bytes: int  # the large message on which a link's rate is measured

    @property
    def brief(self) -> Effort:
        """For what there are many meters of: an op of many, of which each alone weighs little."""
        return dataclasses.replace(self, reading_seconds=self.reading_seconds / 4)


QUICK = Effort(
    rounds=3,
    stride=2,
    reading_seconds=0.01,
    longest_seconds=0.03,
    patience_seconds=4.0,
    update_parameters=4 * 2**20,
    host_bytes=64 * 2**20,
    copy_bytes=(64 * 2**10, 1 * 2**20, 4 * 2**20, 64 * 2**20),
    disk_bytes=128 * 2**20,
    link_bytes=32 * 2**20,
)
FULL = Effort(
    rounds=5,
    stride=1,
    reading_seconds=0.04,
    longest_seconds=0.1,
    patience_seconds=17.0,
    update_parameters=16 * 2**20,
    host_bytes=256 * 2**20,
    copy_bytes=tuple(2**10 * size for size in (64, 256, 1024, 4096, 16384, 65536, 262144)),
    disk_bytes=256 * 2**20,
    link_bytes=128 * 2**20,
)


def host_seconds(work: Work, times: int) -> float:
    done, portion = 0, max(1, times // 8)  # a look at the clock after every run would slow down the smallest ops
    start = time.perf_counter()
    while done < times:
        for _ in range(portion):
            work()
        done += portion
        if time.perf_counter() - start > 10 * BURST_SECONDS:
            break
    return (time.perf_counter() - start) / done


def timer_of(device: torch.device) -> Timer:
    """How long the device itself works."""
    return kernel_seconds if device.type == "cuda" else host_seconds


def pace_timer_of(device: torch.device) -> Timer:
    """How long host and device take together."""
    return paced_seconds if device.type == "cuda" else host_seconds


def on_threads(count: int, read: Callable[[], Result]) -> Result:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        return read()
    finally:
        torch.set_num_threads(before)


def beside(load: Load, read: Callable[[], float]) -> float:
    with load():
        return read()


def together(*loads: Load) -> Load:
    @contextmanager
    def load() -> Iterator[None]:
        with ExitStack() as stack:
            for each in loads:
                stack.enter_context(each())
            yield

    return load


@dataclass
class Meter:
    label: str  # what a progress bar says
    read: Callable[[], float]
    readings: list[float] = field(default_factory=list)

    def figure(self) -> Figure:
        return figure(self.readings)


def figure(readings: Sequence[float], undisturbed: Sequence[float] = ()) -> Figure:
    middle = statistics.median(undisturbed or readings)
    error = max(abs(reading - middle) for reading in readings) / middle
    return Figure(middle, max(error, LEAST_ERROR), "measured")


@dataclass
class Ladder:
    """Meters by size, sizes ascending."""

    rungs: dict[float, Meter] = field(default_factory=dict)

    @property
    def meters(self) -> list[Meter]:
        return list(self.rungs.values())

    def curve(self, source: str = "measured") -> Curve:
        figures = {size: _rate(meter.readings) for size, meter in self.rungs.items()}
        points = tuple((float(size), value.value) for size, value in figures.items())
        # One error for the whole curve, so it is the worst point's.
        return Curve(points, max(value.measurement_error for value in figures.values()), source)


def _rate(readings: Sequence[float]) -> Figure:
    return figure(readings, [each for each in readings if each * FAR_UNDER >= max(readings)])


def rate_meter(label: str, work: Work, amount: float, timer: Timer, effort: Effort) -> tuple[Meter, float]:
    """A meter of `amount` a second, and the seconds that one run takes."""
    work()  # the first run loads kernels and touches memory
    once = timer(work, 1)
    if once < effort.longest_seconds:
        once = min(once, timer(work, 1), timer(work, 1))
    if once < BURST_SECONDS / 20:  # too short for one look at the clock to say
        once = min(timer(work, 20) for _ in range(3))
    burst_seconds = min(BURST_SECONDS, effort.reading_seconds / LEAST_BURSTS)
    times = max(1, int(burst_seconds / max(once, 1e-7)))

    def read() -> float:
        bursts: list[float] = []
        start = time.perf_counter()
        while len(bursts) < LEAST_BURSTS or time.perf_counter() - start < effort.reading_seconds:
            bursts.append(timer(work, times))
            if time.perf_counter() - start > 3 * effort.reading_seconds:
                break  # somebody else is at work too; what they leave us is what this round reads
        return amount / sorted(bursts)[len(bursts) // 4]

    return Meter(label, read), once


def climb(
    label: str, sizes: Sequence[Size], prepare: Callable[[Size], tuple[float, Work]], timer: Timer, effort: Effort, calls: int = 1
) -> Ladder:
    """Meters from the smallest size upwards, until one run takes too long or no longer fits.

    `prepare` gives the amount (FLOPs, bytes) of one call, which stands on the curve's axis, and the work: so many calls.
    """
    ladder = Ladder()
    best_rate = 0.0
    for size in sizes[:: effort.stride]:
        try:
            amount, work = prepare(size)
            if len(ladder.rungs) > 1 and calls * amount > 3 * effort.longest_seconds * best_rate:
                break  # no machine gets that much faster from size to size: not worth a try
            meter, once = rate_meter(label, work, calls * amount, timer, effort)
        except torch.OutOfMemoryError:
            if ladder.rungs:
                break
            raise
        if ladder.rungs and once > effort.longest_seconds:
            break
        ladder.rungs[amount] = meter
        best_rate = max(best_rate, calls * amount / once)
    return ladder


def read_in_rounds(meters: Sequence[Meter], effort: Effort, deadline: float, report: Report) -> None:
    """Reads every meter once a round. Past the deadline, by time.perf_counter, only the least number of rounds is done."""
    for round_index in range(effort.rounds):
        if round_index >= LEAST_ROUNDS and time.perf_counter() > deadline:
            break
        for index, meter in enumerate(meters):
            report(meter.label, (round_index * len(meters) + index) / (effort.rounds * len(meters)))
            meter.readings.append(meter.read())
