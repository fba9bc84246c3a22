"""Which meshes of ranks a job is planned for: a data axis and a tensor axis, as asked for or all that are worth a look.

The traces are those of one device alone: a tensor axis makes of them what one of its ranks does (costing/on_axis.py), by how the
blocks are cut (cutting.py). A choice has its bound at once, and its profile when the search wants it.
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

from .costing import cost
from .costing.on_axis import least_seconds, on_axis
from .cutting import SAMPLES, Cutter, cutter_of
from .pipelining import Look, considered, fits, stage_grid
from .planning.layouts import NoLayout
from .planning.meshes import MeshChoice, bound_of
from .values.cut_figures import TITLES, CutFigures, LayoutName
from .values.graph import Graph
from .values.job import Job
from .values.loss_rule import LossRule
from .values.machine import Machine
from .values.profile import Profile
from .values.record import nearest

AXES = ("data", "tensor", "pipeline")


@dataclass(frozen=True)
class Axes:
    """What is asked of a mesh: lengths of its axes, and the layout of blocks by its name. None: whatever is best."""

    data: int | None = None
    tensor: int | None = None
    layout: LayoutName | None = None
    pipeline: int | None = None

    @classmethod
    def parse(cls, mesh: str | None, layout: str | None) -> Axes:
        """As the command line has them.

        >>> Axes.parse("data=2,tensor=4", "megatron")
        Axes(data=2, tensor=4, layout='megatron')
        """
        lengths: dict[str, int] = {}
        for part in () if mesh is None else mesh.split(","):
            name, equals, length = (word.strip() for word in part.partition("="))
            if name not in AXES:
                raise ValueError(f"--mesh {mesh}: unknown axis {name!r}{nearest(name, AXES)}")
            if not equals or not (length.isascii() and length.isdigit() and int(length) > 0):
                raise ValueError(f"--mesh {mesh}: write lengths from 1 up, such as data=2,tensor=4")
            if name in lengths:
                raise ValueError(f"--mesh {mesh}: {name} is given twice")
            lengths[name] = int(length)
        return cls.of(lengths, layout)

    @classmethod
    def of(cls, mesh: Mapping[str, int] | None, layout: str | None) -> Axes:
        """As a script has them."""
        for name, length in (mesh or {}).items():
            if name not in AXES:
                raise ValueError(f"mesh: unknown axis {name!r}{nearest(name, AXES)}")
            if isinstance(length, bool) or not isinstance(length, int) or length < 1:
                raise ValueError(f"mesh: {name} is {length!r}; give a whole number from 1 up")
        if layout is not None and layout not in get_args(LayoutName):
            raise ValueError(f"layout {layout!r} is not known{nearest(layout, get_args(LayoutName))}")
        return cls(**(mesh or {}), layout=layout)  # type: ignore[arg-type]

    @property
    def lengths_asked(self) -> dict[str, int]:
        return {name: length for name in AXES if (length := getattr(self, name)) is not None}

    @property
    def is_asked(self) -> bool:
        return (self.data, self.tensor, self.layout) != (None, None, None) or self.has_stages

    @property
    def is_free(self) -> bool:
        """Whether stages are looked for as well: nothing is asked for, nor left out."""
        return self == Axes()

    @property
    def has_stages(self) -> bool:
        return self.pipeline is not None and self.pipeline > 1

    def stage_grid(self, rank_grid: tuple[int, int], batch_size: int) -> tuple[int, int]:
        """Of the ranks of one stage, which are neighbours: how many in a node, and how many nodes."""
        assert self.pipeline is not None
        (node, nodes), stages = rank_grid, self.pipeline
        ranks, tensor = node * nodes, self.stage_tensor(node * nodes)
        asked = ", ".join(f"{name}={length}" for name, length in self.lengths_asked.items())
        data = ranks // (stages * tensor)
        if data * stages * tensor != ranks or self.data not in (None, data) or not fits(node, ranks // stages, tensor):
            each = [(count, length) for count in _divisors(ranks) for length in _divisors(ranks // count)]
            fitting = [pair for pair in each if fits(node, ranks // pair[0], pair[1])]
            count, length = min(fitting, key=lambda pair: (abs(pair[0] - stages), abs(pair[1] - tensor)))
            axes = {"data": ranks // (count * length), "tensor": length, "pipeline": count}
            close = ",".join(f"{name}={axes[name]}" for name in AXES if name != "tensor" or tensor > 1)
            raise ValueError(f"mesh {asked}: {ranks} ranks are there; the nearest that fits is {close}")
        if batch_size % data:
            raise ValueError(
                f"mesh {asked}: batch_size is {batch_size}; it must be a multiple of the {data} ranks of the data axis, such as "
                f"{-(-batch_size // data) * data}"
            )
        return stage_grid(node, ranks // stages)

    def stage_tensor(self, ranks: int) -> int:
        """Length of the tensor axis beside stages: as asked for, or as a data axis leaves it; else 1."""
        if self.tensor is None and self.data is not None and ranks % (self.data * (self.pipeline or 1)) == 0:
            return ranks // (self.data * (self.pipeline or 1)) if self.layout is not None else 1
        return self.tensor or 1

    def in_stage(self, ranks: int) -> Axes:
        """Of the ranks of one stage."""
        free = self.tensor is None and self.data is None and self.layout is not None
        return Axes(tensor=None if free else self.stage_tensor(ranks), layout=self.layout)

    def lengths(self, rank_grid: tuple[int, int], batch_size: int) -> list[int]:
        """Of the tensor axis: those to consider, the shortest first. What cannot be is refused."""
        node, nodes = rank_grid
        ranks = node * nodes
        if self.data is not None or self.tensor is not None:
            return [self._asked_length(node, ranks, batch_size)]
        longest = [2**power for power in range(int(math.log2(node)) + 1)]
        inside = [each for each in longest if node % each == 0 and (each > 1 or self.layout is None)]
        if not inside:
            raise ValueError(f"layout {self.layout}: one rank has no others to cut blocks over; --gpus 2 has")
        fitting = [each for each in inside if batch_size % (ranks // each) == 0]
        if not fitting:
            share = ranks // inside[-1]
            most, least = (-(-batch_size // count) * count for count in (ranks, share))
            raise ValueError(
                f"batch_size is {batch_size}; it must be a multiple of the {ranks} ranks, such as {most}"
                + ("" if inside[-1] == 1 else f", or of {share} with a tensor axis of {inside[-1]}, such as {least}")
                + _shared_in_stages(ranks, batch_size)
            )
        return fitting

    def _asked_length(self, node: int, ranks: int, batch_size: int) -> int:
        tensor = self.tensor if self.tensor is not None else ranks // (self.data or 1)
        data = self.data if self.data is not None else ranks // tensor
        asked = ", ".join(f"{name}={each}" for name, each in (("data", self.data), ("tensor", self.tensor)) if each is not None)
        possible = [each for each in range(1, ranks + 1) if ranks % each == 0 and (node % each == 0 or each % node == 0)]
        if data * tensor != ranks or tensor not in possible:
            close = min(possible, key=lambda each: (abs(each - tensor), -each))
            what = "does not fit the nodes"
            if data * tensor != ranks:
                both = self.data is not None and self.tensor is not None
                what = f"makes {data * tensor} ranks, and {ranks} are there" if both else f"does not divide the {ranks} ranks"
            raise ValueError(f"mesh {asked}: it {what}; the nearest that fits is data={ranks // close},tensor={close}")
        if batch_size % data:
            least = -(-batch_size // data) * data
            raise ValueError(
                f"mesh {asked}: batch_size is {batch_size}; it must be a multiple of the {data} ranks of the data axis, "
                f"such as {least}"
            )
        if self.layout is not None and tensor == 1:
            raise ValueError(f"layout {self.layout}: blocks are cut over a tensor axis, and mesh {asked} leaves it 1")
        return tensor


def _shared_in_stages(ranks: int, batch_size: int) -> str:
    """What a pipeline would make of a batch that so many ranks cannot share."""
    stages = next((each for each in _divisors(ranks) if batch_size % (ranks // each) == 0), ranks)
    return f"; --mesh pipeline={stages} shares it" if stages < ranks else ""


def _divisors(count: int) -> list[int]:
    return [each for each in range(1, count + 1) if count % each == 0]


WHOLE_TABLES = ("data", "ulysses")  # layouts whose weights are whole
WITHOUT = Axes(tensor=1)  # no tensor axis


Kind = Literal["cpu", "cuda"]


class Looks:
    """At a job's blocks and calls, on a kind of device: each is made once, whatever the machine and the batch."""

    def __init__(self) -> None:
        self._cutters: dict[tuple[Kind, int], Cutter] = {}  # by samples of the calls that were captured
        self._calls: dict[tuple[Kind, int], Look] = {}  # by samples of the graph

    def cutter(self, job: Job, graph: Graph, machine: Machine, samples: int) -> Cutter:
        key = machine.device.kind, samples
        if key not in self._cutters:
            self._cutters[key] = cutter_of(job, graph, machine, samples)
        return replace(self._cutters[key], job=job, machine=machine)

    def calls(self, job: Job, graph: Graph, machine: Machine) -> Look:
        return self._calls.setdefault((machine.device.kind, graph.micro_batch), Look(job, graph))


