"""How fast does a model train in a fraction of the memory it takes, with the same losses?

    python -m benchmarks.mixed [--only NAME ...] [--steps 10] [--set KEY=VALUE ... | --planned] [--timeline FILE] [--record]

(a GPU, and as much host memory as a configuration says.) Each configuration is a plan written by hand and runs in a process of
its own, under a hard cap on the GPU's memory; with --planned the planner's own plan for that cap runs instead. By hand, the
optimizer's state of the model's first parameters is resident: their gradients
come last in backward and their weights are needed first in forward, so that nothing could hide their update. The rest is
updated on the host and streamed through the device by turns. Weights and batch are the same in all of one model; losses, median
step, peak bytes on both sides and the time to start are recorded.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

import anyfit
from anyfit.values.layout import Chunk, Placeable, lay_out
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written
from .peers import CONTEXT_BYTES, GIB, JOBS, LR, MODELS, VOCABULARY, WEIGHT_DECAY, Job
from .planned import about
from .profiler import quickly_built


@dataclass(frozen=True)
class Configuration:
    """How a job of benchmarks/peers.py is placed."""

    resident: float = 0.0  # 10^9 parameters, the model's first, whose state is on the device
    host_first: float = 0.0  # 10^9 parameters after these that the host updates: a chunk is back from it soonest
    streamed: float = 0.0  # share of the others that is streamed
    away: float = 0.0  # 10^9 parameters, the model's last, whose weights are on the host
    speculates: int = 1
    slots: int = 8
    prefetch: int = 4
    chunk_mib: int = 80  # a block of 4b makes three chunks
    kept: int = 0  # blocks, the last, whose activations are kept
    selective: int = 0  # blocks before those, which are recomputed but for their costly ops
    compiled: int = 0


CONFIGURATIONS = {
    "4b batch 8 no cap": Configuration(resident=10),
    "4b batch 8 no cap compiled": Configuration(resident=10, compiled=1),
    "4b batch 8 no cap kept": Configuration(resident=10, kept=32),
    "4b batch 32 no cap": Configuration(resident=10),
    "4b batch 8 cap 24": Configuration(resident=0.75, streamed=0.39),
    "4b batch 8 cap 24 clipping": Configuration(resident=0.65, streamed=0.5),
    "4b batch 32 cap 24": Configuration(resident=0.16, streamed=0.4, away=3.0),
    "4b batch 32 cap 24 clipping": Configuration(resident=0.16, streamed=0.4, away=3.0),
    "4b batch 8 cap 12": Configuration(resident=0.16, away=1.8),
    "10b batch 8 cap 24": Configuration(resident=0.36, streamed=0.45, away=9.0, speculates=0, chunk_mib=130),
    "10b batch 16 cap 24": Configuration(resident=0.36, streamed=0.45, away=9.0, speculates=0, chunk_mib=130),
}


def job_of(job: Job, micro_batch: int | None = None) -> anyfit.Job:
    """With the loss in slices, as anyfit trains a Hugging Face model."""
    from transformers import AutoConfig

    return anyfit.Job.from_huggingface(
        AutoConfig.for_model("gpt2", **MODELS[job.model]),
        batch_size=job.batch,
        micro_batch=micro_batch,
        length=job.case.length,
        precision="bf16",
        clip_norm=job.clip_norm,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY),
    )


def placements(configuration: Configuration, layout: list[Chunk]) -> list[Placement]:
    found: list[Placement] = []
    total, before, streamed, others = sum(chunk.elements for chunk in layout), 0, 0.0, 0.0
    for chunk in layout:
        before += chunk.elements
        if before <= configuration.resident * 1e9:
            found.append(Placement())
            continue
        is_first = before <= (configuration.resident + configuration.host_first) * 1e9
        others += 0 if is_first else chunk.elements
        is_away = total - before < configuration.away * 1e9
        weights, speculates = ("host" if is_away else "device"), bool(configuration.speculates)
        if not is_first and streamed + chunk.elements / 2 <= configuration.streamed * others:
            streamed += chunk.elements
            found.append(Placement(weights=weights, optimizer="host", update="device", speculates=speculates))  # type: ignore[arg-type]
        else:
            found.append(
                Placement(weights=weights, gradients="host", optimizer="host", update="host", speculates=speculates)  # type: ignore[arg-type]
            )
    return found


def plan_of(job: Job, configuration: Configuration, training: anyfit.Job) -> anyfit.Plan:
    with torch.device("meta"):
        model = training.build()
    layout = lay_out(
        (Placeable(name, tuple(parameter.shape), "bfloat16", 2, True, 0) for name, parameter in model.named_parameters()),
        configuration.chunk_mib * 2**20,
    )
    blocks = [f"transformer.h.{index}" for index in range(MODELS[job.model]["n_layer"])]
    first_kept = len(blocks) - configuration.kept
    choices = ["recompute"] * (first_kept - configuration.selective) + ["selective"] * configuration.selective
    return hand_written(
        training,
        *placements(configuration, list(layout)),
        chunk_bytes=configuration.chunk_mib * 2**20,
        slots=configuration.slots,
        prefetch=configuration.prefetch,
        activations=dict(zip(blocks, choices, strict=False)),  # type: ignore[arg-type]
        compiled=tuple(blocks) if configuration.compiled else (),
        device_bytes=job.cap_bytes or 2**40,
        host_bytes=2**40,
    )


def start(name: str, changes: dict[str, Any]) -> anyfit.Run:
    """The job, placed by hand."""
    job, configuration = JOBS[name], replace(CONFIGURATIONS[name], **changes)
    training = job_of(job, micro_batch=job.batch)
    return anyfit.start(quickly_built(training), plan_of(job, configuration, training), anyfit.Machine.load("h200"))


def start_planned(name: str) -> anyfit.Run:
    """The job as a user starts it, who says how much memory there is."""
    machine = anyfit.probe("full").with_limits(device_memory=JOBS[name].cap_bytes)
    return anyfit.start(quickly_built(job_of(JOBS[name])), machine=machine)


def measure(
    name: str, steps: int, warmup: int, starting: Callable[[], anyfit.Run], timeline: Path | None = None
) -> dict[str, Any]:
    job = JOBS[name]
    began = time.perf_counter()
    if job.cap_bytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction((job.cap_bytes - CONTEXT_BYTES) / total)
    run = starting()
    started = time.perf_counter() - began
    recorded = run.record() if timeline is not None else None
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCABULARY, (job.batch, job.case.length), generator=generator)  # one batch, to see it being learnt
    losses, seconds, clipped = [], [], 0
    for _ in range(warmup + steps):
        begun = time.perf_counter()
        losses.append(float(run.step({"input_ids": ids, "labels": ids})))
        seconds.append(time.perf_counter() - begun)
        clipped += run.metrics.gradient_norm > job.clip_norm
    if recorded is not None and timeline is not None:
        timeline.write_text(json.dumps(recorded.document(name)))
    placed = run._engine.placed
    median = statistics.median(seconds[warmup:])
    row = {
        "system": "anyfit",
        "job": name,
        "plan": about(run.plan),
        "predicted_seconds": run.plan.forecast.step_seconds,
        "parameters": sum(each.chunk.elements for each in placed.state.chunks),
        "by_route": {
            route: sum(each.chunk.elements for each in placed.state.chunks if each.placement.route == route)
            for route in ("resident", "streamed", "host")
        },
        "losses": losses,
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "step_seconds": median,
        "step_seconds_all": seconds,
        "tokens_per_second": job.tokens / median,
        "start_seconds": started,
        "first_step_seconds": seconds[0],
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": placed.host_bytes,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "clipped_share": clipped / len(losses),
        "fetches": placed.residency.fetches,
        "misses": placed.residency.misses,
        "error": None,
    }
    run.close()
    return row


def line_of(row: dict[str, Any]) -> str:
    gib = {key: row[f"{key}_bytes"] / GIB for key in ("reserved", "host", "most_resident")}
    routes = " ".join(f"{route} {count / 1e9:.2f}" for route, count in row["by_route"].items())
    every = " ".join(f"{seconds:.2f}" for seconds in row["step_seconds_all"])
    return (
        f"{row['job']:32} {row['step_seconds']:6.3f} s {row['tokens_per_second']:7.0f} tok/s  GPU {gib['reserved']:5.1f} GiB  "
        f"host {gib['host']:5.1f}, {gib['most_resident']:.1f} in all  start {row['start_seconds']:4.1f} s  {routes}  "
        f"clipped {row['clipped_share']:.0%}  misses {row['misses']}/{row['fetches']}\n"
        f"    losses {row['loss_first']:.4f} {row['loss_last']:.4f}  steps {every}"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--set", nargs="*", default=[], metavar="KEY=VALUE", help="other values of a configuration")
    parser.add_argument("--planned", action="store_true", help="the planner's plans, not those written by hand")
    parser.add_argument("--timeline", type=Path)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        known = {field.name: {"int": int, "float": float, "str": str}[str(field.type)] for field in fields(Configuration)}
        changes = {key: known[key](value) for key, _, value in (each.partition("=") for each in options.set)}
        starting = partial(start_planned, options.one) if options.planned else partial(start, options.one, changes)
        print("ROW" + json.dumps(measure(options.one, options.steps, options.warmup, starting, options.timeline)), flush=True)
        return
    rows = []
    for name in options.only or CONFIGURATIONS:
        command = [sys.executable, "-m", "benchmarks.mixed", "--one", name, "--steps", str(options.steps)]
        command += ["--warmup", str(options.warmup), "--set", *options.set]
        command += ["--planned"] * options.planned
        command += ["--timeline", str(options.timeline)] if options.timeline else []
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        row = next((json.loads(line[3:]) for line in done.stdout.splitlines() if line.startswith("ROW")), None)
        if row is None:
            print(f"{name}: failed\n{done.stderr[-3000:]}", flush=True)
            continue
        rows.append(row)
        print(line_of(row), flush=True)
        if options.record:
            record.write("mixed", {"rows": rows})


if __name__ == "__main__":
    main()
