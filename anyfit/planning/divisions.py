"""The search over ranks: each way to shard the state among them (a Division: over how many, and what of it) is a search of its
own, of one rank's share of the batch; those that cannot be best by their bound are passed over.

Of plans that are not told apart the one with fewer moving parts is taken:

    minimise    (something is on the host, weights are sharded, each micro-batch is reduced, number of shards, seconds)
    over        the divisions whose best takes at most (1 + RANKS_TIE) times the least, 1 / (1 - WORTH_LEAVING) times longer where
                something is on the host
"""

from __future__ import annotations

import math
from dataclasses import replace

from anyfit.values.plan import Placement
from anyfit.values.profile import Division, Profile

from .evaluation import Offer
from .forecast import forecast_of
from .found import Found, found_in, handicapped
from .space import WORTH_LEAVING, Space

DIVISIONS_WITH_HOST = 2  # that are searched with part of the state there
RANKS_TIE = 0.01  # two ways to shard the state, closer than this: the one with fewer moving parts


def fastest_over_ranks(profile: Profile) -> Found | None:
    """The best of all divisions, with the others that were tried: all of them with nothing on the host, but those that cannot be
    best; and where that leaves something to be gained, the most promising with part of it there."""
    ranks = profile.divisions[0].ranks
    if profile.batch_size % ranks:
        raise ValueError(f"batch_size is {profile.batch_size}; it must be a multiple of the {ranks} ranks")
    spaces = [Space(own) for own in map(profile.sharded, profile.divisions) if own.passes]
    tried: dict[Division, Found | int] = {}
    least = math.inf
    for bound, space in sorted(((space.bound(), space) for space in spaces), key=lambda pair: pair[0]):
        if bound >= (1 + RANKS_TIE) * least:
            break
        stays = fastest_on_device(space)
        tried[_division(space)] = least_needed_bytes(space) if stays is None else found_in(space, stays)
        least = min(least, math.inf if stays is None else handicapped(space, stays))
    promising = sorted(
        (space for space in spaces if _division(space) in tried), key=lambda space: _promise(tried[_division(space)])
    )
    for space in promising[:DIVISIONS_WITH_HOST]:
        offer = _fastest_with_host(space, (1 - WORTH_LEAVING) * least)
        if offer is not None:
            tried[_division(space)] = found_in(space, offer)
            least = min(least, handicapped(space, offer))
    best = min((each for each in tried.values() if isinstance(each, Found)), key=lambda each: _parts(each, least), default=None)
    return None if best is None else replace(best, whole=profile, tried=tried)


def fastest_on_device(space: Space) -> Offer | None:
    """With nothing on the host; in chunks of another size where only they fit."""
    for each in space.sizes:
        offers = (each.local.on_device(size) for size in each.micro_batches)
        fitting = [offer for offer in offers if offer is not None]
        if fitting:
            return min(fitting, key=lambda offer: forecast_of(space, offer).step_seconds)
    return None


def least_needed_bytes(space: Space) -> int:
    """Of the device, with nothing on the host."""
    return min(each.least_needed_bytes() for each in space.sizes)


def _fastest_with_host(space: Space, under: float) -> Offer | None:
    """In chunks of the usual size, or of another where nothing fits in those."""
    best: Offer | None = None
    for each in space.sizes if math.isinf(under) else (space,):
        for size in space.micro_batches if best is None else ():
            offer = each.local.best(size, under, starts=1)
            if offer is not None and offer.seconds < under:
                best, under = offer, offer.seconds
    return best


def _division(space: Space) -> Division:
    return space.candidates.division


def _promise(tried: Found | int) -> tuple[bool, float]:
    """Those that fit first, by their seconds; then by what they need."""
    return (True, tried) if isinstance(tried, int) else (False, tried.chosen.step_seconds)


def _parts(found: Found, least: float) -> tuple[bool, bool, bool, bool, int, float]:
    """What moves, of those that are not told apart from the least seconds; seconds, of the others."""
    space, offer = found.in_space
    seconds, division = handicapped(space, offer), _division(space)
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
