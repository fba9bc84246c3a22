"""The fastest plan that fits: every micro-batch that was profiled, first with everything resident and all activations kept.

    minimise    seconds(m), and where several are within TIE of the least, the number of passes
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit           (forecast.py)

Where the largest micro-batch that was profiled, the whole batch unless the user wants less, does not fit so, plans that recompute
or offload activations or have part of the state on the host (space.py) are compared with these:

    minimise    simulated seconds(m, c, knobs), (1 - TIE) times that where c is the usual size of chunks; of a job that clips, the
                mean of steps that are clipped and of others (evaluation.py)
    over        m; c in the usual size of chunks, about half of it and about twice; the knobs
    subject to  the limits of the device and of the host

All m are searched in chunks of the usual size, then the knobs of the best are tried in chunks of the others, which are searched
only where they are ahead by TIE. Steps of one job in chunks of 40, 80 and 160 MiB were measured within 5 % of each other
(benchmarks/results/planned and regret, 2026-11-15): less is no reason to leave the usual size.

Over several ranks, each way to shard the state (a Division: over how many, and what of it) is a search of its own, of one rank's
share of the batch. Those that cannot be best by their bound are passed over. Of plans that are not told apart the one with fewer
moving parts is taken:

    minimise    (something is on the host, weights are sharded, each micro-batch is reduced, number of shards, seconds)
    over        the divisions whose best takes at most (1 + RANKS_TIE) times the least, 1 / (1 - WORTH_LEAVING) times longer where
                something is on the host
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from anyfit.values.plan import Forecast, Placement
from anyfit.values.profile import Division, Pass, Profile

from .evaluation import Offer
from .forecast import forecast, forecast_of, mean_seconds
from .local_search import STARTS
from .space import WORTH_LEAVING, Space, space_of

TIE = 0.05  # two forecasts closer than this are not told apart: the one with fewer passes has less that can go wrong
SIZES_TRIED = 1  # micro-batch, where any plan will do to show that something fits
DIVISIONS_WITH_HOST = 2  # that are searched with part of the state there
RANKS_TIE = 0.01  # two ways to shard the state, closer than this: the one with fewer moving parts


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
    def in_space(self) -> tuple[Space, Offer]:
        """Of one that is not among the forecasts."""
        assert self.space is not None
        assert self.offer is not None
        return self.space, self.offer


def found_in(space: Space, offer: Offer) -> Found:
    return Found(space.profile, {}, offer.candidate.micro_batch, forecast_of(space, offer), space, offer)


def fitting(profile: Profile, forecasts: Mapping[int, Forecast]) -> list[int]:
    may_keep = {each.micro_batch: each.may_keep_all for each in profile.passes}
    return [size for size, each in forecasts.items() if may_keep[size] and each.needed_bytes <= profile.device_limit_bytes]


def handicapped(space: Space, offer: Offer) -> float:
    """Seconds to compare by. Chunks of another size than the usual one, and of several ranks something on the host, count as
    slower by what they have to gain."""
    seconds = mean_seconds(space.profile, offer)
    if not space.is_alone and offer.uses_host:
        seconds /= 1 - WORTH_LEAVING
    return seconds if space.laid_out_like(offer.candidate) is space else seconds / (1 - TIE)


def fastest(
    profile: Profile,
    space: Space | None = None,
    under: float = math.inf,
    starts: int = STARTS,
    spaces: Sequence[Space] = (),
) -> Found | None:
    """What takes least; None where nothing fits. `space` is one of this profile that has seen some of it already, and `under`
    are seconds that plans with state on the host have to beat to be of interest. `spaces`: the same by way to shard, of several
    ranks."""
    if profile.divisions:
        return fastest_over_ranks(profile, spaces)
    if profile.division is not None:
        space = space or Space(profile)
        offer = _fastest_offer(space, [each.micro_batch for each in profile.passes], under, starts)
        return None if offer is None else found_in(space, offer)
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    fit = fitting(profile, forecasts)
    if max(forecasts) not in fit and (space := space or space_of(profile)) is not None:
        resident = min((forecasts[size].step_seconds for size in fit), default=math.inf)
        offer = _fastest_offer(space, list(forecasts), min(resident, under), starts)
        if offer is not None and mean_seconds(profile, offer) < (1 - TIE) * resident:
            return Found(profile, forecasts, offer.candidate.micro_batch, forecast_of(space, offer), space, offer)
    if not fit:
        return None
    least = min(forecasts[micro_batch].step_seconds for micro_batch in fit)
    fewest = max(each for each in fit if forecasts[each].step_seconds <= (1 + TIE) * least)
    return Found(profile, forecasts, fewest, forecasts[fewest], space)


def _fastest_offer(space: Space, micro_batches: list[int], under: float, starts: int) -> Offer | None:
    """Of all micro-batches in chunks of the usual size; where none fits, in chunks of the others; else like the best of them."""
    best: Offer | None = None
    for each in space.sizes:
        if best is None:
            best = _fastest_in(each, micro_batches, under, starts)
            continue
        other = each.best_like(best)
        if other is not None and handicapped(space, other) < handicapped(space, best):
            best = each.best(other.candidate.micro_batch, other.seconds, starts=1) or other
    return best


def _fastest_in(space: Space, micro_batches: list[int], under: float, starts: int) -> Offer | None:
    """In chunks of one size."""
    offers = []
    for size in micro_batches:
        offer = space.best(size, under, starts)
        if offer is not None:
            under = min(under, offer.seconds)
            offers.append(offer)
    return min(offers, key=lambda offer: handicapped(space, offer), default=None)


def most_sharded(profile: Profile) -> Profile:
    """Of several ranks, the one rank's that needs least."""
    return profile.sharded(profile.divisions[-1]) if profile.divisions else profile


