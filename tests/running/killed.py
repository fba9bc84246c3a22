"""Trains and saves, again and again, until it is killed: what tests of SIGKILL start. Says what has been saved."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from anyfit.demo import GPT
from anyfit.running import checkpoint
from tests.models import byte_batches
from tests.plans import AWAY, hand_written, started

from .test_checkpoint import ROWS, job_for

KEEP, KEEP_EVERY = 2, 5


def say(line: str) -> None:
    """All of it or nothing, from any thread."""
    os.write(1, f"{line}\n".encode())


def main(folder: Path, most: int) -> None:
    job = job_for(lambda: GPT(width=64, layers=4, heads=2, length=16), precision="bf16")
    (batch,) = byte_batches(1, ROWS)
    with started(job, hand_written(job, AWAY, chunk_bytes=2**18, slots=8)) as run:
        found, skipped = checkpoint.newest(folder)
        if found is not None:
            run.resume(found)
        say(f"resumed {run.steps} {skipped}")
        for _ in range(most):
            run.step(batch)
            path = folder / f"{run.steps:08d}"

            def saved(step: int = run.steps) -> None:
                say(f"saved {step}")
                checkpoint.remove_older(folder, KEEP, KEEP_EVERY)

            say(f"saving {run.steps}")
            run.saves.save(path, wait=run.steps % 2 == 0, then=saved)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
