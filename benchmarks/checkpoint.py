"""What does saving cost a run that does not fit on its GPU?

    python -m benchmarks.checkpoint [--model 1b] [--cap-gib 12] [--repeats 3] [--folder FOLDER] [--record]

A GPT-2 of about a billion parameters, bf16 with exact masters and AdamW, as it is planned for a part of the GPU's memory, which
is also a hard cap. Two questions, each asked `--repeats` times; the file is written anew after every answer:

beside    The plan has host memory for one more copy of the state, which is made ready beside the first steps, as `anyfit fit
          --save-every` does; by how much that delays them is told as well. A save is begun, and steps go on until it is whole and
          a few longer. What that took more than as many steps take on average just before and after is the delay, in steps.
waiting   It has not, and training waits. Bytes a second of the save, next to what the disk does: as many bytes written to one
          file in blocks of 16 MiB and synced, through the page cache and past it, by one thread and by several, up to as many as
          a save has, of which the fastest counts; in turn with the saves, on the same disk.

    --model tiny --steps 3    on a CPU, to see it run: with all state on the host
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import os
import shutil
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch

import anyfit
from anyfit.kernels.pages import in_huge_pages
from anyfit.placing import place
from anyfit.running import saving as saves
from anyfit.running.files import BLOCK_BYTES, THREADS, padded
from anyfit.running.run import Run
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written
from .cases import gpt2
from .peers import CONTEXT_BYTES, GIB, LR, MODELS, NO_DROPOUT, VOCABULARY, WEIGHT_DECAY
from .profiler import quickly_built

CONFIGURATIONS = {
    "1b": gpt2(36, 1536, 24, vocab_size=VOCABULARY, n_positions=1024, **NO_DROPOUT),
    "tiny": MODELS["tiny"],
}
LENGTHS = {"1b": 1024, "tiny": 32}
CHUNK_BYTES = {"1b": 64 * 2**20, "tiny": 2**14}
ON_HOST = Placement(gradients="host", optimizer="host", update="host")
WARMUP = 3
STEPS_AFTER = 4  # that a save is watched for once it is whole
WAYS = {"through the page cache": (0, (1,)), "past it": (getattr(os, "O_DIRECT", 0), (1, THREADS))}  # and threads
Figures = dict[str, Any]


def start(model: str, batch: int, cap_bytes: float, host_bytes: int | None) -> Run:
    """The run, whose plan may use so much of the host's memory; None is all of it."""
    from transformers import AutoConfig

    configuration = CONFIGURATIONS[model]
    job = anyfit.Job.from_huggingface(
        AutoConfig.for_model("gpt2", **configuration),
        batch_size=batch,
        length=LENGTHS[model],
        precision="bf16",
        clip_norm=1.0,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY),
    )
    job = quickly_built(job)
    if torch.cuda.is_available():
        machine = anyfit.probe().with_limits(device_memory=int(cap_bytes), host_memory=host_bytes)
        return anyfit.start(job, machine=machine)
    blocks = {f"transformer.h.{index}": "recompute" for index in range(configuration["n_layer"])}
    plan = hand_written(job, ON_HOST, chunk_bytes=CHUNK_BYTES[model], activations=blocks, host_bytes=host_bytes or 2**44)  # type: ignore[arg-type]
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu")))


class Trained:
    """A run at work on one batch."""

    def __init__(self, run: Run, model: str) -> None:
        self.run = run
        ids = torch.randint(0, CONFIGURATIONS[model]["vocab_size"], (run.plan.batch_size, LENGTHS[model]))
        self.batch = {"input_ids": ids, "labels": ids}

    def step(self) -> None:
        float(self.run.step(self.batch))

    def seconds_of(self, steps: int) -> list[float]:
        found = []
        for _ in range(steps):
            began = time.perf_counter()
            self.step()
            found.append(time.perf_counter() - began)
        return found


