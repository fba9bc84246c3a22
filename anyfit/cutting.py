"""How the blocks of a job may be cut over a tensor axis: captured once, solved for each length of the axis, and kept.

    block_calls   one forward on fake tensors: what each distinct block is called with (tracing/calls.py)
    capture       its forward and backward as one graph (layouts/capture.py); what refuses that stays whole, with its reason
    pose, solve   for a tensor axis of n, with the machine's rates, at a few prices of memory (planning/layouts.py)
    figures_of    what a rank does then (layouts/figures.py): all that the planner needs to know

Blocks that follow each other are solved as one run: what one gives is held as the next takes it. A run ends where something else
reads what a block gives: what is read there has to be whole. Prices are in terms of the block: what keeping all of it for its own
seconds would cost. At no price the fastest layout comes out, at the highest one that cuts all weights it can.

A program is one run of distinct blocks for one n and price, and is known by a hash of its graphs and rates: at most MOST_PROGRAMS
of a job are solved, and those that were are kept in a file beside the machine's.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from .costing.links import Links
from .layouts.capture import Captured, capture
from .layouts.figures import figures_of, op_rows
from .layouts.guard import NotCaptured
from .layouts.pretending import TableUses
from .layouts.problem import Posed, pose
from .layouts.rules.table import outers_of
from .planning.layouts import Ask, NoLayout, chained, solve
from .probing import cache
from .tracing.calls import BlockCalls, block_calls
from .values.block_layouts import BlockLayout, BlockProblem, LayoutRates, OpRates, Step
from .values.cut_figures import TITLES, CutFigures, LayoutName, OpRow
from .values.cuts import WHOLE, Cut, Held, all_have_rows
from .values.doing import doing
from .values.graph import Graph
from .values.job import Job
from .values.machine import Machine
from .values.precision import PRECISIONS

PRICES = (0.0, 0.2, 30.0)  # of memory, each times what makes a whole block's bytes as dear as its seconds
ANY_PRICES = (1e3, 1e5)  # where the axis is wanted: of a small block an exchange takes longer than all that it computes
MOST_PROGRAMS, LENGTHS = 12, 3  # of a job, for so many lengths of the axis
EXPOSED = 0.02  # of the reduction of a whole weight's gradient: a step has one, and many passes hide it
PROGRAMS = 2  # changed with what is posed or solved, so that no program from before is taken
SAMPLES = 1  # of the calls that are captured: shares are the same for more, and no layout cuts the samples, as a data axis does
Key = tuple[str, ...]
Inner = tuple[int, int]  # a dimension's size, and how many pieces of it lie side by side


@dataclass(frozen=True, eq=False)
class Run:
    """Blocks of which each takes what the one before gave, and nothing else reads it."""

    paths: tuple[str, ...]
    captured: tuple[Captured, ...]

    @cached_property
    def distinct(self) -> dict[str, Captured]:
        return {each.key: each for each in self.captured}

    @cached_property
    def key(self) -> Key:
        """In as few words as there are distinct blocks, where they are all alike."""
        keys = [each.key for each in self.captured]
        return (keys[0], "repeated") if len(self.distinct) == 1 and len(keys) > 1 else tuple(keys)


@dataclass(frozen=True, eq=False)
class Cutter:
    """The runs of a job's blocks, and how each may be cut."""

    job: Job
    machine: Machine
    runs: tuple[Run, ...]
    samples: int
    whole: Mapping[str, str]  # blocks that stay whole, and why
    tables: Mapping[str, int]  # outside of blocks, embeddings and heads whose rows can be divided: how many rows
    stay: frozenset[str]  # parameters, by their full name, that stay whole: others hold them too, or the optimizer wants that

    def layouts(self, n: int, named: LayoutName | None = None) -> list[dict[str, CutFigures]]:
        """By path of a block, its figures on an axis of n: of every layout that was found, each once. Of a `named` one alone,
        where that is asked for; NoLayout where a block has none."""
        return self._distinct(n, self._prices if named is None else (named,))

    def at_any_price(self, n: int) -> list[dict[str, CutFigures]]:
        """Whatever can be cut, however slow that is: for an axis that the user wants."""
        return self._distinct(n, ANY_PRICES)

    def _distinct(self, n: int, asked: tuple[float | LayoutName, ...]) -> list[dict[str, CutFigures]]:
        found: dict[str, dict[str, CutFigures]] = {}
        for each in asked:
            figures = self._figures(n, each)
            if figures and any(one.cut.parameters or one.cut.entry for one in figures.values()):
                found.setdefault(json.dumps([(path, repr(one)) for path, one in sorted(figures.items())]), figures)
        return list(found.values())

    def tables_over(self, n: int) -> tuple[str, ...]:
        """Those of which each rank of an axis of n has rows."""
        return tuple(name for name, rows in self.tables.items() if all_have_rows(rows, n))

    def _figures(self, n: int, asked: float | LayoutName) -> dict[str, CutFigures]:
        found: dict[str, CutFigures] = {}
        for run in self.runs:
            try:
                solved = self._solved(run, n, asked)
            except NoLayout as refusal:
                if isinstance(asked, str):
                    raise NoLayout(f"{run.paths[0]} has no layout {asked!r} over {n} ranks: {refusal}") from None
                continue
            named = dict(zip(run.paths, solved, strict=True))
            named[run.paths[0]] = named[run.paths[0]].entered()
            named[run.paths[-1]] = named[run.paths[-1]].left()
            found |= named
        return found

    def rows(self, n: int, named: LayoutName | None = None) -> list[tuple[str, list[OpRow]]]:
        """By the first path of each distinct block, what a rank does of it: op by op, of the fastest layout or of a named one."""
        found: dict[str, tuple[str, list[OpRow]]] = {}
        for run in self.runs:
            first = {each.key: path for path, each in reversed(list(zip(run.paths, run.captured, strict=True)))}
            for posed, problem, layout in self._solve(run, n, named or 0.0):
                key = posed.captured.key
                found.setdefault(key, (first[key], list(op_rows(posed, problem, layout))))
        return list(found.values())

    # ------------------------------------------------------------------ programs

    @cached_property
    def _prices(self) -> tuple[float, ...]:
        """As many as MOST_PROGRAMS allows, for three lengths of the axis."""
        programs = LENGTHS * len({run.key for run in self.runs})
        return (
            PRICES if len(PRICES) * programs <= MOST_PROGRAMS else PRICES[::2] if 2 * programs <= MOST_PROGRAMS else PRICES[1:2]
        )

    @cached_property
    def _known(self) -> dict[str, tuple[CutFigures, ...]]:
        return dict(cache.layouts_of(self.machine).programs)

    def _solved(self, run: Run, n: int, asked: float | LayoutName) -> list[CutFigures]:
        """One for each block of the run."""
        key = self._hash(run, n, asked)
        known = self._known.get(key)
        if known is None:
            with doing(f"solving how blocks are cut over {n}"):
                known = self._known[key] = tuple(figures_of(*each, self.samples) for each in self._solve(run, n, asked))
            cache.keep_layouts(self.machine, {key: known})
        return list(known) if len(known) == len(run.paths) else list(known) * len(run.paths)

    def _hash(self, run: Run, n: int, asked: float | LayoutName) -> str:
        ops, rates = self.rates(n)
        exchanges = {kind: (each.latency_seconds, each.seconds_per_byte) for kind, each in rates.exchanges.items()}
        versions, fixed = (PROGRAMS, str(torch.__version__)), sorted(self._fixed_names(run))
        parts = [run.key, n, asked, self.samples, fixed, repr(ops), exchanges, versions]
        return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()[:32]

    def _fixed_names(self, run: Run) -> set[str]:
        return {name for path in run.paths for name in self.stay if name.startswith(f"{path}.")}

    def rates(self, n: int) -> tuple[OpRates, LayoutRates]:
        return rates_on(self.machine, self.job.precision, n)

    def _solve(self, run: Run, n: int, asked: float | LayoutName) -> list[tuple[Posed, BlockProblem, BlockLayout]]:
        found = list(self._solved_without(run, n, asked, frozenset()))
        inner = {each for one in found for each in _inner_cuts(*one)}
        chance = frozenset(inner - self._inner_factors(run, n)) if inner else frozenset()
        return list(self._solved_without(run, n, asked, chance)) if chance else found

    def _inner_factors(self, run: Run, n: int) -> set[Inner]:
        """Of the run's blocks, those that are there for another number of samples too. A width may be as large as a row of all
        samples is long, and seem to have its factors."""
        if self._others is None:
            return {(size, outer) for each in run.captured for size, outer in _factors(each, n)}
        return {pair for path in run.paths for pair in (_factors(self._others[path], n) if path in self._others else ())}

    @cached_property
    def _others(self) -> dict[str, Captured] | None:
        """What is captured for one sample more; None where that cannot be."""
        try:
            with doing("capturing the model's blocks"), block_calls(self.job, self.samples + 1) as calls:
                return _captured(calls)[0]
        except Exception:
            return None

    def _solved_without(
        self, run: Run, n: int, asked: float | LayoutName, chance: frozenset[Inner]
    ) -> Iterator[tuple[Posed, BlockProblem, BlockLayout]]:
        """Without weights that are cut in these inner factors."""
        posed = {key: pose(each, n, *self.rates(n)) for key, each in run.distinct.items()}
        problems = {key: self._problem(run, each, asked, chance) for key, each in posed.items()}
        first = next(iter(problems))
        if len(problems) == 1 and len(run.paths) > 1:
            problem = problems[first].repeated()
            layouts = [solve(problem, Ask(price=_price(problem, asked)))]
            problems[first] = problem
            keys = [first]
        elif len(run.paths) == 1:
            problem = problems[first]
            borders: dict[int, Held] = {each: WHOLE for each in (problem.entry, problem.exit) if each >= 0}
            layouts, keys = [solve(problem, Ask(price=_price(problem, asked), fixed=borders))], [first]
        else:
            keys = [each.key for each in run.captured]
            layouts = chained([problems[key] for key in keys], Ask(price=_price(problems[first], asked)))
        for key, layout in zip(keys, layouts, strict=True):
            yield posed[key], problems[key], layout

    def _problem(self, run: Run, posed: Posed, asked: float | LayoutName, chance: frozenset[Inner]) -> BlockProblem:
        """Without ways that are not asked for: some weights stay whole, and a named layout says what is cut."""
        allowed: dict[int, list[Held]] = {}
        stay = {name.removeprefix(f"{path}.") for path in run.paths for name in self.stay if name.startswith(f"{path}.")}
        problem = posed.problem
        for name, node in zip(posed.captured.parameters, posed.captured.parameter_nodes, strict=True):
            number = posed.number(node)
            shape = tuple(node.meta["val"].shape)
            ways = [way.gives[0] for way in problem.steps[posed.steps[node]].ways]
            ways = [each for each in ways if not (isinstance(each, Cut) and (shape[each.dim], each.outer) in chance)]
            allowed[number] = [WHOLE] if name in stay else _weight_ways(ways, asked, node.meta["val"].dim())
            if name in stay and asked in CUTS_WEIGHTS and node.meta["val"].dim() > 1:
                raise NoLayout(f"{name} stays whole: something else holds it too, or its optimizer looks at whole parameters")
            if not allowed[number]:
                raise NoLayout(f"{name} ({' x '.join(map(str, shape))}) cannot be cut over {problem.n}")
        for number in (problem.entry, problem.exit):
            if number >= 0 and isinstance(asked, str):
                allowed[number] = [each for each in problem.borders(number) if _is_border(each, BORDERS[asked])]
                if not allowed[number]:
                    raise NoLayout(f"what enters it cannot be cut as {TITLES[asked]} does: {problem.n} does not divide it")
        return replace(problem, steps=tuple(_narrowed(step, allowed) for step in problem.steps))


