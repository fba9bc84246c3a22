"""The fastest plan that fits: every micro-batch that was profiled, first with everything resident and all activations kept.

    minimise    seconds(m), and where several are within TIE of the least, the number of passes
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit           (forecast.py)

Where the largest micro-batch that was profiled, the whole batch unless the user wants less, does not fit so, plans that recompute
or offload activations or have part of the state on the host (space.py) are compared with these:

    minimise    simulated seconds(m, c, knobs), (1 - TIE) times that where c is the usual size of chunks
    over        m; c in the usual size of chunks, about half of it and about twice; the knobs
    subject to  the limits of the device and of the host

All m are searched in chunks of the usual size, then the knobs of the best are tried in chunks of the others, which are searched
only where they are ahead by TIE. Steps of one job in chunks of 40, 80 and 160 MiB were measured within 5 % of each other
(benchmarks/results/planned and regret, 2026-11-15): less is no reason to leave the usual size.
"""

from __future__ import annotations

import math
from dataclasses import replace

from anyfit.values.profile import Pass, Profile

from .divisions import fastest_over_ranks
from .evaluation import Offer
from .forecast import forecast, forecast_of
from .found import TIE, Found, fitting, found_in, handicapped
from .local_search import STARTS
from .space import Space, space_of

SIZES_TRIED = 1  # micro-batch, of a plan that is only to show that something fits


def fastest(profile: Profile, space: Space | None = None, under: float = math.inf, starts: int = STARTS) -> Found | None:
    """What takes least; None where nothing fits. `space` is one of this profile that has seen some of it already, and `under`
    are seconds that plans with state on the host have to beat to be of interest."""
    if profile.divisions:
        return fastest_over_ranks(profile)
    if profile.division is not None:
        space = space or Space(profile)
        offer = _fastest_offer(space, [each.micro_batch for each in profile.passes], under, starts)
        return None if offer is None else found_in(space, offer)
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    fit = fitting(profile, forecasts)
    if max(forecasts) not in fit and (space := space or space_of(profile)) is not None:
        resident = min((forecasts[size].step_seconds for size in fit), default=math.inf)
        offer = _fastest_offer(space, list(forecasts), min(resident, under), starts)
        if offer is not None and (chosen := forecast_of(space, offer)).step_seconds < (1 - TIE) * resident:
            return Found(profile, forecasts, offer.candidate.micro_batch, chosen, space, offer)
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


def quickly(profile: Profile, space: Space | None = None) -> Found | None:
    """A plan, if not the very fastest: of the largest micro-batch that may fit. `space` is one of a profile with other limits."""
    space = space_of(profile) if space is None else space.with_limits_of(profile)
    passes = may_fit(profile, space)[: None if space is None else SIZES_TRIED]
    return fastest(replace(profile, passes=passes), space, starts=1) if passes else None


def may_fit(profile: Profile, space: Space | None) -> tuple[Pass, ...]:
    """Those passes of which something needs no more than there is."""

    def may(each: Pass) -> bool:
        if forecast(profile, each).needed_bytes <= profile.device_limit_bytes:
            return True
        taken = None if space is None else space.least_host_bytes(each.micro_batch)
        return taken is not None and taken <= profile.host_limit_bytes

    return tuple(each for each in profile.passes if may(each))
