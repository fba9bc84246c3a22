"""Does a model train in a fraction of the memory it takes, with the same losses?

    python -m benchmarks.capped [--only NAME ...] [--steps 6]        (a GPU of 24 GiB or more, and as much host memory as it says)

Each configuration is a plan written by hand and runs in a process of its own, under a hard cap on the GPU's memory. Weights and
batches are the same in all of one model; losses, median step, peak bytes on both sides and the time to start are recorded.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from typing import Any

import torch

import anyfit
from anyfit.values.layout import Placeable, lay_out
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written
from .cases import CASES, Case, gpt2, job_of
from .profiler import quickly_built

GIB = 2**30
CONTEXT_BYTES = 2**29  # what CUDA takes outside torch's allocator
GPT2_4B = next(case for case in CASES if case.name == "gpt2-4b")
GPT2_10B = Case("gpt2-10b", "gpt2", 4, 1024, options=gpt2(48, 4096, 32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))
AWAY = Placement(weights="host", gradients="host", optimizer="host", update="host")
ON_HOST = Placement(gradients="host", optimizer="host", update="host")


@dataclass(frozen=True)
class Configuration:
    case: Case
    cap_bytes: int
    placement: Placement  # of every chunk but
    resident: int  # so many parameters at the end, which are resident
    micro_batch: int
    slots: int = 8
    prefetch: int = 4
    chunk_bytes: int = 64 * 2**20


CONFIGURATIONS = {
    "4b resident": Configuration(GPT2_4B, 135 * GIB, Placement(), 0, 8),
    "4b in 24 GiB": Configuration(GPT2_4B, 24 * GIB, ON_HOST, 0, 8),
    "4b in 12 GiB": Configuration(GPT2_4B, 12 * GIB, AWAY, 0, 8),
    "10b in 24 GiB": Configuration(GPT2_10B, 24 * GIB, AWAY, 900_000_000, 4),
}


def with_norms(model: torch.nn.Module) -> torch.nn.Module:
    """Norms as they are initialised, so that the model learns."""
    for module in model.modules():
        if isinstance(module, torch.nn.LayerNorm):
            module.weight = torch.nn.Parameter(torch.ones_like(module.weight))
            module.bias = torch.nn.Parameter(torch.zeros_like(module.bias))
    return model


def measure(name: str, steps: int) -> dict[str, Any]:
    configuration = CONFIGURATIONS[name]
    case = configuration.case
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, (configuration.cap_bytes - CONTEXT_BYTES) / total))
    job = replace(job_of(case), micro_batch=configuration.micro_batch)
    with torch.device("meta"):
        model = job.build()
    layout = lay_out(
        (Placeable(name, tuple(parameter.shape), "bfloat16", 2, True, 0) for name, parameter in model.named_parameters()),
        configuration.chunk_bytes,
    )
    placements, resident = [], 0
    for chunk in reversed(layout):
        stays = resident + chunk.elements <= configuration.resident
        resident += chunk.elements if stays else 0
        placements.append(Placement() if stays else configuration.placement)
    plan = hand_written(
        job,
        *reversed(placements),
        chunk_bytes=configuration.chunk_bytes,
        slots=configuration.slots,
        prefetch=configuration.prefetch,
        accumulation=case.batch // configuration.micro_batch,
        activations={f"transformer.h.{index}": "recompute" for index in range(case.options["n_layer"])},
        device_bytes=configuration.cap_bytes,
        host_bytes=2**40,
    )
    machine = anyfit.Machine.load("h200")
    began = time.perf_counter()
    run = anyfit.start(replace(job, model=lambda: with_norms(quickly_built(job).build())), plan, machine)
    started = time.perf_counter() - began
    generator = torch.Generator().manual_seed(1)
    vocabulary = 50257
    losses, seconds = [], []
    ids = torch.randint(0, vocabulary, (case.batch, case.length), generator=generator)  # one batch, to see it being learnt
    for _ in range(steps):
        began = time.perf_counter()
        loss = run.step({"input_ids": ids, "labels": ids})
        losses.append(float(loss))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    placed = run._placed
    offloaded = sum(each.chunk.elements for each in placed.state.chunks if each.placement.optimizer == "host")
    row = {
        "name": name,
        "cap_bytes": configuration.cap_bytes,
        "losses": losses,
        "step_seconds": statistics.median(seconds[1:]),
        "step_seconds_all": seconds,
        "start_seconds": started,
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "host_bytes": placed.host_bytes,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "parameters": sum(each.chunk.elements for each in placed.state.chunks),
        "offloaded_parameters": offloaded,
        "fetches": placed.residency.fetches,
        "misses": placed.residency.misses,
    }
    run.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=list(CONFIGURATIONS))
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print("ROW" + json.dumps(measure(options.one, options.steps)), flush=True)
        return
    rows = []
    for name in options.only or CONFIGURATIONS:
        command = [sys.executable, "-m", "benchmarks.capped", "--one", name, "--steps", str(options.steps)]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        row = next((json.loads(line[3:]) for line in done.stdout.splitlines() if line.startswith("ROW")), None)
        if row is None:
            print(f"{name}: failed\n{done.stderr[-3000:]}", flush=True)
            continue
        rows.append(row)
        gib = {key: row[f"{key}_bytes"] / GIB for key in ("reserved", "cap", "host", "most_resident")}
        print(
            f"{name:16} step {row['step_seconds']:6.2f} s  GPU {gib['reserved']:6.1f} GiB of {gib['cap']:.0f}  "
            f"host {gib['host']:6.1f} GiB, {gib['most_resident']:.1f} in all  start {row['start_seconds']:5.1f} s  "
            f"losses {' '.join(f'{loss:.4f}' for loss in row['losses'])}",
            flush=True,
        )
        record.write("capped", {"configurations": rows})


if __name__ == "__main__":
    main()
