"""The layout of a block: an integer program that says how each of its ops is cut over the ranks of one axis.

    x[s, w]          1 if step s is made in way w                                                               binary
    y[s, i, p, q]    the i-th tensor that step s reads was given as p and is read as q                           >= 0
    z[t, f, p, q]    tensor t is brought from p to q in pass f (forward, backward), for all its readers there    >= 0
    k[t, p, q]       what forward brought from p to q is kept for backward's readers                             >= 0

    least   sum x[s, w] seconds[s, w] + sum z[t, f, p, q] seconds of that move + price * kept bytes

    sum_w x[s, w] = 1                                               each step is made in one way              (_one_way)
    sum_q y[s, i, p, q] = sum of x of the giver's ways that give p   a flow from how it is given ...            (_flows)
    sum_p y[s, i, p, q] = sum of x[s, w] whose ways read q           ... to how it is read                      (_flows)
    y[s, i, p, q] <= z[t, f, p, q] (+ k[t, p, q] in backward)         a move is paid once, or was kept           (_moves)
    k[t, p, q] <= sum of forward's y[s, i, p, q]                     only what forward reads so                 (_moves)
    kept bytes <= limit                                                                                      (_memory)

Kept bytes are those of weights and their state, of what forward leaves for backward, each as it is given, and of kept moves. The
flow makes the relaxed program tight: without a limit it is integral or nearly so. (With x <= sum x + sum z instead of the flow,
the gap was 9 %.) HiGHS is limited by nodes and by the gap, not by seconds, so that a plan does not vary with the machine's load.
Where the nodes end without a layout that keeps the limit, memory gets a price instead, which is raised until one does.

Blocks follow each other: what leaves one is held as the next one takes it. `chained` finds the best way through the borders: a
shortest path over the blocks, by the program of each distinct block for pairs of borders.
"""

from __future__ import annotations

import contextlib
import itertools
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from anyfit.values.block_layouts import (
    USUAL_OPS,
    USUAL_RATES,
    BlockLayout,
    BlockProblem,
    LayoutRates,
    Moved,
    OpRates,
    counts,
)
from anyfit.values.cuts import Held, share

Borders: TypeAlias = tuple[Held, Held]  # how a block's input comes, and its output leaves
MOST_NODES = 2000  # of branch and bound
GAP = 1e-4
SCALE = 1e6  # microseconds, and MiB: figures near 1
MIB = 2**20
OUT_OF_NODES = 1  # a status of scipy's
PRICES = [10.0**power for power in range(-16, -3)]  # seconds a byte: from nothing to all there is


class NoLayout(ValueError):  # noqa: N818 -- says what is so, as NoPlan does
    """No layout of the block keeps within the limit."""


@dataclass(frozen=True)
class Ask:
    """What is wanted of a layout besides its being fast."""

    limit_bytes: float | None = None
    price: float = 0.0  # seconds a kept byte
    fixed: Mapping[int, Held] | None = None  # by tensor that enters the block, how it comes
    gap: float = GAP  # at which a layout is good enough, as a share


def solve(problem: BlockProblem, ask: Ask | None = None, *, relaxed: bool = False) -> BlockLayout:
    """The best layout, or one within the gap of it. Relaxed, its seconds are a bound and its ways the largest shares."""
    program = _Program(problem, ask or Ask())
    return program.solved(relaxed=relaxed)