def room(trained: Trained, steps: int) -> Figures:
    """Memory for saves beside the steps is made ready: by how much that delays them."""
    run, usual, count = trained.run, statistics.mean(trained.seconds_of(steps)), 0
    began = time.perf_counter()
    run.make_room_to_save()
    copies: Any = run.saves.copies
    while copies.is_touching:
        trained.step()
        count += 1
    seconds = time.perf_counter() - began
    return {"seconds": seconds, "steps_meanwhile": count, "step_seconds": usual, "delay_steps": seconds / usual - count}


def beside(trained: Trained, folder: Path, steps: int) -> Figures:
    """One save while training goes on: by how much it delays that, and how."""
    run, usually = trained.run, trained.seconds_of(steps)
    seconds, after = [], 0
    began = time.perf_counter()
    run.save(folder, wait=False)
    called = time.perf_counter() - began
    saving = run.saving
    assert saving is not None
    while after < STEPS_AFTER:
        at = time.perf_counter()
        trained.step()
        seconds.append(time.perf_counter() - at)
        after += saving.is_done
    whole = time.perf_counter() - began
    run.finish_saving()
    usual = statistics.mean(usually + trained.seconds_of(steps))  # a slow one now and then is usual too
    shutil.rmtree(folder)
    return {
        "is_beside": saving.is_beside,
        "step_seconds": usual,
        "call_seconds": called,
        "steps_meanwhile": len(seconds),
        "step_seconds_meanwhile": seconds,
        "saving_seconds": saving.seconds,
        "copied_seconds": saving.copied_seconds,
        "waited_seconds": 0.0 if saving.copies is None else saving.copies.waited_seconds,
        "delay_seconds": whole - len(seconds) * usual,
        "delay_steps": whole / usual - len(seconds),
    }


def waiting(trained: Trained, folder: Path) -> Figures:
    """One save while training waits, between two looks at the disk."""
    run = trained.run
    trained.step()
    run._engine.placed.residency.settle_all()  # the update under way is the step's, not the save's
    began = time.perf_counter()
    run.save(folder, wait=False)
    seconds = time.perf_counter() - began
    assert run.saving is not None
    size = sum(file.stat().st_size for file in folder.iterdir())
    is_beside = run.saving.is_beside
    shutil.rmtree(folder)
    disk = {}
    for name, (flags, counts) in WAYS.items():
        for threads in counts:
            with contextlib.suppress(OSError):  # of a file system that refuses to be written so
                disk[f"{name}, {threads}"] = disk_rate(folder.with_name("plain"), size, threads, flags)
    return {"is_beside": is_beside, "bytes": size, "bytes_per_second": size / seconds, "seconds": seconds, "disk": disk}


def disk_rate(file: Path, size: int, threads: int, flags: int) -> float:
    """Bytes a second of one file written in blocks, as long as it will be from the start, and synced."""
    block = in_huge_pages(BLOCK_BYTES).random_(0, 256).numpy().data

    def write(at: int) -> None:
        os.pwrite(handle, block[: padded(min(BLOCK_BYTES, size - at))], at)

    try:
        began = time.perf_counter()
        handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | flags)
        try:
            os.ftruncate(handle, padded(size))
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(write, range(0, size, BLOCK_BYTES)))
            os.fsync(handle)
        finally:
            os.close(handle)
        return size / (time.perf_counter() - began)
    finally:
        file.unlink(missing_ok=True)


def measure(
    model: str, batch: int, cap_bytes: float, steps: int, repeats: int, folder: Path, keep: Callable[[Figures], None]
) -> Figures:
    found: Figures = {"model": model, "batch": batch, "threads_beside": saves.WRITERS, "beside": [], "waiting": []}
    _all_beside(found, partial(start, model, batch, cap_bytes), steps, repeats, folder / "beside", keep)
    gc.collect()  # the first run is gone: the cap has room for one
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    _all_waiting(found, partial(start, model, batch, cap_bytes), repeats, folder / "waiting", keep)
    delayed, waited = found["beside"], found["waiting"]
    rate = statistics.median(each["bytes_per_second"] for each in waited)
    disk = max(statistics.median(each["disk"][way] for each in waited) for way in waited[0]["disk"])
    found |= {
        "most_delay_steps": max(each["delay_steps"] for each in delayed),
        "bytes_per_second": rate,
        "disk_bytes_per_second": disk,
        "share_of_disk": rate / disk,
        "holds": {
            "beside": all(each["is_beside"] and each["delay_steps"] <= 2 for each in delayed),
            "waiting": not any(each["is_beside"] for each in waited) and rate >= 0.8 * disk,
        },
    }
    keep(found)
    return found


