"""A plan put to the test: a few real steps timed, and one step beside plain PyTorch.

Plain PyTorch here is a loop over the same micro-batches with torch's own clipping and the user's optimizer. In bf16 its
masters are kept whole in fp32, and rounded to bf16 by the split's own rule.
"""

from __future__ import annotations

import copy
import statistics
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.placing import place
from anyfit.values.job import Batch, Job
from anyfit.values.machine import Machine
from anyfit.values.plan import Plan

from .launch import Rank, device_for
from .run import Run


@dataclass(frozen=True)
class Check:
    step_seconds: float
    peak_bytes: int
    loss_difference: float  # relative
    weight_difference: float  # of the change that one step makes, normwise, the worst tensor
    agrees: bool

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def check(job: Job, plan: Plan, machine: Machine, steps: int) -> Check:
    device = device_for(machine, Rank(0, 1, 0))
    if isinstance(job.model, nn.Module):
        job = replace(job, model=copy.deepcopy(job.model))  # the user's own stays as it is
    torch.manual_seed(job.seed)
    model = job.build()
    plan.refuse_unless_made_for(job.fingerprint(model), machine.fingerprint)
    batch = _batch_of(job)
    plain = copy.deepcopy(model)
    run = Run(job, plan, place(job, plan, model, device))
    before = run.state_dict()
    state = torch.get_rng_state()
    loss = run.step(batch)
    torch.set_rng_state(state)
    plain_loss, plain_weights = _plain_step(job, plain, run.micro_batches, batch, device)
    difference = _largest_difference(before, run.state_dict(), plain_weights)
    seconds = []
    for _ in range(steps):
        run.step(batch)
        seconds.append(run.metrics.seconds)
    loss_difference = abs(float(loss) - plain_loss) / max(abs(plain_loss), 1e-12)
    tolerance = 1e-5 if job.precision == "fp32" else 1e-2
    found = Check(
        step_seconds=statistics.median(seconds[2:] or seconds),
        peak_bytes=run.metrics.peak_bytes["device"],
        loss_difference=loss_difference,
        weight_difference=difference,
        agrees=max(loss_difference, difference) <= tolerance,
    )
    run.close()
    return found


def _batch_of(job: Job) -> Batch:
    """The sample, which must be a whole batch to be trained on."""
    rows = job.rows(job.sample)
    if rows is not None and rows != job.batch_size:
        raise ValueError(f"check trains on Job(sample=), which has {rows} samples; give one of batch_size ({job.batch_size})")
    return job.sample


def _plain_step(
    job: Job, model: nn.Module, sizes: list[int], batch: Batch, device: torch.device
) -> tuple[float, dict[str, Tensor]]:
    model.to(device)
    dtypes = job.dtypes(model)
    optimizer, _ = job.build_optimizer(model)
    if job.scheduler is not None:
        job.scheduler(optimizer)  # sets the first learning rate
    masters = {name: p.detach().clone() for name, p in model.named_parameters() if dtypes[name] != p.dtype}
    for name, parameter in model.named_parameters():
        parameter.data = _round(parameter.data) if name in masters else parameter.data
    sums: dict[str, Tensor] = {}
    total = torch.zeros((), device=device)
    weight_sum = torch.zeros((), device=device)
    for part, rows in zip(job.cut(batch, sizes), sizes, strict=True):
        value, weight = job.evaluate(model, job.prepare(part, device))
        scaled = value * (rows / job.batch_size) if weight is None else value
        scaled.backward()
        total += scaled.detach().float()
        weight_sum += 0 if weight is None else weight
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                sums[name] = sums[name] + gradient if name in sums else gradient
                parameter.grad = None
    divisor = weight_sum if weight_sum > 0 else torch.ones((), device=device)
    for name, parameter in model.named_parameters():
        if name in masters:
            parameter.data = masters[name]
        parameter.grad = sums[name] / divisor if name in sums else None
    if job.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
    optimizer.step()
    return float(total / divisor), {name: p.detach().cpu() for name, p in model.named_parameters()}


def _round(exact: Tensor) -> Tensor:
    """fp32 to bf16, ties away from zero, as the split rounds."""
    bits = exact.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def _largest_difference(before: dict[str, Tensor], mine: dict[str, Tensor], plain: dict[str, Tensor]) -> float:
    """How far two updates of the same weights are apart, against the weight or the update, whichever is larger."""
    worst = 0.0
    for name, expected in plain.items():
        scale = max(float(expected.float().norm()), float((expected.float() - before[name].float()).norm()), 1e-12)
        worst = max(worst, float((mine[name].float() - expected.float()).norm()) / scale)
    return worst
