"""What a profile knows of the machine besides its blocks: rates under load, launches, the host and the disk."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class LoadedRates:
    """The host's rates while it updates and both directions are busy: all three share its memory."""

    updates_per_second: float
    up_bytes_per_second: float
    down_bytes_per_second: float


@dataclass(frozen=True)
class LaunchCosts:
    """What launching takes of the host: seconds beside other work for each one alone, and those of the engine's own work."""

    beside_updates: float = 1.0
    beside_copies: float = 1.0
    beside_both: float = 1.0
    watched_seconds: float = 0.0  # of an op that takes a parameter whose weights are fetched
    gradient_seconds: float = 0.0  # of one that is put in a staging buffer
    fetch_seconds: float = 0.0  # of a chunk
    bind_seconds: float = 0.0  # of a parameter of such a chunk, or of one that is updated elsewhere
    taken_seconds: float = 0.0  # of a gradient that comes with all of its replayed block
    replay_seconds: float = 0.0  # of a recording


@dataclass(frozen=True)
class HostRates:
    """How fast model state moves and is updated beside the device."""

    updates_per_second: float  # parameters, while nothing is copied
    up_bytes_per_second: float  # while the other direction is busy too, and the host does not update
    down_bytes_per_second: float
    overlaps: bool  # the host works while the device does: not where they are the same cores
    loaded: LoadedRates | None = None  # None: the same
    launching: LaunchCosts = LaunchCosts()


@dataclass(frozen=True)
class DiskRates:
    """How fast optimizer state moves between host memory and the disk."""

    read_bytes_per_second: float  # with nothing else
    write_bytes_per_second: float
    both_bytes_per_second: float  # of the two together
    error: float  # relative, of these
    free_bytes: int
    endurance_bytes: int  # that the drive is rated to take
    endurance_source: str