def quickly(profile: Profile, space: Space | None = None) -> Found | None:
    """A plan, if not the very fastest: of the largest micro-batch that may fit. `space` is one of a profile with other limits. Of
    several ranks it is one rank's, with all sharded that can be."""
    profile = most_sharded(profile)
    space = space_of(profile) if space is None else space.with_limits_of(profile)
    passes = may_fit(profile, space)[: None if space is None else SIZES_TRIED]
    return fastest(replace(profile, passes=passes), space, starts=1) if passes else None


def may_fit(profile: Profile, space: Space | None) -> tuple[Pass, ...]:
    """The passes of which something may fit the limits."""

    def may(each: Pass) -> bool:
        if forecast(profile, each).needed_bytes <= profile.device_limit_bytes:
            return True
        taken = None if space is None else space.least_host_bytes(each.micro_batch)
        return taken is not None and taken <= profile.host_limit_bytes

    return tuple(each for each in profile.passes if may(each))


# ---------------------------------------------------------------------- over ranks


def spaces_of(profile: Profile) -> list[Space]:
    """Of several ranks, by way to shard the state."""
    return [Space(own) for own in map(profile.sharded, profile.divisions) if own.passes]


def fastest_over_ranks(profile: Profile, spaces: Sequence[Space] = ()) -> Found | None:
    """The best of all divisions, with the others that were tried. All that may be best are searched with nothing on the host;
    where that leaves something to gain, the most promising also with part of the state there. `spaces` are those of a profile
    with more micro-batches."""
    own = {space.division: space.with_limits_of(profile.sharded(space.division)) for space in spaces}
    spaces, tried, least = _tried_on_device(profile, [each for each in own.values() if each.profile.passes])
    promising = sorted((space for space in spaces if space.division in tried), key=lambda space: _promise(tried[space.division]))
    for space in promising[:DIVISIONS_WITH_HOST]:
        offer = _fastest_with_host(space, (1 - WORTH_LEAVING) * least)
        if offer is not None:
            tried[space.division] = found_in(space, offer)
            least = min(least, handicapped(space, offer))
    return _best_of(profile, tried, least)


