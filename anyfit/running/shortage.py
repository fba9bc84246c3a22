"""Out of device memory: where, how much, what was forecast, and what to change."""

from __future__ import annotations

from types import FrameType, TracebackType

from torch import nn

from anyfit.values.plan import Plan
from anyfit.values.units import show_bytes


def shortage(plan: Plan, needed_bytes: int, where: str) -> str:
    """What an error about memory tells."""
    limit, forecast = plan.limit_bytes["device"], plan.forecast.peak_bytes["device"]
    expected = f"the plan expected {show_bytes(forecast)} at its peak" if forecast else "the plan was written by hand"
    smaller = "a smaller micro_batch" if plan.micro_batch > 1 else "shorter samples"
    return (
        f"{show_bytes(needed_bytes)} of device memory are needed {where}, and {show_bytes(limit)} are allowed; {expected}. "
        f"What takes less: {smaller}, recomputed blocks, or more of the model's state on the host"
    )


def module_at(model: nn.Module, place: TracebackType | FrameType | None) -> str:
    """The innermost module of the model at work, from a traceback or a frame."""
    names = {id(module): name for name, module in model.named_modules()}
    frames = []
    if isinstance(place, FrameType):
        while place is not None:
            frames.append(place)
            place = place.f_back
    else:
        while place is not None:
            frames.insert(0, place.tb_frame)
            place = place.tb_next
    for frame in frames:
        name = names.get(id(frame.f_locals.get("self")))
        if name:
            return f"in {name}"
    return "in backward or the update, outside every module's forward"
