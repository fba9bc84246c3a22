"""Time in a simulation: a clock of events, signals that something has happened, and servers that take one thing at a time.

    compute   the device's computation
    up        weights to slots, fresh weights, activations that return: these take turns, copy by copy; and optimizer state for
              streamed updates, a part at a time when nothing else is to be copied
    down      gradients, optimizer state after its update, offloaded activations: these take turns
    link      exchanges between ranks, in seconds: all-gathers for a use, reductions, all-gathers of fresh weights
    host      updates in the host's memory, the most urgent of those whose gradients have come
    disk      optimizer state that is read and written for updates: one chunk each way at a time, which share its rate

Copies and updates use the host's memory: updates are slower while copies run, and copies are slower while the host updates. Where
exchanges between ranks share the link to the host, an exchange and a copy at the same time are each half as fast.
"""

from __future__ import annotations

import functools
import heapq
from collections import deque
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import Literal

from anyfit.planning.candidate import Rates
from anyfit.values.profile import DiskRates, HostRates

DONE = 1e-3  # of an update: what is left of it when it counts as done
Call = Callable[[], None]
Resource = Literal["compute", "up", "down", "link", "host"]
Waiting = tuple[float, int, float, Call]  # order, count, amount, and what is then done


class Signal:
    """Something that others wait for, and that happens once."""

    def __init__(self, *, happened: bool = False) -> None:
        self.happened = happened
        self._then: list[Call] = []

    def fire(self) -> None:
        self.happened = True
        waiting, self._then = self._then, []
        for then in waiting:
            then()

    def then(self, call: Call) -> None:
        if self.happened:
            call()
        else:
            self._then.append(call)


Work = Generator[float | Signal, None, None]  # of the computation: seconds that it takes, signals that it waits for


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Call]] = []
        self._count = 0

    def at(self, seconds: float, call: Call) -> None:
        self._count += 1
        heapq.heappush(self._events, (self.now + seconds, self._count, call))

    @property
    def coming(self) -> tuple[float, ...]:
        """Seconds to all events that are known, the next first."""
        return tuple(sorted(at - self.now for at, _, _ in self._events))

    def run(self, until: Signal) -> None:
        while not until.happened:
            self.now, _, call = heapq.heappop(self._events)
            call()


@dataclass(frozen=True)
class State:
    """How far everything is that is under way or waits; without numbers, it is like no other."""

    waiting: tuple[int, ...] = ()  # by queue
    coming: tuple[float, ...] = ()  # seconds to all known events
    late: tuple[float, ...] = ()  # seconds that the computation owes, and that the host is behind

    def is_like(self, other: State, seconds: float) -> bool:
        """Whether times differ by no more than this."""
        if self.waiting != other.waiting or len(self.coming) != len(other.coming):
            return False
        pairs = zip((*self.late, *self.coming), (*other.late, *other.coming), strict=True)
        return all(abs(mine - its) <= seconds for mine, its in pairs)


class Server:
    """One thing at a time; of several queues each in turn, of a queue the most urgent. One that yields waits for others."""

    def __init__(self, clock: Clock, *queues: str, yields: str | None = None) -> None:
        self._clock = clock
        self._queues: dict[str, list[Waiting]] = {name: [] for name in queues}
        self._in_turn = list(self._queues.values())
        self._last: list[Waiting] = []
        if yields is not None:
            self._queues[yields] = self._last
        self._after = {name: (index + 1) % len(queues) for index, name in enumerate(queues)}  # whose turn it is then
        self._turn = 0
        self._count = 0
        self._since = self._speed = 0.0
        self._done = 0.0  # amount, but for what it is at now
        self.is_busy = False
        self._is_between = False  # what is done now may ask for more, and others wait
        self.rate: Callable[[], float] = lambda: 1.0  # of what is begun now
        self.heard: Callable[[str, float, float], None] | None = None  # is told of what is done: its queue, from, and to
        self._serving: list[Waiting] = []
        self._then: Call = Signal().fire  # when what it is at is done

    def add(self, queue: str, amount: float, done: Call, order: float = 0) -> None:
        waiting = self._queues[queue]
        if not self.is_busy and not self._is_between:  # nothing waits
            self._turn = self._after.get(queue, self._turn)
            self._serve(waiting, amount, done)
            return
        self._count += 1
        heapq.heappush(waiting, (order, self._count, amount, done))
        if not self.is_busy:
            self._start()

    @property
    def waiting(self) -> list[int]:
        return [len(queue) for queue in self._queues.values()]

    def take_back(self, queue: str, done: Call) -> bool:
        """Whether it has not begun, and so is not done any more."""
        waiting = self._queues[queue]
        others = [each for each in waiting if each[3] is not done]
        was_waiting = len(others) < len(waiting)
        waiting[:] = others
        heapq.heapify(waiting)
        return was_waiting

    @property
    def done(self) -> float:
        """Amount, up to now."""
        return self._done + ((self._clock.now - self._since) * self._speed if self.is_busy else 0.0)

    def _start(self) -> None:
        turn, queues = self._turn, self._in_turn
        for _ in queues:
            queue = queues[turn]
            turn = (turn + 1) % len(queues)
            if queue:
                self._turn = turn
                self._serve(queue, *heapq.heappop(queue)[2:])
                return
        if self._last:
            self._serve(self._last, *heapq.heappop(self._last)[2:])

    def _serve(self, queue: list[Waiting], amount: float, done: Call) -> None:
        self.is_busy, self._since, self._serving, self._then = True, self._clock.now, queue, done
        self._speed = self.rate()
        self._clock.at(amount / self._speed, self._finish)

    def _finish(self) -> None:
        self._done += (self._clock.now - self._since) * self._speed
        self.is_busy = False
        if self.heard is not None:
            self.heard(next(name for name, each in self._queues.items() if each is self._serving), self._since, self._clock.now)
        self._is_between = True
        self._then()
        self._is_between = False
        if not self.is_busy:
            self._start()


