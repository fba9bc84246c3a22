"""The search: every micro-batch that was profiled, first with everything resident on one device and all activations kept.

    minimise    seconds(m), and where several are within TIE of the least, the number of passes
    with        seconds(m) = B / m * pass_seconds(m) + passes(m) * adding_seconds + update_seconds
                passes(m) = ceil(B / m)        (a smaller last micro-batch costs its share; of one pass, nothing is added up)
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit
    where       peak(m) = state + workspaces + max(pass_peak(m), gradients + update scratch)
                reserved(m) = max(peak(m), what the allocator was seen to reserve) + context

With several micro-batches a step, gradient sums are held all along; with one, each gradient lives from its birth to the update.
Where the largest micro-batch that was profiled, the whole batch unless the user wants less, does not fit so, plans that make
blocks again, move what they keep, or have part of the state on the host (offload.py) are weighed against these:

    minimise    simulated seconds(m, c, knobs), (1 - TIE) times that where c is the usual size of chunks
    over        m; c in the usual size of chunks, about half of it and about twice; the knobs
    subject to  the limits of the device and of the host

All m are searched in chunks of the usual size, then the knobs of the best are tried in chunks of the others, which are searched
only where they are ahead by TIE. Steps of one job in chunks of 40, 80 and 160 MiB were measured within 5 % of each other
(benchmarks/results/planned.json, planned-regret.json): less is no reason to leave the usual size.

Of several ranks, each way to divide the state among them (a Division: over how many, and what of it) is such a search, of one
rank's share of the batch; those that cannot be best by their bound are passed over. Of plans that are not told apart the one with
fewer moving parts is taken:

    minimise    (something is on the host, weights are divided, each micro-batch is reduced, number of shards, seconds)
    over        the divisions whose best takes at most (1 + RANKS_TIE) times the least, 1 / (1 - TIE) times longer where
                something is on the host
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import product
from typing import Literal

from anyfit.values.plan import (
    AXES,
    TIERS,
    Activations,
    Alternative,
    Change,
    Decision,
    Fingerprint,
    Forecast,
    NoPlan,
    Placement,
    Plan,
    Stage,
)
from anyfit.values.profile import Division, Pass, Profile
from anyfit.values.units import show_bytes, show_count, show_seconds

from .offload import STARTS, WORTH_LEAVING, Knobs, Offer, Space, add_seconds

# Of peak memory: tests/planning/test_planned.py has the GPU's; on a CPU a chunk's gradients are counted from their first on.
OFFLOAD_PEAK_ERROR = {"cuda": 0.02, "cpu": 0.08}
# From building to the first step, as benchmarks/results/mixed.json has it: parameters that are placed, host memory made ready.
START_SECONDS, PLACED_PER_SECOND, MADE_READY_PER_SECOND = 2.0, 0.38e9, 9e9
# Of step time, where part of the state is on the host: tests/planning/test_planned.py has the GPU's; on a CPU all shares cores.
OFFLOAD_ERROR = {"cuda": 0.26, "cpu": 1.0}
NOT_KEPT: dict[Activations, str] = {
    "recompute": "made again in backward",
    "selective": "made again but for the costly ops",
    "offload": "moved to the host and back",
}
DEVICE_FOR_HOST = 1.15  # of what the host lacks, on the device: what moves there takes a little room to work
SIZES_TRIED = 1  # micro-batch, of a plan that is only to show that something fits
MOST_TIMES = 4  # as much device memory: more is no change that anyone makes
DIVISIONS_WITH_HOST = 2  # that are searched with part of the state there
RANKS_TIE = 0.01  # two ways to divide the state, closer than this: the one with fewer moving parts
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
        return _fitting(self.profile, self.forecasts)


def search(profile: Profile) -> Plan:
    """The best plan for this profile, or NoPlan with the smallest shortfall."""
    found = fastest(profile)
    if found is None:
        raise no_plan(profile)
    return explained(found)


def fastest(profile: Profile, space: Space | None = None, under: float = float("inf"), starts: int = STARTS) -> Found | None:
    """What takes least; None where nothing fits. `space` is one of this profile that has seen some of it already, and `under`
    are seconds that plans with state on the host have to beat to be of interest."""
    if profile.divisions:
        return _fastest_over_ranks(profile)
    if profile.division is not None:
        return _fastest_of_rank(profile, space or space_of(profile), under, starts)
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    fitting = _fitting(profile, forecasts)
    if max(forecasts) not in fitting and (space := space or space_of(profile)) is not None:
        resident = min((forecasts[size].step_seconds for size in fitting), default=float("inf"))
        offer = _fastest_offer(space, list(forecasts), min(resident, under), starts)
        if offer is not None and (chosen := _forecast_of(space, offer)).step_seconds < (1 - TIE) * resident:
            return Found(profile, forecasts, offer.candidate.each.micro_batch, chosen, space, offer)
    if not fitting:
        return None
    least = min(forecasts[micro_batch].step_seconds for micro_batch in fitting)
    fewest = max(each for each in fitting if forecasts[each].step_seconds <= (1 + TIE) * least)
    return Found(profile, forecasts, fewest, forecasts[fewest], space)


def _fastest_of_rank(profile: Profile, space: Space | None, under: float, starts: int) -> Found | None:
    """One of several, whose state is divided in one way."""
    assert space is not None
    offer = _fastest_offer(space, [each.micro_batch for each in profile.passes], under, starts)
    return None if offer is None else _found_in(space, offer)


def _fastest_with_host(space: Space, micro_batches: list[int], under: float) -> Offer | None:
    """In chunks of the usual size, or of another where nothing fits in those."""
    offers: list[Offer] = []
    for each in space.sizes if math.isinf(under) else (space,):
        for size in micro_batches if not offers else ():
            offer = each.best_knobs(size, under, starts=1)
            if offer is not None and offer.simulated.step_seconds < under:
                under = offer.simulated.step_seconds
                offers.append(offer)
    return offers[-1] if offers else None


def _found_in(space: Space, offer: Offer) -> Found:
    return Found(space.profile, {}, offer.candidate.each.micro_batch, _forecast_of(space, offer), space, offer)


def _fastest_over_ranks(profile: Profile) -> Found | None:
    """The best of all ways to divide the state, with the others that were tried: all of them with nothing on the host, but those
    that cannot be best; and where that leaves something to be gained, the most promising with part of it there."""
    ranks = profile.divisions[0].ranks
    if profile.batch_size % ranks:
        raise ValueError(f"batch_size is {profile.batch_size}; it must be a multiple of the {ranks} ranks")
    spaces = [Space(own) for own in map(profile.divided, profile.divisions) if own.passes]
    tried: dict[Division, Found | int] = {}
    least = float("inf")
    for bound, space in sorted(((_bound(space), space) for space in spaces), key=lambda pair: pair[0]):
        if bound >= (1 + RANKS_TIE) * least:
            break
        stays = _fastest_on_device(space)
        tried[_division(space)] = _least_needed(space) if stays is None else _found_in(space, stays)
        least = min(least, math.inf if stays is None else _handicapped(space, stays))
    promising = sorted(
        (space for space in spaces if _division(space) in tried), key=lambda space: _promise(tried[_division(space)])
    )
    for space in promising[:DIVISIONS_WITH_HOST]:
        sizes = [each.micro_batch for each in space.profile.passes]
        offer = _fastest_with_host(space, sizes, (1 - WORTH_LEAVING) * least)
        if offer is not None:
            tried[_division(space)] = _found_in(space, offer)
            least = min(least, _handicapped(space, offer))
    best = min((each for each in tried.values() if isinstance(each, Found)), key=lambda each: _parts(each, least), default=None)
    return None if best is None else replace(best, whole=profile, tried=tried)


def _division(space: Space) -> Division:
    assert space.profile.division is not None
    return space.profile.division


def _promise(tried: Found | int) -> tuple[bool, float]:
    """Those that fit first, by their seconds; then by what they need."""
    return (True, tried) if isinstance(tried, int) else (False, tried.chosen.step_seconds)


def _fastest_on_device(space: Space) -> Offer | None:
    """With nothing on the host; in chunks of another size where only they fit."""
    for each in space.sizes:
        offers = (each.on_device(one.micro_batch) for one in each.profile.passes)
        fitting = [offer for offer in offers if offer is not None]
        if fitting:
            return min(fitting, key=lambda offer: _forecast_of(space, offer).step_seconds)
    return None


def _bound(space: Space) -> float:
    """Seconds that nothing so divided is under."""
    profile, count = space.profile, len(space.profile.chunks)
    sizes = [each.micro_batch for each in profile.passes]
    return min(space.bound(Knobs(size, resident=count)) - space.resident_seconds(size) for size in sizes)


def _least_needed(space: Space) -> int:
    """Bytes of the device, with nothing on the host."""
    sizes = [each.micro_batch for each in space.profile.passes]
    return min(each.needed_bytes(each.weight(each.least_on_device(size))) for each, size in product(space.sizes, sizes))


def _parts(found: Found, least: float) -> tuple[bool, bool, bool, bool, int, float]:
    """What moves, of those that are not told apart from the least seconds; seconds, of the others."""
    offer, space, division = found.offer, found.space, found.profile.division
    assert offer is not None
    assert space is not None
    assert division is not None
    seconds = _handicapped(space, offer)
    if seconds >= (1 + RANKS_TIE) * least:
        return True, True, True, True, division.ranks, seconds
    return False, offer.uses_host, division.weights, division.gradients, division.shards, seconds


def _fastest_offer(space: Space, micro_batches: list[int], under: float, starts: int) -> Offer | None:
    """Of all micro-batches in chunks of the usual size; where none fits, in chunks of the others; else like the best of them."""
    best: Offer | None = None
    for each in space.sizes:
        if best is None:
            best = _fastest_in(each, micro_batches, under, starts)
            continue
        other = each.best_like(best)
        if other is not None and _handicapped(space, other) < _handicapped(space, best):
            searched = each.best(other.candidate.each.micro_batch, other.simulated.step_seconds, starts=1)
            best = searched or other
    return best


def _fastest_in(space: Space, micro_batches: list[int], under: float, starts: int) -> Offer | None:
    """In chunks of one size."""
    offers = []
    for size in micro_batches:
        offer = space.best(size, under, starts)
        if offer is not None:
            under = min(under, offer.simulated.step_seconds)
            offers.append(offer)
    return min(offers, key=lambda offer: _handicapped(space, offer), default=None)


def _handicapped(space: Space, offer: Offer) -> float:
    """Seconds; as so many more in chunks of another size as make it worth to leave the usual one, and likewise, of one of
    several ranks, with something on the host."""
    seconds = _forecast_of(space, offer).step_seconds
    if space.profile.division is not None and offer.uses_host:
        seconds /= 1 - WORTH_LEAVING
    return seconds if space.laid_out_like(offer.candidate) is space else seconds / (1 - TIE)


def _fitting(profile: Profile, forecasts: Mapping[int, Forecast]) -> list[int]:
    return [size for size, each in forecasts.items() if each.needed_bytes <= profile.device_limit_bytes]


def explained(found: Found) -> Plan:
    """The plan, with what its neighbours would cost."""
    if found.offer is None:
        return _resident(found)
    settled_on = settled(found)
    plan = _offloaded(settled_on)
    return plan if settled_on.whole is None else _of_all_ranks(settled_on, plan)


def settled(found: Found) -> Found:
    """The same with its neighbours. One of them that is faster, which the search passed by, takes its place."""
    while found.offer is not None and found.neighbours is None:
        space, neighbours = found.space, _neighbours(found)
        assert space is not None
        offers = [each.offer for each in neighbours if each.offer is not None]
        best = min([found.offer, *offers], key=lambda offer: _handicapped(space, offer))
        if best is found.offer:
            return replace(found, neighbours=tuple(neighbours))
        found = replace(found, micro_batch=best.candidate.each.micro_batch, chosen=_forecast_of(space, best), offer=best)
    return found


def _resident(found: Found) -> Plan:
    """The best with everything on the device and all activations kept."""
    profile, chosen, limit = found.profile, found.chosen, found.profile.device_limit_bytes
    alternatives = tuple(
        Alternative(
            decision="micro-batch",
            choice=_passes(profile.batch_size, micro_batch),
            step_seconds=other.step_seconds,
            device_bytes=other.needed_bytes,
            fits=other.needed_bytes <= limit,
        )
        for micro_batch, other in found.forecasts.items()
        if micro_batch != found.micro_batch
    )
    state = Decision("model state", "all on the device", f"it fits, {show_bytes(limit - chosen.needed_bytes)} to spare")
    return _plan(found, (state,), alternatives, _why("micro-batch", chosen, alternatives, "the only one asked for"))


def _plan(found: Found, decisions: tuple[Decision, ...], alternatives: tuple[Alternative, ...], why_so_many: str) -> Plan:
    profile, micro_batch, offer = found.profile, found.micro_batch, found.offer
    limits = (profile.device_limit_bytes, profile.host_limit_bytes, profile.disk_limit_bytes)
    activations: dict[str, Activations] = {}
    placements: tuple[Placement, ...] = ()
    if offer is not None:
        pairs = zip(offer.candidate.each.blocks, offer.candidate.activations, strict=True)
        activations = {block.name: choice for block, choice in pairs if choice != "keep"}
        placements = offer.candidate.placements
    return Plan(
        model=profile.model,
        machine=profile.machine,
        parameters=profile.parameters,
        precision=profile.precision,
        batch_size=profile.batch_size,
        micro_batch=micro_batch,
        accumulation=_accumulation(profile.batch_size, micro_batch),
        mesh=dict.fromkeys(AXES, 1),
        stages=(Stage(0, profile.blocks - 1, activations),),
        chunk_bytes=profile.chunk_bytes if offer is None else _chunk_bytes(found.space, offer),
        chunks=placements,
        slots=0 if offer is None else offer.candidate.slots,
        prefetch=0 if offer is None else offer.candidate.prefetch,
        limit_bytes=dict(zip(TIERS, limits, strict=True)),
        forecast=found.chosen,
        decisions=(
            *decisions,
            Decision("micro-batch", _passes(profile.batch_size, micro_batch), why_so_many),
            *([Decision("loss", "the batch is not cut", profile.loss.why)] if not profile.loss.may_be_cut else []),
            *([Decision("state stays", "on the device", profile.state_stays)] if profile.state_stays else []),
            *([Decision("kept blocks", ", ".join(profile.kept), next(iter(profile.kept.values())))] if profile.kept else []),
            *([Decision("trace", profile.traced, "; ".join(profile.notes))] if profile.notes else []),
            *([Decision("margin", f"{found.chosen.reserved_error:.0%}", profile.correction.why)] if profile.correction else []),
            *([Decision("pace", profile.pace.choice, profile.pace.why)] if profile.pace else []),
        ),
        alternatives=alternatives,
        fingerprint=Fingerprint(profile.model_fingerprint, profile.machine_fingerprint),
        loss=profile.loss,
    )


def _offloaded(found: Found) -> Plan:
    """The best that makes blocks again, moves what they keep or has state on the host."""
    chosen, offer, space, neighbours = found.chosen, found.offer, found.space, found.neighbours
    assert offer is not None
    assert space is not None
    assert neighbours is not None
    alternatives = []
    for each in neighbours:
        if each.offer is not None:
            priced = _forecast_of(space, each.offer)
            alternatives.append(Alternative(each.decision, each.choice, priced.step_seconds, priced.needed_bytes, fits=True))
    without = {
        "updates": "a CPU has nothing to stream them through",
        "speculation": "the gradients of several passes add up first",
        "activations": "no block can be made again or moved",
        "chunk size": "other sizes make the same chunks",
        "micro-batch": "the only one asked for",
    }
    for each in neighbours:
        if each.offer is None:
            without[each.decision] = f"{each.choice} would not fit"
    why = {name: _why(name, chosen, tuple(alternatives), none) for name, none in without.items()}
    decisions = (
        Decision("model state", _where(offer), _why_there(found, offer, space)),
        *(Decision(name, choice, why[name]) for name, choice in _choices(offer, is_gpu=space.is_gpu).items()),
        Decision("chunk size", show_bytes(_chunk_bytes(space, offer)), why["chunk size"]),
    )
    return _plan(found, decisions, tuple(alternatives), why["micro-batch"])


def _why_there(found: Found, offer: Offer, space: Space) -> str:
    """What all on the device would cost."""
    chosen, limit = found.chosen, found.profile.device_limit_bytes
    if found.profile.division is None:
        what = "all on the device, with all activations kept,"
        seconds = [found.forecasts[size].step_seconds for size in found.fitting]
        least = min(each.needed_bytes for each in found.forecasts.values())
    elif not offer.uses_host:
        return f"it fits, {show_bytes(limit - chosen.needed_bytes)} to spare"
    else:
        what, stays = "nothing on the host", _fastest_on_device(space)
        seconds = [] if stays is None else [_forecast_of(space, stays).step_seconds]
        least = _least_needed(space)
    if seconds:
        return f"{what} would take {show_seconds(min(seconds) - chosen.step_seconds)} more a step"
    return f"{what} would need {show_bytes(least)} at least"


def _of_all_ranks(found: Found, plan: Plan) -> Plan:
    """One rank's plan, as that of all of them."""
    whole, division, forecast = found.whole, found.profile.division, plan.forecast
    assert whole is not None
    assert division is not None
    others = {other: _alternative(other, each) for other, each in found.tried.items() if other != division}
    ranks = Decision("ranks", f"{division.ranks}: {described(division)}", _why_divided(found, others, plan.forecast))
    notes = [Decision("links", "assumed", whole.link_note)] if whole.link_note else []
    return replace(
        plan,
        batch_size=whole.batch_size,
        mesh={**plan.mesh, "data": division.ranks},
        chunks=tuple(among(placement, division) for placement in plan.chunks),
        forecast=replace(
            forecast,
            samples_per_second=forecast.samples_per_second * division.ranks,
            tokens_per_second=forecast.tokens_per_second * division.ranks,
        ),
        decisions=(ranks, *plan.decisions, *notes),
        alternatives=(*(each for each in others.values() if each.fits), *plan.alternatives),
    )


