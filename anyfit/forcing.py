"""What a user forces of a plan (values/forced.py): the plan that keeps to it, and what the planner would have done instead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from . import asking
from .asking import Question, Traced
from .meshing import Axes
from .planning.forcing import held_to
from .planning.meshes import ASKED, MeshChoice, search_meshes
from .profiling import meshes_of
from .values.forced import Forced
from .values.job import Job
from .values.machine import Machine
from .values.no_plan import NoPlan
from .values.plan import Alternative, Decision, Plan
from .values.units import show_bytes, show_seconds


def forced_plan(job: Job, machine: Machine, forced: Forced, axes: Axes | None = None, ranks: int | None = None) -> Plan:
    """The best plan of those that keep to what is forced, and to the axes that are asked for: ValueError where there can be none,
    NoPlan where none fits. So many ranks: all the machine has, when no number is given."""
    axes = axes or Axes()
    refuse(forced, axes)
    meshes = meshes_of(forced_job(job, forced), machine, machine.rank_grid(ranks), axes)
    return as_asked(search_meshes(kept_to(meshes, forced), asked=axes.is_asked), forced)


DECIDED = {
    "schedule": "schedule",
    "chunks": "schedule",
    "micro_batch": "micro-batch",
    "activations": "activations",
    "shard": "ranks",
}


def as_asked(plan: Plan, forced: Forced) -> Plan:
    """With decisions that say so."""
    names = {name for field, name in DECIDED.items() if getattr(forced, field) is not None}
    return replace(plan, decisions=tuple(replace(each, why=ASKED) if each.name in names else each for each in plan.decisions))


def planned(question: Question, machine: Machine, forced: Forced) -> Plan:
    """What `anyfit plan` answers; where something is forced, beside what the planner would have done."""
    if not forced.is_asked:
        return asking.planned(question, machine)
    traced = question.traced_first()
    kept = Traced(forced_job(traced.job, forced), traced.name, question.axes).meshes(machine)
    made = as_asked(search_meshes(kept_to(kept, forced), asked=question.axes.is_asked), forced)
    try:
        free = search_meshes(Traced(traced.job, traced.name, Axes()).meshes(machine))
    except (NoPlan, ValueError) as none:
        return beside_none(made, str(none), forced, question.axes)
    return beside(made, free, forced, question.axes)


def forced_job(job: Job, forced: Forced) -> Job:
    """Traced with the micro-batch alone that is forced."""
    if forced.micro_batch is None:
        return job
    if job.micro_batch not in (None, forced.micro_batch):
        raise ValueError(
            f"micro-batch {forced.micro_batch}: the job has Job(micro_batch={job.micro_batch}); leave one of them out"
        )
    return replace(job, micro_batch=forced.micro_batch)


def refuse(forced: Forced, axes: Axes) -> None:
    """What cannot be honoured, whatever the profile."""
    asked = next((name for name in ("schedule", "chunks") if getattr(forced, name) is not None), None)
    if asked is not None and not axes.has_stages:
        raise ValueError(f"{asked} {getattr(forced, asked)}: stages are along a pipeline axis; ask for one, --mesh pipeline=2")


def kept_to(meshes: Sequence[MeshChoice], forced: Forced) -> list[MeshChoice]:
    """With nothing left to decide of what is forced."""
    return [_kept_to(each, forced) for each in meshes]


def _kept_to(mesh: MeshChoice, forced: Forced) -> MeshChoice:
    kept = mesh.changed(partial(held_to, forced=forced))
    pipeline = kept.pipeline
    if pipeline is None:
        return kept
    return replace(kept, pipeline=lambda: replace(pipeline(), stages_a_rank=forced.stages_a_rank))


def beside(plan: Plan, free: Plan, forced: Forced, axes: Axes) -> Plan:
    """With the decision `forced`: what the planner would have done, and what the difference costs."""
    mine, other = plan.forecast, free.forecast
    later, room = mine.mean_step_seconds - other.mean_step_seconds, other.needed_bytes - mine.needed_bytes
    price = f"{show_seconds(abs(later))} {'less' if later >= 0 else 'more'} a step ({-later / mine.mean_step_seconds:+.0%})"
    memory = f"{show_bytes(abs(room))} {'more' if room >= 0 else 'less'} memory"
    said = said_of(free)
    decision = Decision("forced", _choice(forced, axes), f"the planner would have taken {said}: {price}, {memory}")
    weighed = Alternative("forced", said, other.mean_step_seconds, other.needed_bytes, fits=True)
    return replace(plan, decisions=(decision, *plan.decisions), alternatives=(weighed, *plan.alternatives))


def beside_none(plan: Plan, why: str, forced: Forced, axes: Axes) -> Plan:
    """Where the planner would have found nothing by itself."""
    decision = Decision("forced", _choice(forced, axes), f"the planner has no plan of its own: {why.splitlines()[0]}")
    return replace(plan, decisions=(decision, *plan.decisions))


def _choice(forced: Forced, axes: Axes) -> str:
    asked = ", ".join(f"{name}={length}" for name, length in axes.lengths_asked.items())
    return ", ".join(filter(None, (f"mesh {asked}" if asked else "", forced.said)))


def said_of(plan: Plan) -> str:
    """In a line: its mesh, and what of its decisions a user may force."""
    axes = " x ".join(f"{length} {name}" for name, length in plan.mesh.items() if length > 1 or name == "data")
    known = {each.name: each.choice for each in plan.decisions}
    names = ("schedule", "ranks", "activations", "micro-batch")
    return "; ".join((axes, *(known[name].partition(": ")[2] or known[name] for name in names if name in known)))
