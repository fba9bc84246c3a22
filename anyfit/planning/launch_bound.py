"""Steps that wait for the host which launches their ops: whether one does, and what is said of it."""

from __future__ import annotations

from collections.abc import Iterator

from anyfit.values.plan import Decision, Forecast
from anyfit.values.profile import Profile
from anyfit.values.units import show_count, show_seconds

LEAST_SHARE = 0.1  # of a step: less is not worth a sentence


def is_launch_bound(waited_seconds: float, step_seconds: float) -> bool:
    return waited_seconds >= LEAST_SHARE * step_seconds


def why_launch_bound(profile: Profile, micro_batch: int, accumulation: int, chosen: Forecast) -> Iterator[Decision]:
    """What a plan says of it."""
    waited = chosen.split_seconds.get("exposed launch", 0.0)
    if not is_launch_bound(waited, chosen.step_seconds):
        return
    launches = next(each.played.launches for each in profile.passes if each.micro_batch == micro_batch)
    ops = show_count(accumulation * launches)
    why = f"the device waits {show_seconds(waited)} a step for the host that launches its {ops} ops, and what is recomputed"
    yield Decision("launches", "the host that launches ops is the limit", why)
