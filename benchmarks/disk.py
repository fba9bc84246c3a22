"""How near does an update with its state on the disk come to what the disk does?

    python -m benchmarks.disk [--folder FOLDER] [--layers 16] [--width 4096] [--steps 3] [--record]

A stack of linear layers on one row of input, bf16 with exact masters and AdamW: next to no computation, and 10 bytes of state a
parameter that are read and written each step. Rates as medians, the first three in turn; each counts both directions together:

updates    bytes of state a second, from the first read of a step to its last write, with checksums and the update in between
disk       as many bytes in requests of the same size to a file of the same folder, reads and writes at once and as many of each
           in flight as the engine has, and nothing else
memory     the same bytes, updated by the same kernel where they are: what the host does with no disk to wait for
paced      updates once more, with the same file held to a rate that leaves the cores with little to do: what of it is lost
           where reads, updates and writes wait for each other

No update is faster than the slower of disk and memory. And how long the checksums of a step's bytes take on one core, of the time
that its updates take, beside how long it takes to do no more than read them from memory: no checksum is faster than that.
"""

from __future__ import annotations

import argparse
import os
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from anyfit.kernels.adamw import Settings, State, adamw
from anyfit.kernels.bytes import crc32
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing import disk, place
from anyfit.placing.disk import BLOCK_BYTES, REQUESTS, DiskFile
from anyfit.placing.lanes import Ended, Label
from anyfit.placing.place import Placed
from anyfit.placing.tiers import HostSlabs
from anyfit.running.run import Run
from anyfit.values.disk_folder import DiskFolder
from anyfit.values.machine import update_threads
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written

ON_DISK = Placement(gradients="host", optimizer="disk", update="host")
STATE_BYTES = 10  # a parameter: a low half and two moments
CHUNK_BYTES = 16 * 2**20  # the first is read, and the last written, with nothing in the other direction
PACED_BYTES_PER_SECOND = 1e9
OUT_OF_CACHE = 64  # blocks


def started(layers: int, width: int, folder: Path) -> Run:
    def model() -> nn.Module:
        return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(layers)))

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).float().square().mean()

    job = anyfit.Job(
        model=model, loss=loss, optimizer=lambda model: torch.optim.AdamW(model.parameters()), sample=torch.randn(1, width),
        batch_size=1, precision="bf16",
    )  # fmt: skip
    plan = hand_written(job, ON_DISK, chunk_bytes=CHUNK_BYTES, host_bytes=2**44, disk_bytes=2**44)
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), disk=DiskFolder(folder)))


class Spans:
    """From when to when each lane of the disk was at work."""

    def __init__(self, placed: Placed) -> None:
        self.found: list[tuple[float, float]] = []
        for lane in (placed.lanes.from_disk, placed.lanes.to_disk):
            lane.tracks[0].mark = self._mark

    def _mark(self, _label: Label) -> Ended:
        began = time.perf_counter()
        return lambda _times: self.found.append((began, time.perf_counter()))

    def seconds(self) -> float:
        """Of the last step."""
        found, self.found = self.found, []
        return max(end for _, end in found) - min(start for start, _ in found)


def updates_seconds(run: Run, spans: Spans, width: int) -> float:
    run.step(torch.randn(1, width))
    run._engine.placed.settle()
    return spans.seconds()


class Paced:
    """Inside, reads and writes of state move no more than so many bytes a second together."""

    def __init__(self, bytes_per_second: float) -> None:
        self._rate, self._free, self._lock = bytes_per_second, 0.0, threading.Lock()

    def __enter__(self) -> None:
        disk._read_at, disk._write_at = self._paced(os.preadv), self._paced(os.pwritev)

    def __exit__(self, *_error: object) -> None:
        disk._read_at, disk._write_at = os.preadv, os.pwritev

    def _paced(self, call: Callable[..., int]) -> Callable[..., int]:
        def paced(file: int, views: Sequence[Any], at: int) -> int:
            moved = call(file, views, at)
            with self._lock:
                self._free = max(time.perf_counter(), self._free) + moved / self._rate
                until = self._free
            time.sleep(max(until - time.perf_counter(), 0.0))
            return moved

        return paced


