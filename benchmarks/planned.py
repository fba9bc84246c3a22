"""Are the planner's plans as fast and as large as it says, and is any other plan faster?

    python -m benchmarks.planned [--jobs NAME ...] [--regret NAME ...] [--machine FILE] [--seconds 500] [--record]
    python -m benchmarks.planned --write-calls FILE

(a GPU and its host.) Every job is planned for a part of the GPU's memory, as `anyfit.start` would, and trained for a few steps
under a hard cap of that size: step time, peak on the device with and without the pools, and host memory stand beside the
forecast. For the jobs of `--regret` many other plans are measured as well: those that the plan's reasons name, other splits of
the updates, all of them on the host, all streamed, other choices of what is recomputed, other chunk sizes. All are placed one
after another in one process, in the same pinned memory; the planner's comes again among them, since a host that others use too is
not as fast at all times.

`--write-calls` lists the ops of all jobs as they are traced here; `--calls` times those too, so that a forecast made with this
version of torch finds its own (benchmarks/profiler.py does the same).
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import re
import statistics
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, product
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

import anyfit
from anyfit.costing import cost
from anyfit.costing.memory import chunk_costs, chunks_of
from anyfit.kernels.pages import in_huge_pages, nodes, touch
from anyfit.placing import place
from anyfit.planning import search
from anyfit.planning.candidate import Candidate
from anyfit.planning.evaluation import Offer
from anyfit.planning.fastest import fastest
from anyfit.planning.knobs import Knobs
from anyfit.planning.reasons import settled
from anyfit.planning.space import Space
from anyfit.probing.calls import measure_calls
from anyfit.profiling import traced
from anyfit.running.run import Run
from anyfit.values.corrections import ClippedSteps
from anyfit.values.graph import Graph
from anyfit.values.machine import Device, Machine
from anyfit.values.plan import Placement, Plan
from anyfit.values.profile import Pass, Profile

from . import record
from .cases import CASES, SMALL_OPS, Case, job_of
from .peers import ALWAYS, CONTEXT_BYTES, GIB, MODELS, NEVER
from .peers import Job as Peer
from .profiler import CALLS_SECONDS, quickly_built, varied, weighty_calls

WARM_UP, TIMED = 3, 10
CLIPPED_BEFORE = 1000  # steps of earlier runs, of a job that clips at every step
SHORT = 2, 4  # of other plans
WHY = "not "  # of plans that another's reasons name
AGAIN, AGAIN_AFTER = "planned again", 6  # other plans
CODES = "rshRSH"  # resident, streamed, host; capitals: with their weights on the host
Row = dict[str, Any]


@dataclass(frozen=True)
class Job:
    case: str  # the name of one in benchmarks/cases.py, or a model of benchmarks/peers.py
    batch: int
    cap_gib: float | None = None
    clips: bool = False  # at every step
    micro_batch: int | None = None  # where the user wants one

    @property
    def name(self) -> str:
        cap = "no cap" if self.cap_gib is None else f"cap {self.cap_gib:g}"
        parts = "" if self.micro_batch is None else f" in {self.batch // self.micro_batch}"
        return f"{self.case} batch {self.batch}{parts} {cap}{' clipping' * self.clips}"

    @property
    def whole_case(self) -> Case:
        if self.case in MODELS:
            return Peer(self.case, self.batch).case
        return replace(next(each for each in (*CASES, *SMALL_OPS) if each.name == self.case), batch=self.batch)

    def training(self) -> anyfit.Job:
        """As a user has it, with the loss of a language model in slices; cases of benchmarks/profiler.py as they are there."""
        case = self.whole_case
        options: dict[str, Any] = {"micro_batch": self.micro_batch, "clip_norm": ALWAYS if self.clips else NEVER}
        if self.case in {each.name for each in CASES}:
            return replace(job_of(case), **options)
        from transformers import AutoConfig

        config = AutoConfig.for_model(case.kind, **case.options)
        job = anyfit.Job.from_huggingface(config, batch_size=self.batch, length=case.length, precision="bf16")
        return replace(job, **options)

    def batch_for(self, training: anyfit.Job) -> Any:
        return varied(self.whole_case, training.sample)


JOBS = {
    job.name: job
    for job in (
        *(Job("4b", 8, cap) for cap in (24, 12, 16, 40, 80, None)),
        *(Job("4b", 32, cap) for cap in (24, 40)),
        *(Job("llama-1b", 4, cap) for cap in (8, 12, 16)),
        *(Job("convnext-tiny", 256, cap) for cap in (8, 12)),
        Job("4b", 8, 24, clips=True),
        Job("4b", 32, 24, clips=True),
        Job("4b", 8, 24, micro_batch=4),
        Job("10b", 8, 24),
        Job("gpt2-xl-short", 4, 8),
        Job("gemma3-1b", 4, 8),
    )
}
REGRET = ("4b batch 8 cap 24", "4b batch 8 cap 12", "llama-1b batch 4 cap 12")


# ---------------------------------------------------------------------- plans


def planned_by(plan: Plan, profile: Profile, offer: Offer) -> Plan:
    """The plan with another candidate's choices."""
    candidate = offer.candidate
    pairs = zip(candidate.profile_pass.blocks, candidate.activations, strict=True)
    stage = replace(plan.stages[0], activations={block.name: choice for block, choice in pairs if choice != "keep"})
    peaks = {"device": offer.footprint.device_bytes, "host": offer.footprint.host_bytes, "disk": 0}
    return replace(
        plan,
        micro_batch=candidate.micro_batch,
        accumulation=candidate.accumulation,
        stages=(stage,),
        chunk_bytes=profile.offload_chunk_bytes,
        chunks=candidate.placements,
        slots=candidate.slots,
        prefetch=candidate.prefetch,
        forecast=replace(plan.forecast, step_seconds=offer.simulated.step_seconds, peak_bytes=peaks),
    )


