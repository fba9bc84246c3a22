"""Links between the devices of one node: for each collective and group size, seconds = latency + bytes / rate.

Each rank is a process of its own (NCCL wants one for each GPU), started as a program rather than forked, so that
neither a CUDA context nor a script without `if __name__ == "__main__"` stands in the way. The ranks meet through a
file; rank 0 writes what it timed.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Literal

from anyfit.values.machine import Collective

from .meters import Effort, figure

TIMEOUT_SECONDS = 120.0
WORKER = "anyfit.probing.link_worker"


class LinksFailed(RuntimeError):  # noqa: N818 -- says what happened, as NoPlan does
    """The ranks could not talk to each other."""


def measure_links(backend: Literal["nccl", "gloo"], ranks: int, effort: Effort) -> tuple[Collective, ...]:
    """All collectives for groups of 2, 4, … and all ranks. Raises LinksFailed."""
    with tempfile.TemporaryDirectory(prefix="anyfit-links-") as folder:
        _run_ranks(Path(folder), backend, ranks, effort)
        try:
            rows: list[dict[str, Any]] = json.loads((Path(folder) / "result.json").read_text())
        except (OSError, ValueError) as error:
            raise LinksFailed(f"rank 0 left no result ({error})") from None
    return tuple(
        Collective(row["name"], "node", row["group"], figure(row["latency_seconds"]), figure(row["bytes_per_second"]))
        for row in rows
    )


def _run_ranks(folder: Path, backend: str, ranks: int, effort: Effort) -> None:
    package_root = str(Path(__file__).parents[2])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([package_root, os.environ.get("PYTHONPATH", "")])}
    size, rounds = effort.link_bytes, effort.rounds
    shared = {"folder": str(folder), "backend": backend, "ranks": ranks, "rounds": rounds, "large_bytes": size}
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            command, quiet = [sys.executable, "-m", WORKER, json.dumps({**shared, "rank": rank})], subprocess.DEVNULL
            with (folder / f"rank-{rank}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, stdin=quiet, stdout=log, stderr=log, env=environment))
        _await(processes, folder)
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
            process.wait()


def _await(processes: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Until all have ended well, or one has not: the others would then wait for it."""
    deadline = time.monotonic() + TIMEOUT_SECONDS
    while True:
        statuses = [process.poll() for process in processes]
        for rank, status in enumerate(statuses):
            if status:
                tail = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-3:]
                raise LinksFailed(f"rank {rank} ended with status {status}: {' / '.join(tail) or 'no output'}")
        if None not in statuses:
            return
        if time.monotonic() > deadline:
            raise LinksFailed(f"no end after {TIMEOUT_SECONDS:.0f} s")
        time.sleep(0.05)
