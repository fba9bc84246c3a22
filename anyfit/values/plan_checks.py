"""What a plan's mesh, stages and chunks have to be, so that a run can follow it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .mesh import AXES
from .record import nearest
from .schedule import refuse

if TYPE_CHECKING:
    from .plan import Plan

BUILT = ("data", "tensor", "pipeline")


def refuse_mesh(plan: Plan) -> None:
    for name, size in plan.mesh.items():
        if name not in AXES:
            raise ValueError(f"mesh: unknown axis {name!r}" + nearest(name, AXES))
        if size < 1 or (size > 1 and name not in BUILT):
            raise ValueError(f"mesh: {name} is {size}; this version has a data, a tensor and a pipeline axis; every other is 1")
    for held in (*plan.cut, *plan.tables):
        if plan.mesh.get("tensor", 1) == 1:
            raise ValueError(f"the plan cuts {held}, and its mesh has no tensor axis to cut it over")
    if plan.pipeline > 1:
        _refuse_pipeline(plan)


def _refuse_pipeline(plan: Plan) -> None:
    refuse(plan.pipeline, len(plan.stages), plan.accumulation)
    reasons = (
        (plan.replayed, "it replays blocks, whose recordings share memory that several micro-batches in flight need at once"),
        (any(each.speculates for each in plan.chunks), "chunks speculate: an update begins when the norm of all stages is known"),
        (plan.tables, "a tensor axis divides the rows of tables"),
    )
    for is_so, why in reasons:
        if is_so:
            raise ValueError(f"the mesh has a pipeline axis of {plan.pipeline}, and {why}; this version does not do both")


def refuse_chunks(plan: Plan) -> None:
    for each in set(plan.chunks):
        if plan.replicas % each.optimizer_shards:
            raise ValueError(f"optimizer_shards is {each.optimizer_shards}; it must divide the {plan.replicas} {plan.data_ranks}")
    for count, least in (("chunk_bytes", 1), ("slots", 0), ("prefetch", 0)):
        if getattr(plan, count) < least:
            raise ValueError(f"{count} is {getattr(plan, count)}; it must be at least {least}")
    if plan.slots == 0 and any(each.weights == "host" or each.weight_shards > 1 for each in plan.chunks):
        raise ValueError("slots is 0; weights on the host, and those that ranks divide, pass through at least one device slot")