def _alternative(division: Division, tried: Found | int) -> Alternative:
    if isinstance(tried, int):
        return Alternative("ranks", f"{described(division)} (nothing on the host)", math.inf, tried, fits=False)
    host = "part of it" if tried.offer is not None and tried.offer.uses_host else "nothing"
    choice = f"{described(division)} ({host} on the host)"
    return Alternative("ranks", choice, tried.chosen.step_seconds, tried.chosen.needed_bytes, fits=True)


def _why_divided(found: Found, others: Mapping[Division, Alternative], chosen: Forecast) -> str:
    """The fastest other way that fits; and of those with fewer moving parts that do not, the one that lacks least."""
    mine = found.profile.division
    assert mine is not None
    fitting = tuple(each for each in others.values() if each.fits)
    simpler = (
        each for each in others if (each.weights, each.gradients, each.shards) < (mine.weights, mine.gradients, mine.shards)
    )
    lacking = tuple(others[each] for each in simpler if not others[each].fits)
    said = [_why("ranks", chosen, each, "") for each in (fitting, lacking) if each]
    return "; ".join(said) or "no other could take less"


def described(division: Division) -> str:
    """
    >>> from anyfit.values.profile import Exchange
    >>> none = Exchange(0.0, 0.0)
    >>> described(Division(64, 8, True, True, none, none, 0.0, True))
    'all state divided over 8, the same on the next 8'
    """
    if division.shards == 1:
        return "all state whole on each"
    what = "optimizer"
    if division.gradients:
        what = "all state" if division.weights else "optimizer and gradients"
    same = f", the same on the next {division.shards}" if division.shards < division.ranks else ""
    return f"{what} divided over {division.shards}{same}"


