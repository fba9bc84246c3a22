"""How long ops take in a row, on a device that another processor launches them for: one by one, or as a recording."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

REPLAY_LAUNCHES = 8  # of the driver, for a recording with what is copied before and after it


@dataclass(frozen=True)
class Timing:
    """Ops in a row, on a device that another processor launches them for. An op begins when it has been launched and the one
    before it is over, so of ops that the host begins to launch at h, on a device that is busy until b,

        the host is free at h + launch_seconds        the device is through at max(b + device_seconds, h + alone_seconds)

    exactly: both sides of that maximum only ever grow by sums. `then` is that of two such rows, one after the other.
    """

    launches: int
    launch_seconds: float  # of the host, for all of them
    device_seconds: float  # of the device, for all of them, where it never waits
    alone_seconds: float  # from the host's first to the device's last, on an idle device

    def then(self, other: Timing) -> Timing:
        alone = max(self.alone_seconds + other.device_seconds, self.launch_seconds + other.alone_seconds)
        launch, device = self.launch_seconds + other.launch_seconds, self.device_seconds + other.device_seconds
        return Timing(self.launches + other.launches, launch, device, alone)

    def slowed(self, host: float, device: float) -> Timing:
        """Where the host takes so many times as long, and the device so many."""
        alone = self.slowed_alone_seconds(host, device)
        return Timing(self.launches, host * self.launch_seconds, device * self.device_seconds, alone)

    def slowed_alone_seconds(self, host: float, device: float) -> float:
        """Which op decides may be another when they are slowed: this is no less than what they then take alone, and the same
        where both are slowed alike."""
        launch, busy, alone = self.launch_seconds, self.device_seconds, self.alone_seconds
        return max(host * launch + device * (alone - launch), device * busy + host * (alone - busy))

    @classmethod
    def on_device(cls, seconds: float) -> Timing:
        """Nothing has to be launched."""
        return cls(0, 0.0, seconds, seconds)


NOTHING_RUN = Timing.on_device(0.0)


@dataclass(frozen=True)
class Replay:
    """A block as two recordings, forward and backward, each launched at once."""

    launch_seconds: float  # of the host, for one of them
    copy_seconds: float  # of the device: weights and inputs to fixed memory, and results out of it
    fixed_bytes: int  # of that memory; all share it
    running_bytes: int  # that a recording has while it runs; all share it too
    own_bytes: int = 0  # that stay this block's: a kept one's inputs and results, besides what it keeps
    outside_bytes: int = 0  # that a call has besides: inputs, results and gradients, as autograd has them

    def timing(self, device_seconds: float) -> Timing:
        device = device_seconds + self.copy_seconds
        return Timing(REPLAY_LAUNCHES, self.launch_seconds, device, self.launch_seconds + device)


def shared_bytes(replays: Iterable[Replay]) -> int:
    """Of recordings, in the order of their blocks: what all share while they run, and the memory that they read and write, which
    is taken anew for one that needs more than those before."""
    fixed = largest = running = 0
    for each in replays:
        if each.fixed_bytes > largest:
            largest = each.fixed_bytes
            fixed += largest
        running = max(running, each.running_bytes)
    return fixed + running