class _Program:
    def __init__(self, problem: BlockProblem, ask: Ask) -> None:
        self.problem, self.ask = problem, ask
        self._costs: list[float] = []
        self._kept: dict[int, float] = {}  # bytes by variable
        self._is_binary: list[bool] = []
        self._entries: tuple[list[int], list[int], list[float]] = ([], [], [])
        self._bounds: tuple[list[float], list[float]] = ([], [])
        self.x = [[self._variable(way.seconds, is_binary=True) for way in step.ways] for step in problem.steps]
        self.z: dict[tuple[int, bool, Held, Held], int] = {}
        self.k: dict[tuple[int, Held, Held], int] = {}
        self._given: list[dict[Held, list[int]]] = [{} for _ in problem.tensors]
        for step, variables in zip(problem.steps, self.x, strict=True):
            for way, variable in zip(step.ways, variables, strict=True):
                for tensor, held in zip(step.gives, way.gives, strict=True):
                    self._given[tensor].setdefault(held, []).append(variable)
                    self._keeps(variable, problem.kept(tensor, held))
        self._one_way()
        self._flows()
        self._memory()

    # ------------------------------------------------------------------ rows and columns

    def _variable(self, cost: float, *, is_binary: bool = False) -> int:
        self._costs.append(cost)
        self._is_binary.append(is_binary)
        return len(self._costs) - 1

    def _keeps(self, variable: int, size: float) -> None:
        if size:
            self._kept[variable] = self._kept.get(variable, 0.0) + size

    def _row(self, terms: Sequence[tuple[int, float]], least: float, most: float) -> None:
        rows, columns, values = self._entries
        for column, value in terms:
            rows.append(len(self._bounds[0]))
            columns.append(column)
            values.append(value)
        self._bounds[0].append(least)
        self._bounds[1].append(most)

    def _one_way(self) -> None:
        fixed = self.ask.fixed or {}
        for step, variables in zip(self.problem.steps, self.x, strict=True):
            self._row([(variable, 1.0) for variable in variables], 1.0, 1.0)
            for tensor in step.gives:
                if tensor in fixed and not step.reads:
                    self._row([(variable, 1.0) for variable in self._given[tensor].get(fixed[tensor], [])], 1.0, 1.0)

    def _flows(self) -> None:
        self._forward_flows: defaultdict[tuple[int, Held, Held], list[int]] = defaultdict(list)
        for step, variables in sorted(zip(self.problem.steps, self.x, strict=True), key=lambda each: each[0].is_backward):
            for place, tensor in enumerate(step.reads):
                read: defaultdict[Held, list[int]] = defaultdict(list)
                for way, variable in zip(step.ways, variables, strict=True):
                    read[way.reads[place]].append(variable)
                leaving: defaultdict[Held, list[int]] = defaultdict(list)
                coming: defaultdict[Held, list[int]] = defaultdict(list)
                for held, wanted in itertools.product(self._given[tensor], read):
                    seconds = self.problem.move_seconds(tensor, held, wanted)
                    if seconds is None or (held != wanted and place in step.unmoved):
                        continue
                    flow = self._variable(0.0)
                    leaving[held].append(flow)
                    coming[wanted].append(flow)
                    if held != wanted:
                        self._moves(tensor, step.is_backward, held, wanted, flow, seconds)
                for held, givers in self._given[tensor].items():
                    self._row([*((flow, 1.0) for flow in leaving[held]), *((giver, -1.0) for giver in givers)], 0.0, 0.0)
                for wanted, readers in read.items():
                    self._row([*((flow, 1.0) for flow in coming[wanted]), *((reader, -1.0) for reader in readers)], 0.0, 0.0)

    def _moves(self, tensor: int, in_backward: bool, held: Held, wanted: Held, flow: int, seconds: float) -> None:
        key = (tensor, in_backward, held, wanted)
        if key not in self.z:
            self.z[key] = self._variable(seconds)
        terms = [(flow, 1.0), (self.z[key], -1.0)]
        made = self.problem.tensors[tensor]
        if not in_backward:
            self._forward_flows[tensor, held, wanted].append(flow)
        elif self._forward_flows[tensor, held, wanted]:
            if (tensor, held, wanted) not in self.k:
                kept = self.k[tensor, held, wanted] = self._variable(0.0, is_binary=self.ask.limit_bytes is not None)
                if not made.stays:  # what is cut from a weight is cut again
                    self._keeps(kept, made.bytes / share(wanted, self.problem.n))
                self._row([(kept, 1.0), *((each, -1.0) for each in self._forward_flows[tensor, held, wanted])], -np.inf, 0.0)
            terms.append((self.k[tensor, held, wanted], -1.0))
        self._row(terms, -np.inf, 0.0)

    def _memory(self) -> None:
        if self.ask.limit_bytes is not None:
            self._row([(variable, size / MIB) for variable, size in self._kept.items()], -np.inf, self.ask.limit_bytes / MIB)

    # ------------------------------------------------------------------ the answer

    def solved(self, *, relaxed: bool) -> BlockLayout:
        costs = np.array(self._costs)
        for variable, size in self._kept.items():
            costs[variable] += self.ask.price * size
        rows, columns, values = self._entries
        matrix = coo_array((values, (rows, columns)), shape=(len(self._bounds[0]), len(costs))).tocsr()
        answer = milp(
            costs * SCALE,
            integrality=np.zeros(len(costs)) if relaxed else np.array(self._is_binary, dtype=int),
            bounds=Bounds(0.0, 1.0),
            constraints=LinearConstraint(matrix, self._bounds[0], self._bounds[1]),
            options={"node_limit": MOST_NODES, "mip_rel_gap": self.ask.gap},
        )
        if answer.x is None and answer.status == OUT_OF_NODES and self.ask.limit_bytes is not None:
            return by_price(self.problem, self.ask)
        if answer.x is None:
            raise NoLayout(self._refusal(answer.message))
        return self._layout(answer.x, float(answer.fun) / SCALE, float(answer.mip_gap or 0.0) if not relaxed else 0.0)

    def _refusal(self, message: str) -> str:
        if self.ask.limit_bytes is None:
            return f"no layout for {self.problem.n} ranks: {message}"
        least = solve(self.problem, Ask(price=1e3, fixed=self.ask.fixed))
        return (
            f"no layout for {self.problem.n} ranks keeps within {self.ask.limit_bytes / 2**30:.3f} GiB a block: "
            f"the least is {least.kept_bytes / 2**30:.3f} GiB"
        )

    def _layout(self, values: np.ndarray, objective: float, gap: float) -> BlockLayout:
        ways = tuple(int(np.argmax([values[variable] for variable in variables])) for variables in self.x)
        moves = self._moved(ways, values)
        kept = float(sum(values[variable] * size for variable, size in self._kept.items()))
        return BlockLayout(ways, moves, objective - self.ask.price * kept, kept, gap, counts(self.problem, ways, moves))

    def _moved(self, ways: Sequence[int], values: np.ndarray) -> tuple[Moved, ...]:
        """What the chosen ways need brought where; from forward or anew as the program has it."""
        given: dict[int, Held] = {}
        found: dict[Moved, None] = {}
        for step, way in zip(self.problem.steps, ways, strict=True):
            given.update(zip(step.gives, step.ways[way].gives, strict=True))
        for step, way in zip(self.problem.steps, ways, strict=True):
            for tensor, wanted in zip(step.reads, step.ways[way].reads, strict=True):
                held = given[tensor]
                if held == wanted:
                    continue
                kept = self.k.get((tensor, held, wanted))
                is_kept = kept is not None and values[kept] > 0.5
                from_forward = is_kept and step.is_backward
                found[Moved(tensor, held, wanted, step.is_backward and not from_forward, is_kept)] = None
        return tuple(found)


