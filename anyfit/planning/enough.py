"""Which micro-batches a plan needs: the largest, and its halves while the smallest so far makes the best plan.

A trace takes longer than a search, so `anyfit.plan` searches before it traces the next half. Two sizes at least are compared, and
all of them where one does not divide the batch, because the rest has to run too. A pipeline wants smaller ones than any other
plan: where ranks wait for each other or for the host for long, so that one may pay, all are traced.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from anyfit.values.plan import Forecast
from anyfit.values.profile import Profile

from .fastest import Found, fastest, spaces_of
from .local_search import STARTS
from .space import Space, space_of

WAITED = 0.05  # of a step, for others or for the host
WAITS = ("exposed communication", "exposed offload", "exposed update")


class Enough:
    """Is asked after each trace whether a smaller micro-batch than those of the profile, the largest first, is not worth one.
    `for_stages`: nor for a pipeline, which is looked for too."""

    def __init__(self, *, for_stages: bool = False) -> None:
        self._for_stages = for_stages
        self._last: tuple[tuple[int, ...], Found | None] | None = None  # micro-batches, and the fastest of them

    def __call__(self, profile: Profile) -> bool:
        sizes, share = _sizes(profile), profile.batch_size // profile.ranks
        if len(sizes) == 1 or any(share % size for size in sizes):
            return False
        self._last = sizes, fastest(profile)
        return _is_enough(self._last[1], sizes[-1], for_stages=self._for_stages)

    def fastest_of(self, profile: Profile) -> Found | None:
        """Where that is the last one it was asked of; None where it is not, or where nothing fits."""
        return self._last[1] if self._last is not None and self._last[0] == _sizes(profile) else None


def _sizes(profile: Profile) -> tuple[int, ...]:
    return tuple(each.micro_batch for each in profile.passes)


def _is_enough(found: Found | None, smallest: int, *, for_stages: bool) -> bool:
    if found is None or found.micro_batch == smallest:
        return False
    return not for_stages or _waited(found.chosen) < WAITED


def _waited(forecast: Forecast) -> float:
    return sum(forecast.split_seconds.get(name, 0.0) for name in WAITS) / forecast.step_seconds


@dataclass(frozen=True)
class Seen:
    """What searches of a profile have seen, for others of the same with fewer micro-batches."""

    space: Space | None  # of a device alone
    spaces: Sequence[Space]  # of several ranks, by way to shard the state

    @classmethod
    def of(cls, profile: Profile) -> Seen:
        return cls(None, spaces_of(profile)) if profile.divisions else cls(space_of(profile), ())

    def fastest(self, profile: Profile, starts: int) -> Found | None:
        return fastest(profile, self.space and self.space.with_limits_of(profile), starts=starts, spaces=self.spaces)


def as_traced(
    profile: Profile, starts: int = STARTS, *, for_stages: bool = False, seen: Seen | None = None
) -> tuple[Profile, Found | None]:
    """A profile of all micro-batches, as it would be had the tracer stopped when they were enough; and the fastest of it. What is
    known of some micro-batches is not searched for again with one more."""
    passes, seen = profile.passes, Seen.of(profile) if seen is None else seen
    share = profile.batch_size // profile.ranks
    for count in range(2, len(passes)):
        some = replace(profile, passes=passes[:count])
        if any(share % each.micro_batch for each in some.passes):
            break
        found = seen.fastest(some, starts)
        if _is_enough(found, passes[count - 1].micro_batch, for_stages=for_stages):
            return some, found
    return profile, seen.fastest(profile, starts)