def alternatives(profile: Profile, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """Other plans that fit, each the best with one thing as it says."""
    size = plan.micro_batch
    space = Space(profile)
    evaluation = space.evaluation
    last = space.candidates.last_rung(size)
    seen = {(plan.chunks, tuple(plan.activations.items()))}

    def is_new(other: Plan) -> bool:
        key = (other.chunks, tuple(other.activations.items()))
        return key not in seen and not seen.add(key)  # type: ignore[func-returns-value]

    forced: dict[str, dict[str, float]] = {
        "none streamed": {"streamed": 0.0},
        "none on the host": {"streamed": 1.0, "host_first": 0.0},
        "updates wait for the norm": {"speculates": False},
        "updates before the norm": {"speculates": True},
        "all made again": {"rung": last, "offloaded": 0},
        "half of the weights away": {"away": len(profile.chunks) // 2},
        "all weights away": {"away": len(profile.chunks)},
    }
    for name, knobs in forced.items():
        offer = space.best(size, starts=1, **knobs)
        if offer is not None and is_new(other := planned_by(plan, profile, offer)):
            yield name, other
    speculates = any(each.speculates for each in plan.chunks)
    for streamed, host_first, rung in product((0.08, 0.15, 0.3, 0.45, 0.6), (0.0, 0.12, 0.3), (last, round(0.8 * last))):
        filled = space.local.fill(Knobs(size, rung, host_first=host_first, streamed=streamed, speculates=speculates))
        if filled is None or not evaluation.fits(evaluation.footprint(filled)):
            continue
        if is_new(planned_by(plan, profile, evaluation.offer(filled))):
            name = f"{streamed:.0%} streamed, first {host_first:.0%} host, rung {rung}"
            yield name, planned_by(plan, profile, evaluation.offer(filled))
    for other_chunks in space.others:
        offer = other_chunks.best(size)
        if offer is not None:
            times = other_chunks.profile.offload_chunk_bytes / profile.offload_chunk_bytes
            yield f"chunks {times:.1g} times as large", planned_by(plan, other_chunks.profile, offer)
    for micro_batch in {each.micro_batch for each in profile.passes} - {size}:
        offer = space.best(micro_batch, starts=1)
        if offer is not None and micro_batch * 2 >= size:
            yield f"micro-batches of {micro_batch}", planned_by(plan, profile, offer)


def rejected(profile: Profile, plan: Plan) -> Iterator[tuple[str, Plan]]:
    """The neighbours that the plan's reasons name, as they would be placed."""
    found = fastest(profile)
    assert found is not None
    settlement = settled(found)
    for each in settlement.neighbours or ():
        if each.offer is not None:
            assert settlement.space is not None
            laid_out = settlement.space.laid_out_like(each.offer.candidate)
            yield f"{WHY}{each.decision}: {each.choice}", planned_by(plan, laid_out.profile, each.offer)


def coded(placements: tuple[Placement, ...]) -> str:
    """A letter a chunk, with how often it comes: '18r4h1s'."""
    letters = "".join(CODES["rsh".index(each.route[0]) + 3 * (each.weights == "host")] for each in placements)
    runs: list[list[Any]] = []
    for letter in letters:
        if runs and runs[-1][1] == letter:
            runs[-1][0] += 1
        else:
            runs.append([1, letter])
    return "".join(f"{count}{letter}" for count, letter in runs)


def placements_of(about: Row) -> tuple[Placement, ...]:
    """What `coded` and `about` have made short."""
    letters = "".join(letter * int(count) for count, letter in re.findall(r"(\d+)([a-zA-Z])", about["chunks"]))
    return tuple(_placement(letter, speculates=about["speculates"]) for letter in letters)


def _placement(letter: str, *, speculates: bool) -> Placement:
    if letter == "r":
        return Placement()
    host: Literal["host"] = "host"
    updated: Literal["host", "device"] = "host" if letter in "hH" else "device"
    weights: Literal["host", "device"] = "host" if letter.isupper() else "device"
    return Placement(weights=weights, gradients=updated, optimizer=host, update=updated, speculates=speculates)


def candidate_of(about: Row, graph: Graph, each: Pass) -> Candidate:
    """What the simulator needs to know of a plan that was measured."""
    activations = tuple(about["again"].get(block.name, "keep") if block.name else "keep" for block in each.blocks)
    chunks = chunk_costs(graph, chunks_of(graph, about["chunk_bytes"]))
    placements = placements_of(about) or (Placement(),) * len(chunks)
    return Candidate(each, about["accumulation"], activations, chunks, placements, about["slots"], about["prefetch"])


def about(plan: Plan) -> Row:
    return {
        "micro_batch": plan.micro_batch,
        "accumulation": plan.accumulation,
        "chunk_bytes": plan.chunk_bytes,
        "chunks": coded(plan.chunks),
        "speculates": any(each.speculates for each in plan.chunks),
        "activations": dict(Counter(plan.activations.values())),
        "again": plan.activations,
        "slots": plan.slots,
        "prefetch": plan.prefetch,
    }


# ---------------------------------------------------------------------- the measurement


def pinned_arena(size: int) -> torch.Tensor:
    """Host memory that all plans share: it takes longest to get."""
    arena = in_huge_pages(size)
    here = nodes()
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda start: touch(arena[start : start + GIB], here), range(0, size, GIB)))
    error = int(torch.cuda.cudart().cudaHostRegister(arena.data_ptr(), size, 0))  # type: ignore[no-untyped-call]
    if error:
        raise MemoryError(f"{size / GIB:.0f} GiB could not be pinned (CUDA error {error})")
    return arena


