"""Profile -> Plan: the fastest plan that fits (fastest.py), explained (reasons.py), or why there is none (answers.py).

knobs         candidates by a few knobs; a `candidate` is all that decides a step
evaluation    what a candidate costs: `footprint` of memory, `simulation` of a step, and a `bound` on it
local_search  the knobs of one micro-batch, in one size of chunks
polish        of few blocks and chunks, each chosen by itself
space         these together, for one layout of chunks and beside it for others
compiling     eager or compiled, by distinct block
replaying     blocks op by op, or as CUDA graphs
fastest       over micro-batches and layouts, and ways to shard the state over ranks
enough        which micro-batches are worth a trace
"""

from __future__ import annotations

from collections.abc import Callable

from anyfit.values.doing import doing
from anyfit.values.plan import Plan
from anyfit.values.profile import Profile

from .answers import Typed, in_python, no_plan
from .compiling import chosen_of, compiled, measured, worth_compiling
from .fastest import Found
from .reasons import explained
from .replaying import best_launched


def search(profile: Profile, steps: int | None = None, typed: Typed = in_python) -> Plan:
    """The best plan for this profile, or NoPlan with the smallest shortfall. `steps`: of the run, where that is known: so many
    have to win back what compiling takes. `typed`: how whoever asks types the memory that would be enough."""
    found = searched(profile, explained, steps)
    if found is None:
        raise no_plan(profile, typed)
    return found


@doing("looking for the fastest plan")
def searched(
    profile: Profile, finish: Callable[[Found], Plan], steps: int | None = None, found: Found | None = None
) -> Plan | None:
    """The best plan, eager or with blocks compiled, and launched op by op or replayed, as `finish` makes it of
    what was found; None where nothing fits. `found`: the fastest of the profile as it is, where that is known."""
    compiling = worth_compiling(profile)
    eager = best_launched(measured(profile), finish) if compiling.blocks else best_launched(profile, finish, found)
    code = best_launched(compiled(profile, compiling.blocks), finish) if compiling.blocks else None
    return eager if code is None else chosen_of(eager, code, compiling, steps)
