"""What late steps say about the next one: whether it is likely to be clipped, and how much the host gets done in backward.

When all updates wait for the norm, the next forward waits for those of the host, whose memory is too slow for them, and which has
nothing to do in backward. So the host updates weights first, and moments once all weights are fresh: of as many chunks as it is
through with before their next gradients come, which shows in whether it was in the steps before.
"""

from __future__ import annotations

from anyfit.values.engine import is_two_phase

MOST_CLIPPED = 0.5  # with a larger share of late steps that clipped, no update begins before the norm is known
LATE_STEPS = 8  # about so many count in that share
LESS, MORE = 1 / 8, 1 / 32  # share of chunks, fewer or more of which are then updated in two phases


class Pace:
    def __init__(self) -> None:
        self.clipped_share = 0.0  # of late steps
        self.two_phase_share = 1.0  # of chunks on the host, where they wait for the norm

    def note(self, *, clips: bool, is_late: bool) -> None:
        """Of a step: whether it clips, and whether moments of the step before were still pending when its norm was known."""
        self.clipped_share += (clips - self.clipped_share) / LATE_STEPS
        share = self.two_phase_share
        self.two_phase_share = max(share - LESS, 0.0) if is_late else min(share + MORE, 1.0)

    @property
    def may_speculate(self) -> bool:
        return self.clipped_share <= MOST_CLIPPED

    def is_two_phase(self, chunk: int) -> bool:
        return is_two_phase(chunk, self.two_phase_share)