def among(placement: Placement, division: Division) -> Placement:
    """A rank's placement, with what it divides with others."""
    shards = division.shards
    return replace(
        placement,
        weight_shards=shards if division.weights or placement.weights == "host" else 1,
        gradient_shards=shards if division.gradients or placement.gradients == "host" else 1,
        optimizer_shards=shards,
    )


def _choices(offer: Offer, *, is_gpu: bool) -> dict[str, str]:
    """By decision, what was chosen, where there was a choice: a CPU's updates always wait, as nothing runs beside it."""
    found: dict[str, str] = {}
    elements = _by_route(offer)
    if elements["streamed"] or elements["host"]:
        names = {"resident": "on the device", "streamed": "streamed through it", "host": "on the host"}
        found["updates"] = ", ".join(f"{show_count(elements[route])} {name}" for route, name in names.items() if elements[route])
        if is_gpu:
            speculates = _speculates(offer)
            found["speculation"] = "updates begin before the norm is known" if speculates else "updates wait for the norm"
    blocks = Counter(offer.candidate.activations)
    said = [f"{blocks[name]} block{'s' * (blocks[name] > 1)} {verb}" for name, verb in NOT_KEPT.items() if blocks[name]]
    found["activations"] = ", ".join(said) or "all kept"
    return found


