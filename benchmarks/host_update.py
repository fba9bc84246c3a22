"""How many parameters a second does the host update, by threads: the C++ kernel, its twin, and torch's fused AdamW?

    python -m benchmarks.host_update [--elements N] [--threads 1 2] [--rounds 7] [--while-copying] [--record]

The kernel works on split masters with bf16 gradients, in place and into a second generation: 26 bytes of memory traffic a
parameter; and in place on masters or moments alone: 18 bytes. The twin does the same in several passes. torch's fused AdamW
works on fp32, which is all it takes: 28 bytes. All work on chunks of 32 Mi elements in huge pages, as the engine's do. Rounds
of all are interleaved; the figure is the median.

--while-copying measures each number of threads a second time, while pinned memory is copied to the GPU and from it without
pause, as it is in training: both share the host's memory. By default the elements are then more than a large cache holds.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from anyfit.kernels.adamw import Part, Settings, State, adamw, adamw_in_torch, is_native
from anyfit.kernels.pages import in_huge_pages, nodes, touch

from . import record

CHUNK_ELEMENTS = 32 * 2**20
# Of a parameter, each touched once.
TRAFFIC_BYTES = {
    "kernel in place": 26,
    "kernel out of place": 26,
    "masters alone": 18,
    "moments alone": 18,
    "torch fused fp32": 28,
}
COPIED_BUFFER_BYTES = 2**30  # more than caches hold: what is copied comes from memory
COPY_BYTES = 64 * 2**20
COPIES_AHEAD = 4
Call = Callable[[int], object]


# ---------------------------------------------------------------------- who updates


def updates(elements: int) -> dict[str, Call]:
    """By name, a call that does one update of all chunks on so many threads."""
    sizes = [min(CHUNK_ELEMENTS, elements - first) for first in range(0, elements, CHUNK_ELEMENTS)]
    settings = Settings(lr=1e-4, weight_decay=0.01)
    chunks = [(split_state(size), split_state(size), huge(size, torch.bfloat16).fill_(1e-3)) for size in sizes]
    fused = fused_fp32(sizes)

    def in_place(threads: int, part: Part = "all") -> None:
        for first, _, gradient in chunks:
            adamw(first, gradient, settings, 1, part=part, threads=threads)

    def out_of_place(threads: int) -> None:
        for first, second, gradient in chunks:
            adamw(first, gradient, settings, 1, out=second, threads=threads)

    def twin_in_place(threads: int) -> None:
        for first, _, gradient in chunks:
            adamw_in_torch(first, gradient, settings, 1)

    calls: dict[str, Call] = {"kernel in place": in_place, "kernel out of place": out_of_place}
    calls |= {"masters alone": partial(in_place, part="masters"), "moments alone": partial(in_place, part="moments")}
    calls["torch fused fp32"] = lambda threads: fused.step()
    if len(sizes) == 1:  # thirty times slower: not worth the wait on many
        calls["twin in place"] = twin_in_place
    return calls


def huge(elements: int, dtype: torch.dtype) -> Tensor:
    """Zeros, touched."""
    return touch(in_huge_pages(elements * dtype.itemsize), nodes()).zero_().view(dtype)


def split_state(elements: int) -> State:
    weights, low = huge(elements, torch.bfloat16).fill_(0.5), huge(elements, torch.int16)
    return State(weights, low, huge(elements, torch.float32), huge(elements, torch.float32))


def fused_fp32(sizes: list[int]) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(huge(size, torch.float32).fill_(0.5)) for size in sizes]
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    for parameter in parameters:
        parameter.grad = huge(parameter.numel(), torch.float32).fill_(1e-3)
        moments = {name: huge(parameter.numel(), torch.float32) for name in ("exp_avg", "exp_avg_sq")}
        optimizer.state[parameter] = {"step": torch.zeros(()), **moments}
    return optimizer


# ---------------------------------------------------------------------- what is copied meanwhile


class Copies:
    """Bytes copied so far, by direction; two threads copy while this is `running`."""

    def __init__(self) -> None:
        self.bytes = {"to the GPU": 0, "from the GPU": 0}
        self._stop = threading.Event()
        self._host = {name: torch.zeros(COPIED_BUFFER_BYTES, dtype=torch.uint8).pin_memory() for name in self.bytes}
        self._device = {name: torch.zeros(COPY_BYTES, dtype=torch.uint8, device="cuda") for name in self.bytes}

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        self._stop.clear()
        threads = [threading.Thread(target=self._copy, args=(name,)) for name in self.bytes]
        for thread in threads:
            thread.start()
        time.sleep(0.2)  # both are on their way
        try:
            yield
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()

    def _copy(self, name: str) -> None:
        on_device, under_way = self._device[name], deque[torch.cuda.Event]()
        stream = torch.cuda.Stream()
        for part in itertools.cycle(self._host[name].split(COPY_BYTES)):
            if self._stop.is_set():
                break
            with torch.cuda.stream(stream):
                to, source = (on_device, part) if name == "to the GPU" else (part, on_device)
                to.copy_(source, non_blocking=True)
                under_way.append(stream.record_event(torch.cuda.Event(blocking=True)))
            if len(under_way) == COPIES_AHEAD:
                under_way.popleft().synchronize()
                self.bytes[name] += COPY_BYTES
        stream.synchronize()


# ---------------------------------------------------------------------- how fast


def measured(calls: dict[str, Call], elements: int, threads: int, rounds: int, copies: Copies | None) -> dict[str, Any]:
    """A row: rates of all on so many threads, and of the copies during each."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    copied_bytes = copies.bytes if copies else {}
    copied = {name: dict.fromkeys(copied_bytes, 0) for name in calls}
    with copies.running() if copies else contextlib.nullcontext():
        for round_number in range(rounds + 1):
            for name, call in calls.items():
                before, begin = dict(copied_bytes), time.perf_counter()
                call(threads)
                if round_number:  # the first warms up
                    seconds[name].append(time.perf_counter() - begin)
                    for direction in before:
                        copied[name][direction] += copied_bytes[direction] - before[direction]
    rates = {name: elements / statistics.median(taken) for name, taken in seconds.items()}
    row: dict[str, Any] = {
        "threads": threads,
        "while_copying": copies is not None,
        "parameters_per_second": {name: round(rate) for name, rate in rates.items()},
        "bytes_per_second": {name: round(rates[name] * each) for name, each in TRAFFIC_BYTES.items() if name in rates},
    }
    if copies:
        row["copied_bytes_per_second"] = {
            name: {direction: round(total / sum(seconds[name])) for direction, total in totals.items()}
            for name, totals in copied.items()
        }
    return row


