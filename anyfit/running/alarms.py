"""Watches the loss: a spike, a number that is none, a step left out. Each gives one line for the log."""

from __future__ import annotations

import math
import statistics
from collections import deque

WINDOW = 50  # steps that make up what is normal
SPIKE = 6.0  # standard deviations above the window's mean that count as a spike …
SPIKE_SHARE = 0.2  # … and at least this share above it, so that a flat curve does not cry wolf


class Alarms:
    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._skipped = 0

    def listen(self, step: int, loss: float, skipped: int) -> list[str]:
        """The alarm lines of one step; none when all is well."""
        lines = []
        if skipped > self._skipped:
            lines.append(f"step {step}: left out, a gradient was not finite ({skipped} left out so far)")
            self._skipped = skipped
        if not math.isfinite(loss):
            return [*lines, f"step {step}: the loss is {loss}"]
        if len(self._losses) >= 10:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + SPIKE * deviation and loss > mean + SPIKE_SHARE * abs(mean):
                lines.append(f"step {step}: the loss jumped to {loss:.3f} from about {mean:.3f}")
        self._losses.append(loss)
        return lines
