"""What a candidate costs: its footprint, its simulated seconds and their bound, each found once; and whether it fits.

Of a job that clips, seconds are the mean over steps that are clipped and steps that are not, as many as are expected of each:

    seconds = (1 - share) * seconds as it is + share * seconds where no update begins before the norm is known

which is what the engine does where steps are clipped. Where nothing speculates both are the same, and one simulation does.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, replace
from functools import cache

from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import Placement
from anyfit.values.profile import Profile

from .bound import least_seconds
from .candidate import Candidate, rates_of
from .footprint import Footprint, Held, footprint_of, held_of, live_of
from .knobs import Candidates, Knobs
from .simulation import Simulated, redone_seconds, simulate, simulated_under

ROUNDED = 1 + 1e-9
PAGES_BYTES = 10 * PAGE_BYTES  # of the host, at most, for a chunk's arrays to begin on pages


@dataclass(frozen=True)
class Offer:
    """A candidate with all that is known of it."""

    candidate: Candidate
    footprint: Footprint
    simulated: Simulated
    clipped: Simulated  # the same where steps are clipped
    clipped_share: float  # of steps
    knobs: Knobs | None = None  # None: changed block by block and chunk by chunk

    @property
    def seconds(self) -> float:
        return mean(self.simulated.step_seconds, self.clipped.step_seconds, self.clipped_share)

    @property
    def uses_host(self) -> bool:
        return self.footprint.host_bytes > 0

    @property
    def uses_disk(self) -> bool:
        return self.footprint.disk_bytes > 0


def mean(seconds: float, clipped_seconds: float, clipped_share: float) -> float:
    """Exactly the seconds where nothing is clipped, or nothing changes by it."""
    return seconds + clipped_share * (clipped_seconds - seconds)


def waiting(candidate: Candidate) -> Candidate:
    """The same where every update waits for the norm."""
    if not any(each.speculates for each in candidate.placements):
        return candidate
    return replace(candidate, placements=tuple(map(_waiting, candidate.placements)))


@cache
def _waiting(placement: Placement) -> Placement:
    return replace(placement, speculates=False)


class Evaluation:
    """Of the candidates of one profile. What it finds of one holds at other limits too: `at_limits` goes on with it."""

    def __init__(self, profile: Profile, candidates: Candidates) -> None:
        self.profile, self.candidates, self.rates = profile, candidates, rates_of(profile)
        self.clipped_share = profile.clipped_share
        self.footprint, self.seconds = cache(self._footprint), cache(lambda knobs: self.offer(knobs).seconds)
        self.bound = cache(lambda knobs: self.least_seconds(candidates.of(knobs)))
        self._live_bytes: dict[tuple[int, int, int, bool], int] = {}
        self._held: dict[tuple[Knobs, bool], Held] = {}  # by where chunks are, and whether gradients add up
        self._played: dict[tuple[object, ...], Simulated] = {}  # by what a simulation depends on
        self._over: dict[tuple[object, ...], float] = {}  # the same: seconds that it is not under

    def at_limits(self, profile: Profile) -> Evaluation:
        """The same for a profile that differs in its limits alone."""
        other = copy.copy(self)
        other.profile = profile
        return other

    def _footprint(self, knobs: Knobs) -> Footprint:
        candidate = self.candidates.of(knobs)
        where = knobs.of_chunks, candidate.adds_up
        if where not in self._held:
            self._held[where] = held_of(self.profile, candidate)
        return footprint_of(self.profile, candidate, self._known_live_bytes(knobs), self._held[where])

    def footprint_of(self, candidate: Candidate) -> Footprint:
        return footprint_of(self.profile, candidate)

    def _known_live_bytes(self, knobs: Knobs) -> int | None:
        """Where chunks change nothing of it, found once for each choice of activations: of one of several ranks that reduces all
        of them alike; of a GPU alone that adds gradients up, which it does in the pools."""
        division, candidate = self.candidates.division, self.candidates.of(knobs)
        are_alike = division.gradients or not candidate.adds_up
        if not (candidate.adds_up and self.candidates.is_gpu if division.is_alone else are_alike):
            return None
        streams = knobs.offloaded > 0 and any(placement.route == "streamed" for placement in candidate.placements)
        key = knobs.micro_batch, knobs.rung, knobs.offloaded, streams
        if key not in self._live_bytes:
            self._live_bytes[key] = live_of(self.profile, candidate)
        return self._live_bytes[key]

    @property
    def may_use_disk(self) -> bool:
        return self.profile.disk is not None and self.profile.disk_limit_bytes > 0

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
        return self.fits_device(footprint) and self.fits_beside(footprint)

    def fits_beside(self, footprint: Footprint) -> bool:
        """The host and the disk."""
        profile = self.profile
        return self.host_bytes(footprint) <= profile.host_limit_bytes and footprint.disk_bytes <= profile.disk_limit_bytes

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
        disk = max(footprint.disk_bytes - profile.disk_limit_bytes, 0) / max(profile.disk_limit_bytes, 1)
        return device + max(self.host_bytes(footprint) / profile.host_limit_bytes - 1, 0.0) + disk

    def least_seconds(self, candidate: Candidate, again: float = 0.0) -> float:
        """That nothing is under, with so many seconds more of every pass that blocks are recomputed."""
        seconds, waits = least_seconds(candidate, self.rates, again), waiting(candidate)
        if not self.clipped_share or waits is candidate:
            return seconds
        return mean(seconds, least_seconds(waits, self.rates, again), self.clipped_share)

    def is_under(self, knobs: Knobs, seconds: float) -> bool:
        """Whether it takes less; it is not simulated, or not to the end, where that is clear before."""
        if self.bound(knobs) >= seconds:
            return False
        candidate, share = self.candidates.of(knobs), self.clipped_share
        if not share or (waits := waiting(candidate)) is candidate:
            return self._is_played_under(candidate, seconds)
        if share < 1:
            most = (seconds - share * least_seconds(waits, self.rates)) / (1 - share)
            if not self._is_played_under(candidate, most * ROUNDED):
                return False
        most = (seconds - (1 - share) * self.simulated(candidate).step_seconds) / share
        return self._is_played_under(waits, most * ROUNDED) and bool(self.seconds(knobs) < seconds)

    def simulated(self, candidate: Candidate) -> Simulated:
        # Others may have come to the same, and a simulation takes far longer than to look.
        same = _same(candidate)
        if same not in self._played:
            self._played[same] = simulate(candidate, self.rates)
        return self._played[same]

    def _is_played_under(self, candidate: Candidate, seconds: float) -> bool:
        same = _same(candidate)
        if same not in self._played:
            if self._over.get(same, 0.0) >= seconds:
                return False
            made = simulated_under(candidate, self.rates, seconds)
            if made is None:
                self._over[same] = seconds
                return False
            self._played[same] = made
        return self._played[same].step_seconds < seconds

    def redone_seconds(self, offer: Offer) -> float:
        """Of a clipped step among others that are not."""
        seconds = offer.simulated.step_seconds
        same = offer.clipped is offer.simulated
        return seconds if same else redone_seconds(offer.candidate, self.rates, seconds)

    def offer(self, knobs: Knobs) -> Offer:
        return self._offer(self.candidates.of(knobs), self.footprint(knobs), knobs)

    def fitting(self, candidate: Candidate) -> Offer | None:
        footprint = self.footprint_of(candidate)
        return self._offer(candidate, footprint) if self.fits(footprint) else None

    def _offer(self, candidate: Candidate, footprint: Footprint, knobs: Knobs | None = None) -> Offer:
        simulated = self.simulated(candidate)
        clipped = self.simulated(waiting(candidate)) if self.clipped_share else simulated
        return Offer(candidate, footprint, simulated, clipped, self.clipped_share, knobs)


def _same(candidate: Candidate) -> tuple[object, ...]:
    """What a simulation depends on, of the candidates of one profile."""
    return candidate.micro_batch, candidate.activations, candidate.placements, candidate.slots, candidate.prefetch
