"""How long does one rank of a tensor axis compute, and as forecast?

    python -m benchmarks.cut_rank llama-8b --tensor 4 --batch 4 --seq 2048 [--layout megatron] [--record]

One process has the parts of one rank and runs the generated code of its cut blocks, forward and backward of one pass, as it would
among the others. What these would send is stood in for by copies of its own data: of the right shapes, and finite. So all that is
measured is computing, and so is the forecast beside it, which is made with links that take no time. The ops of a cut block are
smaller than those of the model, and nobody has timed them: they are priced on the machine's curves.

    gpt2-small --tensor 2 --batch 1 --seq 64    on a CPU, to see it run
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor

import anyfit
from anyfit.layouts.axis import Axis
from anyfit.layouts.parts import joined
from anyfit.meshing import Axes
from anyfit.placing.cutting import cut_model, parted_by
from anyfit.planning.meshes import search_meshes
from anyfit.profiling import meshes_of
from anyfit.starting import solver_for
from anyfit.targets import job_for
from anyfit.values.calibration import Figure
from anyfit.values.cuts import Cut
from anyfit.values.machine import Collective, Machine
from anyfit.values.plan import Plan

from . import record
from .profiler import quickly_built

WARM_UP, TIMED = 3, 7
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Alone(Axis):
    """The first rank of several that are not there: each is taken to have what it has."""

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.clone(memory_format=torch.contiguous_format)

    def stacked(self, x: Tensor) -> Tensor:
        return x.contiguous().expand(self.n, *x.shape)

    def reduce_scatter(self, x: Tensor, wanted: Cut) -> Tensor:
        return self._parts(x, wanted)[self.rank].clone()

    def all_to_all(self, x: Tensor, held: Cut, wanted: Cut) -> Tensor:
        return joined(self._parts(x, wanted).unbind(), held)

    def all_of(self, mine: Any) -> Sequence[Any]:
        return [mine] * self.n


@dataclass(frozen=True)
class OneOfSeveral:
    """As much of `Ranks` as cutting a model asks for."""

    axis: Axis
    index: int = 0

    def broadcast(self, tensor: Tensor) -> None:
        """It has what the first rank has."""


def with_free_links(machine: Machine, n: int) -> Machine:
    nothing, endless = Figure(1e-12, 0.0, "assumed"), Figure(1e18, 0.0, "assumed")
    return replace(machine, collectives=tuple(Collective(cast(Any, name), "node", n, nothing, endless) for name in COLLECTIVES))


def pass_seconds(job: anyfit.Job, plan: Plan, machine: Machine, device: torch.device) -> float:
    """Of forward and backward of one micro-batch, by this device's clock."""
    model = quickly_built(job).build()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    ranks: Any = OneOfSeveral(Alone(plan.mesh["tensor"]))
    parted, solver = parted_by(plan, model, ranks), solver_for(plan, machine)
    cut = cut_model(model, optimizer, plan, parted, ranks, torch.device("cpu"), solver)
    model.to(device, torch.bfloat16 if job.precision == "bf16" else torch.float32).train()
    cut.divide(dict(model.named_parameters()))
    cut.install()
    cut.close_borders()
    part = job.prepare(job.cut(job.sample, [plan.micro_batch])[0], device)
    seconds = []
    for number in range(WARM_UP + TIMED):
        _wait(device)
        began = time.perf_counter()
        loss, weight = job.evaluate(model, part)
        (loss if weight is None else loss / weight).backward()
        _wait(device)
        assert loss.isfinite()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
        model.zero_grad()
    return statistics.median(seconds)


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main(given: Sequence[str] | None = None) -> dict[str, Any]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target")
    parser.add_argument("--tensor", type=int, default=4)
    parser.add_argument("--batch", type=int)
    parser.add_argument("--seq", type=int)
    parser.add_argument("--layout", default="megatron")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args(given)
    job = job_for(options.target, batch=options.batch, seq=options.seq)
    job = replace(job, micro_batch=job.batch_size, compile=False)
    machine = anyfit.probe()
    axes = Axes(tensor=options.tensor, layout=options.layout)
    linked = with_free_links(machine, options.tensor)
    (choice,) = meshes_of(job, linked, (options.tensor, 1), axes)
    plan, profile = search_meshes([choice], asked=True), choice.make()
    forecast = sum(each.device_seconds for each in profile.passes[0].segments)
    measured = pass_seconds(job, plan, linked, torch.device(machine.device.kind))
    row = {
        "target": options.target,
        "tensor": options.tensor,
        "layout": choice.layout,
        "blocks": choice.blocks,
        "measured_seconds": measured,
        "forecast_seconds": forecast,
    }
    print(
        f"{options.target}, one rank of {options.tensor}, {choice.layouts} in {choice.blocks} blocks: a pass takes "
        f"{measured * 1e3:.1f} ms, forecast {forecast * 1e3:.1f} ({forecast / measured - 1:+.1%})"
    )
    if options.record:
        print(record.write("cut-rank", row, machine))
    return row


if __name__ == "__main__":
    main()