def measure(job: Job, training: anyfit.Job, plan: Plan, arena: torch.Tensor, steps: tuple[int, int]) -> Row:
    total = torch.cuda.get_device_properties(0).total_memory
    gc.collect()
    torch.cuda.empty_cache()
    cap = total if job.cap_gib is None else job.cap_gib * GIB - CONTEXT_BYTES
    torch.cuda.set_per_process_memory_fraction(min(cap / total, 1.0))
    building = replace(quickly_built(training), micro_batch=plan.micro_batch)
    torch.manual_seed(0)
    began = time.perf_counter()
    placed = place(building, plan, building.build(), torch.device("cuda", 0), arena=arena)
    started = time.perf_counter() - began
    with Run(building, plan, placed) as run:
        torch.cuda.reset_peak_memory_stats()
        batch, seconds = job.batch_for(training), []
        losses, clipped = [], 0
        for _ in range(sum(steps)):
            begun = time.perf_counter()
            losses.append(float(run.step(batch)))
            seconds.append(time.perf_counter() - begun)
            clipped += run.metrics.gradient_norm > (training.clip_norm or math.inf)
        return {
            "step_seconds": statistics.median(seconds[steps[0] :]),
            "step_seconds_all": seconds,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "pool_bytes": placed.device_bytes,
            "host_bytes": placed.host_bytes,
            "start_seconds": started,
            "clipped": clipped,
            "loss_first": losses[0],
            "loss_last": losses[-1],
        }


