"""From a job to its profile: traced, priced on a machine, and held to what its loss allows."""

from __future__ import annotations

import functools
import math
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

from . import pipelining
from .costing import cost
from .costing.times import call_weights
from .meshing import WITHOUT, Axes, Meshes
from .planning.enough import Enough
from .planning.meshes import MeshChoice
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
    """`rank_grid`: (ranks per node, nodes), all along the data axis. `for_plan`: with the micro-batches alone that the best plan
    may have."""
    return _Profiling(job, machine, Meshes(job, rank_grid, WITHOUT)).base(for_plan=for_plan)


def meshes_of(job: Job, machine: Machine, rank_grid: tuple[int, int], axes: Axes, *, for_plan: bool = True) -> list[MeshChoice]:
    """Every mesh of the ranks that is asked for, or worth a look, with its profile when the search wants it."""
    if axes.has_stages:
        return staged(job, machine, rank_grid, axes)
    return _Profiling(job, machine, Meshes(job, rank_grid, axes)).choices(for_plan=for_plan)


def staged(
    job: Job, machine: Machine, rank_grid: tuple[int, int], axes: Axes, name: str = "", *, divides_words: bool = False
) -> list[MeshChoice]:
    """Meshes with a pipeline axis as it is asked for. Our stages do not divide words over a tensor axis; others' do."""
    assert axes.pipeline is not None
    ranks, grid = math.prod(rank_grid), axes.stage_grid(rank_grid, job.batch_size)
    meshes = Meshes(job, grid, axes.in_stage(ranks), divides_words=divides_words)
    graphs = traced(job, machine.device.kind, meshes.data_ranks, parts=axes.pipeline)
    base = replace(profiled(job, graphs, machine, grid, job.batch_size), name=name)
    look = pipelining.Look(job, graphs[0])
    return [pipelining.staged(each, axes.pipeline, machine, rank_grid, look) for each in meshes.choices(graphs, base, machine)]


class _Profiling:
    """A job's traces, priced one after another; its ops are timed for a while, where they can be."""

    def __init__(self, job: Job, machine: Machine, meshes: Meshes) -> None:
        self._job, self._machine, self._meshes = job, machine, meshes
        self._seconds = CALLS_SECONDS  # that are left for timing ops
        self._enough = Enough(for_stages=meshes.may_have_stages)

    def base(self, *, for_plan: bool) -> Profile:
        found = self._made_of(self._traced(for_plan=for_plan))
        return found.ruled(found.loss)

    def choices(self, *, for_plan: bool) -> list[MeshChoice]:
        graphs = self._traced(for_plan=for_plan)
        if self._meshes.changed_by(graphs[0].loss):
            graphs = self._traced(for_plan=for_plan)
        meshes = self._meshes.choices(graphs, self._made_of(graphs), self._machine)
        return [replace(each, found=self._enough.fastest_of(each.make())) if each.is_plain else each for each in meshes]

    def _traced(self, *, for_plan: bool) -> list[Graph]:
        return traced(self._job, self._machine.device.kind, self._meshes.data_ranks, self._are_enough if for_plan else None)

    def _are_enough(self, graphs: Sequence[Graph]) -> bool:
        if not graphs[0].loss.may_be_cut:
            return True
        return self._enough(self._meshes.least(graphs, self._made_of(graphs), self._machine))

    def _made_of(self, graphs: Sequence[Graph]) -> Profile:
        began = time.perf_counter()
        self._machine = with_calls(self._machine, graphs, self._seconds)
        self._seconds = max(self._seconds - (time.perf_counter() - began), 0.0)
        return priced(self._job, graphs, self._machine, self._meshes.rank_grid, self._job.batch_size, 0.0)


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


def traced(
    job: Job, kind: Literal["cpu", "cuda"], ranks: int = 1, are_enough: AreEnough | None = None, parts: int = 1
) -> list[Graph]:
    """The job's passes on a device of this kind, one for every micro-batch worth considering on one of so many ranks, the
    largest first, until they are enough. `parts`: where a step has so many micro-batches or more, if it can."""
    if job.batch_size % ranks:
        nearest = -(-job.batch_size // ranks) * ranks
        raise ValueError(f"batch_size is {job.batch_size}; it must be a multiple of the {ranks} ranks, such as {nearest}")
    share = job.batch_size // ranks
    sizes = micro_batches(job, share)
    sizes = [each for each in sizes if each <= max(share // parts, sizes[-1])]
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
    found = priced(job, graphs, machine, rank_grid, batch_size, calls_seconds)
    return found.ruled(found.loss)


def priced(
    job: Job, graphs: Sequence[Graph], machine: Machine, rank_grid: tuple[int, int], batch_size: int, calls_seconds: float
) -> Profile:
    """The same, whether or not its loss allows so many ranks to share the batch."""
    made = cost(graphs, with_calls(machine, graphs, calls_seconds), batch_size, rank_grid)
    known, key = cache.corrections_of(machine), (made.model, made.parameters, made.precision)
    clipped = None if job.clip_norm is None else known.clipped_steps_of(*key, float(job.clip_norm))
    paced = made.corrected(known.of(made.model)).paced(known.pace_of(*key))
    found = _with_figures(replace(paced, clipped_steps=clipped), graphs, job, machine)
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


def micro_batches(job: Job, most: int) -> list[int]:
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
