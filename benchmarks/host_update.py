"""How many parameters a second does the host update, by threads: the C++ kernel, its twin, and torch's fused AdamW?

    python -m benchmarks.host_update [--elements 33554432] [--threads 1 2] [--rounds 7] [--record NAME]

The kernel works on split masters with bf16 gradients, in place and into a second generation: 26 bytes of memory traffic a
parameter. The twin does the same. torch's fused AdamW works on fp32, which is all it takes: 28 bytes. Rounds of all are
interleaved; the figure is the median.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch

from anyfit.kernels.adamw import Settings, State, adamw, adamw_in_torch, is_native

from . import record


def updates(elements: int) -> dict[str, Callable[[int], object]]:
    """By name, a call that does one update of the chunk on so many threads."""

    def new_state() -> State:
        weights = torch.full((elements,), 0.5, dtype=torch.bfloat16)
        return State(weights, torch.zeros(elements, dtype=torch.int16), torch.zeros(elements), torch.zeros(elements))

    first, second = new_state(), new_state()
    gradient = torch.full((elements,), 1e-3, dtype=torch.bfloat16)
    settings = Settings(lr=1e-4, weight_decay=0.01)
    parameter = torch.nn.Parameter(torch.full((elements,), 0.5))
    parameter.grad = torch.full_like(parameter, 1e-3)
    fused = torch.optim.AdamW([parameter], lr=1e-4, fused=True)
    return {
        "kernel in place": lambda threads: adamw(first, gradient, settings, 1, threads=threads),
        "kernel out of place": lambda threads: adamw(first, gradient, settings, 1, out=second, threads=threads),
        "twin in place": lambda threads: adamw_in_torch(first, gradient, settings, 1),
        "torch fused fp32": lambda threads: fused.step(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--elements", type=int, default=32 * 2**20)
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, os.cpu_count() or 1}))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", metavar="NAME")
    options = parser.parse_args()

    print(f"{options.elements:,} elements; is_native: {is_native()}; torch uses {torch.backends.cpu.get_cpu_capability()}")
    calls = updates(options.elements)
    rows = []
    for threads in options.threads:
        torch.set_num_threads(threads)
        seconds: dict[str, list[float]] = {name: [] for name in calls}
        for round_number in range(options.rounds + 1):
            for name, call in calls.items():
                begin = time.perf_counter()
                call(threads)
                if round_number:  # the first warms up
                    seconds[name].append(time.perf_counter() - begin)
        rates = {name: options.elements / statistics.median(taken) for name, taken in seconds.items()}
        rows.append({"threads": threads, "parameters_per_second": {name: round(rate) for name, rate in rates.items()}})
        shown = ", ".join(f"{name} {rate / 1e9:.2f}" for name, rate in rates.items())
        print(f"{threads:3} threads: {shown} Gparam/s", flush=True)
    if options.record:
        print(record.write(options.record, {"elements": options.elements, "is_native": is_native(), "rows": rows}))


if __name__ == "__main__":
    main()