def _neighbours(found: Found) -> list[Neighbour]:
    """The best plans with one decision taken otherwise, all others searched anew."""
    profile, micro_batch, offer = found.profile, found.micro_batch, found.offer
    assert offer is not None
    assert found.space is not None
    space = found.space.laid_out_like(offer.candidate)
    neighbours: list[Neighbour] = []

    def add(decision: str, choice: str, size: int = micro_batch, **forced: float) -> None:
        other = space.best(size, starts=1, **forced)
        if other is None or other.candidate != offer.candidate:
            neighbours.append(Neighbour(decision, choice, other))

    elements = _by_route(offer)
    if space.is_gpu and elements["host"] + elements["streamed"]:
        if elements["streamed"]:
            add("updates", "none streamed", streamed=0.0)
        if elements["host"]:
            add("updates", "none on the host", streamed=1.0, host_first=0.0)
        if offer.candidate.accumulation == 1:
            said = "updates that wait for the norm" if _speculates(offer) else "updates before the norm is known"
            add("speculation", said, speculates=not _speculates(offer))
    if space.last_rung(micro_batch):
        add("activations", "all made again", rung=space.last_rung(micro_batch), moved=0)
        add("activations", "all kept", rung=0, moved=0)
    if "offload" in offer.candidate.activations:
        add("activations", "none moved", moved=0)
    elif space.all_moved(micro_batch):
        add("activations", "all moved", rung=0, moved=space.all_moved(micro_batch))
    others = {each.micro_batch for each in profile.passes} - {micro_batch}
    for size in sorted(others, key=lambda size: abs(size - micro_batch))[:1]:
        add("micro-batch", _passes(profile.batch_size, size), size)
    for each in found.space.sizes:
        if each is not space:
            choice = f"chunks of {show_bytes(each.profile.offload_chunk_bytes)}"
            neighbours.append(Neighbour("chunk size", choice, each.best_like(offer)))
    return neighbours


