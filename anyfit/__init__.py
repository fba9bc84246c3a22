"""anyfit: any model, fit: into the memory you have, and to your data.

    job = anyfit.Job(model, loss, optimizer, sample, batch_size)    what to train
    run = anyfit.start(job)                                         probe + plan + place
    loss = run.step(batch)                                          forward, backward, clipping, update

Nine public names: the values `Job`, `Machine`, `Plan`, `Run`, `NoPlan` and the verbs `probe`, `profile`, `plan`, `start`.
Each verb is one way through the house; torch is imported when one is called, not before.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .values.job import Job
from .values.machine import Machine
from .values.no_plan import NoPlan
from .values.plan import Plan

if TYPE_CHECKING:
    from .running.run import Run
    from .values.profile import Profile

__version__ = "0.2.0"
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


def plan(
    job: Job,
    machine: Machine | None = None,
    *,
    ranks: int | None = None,
    mesh: Mapping[str, int] | None = None,
    layout: str | None = None,
) -> Plan:
    """The best way to train the job on a machine, with its forecast and reasons; NoPlan when nothing fits. So many ranks train it
    together, each on a device of its own: all the machine has, when no number is given.

    mesh            the ranks as axes, such as {"data": 2, "tensor": 4}; what it does not name follows. Ranks along the tensor
                    axis hold the blocks of the model together, those along the data axis see samples of their own; along a
                    "pipeline" axis they hold other blocks each; {"pipeline": 1} leaves that axis out
    layout          how a tensor axis cuts the blocks: "data", "megatron", "sequence" or "ulysses"
    """
    from .meshing import Axes
    from .planning.meshes import search_meshes
    from .profiling import meshes_of
    from .showing.status import status_line

    axes = Axes.of(mesh, layout)
    with status_line():
        machine = machine or probe()
        return search_meshes(meshes_of(job, machine, machine.rank_grid(ranks), axes), asked=axes.is_asked)


def start(
    job: Job,
    plan: Plan | str | Path | None = None,
    machine: Machine | None = None,
    resume: str | Path | None = None,
    *,
    profile: Profile | None = None,
    mesh: Mapping[str, int] | None = None,
    layout: str | None = None,
    deterministic: bool = False,
    hang_seconds: float | None = None,
    disk_folder: str | Path | None = None,
    any_file_system: bool = False,
) -> Run:
    """Places the job's model as the plan says, and gives back a Run whose `step` trains it.

    plan            a plan, or a file with one: used as it is, to the end; made anew when not given, and made anew again by a run
                    that runs out of memory
    machine         what to plan for, with its limits; this machine, probed, when not given
    resume          a folder that `run.save` wrote: goes on exactly there, with whatever plan suits this machine; "latest" at its
                    end stands for the newest whole one of a folder of numbered ones, such as checkpoints/latest, and alone, under
                    `anyfit fit`, for the newest of the run's
    profile         what `anyfit.profile` gave, to plan with; made anew when not given
    mesh, layout    as for `anyfit.plan`; {"tensor": 1} leaves out both axes along which ranks hold the model together
    deterministic   two runs give the same bits, at some cost in speed; ops that cannot are refused
    hang_seconds    of several ranks, one that waits longer than this for the others ends the run, and says for what; ten minutes
    disk_folder     where optimizer state lies that the plan has on the disk, in a file without a name; the roomiest of the folder
                    for temporary files, /var/tmp, anyfit's cache and the current one. One in memory, or behind a network, is
                    refused, unless any_file_system is True

    Started by torchrun, by Slurm's srun or by `anyfit fit --gpus`, it is one of several ranks: each calls this, rank 0 plans for
    all, and each trains on its share of every batch.
    """
    from .meshing import Axes
    from .showing.status import status_line
    from .starting import Start
    from .values.disk_folder import DiskFolder

    axes, disk = Axes.of(mesh, layout), DiskFolder.asked(disk_folder, any_file_system=any_file_system)
    with status_line():
        return Start(job, plan, profile, axes, hang_seconds, disk).run(machine, resume, deterministic=deterministic)


def __getattr__(name: str) -> Any:
    if name == "Run":  # the one public name that needs torch
        from .running.run import Run

        return Run
    raise AttributeError(f"module 'anyfit' has no attribute {name!r}")
