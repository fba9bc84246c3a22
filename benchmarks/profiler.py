"""How far are forecasts of peak memory and step time from real training steps on a GPU?

    python -m benchmarks.profiler --machine machine.json [--only NAME ...] [--ops FOLDER] [--calls FILE] [--record]
    python -m benchmarks.profiler --write-calls FILE

Every case of benchmarks/cases.py is trained for a few steps with `run.step` on random weights and batches: allocated peak,
reserved peak and median step time stand beside the forecast. Before that the case's own calls are measured, and go to the machine
file that is recorded with the rows. `--ops` also writes where the time of one step went, kernel by kernel, for whoever improves
the cost model.

Another version of torch or transformers makes slightly other calls of the same case. So that a forecast made there finds its
calls measured, `--write-calls` lists those of all cases, on any computer, and `--calls` measures them as well.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

import anyfit
from anyfit.costing.times import call_weights, curve_seconds
from anyfit.probing.calls import measure_calls
from anyfit.tracing import trace
from anyfit.values.graph import Graph
from anyfit.values.job import Batch
from anyfit.values.machine import Device, Machine
from anyfit.values.nests import map_tensors

from . import record
from .cases import CASES, Case, job_of

WARM_UP, TIMED = 3, 10
CALLS_SECONDS = 20.0  # for the calls of one case
LEAST_CALL_SECONDS = 1e-5  # by estimate; what is shorter is the host's time, and would make the machine file large

CallsElsewhere = Mapping[str, Mapping[str, float]]  # by case: what its calls weigh


def weighty_calls(graph: Graph, device: Device) -> dict[str, float]:
    """The calls worth a measurement, heaviest first, with their shares of the pass."""
    each = {graph.calls[op.call]: curve_seconds(op, device) for op in graph.ops}
    weights = call_weights([graph], device)
    return {call: weights[call] for call in sorted(each, key=lambda call: -weights[call]) if each[call] >= LEAST_CALL_SECONDS}


def with_calls(machine: Machine, case: Case, elsewhere: CallsElsewhere) -> Machine:
    """The machine with the seconds of the case's calls, and of those that it makes elsewhere."""
    own = weighty_calls(trace(job_of(case), case.batch, "cuda"), machine.device)
    weights = {**elsewhere.get(case.name, {}), **own}
    began = time.perf_counter()
    found = measure_calls(torch.device("cuda", 0), weights, machine.device.measured, CALLS_SECONDS)
    known = {**machine.device.measured, **found}
    missing = sum(weight for call, weight in own.items() if call not in known)
    print(
        f"{case.name}: measured {len(found)} calls in {time.perf_counter() - began:.1f} s; "
        f"those not measured make up {missing + 1 - sum(own.values()):.1%} of the pass",
        flush=True,
    )
    return replace(machine, device=replace(machine.device, measured=known))


def write_calls(file: Path) -> None:
    device = Machine.load("h200").device
    rows = []
    for case in CASES:
        weights = weighty_calls(trace(job_of(case), case.batch, "cuda"), device)
        rows.append({"case": case.name, "calls": {call: float(f"{weight:.3g}") for call, weight in weights.items()}})
        print(f"{case.name}: {len(weights)} calls, {sum(weights.values()):.1%} of the pass", flush=True)
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows, indent=1) + "\n")


def varied(case: Case, batch: Batch) -> Batch:
    """A batch like the sample, of random tokens, pixels and classes: zeros alone would all go to one expert and one embedding."""
    words = 256
    if case.kind != "demo":
        from transformers import AutoConfig

        words = getattr(AutoConfig.for_model(case.kind, **case.options), "vocab_size", 0)
    generator = torch.Generator().manual_seed(0)

    def draw(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype.is_floating_point:
            return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
        return torch.randint(words if tensor.dim() > 1 else 2, tensor.shape, dtype=tensor.dtype, generator=generator)

    return map_tensors(batch, draw)


def measure(case: Case, machine: Machine, ops: Path | None) -> dict[str, Any]:
    """Trains the case for a few steps, and forgets it."""
    job = job_of(case)
    batch = varied(case, job.sample)
    plan = anyfit.plan(job, machine)
    torch.cuda.empty_cache()
    run = anyfit.start(quickly_built(job), plan, machine)
    torch.cuda.empty_cache()  # what the weights took before they were placed
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_UP):
        run.step(batch)
    torch.cuda.synchronize()
    seconds = []
    for _ in range(TIMED):
        began = time.perf_counter()
        run.step(batch)
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    measured = {
        "allocated_bytes": torch.cuda.max_memory_allocated(),
        "reserved_bytes": torch.cuda.max_memory_reserved(),
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": seconds,
    }
    forecast = plan.forecast
    predicted = {
        "allocated_bytes": forecast.peak_bytes["device"],
        "reserved_bytes": forecast.reserved_bytes,
        "step_seconds": forecast.step_seconds,
    }
    if ops is not None:
        write_ops(run, batch, ops / f"{case.name}.json")
    run.close()
    return {"case": case.to_json(), "measured": measured, "predicted_then": predicted, **case.roughness}


