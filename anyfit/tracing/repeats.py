"""Repetition: of a long chain of like blocks only a few are run, and the rest is written in afterwards.

A chain whose kinds repeat with a period makes *units* of that many blocks. The very last unit is run and left aside, because
backward begins there and nothing is like it. Of the others, units 0, 1, 2 and the last one L are run; those between are skipped
(they hand their input through). Let F(u) and B(u) be the stretches of ops that unit u makes in forward and in backward. What
was run is

    … F0 F1 F2 FL … BL B2 B1 B0 …

and what every unit run would have made, since all between 2 and L are like 2, is

    … F0 F1 F2 F3 … F(L-1) FL … BL B(L-1) … B3 B2 B1 B0 …

with F(2+j), B(2+j) copies of F2, B2. What the model does between blocks belongs to the one before; after a skipped one it is not
written down. Storages are moved by the same rule. One that unit 2 makes has a twin in every copy; where
its end lies in a neighbour (L stood beside 2 when it was recorded), the twin's end lies in the twin's own neighbour. The rule
is checked, not trusted: unless units 1 and 2 made the same ops, the model is traced in full.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from anyfit.values.graph import Op

from .blocks import Blocks, Chain
from .needs import tensors_in
from .recorder import NotPeriodic, Storage

LONGEST_PERIOD = 8
RUN_UNITS = 4  # 0, 1, 2 and the last


@dataclass(frozen=True)
class Repeat:
    """A periodic stretch of a chain: `units` units of `period` blocks, from block `first` on."""

    first: int
    period: int
    units: int

    def unit(self, number: int) -> range:
        start = self.first + number * self.period
        return range(start, start + self.period)

    @property
    def last(self) -> int:
        return self.units - 1

    @property
    def skipped(self) -> range:
        """Blocks that need not be run."""
        return range(self.unit(3).start, self.unit(self.last).start)


def find_repeats(blocks: Blocks) -> list[Repeat]:
    """The longest periodic stretch of every chain, where skipping blocks saves anything."""
    found = []
    for chain in blocks.chains:
        repeat = _longest(chain)
        members = [blocks.modules[repeat.first + index] for index in range(repeat.period * repeat.units)]
        if repeat.units > RUN_UNITS and _share_nothing(members):
            found.append(repeat)
    return found


def twins_of(repeats: Sequence[Repeat]) -> dict[int, int]:
    """Skipped blocks, and the one that is run in the place of each."""
    return {block: repeat.unit(2)[(block - repeat.first) % repeat.period] for repeat in repeats for block in repeat.skipped}


def _longest(chain: Chain) -> Repeat:
    best = Repeat(chain.first, 1, 1)
    kinds = chain.kinds
    for period in range(1, min(LONGEST_PERIOD, len(kinds) // 2) + 1):
        start = 0
        while start + period < len(kinds):
            end = start + period
            while end < len(kinds) and kinds[end] == kinds[end - period]:
                end += 1
            candidate = Repeat(chain.first + start, period, (end - start) // period - 1)
            if len(candidate.skipped) > len(best.skipped):
                best = candidate
            start = max(end - period + 1, start + 1)
    return best


def _share_nothing(modules: list[nn.Module]) -> bool:
    own = [{id(parameter) for parameter in module.parameters()} for module in modules]
    return len(set().union(*own)) == sum(map(len, own))


@contextmanager
def skipping(modules: Sequence[nn.Module], twin_of: Mapping[int, int], tell: Callable[[], None] = lambda: None) -> Iterator[None]:
    """While active, each skipped block passes its input on, in the form of what its twin last returned: what the twin returned as
    it got it, from the same place; what it made, from the first input of that shape. `tell` is called after each."""
    returned: dict[int, Any] = {}

    def remember(twin: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        inputs = tensors_in((args, kwargs))
        returned[id(twin)] = pytree.tree_map(lambda item: _described(item, inputs), output)

    hooks = [modules[twin].register_forward_hook(remember, with_kwargs=True) for twin in set(twin_of.values())]
    patched = {block: vars(modules[block])["forward"] for block in twin_of if "forward" in vars(modules[block])}
    for block, twin in twin_of.items():
        modules[block].forward = functools.partial(_hand_through, returned, id(modules[twin]), tell)
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
        for block in twin_of:
            del modules[block].forward  # the class's own is there again
        for block, forward in patched.items():
            modules[block].forward = forward


def _hand_through(returned: Mapping[int, Any], twin: int, tell: Callable[[], None], *args: Any, **kwargs: Any) -> Any:
    tell()
    inputs = tensors_in((args, kwargs))
    form = returned[twin]
    taken = {item.place for item in pytree.tree_leaves(form, is_leaf=_is_result) if _is_result(item)}

    def find(wanted: Any) -> Any:
        if not isinstance(wanted, _Result):
            return wanted
        if wanted.place is not None:
            return inputs[wanted.place]
        for place, tensor in enumerate(inputs):
            if place not in taken and (tuple(tensor.shape), tensor.dtype) == (wanted.shape, wanted.dtype):
                return tensor
        raise NotPeriodic("a block returns a shape that it does not take")

    return pytree.tree_map(find, form, is_leaf=_is_result)


@dataclass(frozen=True)
class _Result:
    """A tensor that a block returns: the input at `place`, or one of its own making."""

    place: int | None
    shape: tuple[int, ...]
    dtype: torch.dtype


def _is_result(item: Any) -> bool:
    return isinstance(item, _Result)


def _described(item: Any, inputs: list[Tensor]) -> Any:
    if isinstance(item, Tensor):
        place = next((index for index, tensor in enumerate(inputs) if tensor is item), None)
        return _Result(place, tuple(item.shape), item.dtype)
    if item is None or isinstance(item, bool | int | float | str):
        return item
    raise NotPeriodic(f"a block returns a {type(item).__name__}")


def write_in(
    repeat: Repeat, names: Sequence[str], ops: list[Op], storages: list[Storage], parameters: Sequence[ParameterReads]
) -> tuple[list[Op], list[Storage]]:
    """The ops and storages that running the skipped units as well would have recorded; `names` are the blocks'. Reads of
    parameters are moved where they are; those of units that were not run are read from their twins'."""
    timeline = _Timeline(repeat, names, ops)
    new_storages = []
    for storage in storages:
        born, dies = timeline.stretch(storage.born), None if storage.dies is None else timeline.stretch(storage.dies)
        for number in timeline.copies(born.unit):
            start = timeline.moved(born, born.unit, number)
            end = None if dies is None else timeline.moved(dies, born.unit, number)
            block = timeline.block(storage.block, born.unit, number)
            saver = timeline.saver(storage.saved_by, born.unit, number)
            reads, writes = (timeline.moments(each, born.unit, number) for each in (storage.reads, storage.writes))
            if any(moment < start or (end is not None and moment > end) for moment in (*reads, *writes)):
                raise NotPeriodic("a tensor would be read after its end")
            new_storages.append(Storage(storage.bytes, storage.kind, start, end, block, saver, reads=reads, writes=writes))
    sources = [each.twin if each.twin is not None and each.block in repeat.skipped else each for each in parameters]
    pairs = zip(parameters, sources, strict=True)
    moved = [timeline.moments(source.reads, *timeline.owner(each.block)) for each, source in pairs]
    for each, reads in zip(parameters, moved, strict=True):
        each.reads = reads
    return timeline.ops_in_full(), new_storages


