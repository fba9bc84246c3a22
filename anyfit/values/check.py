"""Check: what a plan forecasts beside what a few real steps of it took, and how far those are from plain PyTorch's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from .corrections import Correction, Pace
from .plan import Forecast, TierName
from .record import Record


@dataclass(frozen=True)
class Parity:
    """A few steps as the plan places them, beside the same in plain PyTorch."""

    compared: str  # the whole model, or what was cut out of it
    steps: int
    loss_difference: float  # relative, the largest
    weight_difference: float  # of the weights or their change, whichever is larger; of the worst tensor that plain steps repeat
    agrees: bool  # no further apart than rounding explains


@dataclass(frozen=True)
class Check(Record):
    kind: ClassVar[str] = "check"
    version: ClassVar[int] = 2

    model: str
    machine: str
    forecast: Forecast
    step_seconds: float  # the median
    clipped_share: float  # of the steps that were made
    # As in a forecast, but that what is recomputed in backward is part of compute; nothing where it cannot be told apart.
    split_seconds: Mapping[str, float]
    peak_bytes: Mapping[TierName, int]
    parity: Parity | None
    no_parity: str | None  # why nothing was compared
    pace: Pace | None  # what later forecasts of the passes are scaled by
    no_pace: str | None  # why they are not
    correction: Correction | None  # of the memory, where more was needed than the forecast's band has