def _chunk_bytes(space: Space | None, offer: Offer) -> int:
    assert space is not None
    return space.laid_out_like(offer.candidate).profile.offload_chunk_bytes


def _speculates(offer: Offer) -> bool:
    return any(placement.speculates for placement in offer.candidate.placements)


def _by_route(offer: Offer) -> Counter[str]:
    elements = Counter[str]()
    for chunk, placement in zip(offer.candidate.chunks, offer.candidate.placements, strict=True):
        elements[placement.route] += chunk.elements if chunk.is_updated else 0
    return elements


def _where(offer: Offer) -> str:
    elements = _by_route(offer)
    pairs = zip(offer.candidate.chunks, offer.candidate.placements, strict=True)
    away = [chunk for chunk, placement in pairs if placement.weights == "host"]
    parts = []
    if elements["resident"] < sum(elements.values()):
        parts.append(f"optimizer of {show_count(elements['resident'])} parameters on the device, of the others on the host")
    if away:
        size = show_bytes(sum(chunk.weights_bytes for chunk in away))
        parts.append(f"{size} of weights on the host, fetched through {offer.candidate.slots} slots")
    return "; ".join(parts) or "all on the device"


def _forecast_of(space: Space, offer: Offer) -> Forecast:
    profile, each, simulated = space.profile, offer.candidate.each, offer.simulated
    plain = forecast(profile, each)
    passes = profile.batch_size / each.micro_batch
    whole = passes / offer.candidate.accumulation  # of its passes: the last may be smaller
    waits = simulated.waits_seconds
    own = offer.candidate.accumulation * each.seconds_recompute  # what the model makes again without being told by a plan
    seconds = {
        "compute": whole * (simulated.compute_seconds - own),
        "recompute": whole * (simulated.recompute_seconds + own),
        "exposed update": waits["update"] + waits["gradients"],
        "exposed offload": waits["fetch"] + waits["activations"],
        "exposed communication": waits["exchange"],
    }
    seconds["update"] = simulated.step_seconds - (simulated.compute_seconds + simulated.recompute_seconds) - sum(waits.values())
    total = sum(seconds.values())
    share = plain.step_seconds / total
    return replace(
        plain,
        step_seconds=total,
        step_error=max(plain.step_error, OFFLOAD_ERROR["cuda" if space.is_gpu else "cpu"])
        + profile.link_error * simulated.exchange_seconds / total,
        split_seconds=seconds,
        peak_bytes={"device": offer.weight.device_bytes, "host": offer.weight.host_bytes, "disk": 0},
        peak_error=max(plain.peak_error, OFFLOAD_PEAK_ERROR["cuda" if space.is_gpu else "cpu"]),
        reserved_bytes=space.reserved_bytes(offer.weight),
        reserved_error=profile.offload_error,
        samples_per_second=plain.samples_per_second * share,
        tokens_per_second=plain.tokens_per_second * share,
        compute_share=plain.compute_share * share,
        start_seconds=_start_seconds(profile, offer.weight.host_bytes),
    )