@dataclass
class ParameterReads:
    block: int
    reads: list[int]  # ops
    twin: ParameterReads | None = None  # that was read in its place


@dataclass(frozen=True)
class _Moment:
    """A moment of the short recording: so far into the stretch of a unit, or outside all (`unit` is None)."""

    phase: str
    unit: int | None
    offset: int


class _Timeline:
    """Where each op of the short recording stands in the long one."""

    def __init__(self, repeat: Repeat, names: Sequence[str], ops: list[Op]) -> None:
        self.repeat, self.names, self.ops = repeat, names, ops
        last = repeat.last
        self.forward = forward = self._starts("forward", [0, 1, 2, last])  # start of F(u) by unit number, and the end of FL
        forward[-1] = max(forward[-1], self._end_with_what_follows(last))
        self.backward = backward = self._starts("backward", [last, 2, 1, 0])
        self.more = last - 3  # units written in
        self.forward_length = forward[last] - forward[2]
        self.backward_length = backward[1] - backward[2]
        self._bounds = [
            (phase, unit, starts[unit], starts[following])
            for phase, starts in (("forward", forward), ("backward", backward))
            for unit, following in pairwise(starts)
        ]
        self._check()

    def _starts(self, phase: str, order: list[int]) -> dict[int, int]:
        unit_of = {block: unit for unit in order for block in self.repeat.unit(unit)}
        starts: dict[int, int] = {}
        end = 0
        for index, op in enumerate(self.ops):
            if op.phase == phase and op.block in unit_of:
                starts.setdefault(unit_of[op.block], index)
                end = index + 1
        if list(starts) != order:
            raise NotPeriodic("the blocks do not run one after the other")
        return starts | {-1: end}  # in the order of `order`

    def _end_with_what_follows(self, unit: int) -> int:
        """Of a unit's forward, where the model does the same after it as after the one before the second; else its start."""
        start, length = self.forward[unit], self.forward[2] - self.forward[1]
        own, other = ([op.call for op in self.ops[each : each + length]] for each in (start, self.forward[1]))
        return start + length if own == other else start

    def _check(self) -> None:
        nameless = {
            (phase, unit): [(op.call, op.phase, op.recomputes, op.flops, op.bytes) for op in self.ops[start:end]]
            for phase, unit, start, end in self._bounds
        }
        if any(nameless[phase, 1] != nameless[phase, 2] for phase in ("forward", "backward")):
            raise NotPeriodic("blocks built alike do not run alike")

    def ops_in_full(self) -> list[Op]:
        last = self.repeat.last
        ops = self.ops[: self.forward[last]]
        for unit in range(3, last):
            ops += self._copy(range(self.forward[2], self.forward[last]), unit)
        ops += self.ops[self.forward[last] : self.backward[2]]
        for unit in range(last - 1, 2, -1):
            ops += self._copy(range(self.backward[2], self.backward[1]), unit)
        return ops + self.ops[self.backward[2] :]

    def _copy(self, stretch: range, unit: int) -> list[Op]:
        """Unit 2's ops as `unit` would have made them."""
        copies = []
        for index in stretch:
            op = self.ops[index]
            block = self.block(op.block, 2, unit)
            module = self.names[block] + op.module.removeprefix(self.names[op.block])
            # By place, since dataclasses.replace is slow and there are tens of thousands.
            same = (op.dtype, op.flops, op.bytes, op.aligned, op.calls, op.call)
            copies.append(Op(op.name, op.kind, op.phase, op.recomputes, block, module, *same))
        return copies

    def stretch(self, moment: int) -> _Moment:
        """Which unit's stretch a moment lies in."""
        for phase, unit, start, end in self._bounds:
            if start <= moment < end:
                return _Moment(phase, unit, moment - start)
        return _Moment("", None, moment)

    def copies(self, owner: int | None) -> list[int]:
        """The units that have a storage like one that `owner` makes: itself, and for unit 2 all written in."""
        return list(range(2, self.repeat.last)) if owner == 2 else [-1 if owner is None else owner]

    def moved(self, moment: _Moment, owner: int | None, number: int) -> int:
        """A moment in the life of a storage that `owner` made, for its twin that unit `number` makes."""
        unit, last = moment.unit, self.repeat.last
        if unit is None:
            return moment.offset + self._shift(moment.offset)
        if owner == 2:
            unit = {1: number - 1, 2: number, last: number + 1}.get(unit, unit)
        elif owner == last and unit == 2:
            unit = last - 1
        return self._start(moment.phase, unit) + moment.offset

    def moments(self, given: Sequence[int], owner: int | None, number: int) -> list[int]:
        """All ops that read what `owner` made, for its twin in unit `number`. What not only unit 2 but also those on both sides
        of it read, the maker apart, all between read too."""
        found, stretches = [], [self.stretch(each) for each in given]
        units = {(each.phase, each.unit) for each in stretches}
        for each in stretches:
            around = {(each.phase, unit) for unit in (1, self.repeat.last) if unit != owner}
            if each.unit == 2 and owner != 2 and around <= units:
                found += [self._start(each.phase, unit) + each.offset for unit in range(2, self.repeat.last)]
            else:
                found.append(self.moved(each, owner, number))
        return sorted(found)

    def owner(self, block: int) -> tuple[int | None, int]:
        """The unit that has this block, or whose twin has it, and that unit's number."""
        unit, last = (block - self.repeat.first) // self.repeat.period, self.repeat.last
        if not 0 <= unit <= last:
            return None, -1
        return (2, unit) if 2 < unit < last else (unit, unit)

    def _start(self, phase: str, unit: int) -> int:
        last = self.repeat.last
        if phase == "forward":
            return self.forward[unit] if unit <= 2 else self.forward[2] + (unit - 2) * self.forward_length
        if unit == last:
            return self.backward[last] + self.more * self.forward_length
        start_of_2 = self.backward[2] + self.more * (self.forward_length + self.backward_length)
        if unit >= 2:
            return start_of_2 - (unit - 2) * self.backward_length
        return self.backward[unit] + self.more * (self.forward_length + self.backward_length)

    def _shift(self, moment: int) -> int:
        if moment < self.forward[self.repeat.last]:
            return 0
        if moment < self.backward[2]:
            return self.more * self.forward_length
        return self.more * (self.forward_length + self.backward_length)

    def saver(self, block: int, owner: int | None, number: int) -> int:
        """The block that saves a copy: of a storage that unit 2 makes, one of its own unit or of the next."""
        last = self.repeat.last
        if owner == 2 and block in self.repeat.unit(last):
            return block - (last - number - 1) * self.repeat.period
        return self.block(block, owner, number)

    def block(self, block: int, owner: int | None, number: int) -> int:
        """The block of a copy: as far from its unit's first as the original from unit 2's."""
        if owner != 2 or block not in self.repeat.unit(2):
            return block
        return block + (number - 2) * self.repeat.period
