"""The calls of blocks that a forward makes, as a pipeline may be cut between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

from .division import NOTHING, Exchange
from .forced import Forced


class Elements(NamedTuple):
    """Of parameters, how many one rank holds."""

    frozen: int = 0
    cut: int = 0  # trained, of which a tensor axis leaves the rank its part
    whole: int = 0  # trained, and the same on all ranks of that axis

    @property
    def trained(self) -> int:
        return self.cut + self.whole

    @property
    def all(self) -> int:
        return self.frozen + self.trained

    def plus(self, other: Elements) -> Elements:
        return Elements(self.frozen + other.frozen, self.cut + other.cut, self.whole + other.whole)

    def minus(self, other: Elements) -> Elements:
        return Elements(self.frozen - other.frozen, self.cut - other.cut, self.whole - other.whole)


@dataclass(frozen=True)
class CalledBlocks:
    paths: tuple[str, ...]  # of the block, by call
    # Of parameters, by the calls that use them: code between blocks counts for the next call, or for the last.
    elements: Mapping[tuple[int, ...], Elements]

    def held(self, first: int, last: int) -> Elements:
        """By a stage that has these calls. Searches ask for the same ones again and again."""
        found = self._held.get((first, last))
        if found is None:
            found = self._up_to[last + 1].minus(self._up_to[first])
            for users, size in self.elements.items():
                if len(users) > 1 and any(first <= user <= last for user in users):
                    found = found.plus(size)
            self._held[first, last] = found
        return found

    @cached_property
    def _held(self) -> dict[tuple[int, int], Elements]:
        return {}

    @cached_property
    def _up_to(self) -> list[Elements]:
        """Of those that one call uses, by how many of the calls."""
        own = (self.elements.get((at,), Elements()) for at in range(len(self.paths)))
        return list(accumulate(own, Elements.plus, initial=Elements()))

    @cached_property
    def all(self) -> Elements:
        return self.held(0, len(self.paths) - 1)

    def shared(self, first: int, last: int) -> int:
        """Elements of a stage that another one has too."""
        return sum(
            size.trained
            for users, size in self.elements.items()
            if any(first <= user <= last for user in users) and not all(first <= user <= last for user in users)
        )


@dataclass(frozen=True)
class Pipeline:
    """An axis of so many ranks, that a model's calls are divided over."""

    ranks: int
    called: CalledBlocks
    sent_bytes: float = 0.0  # from a stage to the next, for one sample
    sends: tuple[Exchange, ...] = ()  # by place, from it to the next, the last one's to the first; none take no time
    stages_a_rank: tuple[int, ...] = Forced().stages_a_rank  # to consider
    against: str = ""  # why it is taken only where it is asked for

    def send(self, place: int) -> Exchange:
        return self.sends[place] if self.sends else NOTHING

    def sending(self, samples: int) -> tuple[float, ...]:
        """Seconds, by place."""
        return tuple(self.send(place).seconds(samples * self.sent_bytes) for place in range(self.ranks))