def show(row: dict[str, Any]) -> None:
    print(f"{row['threads']:3} threads{', while copying' if row['while_copying'] else ''}:")
    for name, rate in row["parameters_per_second"].items():
        traffic = row["bytes_per_second"].get(name)
        copied = row.get("copied_bytes_per_second", {}).get(name, {})
        words = [f"{rate / 1e9:6.2f} Gparam/s"]
        words += [f"{traffic / 1e9:.0f} GB/s of memory traffic"] if traffic else []
        words += [f"{each / 1e9:.1f} GB/s {direction}" for direction, each in copied.items()]
        print(f"    {name:20} {', '.join(words)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, help="default: 32 Mi; 256 Mi while copying")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--while-copying", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.while_copying and not torch.cuda.is_available():
        parser.error("--while-copying needs a GPU to copy to")

    elements = options.elements or (8 if options.while_copying else 1) * CHUNK_ELEMENTS
    print(f"{elements:,} elements; is_native: {is_native()}; torch uses {torch.backends.cpu.get_cpu_capability()}")
    calls = updates(elements)
    figures: dict[str, Any] = {"elements": elements, "is_native": is_native(), "rows": []}
    conditions: list[Copies | None] = [None]
    if options.while_copying:
        copies = Copies()
        conditions.append(copies)
        alone = measured({"nothing": lambda threads: time.sleep(0.5)}, 0, 1, 2, copies)
        figures["copied_bytes_per_second_alone"] = alone["copied_bytes_per_second"]["nothing"]
        print(f"copies alone: {figures['copied_bytes_per_second_alone']}")
    for threads in options.threads:
        torch.set_num_threads(threads)
        for meanwhile in conditions:
            row = measured(calls, elements, threads, options.rounds, meanwhile)
            show(row)
            figures["rows"].append(row)
    if options.record:
        print(record.write("host-update", figures))


if __name__ == "__main__":
    main()
