"""What do planned steps with state on the disk take, beside their forecast?

    python -m benchmarks.disk_planned [--width 1024] [--layers 12] [--steps 6] [--record]

The demo's GPT in bf16 with AdamW and clipping, on the CPU of this machine, which is probed first. It may take so little memory as
device that part of its state has to go to the host, and then less and less of the host, with a disk that is allowed. For each, as
`anyfit.start` plans it: the forecast of a step and of each tier's peak, and medians and peaks of real steps; and whether the
weights after them are those of the first to the bit.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import anyfit
from anyfit.demo import GPT
from anyfit.probing.probe import measure
from anyfit.running.run import Run

from . import record

DEVICE_SHARE = 0.35  # of what all takes
HOST_SHARES = (1.0, 0.8, 0.65)  # of what the host takes without a disk
ROWS, LENGTH = 2, 64


def job(width: int, layers: int) -> anyfit.Job:
    def loss(model: torch.nn.Module, batch: torch.Tensor) -> torch.Tensor:
        logits = model(batch[:, :-1])
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), batch[:, 1:].flatten())

    return anyfit.Job(
        model=lambda: GPT(width=width, layers=layers, heads=width // 64, length=LENGTH),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=torch.zeros(ROWS, LENGTH + 1, dtype=torch.long),
        batch_size=ROWS,
        precision="bf16",
        clip_norm=1.0,
    )


def batches(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(0, 256, (ROWS, LENGTH + 1), generator=generator) for _ in range(count)]


def timed(run: Run, steps: int) -> list[float]:
    """Seconds of each step, the first left out: it makes no state, but reads none either."""
    found = []
    for number, batch in enumerate(batches(steps + 1)):
        began = time.perf_counter()
        run.step(batch)
        if number == steps:
            run._engine.placed.settle()
        found.append(time.perf_counter() - began)
    return found[1:]


def row(job: anyfit.Job, machine: anyfit.Machine, steps: int) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with anyfit.start(job, machine=machine) as run:
        seconds, forecast, plan = timed(run, steps), run.plan.forecast, run.plan
        measured, weights = dict(run.metrics.peak_bytes), run.state_dict()
    return {
        "limit_bytes": dict(plan.limit_bytes),
        "chunks": len(plan.chunks),
        "chunks_on_disk": sum(each.optimizer == "disk" for each in plan.chunks),
        "accumulation": plan.accumulation,
        "forecast": {
            "step_seconds": forecast.step_seconds,
            "step_error": forecast.step_error,
            "split_seconds": dict(forecast.split_seconds),
            "peak_bytes": dict(forecast.peak_bytes),
        },
        "step_seconds": statistics.median(seconds),
        "step_seconds_all": seconds,
        "peak_bytes": measured,
        "off": statistics.median(seconds) / forecast.step_seconds - 1,
    }, weights


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--record", action="store_true")
    asked = parser.parse_args()
    made = job(asked.width, asked.layers)
    machine = measure("quick")
    whole = anyfit.plan(made, machine).forecast.needed_bytes
    machine = machine.with_limits(device_memory=int(DEVICE_SHARE * whole))
    host = anyfit.plan(made, machine).forecast.peak_bytes["host"]
    rows, first = [], None
    for share in HOST_SHARES:
        limited = machine.with_limits(host_memory=int(share * 1.01 * host), disk="40GiB")
        found, weights = row(made, limited, asked.steps)
        first = first or weights
        found["same_bits"] = all(torch.equal(each, first[name]) for name, each in weights.items())
        rows.append({"host_share": share, **found})
        forecast = found["forecast"]
        print(
            f"{found['chunks_on_disk']} of {found['chunks']} chunks on the disk: {found['step_seconds']:.2f} s a step, forecast "
            f"{forecast['step_seconds']:.2f} s ({found['off']:+.0%}); bits {'the same' if found['same_bits'] else 'DIFFERENT'}"
        )
        for tier, size in found["peak_bytes"].items():
            print(f"  {tier}: {size / 2**20:.1f} MiB, forecast {forecast['peak_bytes'][tier] / 2**20:.1f} MiB")
    disk = machine.disk
    assert disk is not None
    rates = {way: getattr(disk, way).peak for way in ("read", "write", "both")}
    if asked.record:
        print(record.write("disk-planned", {"disk_bytes_per_second": rates, "rows": rows}))


if __name__ == "__main__":
    main()
