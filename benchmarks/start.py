"""How long does a start take, and what of it?

    python -m benchmarks.start llama-8b --batch 4 --seq 2048 --device-memory 24GiB --host-memory 100GiB [--record]
    python -m benchmarks.start llama-8b ... --folder FOLDER

A target of `anyfit plan`, started as a user does it, to the end of its first step: the seconds of each stage, as the line on a
terminal names them, and the most memory that the process had. From random weights, which are drawn once more afterwards as plain
PyTorch does it: a start cannot take less than that. Or from a folder of safetensors; one that is not there is written first, in
bf16, with numbers that repeat. The machine is probed before, and the model's ops are timed unless an earlier start has done it.

    gpt2-small --batch 1 --seq 64 --device-memory 1GiB    on a CPU, to see it run
"""

from __future__ import annotations

import argparse
import gc
import resource
import shutil
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

import anyfit
from anyfit.targets import job_for
from anyfit.values.doing import doing, heard_by
from anyfit.values.tensor_files import SINGLE, header_of
from anyfit.values.units import show_bytes

from . import record

BETWEEN = "between"  # stages
BLOCK_ELEMENTS = 2**25  # of a folder that is written


class Stopwatch:
    """Seconds by what was being done."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._doing, self._since = BETWEEN, time.perf_counter()

    def hear(self, what: str | None) -> None:
        now = time.perf_counter()
        self.seconds[self._doing] = self.seconds.get(self._doing, 0.0) + now - self._since
        self._doing, self._since = what or BETWEEN, now


def write_folder(job: anyfit.Job, folder: Path) -> None:
    """Weights of the job's shapes, under its names."""
    with torch.device("meta"):
        shapes = {name: tuple(each.shape) for name, each in job.build().named_parameters()}
    free = shutil.disk_usage(folder.parent).free
    needed = 2 * sum(torch.Size(shape).numel() for shape in shapes.values())
    if needed > free:
        raise OSError(f"{folder} would take {show_bytes(needed)}, and {show_bytes(free)} are free; name another disk")
    folder.mkdir()
    block: Any = (torch.randn(BLOCK_ELEMENTS) * 0.02).bfloat16().view(torch.int16).numpy()
    with (folder / SINGLE).open("wb") as file:
        file.write(header_of((name, "BF16", shape) for name, shape in shapes.items()))
        for shape in shapes.values():
            left = torch.Size(shape).numel()
            while left:
                file.write(block[:left].data)
                left -= min(left, BLOCK_ELEMENTS)


def measured(job: anyfit.Job, machine: anyfit.Machine) -> dict[str, Any]:
    """One start, and its first step."""
    watch, began = Stopwatch(), time.perf_counter()
    with heard_by(watch.hear):
        run = anyfit.start(job, machine=machine)
        with doing("first step"):
            run.step(job.sample)
            if machine.device.kind == "cuda":
                torch.cuda.synchronize()
    total = time.perf_counter() - began
    row = {
        "seconds": total,
        "stages": watch.seconds,
        "parameters": run.plan.parameters,
        "host_bytes": run.plan.forecast.peak_bytes["host"],
        "forecast_seconds": run.plan.forecast.start_seconds,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }
    run.close()
    return row


def drawn(job: anyfit.Job) -> float:
    """Seconds of the model's own weights, as plain PyTorch makes them."""
    gc.collect()
    torch.manual_seed(job.seed)
    began = time.perf_counter()
    model = job.build()
    seconds = time.perf_counter() - began
    del model
    return seconds


def show(row: dict[str, Any]) -> None:
    for name, seconds in row["stages"].items():
        print(f"{seconds:8.1f} s  {name}")
    size, resident = f"{row['parameters'] / 1e9:.2f} B parameters", show_bytes(row["most_resident_bytes"])
    print(f"{row['seconds']:8.1f} s  in all, {size}, {show_bytes(row['host_bytes'])} on the host, {resident} resident at most")
    print(f"{row['forecast_seconds']:8.1f} s  to place them, as forecast")
    if "draws_seconds" in row:
        more = row["seconds"] - row["draws_seconds"]
        print(f"{row['draws_seconds']:8.1f} s  the draws alone: the start took {more:.1f} s more")


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--device-memory")
    parser.add_argument("--host-memory")
    parser.add_argument("--folder", type=Path, help="of safetensors; written where it is not there")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(given)
    job = job_for(options.target, batch=options.batch, seq=options.seq)
    machine = anyfit.probe().with_limits(device_memory=options.device_memory, host_memory=options.host_memory)
    if options.folder is not None:
        if not options.folder.exists():
            write_folder(job, options.folder)
        job = replace(job, weights=options.folder)
    row = measured(job, machine)
    if options.folder is None:
        row["draws_seconds"] = drawn(job)
    show(row)
    if options.record:
        print(record.write("start", {"target": options.target, **row}, machine))
    return row


if __name__ == "__main__":
    main()
