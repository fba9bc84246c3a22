"""Profile -> Plan: the fastest plan that fits (fastest.py), explained (reasons.py), or why there is none (answers.py).

knobs         candidates by a few knobs; a `candidate` is all that decides a step
evaluation    what a candidate costs: `footprint` of memory, `simulation` of a step, and a `bound` on it
local_search  the knobs of one micro-batch, in one size of chunks
polish        of few blocks and chunks, each chosen by itself
space         these together, for one layout of chunks and beside it for others
fastest       over micro-batches and layouts, and ways to shard the state over ranks
"""

from __future__ import annotations

from anyfit.values.plan import Plan
from anyfit.values.profile import Profile

from .answers import no_plan
from .fastest import fastest
from .reasons import explained


def search(profile: Profile) -> Plan:
    """The best plan for this profile, or NoPlan with the smallest shortfall."""
    found = fastest(profile)
    if found is None:
        raise no_plan(profile)
    return explained(found)
