"""How long does the planner take to find a plan, or to say that there is none, once the model is profiled?

    python -m benchmarks.search_time [--record]

From GPT-2 of 4 billion parameters to GPT-3 of 175, on one H200 and on a 24 GiB card with 128 GiB of host memory (both by their
datasheets), and a chain twice as deep and again twice, on two threads.
"""

from __future__ import annotations

import argparse
import time
from dataclasses import replace
from typing import Any

import torch

import anyfit
from anyfit import targets
from anyfit.planning import search

from . import record

MOST_SECONDS = 10.0  # what must hold
MODELS = ("gpt2-4b", "gpt2-10b", "gpt2-20b", "llama-8b", "llama-70b", "gpt3-175b")
MACHINES: dict[str, dict[str, Any]] = {"h200": {}, "rtx-4090": {"host_memory": "128GiB"}}
DEPTHS = (12, 24, 48, 96)


def measure(job: anyfit.Job, name: str, machine_name: str) -> dict[str, Any]:
    machine = anyfit.Machine.load(machine_name)
    host = replace(
        machine.host, memory_bytes=replace(machine.host.memory_bytes, value=max(machine.host.memory_bytes.value, 2**37))
    )
    machine = replace(machine, host=host).with_limits(**MACHINES[machine_name])
    profile = anyfit.profile(job, machine)
    began = time.perf_counter()
    try:
        plan = search(profile)
        found = (
            f"{plan.forecast.step_seconds:.2f} s a step, micro-batch {plan.micro_batch}; {plan.decision('model state').choice}"
        )
    except anyfit.NoPlan as verdict:
        found = f"no plan: {verdict.shortfall_bytes / 2**30:.0f} GiB too little"
    seconds = time.perf_counter() - began
    print(f"{name:12} {machine_name:9} {len(profile.chunks):4} chunks  {seconds:5.2f} s  {found}", flush=True)
    return {"model": name, "machine": machine_name, "chunks": len(profile.chunks), "seconds": seconds, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(2)
    rows = [measure(targets.job_for(model, batch=8, seq=1024), model, machine) for model in MODELS for machine in MACHINES]
    full = targets.SIZES["gpt2-4b"]
    for depth in DEPTHS:
        targets.SIZES = {"chain": replace(full, options={**full.options, "n_layer": depth})}
        rows.append(measure(targets.job_for("chain", batch=8, seq=1024), f"{depth} layers", "rtx-4090"))
    slowest = max(row["seconds"] for row in rows)
    print(f"slowest: {slowest:.2f} s (at most {MOST_SECONDS:.0f})")
    if options.record:
        print(record.write("search-time", {"rows": rows, "slowest_seconds": slowest}))


if __name__ == "__main__":
    main()