class Alone:
    """A file of so many bytes, half of which are read while the other half is written."""

    def __init__(self, folder: Path, size: int) -> None:
        self._half = size // 2 // BLOCK_BYTES
        self._file = DiskFile(folder, BLOCK_BYTES, 2**44, HostSlabs(torch.device("cpu")))
        self._file.reserve(2 * self._half)
        self._buffers = [in_huge_pages(BLOCK_BYTES).random_() for _ in range(2 * REQUESTS)]
        self._requests(os.pwritev, 0)
        self._requests(os.pwritev, 1)

    def _requests(self, call: Callable[..., int], way: int) -> None:
        def keep_in_flight(lane: int) -> None:
            array: Any = self._buffers[way * REQUESTS + lane].numpy()
            for number in range(lane, self._half, REQUESTS):
                moved = call(self._file._file, [memoryview(array)], (way * self._half + number) * BLOCK_BYTES)
                assert moved == BLOCK_BYTES

        with ThreadPoolExecutor(REQUESTS) as pool:
            list(pool.map(keep_in_flight, range(REQUESTS)))

    def bytes_per_second(self) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(self._requests, (os.preadv, os.pwritev), (0, 1)))
        return 2 * self._half * BLOCK_BYTES / (time.perf_counter() - began)

    def close(self) -> None:
        self._file.close()


class InMemory:
    """One chunk's state, and the kernel that updates it."""

    def __init__(self, elements: int) -> None:
        low, moments = torch.zeros(elements, dtype=torch.int16), [torch.rand(elements) for _ in range(2)]
        self._state = State(torch.randn(elements).bfloat16(), low, *moments)
        self._gradient = torch.randn(elements).bfloat16()

    def bytes_per_second(self) -> float:
        settings = Settings(lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.01, decoupled=True, maximize=False)
        began = time.perf_counter()
        for step in range(4):
            adamw(self._state, self._gradient, settings, step + 1, threads=update_threads(torch.get_num_threads()))
        return 4 * 2 * STATE_BYTES * len(self._gradient) / (time.perf_counter() - began)


def of_one_core(work: Callable[[Tensor], object]) -> float:
    """Bytes a second, of blocks that are in no cache."""
    blocks = [in_huge_pages(BLOCK_BYTES).random_() for _ in range(OUT_OF_CACHE)]
    found = []
    for _ in range(5):
        began = time.perf_counter()
        for block in blocks:
            work(block)
        found.append(len(blocks) * BLOCK_BYTES / (time.perf_counter() - began))
    return statistics.median(found)


def read_by_one_core(block: Tensor) -> int:
    """The largest of its numbers: one pass, and as little as can be done with each."""
    array: Any = block.view(torch.int32).numpy()
    return int(array.max())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path)
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--width", type=int, default=4096)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    folder = DiskFolder(asked.folder).found()
    moved = 2 * STATE_BYTES * asked.layers * asked.width**2
    found: dict[str, list[float]] = {"updates": [], "disk": [], "memory": []}
    alone, in_memory = Alone(folder, moved), InMemory(2 * asked.width**2)
    with started(asked.layers, asked.width, folder) as run:
        spans = Spans(run._engine.placed)
        updates_seconds(run, spans, asked.width)  # the first has no moments to read
        for _ in range(asked.steps):
            found["updates"].append(moved / updates_seconds(run, spans, asked.width))
            found["disk"].append(alone.bytes_per_second())
            found["memory"].append(in_memory.bytes_per_second())
        with Paced(PACED_BYTES_PER_SECOND):
            paced = [moved / updates_seconds(run, spans, asked.width) for _ in range(asked.steps)]
    alone.close()
    rates = {name: statistics.median(each) for name, each in found.items()}
    checksums, reading = of_one_core(crc32), of_one_core(read_by_one_core)
    figures = {
        "moved_bytes": moved,
        "bytes_per_second": rates,
        "all_bytes_per_second": found,
        "share_of_disk": rates["updates"] / rates["disk"],
        "share_of_slower": rates["updates"] / min(rates["disk"], rates["memory"]),
        "paced_bytes_per_second": paced,
        "load_average": os.getloadavg()[0],  # over the cores, others are at work too
        "share_of_paced": statistics.median(paced) / PACED_BYTES_PER_SECOND,
        "checksum_bytes_per_second": checksums,
        "checksum_share": rates["updates"] / checksums,
        "reading_bytes_per_second": reading,
        "reading_share": rates["updates"] / reading,
        "parameters_per_second": rates["updates"] / (2 * STATE_BYTES),
    }
    print(f"{moved / 1e9:.1f} GB a step:", ", ".join(f"{name} {rate / 1e9:.2f} GB/s" for name, rate in rates.items()))
    print(f"{figures['share_of_disk']:.0%} of the disk, {figures['share_of_slower']:.0%} of the slower of disk and memory")
    print(f"{figures['share_of_paced']:.1%} of a disk that is held to {PACED_BYTES_PER_SECOND / 1e9:.1f} GB/s")
    print(f"checksums take {figures['checksum_share']:.0%} of a core, and to read the bytes {figures['reading_share']:.0%}")
    if asked.record:
        print(record.write("disk", figures))


if __name__ == "__main__":
    main()
