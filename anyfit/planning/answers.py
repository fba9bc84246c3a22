"""What else a profile can answer: what more memory is worth, whether another machine or job would fit, and where nothing fits, by
how much, why it cannot be made smaller, and the memory that was found to be enough.

Each answer is a search of its own, at the limits it speaks of. A Space weighs and simulates without looking at limits, so that
one for other limits goes on with what the first has seen.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Literal, TypeAlias

from anyfit.values.no_plan import Change, NoPlan
from anyfit.values.plan import Decision, Plan
from anyfit.values.plan_rows import CHANGES_HOST, memory_name
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes, show_seconds

from .fastest import Found, fastest, most_sharded, quickly
from .forecast import forecast
from .local_search import CLOSE, WORTH
from .reasons import device_kind_of, explained, settled, worn
from .space import Space, space_of

SHARE = 8  # of a limit: how much more of it is asked about, to the nearest power of two
DEVICE_FOR_HOST = 1.15  # of what the host lacks, on the device: what moves there takes a little room to work
TIMES_BATCH = (8, 4, 2)  # of a plan that waits for the disk
LEAST_GAIN = 1.2  # times the samples a second, to be said
MOST_TIMES = 4  # as much device memory: more is no change that anyone makes


def answered(found: Found) -> Plan:
    """The plan, and where not all is on the device, what more of a memory that holds it back is worth."""
    found = settled(found)
    plan = explained(found)
    if found.offer is None or (found.whole is not None and (found.offer.uses_host or not plan.activations)):
        return plan  # of several ranks with something on the host, too: such a search takes long
    worth = [each for each in (_worth_of_device(found), _worth_of_host(found), _worth_of_batch(found)) if each is not None]
    return replace(plan, decisions=(*plan.decisions, *worth))


def _worth_of_device(found: Found) -> Decision:
    profile, limit = found.profile, found.profile.device_limit_bytes
    more = amount_beside(limit)
    # more of the device asks for no smaller passes; of the host it may, which has their sums of gradients
    larger = tuple(each for each in profile.passes if each.micro_batch >= found.micro_batch)
    found = replace(found, profile=replace(profile, passes=larger))
    less = _saved_seconds(found, device_limit_bytes=limit + more)
    if not less and found.whole is None:  # with half of it something may be found: a search is no proof
        less = _saved_seconds(found, device_limit_bytes=limit + more // 2)
    what = "GPU" if found.space is not None and found.space.is_gpu else "device"
    why = f"{show_seconds(less)} less a step" if less else "no less a step"
    return Decision("device limit", f"{_round(more)} more {what} memory", why)


def _worth_of_host(found: Found) -> Decision | None:
    """None where more of it would change nothing."""
    if found.whole is not None:
        return None
    limit = found.profile.host_limit_bytes
    more = amount_beside(limit)
    less = _saved_seconds(found, host_limit_bytes=limit + more)
    return Decision("host limit", f"{_round(more)} more host memory", f"{show_seconds(less)} less a step") if less else None


def _worth_of_batch(found: Found) -> Decision | None:
    """Of a plan that waits for the disk, what more samples a step are worth: the disk is read and written once for all of them.
    None where that is little."""
    profile, offer = found.profile, found.offer
    if offer is None or not offer.uses_disk or not profile.loss.may_be_cut:
        return None
    own = tuple(each for each in profile.passes if each.micro_batch == found.micro_batch)
    for times in TIMES_BATCH:
        size = times * profile.batch_size
        larger = quickly(replace(profile, batch_size=size, passes=own))
        if larger is None:
            continue
        gain = larger.chosen.mean_samples_per_second / found.chosen.mean_samples_per_second
        why = f"{gain:.1f} times the tokens a second, as the disk is read and written once a step; it trains otherwise"
        return Decision("batch", f"with {size} samples a step", why) if gain >= LEAST_GAIN else None
    return None


def _saved_seconds(found: Found, **limits: int) -> float:
    return found.chosen.mean_step_seconds - at_limits(found, **limits).chosen.mean_step_seconds


def at_limits(found: Found, **limits: int) -> Found:
    """The fastest at other limits, none of them smaller: what was found before, where nothing is faster by what is worth it."""
    profile = replace(found.profile, **limits)  # type: ignore[arg-type]
    space = found.space and found.space.with_limits_of(profile)
    whole = found.whole
    if whole is not None:  # sharded as it is
        assert profile.division is not None
        whole = replace(whole, divisions=(profile.division,), **limits)  # type: ignore[arg-type]
    seconds = found.chosen.mean_step_seconds
    # from a little behind, a search may still come to be ahead
    other = fastest(profile, space, CLOSE * seconds) if whole is None else fastest(whole, spaces=[space] if space else ())
    if other is not None and other.chosen.mean_step_seconds < (1 - WORTH) * seconds:
        return other
    return replace(found, profile=profile, space=space, whole=whole, neighbours=None)


def amount_beside(limit: int) -> int:
    """
    >>> [show_bytes(amount_beside(size * 2**30)) for size in (24, 80, 141)]
    ['4.00 GiB', '8.00 GiB', '16.0 GiB']
    """
    return int(2 ** round(math.log2(max(limit / SHARE, 1))))


def _round(size: int) -> str:
    """A power of two, without digits that say nothing."""
    number, _, unit = show_bytes(size).partition(" ")
    return f"{float(number):g} {unit}"


def change_to(what: str, profile: Profile) -> Change | None:
    """The change that makes the profile this one, where a plan is found for it."""
    found = quickly(profile)
    return None if found is None else Change(what, found.chosen.mean_step_seconds)


# ---------------------------------------------------------------------- when nothing fits


Typed: TypeAlias = Callable[[Mapping[str, str], float], Change | None]  # of sizes by tier, and seconds; None: nobody can type it


def in_python(limits: Mapping[str, str], seconds: float) -> Change | None:
    """Memory that is enough, as a script says it."""
    return Change(f"machine.as_if({as_arguments(limits)})", seconds)


def as_arguments(limits: Mapping[str, str]) -> str:
    """
    >>> as_arguments({"host": "101GiB", "disk": "60GiB"})
    "host_memory='101GiB', disk='60GiB'"
    """
    return ", ".join(f"{tier if tier == 'disk' else f'{tier}_memory'}={size!r}" for tier, size in limits.items())


def as_options(limits: Mapping[str, str]) -> str:
    """The same, as the command line has it."""
    return " ".join(f"--{named(tier)} {size}" for tier, size in limits.items())


def named(tier: str) -> str:
    """What the command line calls its size."""
    return tier if tier == "disk" else f"{tier}-memory"


def as_change(limits: Mapping[str, str], seconds: float) -> Change:
    return Change(as_options(limits), seconds)


def no_plan(profile: Profile, typed: Typed = in_python) -> NoPlan:
    """The verdict on a profile of which nothing fits, with the memory that was found to be enough."""
    profile = most_sharded(profile)
    verdict = shortfall(profile)
    changes = tuple(change for change in _enough(profile, verdict, typed) if change is not None)
    return verdict.because(_restrictions(profile)).with_changes(changes)


def _enough(profile: Profile, verdict: NoPlan, typed: Typed) -> Iterator[Change | None]:
    for limits, found in _enough_memory(profile, verdict):
        change, wear = typed(limits, found.chosen.mean_step_seconds), found.chosen.wear
        if change is not None and wear is not None:
            said = worn(wear, found.chosen.mean_step_seconds).choice
            change = replace(change, note=", ".join(filter(None, (change.note, f"with {said}"))))
        yield change


def shortfall(profile: Profile) -> NoPlan:
    """The verdict alone."""
    profile = most_sharded(profile)

    def lacking(what: str, needed: int, limit: int, tier: Literal["device", "host"]) -> NoPlan:
        ranks = "" if profile.division is None else f" over {profile.division.ranks * profile.division.tensor} ranks"
        has = "the limit is" if tier in profile.limited else "a rank has" if ranks else "the machine has"
        note = ""
        if tier == "host" and profile.assumes_host:
            has, note = f"the preset assumes {'a rank has ' if ranks else ''}".rstrip(), f" ({CHANGES_HOST})"
        lack = f"{has} {show_bytes(limit)}{note}: {show_bytes(needed - limit)} too little{_margin(profile)}"
        return NoPlan(f"{profile.described}{ranks} does not fit: it needs {what}, {lack}", needed - limit, tier)

    needed = {each.micro_batch: (forecast(profile, each).needed_bytes, 0) for each in profile.passes}  # of device and host
    space = space_of(profile)
    if space is not None:
        least_host = _least_host_bytes(space)
        if least_host is not None:
            return lacking(f"{show_bytes(least_host)} of host memory", least_host, profile.host_limit_bytes, "host")
        for each in space.sizes:
            for size in needed:
                smallest = each.evaluation.footprint(each.local.least(size))
                needed[size] = min(needed[size], (each.evaluation.needed_bytes(smallest), smallest.host_bytes))
    micro_batch = min(needed, key=lambda size: needed[size][0])
    least, on_host = needed[micro_batch]
    where = next(each.peak_at for each in profile.passes if each.micro_batch == micro_batch)
    state = f"{show_bytes(profile.state.resident)} of that is model state"
    if on_host:
        state = "with all the model state it can on the host"
    memory = memory_name("device", device_kind_of(profile))
    what = f"{show_bytes(least)} of {memory} in micro-batches of {micro_batch} ({state}; the peak is at {where})"
    return lacking(what, least, profile.device_limit_bytes, "device")


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


def _margin(profile: Profile) -> str:
    """What a run has shown, where that makes it need more."""
    if profile.correction is None:
        return ""
    return f". That has a margin of {profile.correction.error:.0%}: {profile.correction.why}"


def _least_host_bytes(space: Space) -> int | None:
    """What the host has to hold at least, whatever the micro-batch; None where the device is too small for all of them."""
    taken = (space.least_host_bytes(size) for size in space.micro_batches)
    return min((each for each in taken if each is not None), default=None)


def _enough_memory(profile: Profile, verdict: NoPlan) -> Iterator[tuple[dict[str, str], Found]]:
    """More of the host, of the device or of the disk, as little as was found to do: sizes by tier, and what was found."""
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
    yield from _with_disk(profile, space)


def _with_disk(profile: Profile, space: Space | None) -> Iterator[tuple[dict[str, str], Found]]:
    """As much of the disk as a plan with all that is free there takes, where that is enough."""
    disk = profile.disk
    if disk is None or disk.free_bytes <= profile.disk_limit_bytes:
        return
    found = quickly(replace(profile, disk_limit_bytes=disk.free_bytes), space)
    if found is None or found.offer is None or not found.offer.uses_disk:
        return
    enough = rounded_up(found.offer.footprint.disk_bytes)
    found = quickly(replace(profile, disk_limit_bytes=enough), space)
    if found is not None and enough <= disk.free_bytes:
        yield {"disk": typed_bytes(enough)}, found


def _with_memory(
    profile: Profile, space: Space | None, tier: Literal["device", "host"]
) -> Iterator[tuple[dict[str, str], Found]]:
    """The profile's own limit of this tier, where a plan is found with it; where that takes more of the host, with so much."""
    said: dict[str, str] = {tier: typed_bytes(profile.device_limit_bytes if tier == "device" else profile.host_limit_bytes)}
    found = quickly(profile, space)
    if found is None and space is not None:
        least = _least_host_bytes(space.with_limits_of(profile))
        if least is not None and least > profile.host_limit_bytes:
            profile = replace(profile, host_limit_bytes=rounded_up(least))
            said["host"] = typed_bytes(profile.host_limit_bytes)
            found = quickly(profile, space)
    if found is not None:
        yield said, found


def typed_bytes(size: int) -> str:
    """
    >>> typed_bytes(rounded_up(38_488_000_000))
    '35.9GiB'
    """
    return show_bytes(size).replace(" ", "")


def rounded_up(size: int) -> int:
    """At least as many bytes, as they are shown.

    >>> show_bytes(rounded_up(38_488_000_000)), rounded_up(38_488_000_000) >= 38_488_000_000
    ('35.9 GiB', True)
    """
    unit = next((unit for unit in (2**40, 2**30, 2**20, 2**10) if size >= unit), 1)
    step = unit * 10 ** (len(str(size // unit)) - 1) // 100 or 1
    return -(-size // step) * step
