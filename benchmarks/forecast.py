"""How far is the forecast of a step from a real one on this machine's CPU?

    python -m benchmarks.forecast [--record]

The machine is probed, then small models of several kinds are planned and trained for a few steps, everything in this process
and with nothing else running. The largest error here is the error band that plans for CPUs carry.
"""

from __future__ import annotations

import argparse
import statistics

import anyfit
from anyfit.probing.cache import remeasured

from . import record
from .cases import Case, gpt2, job_of, llama

CASES = (
    Case("demo", "demo", 32, 128, "fp32", options={"width": 128, "layers": 4, "heads": 4}),
    Case("demo-wide", "demo", 8, 128, "fp32", options={"width": 512, "layers": 4, "heads": 8}),
    Case("demo-long", "demo", 4, 512, "fp32", options={"width": 256, "layers": 4, "heads": 4}),
    Case("demo-tiny", "demo", 4, 32, "fp32", options={"width": 64, "layers": 2, "heads": 2}),
    Case("gpt2", "gpt2", 2, 128, "fp32", options=gpt2(4, 256, 4, vocab_size=2048)),
    Case("llama", "llama", 2, 256, "fp32", options=llama(4, 256, 8, vocab_size=2048)),
    Case("llama-recompute", "llama", 4, 256, "fp32", recompute=True, options=llama(4, 256, 8, vocab_size=2048)),
    Case("resnet18", "resnet", 4, precision="fp32", options={"depths": [2, 2, 2, 2], "layer_type": "basic"}),
)
WARM_UP, TIMED = 3, 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    machine = remeasured("full")
    rows = []
    for case in CASES:
        job = job_of(case)
        with anyfit.start(job, machine=machine) as run:
            seconds = []
            for _ in range(WARM_UP + TIMED):
                run.step(job.sample)
                seconds.append(run.metrics.seconds)
            measured, peak = statistics.median(seconds[WARM_UP:]), run.metrics.peak_bytes["device"]
            expected = run.plan.forecast
        off = {"step": measured / expected.step_seconds - 1, "peak": peak / expected.peak_bytes["device"] - 1}
        rows.append({"case": case.name, "step_seconds": measured, "peak_bytes": peak, "off": off, **case.roughness})
        print(
            f"{case.name:18} step {measured * 1e3:8.1f} ms ({off['step']:+6.1%} of the forecast)  peak {peak / 2**20:7.1f} MiB "
            f"({off['peak']:+6.1%})",
            flush=True,
        )
    if options.record:
        print(record.write("forecast", {"rows": rows}, machine))


if __name__ == "__main__":
    main()
