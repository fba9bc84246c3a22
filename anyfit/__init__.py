"""anyfit: any model, fit: into the memory you have, and to your data.

    job = anyfit.Job(model, loss, optimizer, sample, batch_size)    what to train
    run = anyfit.start(job)                                         probe + plan + place
    loss = run.step(batch)                                          forward, backward, clipping, update

Nine public names: the values `Job`, `Machine`, `Plan`, `Run`, `NoPlan` and the verbs `probe`, `profile`, `plan`, `start`.
Each verb is one way through the house; torch is imported when one is called, not before.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .values.job import Job
from .values.machine import Machine
from .values.plan import NoPlan, Plan

if TYPE_CHECKING:
    from .running.run import Run
    from .values.graph import Graph
    from .values.profile import Profile

__version__ = "0.1.0"
__all__ = ["Job", "Machine", "NoPlan", "Plan", "Run", "plan", "probe", "profile", "start"]

CALLS_SECONDS = 8.0  # for timing the ops of a model that is planned for this machine's GPU


def probe(effort: Literal["quick", "full"] = "quick") -> Machine:
    """This machine, measured; a measurement made before on the same hardware and software is taken from the cache."""
    from .probing.cache import cached

    return cached(effort)


def profile(job: Job, machine: Machine | None = None) -> Profile:
    """Seconds and bytes of every block of the job on a machine, this one when none is given. The model is not run, but with
    Job(real_run=True); on this machine's own GPU its ops are, one by one, the first time."""
    machine = machine or probe()
    return profiled(traced(job, machine.device.kind), machine, job.batch_size)


def traced(job: Job, kind: Literal["cpu", "cuda"]) -> list[Graph]:
    """The job's passes on a device of this kind, one for every micro-batch worth considering."""
    from .probing.host import free_memory_bytes
    from .tracing import trace_all

    return trace_all(job, _micro_batches(job), kind, free_memory_bytes())


def profiled(graphs: Sequence[Graph], machine: Machine, batch_size: int) -> Profile:
    """What these passes cost on a machine, with what runs on it have shown."""
    from .costing import cost
    from .probing.cache import corrections_of

    made = cost(graphs, with_calls(machine, graphs), batch_size)
    return made.corrected(corrections_of(machine).of(made.model))


def with_calls(machine: Machine, graphs: Sequence[Graph]) -> Machine:
    """The machine with the seconds of the calls that the graphs make, where it is this one and has a GPU: measured once."""
    from .costing.times import call_weights
    from .probing import cache

    said: list[str] = []

    def say_once(_op: str, _done: float) -> None:
        if not said:
            said.append(f"timing the ops of {graphs[0].model} on {machine.device.name}, once: at most {CALLS_SECONDS:.0f} s")
            print(said[0], file=sys.stderr, flush=True)

    return cache.with_calls(machine, call_weights(graphs, machine.device), CALLS_SECONDS, say_once)


def plan(job: Job, machine: Machine | None = None) -> Plan:
    """The best way to train the job on a machine, with its forecast and reasons; NoPlan when nothing fits."""
    from .planning import search

    return search(profile(job, machine))


def start(
    job: Job,
    plan: Plan | str | Path | None = None,
    machine: Machine | None = None,
    resume: str | Path | None = None,
    *,
    deterministic: bool = False,
) -> Run:
    """Places the job's model as the plan says, and gives back a Run whose `step` trains it.

    plan            a plan, or a file with one; made anew when not given
    machine         what to plan for, with its limits; this machine, probed, when not given
    resume          a folder that `run.save` wrote: goes on exactly there
    deterministic   two runs give the same bits, at some cost in speed; ops that cannot are refused
    """
    import torch

    from .placing import place
    from .planning import search
    from .running import launch as launching
    from .running.run import Run

    rank = launching.Rank.from_environment()
    rank.refuse_several()
    launch = launching.current()
    if launch is not None:  # started by `anyfit fit`
        machine = machine or probe().with_limits(**launch.limits)
        plan = plan or launch.plan_for(machine)
        resume = resume or (launch.newest_checkpoint() if launch.resume else None)
        deterministic = deterministic or launch.deterministic
    machine = machine or probe()
    if deterministic:
        launching.make_deterministic()
    if plan is None:
        plan = search(profile(job, machine))
    elif not isinstance(plan, Plan):
        plan = Plan.load(plan)
    if plan.batch_size != job.batch_size or plan.precision != job.precision:
        raise ValueError(
            f"the plan is for batch_size {plan.batch_size} in {plan.precision}, the job is {job.batch_size} in {job.precision}; "
            "plan again with anyfit.plan(job)"
        )
    if job.micro_batch not in (None, plan.micro_batch):
        raise ValueError(f"Job(micro_batch={job.micro_batch}), but the plan's micro_batch is {plan.micro_batch}")
    device = launching.device_for(machine, rank)
    torch.manual_seed(job.seed)
    model = job.build()
    plan.refuse_unless_made_for(job.fingerprint(model), machine.fingerprint)
    run = Run(job, plan, place(job, plan, model, device))
    if resume is not None:
        run.resume(resume)
    if launch is not None:
        launch.follow(run, machine)
    return run


def _micro_batches(job: Job) -> list[int]:
    """The sizes worth a trace: the one asked for, or the whole batch and its halves down to a single sample."""
    if job.micro_batch is not None:
        return [job.micro_batch]
    sizes = [job.batch_size]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def __getattr__(name: str) -> Any:
    if name == "Run":  # the one public name that needs torch
        from .running.run import Run

        return Run
    raise AttributeError(f"module 'anyfit' has no attribute {name!r}")