BORDERS: Mapping[str, int | None] = {"data": 0, "megatron": None, "sequence": 1, "ulysses": 1}
CUTS_WEIGHTS = ("megatron", "sequence")
# Optimizers that treat every element by itself; of others (Adafactor, Muon) a part of a matrix would train to something else.
BY_ELEMENT = ("SGD", "Adam", "AdamW", "NAdam", "RAdam", "Adamax", "Adagrad", "Adadelta", "RMSprop", "Rprop", "ASGD")


def _inner_cuts(posed: Posed, problem: BlockProblem, layout: BlockLayout) -> Iterator[Inner]:
    """By which weights are cut."""
    for node in posed.captured.parameter_nodes:
        held = layout.held(problem, posed.number(node))
        if isinstance(held, Cut) and held.outer > 1:
            yield node.meta["val"].shape[held.dim], held.outer


def _factors(captured: Captured, n: int) -> Iterator[Inner]:
    return ((size, outer) for size, outers in outers_of(captured.nodes, n).items() for outer in outers)


def _is_border(held: Held, dim: int | None) -> bool:
    return held == WHOLE if dim is None else isinstance(held, Cut) and held.dim == dim


def _weight_ways(ways: Sequence[Held], asked: float | LayoutName, dims: int) -> list[Held]:
    """How a weight may be held: as asked, matrices are cut, or nothing is."""
    if not isinstance(asked, str):
        return list(ways)
    if asked in CUTS_WEIGHTS:
        return [each for each in ways if isinstance(each, Cut)] if dims > 1 else list(ways)
    return [WHOLE]