class SameDraws(TorchFunctionMode):
    """Random numbers are copies of a few that were drawn once: billions of new ones would take minutes."""

    def __init__(self) -> None:
        super().__init__()
        self._drawn = torch.empty(2**20).uniform_(-1.0, 1.0)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.uniform_:
            low, high = _pair(args, kwargs, ("from", "to"), (0.0, 1.0))
            return self._fill(args[0]).mul_((high - low) / 2).add_((low + high) / 2)
        if func is Tensor.normal_:
            mean, deviation = _pair(args, kwargs, ("mean", "std"), (0.0, 1.0))
            return self._fill(args[0]).mul_(math.sqrt(3) * deviation).add_(mean)
        return args[0] if func is Tensor.erfinv_ else func(*args, **kwargs)  # by which uniform numbers become normal ones

    def _fill(self, tensor: Tensor) -> Tensor:
        flat = tensor.view(-1)  # parameters that are drawn are contiguous
        for part in flat.split(len(self._drawn)):
            part.copy_(self._drawn[: len(part)])
        return tensor


def _pair(args: Any, kwargs: Any, names: tuple[str, str], defaults: tuple[float, float]) -> tuple[float, float]:
    given = [*args[1:3], *defaults[len(args) - 1 :]]
    return tuple(float(kwargs.get(name, value)) for name, value in zip(names, given, strict=True))  # type: ignore[return-value]


def quickly_built(job: anyfit.Job) -> anyfit.Job:
    """The same job, whose model draws its weights as `SameDraws` does; norms, biases and buffers are the model's own.

    On the CPU, as a user's model is: weights made on the GPU would leave holes, and chunks placed there tie up whole segments.
    """

    def build() -> torch.nn.Module:
        with SameDraws():
            return job.build()

    return replace(job, model=build)


def write_ops(run: anyfit.Run, batch: Batch, file: Path) -> None:
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU], record_shapes=True) as profiler:
        run.step(batch)
        torch.cuda.synchronize()
    rows = [
        {"op": event.key, "shapes": str(event.input_shapes), "count": event.count, "us": event.self_device_time_total}
        for event in profiler.key_averages(group_by_input_shape=True)
        if event.self_device_time_total > 0
    ]
    rows.sort(key=lambda row: -row["us"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machine")
    parser.add_argument("--only", nargs="*")
    parser.add_argument("--ops", type=Path)
    parser.add_argument("--calls", type=Path, help="calls traced elsewhere, from --write-calls, to be measured as well")
    parser.add_argument("--write-calls", type=Path, help="write the calls of all cases to this file, and do nothing else")
    parser.add_argument("--seconds", type=float, default=1e9, help="start no further case after this long")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    if options.write_calls is not None:
        write_calls(options.write_calls)
        return
    if options.machine is None:
        parser.error("give --machine or --write-calls")
    machine = Machine.load(options.machine)
    elsewhere = {row["case"]: row["calls"] for row in json.loads(options.calls.read_text())} if options.calls else {}
    began, rows = time.time(), []
    for case in CASES:
        if options.only and case.name not in options.only:
            continue
        gc.collect()
        torch.cuda.empty_cache()
        torch._C._cuda_clearCublasWorkspaces()  # so that each case is like the first of its process
        if time.time() - began > options.seconds:
            print(f"{case.name}: no time left", flush=True)
            continue
        try:
            machine = with_calls(machine, case, elsewhere)
            row = measure(case, machine, options.ops)
        except (RuntimeError, ValueError, anyfit.NoPlan) as error:
            print(f"{case.name}: {type(error).__name__} {str(error)[:200]}", flush=True)
            continue
        rows.append(row)
        real, then = row["measured"], row["predicted_then"]
        off = {name: f"({then[name] / real[name] - 1:+6.1%})" for name in then}
        print(
            f"{case.name:22} step {real['step_seconds'] * 1e3:8.1f} ms {off['step_seconds']}  "
            f"allocated {real['allocated_bytes'] / 2**30:7.2f} GiB {off['allocated_bytes']}  "
            f"reserved {real['reserved_bytes'] / 2**30:7.2f} GiB {off['reserved_bytes']}",
            flush=True,
        )
        if options.record:
            record.write("profiler", {"rows": rows}, machine)


if __name__ == "__main__":
    main()
