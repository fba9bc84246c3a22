"""Does the time to profile a model grow with its depth, and does a model of 175 billion parameters fit through a small machine?

    python -m benchmarks.profiler_scaling [--rounds 3] [--record]

`anyfit.profile` of GPT-3's shape (hidden 12288, sequence 2048, batch 8: four micro-batch sizes are traced) with 24 layers and
with all 96, planned for an H200. Every round is a process of its own on two threads; imports are not counted in its seconds, and
are in its memory. The figures are medians for seconds and the largest for memory.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
THREADS = 2
LAYERS = (24, 96)
MOST_SECONDS, MOST_BYTES, MOST_RATIO = 15.0, 2 * 2**30, 1.5  # what must hold


def measure(layers: int) -> dict[str, Any]:
    """Seconds of one profile in this process, and the most memory the process ever had."""
    import torch
    import transformers
    from transformers import AutoModelForCausalLM  # noqa: F401  (transformers imports its models when they are named)

    import anyfit
    from anyfit import costing, targets, tracing  # noqa: F401

    torch.set_num_threads(THREADS)
    machine = anyfit.Machine.load("h200")
    transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel  # noqa: B018
    full = targets.SIZES["gpt3-175b"]
    targets.SIZES = {"gpt3": replace(full, options={**full.options, "n_layer": layers})}

    began = time.perf_counter()
    profile = anyfit.profile(targets.job_for("gpt3"), machine)
    seconds = time.perf_counter() - began
    return {
        "layers": layers,
        "parameters": profile.parameters,
        "seconds": seconds,
        "rss_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
    }


def in_its_own_process(layers: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.profiler_scaling", "--measure", str(layers)]
    done = subprocess.run(
        command, cwd=ROOT, env=os.environ | {"OMP_NUM_THREADS": str(THREADS)}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr)
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--measure", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure is not None:
        print(json.dumps(measure(options.measure)))
        return

    rounds = [[in_its_own_process(layers) for layers in LAYERS] for _ in range(options.rounds)]  # interleaved
    rows = []
    for runs in zip(*rounds, strict=True):
        seconds = [run["seconds"] for run in runs]
        rows.append(
            {
                "layers": runs[0]["layers"],
                "parameters": runs[0]["parameters"],
                "seconds": statistics.median(seconds),
                "slowest_seconds": max(seconds),
                "rss_bytes": max(run["rss_bytes"] for run in runs),
            }
        )
    few, many = rows
    ratio = many["seconds"] / few["seconds"]
    print("layers  parameters  seconds  slowest   peak RSS")
    for row in rows:
        print(
            f"{row['layers']:>6}  {row['parameters'] / 1e9:>8.1f} B  {row['seconds']:>7.2f}  {row['slowest_seconds']:>7.2f}  "
            f"{row['rss_bytes'] / 2**20:>5.0f} MiB"
        )
    print(f"{many['layers']} layers take {ratio:.2f} times as long as {few['layers']} (at most {MOST_RATIO})")
    holds = many["slowest_seconds"] < MOST_SECONDS and many["rss_bytes"] < MOST_BYTES and ratio <= MOST_RATIO
    print("holds" if holds else "DOES NOT HOLD")
    if options.record:
        from . import record

        print(record.write("profiler-scaling", {"rounds": options.rounds, "ratio": ratio, "holds": holds, "sizes": rows}))
    sys.exit(not holds)


if __name__ == "__main__":
    main()
