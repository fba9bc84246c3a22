"""Corrections: which models needed more device memory than was forecast for them. Plans made later leave that much more room."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Self

from .record import Record
from .units import show_bytes


@dataclass(frozen=True)
class Correction:
    """Of the forecasts for one model, after a run of it ran out of memory."""

    model: str
    where: str  # memory ended
    needed_bytes: int  # there, at least
    expected_bytes: int  # by the plan's forecast, in all
    error: float  # relative, of what is forecast to be reserved: the margin from then on
    date: str

    def __post_init__(self) -> None:
        if not 0 < self.expected_bytes < self.needed_bytes:
            raise ValueError(f"expected_bytes is {self.expected_bytes} and needed_bytes {self.needed_bytes}; more was needed")
        if not self.error > 0:
            raise ValueError(f"error is {self.error}; it must be positive")

    @property
    def why(self) -> str:
        return (
            f"on {self.date} a run needed {show_bytes(self.needed_bytes)} {self.where} where {show_bytes(self.expected_bytes)} "
            "were forecast; anyfit probe forgets it"
        )


@dataclass(frozen=True)
class Corrections(Record):
    """All that is known of one machine, a model each."""

    kind: ClassVar[str] = "corrections"
    version: ClassVar[int] = 1

    machine: str  # fingerprint
    models: tuple[Correction, ...] = ()

    def of(self, model: str) -> Correction | None:
        return next((each for each in self.models if each.model == model), None)

    def with_one(self, correction: Correction) -> Self:
        """With this one in place of what was known of its model."""
        others = [each for each in self.models if each.model != correction.model]
        return replace(self, models=(*others, correction))