def by_price(problem: BlockProblem, ask: Ask) -> BlockLayout:
    """The first layout that keeps the limit as memory gets dearer; without a limit the program is easy."""
    assert ask.limit_bytes is not None
    for price in PRICES:
        found = solve(problem, replace(ask, limit_bytes=None, price=ask.price + price))
        if found.kept_bytes <= ask.limit_bytes:
            return found
    raise NoLayout(f"no layout for {problem.n} ranks was found within {ask.limit_bytes / 2**30:.3f} GiB a block")


@dataclass(frozen=True)
class LayoutSolver:
    """For whoever runs blocks that a plan has cut: the best ways in between."""

    rates: tuple[OpRates, LayoutRates] = (USUAL_OPS, USUAL_RATES)

    def solve(self, problem: BlockProblem, fixed: Mapping[int, Held]) -> BlockLayout:
        return solve(problem, Ask(fixed=fixed))


# ---------------------------------------------------------------------- over blocks


def chained(blocks: Sequence[BlockProblem], ask: Ask | None = None) -> list[BlockLayout]:
    """One layout for each block, held alike where two meet, and as fast together as there is. A limit is each block's own.

    Bounds first, by the relaxed program; of the pairs of borders only those on the best way so far are solved in earnest, until
    all on it are.
    """
    ask = ask or Ask()
    tables = {id(block): _Table(block, ask) for block in blocks}
    while True:
        way = _best_way(blocks, tables)
        pairs = dict.fromkeys((id(block), pair) for block, pair in zip(blocks, way, strict=True))
        if not any(tables[block].improve(pair) for block, pair in pairs):
            return [tables[id(block)].solved[pair] for block, pair in zip(blocks, way, strict=True)]


class _Table:
    """What a block costs, or at least costs, for every pair of borders that it allows."""

    def __init__(self, block: BlockProblem, ask: Ask) -> None:
        self.block, self.ask = block, ask
        self.solved: dict[Borders, BlockLayout] = {}
        self.costs: dict[Borders, float] = {}
        for pair in itertools.product(block.borders(block.entry), block.borders(block.exit)):
            with contextlib.suppress(NoLayout):
                self.costs[pair] = self._cost(solve(block, self._asked(pair), relaxed=True))

    def _asked(self, pair: Borders) -> Ask:
        borders = zip((self.block.entry, self.block.exit), pair, strict=True)
        return replace(self.ask, fixed={**(self.ask.fixed or {}), **{tensor: held for tensor, held in borders if tensor >= 0}})

    def _cost(self, layout: BlockLayout) -> float:
        return layout.seconds + self.ask.price * layout.kept_bytes

    def improve(self, pair: Borders) -> bool:
        """Solves it, where that has not been done."""
        if pair in self.solved:
            return False
        try:
            self.solved[pair] = solve(self.block, self._asked(pair))
            self.costs[pair] = self._cost(self.solved[pair])
        except NoLayout:
            del self.costs[pair]
        return True


def _best_way(blocks: Sequence[BlockProblem], tables: Mapping[int, _Table]) -> list[Borders]:
    """By the costs as they are known, a pair of borders for each block."""
    reached: dict[Held, tuple[float, list[Borders]]] = {held: (0.0, []) for held in blocks[0].borders(blocks[0].entry)}
    for block in blocks:
        best: dict[Held, tuple[float, list[Borders]]] = {}
        for (entry, leaving), cost in tables[id(block)].costs.items():
            if entry in reached:
                total = reached[entry][0] + cost
                if leaving not in best or total < best[leaving][0]:
                    best[leaving] = (total, [*reached[entry][1], (entry, leaving)])
        reached = best
    if not reached:
        limit = tables[id(blocks[0])].ask.limit_bytes
        within = "" if limit is None else f" and keep within {limit / 2**30:.3f} GiB each"
        raise NoLayout(f"no layouts of these blocks for {blocks[0].n} ranks meet at their borders{within}")
    return min(reached.values(), key=lambda each: each[0])[1]