def _narrowed(step: Step, allowed: Mapping[int, Sequence[Held]]) -> Step:
    """A source that gives its tensor in the allowed ways alone."""
    if step.reads or len(step.gives) != 1 or step.gives[0] not in allowed:
        return step
    return replace(step, ways=tuple(way for way in step.ways if way.gives[0] in allowed[step.gives[0]]))


def _price(problem: BlockProblem, asked: float | LayoutName) -> float:
    """Seconds a byte."""
    if isinstance(asked, str) or not asked:
        return 0.0
    seconds = sum(max(way.seconds for way in step.ways) for step in problem.steps if step.ways)
    kept = sum(each.kept_bytes for each in problem.tensors)
    return asked * seconds / kept if kept else 0.0


def rates_on(machine: Machine, precision: str, n: int) -> tuple[OpRates, LayoutRates]:
    """What an op and a move take on an axis of n."""
    device, links = machine.device, Links(machine, machine.device.count, machine.nodes)
    matmul = device.matmul.get(PRECISIONS[precision].weight) or device.matmul["float32"]
    names = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")
    exchanges = {name: links.between(name, n) for name in names}  # type: ignore[arg-type]
    ops = OpRates(matmul.peak, device.memory.peak, exposed=EXPOSED)
    return ops, LayoutRates(exchanges, 1 / device.memory.peak)  # type: ignore[arg-type]


