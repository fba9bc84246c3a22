"""A plan put to the test: a few real steps timed, a few more recorded for what they are spent on, and a few beside plain PyTorch.

The measured time of the passes over that of the machine's rates is a pace, by which later forecasts for the model are scaled. It
is over the rates alone, whether or not the plan knew an earlier pace, so that checking again does not add up.
"""

from __future__ import annotations

import copy
import itertools
import statistics
import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import date
from typing import Any

import torch
from torch import nn

from anyfit.placing import place
from anyfit.values.check import Check
from anyfit.values.corrections import Correction, Pace
from anyfit.values.job import Job
from anyfit.values.machine import Machine
from anyfit.values.plan import TIERS, Plan
from anyfit.values.profile import Profile

from . import parity
from .engine import free
from .launch import Rank, device_for
from .rescue import LEAST_STEP
from .run import Run

WARM_UP = 3  # steps that are not timed: of the first ones memory is counted, and the optimizer's state made
OFFLOAD = ("fetch", "offload", "return")  # what the computation waits for, by the first word of its label; else it is an update


def check(job: Job, plan: Plan, profile: Profile, machine: Machine, steps: int, kinds: parity.Kinds) -> Check:
    """The forecast of a plan beside what it does on a machine. `profile` is the job's, with or without a pace."""
    device = device_for(machine, Rank(0, 1, 0))
    rows = job.rows(job.sample)
    if rows is not None and rows != job.batch_size:
        raise ValueError(f"check trains on Job(sample=), which has {rows} samples; give one of batch_size ({job.batch_size})")
    plan.refuse_for_another_job(job.batch_size, job.precision, "anyfit plan")
    if isinstance(job.model, nn.Module):
        job = replace(job, model=copy.deepcopy(job.model))  # the user's own stays as it is
    torch.manual_seed(job.seed)
    model = job.build()
    plan.refuse_unless_made_for(job.fingerprint(model), machine.fingerprint)
    case = parity.case_of(job, plan, profile, model, kinds)
    free(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)  # a probe may have held more
    with Run(job, plan, place(job, plan, model, device)) as run:
        ends = []
        for _ in range(WARM_UP + steps):
            run.step(job.sample)
            ends.append(time.perf_counter())  # a look at the metrics would have the device wait for the host
        recorder = run.record()
        while not recorder.is_done:
            run.step(job.sample)
        shares = shares_of(recorder.document(run.plan.model))
        metrics = run.metrics
        peaks = {tier: metrics.peak_bytes[tier] for tier in TIERS}
    del run, model
    del job  # where the model is the user's own, it holds what was placed
    free(device)
    step_seconds = statistics.median(end - start for start, end in itertools.pairwise(ends[WARM_UP - 1 :]))
    split = {part: share * step_seconds for part, share in shares.items()}
    pace = _pace(profile, plan, split["compute"])
    if _shares_cores(profile, plan):
        split = {}
    compared = case if isinstance(case, str) else parity.compare(case, device)
    return Check(
        model=plan.model or profile.model,
        machine=plan.machine or profile.machine,
        forecast=plan.forecast,
        step_seconds=step_seconds,
        clipped_share=metrics.clipped_share,
        split_seconds=split,
        peak_bytes=peaks,
        parity=None if isinstance(compared, str) else compared,
        no_parity=compared if isinstance(compared, str) else None,
        pace=pace if isinstance(pace, Pace) else None,
        no_pace=pace if isinstance(pace, str) else None,
        correction=_correction(profile, plan, peaks["device"]),
    )


def shares_of(document: Mapping[str, Any]) -> dict[str, float]:
    """The parts of a step in a timeline; what is neither an update nor a wait counts as compute."""
    events, metadata = document["traceEvents"], document["metadata"]
    row = next((each["tid"] for each in events if each["ph"] == "M" and each["args"].get("name") == "compute"), None)
    first, last = metadata["steps"]
    whole = metadata["step_seconds"] * (last - first + 1)
    own = sum(each["dur"] for each in events if each["ph"] == "X" and each["tid"] == row and each["cat"] in ("norm", "update"))
    shares = {"update": own / 1e6 / whole, "exposed update": 0.0, "exposed offload": 0.0}
    for kind, share in metadata["waits"].items():
        shares["exposed offload" if kind in OFFLOAD else "exposed update"] += share
    return {"compute": max(1 - sum(shares.values()), 0.0), **shares}


def _pace(profile: Profile, plan: Plan, measured_seconds: float) -> Pace | str:
    """The measured time of the passes over that of the machine's rates; or why it says nothing."""
    each = next((each for each in profile.passes if each.micro_batch == plan.micro_batch), None)
    if each is None:
        return f"micro-batches of {plan.micro_batch} were not profiled"
    if plan.compiled:
        return "compiled blocks were measured by themselves, which says nothing of the rates of others"
    if _shares_cores(profile, plan):
        return "on a CPU device, what is done beside the computation cannot be told apart from it"
    again, activations = 0.0, plan.activations
    for block in each.blocks:
        choice = activations.get(block.name, "keep")
        if choice in ("recompute", "selective") and choice in block.choices:
            again += block.choices[choice].seconds
    by_rates = profile.batch_size / each.micro_batch * (each.seconds + again) / (profile.pace.scale if profile.pace else 1.0)
    if not measured_seconds > 0:
        return "no computation was seen"
    return Pace(profile.model, profile.parameters, profile.precision, measured_seconds, by_rates, date.today().isoformat())


def _shares_cores(profile: Profile, plan: Plan) -> bool:
    """Whether lanes and the computation share the CPU's cores."""
    at_work = any(chunk.optimizer != "device" for chunk in plan.chunks) or "offload" in plan.activations.values()
    return at_work and not (profile.host is not None and profile.host.overlaps)


def _correction(profile: Profile, plan: Plan, peak_bytes: int) -> Correction | None:
    """Where the device held more than the forecast's band. Less is no reason to leave less room."""
    expected = plan.forecast.peak_bytes["device"]
    if not 0 < expected * (1 + plan.forecast.peak_error) < peak_bytes:
        return None
    error = peak_bytes / expected * (1 + LEAST_STEP) - 1
    return Correction(profile.model, "in a check", peak_bytes, expected, error, date.today().isoformat())