def forecast(profile: Profile, each: Pass) -> Forecast:
    """What a step costs when this pass is its micro-batch."""
    state, update = profile.state, profile.update
    accumulation = _accumulation(profile.batch_size, each.micro_batch)
    passes = profile.batch_size / each.micro_batch
    if accumulation == 1:
        peak = state.resident + max(each.peak_bytes, state.gradients + update.scratch_bytes)
    else:
        peak = state.resident + state.accumulators + max(each.peak_bytes_accumulating, update.scratch_bytes)
    peak += profile.workspace_bytes
    compute = passes * (each.seconds - each.seconds_recompute)
    recompute = passes * each.seconds_recompute
    updated = update.seconds + (accumulation > 1) * accumulation * profile.trainable * add_seconds(profile)
    seconds = compute + recompute + updated
    return Forecast(
        step_seconds=seconds,
        step_error=profile.time_error,
        split_seconds={"compute": compute, "recompute": recompute, "update": updated},
        peak_bytes={"device": peak, "host": 0, "disk": 0},
        peak_error=profile.memory_error,
        reserved_bytes=max(each.reserved_bytes, peak) + profile.context_bytes,
        reserved_error=profile.reserved_error,
        samples_per_second=profile.batch_size / seconds,
        tokens_per_second=passes * each.tokens / seconds,
        compute_share=passes * each.flops / seconds / profile.peak_flops_per_second,
        start_seconds=_start_seconds(profile, 0),
    )


