"""What does it take the host to launch ops, alone and beside what a training step has it do?

    python -m benchmarks.launches [--record]

(a GPU and its host.) 400 tiny ops are launched one by one, and replayed as a CUDA graph: alone, beside updates, beside copies
in both directions, and beside all of these. A view, which launches nothing, and an empty loop of Python tell how fast the host
itself is: hosts are shared, and the same loop may take several times as long a little later.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

import anyfit
from anyfit.probing.meters import QUICK, Load
from anyfit.probing.update import device_loads, updating

from . import record

OPS, ROUNDS, LOOPS = 400, 40, 20_000
Row = dict[str, Any]


def seconds_of(work: Callable[[], object]) -> tuple[float, float]:
    """Of the host, to launch it; and until the device is through."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    launched = time.perf_counter()
    torch.cuda.synchronize()
    return launched - began, time.perf_counter() - began


def measured(tensors: list[torch.Tensor], graph: torch.cuda.CUDAGraph) -> Row:
    def one_by_one() -> None:
        for each in tensors:
            each.add_(1)

    def views() -> None:
        for each in tensors:
            each.view(1)

    def loop() -> None:
        for _ in range(LOOPS):
            pass

    def median(work: Callable[[], object], place: int) -> float:
        return statistics.median(seconds_of(work)[place] for _ in range(ROUNDS))

    return {
        "launch_seconds": median(one_by_one, 0) / OPS,
        "op_seconds": median(one_by_one, 1) / OPS,
        "replayed_op_seconds": median(graph.replay, 1) / OPS,
        "view_seconds": median(views, 0) / OPS,
        "loop_seconds": median(loop, 0) / LOOPS,
    }


def line_of(row: Row) -> str:
    return (
        f"{row['beside']:18} launched in {row['launch_seconds'] * 1e6:5.2f} us an op, done in {row['op_seconds'] * 1e6:5.2f}, "
        f"replayed {row['replayed_op_seconds'] * 1e6:5.2f}; a view {row['view_seconds'] * 1e6:5.2f} us, "
        f"a loop {row['loop_seconds'] * 1e9:5.1f} ns"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    machine, device = anyfit.probe(), torch.device("cuda", 0)
    tensors = [torch.zeros(1, device=device) for _ in range(OPS)]
    graph = torch.cuda.CUDAGraph()
    for each in tensors:
        each.add_(1)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for each in tensors:
            each.add_(1)
    updates = updating(machine.host.cores, QUICK)
    rows: list[Row] = []
    with device_loads(device) as loads:
        beside: dict[str, tuple[Load, ...]] = {
            "alone": (),
            "beside updates": (updates,),
            "beside copies": (loads.copies,),
            "beside both": (updates, loads.copies),
            "alone again": (),
        }
        for name, given in beside.items():
            with contextlib.ExitStack() as running:
                for each in given:
                    running.enter_context(each())
                rows.append({"beside": name, **measured(tensors, graph)})
            print(line_of(rows[-1]), flush=True)
    if options.record:
        print(record.write("launches", {"rows": rows}, machine))


if __name__ == "__main__":
    main()
