"""Stages: the calls of a forward, divided over the ranks of a pipeline.

A forward is a sequence of *calls* of modules with parameters: of the model's blocks, and of the largest other modules that have
no block in them. What else the model's Python does, between them, is glue. A `Flow` says of each call, and of the loss, which
results of earlier calls and which parameters it is made of, through whatever glue. Cuts lie in the sequence of block calls, so
one module may serve several stages. Any other call goes with the next block, or with the last.

From the cuts follow what a stage receives, from any earlier one, and who holds a parameter.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple


class Value(NamedTuple):
    """A tensor that a call returns, by its place among all that it returns."""

    call: int
    leaf: int


@dataclass(frozen=True)
class Call:
    path: str  # of the module
    is_block: bool
    reads: frozenset[Value]  # itself, or glue that leads to it
    parameters: frozenset[str]  # likewise
    changed: frozenset[int] = frozenset()  # leaves that glue or a later call writes into
    buffers: frozenset[str] = frozenset()  # that it writes into


@dataclass(frozen=True)
class Flow:
    """Of one forward."""

    calls: tuple[Call, ...]
    loss: Call  # all that comes after the last call

    @cached_property
    def blocks(self) -> tuple[int, ...]:
        """Which calls are of blocks."""
        return tuple(index for index, each in enumerate(self.calls) if each.is_block)

    def cut(self, borders: Sequence[tuple[int, int]]) -> Stages:
        """Into stages that have so many calls of blocks: the first and the last of each, inclusive."""
        _refuse(borders, [self.calls[index].path for index in self.blocks])
        stage_of_block = [stage for stage, (first, last) in enumerate(borders) for _ in range(first, last + 1)]
        found, stage = [0] * len(self.calls), len(borders) - 1
        block = len(self.blocks)
        for index in reversed(range(len(self.calls))):
            if self.calls[index].is_block:
                block -= 1
                stage = stage_of_block[block]
            found[index] = stage
        return Stages(self, tuple(found), len(borders))

    def cut_like(self, other: Stages) -> Stages:
        """As another flow of the same model is: each call where it has the call of that number of the same module. One that is
        not there goes with the next."""
        known = dict(zip(_numbered(other.flow.calls), other.stage_of, strict=True))
        found, stage = [0] * len(self.calls), other.count - 1
        for index, name in reversed(list(enumerate(_numbered(self.calls)))):
            stage = min(stage, known.get(name, stage))
            found[index] = stage
        return Stages(self, tuple(found), other.count)


def _numbered(calls: Sequence[Call]) -> list[tuple[str, int]]:
    seen: Counter[str] = Counter()
    found = []
    for each in calls:
        seen[each.path] += 1
        found.append((each.path, seen[each.path]))
    return found


def _refuse(borders: Sequence[tuple[int, int]], blocks: Sequence[str]) -> None:
    if not blocks:
        raise ValueError("the model calls no blocks that a pipeline could be cut between; train it without a pipeline axis")
    if len(borders) > len(blocks):
        raise ValueError(f"{len(borders)} stages, and a forward calls {len(blocks)} blocks; use fewer stages")
    begins = 0
    for stage, (first, last) in enumerate(borders):
        if first != begins or last < first:
            raise ValueError(
                f"stage {stage} has block calls {first} to {last}, and the one before it ends with {begins - 1}; stages follow "
                "each other, each with one call or more"
            )
        begins = last + 1
    if begins != len(blocks):
        raise ValueError(
            f"the stages end with block call {begins - 1}, and a forward makes {len(blocks)} ({blocks[0]} to {blocks[-1]}): "
            f"the last stage ends with {len(blocks) - 1}"
        )


@dataclass(frozen=True)
class Stages:
    flow: Flow
    stage_of: tuple[int, ...]  # by call
    count: int

    def last_call(self, stage: int) -> int:
        return max(index for index, each in enumerate(self.stage_of) if each == stage)

    @cached_property
    def _users(self) -> dict[Value, set[int]]:
        """By a result, the later stages that read it."""
        found: dict[Value, set[int]] = {}
        for stage, call in self._readers:
            for value in call.reads:
                if self.stage_of[value.call] != stage:
                    found.setdefault(value, set()).add(stage)
        return found

    @property
    def _readers(self) -> list[tuple[int, Call]]:
        """Each call with its stage; the loss is the last's."""
        return [*zip(self.stage_of, self.flow.calls, strict=True), (self.count - 1, self.flow.loss)]

    def sent(self, source: int, to: int) -> tuple[Value, ...]:
        """From one stage to a later one."""
        return self._sent.get((source, to), ())

    @cached_property
    def _sent(self) -> dict[tuple[int, int], tuple[Value, ...]]:
        found: dict[tuple[int, int], list[Value]] = {}
        for value, users in sorted(self._users.items()):
            for user in users:
                found.setdefault((self.stage_of[value.call], user), []).append(value)
        return {pair: tuple(values) for pair, values in found.items()}

    def sources(self, stage: int) -> tuple[int, ...]:
        """Stages that it receives from, the one before it among them: that tells what the calls so far have returned."""
        before = {source for source, to in self._sent if to == stage}
        return tuple(sorted(before | ({stage - 1} if stage else set())))

    def users(self, stage: int) -> tuple[int, ...]:
        return tuple(each for each in range(stage + 1, self.count) if stage in self.sources(each))

    def holders(self, called: Mapping[str, frozenset[str]]) -> dict[str, tuple[int, ...]]:
        """By parameter, the stages that use it. `called` has all parameters of each module that is called: a call may read more
        of them another time."""
        found: dict[str, set[int]] = {}
        for stage, call in self._readers:
            for name in call.parameters | called.get(call.path, frozenset()):
                found.setdefault(name, set()).add(stage)
        return {name: tuple(sorted(stages)) for name, stages in found.items()}