class HostServer(Server):
    """The host's updates, the most urgent first; how fast one was is known when it ends, by what was copied meanwhile."""

    def __init__(self, clock: Clock, rates: HostRates, up: Server, down: Server, download_weight: float) -> None:
        super().__init__(clock, "update")
        self._rates, self._copies, self._download_weight = rates, (up, down), download_weight
        self.rate = lambda: rates.updates_per_second

    def _serve(self, queue: list[Waiting], amount: float, done: Call) -> None:
        self.is_busy, self._since, self._serving, self._then = True, self._clock.now, queue, done
        self._go_on(amount, self.rate(), DONE * amount)

    def _go_on(self, left: float, rate: float, enough: float) -> None:
        began, copied = self._clock.now, self._copied

        def look() -> None:
            took = self._clock.now - began
            found = self._rate_beside((self._copied - copied) / took)
            still = left - found * took
            if still > enough:
                self._go_on(still, found, enough)
            else:
                self._finish()

        self._clock.at(left / rate, look)

    def _rate_beside(self, copied_per_second: float) -> float:
        """Updates a second: the more is copied, the fewer. Measured is the rate with nothing copied, and with all that goes."""
        alone, loaded = self._rates.updates_per_second, self._rates.loaded
        if loaded is None:
            return alone
        share = copied_per_second / (loaded.up_bytes_per_second + self._download_weight * loaded.down_bytes_per_second)
        return max(alone - (alone - loaded.updates_per_second) * share, loaded.updates_per_second / 2)

    @property
    def _copied(self) -> float:
        """Bytes; one from the device counts for as many to it as slow the host alike."""
        up, down = self._copies
        return up.done + self._download_weight * down.done


class SharedServer:
    """One thing each way at a time, in the order in which they come; reads and writes that are under way share the rate."""

    def __init__(self, clock: Clock, rates: DiskRates) -> None:
        self._clock, self._together = clock, rates.both_bytes_per_second
        self._alone = {"read": rates.read_bytes_per_second, "write": rates.write_bytes_per_second}
        self._queues: dict[str, deque[tuple[float, Call]]] = {way: deque() for way in self._alone}
        self._left: dict[str, float] = {}  # of what is under way
        self._since = 0.0
        self._changes = 0

    def add(self, way: str, amount: float, done: Call) -> None:
        self._queues[way].append((amount, done))
        if way not in self._left:
            self._move_on()
            self._left[way] = amount
            self._look_later()

    @property
    def waiting(self) -> list[int]:
        return [len(queue) for queue in self._queues.values()]

    def _rate(self, way: str) -> float:
        return self._alone[way] if len(self._left) == 1 else self._together / 2

    def _move_on(self) -> None:
        """What is left now."""
        passed, self._since = self._clock.now - self._since, self._clock.now
        self._left = {way: left - passed * self._rate(way) for way, left in self._left.items()}

    def _look_later(self) -> None:
        """When the next of them is over, unless something changes before."""
        self._changes += 1
        if self._left:
            seconds, way = min((max(left, 0.0) / self._rate(way), way) for way, left in self._left.items())
            self._clock.at(seconds, functools.partial(self._over, way, self._changes))

    def _over(self, way: str, changes: int) -> None:
        if changes != self._changes:
            return
        self._move_on()
        _, done = self._queues[way].popleft()
        del self._left[way]
        if self._queues[way]:
            self._left[way] = self._queues[way][0][0]
        self._look_later()
        done()


class Resources:
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
        self.disk = None if rates.disk is None else SharedServer(clock, rates.disk)
        self._meets_copies = link if shares_copies else None
        self._overlaps = host_rates.overlaps
        self._clock = clock
        self._owed_seconds = 0.0
        self._idle_since: float | None = None

    def state(self, host_behind_seconds: float) -> State:
        on_disk = [] if self.disk is None else self.disk.waiting
        waiting = tuple(count for each in (*(server.waiting for server in self.servers.values()), on_disk) for count in each)
        return State(waiting, self._clock.coming, (self.owed_seconds, host_behind_seconds))

    @property
    def owed_seconds(self) -> float:
        """By the computation, for work of the device's or of its own cores that is not on a server. While it waits for the disk,
        cores that it shares do that work."""
        if self._idle_since is not None:
            self._owed_seconds = max(self._owed_seconds - (self._clock.now - self._idle_since), 0.0)
            self._idle_since = self._clock.now
        return self._owed_seconds

    @owed_seconds.setter
    def owed_seconds(self, seconds: float) -> None:
        self._owed_seconds = seconds

    def wait(self) -> None:
        """The computation does, from now on."""
        self._idle_since = None if self._overlaps else self._clock.now

    def go_on(self) -> None:
        if self._idle_since is not None:
            self._owed_seconds, self._idle_since = self.owed_seconds, None

    def use(self, name: Resource, queue: str, amount: float, done: Call, order: float = 0) -> None:
        """Beside the computation; or in its time, where they share cores."""
        server = self.servers[name]
        if self._overlaps:
            server.add(queue, amount, done, order)
        else:
            self.owed_seconds += amount / server.rate()
            done()

    def move(self, way: Literal["read", "write"], size: float, done: Call) -> None:
        """From or to the disk, beside whatever runs."""
        assert self.disk is not None
        self.disk.add(way, size, done)

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
