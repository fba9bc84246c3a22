"""How long does a block's layout take to find, and how far is it from the best that there can be?

    python -m benchmarks.layout_solving [--blocks WORD ...] [--ranks 2 4] [--record]

One block of each family that the tests know, captured in fp32, posed for a ring of n ranks and repeated: what leaves it is held
as what enters. The program is solved and solved relaxed, without a limit of memory: the gap is between those two. Sizes are
small, with rates to match: the program's own size depends on the graph and on what divides, not on them. Every block is solved
for each number of ranks with memory for nothing, where it is data parallel, and at two prices for it, where it is not. The
figures are medians and 90th percentiles over all of these. `--sizes` times instead what a block takes that is called with tensors
of another size, for which an axis of two keeps its layout: seconds of the processor for its capture, and for all up to its code.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import capture
from anyfit.layouts.generate import generate
from anyfit.layouts.problem import OpRates, kept, pose
from anyfit.planning.layouts import Ask, solve
from anyfit.values.block_layouts import LayoutRates
from anyfit.values.profile import Exchange
from tests.layouts.blocks import NAMES, Called, called

from . import record

OPS = OpRates(flops_per_second=1e12, bytes_per_second=1e11)
PRICES = (0.0, 1e-10, 1e-9)  # seconds a byte
LATENCY, BYTES_PER_SECOND = 1e-7, 1e10


def ring(n: int) -> LayoutRates:
    per_byte = (n - 1) / n / BYTES_PER_SECOND
    times = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1 / n}
    return LayoutRates({kind: Exchange(LATENCY, each * per_byte) for kind, each in times.items()}, 1 / OPS.bytes_per_second)  # type: ignore[misc]


def solved(name: str, ranks: Sequence[int]) -> Iterator[dict[str, Any]]:
    call = called(name, torch.float32)
    began = time.perf_counter()
    captured = capture(*call)
    capture_seconds = time.perf_counter() - began
    for n, price in itertools.product(ranks, PRICES):
        began = time.perf_counter()
        problem = pose(captured, n, OPS, ring(n)).problem.repeated()
        posed = time.perf_counter()
        ask = Ask(price=price)
        layout = solve(problem, ask)
        took = time.perf_counter() - posed
        bound = solve(problem, ask, relaxed=True)
        best, least = (each.seconds + price * each.kept_bytes for each in (layout, bound))
        yield {
            "block": name,
            "ranks": n,
            "price": price,
            "ways": sum(len(step.ways) for step in problem.steps),
            "capture_seconds": round(capture_seconds, 3),
            "pose_seconds": round(posed - began, 3),
            "solve_seconds": round(took, 3),
            "gap": round(best / least - 1, 6),
            "exchanges": layout.counts,
        }


def of_fewer_rows(call: Called, count: int) -> Called:
    """What has an entry for each row of the first argument has as many as this."""
    rows = len(call.args[0])

    def fewer(x: Tensor) -> Tensor:
        return x[:count].detach().clone().requires_grad_(x.requires_grad) if x.dim() and len(x) == rows else x

    return Called(call.block, *tree_map_only(Tensor, fewer, (call.args, call.kwargs)))


def another_size(name: str) -> dict[str, Any]:
    call = called(name, torch.float32)
    before = pose(capture(*call), 2, OPS, ring(2))
    layout = solve(before.problem)
    found: list[tuple[float, float]] = []
    for count in (8, 6, 4, 2):
        other = of_fewer_rows(call, count)
        began = time.process_time()
        captured = capture(*other)
        done = time.process_time()
        same = kept(captured, before, layout, OPS, ring(2))
        if same is None:  # as where two sizes are the same by chance
            continue
        generate(*same, Axis(n=2))
        found.append((done - began, time.process_time() - began))
    captures, all_of_it = zip(*found, strict=True) if found else ((float("nan"),),) * 2
    return {"block": name, "capture_seconds": round(median(captures), 4), "seconds": round(median(all_of_it), 4)}


def sizes(names: Sequence[str]) -> dict[str, Any]:
    rows = []
    for name in names:
        rows.append(another_size(name))
        print(f"{name:25} captured in {rows[-1]['capture_seconds']:.3f} s, {rows[-1]['seconds']:.3f} s in all", flush=True)
    seconds = [row["seconds"] for row in rows]
    return {"rows": rows, "seconds": {"median": float(np.nanmedian(seconds)), "90th": float(np.nanpercentile(seconds, 90))}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--blocks", nargs="*", default=[], help="only those whose names have one of these words")
    parser.add_argument("--ranks", nargs="*", type=int, default=[2, 4])
    parser.add_argument("--sizes", action="store_true", help="time calls of other sizes")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    names = [name for name in NAMES if not options.blocks or any(word in name for word in options.blocks)]
    if options.sizes:
        figures = sizes(names)
        print(f"seconds: median {figures['seconds']['median']:.4f}, 90th percentile {figures['seconds']['90th']:.4f}")
        if options.record:
            print(record.write("layout-sizes", figures))
        return
    rows: list[dict[str, Any]] = []
    for name in names:
        for row in solved(name, options.ranks):
            rows.append(row)
            print(
                f"{row['block']:25} n = {row['ranks']}, price {row['price']:6}: {row['ways']:5} ways, "
                f"solved in {row['solve_seconds']:5.2f} s, gap {row['gap']:.3%}, {row['exchanges']}",
                flush=True,
            )
    figures = {"ranks": options.ranks, "rows": rows}
    for name in ("solve_seconds", "gap"):
        median, high = np.percentile([row[name] for row in rows], [50, 90])
        figures[name] = {"median": float(median), "90th": float(high)}
        print(f"{name}: median {median:.4f}, 90th percentile {high:.4f}")
    if options.record:
        print(record.write("layout-solving", figures))


if __name__ == "__main__":
    main()
