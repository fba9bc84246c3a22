"""How fast a candidate's work is done: rates of the device and of the host, and what its updates read and write."""

from __future__ import annotations

from dataclasses import dataclass, field

from anyfit.values.calibration import Calibration
from anyfit.values.precision import PRECISIONS
from anyfit.values.profile import HostRates, Profile

NORM_BYTES, UPDATE_BYTES, GATHER_BYTES = 2, 30, 4  # read and written of a parameter on the device
UPDATE_TRAFFIC = 26  # bytes of the host's memory that an update reads and writes
# Of an update's traffic: to add a gradient up on the host, and, where the device is a CPU, to take its norm there; one of two
# phases, weights alone or moments alone; what a gradient that was added up has more than one that was not.
ADDED, NORMED, ONE_PHASE, WIDER = 10 / UPDATE_TRAFFIC, 4 / UPDATE_TRAFFIC, 18 / UPDATE_TRAFFIC, 2 / UPDATE_TRAFFIC


@dataclass(frozen=True)
class Rates:
    host: HostRates
    norm_seconds: float  # of gradients that are on the device, each parameter
    update_seconds: float  # of a resident parameter, or one that was lifted
    gather_seconds: float = 0.0  # of a gradient that is put beside its chunk's others, to go down with them
    add_seconds: float = 0.0  # of one that is added to those of earlier passes on the device
    calibration: Calibration = field(kw_only=True)

    @property
    def host_norm_seconds(self) -> float:
        """Of gradients that were added up on the host; for a GPU their squares are taken with the adding."""
        return 0.0 if self.host.overlaps else NORMED / self.host.updates_per_second


def rates_of(profile: Profile) -> Rates:
    assert profile.host is not None
    memory = profile.memory_bytes_per_second
    norm, whole = NORM_BYTES / memory, profile.update.seconds / max(profile.trainable, 1)  # with what each parameter costs
    update = (
        max(UPDATE_BYTES / memory, whole - norm) if profile.host.overlaps else whole
    )  # torch updates resident chunks on a CPU
    return Rates(profile.host, norm, update, GATHER_BYTES / memory, add_seconds(profile), calibration=profile.calibration)


def add_seconds(profile: Profile) -> float:
    """Of one gradient and pass, where the device adds them up over passes."""
    return PRECISIONS[profile.precision].adding_bytes / profile.memory_bytes_per_second
