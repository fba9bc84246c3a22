"""What was found out about a model before it is placed on the ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from anyfit.values.schedule import rank_of

from .pipe import Plumbing


@dataclass(frozen=True, eq=False)
class Looked:
    blocks: tuple[str, ...]  # paths
    training: Plumbing
    evaluation: Plumbing | None  # None: `against` says why not
    against: str = ""

    def places(self, called: Mapping[str, frozenset[str]], ranks: int) -> dict[str, tuple[int, ...]]:
        """By parameter, the places of a pipeline of so many ranks that use it. `called`: all parameters of each module."""
        found: dict[str, set[int]] = {}
        for each in (self.training, self.evaluation):
            for name, stages in {} if each is None else each.stages.holders(called).items():
                found.setdefault(name, set()).update(rank_of(stage, ranks) for stage in stages)
        return {name: tuple(sorted(places)) for name, places in found.items()}

    def callers(self, ranks: int) -> dict[str, tuple[int, ...]]:
        """By module, the places that call it."""
        stages, found = self.training.stages, dict[str, set[int]]()
        for stage, call in zip(stages.stage_of, stages.flow.calls, strict=True):
            found.setdefault(call.path, set()).add(rank_of(stage, ranks))
        return {path: tuple(sorted(places)) for path, places in found.items()}