def row_of(job: Job, plan: Plan, measured: Row, name: str = "planned") -> Row:
    forecast = plan.forecast
    clipping = forecast.clipping if job.clips else None
    return {
        "job": job.name,
        "plan": name,
        "about": about(plan),
        "measured": measured,
        "predicted_then": {
            "step_seconds": forecast.step_seconds if clipping is None else clipping.step_seconds,
            "device_bytes": forecast.peak_bytes["device"],
            "host_bytes": forecast.peak_bytes["host"],
            "reserved_bytes": forecast.reserved_bytes,
        },
    }


def line_of(row: Row) -> str:
    real, then = row["measured"], row["predicted_then"]
    steps = real["step_seconds"], then["step_seconds"] / real["step_seconds"] - 1
    return (
        f"{row['job']:26} {row['plan']:28} {steps[0]:6.3f} s ({steps[1]:+6.1%})  "
        f"GPU {real['allocated_bytes'] / GIB:5.2f} GiB ({then['device_bytes'] / real['allocated_bytes'] - 1:+5.1%}), "
        f"reserved {real['reserved_bytes'] / GIB:5.2f}, pools {real['pool_bytes'] / GIB:5.2f}  "
        f"host {real['host_bytes'] / GIB:5.1f} ({then['host_bytes'] / max(real['host_bytes'], 1) - 1:+5.1%})  "
        f"start {real['start_seconds']:.1f} s  {row['about']['chunks']} {row['about']['activations']} "
        f"{'speculates' * row['about']['speculates']} {row['about']['micro_batch']}"
    )


# ---------------------------------------------------------------------- all of it


def graphs_of(job: Job) -> list[Graph]:
    return traced(job.training(), "cuda")


