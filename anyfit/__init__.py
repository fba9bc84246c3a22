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
    from .running.rescue import Rescue
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
    known = corrections_of(machine)
    return made.corrected(known.of(made.model)).paced(known.pace_of(made.model, made.parameters, made.precision))


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
    profile: Profile | None = None,
    deterministic: bool = False,
) -> Run:
    """Places the job's model as the plan says, and gives back a Run whose `step` trains it.

    plan            a plan, or a file with one: used as it is, to the end; made anew when not given, and made anew again by a run
                    that runs out of memory
    machine         what to plan for, with its limits; this machine, probed, when not given
    resume          a folder that `run.save` wrote: goes on exactly there
    profile         what `anyfit.profile` gave, to plan with; made anew when not given
    deterministic   two runs give the same bits, at some cost in speed; ops that cannot are refused
    """
    import torch

    from .placing import place
    from .planning import search
    from .probing.host import left_memory_bytes
    from .running import launch as launching
    from .running.run import Run
    from .running.watch import HostWatch

    if plan is not None and profile is not None:
        raise ValueError("anyfit.start takes a plan, or a profile to make one from; leave one of them out")
    rank = launching.Rank.from_environment()
    rank.refuse_several()
    launch = launching.current()
    is_given = plan is not None or (launch is not None and launch.plan is not None)
    if launch is not None:  # started by `anyfit fit`
        machine = machine or probe().with_limits(**launch.limits)
        plan = plan or launch.plan_for(machine)
        resume = resume or (launch.newest_checkpoint() if launch.resume else None)
        deterministic = deterministic or launch.deterministic
    machine = machine or probe()
    if deterministic:
        launching.make_deterministic()
    if profile is None and (plan is None or (not is_given and isinstance(job.model, torch.nn.Module))):
        profile = _profile(job, machine)  # of a model that is the user's own, before it is placed
    if plan is None:
        assert profile is not None
        plan = search(profile)
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
    placed = place(job, plan, model, device)
    rescue = None if is_given else _rescue(job, machine, profile)
    run = Run(job, plan, placed, rescue, HostWatch(left_memory_bytes, plan.limit_bytes["host"]))
    if resume is not None:
        run.resume(resume)
    if launch is not None:
        launch.follow(run, machine)
    return run


_profile = profile  # which `start` has an argument of the same name for


def _rescue(job: Job, machine: Machine, known: Profile | None) -> Rescue:
    """What a run may do whose plan the planner made, when memory ends."""
    from .planning import search
    from .planning.offload import PROCESS_BYTES
    from .probing.cache import keep_correction
    from .running.rescue import Rescue

    return Rescue(
        profile=lambda: known or profile(job, machine),
        search=search,
        keep=lambda correction: keep_correction(machine, correction),
        context_bytes=int(machine.device.context_bytes.value),
        process_bytes=PROCESS_BYTES if machine.device.kind == "cuda" else 0,
    )


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
