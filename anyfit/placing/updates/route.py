"""The route of an update, which follows from the placement of its chunk, and what all routes work with."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from anyfit.values.plan import Forecast

from ..gradients import Gradients
from ..lanes import Lanes, Ticket
from ..mirrors import Mirrors
from ..optimizer_state import OptimizerState
from ..optimizers import UsersOptimizer
from ..ranks import Ranks
from ..residency import Residency
from .stepper import Inputs, Stepper

BROKEN_OFF = "the update was broken off half-way"
RECENT_STEPS = 4  # about so many count in the share of recent steps that clipped: such steps come in a row
LESS, MORE = 1 / 8, 1 / 32  # share of chunks, fewer or more of which are then updated in two phases


class Pace:
    """What recent steps say about the next: whether it is likely to clip, and how much the host gets done in backward.

    Where all updates wait for the norm, the next forward waits for the host, which has nothing to do in backward. So the host
    updates weights first, and moments once all weights are fresh: of as many chunks as it can before their next gradients.

    Where more than `most_clipped` of recent steps clipped, no update begins before the norm is known. What is expected of the
    first steps counts as much as one of them, so that a run that clips from the start redoes little."""

    def __init__(self, most_clipped: float = 0.5, clipped_share: float = 0.0) -> None:
        self._most_clipped, self._steps = most_clipped, 0
        self.clipped_share = clipped_share  # of recent steps
        self.two_phase_share = 1.0  # of chunks on the host, where they wait for the norm

    @classmethod
    def expected(cls, forecast: Forecast) -> Pace:
        return cls(forecast.most_clipped, 0.0 if forecast.clipping is None else forecast.clipping.share)

    def note(self, *, clips: bool, is_late: bool) -> None:
        """Of a step: whether it clips, and whether moments of the step before were still pending when its norm was known."""
        self._steps += 1
        self.clipped_share += (clips - self.clipped_share) / min(self._steps + 1, RECENT_STEPS)
        share = self.two_phase_share
        self.two_phase_share = max(share - LESS, 0.0) if is_late else min(share + MORE, 1.0)

    @property
    def may_speculate(self) -> bool:
        return self.clipped_share <= self._most_clipped


class Route(Protocol):
    """Where a chunk is updated."""

    def furnish(self, chunk: OptimizerState) -> None:
        """Takes the scratch that the chunk's update will want, so that a step takes nothing."""

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket | None:
        """Starts the update; the ticket of its weights, or None where the computation itself makes them."""

    @property
    def device_bytes(self) -> int:
        """Of scratch."""


class LaneRoute(Route, Protocol):
    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket: ...

    def speculate(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        """Starts the same into the chunk's second generation."""

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """Where nothing is updated before the norm is known: brings the state to where it will be, if that is elsewhere."""


class Integrity:
    """Whether the state is that of whole steps. Where an update in place is broken off it is not, and the run cannot go on."""

    def __init__(self) -> None:
        self.broken: str | None = None  # why; a lane may set it while a step begins
        self._is_stepping = False

    @contextmanager
    def stepping(self) -> Iterator[None]:
        self._is_stepping = True
        yield
        self._is_stepping = False  # which an error leaves as it is

    def check(self) -> None:
        broken = self.broken or (BROKEN_OFF if self._is_stepping else None)
        if broken is not None:
            raise RuntimeError(f"{broken}; go on from the last checkpoint: anyfit.start(job, resume=...)")

    @contextmanager
    def in_place(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.broken = f"the update failed half-way ({type(error).__name__}: {error})"
            raise


class Readers:
    """Whoever reads chunks beside the steps, as a save does: it is waited for before what it reads is overwritten."""

    def __init__(self) -> None:
        self.wait_for: Callable[[int], None] = lambda _chunk: None

    def before_speculation(self, chunk: OptimizerState) -> None:
        """On a lane, before the second generation is overwritten."""
        assert chunk.second is not None
        if chunk.second.may_be_read:
            self.wait_for(chunk.state.index)
            chunk.second.may_be_read = False


@dataclass(frozen=True, eq=False)
class Context:
    """What the parts of the update work with."""

    device: torch.device
    ranks: Ranks
    lanes: Lanes
    gradients: Gradients
    residency: Residency
    mirrors: Mirrors
    chunks: Sequence[OptimizerState]
    users: UsersOptimizer
    stepper: Stepper
    pace: Pace
    integrity: Integrity = field(default_factory=Integrity)
    readers: Readers = field(default_factory=Readers)
