"""Real processes that train together over gloo, kept between tests: starting torch takes longer than most of them."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

ANSWER_SECONDS = 120.0
AFTER_SECONDS = 10.0  # for the others, once one has failed
HANG_SECONDS = 30.0  # a rank that waits longer for the others has lost them


class Pool:
    def __init__(self, count: int) -> None:
        self.count = count
        self._folder = tempfile.TemporaryDirectory(prefix="anyfit-ranks-")
        self._ends: list[Connection] = []
        context = get_context("spawn")
        self._processes = []
        for rank in range(count):
            mine, theirs = context.Pipe()
            arguments = (theirs, rank, count, str(Path(self._folder.name) / "store"))
            process = context.Process(target=serve, args=arguments, daemon=True)
            process.start()
            theirs.close()
            self._ends.append(mine)
            self._processes.append(process)

    def run(self, work: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """What each rank gives for the same call. An error of a rank is raised here, and the pool is not to be used again."""
        for end in self._ends:
            end.send((work, args, kwargs))
        answers: dict[int, Any] = {}
        failed: list[str] = []
        while len(answers) < self.count:
            left = {id(end): rank for rank, end in enumerate(self._ends) if rank not in answers}
            there = wait([self._ends[rank] for rank in left.values()], AFTER_SECONDS if failed else ANSWER_SECONDS)
            if not there:
                break
            for end in there:
                rank = left[id(end)]
                is_fine, answers[rank] = end.recv()  # type: ignore[union-attr]
                failed += [] if is_fine else [f"rank {rank}:\n{answers[rank]}"]
        missing = sorted(set(range(self.count)) - set(answers))
        if failed or missing:
            self.close()
            failed += [f"rank {rank} of {self.count} gave no answer in time" for rank in missing]
            raise AssertionError("\n".join(failed))
        return [answers[rank] for rank in range(self.count)]

    @property
    def is_open(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()
        self._folder.cleanup()


def serve(end: Connection, rank: int, count: int, store: str) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=count)
    while True:
        try:
            work, args, kwargs = end.recv()
        except EOFError:
            return
        try:
            end.send((True, work(*args, **kwargs)))
        except BaseException:
            end.send((False, traceback.format_exc()))


_pools: dict[int, Pool] = {}


def pool_of(count: int) -> Pool:
    if count not in _pools or not _pools[count].is_open:
        _pools[count] = Pool(count)
    return _pools[count]


def close_all() -> None:
    while _pools:
        _pools.popitem()[1].close()