class Meshes:
    """Those of a job on the ranks of a machine. `looks`: what other machines' have in common with them."""

    def __init__(
        self,
        job: Job,
        rank_grid: tuple[int, int],
        axes: Axes,
        batch_size: int | None = None,
        *,
        divides_words: bool = True,
        looks: Looks | None = None,
    ) -> None:
        self.job, self.rank_grid, self.axes, self.divides_words = job, rank_grid, axes, divides_words
        self.batch_size = batch_size or job.batch_size
        self.lengths = axes.lengths(rank_grid, self.batch_size)  # of the tensor axis
        self._unshared = ""  # why ranks cannot share the batch
        self._looks = Looks() if looks is None else looks
        self._cutters: dict[int, Cutter] = {}  # by samples of the calls that were captured

    @property
    def may_have_stages(self) -> bool:
        """That nobody has asked for."""
        return self.axes.is_free and math.prod(self.rank_grid) > 1

    @property
    def data_ranks(self) -> int:
        """The most along the data axis: each of so many traces its share of the batch."""
        return math.prod(self.rank_grid) // self.lengths[0]

    def changed_by(self, loss: LossRule) -> bool:
        """Where a loss does not allow that the batch is cut, all ranks hold the model together, or none can train it: then each
        sees more of the batch."""
        ranks = math.prod(self.rank_grid)
        if loss.may_be_cut or self.data_ranks == 1:
            return False
        self._unshared = f"{self.data_ranks} ranks cut the batch among them, and {loss.why}; {loss.ways_out}"
        if ranks not in self.lengths:
            raise ValueError(self._unshared)
        self.lengths = [ranks]
        return True

    def choices(self, graphs: Sequence[Graph], base: Profile, machine: Machine) -> list[MeshChoice]:
        """Those to search, the shortest tensor axis first. `base` is the profile of the graphs, as if no axis cut them."""
        found = [MeshChoice.of(base.ruled(base.loss))] if self.lengths[0] == 1 else []
        for length in self.lengths:
            if length > 1:
                cutter = self._cutter(graphs[0], machine, length)
                divides = self.divides_words and self.axes.layout not in WHOLE_TABLES
                tables = cutter.tables_over(length) if divides else ()
                found += [
                    _choice(graphs, base, machine, self.rank_grid, length, each, tables) for each in self._layouts(cutter, length)
                ]
        return found + self._staged(graphs, base, machine, found) if self.may_have_stages and base.loss.may_be_cut else found

    def _staged(self, graphs: Sequence[Graph], base: Profile, machine: Machine, others: Sequence[MeshChoice]) -> list[MeshChoice]:
        """Each of these with stages, where words are not divided over a tensor axis."""
        wholes = [
            _choice(graphs, base, machine, self.rank_grid, each.tensor, each.figures, ()) if each.tables else each
            for each in others
        ]
        return list(considered(wholes, self._looks.calls(self.job, graphs[0], machine), base, machine, self.rank_grid))

    def least(self, graphs: Sequence[Graph], base: Profile, machine: Machine) -> Profile:
        """Without a tensor axis, where that can be; else of the one with the least bound."""
        if self.lengths[0] == 1:
            return base.ruled(base.loss)
        return min(self.choices(graphs, base, machine), key=lambda each: each.bound).make()

    def _cutter(self, graph: Graph, machine: Machine, length: int) -> Cutter:
        samples = length if self.axes.layout == "data" else SAMPLES
        if samples not in self._cutters:
            self._cutters[samples] = self._looks.cutter(self.job, graph, machine, samples)
        return self._cutters[samples]

    def _layouts(self, cutter: Cutter, length: int) -> list[dict[str, CutFigures]]:
        """None where nothing is worth cutting so. The only length there is cuts at any price, or is refused with what works."""
        try:
            found = cutter.layouts(length, self.axes.layout)
            if not found and len(self.lengths) == 1:
                found = cutter.at_any_price(length)
            refusal = "" if found else _why_whole(cutter, length)
        except NoLayout as why:
            found, refusal = [], str(why)
        has_others = length != self.lengths[-1] or (self.lengths[0] == 1 and not self.axes.is_asked)
        if found or has_others:
            return found
        if self._unshared:
            raise ValueError(f"{self._unshared}; nor can they hold the model together: {refusal}")
        if not self.axes.is_asked:
            ranks = math.prod(self.rank_grid)
            most = -(-self.batch_size // ranks) * ranks
            raise ValueError(
                f"batch_size is {self.batch_size}; make it a multiple of the {ranks} ranks, such as {most}: {refusal}"
            )
        raise ValueError(f"{refusal}; {self._nearest(cutter, length)}")

    def _nearest(self, cutter: Cutter, length: int) -> str:
        """Another length with the same layout, or another layout of the same length."""
        node, layout = self.rank_grid[0], self.axes.layout
        others = [each for each in range(2, node + 1) if node % each == 0 and each != length]
        for other in sorted(others, key=lambda each: abs(each - length)):
            if _can(cutter, other, layout):
                return f"the nearest that works is tensor={other}" + (f" with layout {layout}" if layout else "")
        for name in get_args(LayoutName) if layout else ():
            if name not in (layout, "data") and _can(cutter, length, name):
                return f"the nearest that works is layout {name}"
        return "plan it without a tensor axis: tensor=1"


def _why_whole(cutter: Cutter, length: int) -> str:
    if cutter.whole:
        path, why = next(iter(cutter.whole.items()))
        return f"no block can be cut over {length}: {path} stays whole, as {why}"
    if not cutter.runs:
        return f"no block can be cut over {length}: the model has no chain of blocks that are built alike"
    return f"no block can be cut over {length}: none of its sizes divides"


def _can(cutter: Cutter, length: int, layout: LayoutName | None) -> bool:
    try:
        return bool(cutter.layouts(length, layout))
    except NoLayout:
        return False


LEAST_FOR_ENDS = 3  # micro-batches: of so few all are priced as soon


def _choice(
    graphs: Sequence[Graph],
    base: Profile,
    machine: Machine,
    rank_grid: tuple[int, int],
    length: int,
    figures: Mapping[str, CutFigures],
    tables: tuple[str, ...],
) -> MeshChoice:
    data = math.prod(rank_grid) // length
    seconds = tuple(least_seconds(each, length, figures, machine, tables) for each in base.passes)
    layout, cut = layout_said(figures), {path: each.cut for path, each in figures.items()}

    def profile_of(some: Sequence[Graph]) -> Profile:
        own = cost([on_axis(each, length, figures, tables) for each in some], machine, base.batch_size, rank_grid)
        kept = {name: getattr(base, name) for name in ("name", "clipped_steps", "kept")}
        return replace(
            own.corrected(base.correction).paced(base.pace).ruled(base.loss),
            cut=cut,
            layout=layout,
            tables=tables,
            **kept,
        )

    ends = functools.cache(lambda: profile_of([graphs[0], graphs[-1]])) if len(graphs) > LEAST_FOR_ENDS else None

    @functools.cache
    def make() -> Profile:
        return profile_of(graphs) if ends is None else ends().with_passes_of(profile_of(graphs[1:-1]))

    choice = MeshChoice(data, length, layout, len(figures), bound_of(base, data, seconds), make, tables, cut)
    return replace(choice, pass_seconds=seconds, figures=figures, make_ends=ends)


def layout_said(figures: Mapping[str, CutFigures]) -> str:
    """The name of all blocks' layout, or of each with how many have it."""
    names = Counter(each.layout for each in figures.values())
    if len(names) == 1:
        return next(iter(names))
    return ", ".join(f"{TITLES[name]} ({count})" for name, count in names.most_common())


def show_cut(job: Job, machine: Machine, tensor: int, layout: str | None, *, as_json: bool) -> None:
    """What one of so many ranks does of each distinct block, op by op."""
    from .probing.host import free_memory_bytes
    from .showing.printing import console, print_json
    from .showing.terminal import show_layouts
    from .tracing import trace

    named = Axes.of({}, layout).layout
    graph = trace(job, SAMPLES, machine.device.kind, free_memory_bytes())
    cutter = cutter_of(job, graph, machine, tensor if named == "data" else SAMPLES)
    try:
        rows = cutter.rows(tensor, named)
    except NoLayout as refusal:
        raise ValueError(f"{refusal}; try another --tensor or --layout") from None
    if as_json:
        blocks = {path: [each._asdict() for each in ops] for path, ops in rows}
        return print_json({"tensor": tensor, "blocks": blocks, "whole": dict(cutter.whole)})
    screen = console()
    for path, ops in rows:
        show_layouts(path, ops, tensor, screen)
    for path, why in cutter.whole.items():
        screen.print(f"{path} stays whole: {why}", markup=False, highlight=False)
    return None
