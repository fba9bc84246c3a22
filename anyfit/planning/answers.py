"""What else a profile can answer: what more memory is worth, and whether another machine or job would fit.

Each answer is a search of its own, at the limits it speaks of. A Space weighs and simulates without looking at limits, so that
one for other limits goes on with what the first has seen.
"""

from __future__ import annotations

import math
from dataclasses import replace

from anyfit.values.plan import Change, Decision, Plan
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes, show_seconds

from .fastest import Found, fastest, quickly
from .local_search import CLOSE, WORTH
from .reasons import explained, settled

SHARE = 8  # of a limit: how much more of it is asked about, to the nearest power of two


def answered(found: Found) -> Plan:
    """The plan, and where not all is on the device, what more of a memory that holds it back is worth."""
    found = settled(found)
    plan = explained(found)
    if found.offer is None or (found.whole is not None and (found.offer.uses_host or not plan.activations)):
        return plan  # of several ranks with something on the host, too: such a search takes long
    worth = [each for each in (_worth_of_device(found), _worth_of_host(found)) if each is not None]
    return replace(plan, decisions=(*plan.decisions, *worth))


def _worth_of_device(found: Found) -> Decision:
    profile, limit = found.profile, found.profile.device_limit_bytes
    more = amount_beside(limit)
    # more of the device asks for no smaller passes; of the host it may, which has their sums of gradients
    larger = tuple(each for each in profile.passes if each.micro_batch >= found.micro_batch)
    found = replace(found, profile=replace(profile, passes=larger))
    less = _saved(found, device_limit_bytes=limit + more)
    if not less and found.whole is None:  # with half of it something may be found: a search is no proof
        less = _saved(found, device_limit_bytes=limit + more // 2)
    what = "GPU" if found.space is not None and found.space.is_gpu else "device"
    why = f"{show_seconds(less)} less a step" if less else "no less a step"
    return Decision("device limit", f"{_round(more)} more {what} memory", why)


def _worth_of_host(found: Found) -> Decision | None:
    """None where more of it would change nothing."""
    if found.whole is not None:
        return None
    limit = found.profile.host_limit_bytes
    more = amount_beside(limit)
    less = _saved(found, host_limit_bytes=limit + more)
    return Decision("host limit", f"{_round(more)} more host memory", f"{show_seconds(less)} less a step") if less else None


def _saved(found: Found, **limits: int) -> float:
    """Seconds a step."""
    return found.chosen.step_seconds - at_limits(found, **limits).chosen.step_seconds


def at_limits(found: Found, **limits: int) -> Found:
    """The fastest at other limits, none of them smaller: what was found before, where nothing is faster by what is worth it."""
    profile = replace(found.profile, **limits)  # type: ignore[arg-type]
    space = found.space and found.space.with_limits_of(profile)
    whole = found.whole
    if whole is not None:  # sharded as it is
        assert profile.division is not None
        whole = replace(whole, divisions=(profile.division,), **limits)  # type: ignore[arg-type]
    seconds = found.chosen.step_seconds
    # from a little behind, a search may still come to be ahead
    other = fastest(profile, space, CLOSE * seconds) if whole is None else fastest(whole)
    if other is not None and other.chosen.step_seconds < (1 - WORTH) * seconds:
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
    return None if found is None else Change(what, found.chosen.step_seconds)
