"""The life of one chunk's update. `ChunkUpdate` owns it: whoever starts a part of it, waits for one or drops one says so here."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum, auto
from typing import Any

from .lanes import Over, Ticket


class UpdatePhase(Enum):
    """How far the update of a chunk is. docs/architecture.md draws the way from one to the next."""

    SETTLED = auto()  # weights and moments are those of the last step; gradients are waited for, and their norm
    LIFTED = auto()  # streamed: its state is on the device, or on its way there, and the norm is not known
    SPECULATED = auto()  # updated into its second generation, as if nothing were clipped, and the norm is not known
    BEGUN = auto()  # resident: the GPU updates it, if the norm is a number, which the host does not know
    UPDATING = auto()  # its weights are old ones until the ticket `fresh`
    FAILED = auto()  # its update raised an error; whoever asks for the chunk next starts it again
    FINISHING = auto()  # two-phase: its weights are fresh, and its moments are still to come


class ChunkUpdate:
    def __init__(self) -> None:
        # Before the norm is known, of the step under way:
        self.lifted: Ticket | None = None  # of the state's way up
        self.speculated: Ticket | None = None  # of the second generation
        self.begun: dict[str, dict[str, Any]] | None = None  # what will be known of its parameters, if the norm is a number
        # After that, also while the next step runs:
        self.fresh: Ticket | None = None  # of its weights
        self.restart: Callable[[], Ticket] | None = None  # starts the update once more, should it have failed
        self.moments: Ticket | None = None  # of those that follow the weights: that job still reads the host's gradients
        self.last: Ticket | None = None  # of all that works with a state on the host

    @property
    def phase(self) -> UpdatePhase:
        """What was begun in the step under way comes before what is left of the last."""
        if self.begun is not None:
            return UpdatePhase.BEGUN
        if self.speculated is not None:
            return UpdatePhase.SPECULATED
        if self.lifted is not None:
            return UpdatePhase.LIFTED
        if self.fresh is not None:
            return UpdatePhase.UPDATING
        if self.restart is not None:
            return UpdatePhase.FAILED
        return UpdatePhase.FINISHING if self.moments_pending else UpdatePhase.SETTLED

    @property
    def moments_pending(self) -> bool:
        """Also while its weights are on their way."""
        return self.moments is not None and not self.moments.is_over

    @property
    def last_over(self) -> Ticket | None:
        """For what comes after the last, which may have failed, or not count any more."""
        return None if self.last is None else Over(self.last)

    def finish(self) -> None:
        """Waits for moments that follow the weights."""
        if self.moments is not None:
            self.moments.wait()

    def forget_step(self) -> None:
        """The step is over: what was begun before its norm was known is not to be used by another."""
        self.begun = self.lifted = self.speculated = None
