"""From a job to its profile: traced, priced on a machine, and held to what its loss allows."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from .costing import cost
from .costing.times import call_weights
from .planning.enough import are_enough
from .probing import cache
from .probing.host import free_memory_bytes
from .tracing import AreEnough, trace_all
from .values.compiled import key_of
from .values.doing import doing, make_way
from .values.graph import Graph
from .values.job import Job
from .values.machine import Machine
from .values.profile import BlockCost, Profile

CALLS_SECONDS = 8.0  # for timing the ops of a model that is planned for this machine's GPU


def profile_of(job: Job, machine: Machine, rank_grid: tuple[int, int], *, for_plan: bool = False) -> Profile:
    """`rank_grid`: (ranks per node, nodes). `for_plan`: with the micro-batches alone that the best plan may have."""
    seconds = CALLS_SECONDS  # that are left for timing ops

    def made_of(graphs: Sequence[Graph]) -> Profile:
        nonlocal machine, seconds
        began = time.perf_counter()
        machine = with_calls(machine, graphs, seconds)
        seconds = max(seconds - (time.perf_counter() - began), 0.0)
        return profiled(job, graphs, machine, rank_grid, job.batch_size, 0.0)

    enough = (lambda graphs: are_enough(made_of(graphs))) if for_plan else None
    return made_of(traced(job, machine.device.kind, math.prod(rank_grid), enough))


def _with_figures(profile: Profile, graphs: Sequence[Graph], job: Job, machine: Machine) -> Profile:
    """With what was measured of its blocks compiled (`anyfit probe --job`), where the job lets the plan compile."""
    known = cache.compiled_of(machine)
    if job.compile is False or not known.blocks:
        return profile
    codes = {graph.micro_batch: {block.name: block.code for block in graph.blocks if not block.is_whole} for graph in graphs}
    versions = cache.compiler_versions()

    def figures(block: BlockCost, micro_batch: int) -> BlockCost:
        code = codes[micro_batch].get(block.name)
        return replace(block, figures=known.of(key_of(job, code, micro_batch, versions))) if code else block

    passes = (replace(each, blocks=tuple(figures(block, each.micro_batch) for block in each.blocks)) for each in profile.passes)
    return replace(profile, passes=tuple(passes))


def traced(job: Job, kind: Literal["cpu", "cuda"], ranks: int = 1, are_enough: AreEnough | None = None) -> list[Graph]:
    """The job's passes on a device of this kind, one for every micro-batch worth considering on one of so many ranks, the
    largest first, until they are enough."""
    if job.batch_size % ranks:
        nearest = -(-job.batch_size // ranks) * ranks
        raise ValueError(f"batch_size is {job.batch_size}; it must be a multiple of the {ranks} ranks, such as {nearest}")
    share = job.batch_size // ranks
    sizes = _micro_batches(job, share)
    with doing("tracing the model"):
        return _with_rests_that_run(trace_all(job, sizes, kind, free_memory_bytes(), are_enough), sizes, share)


def profiled(
    job: Job,
    graphs: Sequence[Graph],
    machine: Machine,
    rank_grid: tuple[int, int],
    batch_size: int,
    calls_seconds: float = CALLS_SECONDS,
) -> Profile:
    """What the job's passes cost on a machine, with what runs on it have shown, and without what the job does not allow.
    `calls_seconds`: for timing ops of it that nobody has timed."""
    made = cost(graphs, with_calls(machine, graphs, calls_seconds), batch_size, rank_grid)
    known, key = cache.corrections_of(machine), (made.model, made.parameters, made.precision)
    clipped = None if job.clip_norm is None else known.clipped_steps_of(*key, float(job.clip_norm))
    paced = made.corrected(known.of(made.model)).paced(known.pace_of(*key))
    found = _with_figures(replace(paced.ruled(paced.loss), clipped_steps=clipped), graphs, job, machine)
    return found.replayable() if job.replay and job.max_sample is None else found  # recordings are of one size


def with_calls(machine: Machine, graphs: Sequence[Graph], seconds: float = CALLS_SECONDS) -> Machine:
    """The machine with the seconds of the calls that the graphs make, where it is this one and has a GPU: measured once."""
    if seconds == 0.0:
        return machine

    @functools.cache
    def say_once() -> None:
        make_way()
        said = f"timing the ops of {graphs[0].model} on {machine.device.name}, once: at most {seconds:.0f} s"
        print(said, file=sys.stderr, flush=True)

    with doing("timing the model's ops"):
        return cache.with_calls(machine, call_weights(graphs, machine.device), seconds, lambda _op, _done: say_once())


def _micro_batches(job: Job, most: int) -> list[int]:
    """The sizes worth a trace: the one asked for, or the most there is and its halves down to one sample."""
    if job.micro_batch is not None:
        return [job.micro_batch]
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _with_rests_that_run(graphs: list[Graph], sizes: Sequence[int], share: int) -> list[Graph]:
    """Drops sizes whose last micro-batch would be too small for the model: nine samples in fours leave one for a batch norm."""
    made = [graph.micro_batch for graph in graphs]
    refused = max((size for size in sizes if size not in made and size < max(made)), default=0)
    return [graph for graph in graphs if not 0 < share % graph.micro_batch <= refused]
