"""What the ranks of a pool do with a folder of weights: all of it can be sent to them, and sent back."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
import transformers

import anyfit
from anyfit.values.loss_rule import LossRule
from anyfit.values.plan import Placement
from anyfit.values.weights import Weights
from tests.machines import small_machine
from tests.plans import hand_written, placed_of

from .work import part_of

ROWS, LENGTH = 4, 8


class PeakMemory:
    """The most memory that this process itself held, above what it held before. Pages of files do not count."""

    def __enter__(self) -> PeakMemory:
        gc.collect()
        ctypes.CDLL(None).malloc_trim(0)  # what was freed before is not to be used again unseen
        self._stop, self._before = threading.Event(), held_bytes()
        self.bytes = 0
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._stop.wait(0.002):
            self.bytes = max(self.bytes, held_bytes() - self._before)

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._watcher.join()
        self.bytes = max(self.bytes, held_bytes() - self._before)


def held_bytes() -> int:
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) for name in ("RssAnon", "RssShmem")) * 1024


def job_of(folder: Path, precision: Literal["bf16", "fp32"], **options: Any) -> anyfit.Job:
    transformers.logging.set_verbosity_error()
    return anyfit.Job.from_huggingface(
        folder,
        batch_size=ROWS,
        length=LENGTH,
        precision=precision,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        **options,
    )


def tokens(step: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (ROWS, LENGTH), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


def start_and_measure(small: Path, large: Path, placement: Placement, chunk_bytes: int) -> dict[str, int]:
    """Bytes that starting from the large folder took; the small one has loaded all code before."""
    for folder in (small, large):
        job = job_of(folder, "bf16")
        plan = hand_written(job, placement, chunk_bytes=chunk_bytes, ranks=2)
        plan = replace(plan, loss=LossRule("weighted", "", proved=True))  # nothing is left to try, by a forward
        with PeakMemory() as peak, anyfit.start(job, plan, small_machine()) as run:
            chunks = placed_of(run).state.chunks
            share = sum(each.weights.nbytes + each.low.nbytes for each in chunks)
            everything = sum(4 * slot.elements for each in chunks for slot in each.chunk.slots)
    return {"peak": peak.bytes, "share": share, "everything": everything}


def trained(
    folder: Path, placement: Placement, precision: Literal["bf16", "fp32"], steps: int, saved: Path, adapter: Any = None
) -> dict[str, Any]:
    job = job_of(folder, precision, adapter=adapter)
    plan = hand_written(job, placement, chunk_bytes=2**14, ranks=2)
    with anyfit.start(job, plan, small_machine()) as run:
        first = run.state_dict()
        vocabulary = run.model.config.vocab_size
        losses = [float(run.step(part_of(tokens(step, vocabulary), run.ranks.index, 2))) for step in range(steps)]
        run.save(saved)
        with run.weights(), torch.no_grad():
            run.model.eval()
            logits = run.model(input_ids=tokens(0, vocabulary)["input_ids"]).logits
        return {"first": first, "losses": losses, "last": run.state_dict(), "logits": logits}


def started_in_part(folder: Path, placement: Placement) -> dict[str, torch.Tensor]:
    job = job_of(folder, "fp32", weights=Weights(folder, only="model.layers.*"))
    job = replace(job, model=functools.partial(_drawn_by_rank, job))
    with anyfit.start(job, hand_written(job, placement, chunk_bytes=2**14, ranks=2), small_machine()) as run:
        return run.state_dict()


def _drawn_by_rank(job: anyfit.Job) -> torch.nn.Module:
    """Initialised otherwise on each rank, as by code that does not heed the seed."""
    torch.manual_seed(100 + dist.get_rank())
    return job.build()


def refusal_of_others(folders: list[Path]) -> str:
    job = job_of(folders[dist.get_rank()], "fp32")
    try:
        anyfit.start(job, hand_written(job, ranks=2), small_machine())
    except ValueError as error:
        return str(error)
    return "nothing"
