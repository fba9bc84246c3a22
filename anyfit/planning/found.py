"""What a search has found, and how two of its finds are compared."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from anyfit.values.plan import Forecast
from anyfit.values.profile import Division, Profile

from .evaluation import Offer
from .forecast import forecast_of
from .space import WORTH_LEAVING, Space

TIE = 0.05  # two forecasts closer than this are not told apart: the one with fewer passes has less that can go wrong


@dataclass(frozen=True)
class Neighbour:
    """The best with one decision taken otherwise; without an offer, nothing fits so."""

    decision: str
    choice: str
    offer: Offer | None


@dataclass(frozen=True)
class Found:
    """The fastest there is, and what it was chosen from."""

    profile: Profile
    forecasts: Mapping[int, Forecast]  # by micro-batch: everything on the device, all activations kept
    micro_batch: int
    chosen: Forecast
    space: Space | None = None  # None: the largest micro-batch fits so, and nothing else was weighed
    offer: Offer | None = None  # None: it is one of the forecasts
    neighbours: tuple[Neighbour, ...] | None = None  # of the offer, where they were looked at
    whole: Profile | None = None  # of all ranks, where `profile` is one rank's
    # Of these, by division: the best, or the bytes of the device that are needed at least where nothing fits.
    tried: Mapping[Division, Found | int] = field(default_factory=dict)

    @property
    def fitting(self) -> list[int]:
        return fitting(self.profile, self.forecasts)

    @property
    def in_space(self) -> tuple[Space, Offer]:
        """Of one that is not among the forecasts."""
        assert self.space is not None
        assert self.offer is not None
        return self.space, self.offer


def found_in(space: Space, offer: Offer) -> Found:
    return Found(space.profile, {}, offer.candidate.micro_batch, forecast_of(space, offer), space, offer)


def fitting(profile: Profile, forecasts: Mapping[int, Forecast]) -> list[int]:
    return [size for size, each in forecasts.items() if each.needed_bytes <= profile.device_limit_bytes]


def handicapped(space: Space, offer: Offer) -> float:
    """Seconds; as so many more in chunks of another size as make it worth to leave the usual one, and likewise, of one of
    several ranks, with something on the host."""
    seconds = forecast_of(space, offer).step_seconds
    if not space.is_alone and offer.uses_host:
        seconds /= 1 - WORTH_LEAVING
    return seconds if space.laid_out_like(offer.candidate) is space else seconds / (1 - TIE)
