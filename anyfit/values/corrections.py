"""Corrections: which models needed more device memory than was forecast for them, how long their passes really take, and how many
of their steps are clipped. Plans made later leave that much more room, forecast that much time, and weigh clipped steps so."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, Self

from .record import Record
from .units import show_bytes, show_seconds

ASSUMED_STEPS = 100  # half of them clipped, beside those that were seen


@dataclass(frozen=True)
class Correction:
    """Of the memory forecast for one model, after a run of it needed more."""

    model: str
    where: str  # the place at which memory ended
    needed_bytes: int  # at that place, at least
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
            "were forecast; anyfit probe --forget drops it"
        )


@dataclass(frozen=True)
class Pace:
    """How long the forward and backward passes of one model take, beside what the machine's rates alone say: a second correction
    takes the place of the first, and is not put on top of it."""

    model: str
    parameters: int  # classes of one name may be of any size
    precision: Literal["bf16", "fp32"]
    measured_seconds: float  # of all passes of a step
    forecast_seconds: float
    date: str

    def __post_init__(self) -> None:
        if not (self.measured_seconds > 0 and self.forecast_seconds > 0):
            raise ValueError(f"a pace of {self.measured_seconds} s beside {self.forecast_seconds} s; both must be positive")

    @property
    def scale(self) -> float:
        return self.measured_seconds / self.forecast_seconds

    @property
    def choice(self) -> str:
        """
        >>> [Pace("", 1, "bf16", seconds, 1.0, "").choice for seconds in (6.92, 1.08, 1.001, 0.9, 0.25)]  # doctest: +ELLIPSIS
        ['measured 6.9x slower than forecast', 'measured 8% slower than forecast', 'measured as forecast', ...
        """
        scale = self.scale if self.scale >= 1 else 1 / self.scale
        more = f"{scale:.1f}x" if scale >= 2 else f"{scale - 1:.0%}"
        way = "slower" if self.scale >= 1 else "faster"
        return "measured as forecast" if more == "0%" else f"measured {more} {way} than forecast"

    @property
    def why(self) -> str:
        measured, forecast = show_seconds(self.measured_seconds), show_seconds(self.forecast_seconds)
        return f"on {self.date} a check measured {measured} a step where {forecast} were forecast; anyfit probe --forget drops it"

    @property
    def key(self) -> tuple[str, int, str]:
        return self.model, self.parameters, self.precision


@dataclass(frozen=True)
class ClippedSteps:
    """How many steps of one job had gradients over its limit, in all runs so far."""

    model: str
    parameters: int
    precision: Literal["bf16", "fp32"]
    clip_norm: float
    steps: int = 0
    clipped: int = 0
    date: str = ""  # of the last run

    def __post_init__(self) -> None:
        if not 0 <= self.clipped <= self.steps:
            raise ValueError(f"{self.clipped} clipped steps of {self.steps}; there are no more than all of them")

    @property
    def share(self) -> float:
        """Of later steps that are expected to be clipped: an even chance where nothing was seen. That counts as much as
        ASSUMED_STEPS: the first of a run clip more often than those that follow, so that a few say little."""
        return (self.clipped + ASSUMED_STEPS / 2) / (self.steps + ASSUMED_STEPS)

    @property
    def choice(self) -> str:
        return f"{self.share:.0%} of steps expected over the limit of {self.clip_norm:g}"

    @property
    def why(self) -> str:
        if not self.steps:
            return "an even chance, as no run has shown how many are"
        return f"up to {self.date}, {self.clipped} of {self.steps} steps were; anyfit probe --forget drops it"

    @property
    def key(self) -> tuple[str, int, str, float]:
        return self.model, self.parameters, self.precision, self.clip_norm


@dataclass(frozen=True)
class Corrections(Record):
    """All that is known of one machine, a model each."""

    kind: ClassVar[str] = "corrections"
    version: ClassVar[int] = 3

    machine: str  # fingerprint
    models: tuple[Correction, ...] = ()
    paces: tuple[Pace, ...] = ()
    clipped: tuple[ClippedSteps, ...] = ()

    @classmethod
    def from_json(cls, document: object, *, where: str = "") -> Self:
        if isinstance(document, Mapping) and document.get("version") == 2:  # before clipped steps were counted
            document = {**document, "version": 3, "clipped": []}
        return super().from_json(document, where=where)

    def of(self, model: str) -> Correction | None:
        return next((each for each in self.models if each.model == model), None)

    def with_one(self, correction: Correction) -> Self:
        """With this one in place of what was known of its model; a smaller one changes nothing, as plans are to stay safe."""
        known = self.of(correction.model)
        if known is not None and known.error > correction.error:
            return self
        others = [each for each in self.models if each.model != correction.model]
        return replace(self, models=(*others, correction))

    def pace_of(self, model: str, parameters: int, precision: str) -> Pace | None:
        return next((each for each in self.paces if each.key == (model, parameters, precision)), None)

    def with_pace(self, pace: Pace) -> Self:
        return replace(self, paces=(*(each for each in self.paces if each.key != pace.key), pace))

    def clipped_steps_of(self, model: str, parameters: int, precision: Literal["bf16", "fp32"], clip_norm: float) -> ClippedSteps:
        """None of none, where no run has shown any."""
        none = ClippedSteps(model, parameters, precision, clip_norm)
        return next((each for each in self.clipped if each.key == none.key), none)

    def with_clipped_steps(self, seen: ClippedSteps) -> Self:
        """With these on top of what was known of the same job."""
        known = next((each for each in self.clipped if each.key == seen.key), None)
        both = seen if known is None else replace(seen, steps=known.steps + seen.steps, clipped=known.clipped + seen.clipped)
        return replace(self, clipped=(*(each for each in self.clipped if each.key != seen.key), both))
