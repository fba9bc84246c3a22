"""A plan of what was found, with its reasons: each decision names the best plan with that decision taken otherwise."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from anyfit.values.mesh import AXES
from anyfit.values.plan import (
    SECONDS_A_DAY,
    TIERS,
    Activations,
    Alternative,
    Decision,
    DeviceKind,
    Fingerprint,
    Forecast,
    Plan,
    Stage,
    Wear,
)
from anyfit.values.profile import Division, Profile
from anyfit.values.units import show_bytes, show_count, show_seconds

from .evaluation import Offer
from .fastest import Found, Neighbour, among, described, fastest_on_device, fitting, handicapped
from .forecast import forecast_of, mean_seconds, passes_of
from .launch_bound import why_launch_bound
from .picture import pictured
from .space import Space

# Where no other choice was priced, why.
WITHOUT = {
    "updates": "a CPU has nothing to stream them through",
    "speculation": "nothing else was weighed",
    "disk": "nothing else was weighed",
    "activations": "no block can be recomputed or offloaded",
    "chunk size": "other sizes make the same chunks",
    "micro-batch": "the only one asked for",
}
NOT_KEPT: dict[Activations, str] = {
    "recompute": "recomputed in backward",
    "selective": "recomputed but for the costly ops",
    "offload": "offloaded to the host",
}
NO_TIME = show_seconds(0.0)  # as less than it shows
USUAL = {"chunk size": "the usual size", "ranks": "fewer moving parts"}  # of what is preferred to what is a little faster


def explained(found: Found) -> Plan:
    """The plan, with what its neighbours would cost."""
    if found.offer is None:
        return replace(_resident(found), picture=pictured(found))
    found = settled(found)
    plan = replace(_offloaded(found), picture=pictured(found))
    return plan if found.whole is None else _of_all_ranks(found, found.whole, plan)


def _resident(found: Found) -> Plan:
    """The best with everything on the device and all activations kept."""
    profile, chosen, limit = found.profile, found.chosen, found.profile.device_limit_bytes
    said = {size: passes_said(profile.batch_size, size) for size in found.forecasts}
    alternatives = tuple(
        Alternative("micro-batch", said[size], each.step_seconds, each.needed_bytes, each.needed_bytes <= limit)
        for size, each in found.forecasts.items()
        if size != found.micro_batch
    )
    state = Decision(
        "model state",
        f"all {'in RAM' if device_kind_of(profile) == 'cpu' else f'on the {device_of(profile)}'}",
        _spare(limit - chosen.needed_bytes),
    )
    return _plan(found, (state,), alternatives, _why("micro-batch", chosen, alternatives, "the only one asked for"))


def device_of(profile: Profile) -> str:
    """What people call it, beside the host."""
    return "GPU" if device_kind_of(profile) == "cuda" else "device"


def device_kind_of(profile: Profile) -> DeviceKind | None:
    return None if profile.host is None else "cuda" if profile.host.overlaps else "cpu"


def _spare(size: int) -> str:
    return f"it fits, {show_bytes(size)} to spare after the safety margin"


def _offloaded(found: Found) -> Plan:
    """The best that recomputes or offloads activations or has state on the host."""
    (space, offer), chosen, neighbours = found.in_space, found.chosen, found.neighbours or ()
    chunk_bytes = space.laid_out_like(offer.candidate).profile.offload_chunk_bytes
    priced = [(each, forecast_of(space, each.offer)) for each in neighbours if each.offer is not None]
    alternatives = tuple(
        Alternative(each.decision, each.choice, other.mean_step_seconds, other.needed_bytes, fits=True)
        for each, other in priced
        if not _are_alike(chosen, other)
    )
    without = WITHOUT | {each.decision: _why_not(space, each) for each in neighbours if each.offer is None}
    without |= {each.decision: f"{each.choice} would be the same" for each, other in priced if _are_alike(chosen, other)}
    why = {name: _why(name, chosen, alternatives, none) for name, none in without.items()}
    decisions = (
        Decision("model state", where(offer, device_of(space.profile)), _why_there(found, offer, space)),
        *(Decision(name, choice, why[name]) for name, choice in choices_of(offer, is_gpu=space.is_gpu).items()),
        Decision("chunk size", show_bytes(chunk_bytes), why["chunk size"]),
        *([] if chosen.wear is None else [worn(chosen.wear, chosen.mean_step_seconds)]),
    )
    candidate, plan = offer.candidate, _plan(found, decisions, alternatives, why["micro-batch"])
    pairs = zip(candidate.profile_pass.blocks, candidate.activations, strict=True)
    activations = {block.name: choice for block, choice in pairs if choice != "keep"}
    stage = Stage(0, found.profile.blocks - 1, activations, cut=found.profile.cut, tables=found.profile.tables)
    chunks, slots, prefetch = candidate.placements, candidate.slots, candidate.prefetch
    mesh = {**plan.mesh, "tensor": found.profile.rank_division.tensor}
    return replace(plan, mesh=mesh, stages=(stage,), chunk_bytes=chunk_bytes, chunks=chunks, slots=slots, prefetch=prefetch)


def _why_not(space: Space, neighbour: Neighbour) -> str:
    """Of one that does not fit."""
    if neighbour.decision != "disk":
        return f"{neighbour.choice} would not fit"
    taken = (space.without_disk.least_host_bytes(size) for size in space.micro_batches)
    least = min((each for each in taken if each is not None), default=None)
    limit = space.profile.host_limit_bytes
    if least is None or least <= limit:
        return f"{neighbour.choice} would not fit"
    return f"{neighbour.choice} would need {show_bytes(least)} of host memory, of which {show_bytes(limit)} may be used"


def worn(wear: Wear, step_seconds: float) -> Decision:
    """How long a drive bears that."""
    written = f"{show_bytes(wear.written_bytes)} written a step, {_decimal(wear.written_a_day(step_seconds))} a day"
    days = wear.days(step_seconds)
    lasts = f"{days:.0f} days" if days >= 2 else show_seconds(days * SECONDS_A_DAY)
    why = f"a drive that is rated for {_decimal(wear.endurance_bytes)} takes that for {lasts} ({wear.source})"
    return Decision("wear", written, why)


def _decimal(size: float) -> str:
    """As drives are rated.

    >>> _decimal(97.2e12), _decimal(1.2e15), _decimal(3e9)
    ('97.2 TB', '1,200 TB', '3 GB')
    """
    unit, name = (10**12, "TB") if size >= 10**12 else (10**9, "GB")
    amount = size / unit
    return f"{amount:,.0f} {name}" if amount >= 100 else f"{amount:.3g} {name}"


def _plan(found: Found, decisions: tuple[Decision, ...], alternatives: tuple[Alternative, ...], why_so_many: str) -> Plan:
    """With everything on the device and all activations kept."""
    profile, micro_batch = found.profile, found.micro_batch
    return Plan(
        **facts_of(profile),
        micro_batch=micro_batch,
        accumulation=passes_of(profile.batch_size, micro_batch),
        mesh=dict.fromkeys(AXES, 1),
        stages=(Stage(0, profile.blocks - 1, {}),),
        chunk_bytes=profile.chunk_bytes,
        chunks=(),
        slots=0,
        prefetch=0,
        forecast=found.chosen,
        decisions=(
            *decisions,
            Decision("micro-batch", passes_said(profile.batch_size, micro_batch), why_so_many),
            *why_launch_bound(profile, micro_batch, passes_of(profile.batch_size, micro_batch), found.chosen),
            *restrictions(profile, found.chosen),
        ),
        alternatives=alternatives,
    )


def facts_of(profile: Profile) -> dict[str, Any]:
    """What a plan says of its job and machine, whatever it decides."""
    limits = (profile.device_limit_bytes, profile.host_limit_bytes, profile.disk_limit_bytes)
    names = ("model", "machine", "parameters", "precision", "batch_size", "loss", "described", "trainable", "assumes_host")
    return {name: getattr(profile, name) for name in names} | {
        "limit_bytes": dict(zip(TIERS, limits, strict=True)),
        "fingerprint": Fingerprint(profile.model_fingerprint, profile.machine_fingerprint),
        "device_kind": device_kind_of(profile),
    }


def restrictions(profile: Profile, chosen: Forecast) -> Iterator[Decision]:
    """What the model, its trace and earlier runs decided."""
    if not profile.loss.may_be_cut:
        yield Decision("loss", "the batch is not cut", profile.loss.why)
    if profile.state_stays:
        yield Decision("state stays", "on the device", profile.state_stays)
    if profile.kept:
        yield Decision("kept blocks", ", ".join(profile.kept), next(iter(profile.kept.values())))
    if profile.notes:
        yield Decision("trace", profile.traced, "; ".join(profile.notes))
    if profile.correction:
        yield Decision("margin", f"{chosen.reserved_error:.0%}", profile.correction.why)
    if profile.clipped_steps and chosen.has_slower_steps:
        yield Decision("clipping", profile.clipped_steps.choice, profile.clipped_steps.why)
    if profile.pace:
        yield Decision("pace", profile.pace.choice, profile.pace.why)


def _why_there(found: Found, offer: Offer, space: Space) -> str:
    """What all on the device would cost."""
    chosen, limit = found.chosen, found.profile.device_limit_bytes
    if space.is_alone:
        what = f"all on the {device_of(space.profile)}, with all activations kept,"
        seconds = [found.forecasts[size].step_seconds for size in fitting(found.profile, found.forecasts)]
        least = min(each.needed_bytes for each in found.forecasts.values())
        if not seconds and not offer.uses_host and least > limit:
            return f"activations do not all fit ({_of_limit(least, limit)})"
    elif not offer.uses_host:
        return _spare(limit - chosen.needed_bytes)
    else:
        what, stays = "nothing on the host", fastest_on_device(space)
        seconds = [] if stays is None else [mean_seconds(space.profile, stays)]
        least = space.least_needed_bytes()
    if not seconds and not offer.uses_host:  # recomputed, as asked for
        return _spare(limit - chosen.needed_bytes)
    if seconds:
        return f"{what} would take {show_seconds(min(seconds) - chosen.mean_step_seconds)} more a step{_on_average(chosen)}"
    return f"{what} would need {show_bytes(least)}, in passes of {found.profile.passes[-1].micro_batch}"


def _of_limit(size: int, limit: int) -> str:
    """
    >>> _of_limit(int(25.5 * 2**30), int(23.6 * 2**30)), _of_limit(2**30, 2**29)
    ('25.5 of 23.6 GiB', '1.00 GiB of 512 MiB')
    """
    needed, allowed = show_bytes(size), show_bytes(limit)
    number, _, unit = needed.partition(" ")
    return f"{number if allowed.endswith(f' {unit}') else needed} of {allowed}"


def _why(decision: str, chosen: Forecast, alternatives: tuple[Alternative, ...], without: str) -> str:
    """The best rejected neighbour and its price."""
    alternatives = tuple(other for other in alternatives if other.decision == decision)
    if not alternatives:
        return without
    best = min(alternatives, key=lambda other: other.step_seconds if other.fits else float("inf"))
    if not best.fits:
        least = min(alternatives, key=lambda other: other.device_bytes)
        return f"{least.choice} would need {show_bytes(least.device_bytes)} and does not fit"
    later, average = best.step_seconds - chosen.mean_step_seconds, _on_average(chosen)
    room = chosen.needed_bytes - best.device_bytes
    memory = f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory" if room else "as much memory"
    if show_seconds(abs(later)) == NO_TIME:
        return f"{best.choice} would take as long, and {memory}"
    if later < 0:
        usual = USUAL.get(decision, "the fewest passes")
        return f"{usual}; {best.choice} would take {show_seconds(-later)} less{average}, too close to tell apart, and {memory}"
    return f"{best.choice} would take {show_seconds(later)} more a step{average} and {memory}"


def _are_alike(chosen: Forecast, other: Forecast) -> bool:
    """Whether nobody could tell them apart: such a neighbour says nothing."""
    later = abs(other.mean_step_seconds - chosen.mean_step_seconds)
    return show_seconds(later) == NO_TIME and other.needed_bytes == chosen.needed_bytes


def _on_average(chosen: Forecast) -> str:
    return " on average" if chosen.has_slower_steps else ""


# ---------------------------------------------------------------------- over ranks


def _of_all_ranks(found: Found, whole: Profile, plan: Plan) -> Plan:
    """One rank's plan, as that of all of them."""
    division, forecast = found.profile.rank_division, plan.forecast
    others = {other: _alternative(other, each) for other, each in found.tried.items() if other != division}
    count = division.ranks * division.tensor
    ranks = Decision("ranks", f"{count}: {described(division)}", _why_sharded(division, others, plan.forecast))
    notes = [Decision("links", "assumed", whole.link_note)] if whole.link_note else []
    return replace(
        plan,
        batch_size=whole.batch_size,
        mesh={**plan.mesh, "data": division.ranks, "tensor": division.tensor},
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
        return Alternative("ranks", f"{described(division)} (nothing on the host)", float("inf"), tried, fits=False)
    host = "part of it" if tried.offer is not None and tried.offer.uses_host else "nothing"
    choice = f"{described(division)} ({host} on the host)"
    return Alternative("ranks", choice, tried.chosen.mean_step_seconds, tried.chosen.needed_bytes, fits=True)


def _why_sharded(mine: Division, others: Mapping[Division, Alternative], chosen: Forecast) -> str:
    """The fastest other way that fits; and of those with fewer moving parts that do not, the one that lacks least."""
    fitting = tuple(each for each in others.values() if each.fits)
    simpler = (
        each for each in others if (each.weights, each.gradients, each.shards) < (mine.weights, mine.gradients, mine.shards)
    )
    lacking = tuple(others[each] for each in simpler if not others[each].fits)
    said = [_why("ranks", chosen, each, "") for each in (fitting, lacking) if each]
    return "; ".join(said) or "no other could take less"


# ---------------------------------------------------------------------- one decision taken otherwise


def settled(found: Found) -> Found:
    """The same with its neighbours. One of them that is faster, which the search passed by, takes its place."""
    while found.offer is not None and found.neighbours is None:
        space, offer = found.in_space
        neighbours = tuple(_neighbours(found))
        offers = [each.offer for each in neighbours if each.offer is not None]
        best = min([offer, *offers], key=lambda offer: handicapped(space, offer))
        if best is offer:
            return replace(found, neighbours=neighbours)
        found = replace(found, micro_batch=best.candidate.micro_batch, chosen=forecast_of(space, best), offer=best)
    return found


def _neighbours(found: Found) -> Iterator[Neighbour]:
    """The best plans with one decision taken otherwise, all others searched anew."""
    whole, offer = found.in_space
    space, micro_batch = whole.laid_out_like(offer.candidate), found.micro_batch
    for decision, choice, size, forced in _others(space, offer, micro_batch):
        other = space.best(size, starts=1, **forced)
        if other is None or other.candidate != offer.candidate:
            yield Neighbour(decision, choice, other)
    for each in whole.sizes:
        if each is not space:
            choice = f"chunks of {show_bytes(each.profile.offload_chunk_bytes)}"
            yield Neighbour("chunk size", choice, each.best_like(offer))


def _others(space: Space, offer: Offer, micro_batch: int) -> Iterator[tuple[str, str, int, dict[str, float]]]:
    """By decision and choice: the micro-batch, and the knobs that force it."""
    candidates, elements = space.candidates, by_route(offer)
    if space.is_gpu and elements["host"] + elements["streamed"]:
        if elements["streamed"]:
            yield "updates", "none streamed", micro_batch, {"streamed": 0.0}
        if elements["host"]:
            yield "updates", "none on the host", micro_batch, {"streamed": 1.0, "host_first": 0.0}
        said = "updates that wait for the norm" if speculates(offer) else "updates before the norm is known"
        yield "speculation", said, micro_batch, {"speculates": not speculates(offer)}
    if elements["disk"]:
        yield "disk", "nothing there", micro_batch, {"on_disk": 0}
    last, all_offloaded = candidates.last_rung(micro_batch), len(candidates.offloadable(micro_batch))
    if last:
        yield "activations", "all recomputed", micro_batch, {"rung": last, "offloaded": 0}
        yield "activations", "all kept", micro_batch, {"rung": 0, "offloaded": 0}
    if offer.candidate.offloaded:
        yield "activations", "none offloaded", micro_batch, {"offloaded": 0}
    elif all_offloaded:
        yield "activations", "all offloaded", micro_batch, {"rung": 0, "offloaded": all_offloaded}
    others = set(space.micro_batches) - {micro_batch}
    for size in sorted(others, key=lambda size: abs(size - micro_batch))[:1]:
        yield "micro-batch", passes_said(space.profile.batch_size, size), size, {}


def choices_of(offer: Offer, *, is_gpu: bool) -> dict[str, str]:
    """By decision, what was chosen, where there was a choice: a CPU's updates always wait, as nothing runs beside it."""
    found: dict[str, str] = {}
    elements = by_route(offer)
    updated = {"resident": f"on the {'GPU' if is_gpu else 'device'}", "streamed": "streamed through it", "host": "on the host"}
    if elements["disk"]:
        updated["disk"] = "on the host, with their state on the disk"
    if elements["streamed"] or elements["host"] or elements["disk"]:
        found["updates"] = ", ".join(
            f"{show_count(elements[route])} {name}" for route, name in updated.items() if elements[route]
        )
        if is_gpu:
            found["speculation"] = "updates begin before the norm is known" if speculates(offer) else "updates wait for the norm"
    if elements["disk"]:
        found["disk"] = f"optimizer state of {show_count(elements['disk'])} parameters, read and written once a step"
    blocks = Counter(offer.candidate.activations)
    said = [f"{blocks[name]} block{'s' * (blocks[name] > 1)} {verb}" for name, verb in NOT_KEPT.items() if blocks[name]]
    found["activations"] = ", ".join(said) or "all kept"
    return found


def where(offer: Offer, device: str) -> str:
    """Where the model state is."""
    elements = by_route(offer)
    pairs = zip(offer.candidate.chunks, offer.candidate.placements, strict=True)
    away = [chunk for chunk, placement in pairs if placement.weights == "host"]
    parts = []
    resident, everything = elements["resident"], sum(elements.values())
    if resident < everything:
        lies = {device: resident, "disk": elements["disk"]}
        lies = {device: resident, "host": everything - sum(lies.values()), "disk": elements["disk"]}
        some = [
            f"of {show_count(count)}{' parameters' * (tier == device)} on the {tier}" for tier, count in lies.items() if count
        ]
        whole = next(tier for tier, count in lies.items() if count)
        parts.append(f"optimizer state: {', '.join(some) if len(some) > 1 else f'all on the {whole}'}")
    if away:
        size = show_bytes(sum(chunk.weights_bytes for chunk in away))
        parts.append(f"{size} of weights on the host, fetched through {offer.candidate.slots} slots")
    return "; ".join(parts) or f"weights and optimizer on the {device}"


def by_route(offer: Offer) -> Counter[str]:
    """By route, how many parameters are updated."""
    elements = Counter[str]()
    for chunk, placement in zip(offer.candidate.chunks, offer.candidate.placements, strict=True):
        elements[placement.route] += chunk.elements if chunk.is_updated else 0
    return elements


def speculates(offer: Offer) -> bool:
    return any(placement.speculates for placement in offer.candidate.placements)


def passes_said(batch_size: int, micro_batch: int) -> str:
    count = passes_of(batch_size, micro_batch)
    return f"{batch_size} in one pass" if count == 1 else f"{micro_batch} in each of {count} passes"
