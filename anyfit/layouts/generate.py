"""Generated code: the forward and the backward of a block as one rank makes them, local ops and explicit exchanges.

The code is plain Python, a line an op, with all sizes baked in; names go as soon as nothing reads them any more. It is given

    read(i)     the i-th parameter or buffer, as this rank has it: asked for at its first use in each pass and never kept, so that
                weights may come and go in between
    given       the tensors among the arguments
    saved       what forward left for backward, kept moves included
    tangents    the gradients of the outputs

Views of weights are made anew in backward. What the layout keeps of a moved tensor is saved as it was moved; all else is saved
as it was made, and moved again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx

from anyfit.values.block_layouts import BlockLayout
from anyfit.values.cuts import Held, move

from .axis import Axis
from .graph import is_forward, is_view, name_of, reads_of, tensors_of
from .parts import expression, names_in_code
from .problem import Posed


@dataclass(frozen=True)
class Code:
    source: str
    forward: Callable[[Callable[[int], Tensor], Sequence[Tensor]], tuple[list[Tensor], list[Tensor]]]
    backward: Callable[[Callable[[int], Tensor], Sequence[Tensor], Sequence[Tensor]], list[Tensor | None]]


class Line(NamedTuple):
    name: str
    code: str
    uses: tuple[str, ...]


class Key(NamedTuple):
    """A tensor, held in one way."""

    tensor: int
    held: Held


def generate(posed: Posed, layout: BlockLayout, axis: Axis) -> Code:
    writing = _Writing(posed, layout, axis.n)
    source = writing.source()
    names = {**names_in_code(), **writing.constants, "axis": axis, "rank": axis.rank}
    exec(compile(source, "<generated block>", "exec"), names)
    return Code(source, names["forward"], names["backward"])


class _Writing:
    def __init__(self, posed: Posed, layout: BlockLayout, n: int) -> None:
        self.posed, self.layout, self.n = posed, layout, n
        self.captured = posed.captured
        self.constants: dict[str, Any] = {}
        problem = posed.problem
        self.held: dict[int, Held] = {}
        for step, way in zip(problem.steps, layout.ways[: len(problem.steps)], strict=True):
            self.held.update(zip(step.gives, step.ways[way].gives, strict=True))
        self.kept = {(each.tensor, each.wanted) for each in layout.moves if each.is_kept}
        self.sources = self._sources()

    def _sources(self) -> dict[int, str]:
        """How the tensors that enter are read, by number; they are the same in both passes but for tangents and arguments."""
        captured, number = self.captured, self.posed.number
        found = {number(node): f"read({at})" for at, node in enumerate([*captured.parameter_nodes, *captured.buffer_nodes])}
        found |= {number(node): f"given[{at}]" for at, node in enumerate(captured.argument_nodes)}
        found |= {number(node): f"tangents[{at}]" for at, node in enumerate(captured.tangent_nodes)}
        for node in captured.nodes:
            if node.op == "get_attr":
                name = f"own_{len(self.constants)}"
                self.constants[name] = getattr(captured.module, str(node.target))
                found[number(node)] = name
        return found

    def source(self) -> str:
        forward, backward = _Pass(self, None), _Pass(self, {})
        for node in self.captured.nodes:
            if node.op == "call_function" and name_of(node) != "getitem" and not is_forward(node):
                backward.op(node)
        gradients = [backward.end(end) if end is not None else "None" for end in self._gradient_ends()]
        wanted = list(backward.saved or {})
        for node in self.captured.nodes:
            if node.op == "call_function" and name_of(node) != "getitem" and is_forward(node):
                forward.op(node)
        outputs = [forward.end(end, is_output=True) for end in self.posed.ends.values()]
        saved = [forward.needs(*key) for key in wanted]
        return "\n".join(
            [
                "def forward(read, given):",
                *forward.written([*outputs, *saved]),
                f"    return [{', '.join(outputs)}], [{', '.join(saved)}]",
                "",
                "",
                "def backward(read, saved, tangents):",
                *(f"    {_named(*key)} = saved[{at}]" for at, key in enumerate(wanted)),
                *backward.written(gradients),
                f"    return [{', '.join(gradients)}]",
                "",
            ]
        )

    def _gradient_ends(self) -> list[int | None]:
        return [self.posed.gradient_ends.get(node) for node, _ in self.captured.gradients]


class _Pass:
    """The lines of one pass. Backward has a list of what it needs of forward; forward has none."""

    def __init__(self, writing: _Writing, saved: dict[Key, None] | None) -> None:
        self.writing, self.saved = writing, saved
        self.lines: list[Line] = []
        self._there: set[Key] = set()
        self._made: set[fx.Node] = set()

    def op(self, node: fx.Node) -> None:
        posed = self.writing.posed
        self._made.add(node)
        rule = posed.rules[node][self.writing.layout.ways[posed.steps[node]]]
        reads = [self.needs(posed.number(each), held) for each, held in zip(reads_of(node), rule.reads, strict=True)]
        code = expression(node, rule, reads, self.writing.n, self.writing.constants)
        results = [
            (at, Key(posed.numbers[node, at], rule.gives[at])) for at, value in enumerate(tensors_of(node)) if value is not None
        ]
        if len(tensors_of(node)) == 1:
            self._line(results[0][1], code, reads)
            return
        whole = f"r{posed.steps[node]}"
        self.lines.append(Line(whole, code, tuple(reads)))
        for at, key in results:
            self._line(key, f"{whole}[{at}]", [whole])

    def end(self, step: int, *, is_output: bool = False) -> str:
        """The tensor that leaves by this step, as it leaves."""
        problem, layout = self.writing.posed.problem, self.writing.layout
        tensor, wanted = problem.steps[step].reads[0], problem.steps[step].ways[layout.ways[step]].reads[0]
        name = self.needs(tensor, wanted)
        if is_output and self._is_given(tensor):  # autograd does not want what it gave
            self.lines.append(Line(f"{name}_out", f"{name}.clone()", (name,)))
            return f"{name}_out"
        return name

    def _is_given(self, tensor: int) -> bool:
        node = next(node for (node, _), number in self.writing.posed.numbers.items() if number == tensor)
        while is_view(node):
            node = node.all_input_nodes[0]
        return node.op != "call_function"

    def needs(self, tensor: int, wanted: Held) -> str:
        """The name of a tensor held as wanted, with the lines that bring it there."""
        key, held = Key(tensor, wanted), self.writing.held[tensor]
        if key in self._there:
            return _named(*key)
        if self.saved is not None and self._is_of_forward(tensor):
            if held == wanted or (tensor, wanted) in self.writing.kept:
                self.saved[key] = None
                self._there.add(key)
                return _named(*key)
        elif held == wanted:
            self._source(key)
            return _named(*key)
        have = self.needs(tensor, held)
        kind = move(held, wanted)
        arguments = {"slice": [wanted], "mask": [], "all_reduce": [], "all_gather": [held], "reduce_scatter": [wanted]}
        given = arguments.get(str(kind), [held, wanted])
        self._line(key, f"axis.{kind}({', '.join([have, *map(repr, given)])})", [have])
        return _named(*key)

    def _source(self, key: Key) -> None:
        """A tensor that enters, or a view of a weight that backward makes anew."""
        if key.tensor in self.writing.sources:
            self._line(key, self.writing.sources[key.tensor], [])
            return
        node = next(node for (node, _), number in self.writing.posed.numbers.items() if number == key.tensor)
        assert node not in self._made, f"{node} is read before it is made"
        self.op(node)

    def _is_of_forward(self, tensor: int) -> bool:
        """Whether it has to be saved: made by forward from more than weights, or an argument."""
        posed = self.writing.posed
        carried = posed.problem.tensors[tensor]
        source = self.writing.sources.get(tensor, "")
        if source:
            return source.startswith("given")
        return not carried.is_backward and not carried.stays

    def _line(self, key: Key, code: str, uses: Sequence[str]) -> None:
        self._there.add(key)
        self.lines.append(Line(_named(*key), code, tuple(uses)))

    def written(self, leave: Sequence[str]) -> list[str]:
        """With each name forgotten after its last use."""
        last: dict[str, int] = {}
        for at, line in enumerate(self.lines):
            last.update(dict.fromkeys((line.name, *line.uses), at))
        over: dict[int, list[str]] = {}
        for name, at in last.items():
            if name not in leave:
                over.setdefault(at, []).append(name)
        found: list[str] = []
        for at, line in enumerate(self.lines):
            found.append(f"    {line.name} = {line.code}")
            if at in over:
                found.append(f"    del {', '.join(over[at])}")
        return found


def _named(tensor: int, held: Held) -> str:
    """
    >>> from anyfit.values.cuts import Cut
    >>> _named(7, "whole"), _named(7, Cut(1, 3))
    ('t7_whole', 't7_cut1_3')
    """
    return f"t{tensor}_{held if isinstance(held, str) else f'cut{held.dim}_{held.outer}'}"
