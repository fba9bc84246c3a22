"""What compiling the blocks of a job is worth, measured: each distinct block is compiled and timed, eager beside it.

The job is placed as its plan says and rehearsed, which compiles one block of each kind on the inputs of a real call
(placing/compiled.py). Figures are kept beside the machine file by a key of code, shapes, dtypes and versions; later plans choose
by them.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from datetime import date
from typing import Any

from .placing.compiled import backend_for
from .planning import search
from .probing import cache
from .profiling import profile_of
from .starting import Start
from .targets import job_for
from .values.compiled import BlockFigures, code_of, key_of
from .values.job import Job
from .values.machine import Machine
from .values.plan import Activations, Plan
from .values.units import show_bytes, show_seconds


def measure_blocks(job: Job, machine: Machine) -> list[BlockFigures]:
    """Of every distinct block, with micro-batches of the size that the job's plan has; kept for later plans."""
    if job.compile is False:
        raise ValueError("Job(compile=False) lets no plan compile: there is nothing to measure")
    profile = profile_of(job, machine, (1, 1))
    plan = search(profile)
    each = next(each for each in profile.passes if each.micro_batch == plan.micro_batch)
    names = tuple(block.name for block in each.blocks if "recompute" in block.choices)
    backend = backend_for("fast" if job.compile == "fast" else "eager")
    backend.measures, before = True, backend.measures
    try:
        start = Start(job, _all_compiled(plan, names), None, None)
        with start.run(machine, None, deterministic=False) as run:
            assert start.compiled is not None
            modules, blocks, versions = dict(run.model.named_modules()), start.compiled.blocks, cache.compiler_versions()
            found: dict[str, BlockFigures] = {}
            for name, block in blocks.items():
                key = key_of(job, code_of(modules[name]), plan.micro_batch, versions)
                if key in found:
                    continue
                eager, code, seconds = (
                    backend.times.get(block.key, (None, None, 0.0)) if block.reason is None else (None, None, 0.0)
                )
                kind, why_not = type(modules[name]).__name__, block.reason or ""
                found[key] = BlockFigures(key, kind, plan.micro_batch, eager, code, seconds, why_not, date.today().isoformat())
    finally:
        backend.measures = before
    cache.keep_compiled(machine, found.values())
    return list(found.values())


def told_of_blocks(target: str) -> tuple[list[dict[str, Any]], list[tuple[str, str]]]:
    """Measures the blocks of a target; the figures for programs, and for people."""
    found = measure_blocks(job_for(target), cache.cached("quick"))
    rows = []
    for each in found:
        if each.eager is None or each.compiled is None:
            told = f"stays eager: {each.why_not or 'no call in training was seen'}"
        else:
            took, compiled = show_seconds(each.eager.seconds), show_seconds(each.compiled.seconds)
            saved = f"{show_bytes(each.compiled.saved_bytes)} saved for backward instead of {show_bytes(each.eager.saved_bytes)}"
            told = f"{took} eager, {compiled} compiled ({each.speedup:.2f} times as fast), {saved}; "
            told += f"{show_seconds(each.compile_seconds)} to compile"
        rows.append((f"{each.kind}, micro-batch {each.micro_batch}", told))
    return [asdict(each) for each in found], rows


def _all_compiled(plan: Plan, names: tuple[str, ...]) -> Plan:
    """The plan with these blocks compiled; compiled code is not recomputed in part."""
    activations: dict[str, Activations] = {
        name: "recompute" if choice == "selective" else choice for name, choice in plan.activations.items()
    }
    first, *others = plan.stages
    return replace(plan, stages=(replace(first, activations=activations, compiled=names), *others), rehearsed=False)
