"""anyfit: any model, fit: into the memory you have, and to your data.

    job = anyfit.Job(model, loss, optimizer, sample, batch_size)    what to train
    run = anyfit.start(job)                                         probe + plan + place
    loss = run.step(batch)                                          forward, backward, clipping, update

Nine public names: the values `Job`, `Machine`, `Plan`, `Run`, `NoPlan` and the verbs `probe`, `profile`, `plan`, `start`.
Each verb is one way through the house; torch is imported when one is called, not before.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .values.job import Job
from .values.machine import Machine
from .values.plan import NoPlan, Plan

if TYPE_CHECKING:
    from .running.run import Run
    from .values.profile import Profile

__version__ = "0.1.0"
__all__ = ["Job", "Machine", "NoPlan", "Plan", "Run", "plan", "probe", "profile", "start"]


def probe(effort: Literal["quick", "full"] = "quick") -> Machine:
    """This machine, measured; a measurement made before on the same hardware and software is taken from the cache."""
    from .probing.cache import cached

    return cached(effort)


def profile(job: Job, machine: Machine | None = None, *, ranks: int | None = None) -> Profile:
    """Seconds and bytes of every block of the job on a machine, this one when none is given, as trained by so many ranks, each on
    a device of its own: by all it has, when no number is given. The model is run, on the CPU, only where its
    forward needs the values of tensors; on this machine's own GPU its ops are, one by one, the first time."""
    from .profiling import profile_of
    from .showing.status import status_line

    with status_line():
        machine = machine or probe()
        return profile_of(job, machine, machine.rank_grid(ranks))


def plan(job: Job, machine: Machine | None = None, *, ranks: int | None = None) -> Plan:
    """The best way to train the job on a machine, with its forecast and reasons; NoPlan when nothing fits. So many ranks train it
    together, each on a device of its own: all the machine has, when no number is given."""
    from .planning import search
    from .profiling import profile_of
    from .showing.status import status_line

    with status_line():
        machine = machine or probe()
        return search(profile_of(job, machine, machine.rank_grid(ranks), for_plan=True))


def start(
    job: Job,
    plan: Plan | str | Path | None = None,
    machine: Machine | None = None,
    resume: str | Path | None = None,
    *,
    profile: Profile | None = None,
    deterministic: bool = False,
    hang_seconds: float | None = None,
) -> Run:
    """Places the job's model as the plan says, and gives back a Run whose `step` trains it.

    plan            a plan, or a file with one: used as it is, to the end; made anew when not given, and made anew again by a run
                    that runs out of memory
    machine         what to plan for, with its limits; this machine, probed, when not given
    resume          a folder that `run.save` wrote: goes on exactly there, with whatever plan suits this machine; "latest" at its
                    end stands for the newest whole one of a folder of numbered ones, such as checkpoints/latest, and alone, under
                    `anyfit fit`, for the newest of the run's
    profile         what `anyfit.profile` gave, to plan with; made anew when not given
    deterministic   two runs give the same bits, at some cost in speed; ops that cannot are refused
    hang_seconds    of several ranks, one that waits longer than this for the others ends the run, and says for what; ten minutes

    Started by torchrun, by Slurm's srun or by `anyfit fit --gpus`, it is one of several ranks: each calls this, rank 0 plans for
    all, and each trains on its share of every batch.
    """
    from .showing.status import status_line
    from .starting import Start

    with status_line():
        return Start(job, plan, profile, hang_seconds).run(machine, resume, deterministic=deterministic)


def __getattr__(name: str) -> Any:
    if name == "Run":  # the one public name that needs torch
        from .running.run import Run

        return Run
    raise AttributeError(f"module 'anyfit' has no attribute {name!r}")