def calls_of(case: str, batch: int, device: Device) -> dict[str, float]:
    """The calls worth a measurement of the micro-batches that a plan is likely to take, with their shares of a pass."""
    training = Job(case, batch).training()
    graphs = [traced(replace(training, micro_batch=size), "cuda")[0] for size in (batch, batch // 2, batch // 4)]
    return {call: weight for graph in graphs for call, weight in weighty_calls(graph, device).items()}


def with_calls(machine: Machine, jobs: list[Job], elsewhere: dict[str, dict[str, float]]) -> Machine:
    """With the seconds of the ops of all jobs."""
    for case, batch in dict.fromkeys((job.case, job.batch) for job in jobs):
        weights = {**elsewhere.get(f"{case} batch {batch}", {}), **calls_of(case, batch, machine.device)}
        found = measure_calls(torch.device("cuda", 0), weights, machine.device.measured, CALLS_SECONDS)
        machine = replace(machine, device=replace(machine.device, measured={**machine.device.measured, **found}))
    return machine


def plans_of(job: Job, machine: Machine, others: int) -> list[tuple[str, Plan]] | str:
    """The planner's, and so many others, the fastest by their forecasts; or why there is none."""
    torch.set_num_threads(1)
    graphs = graphs_of(job)
    limited = machine.with_limits(device_memory=None if job.cap_gib is None else int(job.cap_gib * GIB))
    profile = cost(graphs, limited, job.batch)
    if job.clips:  # as runs have shown
        seen = ClippedSteps(profile.model, profile.parameters, profile.precision, ALWAYS, CLIPPED_BEFORE, CLIPPED_BEFORE)
        profile = replace(profile, clipped_steps=seen)
    try:
        plan = search(profile)
    except anyfit.NoPlan as error:
        return str(error)
    if not others:
        return [("planned", plan)]
    named = list(rejected(profile, plan))
    seen = {other.chunks for _, other in named}
    found = [each for each in alternatives(profile, plan) if each[1].chunks not in seen]
    found.sort(key=lambda each: each[1].forecast.step_seconds)
    found = [*named, *found[: max(others - len(named), 0)]]
    parts = [found[start : start + AGAIN_AFTER] for start in range(0, len(found), AGAIN_AFTER)]
    return [("planned", plan), *chain.from_iterable((*part, (AGAIN, plan)) for part in parts)]


def seconds_of(rows: list[Row]) -> dict[str, float]:
    """By plan, of a job; the planner's as it was most of the time."""
    found: dict[str, list[float]] = {}
    for row in rows:
        found.setdefault("planned" if row["plan"] == AGAIN else row["plan"], []).append(row["measured"]["step_seconds"])
    return {plan: statistics.median(seconds) for plan, seconds in found.items()}


def run_all(options: argparse.Namespace) -> None:
    jobs = [JOBS[name] for name in options.jobs or JOBS]
    machine = Machine.load(options.machine) if options.machine else anyfit.probe("full")
    elsewhere = json.loads(options.calls.read_text()) if options.calls else {}
    machine = with_calls(machine, jobs, elsewhere)
    print(f"{time.perf_counter() - BEGAN:4.0f} s  the machine is known", flush=True)
    with ProcessPoolExecutor(options.workers, get_context("spawn")) as pool:
        others = {job.name: options.most if job.name in options.regret else 0 for job in jobs}
        planning = {job.name: pool.submit(plans_of, job, machine, others[job.name]) for job in jobs}
        arena = pinned_arena(options.arena_gib * GIB)
        print(f"{time.perf_counter() - BEGAN:4.0f} s  the arena is there", flush=True)
        plans = {name: future.result() for name, future in planning.items()}
    print(f"{time.perf_counter() - BEGAN:4.0f} s  all is planned", flush=True)
    rows: list[Row] = []
    question = "regret" if {job.name for job in jobs} <= {*options.regret} else "planned"
    for job in jobs:
        found = plans[job.name]
        if isinstance(found, str):
            print(f"{job.name}: {found}", flush=True)
            continue
        training = job.training()
        for name, plan in found:
            if time.perf_counter() - BEGAN > options.seconds:
                return
            steps = (WARM_UP + 4 * job.clips, TIMED) if name == "planned" else SHORT  # a run waits for the norm after some
            try:
                rows.append(row_of(job, plan, measure(job, training, plan, arena, steps), name))
            except (RuntimeError, MemoryError, ValueError) as error:
                print(f"{job.name}, {name}: {type(error).__name__} {str(error)[:300]}", flush=True)
                continue
            print(f"{time.perf_counter() - BEGAN:4.0f} s  {line_of(rows[-1])}", flush=True)
            if options.record:
                record.write(question, {"rows": rows}, machine)


def write_calls(file: Path) -> None:
    device = Machine.load("h200").device
    found = {}
    for case, batch in dict.fromkeys((job.case, job.batch) for job in JOBS.values()):
        weights = calls_of(case, batch, device)
        found[f"{case} batch {batch}"] = {call: float(f"{weight:.3g}") for call, weight in weights.items()}
    file.write_text(json.dumps(found, indent=1) + "\n")


BEGAN = time.perf_counter()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", choices=list(JOBS))
    parser.add_argument("--regret", nargs="*", choices=list(JOBS), default=list(REGRET))
    parser.add_argument("--most", type=int, default=99, help="other plans of a job")
    parser.add_argument("--machine", help="of this very computer; probed when not given")
    parser.add_argument("--calls", type=Path)
    parser.add_argument("--write-calls", type=Path)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--arena-gib", type=int, default=96, help="of host memory, for all plans one after another")
    parser.add_argument("--workers", type=int, default=8, help="processes that plan")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.write_calls:
        write_calls(options.write_calls)
    else:
        run_all(options)


if __name__ == "__main__":
    main()
