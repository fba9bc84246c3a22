"""Op and Rule: one call of an op, and one way in which ranks can make it together, each its part.

A rule says how each tensor that is read has to be held, and how each result is held then, when every rank runs the op on what it
has. `local` has the arguments that are other for a rank (sizes, numbers of groups). Some forms are more than the plain op:

    averaged    the result is divided by n: a mean over a dimension that is cut
    drawn       the op is made for the whole tensor on every rank, and its part is taken: random numbers are those of one process
    others      a function of `layouts/forms.py`, by name; `exchanges` says what ranks exchange inside of it
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, fx

from anyfit.values.call import leaves
from anyfit.values.cuts import SUM, WHOLE, Cut, Held, Move

from ..graph import name_of, reads_of, tensors_of, value_of

Shape: TypeAlias = tuple[int, ...]
Outers: TypeAlias = Mapping[int, frozenset[int]]  # by size of a dimension, what it may hold side by side


class Rule(NamedTuple):
    reads: tuple[Held, ...]
    gives: tuple[Held, ...]
    local: tuple[tuple[str, Any], ...] = ()
    form: str = "plain"
    exchanges: tuple[tuple[Move, float], ...] = ()  # with the bytes of the whole tensor, as a move's


@dataclass(frozen=True)
class Op:
    node: fx.Node
    n: int
    outers: Outers

    @property
    def name(self) -> str:
        return name_of(self.node).removeprefix("aten.")

    @cached_property
    def shapes(self) -> list[Shape]:
        """Of the tensors that are read."""
        return [tuple(value_of(each).shape) for each in reads_of(self.node)]

    @cached_property
    def floats(self) -> list[bool]:
        return [value_of(each).is_floating_point() for each in reads_of(self.node)]

    @cached_property
    def results(self) -> list[Shape | None]:
        return [None if each is None else tuple(each.shape) for each in tensors_of(self.node)]

    @property
    def result(self) -> Shape:
        first = self.results[0]
        assert first is not None
        return first

    @cached_property
    def gives_floats(self) -> bool:
        return all(each is None or each.is_floating_point() for each in tensors_of(self.node))

    @cached_property
    def _arguments(self) -> dict[str, Any]:
        assert isinstance(self.node.target, torch._ops.OpOverload)
        schema = self.node.target._schema.arguments
        found = {each.name: each.default_value for each in schema}
        found |= {each.name: value for each, value in zip(schema, self.node.args, strict=False)}
        return found | dict(self.node.kwargs)

    def arg(self, name: str) -> Any:
        return self._arguments[name]

    def has(self, name: str) -> bool:
        """Whether the op has such an argument, given or not."""
        return name in self._arguments

    @cached_property
    def _read_by(self) -> dict[str, list[int]]:
        """Which of the tensors that are read an argument has."""
        found: dict[str, list[int]] = {}
        at = 0
        given = [(each.name, value) for each, value in zip(self._schema, self.node.args, strict=False)] + [
            *self.node.kwargs.items()
        ]
        for name, value in given:
            held = [each for each in leaves([value]) if isinstance(each, fx.Node) and isinstance(value_of(each), Tensor)]
            found[name] = list(range(at, at + len(held)))
            at += len(held)
        return found

    @property
    def _schema(self) -> Any:
        assert isinstance(self.node.target, torch._ops.OpOverload)
        return self.node.target._schema.arguments

    def shape(self, name: str) -> Shape | None:
        """Of a tensor argument, where it is given."""
        at = self._read_by.get(name, [])
        return self.shapes[at[0]] if at else None

    def rule(
        self,
        reads: Mapping[str, Held],
        *gives: Held,
        form: str = "plain",
        exchanges: tuple[tuple[Move, float], ...] = (),
        **local: Any,
    ) -> Rule:
        """By names of arguments; whole where none is said, and nothing where it is not given."""
        needs: list[Held] = [WHOLE] * len(self.shapes)
        for name, held in reads.items():
            at = self._read_by.get(name, [])
            for place in at:
                needs[place] = held
        given = gives if len(gives) == len(self.results) else gives * len(self.results)
        return Rule(tuple(needs), given, _local(local), form, exchanges)

    def rule_of(self, reads: Sequence[Held], *gives: Held, **local: Any) -> Rule:
        """By the order in which tensors are read."""
        given = gives if len(gives) == len(self.results) else gives * len(self.results)
        return Rule(tuple(reads), given, _local(local))

    def cuts(self, shape: Shape, dims: Sequence[int] | None = None) -> Iterator[Cut]:
        for dim in range(len(shape)) if dims is None else dims:
            for outer in sorted(self.outers.get(shape[dim], frozenset()) | {1}):
                cut = Cut(dim, outer)
                if cut.divides(shape, self.n):
                    yield cut

    def dim(self, name: str, rank: int) -> int:
        """A dimension that an argument names, counted from the front."""
        return int(self.arg(name)) % max(rank, 1)

    def allows(self, rule: Rule) -> bool:
        """Whether sizes divide and only floats are summed."""
        fine = all(_fits(held, shape, self.n) for held, shape in zip(rule.reads, self.shapes, strict=True))
        fine = fine and all(
            shape is None or _fits(held, shape, self.n) for held, shape in zip(rule.gives, self.results, strict=True)
        )
        sums = [is_float for held, is_float in zip(rule.reads, self.floats, strict=True) if held == SUM]
        return fine and all(sums) and (SUM not in rule.gives or self.gives_floats)


def _local(arguments: Mapping[str, Any]) -> tuple[tuple[str, Any], ...]:
    return tuple((name, tuple(value) if isinstance(value, list) else value) for name, value in arguments.items())


def _fits(held: Held, shape: Shape, n: int) -> bool:
    return not isinstance(held, Cut) or held.divides(shape, n)


Rules: TypeAlias = Iterator[Rule]
