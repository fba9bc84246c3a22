"""What compiling the blocks of a job is worth, measured: each distinct block is compiled and timed, eager beside it.

The job is placed as its plan says, and one block of each kind compiled on the inputs of a real call
(placing/compiled_figures.py). Figures are kept beside the machine file by a key of code, shapes, dtypes and versions; later plans
choose by them.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from .meshing import Axes
from .planning import search
from .probing import cache
from .profiling import profile_of
from .running.rehearsal import figures_of_blocks
from .starting import Start
from .targets import job_for
from .values.compiled import BlockFigures
from .values.job import Job
from .values.machine import Machine
from .values.units import show_bytes, show_seconds


def measure_blocks(job: Job, machine: Machine) -> list[BlockFigures]:
    """Of every distinct block, with micro-batches of the size that the job's plan has; kept for later plans."""
    if job.compile is False:
        raise ValueError("Job(compile=False) lets no plan compile: there is nothing to measure")
    profile = profile_of(job, machine, (1, 1), for_plan=True)
    plan = search(profile)
    whole = next(each for each in profile.passes if each.micro_batch == plan.micro_batch)
    names = [block.name for block in whole.blocks if "recompute" in block.choices]
    start = Start(job, None, profile, Axes(), None)
    with start.run(machine, None, deterministic=False):
        assert start.placed is not None
        found = figures_of_blocks(job, start.placed, names, plan.micro_batch, cache.compiler_versions())
    kept = {each.key: each for each in found.values()}
    cache.keep_compiled(machine, kept.values())
    return list(kept.values())


def told_of_blocks(target: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Measures the blocks of a target; the figures for programs, and for people."""
    found = measure_blocks(job_for(target), cache.cached("quick"))
    rows = []
    for each in found:
        if each.eager is None or each.compiled is None:
            told = f"stays eager: {each.why_not}"
        else:
            took, compiled = show_seconds(each.eager.seconds), show_seconds(each.compiled.seconds)
            saved = f"{show_bytes(each.compiled.saved_bytes)} saved for backward instead of {show_bytes(each.eager.saved_bytes)}"
            told = f"{took} eager, {compiled} compiled ({each.speedup:.2f} times as fast), {saved}; "
            told += f"{show_seconds(each.compile_seconds)} to compile"
        rows.append((f"{each.kind}, micro-batch {each.micro_batch}", told))
    return [asdict(each) for each in found], rows
