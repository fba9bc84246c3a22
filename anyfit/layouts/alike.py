"""Alike: a block that is built and called as one that was captured before, and does the same, needs no capture of its own.

A model's layers are mostly built alike and called alike, so a capture (a part of a second) serves all of them. It serves a block

    that is built so         of the same classes at the same paths, with parameters and attributes of the same names, and sizes
    and is called so         under equal conditions (guard.py), but for attributes that the capture never read: a layer's number,
                             say, that is only there for a cache
    and has what was read    the very object, or a plain value that is equal: of two functions it is not known what is in them

Which attributes a call reads is noted meanwhile: Python asks nn.Module for each. Whoever looks at all of them has read all.
"""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import nn

from .guard import OF_EVERY_MODULE, PLAIN, Conditions, attributes, conditions, differences, frozen

if TYPE_CHECKING:
    from .capture import Captured

NOTHING = object()
_Module: Any = nn.Module


@contextmanager
def noting_reads(block: nn.Module) -> Iterator[set[str]]:
    """The attributes of the block's modules that are read inside, by path and name."""
    own, find = "__getattribute__" in vars(nn.Module), nn.Module.__getattribute__
    paths = {id(module): f"{path}." if path else "" for path, module in block.named_modules()}
    names = {path: [name for name in vars(module) if name not in OF_EVERY_MODULE] for path, module in block.named_modules()}
    read = set[str]()

    def noting(self: nn.Module, name: str) -> Any:
        path = paths.get(id(self))
        if path is not None:
            read.add(f"{path}{name}")
            if name == "__dict__" and not sys._getframe(1).f_globals.get("__name__", "").startswith("torch."):  # torch's own way
                read.update(f"{path}{each}" for each in names[path.removesuffix(".")])
        return find(self, name)

    _Module.__getattribute__ = noting
    try:
        yield read
    finally:
        if own:
            _Module.__getattribute__ = find
        else:
            del _Module.__getattribute__


@dataclass(frozen=True, eq=False)
class _Known:
    captured: Captured
    values: Mapping[str, Any]  # of the attributes that it read

    def serves(self, block: nn.Module, now: Conditions) -> bool:
        others = differences(self.captured.guard, now)
        if any(not name.startswith("attribute ") or name.removeprefix("attribute ") in self.captured.reads for name in others):
            return False
        mine = dict(attributes(block))
        return all(_is_same(value, mine.get(name, NOTHING)) for name, value in self.values.items())


class Alike:
    """What was captured of the blocks of a model."""

    def __init__(self) -> None:
        self._known: dict[Hashable, list[_Known]] = {}

    def find(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
    ) -> Captured | None:
        known = self._known.get(_built(block, shapes), [])
        now = conditions(block, args, kwargs) if known else {}
        served = next((each for each in known if each.serves(block, now)), None)
        return None if served is None else replace(served.captured, guard=now)

    def keep(self, captured: Captured, block: nn.Module, shapes: Mapping[str, Sequence[int]]) -> None:
        mine = dict(attributes(block))
        values = {name: mine[name] for name in captured.reads if name in mine}
        self._known.setdefault(_built(block, shapes), []).append(_Known(captured, values))


def _built(block: nn.Module, shapes: Mapping[str, Sequence[int]]) -> Hashable:
    kinds = {type(module) for module in block.modules()}
    answers_itself = any(each.__getattribute__ is not nn.Module.__getattribute__ for each in kinds)
    return (
        tuple((path, type(module)) for path, module in block.named_modules()),
        tuple(name for name, _ in attributes(block)),
        tuple((name, type(each), tuple(shapes.get(name, each.shape))) for name, each in block.named_parameters()),
        id(block) if answers_itself or "forward" in vars(block) else None,  # who knows what it reads then
    )


def _is_same(one: Any, other: Any) -> bool:
    return one is other or (_is_plain(one) and _is_plain(other) and frozen(one) == frozen(other))


def _is_plain(value: Any) -> bool:
    if isinstance(value, dict):
        return all(_is_plain(each) for item in value.items() for each in item)
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(_is_plain, value))
    return isinstance(value, PLAIN)
