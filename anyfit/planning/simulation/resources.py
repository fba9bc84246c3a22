"""All that works at the same time in a step, by name, and what slows what.

    compute   the device's computation
    up        weights to slots, fresh weights, activations that come back; these take turns, copy by copy; and states that are
              lifted, a part at a time where nothing else is to be copied
    down      gradients, states that are lowered, activations that are offloaded; these take turns
    link      exchanges between ranks, in seconds: all-gathers, reductions, fresh weights that are shared
    host      updates in the host's memory, the most urgent of those whose gradients have come

Copies and updates use the host's memory: the host is slower while copies run, and copies are while the host updates. Where the
link between ranks goes through the link to the host, an exchange and a copy that meet are half as fast each.
"""

from __future__ import annotations

import functools
from typing import Literal

from ..rates import Rates
from .clock import Call, Clock, HostServer, Server

Resource = Literal["compute", "up", "down", "link", "host"]


class Resources:
    """One more (a disk) is one more server here, with its rate."""

    def __init__(self, clock: Clock, rates: Rates, *, shares_copies: bool) -> None:
        host_rates = rates.host
        up = Server(clock, "fetch", "fresh", "activations", yields="lift")
        down = Server(clock, "gradients", "lower", "activations")
        link = Server(clock, "gather", "reduce", "all_gather")
        host = HostServer(clock, host_rates, up, down, rates.calibration.download_weight.value)
        self.servers: dict[Resource, Server] = {"up": up, "down": down, "link": link, "host": host}
        self.servers["compute"] = Server(clock, "work")
        loaded = host_rates.loaded or host_rates
        up.rate = functools.partial(self._copy_rate, down, host_rates.up_bytes_per_second, loaded.up_bytes_per_second)
        down.rate = functools.partial(self._copy_rate, up, host_rates.down_bytes_per_second, loaded.down_bytes_per_second)
        link.rate = lambda: 0.5 if shares_copies and (up.is_busy or down.is_busy) else 1.0
        self._meets_copies = link if shares_copies else None
        self._overlaps = host_rates.overlaps
        self.owed_seconds = 0.0  # by the computation, for work of the device's or of its own cores that is not on a server

    def use(self, name: Resource, queue: str, amount: float, done: Call, order: float = 0) -> None:
        """Beside the computation; or in its time, where they share cores."""
        server = self.servers[name]
        if self._overlaps:
            server.add(queue, amount, done, order)
        else:
            self.owed_seconds += amount / server.rate()
            done()

    def compute(self, seconds: float, then: Call) -> bool:
        """Goes on when that and what is owed is over; False where it takes no time, and so can go on at once."""
        seconds += self.owed_seconds
        if seconds <= 0:
            return False
        self.owed_seconds = 0.0
        self.servers["compute"].add("work", seconds, then)
        return True

    def _copy_rate(self, other: Server, unloaded: float, loaded: float) -> float:
        """Beside what is under way."""
        share = 0.5 if self._meets_copies is not None and self._meets_copies.is_busy else 1.0
        if not self.servers["host"].is_busy:
            return share * unloaded
        return share * (loaded if other.is_busy else (unloaded + loaded) / 2)
