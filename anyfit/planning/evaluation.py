"""What a candidate costs: its footprint, its simulated seconds and their bound, each found once; and whether it fits."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache

from anyfit.values.graph import PAGE_BYTES
from anyfit.values.profile import Profile

from .bound import least_seconds
from .candidate import Candidate, rates_of
from .footprint import Footprint, footprint_of, live_of
from .knobs import Candidates, Knobs
from .simulation import Simulated, simulate

PAGES_BYTES = 10 * PAGE_BYTES  # of the host, at most, for a chunk's arrays to begin on pages


@dataclass(frozen=True)
class Offer:
    """A candidate with all that is known of it."""

    candidate: Candidate
    footprint: Footprint
    simulated: Simulated
    knobs: Knobs | None = None  # None: changed block by block and chunk by chunk

    @property
    def seconds(self) -> float:
        return self.simulated.step_seconds

    @property
    def uses_host(self) -> bool:
        return self.footprint.host_bytes > 0


class Evaluation:
    """Of the candidates of one profile. What it finds of one holds at other limits too: `at_limits` goes on with it."""

    def __init__(self, profile: Profile, candidates: Candidates) -> None:
        self.profile, self.candidates, self.rates = profile, candidates, rates_of(profile)
        self.footprint, self.simulated = cache(self._footprint), cache(self._simulated)
        self.bound = cache(lambda knobs: least_seconds(candidates.of(knobs), self.rates))  # that no simulation is under
        self._live_bytes: dict[tuple[int, int, int, bool], int] = {}
        self._played: dict[tuple[object, ...], Simulated] = {}  # by what a simulation depends on

    def at_limits(self, profile: Profile) -> Evaluation:
        """The same for a profile that differs in its limits alone."""
        other = copy.copy(self)
        other.profile = profile
        return other

    def _footprint(self, knobs: Knobs) -> Footprint:
        return footprint_of(self.profile, self.candidates.of(knobs), self._known_live_bytes(knobs))

    def footprint_of(self, candidate: Candidate) -> Footprint:
        return footprint_of(self.profile, candidate)

    def _known_live_bytes(self, knobs: Knobs) -> int | None:
        """Of one of several ranks, whose chunks change nothing of it where all are reduced alike: found once for each choice of
        activations."""
        division, candidate = self.candidates.division, self.candidates.of(knobs)
        if division.is_alone or (candidate.adds_up and not division.gradients):
            return None
        streams = knobs.offloaded > 0 and any(placement.route == "streamed" for placement in candidate.placements)
        key = knobs.micro_batch, knobs.rung, knobs.offloaded, streams
        if key not in self._live_bytes:
            self._live_bytes[key] = live_of(self.profile, candidate)
        return self._live_bytes[key]

    def reserved_bytes(self, footprint: Footprint) -> int:
        added = self.profile.calibration.fragmentation.value * footprint.live_bytes if self.candidates.is_gpu else 0
        return footprint.device_bytes + int(added) + self.profile.context_bytes

    def needed_bytes(self, footprint: Footprint) -> int:
        """Of the device, at the far end of the error band."""
        return int(self.reserved_bytes(footprint) * (1 + self.profile.offload_error))

    def host_bytes(self, footprint: Footprint) -> int:
        """Of the host, with what the process takes besides its plan."""
        pages = PAGES_BYTES * len(self.profile.chunks) if footprint.host_bytes else 0
        beside = self.profile.calibration.beside_bytes(footprint.host_bytes) if self.candidates.is_gpu else 0
        return footprint.host_bytes + pages + beside

    def fits(self, footprint: Footprint) -> bool:
        return self.fits_device(footprint) and self.host_bytes(footprint) <= self.profile.host_limit_bytes

    def fits_device(self, footprint: Footprint) -> bool:
        return self.needed_bytes(footprint) <= self.profile.device_limit_bytes

    def excess_bytes(self, knobs: Knobs) -> int:
        """By how much it is too large for the device."""
        return self.needed_bytes(self.footprint(knobs)) - self.profile.device_limit_bytes

    def excess(self, candidate: Candidate) -> float:
        """By how much of each limit it is too large, together."""
        footprint, profile = self.footprint_of(candidate), self.profile
        if self.fits(footprint):
            return 0.0
        needed = self.reserved_bytes(footprint) * (1 + profile.offload_error)
        device = max(needed / profile.device_limit_bytes - 1, 0.0)
        return device + max(self.host_bytes(footprint) / profile.host_limit_bytes - 1, 0.0)

    def _simulated(self, knobs: Knobs) -> Simulated:
        candidate = self.candidates.of(knobs)
        # Others may have come to the same, and a simulation takes far longer than to look.
        same = candidate.micro_batch, candidate.activations, candidate.placements, candidate.slots, candidate.prefetch
        if same not in self._played:
            self._played[same] = simulate(candidate, self.rates)
        return self._played[same]

    def seconds(self, knobs: Knobs) -> float:
        return self.simulated(knobs).step_seconds

    def offer(self, knobs: Knobs) -> Offer:
        return Offer(self.candidates.of(knobs), self.footprint(knobs), self.simulated(knobs), knobs)

    def fitting(self, candidate: Candidate) -> Offer | None:
        footprint = self.footprint_of(candidate)
        return Offer(candidate, footprint, simulate(candidate, self.rates)) if self.fits(footprint) else None
