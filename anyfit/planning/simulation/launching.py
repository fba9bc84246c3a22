"""The host that launches the computation's ops. It runs ahead of the device, which waits where the host is behind.

Of a stretch of ops, values/profile.Timing has when the device is through with it. Beside updates and copies the host is slower,
by as much as the probe has measured. The engine has it do more than to launch: it looks at ops that take weights which move,
takes gradients over, fetches chunks and starts updates.

It waits where the engine has it wait: for the norm, for an update whose weights are next, and for the driver, whose queue is
full. For copies it does not wait: the device's streams do.
"""

from __future__ import annotations

from collections import deque

from anyfit.planning.candidate import Rates
from anyfit.values.profile import Timing

from .clock import Clock, Resources

QUEUE = 1024  # launches that the driver takes before it has the host wait


class Launching:
    def __init__(self, clock: Clock, resources: Resources, rates: Rates) -> None:
        self._clock, self._resources = clock, resources
        self._is_apart = rates.host.overlaps  # else the device launches for itself
        self._costs = rates.host.launching
        self._free = 0.0  # when all that it was given so far is launched
        self._count = 0
        self._ahead: deque[tuple[int, float]] = deque()  # launches so far, and when the device is through with them
        self._taken = 0.0  # when the driver took what is launched next

    def run(self, timing: Timing, slowness: float) -> tuple[float, float]:
        """Seconds from now to when the device is through with these ops, which the host launches when it is free; and those of
        them that the device waits for the host."""
        device, resources = slowness * timing.device_seconds, self._resources
        if not self._is_apart:
            return device, 0.0
        now, host = self._clock.now, self._slowness
        while self._ahead and self._ahead[0][0] <= self._count - QUEUE:
            self._taken = self._ahead.popleft()[1]
        began = max(self._free, self._taken)
        alone = timing.slowed_alone_seconds(host, slowness)
        busy = device + resources.owed_seconds
        waited = max((began - now) + (alone - busy), 0.0)
        resources.owed_seconds = 0.0
        self._free = began + host * timing.launch_seconds
        self._count += timing.launches
        self._ahead.append((self._count, now + busy + waited))
        return busy + waited, waited

    def spend(self, seconds: float) -> None:
        """On what the engine has it do."""
        if self._is_apart and seconds:
            self._free += self._slowness * seconds

    def wait(self) -> None:
        """It has waited until now."""
        self._free = max(self._free, self._clock.now)

    @property
    def behind_seconds(self) -> float:
        """How much longer it takes to launch what it was given so far."""
        return max(self._free - self._clock.now, 0.0)

    @property
    def _slowness(self) -> float:
        """Seconds for one of a host that does nothing else. Measured is what copies in both directions add."""
        servers, costs = self._resources.servers, self._costs
        ways = (servers["up"].is_busy + servers["down"].is_busy) / 2
        least, most = (costs.beside_updates, costs.beside_both) if servers["host"].is_busy else (1.0, costs.beside_copies)
        return least + ways * (most - least)
