"""The route of an update, which follows from the placement of its chunk, and what all routes work with."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ..gradients import Gradients
from ..lanes import Lanes, Ticket
from ..mirrors import Mirrors
from ..optimizer_state import OptimizerState
from ..optimizers import UsersOptimizer
from ..ranks import Ranks
from ..residency import Residency
from .pace import Pace
from .stepper import Inputs, Stepper

BROKEN_OFF = "the update was broken off half-way"


class Route(Protocol):
    """Where a chunk is updated."""

    def furnish(self, chunk: OptimizerState) -> None:
        """Takes the scratch that the chunk's update will want, so that a step takes nothing."""

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket | None:
        """Starts the update; the ticket of its weights, or None where the computation itself makes them."""

    @property
    def device_bytes(self) -> int:
        """Of scratch."""


class SpeculatingRoute(Route, Protocol):
    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket: ...

    def speculate(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        """Starts the same into the chunk's second generation."""

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """Where nothing is updated before the norm is known: brings the state to where it will be, if that is elsewhere."""


class Integrity:
    """Whether the state is that of whole steps. Where an update in place is broken off it is not, and the run cannot go on."""

    def __init__(self) -> None:
        self.broken: str | None = None  # why; a lane may set it while a step is handed out
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

    def begin(self, wait_for: Callable[[int], None], chunks: Iterable[OptimizerState]) -> None:
        """Somebody reads the state as it is now. From here on `wait_for` is asked before any of a chunk's is overwritten."""
        self.wait_for = wait_for
        for chunk in chunks:
            if chunk.second is not None:
                chunk.second.may_be_read = False

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
    pace: Pace = field(default_factory=Pace)
    integrity: Integrity = field(default_factory=Integrity)
    readers: Readers = field(default_factory=Readers)