def _start_seconds(profile: Profile, host_bytes: int) -> float:
    """To place the state beside a GPU; on a CPU nobody has measured it."""
    if profile.host is None or not profile.host.overlaps:
        return 0.0
    return START_SECONDS + profile.parameters / PLACED_PER_SECOND + host_bytes / MADE_READY_PER_SECOND


def _accumulation(batch_size: int, micro_batch: int) -> int:
    return -(-batch_size // micro_batch)


def _passes(batch_size: int, micro_batch: int) -> str:
    count = _accumulation(batch_size, micro_batch)
    return f"{batch_size} in one pass" if count == 1 else f"{micro_batch}, {count} passes a step"


def _why(decision: str, chosen: Forecast, alternatives: tuple[Alternative, ...], without: str) -> str:
    """The best rejected neighbour and its price."""
    alternatives = tuple(other for other in alternatives if other.decision == decision)
    if not alternatives:
        return without
    best = min(alternatives, key=lambda other: other.step_seconds if other.fits else float("inf"))
    if not best.fits:
        least = min(alternatives, key=lambda other: other.device_bytes)
        return f"{least.choice} would need {show_bytes(least.device_bytes)} and does not fit"
    later = best.step_seconds - chosen.step_seconds
    room = chosen.needed_bytes - best.device_bytes
    memory = f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
    if later < 0:
        usual = {"chunk size": "the usual size", "ranks": "fewer moving parts"}.get(decision, "the fewest passes")
        return f"{usual}; {best.choice} would take {show_seconds(-later)} less, too close to tell apart, and {memory}"
    return f"{best.choice} would take {show_seconds(later)} more a step and {memory}"


# ---------------------------------------------------------------------- when nothing fits


def no_plan(profile: Profile) -> NoPlan:
    """The verdict on a profile of which nothing fits, with the memory that was found to be enough."""
    if profile.divisions:  # the most that can be divided is what needs least
        profile = profile.divided(profile.divisions[-1])
    verdict = shortfall(profile)
    return verdict.because(_restrictions(profile)).with_changes(tuple(_enough_memory(profile, verdict)))


def _restrictions(profile: Profile) -> str:
    """What the model does that keeps the planner from making it smaller."""
    said = []
    if not profile.loss.may_be_cut:
        said.append(f"the batch is not cut: {profile.loss.why}; {profile.loss.ways_out}")
    if profile.state_stays:
        said.append(f"all state stays on the device: {profile.state_stays}")
    if profile.kept:
        name, why = next(iter(profile.kept.items()))
        others = f" (and {len(profile.kept) - 1} more)" if len(profile.kept) > 1 else ""
        said.append(f"{name}{others} is not recomputed: {why}")
    return "; ".join(said)


def shortfall(profile: Profile) -> NoPlan:
    """The verdict alone."""
    if profile.divisions:
        profile = profile.divided(profile.divisions[-1])
    model = profile.model if profile.division is None else f"{profile.model} over {profile.division.ranks} ranks"
    needed = {each.micro_batch: (forecast(profile, each).needed_bytes, 0) for each in profile.passes}  # of device and host
    space = space_of(profile)
    if space is not None:
        least_host = _least_host_bytes(space)
        if least_host is not None:
            lacking = least_host - profile.host_limit_bytes
            return NoPlan(
                f"{model} does not fit: what the device has no room for takes {show_bytes(least_host)} of host memory, "
                f"and {show_bytes(profile.host_limit_bytes)} are allowed: {show_bytes(lacking)} too little{_margin(profile)}",
                lacking,
                "host",
            )
        for each, size in product(space.sizes, needed):
            smallest = each.weight(each.least(size))
            needed[size] = min(needed[size], (space.needed_bytes(smallest), smallest.host_bytes))
    micro_batch = min(needed, key=lambda size: needed[size][0])
    least, on_host = needed[micro_batch]
    lacking = least - profile.device_limit_bytes
    where = next(each.peak_at for each in profile.passes if each.micro_batch == micro_batch)
    state = f"{show_bytes(profile.state.resident)} of that is model state"
    if on_host:
        state = "with all the model state it can on the host"
    return NoPlan(
        f"{model} does not fit: with micro-batches of {micro_batch} it needs {show_bytes(least)} of device memory "
        f"({state}; the peak is at {where}), and "
        f"{show_bytes(profile.device_limit_bytes)} are allowed: {show_bytes(lacking)} too little{_margin(profile)}",
        lacking,
        "device",
    )


def _margin(profile: Profile) -> str:
    """What a run has shown, where that makes it need more."""
    if profile.correction is None:
        return ""
    return f". That has a margin of {profile.correction.error:.0%}: {profile.correction.why}"


def _least_host_bytes(space: Space) -> int | None:
    """What the host has to hold at least, whatever the micro-batch; None where the device is too small for all of them."""
    taken = (_least_host_bytes_with(space, each) for each in space.profile.passes)
    return min((each for each in taken if each is not None), default=None)


def _least_host_bytes_with(space: Space, each: Pass) -> int | None:
    taken = (sized.least_host_bytes(each.micro_batch) for sized in space.sizes)
    return min((size for size in taken if size is not None), default=None)


def _enough_memory(profile: Profile, verdict: NoPlan) -> Iterator[Change]:
    """More of the device or of the host, as little as was found to do."""
    space = space_of(profile)
    device, host = profile.device_limit_bytes, profile.host_limit_bytes
    if verdict.tier == "device":
        larger = replace(profile, device_limit_bytes=rounded_up(device + verdict.shortfall_bytes))
        yield from _with_memory(larger, space, "device")
        return
    yield from _with_memory(replace(profile, host_limit_bytes=rounded_up(host + verdict.shortfall_bytes)), space, "host")
    larger = replace(profile, device_limit_bytes=rounded_up(device + int(DEVICE_FOR_HOST * verdict.shortfall_bytes)))
    if larger.device_limit_bytes <= MOST_TIMES * device:
        yield from _with_memory(larger, space, "device")


def _with_memory(profile: Profile, space: Space | None, tier: Literal["device", "host"]) -> Iterator[Change]:
    """The profile's own limit of this tier, where a plan is found with it; where that takes more of the host, with so much."""
    limit = profile.device_limit_bytes if tier == "device" else profile.host_limit_bytes
    said = f"{show_bytes(limit)} of {tier} memory"
    found = quickly(profile, space)
    if found is None and space is not None:
        least = _least_host_bytes(space.with_limits_of(profile))
        if least is not None and least > profile.host_limit_bytes:
            profile = replace(profile, host_limit_bytes=rounded_up(least))
            said += f" and {show_bytes(profile.host_limit_bytes)} of host memory"
            found = quickly(profile, space)
    if found is not None:
        yield Change(said, found.chosen.step_seconds)


def space_of(profile: Profile) -> Space | None:
    """What else there is than all on the device with all activations kept; None where that is all."""
    return Space(profile) if profile.chunks and profile.host is not None else None


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
        taken = None if space is None else _least_host_bytes_with(space, each)
        return taken is not None and taken <= profile.host_limit_bytes

    return tuple(each for each in profile.passes if may(each))


def rounded_up(size: int) -> int:
    """At least as many bytes, as they are shown.

    >>> show_bytes(rounded_up(38_488_000_000)), rounded_up(38_488_000_000) >= 38_488_000_000
    ('35.9 GiB', True)
    """
    unit = next((unit for unit in (2**40, 2**30, 2**20, 2**10) if size >= unit), 1)
    step = unit * 10 ** (len(str(size // unit)) - 1) // 100 or 1
    return -(-size // step) * step
