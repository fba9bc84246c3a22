"""Out of device memory: where, how much, what was forecast, and what to change."""

from __future__ import annotations

import re
import traceback
from dataclasses import dataclass
from types import FrameType, TracebackType

import torch
from torch import nn

from anyfit.values.plan import Plan
from anyfit.values.plan_rows import memory_name
from anyfit.values.units import parse_bytes, show_bytes

# What CUDA's libraries say where torch's own allocator was not asked.
IN_WORDS = ("CUDA out of memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")
ASKED = re.compile(r"Tried to allocate ([\d.]+ ?[KMGT]?i?B)", re.IGNORECASE)  # as torch says it


@dataclass(frozen=True)
class Shortfall:
    """Where memory ended: the bytes needed there, at least, and how many there were."""

    where: str
    needed_bytes: int
    there_bytes: int


class OverLimitError(MemoryError):
    """More device memory would be held than the plan allows, on a device that does not count by itself."""

    def __init__(self, plan: Plan, shortfall: Shortfall) -> None:
        super().__init__(shortage(plan, shortfall.needed_bytes, shortfall.where))
        self.shortfall = shortfall


def is_about_memory(error: BaseException) -> bool:
    """Whether it says that device memory ran out."""
    if isinstance(error, OverLimitError | torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in IN_WORDS)


def shortfall_of(error: BaseException, plan: Plan, model: nn.Module, device: torch.device, context_bytes: int) -> Shortfall:
    """What an error about device memory says, while the step's memory is still held. CUDA's context counts as needed."""
    if isinstance(error, OverLimitError):
        return error.shortfall
    free, _total = torch.cuda.mem_get_info(device)
    held = torch.cuda.memory_reserved(device) + context_bytes  # the allocator has given back what it could
    there = min(plan.limit_bytes["device"], held + free)
    asked = ASKED.search(str(error))
    needed = max(held + (parse_bytes(asked[1]) if asked else 0), there + 1)
    return Shortfall(module_at(model, error.__traceback__), needed, there)


def shortage(plan: Plan, needed_bytes: int, where: str) -> str:
    limit, forecast = plan.limit_bytes["device"], plan.forecast.peak_bytes["device"]
    expected = f"the plan expected {show_bytes(forecast)} at its peak" if forecast else "the plan was written by hand"
    memory = memory_name("device", plan.device_kind)
    smaller = "a smaller micro_batch" if plan.micro_batch > 1 else "shorter samples"
    return (
        f"{show_bytes(needed_bytes)} of {memory} are needed {where}, and {show_bytes(limit)} are allowed; {expected}. "
        f"What takes less: {smaller}, recomputed blocks, or more of the model's state on the host"
    )


def module_at(model: nn.Module, place: TracebackType | FrameType | None) -> str:
    """The innermost module of the model at work, from a traceback or a frame."""
    names = {id(module): name for name, module in model.named_modules()}
    outwards = traceback.walk_stack(place) if isinstance(place, FrameType) else reversed([*traceback.walk_tb(place)])
    for frame, _line in outwards:
        name = names.get(id(frame.f_locals.get("self")))
        if name:
            return f"in {name}"
    return "in backward or the update, outside every module's forward"