def fastest_over_devices(profile: Profile) -> Found | None:
    """The same with nothing on the host, which takes a tenth of the time."""
    _, tried, least = _tried_on_device(profile)
    return _best_of(profile, tried, least)


def _tried_on_device(
    profile: Profile, spaces: Sequence[Space] = ()
) -> tuple[Sequence[Space], dict[Division, Found | int], float]:
    """All divisions; those that were searched, with nothing on the host; and the least seconds of these, to compare by."""
    ranks = profile.divisions[0].ranks
    if profile.batch_size % ranks:
        along = "" if profile.tensor == 1 else " of the data axis"
        raise ValueError(f"batch_size is {profile.batch_size}; it must be a multiple of the {ranks} ranks{along}")
    spaces = spaces or spaces_of(profile)
    tried: dict[Division, Found | int] = {}
    least = math.inf
    for bound, space in sorted(((space.bound(), space) for space in spaces), key=lambda pair: pair[0]):
        if bound >= (1 + RANKS_TIE) * least:
            break
        stays = fastest_on_device(space)
        tried[space.division] = space.least_needed_bytes() if stays is None else found_in(space, stays)
        least = min(least, math.inf if stays is None else handicapped(space, stays))
    return spaces, tried, least


def _best_of(profile: Profile, tried: Mapping[Division, Found | int], least: float) -> Found | None:
    best = min((each for each in tried.values() if isinstance(each, Found)), key=lambda each: _parts(each, least), default=None)
    return None if best is None else replace(best, whole=profile, tried=tried)


def fastest_on_device(space: Space) -> Offer | None:
    """With nothing on the host; in chunks of another size where only they fit."""
    for each in space.sizes:
        offers = (each.local.on_device(size) for size in each.micro_batches)
        fitting = [offer for offer in offers if offer is not None]
        if fitting:
            return min(fitting, key=lambda offer: mean_seconds(space.profile, offer))
    return None


def _fastest_with_host(space: Space, under: float) -> Offer | None:
    """In chunks of the usual size, or of another where nothing fits in those."""
    best: Offer | None = None
    for each in space.sizes if math.isinf(under) else (space,):
        for size in space.micro_batches if best is None else ():
            offer = each.local.best(size, under, starts=1)
            if offer is not None and offer.seconds < under:
                best, under = offer, offer.seconds
    return best


def _promise(tried: Found | int) -> tuple[bool, float]:
    """Those that fit first, by their seconds; then by what they need."""
    return (True, tried) if isinstance(tried, int) else (False, tried.chosen.mean_step_seconds)


def _parts(found: Found, least: float) -> tuple[bool, bool, bool, bool, int, float]:
    """Moving parts, of those within RANKS_TIE of the least seconds; seconds, of the others."""
    space, offer = found.in_space
    seconds, division = handicapped(space, offer), space.division
    if seconds >= (1 + RANKS_TIE) * least:
        return True, True, True, True, division.ranks, seconds
    return False, offer.uses_host, division.weights, division.gradients, division.shards, seconds


def described(division: Division) -> str:
    """
    >>> from anyfit.values.profile import Exchange
    >>> none = Exchange(0.0, 0.0)
    >>> described(Division(64, 8, True, True, none, none, 0.0, True))
    'all state sharded over 8, 8 replicas'
    """
    if division.shards == 1:
        return "all state replicated"
    what = "optimizer"
    if division.gradients:
        what = "all state" if division.weights else "optimizer and gradients"
    replicas = division.ranks // division.shards
    return f"{what} sharded over {division.shards}" + (f", {replicas} replicas" if replicas > 1 else "")


def among(placement: Placement, division: Division) -> Placement:
    """A rank's placement, with what is sharded over others."""
    shards = division.shards
    return replace(
        placement,
        weight_shards=shards if division.weights or placement.weights == "host" else 1,
        gradient_shards=shards if division.gradients or placement.gradients == "host" else 1,
        optimizer_shards=shards,
    )
