"""What the last step did. Numbers still on the device are fetched only when somebody looks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class Metrics:
    step: int  # steps done, skipped ones included
    loss: float
    gradient_norm: float  # before clipping
    learning_rates: tuple[float, ...]  # a parameter group each
    seconds: float  # from the end of the step before to the end of this one
    samples_per_second: float
    tokens_per_second: float
    compute_share: float  # of the device's best matmul rate, by the plan's count of FLOPs
    peak_bytes: Mapping[str, int]  # by tier, the largest so far
    skipped: int  # steps left out so far because a gradient was not finite
    rescues: int  # times so far that memory ended and the run was planned anew

    def to_json(self) -> dict[str, Any]:
        return asdict(self)
