"""The pass of one rank of a tensor axis: the traced pass of one device, with its blocks cut.

    ops          of a cut block: FLOPs and bytes are the rank's share, by pass and kind of op; so they are priced on the machine's
                 curves at the size they have
    exchanges    ops of their own, spread over the block: the code of a cut block waits for each
    parameters   a rank's part of those that are cut
    values       what forward leaves for backward, the other results of ops, and gradients, each by its share

What lies outside the blocks is whole, but for tables of words whose rows are divided (vocabulary.py): all ranks of the axis make
the same of it. A cut block is one node of autograd's graph, and hands out all its gradients when its backward is over: until then
they are held.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import accumulate

from anyfit.values.cut_figures import CutFigures, Moving, PassShares
from anyfit.values.cuts import FREE, Cut, Move
from anyfit.values.graph import Graph, Op, Parameter, Phase, Value
from anyfit.values.machine import Machine
from anyfit.values.profile import Pass

from .links import Links, Name
from .vocabulary import of_words

PHASES: tuple[Phase, ...] = ("forward", "backward")
EXCHANGE_CALLS = 6  # of the dispatcher, that a collective takes of the host: assumed
COPY_CALLS = 1


def on_axis(graph: Graph, n: int, figures: Mapping[str, CutFigures], tables: Collection[str] = ()) -> Graph:
    """`figures`: by path of a block; the others stay whole. `tables`: parameters outside of blocks, whose rows are divided."""
    return _OnAxis(graph, n, figures, tables).made()


def least_seconds(each: Pass, n: int, figures: Mapping[str, CutFigures], machine: Machine, tables: Collection[str] = ()) -> float:
    """That one rank's device is busy with a pass at the least, by the pass of a device alone: an op of which it makes a share
    takes at least that share, as smaller ones are made at no higher rate."""
    links = Links(machine, machine.device.count, machine.nodes)
    busy = {(phase, at): 0.0 for at in range(len(each.blocks)) for phase in PHASES}
    for segment in each.segments:
        busy[segment.phase, segment.block] += segment.device_seconds
    total = 0.0
    for at, block in enumerate(each.blocks):
        for phase in PHASES:
            cut = figures.get(block.name)
            shares = PassShares() if cut is None else cut.forward if phase == "forward" else cut.backward
            least = 1 / n if tables and not block.name else 1.0
            total += busy[phase, at] * min((*shares.flops.values(), *shares.bytes.values()), default=least)
            total += sum(
                links.between(_collective(move), n).seconds(each.micro_batch * size)
                for move, size in shares.moves
                if move not in FREE
            )
    return total


def _collective(move: Move) -> Name:
    assert move not in FREE
    return "all_gather" if move == "regroup" else move  # type: ignore[return-value]  # gathered, and cut anew


class _OnAxis:
    def __init__(self, graph: Graph, n: int, figures: Mapping[str, CutFigures], tables: Collection[str]) -> None:
        self.graph, self.n, self.tables = graph, n, tables
        self.words = of_words(graph, tables, n)
        self.figures = {at: figures[block.name] for at, block in enumerate(graph.blocks) if block.name in figures}
        self.calls = list(graph.calls)
        self._call_of: dict[tuple[object, ...], int] = {}
        self.parameters = tuple(map(self._parameter, graph.parameters))
        self.state_share = self._state_shares()

    def made(self) -> Graph:
        graph, figures = self.graph, self.figures
        self.added = self._exchanges()  # by op, those that come after it
        before = [0, *accumulate(len(self.added.get(at, ())) for at in range(len(graph.ops)))]
        self.at = [index + count for index, count in enumerate(before)]  # by op of the graph, and its end: its place now
        ops = [op for index, old in enumerate(graph.ops) for op in (self._op(index, old), *self.added.get(index, ()))]
        blocks = tuple(
            replace(
                block,
                input_bytes=int(block.input_bytes * figures[at].input_share(self.n)),
                offload_bytes=int(block.offload_bytes * figures[at].kept_share),
                is_cut=True,
            )
            if at in figures
            else block
            for at, block in enumerate(graph.blocks)
        )
        return replace(
            graph,
            parameters=tuple(replace(each, reads=self._moved(each.reads)) for each in self.parameters),
            blocks=blocks,
            ops=tuple(ops),
            calls=tuple(self.calls),
            backward_starts=self.at[graph.backward_starts],
            values=tuple(self._values()),
            tensor=self.n,
        )

    # ------------------------------------------------------------------ ops

    def _shares(self, phase: Phase, block: int) -> PassShares:
        figures = self.figures[block]
        return figures.forward if phase == "forward" else figures.backward

    def _op(self, index: int, op: Op) -> Op:
        if index in self.words.ops:
            flops = size = self.words.ops[index]
        elif op.block in self.figures:
            flops, size = self._shares(op.phase, op.block).of(op.kind)
        else:
            return op
        if flops == size == 1.0:
            return op
        call = self._call(("part", op.call, flops, size), [f"part of {op.name}", [op.call, flops, size], {}])
        return replace(op, flops=int(op.flops * flops), bytes=math.ceil(op.bytes * size), call=call)

    def _call(self, key: tuple[object, ...], text: object) -> int:
        if key not in self._call_of:
            self._call_of[key] = len(self.calls)
            self.calls.append(json.dumps(text, separators=(",", ":")))
        return self._call_of[key]

    def _exchanges(self) -> dict[int, list[Op]]:
        """Evenly over the ops of their block and pass, the last one after its last op."""
        places: dict[tuple[int, Phase], list[int]] = {}
        for index, op in enumerate(self.graph.ops):
            if op.block in self.figures and not op.recomputes:
                places.setdefault((op.block, op.phase), []).append(index)
        found = {index: [self._exchange(each, self.graph.ops[index])] for index, each in self.words.exchanges.items()}
        for (block, phase), indices in places.items():
            moves = self._shares(phase, block).moves
            for number, each in enumerate(moves, 1):
                after = indices[len(indices) * number // len(moves) - 1]
                found.setdefault(after, []).append(self._exchange(each, self.graph.ops[after]))
        return found

    def _exchange(self, moving: Moving, beside: Op) -> Op:
        size, is_free = int(moving.bytes * self.graph.micro_batch), moving.move in FREE
        own = 2 * size // self.n if is_free else size  # a copy reads and writes a rank's part
        name = "clone" if is_free else _collective(moving.move)
        return Op(
            name=name,
            kind="memory" if is_free else "exchange",
            phase=beside.phase,
            recomputes=False,
            block=beside.block,
            module=self.graph.blocks[beside.block].name,
            dtype=beside.dtype,
            flops=0,
            bytes=own,
            aligned=True,
            calls=COPY_CALLS if is_free else EXCHANGE_CALLS,
            call=self._call(("move", name, own), [f"{name} of {self.n}", [own], {}]),
        )

    # ------------------------------------------------------------------ parameters and values

    def _parameter(self, parameter: Parameter) -> Parameter:
        figures, cut = self.figures.get(parameter.block), Cut(0) if parameter.name in self.tables else None
        if figures is not None:
            name = parameter.name.removeprefix(f"{self.graph.blocks[parameter.block].name}.")
            cut = figures.cut.parameters.get(name)
        if cut is None:
            return parameter
        shape = cut.part(parameter.shape, self.n)
        return replace(parameter, shape=shape, elements=math.prod(shape), is_cut=True)

    def _state_shares(self) -> list[float]:
        """By block, of the elements that get a gradient."""
        sums = [[0, 0] for _ in self.graph.blocks]
        for whole, own in zip(self.graph.parameters, self.parameters, strict=True):
            if whole.used:
                sums[whole.block][0] += whole.elements
                sums[whole.block][1] += own.elements
        return [own / whole if whole else 1.0 for whole, own in sums]

    def _moved(self, moments: Sequence[int]) -> tuple[int, ...]:
        return tuple(map(self.at.__getitem__, moments))

    def _values(self) -> Iterator[Value]:
        ends = {op.block: self.at[index] for index, op in enumerate(self.graph.ops) if op.phase == "backward"}
        for index, value in enumerate(self.graph.values):
            own = Value(
                math.ceil(value.bytes * self.words.values.get(index, self._share(value))),
                value.kind,
                self.at[value.born],
                self.at[value.dies],
                value.block,
                value.saved_by,
                self._moved(value.reads),
                self._moved(value.writes),
            )
            yield own
            if value.kind == "gradient" and value.block in self.figures:  # until the block hands it out
                yield replace(own, kind="activation", dies=max(ends[value.block], own.born), reads=(), writes=())

    def _share(self, value: Value) -> float:
        graph = self.graph
        if value.kind == "gradient":
            return self.state_share[value.block]
        if value.kind == "input":
            return 1.0
        if graph.kept(value):
            home = graph.home(value)
            return self.figures[home].kept_share if home in self.figures else 1.0
        if value.block not in self.figures:
            return 1.0
        return self._shares(graph.ops[value.born].phase, value.block).results