# ---------------------------------------------------------------------- capturing


def cutter_of(job: Job, graph: Graph, machine: Machine, samples: int = SAMPLES) -> Cutter:
    """Captures every distinct block of a job, of which `graph` is a trace."""
    by_element = graph.update.name in BY_ELEMENT
    held = (each for each in graph.parameters if len(each.names) > 1 or (each.trainable and not by_element))
    stay = frozenset(name for each in held for name in each.names)
    try:
        with doing("capturing the model's blocks"), block_calls(job, samples) as calls:
            found, whole = _captured(calls)
            runs = _longest(tuple(_runs(calls, found, read_elsewhere(graph))), whole)
    except Exception as error:  # it was traced with more samples
        said, count = " ".join(str(error).split()), f"{samples} samples" if samples > 1 else "one sample"
        return Cutter(job, machine, (), samples, {graph.model: f"it does not run with {count} ({said:.200})"}, {}, stay)
    return Cutter(job, machine, runs, samples, whole, _tables(job, graph) if by_element else {}, stay)


def _tables(job: Job, graph: Graph) -> dict[str, int]:
    """Heads that are used by rows alone, and embeddings of as many words. Positions and the like stay whole: dividing them saves
    little, and costs an exchange."""
    outside = (each for each in graph.parameters if each.block == graph.outside and len(each.shape) == 2)
    rows = {each.name: each.shape[0] for each in outside}
    uses = TableUses(rows)
    try:
        with doing("looking how the vocabulary is used"), block_calls(job, SAMPLES, uses.watching):
            heads = uses.on_parts & uses.heads
    except Exception:  # half a table is not what this model's code takes
        return {}
    words = {rows[name] for name in heads}
    return {name: count for name, count in rows.items() if name in uses.on_parts and count in words}


def _captured(calls: BlockCalls) -> tuple[dict[str, Captured], dict[str, str]]:
    """By path of a block; and those that cannot be, with the reason."""
    by_form: dict[object, Captured | str] = {}
    for form, call in calls.first.items():
        try:
            by_form[form] = capture(call.block, call.args, call.kwargs)
        except NotCaptured as refusal:
            by_form[form] = str(refusal)
    found: dict[str, Captured] = {}
    whole: dict[str, str] = {}
    for path, form in calls.forms.items():
        made = "it is called more than once in a pass" if path in calls.again else by_form[form]
        if isinstance(made, str):
            whole[path] = made
        elif not made.tangent_nodes:
            whole[path] = "it gives nothing that has a gradient"
        else:
            found[path] = made
    return found, whole


def _runs(calls: BlockCalls, captured: Mapping[str, Captured], borders: frozenset[str]) -> Iterator[Run]:
    run: list[str] = []
    for path in calls.forms:
        goes_on = run and calls.follows.get(path) == run[-1] and run[-1] not in borders
        if run and (path not in captured or not goes_on):
            yield Run(tuple(run), tuple(captured[each] for each in run))
            run = []
        if path in captured:
            run.append(path)
    if run:
        yield Run(tuple(run), tuple(captured[each] for each in run))


def _longest(runs: tuple[Run, ...], whole: dict[str, str]) -> tuple[Run, ...]:
    """Of as many different kinds as there can be programs; blocks of the others stay whole."""
    blocks = Counter[Key]()
    for run in runs:
        blocks[run.key] += len(run.paths)
    kept = {key for key, _ in blocks.most_common(MOST_PROGRAMS // LENGTHS)}
    why = "there are more kinds of blocks than are solved"
    whole |= {path: why for run in runs if run.key not in kept for path in run.paths}
    return tuple(run for run in runs if run.key in kept)


def read_elsewhere(graph: Graph) -> frozenset[str]:
    """Blocks whose output is read by more than the one block after it."""
    found = set()
    for value in graph.values:
        name = graph.blocks[value.block].name
        if not name or value.kind != "activation" or value.born >= graph.backward_starts:
            continue
        readers = {graph.ops[at].block for at in value.reads if at < graph.backward_starts} - {value.block}
        if len(readers) > 1:
            found.add(name)
    return frozenset(found)
