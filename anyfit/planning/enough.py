"""Which micro-batches a plan needs: the largest, and its halves while the smallest so far makes the best plan.

A trace takes longer than a search, so `anyfit.plan` searches before it traces the next half. Two sizes at least are compared, and
all of them where one does not divide the batch, because the rest has to run too.
"""

from __future__ import annotations

from dataclasses import replace

from anyfit.values.profile import Profile

from .fastest import fastest


def are_enough(profile: Profile) -> bool:
    """Whether a smaller micro-batch than those of the profile, the largest first, is not worth a trace."""
    sizes, share = [each.micro_batch for each in profile.passes], profile.batch_size // profile.ranks
    if len(sizes) == 1 or any(share % size for size in sizes):
        return False
    found = fastest(profile)
    return found is not None and found.micro_batch != sizes[-1]


def needed_of(profile: Profile) -> Profile:
    """A profile of all micro-batches, as it would be had the tracer stopped when they were enough."""
    prefixes = (replace(profile, passes=profile.passes[:count]) for count in range(1, len(profile.passes)))
    return next(filter(are_enough, prefixes), profile)