def _all_beside(
    found: Figures, started: Callable[[int | None], Run], steps: int, repeats: int, folder: Path, keep: Callable[[Figures], None]
) -> None:
    with started(None) as run:
        trained = Trained(run, found["model"])
        placed: Any = run._engine.placed
        held = found["host_bytes"] = placed.host_bytes
        found["parameters"] = sum(each.numel() for each in run.model.parameters())
        found["updated_on"] = dict(Counter(each.route for each in run.plan.chunks))
        print(f"{found['model']}: {found['parameters'] / 1e9:.2f} B parameters, {held / GIB:.1f} GiB on the host", flush=True)
        trained.seconds_of(WARMUP)
        found["room"] = shown(room(trained, steps), line_room)
        for _ in range(repeats):
            found["beside"].append(shown(beside(trained, folder, steps), line_beside))
            found["copy_bytes"] = placed.host_bytes - held
            keep(found)


def _all_waiting(
    found: Figures, started: Callable[[int | None], Run], repeats: int, folder: Path, keep: Callable[[Figures], None]
) -> None:
    with started(found["host_bytes"] + found["copy_bytes"] // 2) as run:
        trained = Trained(run, found["model"])
        trained.seconds_of(WARMUP)
        for _ in range(repeats):
            found["waiting"].append(shown(waiting(trained, folder), line_waiting))
            keep(found)


def line_room(each: Figures) -> str:
    return (
        f"  room: made ready in {each['seconds']:.2f} s, which delayed {each['steps_meanwhile']} steps of "
        f"{each['step_seconds']:.3f} s by {each['delay_steps']:.2f}"
    )


def line_beside(each: Figures) -> str:
    return (
        f"  beside: delayed by {each['delay_steps']:.2f} of {each['steps_meanwhile']} steps of {each['step_seconds']:.3f} s; "
        f"the call took {each['call_seconds']:.3f} s, the copy {each['copied_seconds']:.2f} s, which updates have waited for "
        f"{each['waited_seconds']:.2f} s, the save {each['saving_seconds']:.2f} s"
    )


def line_waiting(each: Figures) -> str:
    disks = "; ".join(f"{way}: {rate / 1e9:.2f}" for way, rate in each["disk"].items())
    return (
        f"  waiting: {each['bytes'] / GIB:.2f} GiB in {each['seconds']:.2f} s, {each['bytes_per_second'] / 1e9:.2f} GB/s; "
        f"the disk by way and threads: {disks}"
    )


def shown(figures: Figures, line: Callable[[Figures], str]) -> Figures:
    """The same, after its line was printed."""
    print(line(figures), flush=True)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGURATIONS), default="1b")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--steps", type=int, default=10, help="before and after that make up the usual time of one")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--threads-beside", type=int, default=saves.WRITERS, help="that write beside the steps")
    parser.add_argument("--cap-gib", type=float, default=12)
    parser.add_argument("--folder", type=Path, help="on the disk that is meant; the current one")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    saves.WRITERS = options.threads_beside
    if torch.cuda.is_available():
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((options.cap_gib * GIB - CONTEXT_BYTES) / total)

    def keep(figures: Figures) -> None:
        if options.record:
            record.write("checkpoint", figures)

    with tempfile.TemporaryDirectory(dir=options.folder or Path.cwd(), prefix=".checkpoint-") as folder:
        cap = options.cap_gib * GIB
        figures = measure(options.model, options.batch, cap, options.steps, options.repeats, Path(folder), keep)
    print(f"  {figures['share_of_disk']:.0%} of the disk's rate; delayed by {figures['most_delay_steps']:.2f} steps at most")


if __name__ == "__main__":
    main()
