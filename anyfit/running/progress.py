"""How far a run is: its steps, what it is doing now, and whom it tells."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .launch import Launch


class Phase(Enum):
    """What a run is doing, in words that name the step."""

    BEFORE = "before its first step"
    FORWARD = "in the forward of step {}"
    BACKWARD = "in the backward of step {}"
    UPDATE = "in the update of step {}"
    AFTER = "after step {}"
    SAVING = "saving step {}"
    END = "at its end, after step {}"

    @property
    def is_within_step(self) -> bool:
        return self in (Phase.FORWARD, Phase.BACKWARD, Phase.UPDATE)


@dataclass(frozen=True)
class Doing:
    phase: Phase = Phase.BEFORE
    step: int = 0

    def __str__(self) -> str:
        return self.phase.value.format(self.step)


@dataclass(eq=False)
class Progress:
    """Of one run, on this rank."""

    rank: int
    steps: int = 0  # done, skipped ones included
    skipped: int = 0
    rescues: int = 0  # times that memory ended and the run was planned anew
    doing: Doing = Doing()
    is_closed: bool = False
    launch: Launch | None = None  # set by `anyfit fit`

    def enter(self, phase: Phase) -> None:
        self.doing = Doing(phase, self.steps + phase.is_within_step)

    def check_open(self) -> None:
        if self.is_closed:
            raise RuntimeError("this run is closed")

    def say(self, line: str) -> None:
        if self.rank:
            return
        if self.launch is not None:
            self.launch.say(line)
        else:
            print(line, file=sys.stderr, flush=True)
