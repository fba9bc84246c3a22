"""The verdict that nothing fits: by how much, and what would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .units import show_seconds


@dataclass(frozen=True)
class Change:
    """Something that makes a job fit: it was planned so before it is offered."""

    what: str  # to type
    step_seconds: float
    note: str = ""  # where it takes more than typing


class NoPlan(Exception):  # noqa: N818  (a verdict about the job, not a fault)
    """Nothing fits: says by how much, and what to change."""

    def __init__(
        self, message: str, shortfall_bytes: int, tier: Literal["device", "host"] = "device", changes: tuple[Change, ...] = ()
    ) -> None:
        super().__init__(message, shortfall_bytes, tier, changes)  # all, or it could not come back from another process
        self.shortfall_bytes = shortfall_bytes
        self.tier = tier  # that is too small
        self.changes = changes

    def because(self, restrictions: str) -> NoPlan:
        """The same, with what keeps the planner from making it smaller."""
        if not restrictions:
            return self
        return NoPlan(f"{self.args[0]}; {restrictions}", self.shortfall_bytes, self.tier, self.changes)

    def with_changes(self, changes: tuple[Change, ...]) -> NoPlan:
        return NoPlan(self.args[0], self.shortfall_bytes, self.tier, changes)

    def __str__(self) -> str:
        if not self.changes:
            return str(self.args[0])
        fits = [
            f"  {change.what}: {show_seconds(change.step_seconds)} a step{f', {change.note}' if change.note else ''}"
            for change in self.changes
        ]
        return "\n".join((f"{self.args[0]}. It fits with one of these, at this speed or faster:", *fits))
