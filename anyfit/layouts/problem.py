"""From a captured block to the problem that planning solves: its steps, their ways and what each takes, its tensors.

What enters and leaves is tied: an output leaves as its tangent comes, for autograd wants a gradient of its tensor's shape, and so
does a gradient as the tensor it is of. The gradient of a whole parameter may be left as summands: reducing them is the engine's
work, beside backward, and only `exposed` of it is paid here. Only the first argument of floats, and the first output, may be cut
at the border, along any dimension but the last; all others come and leave whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from anyfit.values.block_layouts import BlockLayout, BlockProblem, Carried, LayoutRates, Step, Way
from anyfit.values.block_layouts import OpRates as OpRates
from anyfit.values.cuts import SUM, WHOLE, Cut, Held, share

from .capture import Captured
from .graph import is_forward, is_view, name_of, reads_of, tensors_of, value_of
from .rules.op import Op, Outers, Rule
from .rules.table import outers_of, rules_of


@dataclass(frozen=True, eq=False)
class Posed:
    """A problem, and what of the graph each of its numbers stands for."""

    captured: Captured
    problem: BlockProblem
    numbers: dict[tuple[fx.Node, int], int]  # tensors: result k of a node
    rules: dict[fx.Node, list[Rule]]  # of each op, by way
    steps: dict[fx.Node, int]  # of each source and op
    ends: dict[int, int]  # by output, the step that it leaves by
    gradient_ends: dict[fx.Node, int]  # by placeholder, the step that its gradient leaves by

    def number(self, node: fx.Node) -> int:
        return self.numbers[source_of(node)]


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The op that made a tensor, and which of its results it is."""
    if name_of(node) != "getitem":
        return node, 0
    made_by, at = node.args
    assert isinstance(made_by, fx.Node)
    assert isinstance(at, int)
    return made_by, at


def pose(captured: Captured, n: int, ops: OpRates, rates: LayoutRates) -> Posed:
    return _Posing(captured, n, ops, rates).posed()


def kept(
    captured: Captured, before: Posed, layout: BlockLayout, ops: OpRates, rates: LayoutRates
) -> tuple[Posed, BlockLayout] | None:
    """The same ways and moves for a graph of the same form, such as that of another length; None where it does not allow them.
    What is posed has no other ways, and the layout's seconds and bytes are those of before."""
    if captured.form != before.captured.form:
        return None
    only = [step.ways[way] for step, way in zip(before.problem.steps, layout.ways, strict=False)]
    try:
        posed = _Posing(captured, before.problem.n, ops, rates, only=only).posed()
    except _Gone:
        return None
    ways = (min(range(len(step.ways)), key=lambda at: step.ways[at].seconds) for step in posed.problem.steps)
    return posed, replace(layout, ways=tuple(ways))


class _Gone(Exception):  # noqa: N818 -- says what is so
    """A step cannot be made in any of the ways that were left to it."""


@dataclass
class _Posing:
    captured: Captured
    n: int
    ops: OpRates
    rates: LayoutRates
    tensors: list[Carried] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    numbers: dict[tuple[fx.Node, int], int] = field(default_factory=dict)
    rules: dict[fx.Node, list[Rule]] = field(default_factory=dict)
    step_of: dict[fx.Node, int] = field(default_factory=dict)
    only: Sequence[Way] | None = None  # by step: none but what reads and gives as this one

    def posed(self) -> Posed:
        captured = self.captured
        outers = outers_of(captured.nodes, self.n)
        self._weights = set(captured.parameter_nodes)
        entry = next((node for node in captured.argument_nodes if value_of(node).is_floating_point()), None)
        leaving = captured.tangent_nodes[0] if captured.tangent_nodes else None
        for node in captured.nodes:
            if node.op in ("placeholder", "get_attr"):
                kept = value_of(node).nbytes if node is entry and _is_read_by_backward(node) else 0
                self._source(node, list(self._comes(node, outers, is_border=node in (entry, leaving))), kept)
            elif node.op == "call_function" and name_of(node) != "getitem":
                self._op(node, outers)
        ends, gradient_ends = self._outputs(), self._gradients()
        numbered = [-1 if node is None else self.numbers[node, 0] for node in (entry, leaving)]
        problem = BlockProblem(self.n, tuple(self.tensors), tuple(self.steps), self.rates, *numbered)
        return Posed(captured, problem, self.numbers, self.rules, self.step_of, ends, gradient_ends)

    def _step(
        self,
        name: str,
        reads: tuple[int, ...],
        gives: tuple[int, ...],
        ways: Sequence[Way],
        unmoved: frozenset[int] = frozenset(),
        *,
        is_backward: bool = False,
    ) -> int:
        at = len(self.steps)
        if self.only is not None:
            ways = [way for way in ways if way[:2] == self.only[at][:2]]
            if not ways:
                raise _Gone
        self.steps.append(Step(name, reads, gives, tuple(ways), unmoved, is_backward))
        return at

    # ------------------------------------------------------------------ sources and ops

    def _comes(self, node: fx.Node, outers: Outers, *, is_border: bool) -> Iterator[Held]:
        yield WHOLE
        value = value_of(node)
        if node in self._weights:
            yield from Op(node, self.n, outers).cuts(tuple(value.shape))
        elif is_border:
            yield from Op(node, self.n, {}).cuts(tuple(value.shape), range(value.dim() - 1))

    def _source(self, node: fx.Node, comes: Sequence[Held], kept: float) -> None:
        is_weight = node in self._weights
        if is_weight:
            kept = self.ops.state_bytes_per_weight_byte * value_of(node).nbytes
        number = self._carried(node, 0, value_of(node), kept=kept, stays=is_weight)
        self.step_of[node] = self._step(node.name, (), (number,), [Way((), (held,)) for held in comes])

    def _op(self, node: fx.Node, outers: Outers) -> None:
        there = [at for at, value in enumerate(tensors_of(node)) if value is not None]
        mine = None if self.only is None else self.only[len(self.steps)]

        def is_mine(rule: Rule) -> bool:
            assert mine is not None
            return rule.reads == mine.reads and tuple(rule.gives[at] for at in there) == mine.gives

        rules = self.rules[node] = rules_of(node, self.n, outers, None if mine is None else is_mine)
        gives = []
        for at, value in enumerate(tensors_of(node)):
            if value is not None:
                kept = value.nbytes if _is_kept(node, at) else 0
                gives.append(self._carried(node, at, value, kept=kept, stays=self._is_of_weight(node)))
        ways = [self._way(node, rule, there) for rule in rules]
        reads = tuple(self.numbers[source_of(each)] for each in reads_of(node))
        self.step_of[node] = self._step(node.name, reads, tuple(gives), ways, is_backward=not is_forward(node))

    def _way(self, node: fx.Node, rule: Rule, there: Sequence[int]) -> Way:
        seconds = op_seconds(node, rule, self.n, self.ops)
        seconds += sum(self.rates.seconds(kind, size, self.n) for kind, size in rule.exchanges)
        return Way(rule.reads, tuple(rule.gives[at] for at in there), seconds, tuple(kind for kind, _ in rule.exchanges))

    def _is_of_weight(self, node: fx.Node) -> bool:
        """A view of a weight is still the weight."""
        while is_view(node):
            node = node.all_input_nodes[0]
        return node in self._weights

    def _carried(self, node: fx.Node, at: int, value: Tensor, *, kept: float, stays: bool) -> int:
        self.numbers[node, at] = len(self.tensors)
        self.tensors.append(Carried(node.name, value.nbytes, kept, stays, is_backward=not is_forward(node)))
        return self.numbers[node, at]

    # ------------------------------------------------------------------ ends

    def _outputs(self) -> dict[int, int]:
        tangents = iter(self.captured.tangent_nodes)
        found: dict[int, int] = {}
        for at, output in enumerate(self.captured.outputs):
            if not isinstance(output, fx.Node):
                continue
            number = self.numbers[source_of(output)]
            if at in self.captured.with_tangents:
                tangent = next(tangents)
                ways = [Way((held, held), ()) for held in self._held(tangent)]
                found[at] = self._step(f"output {at}", (number, self.numbers[tangent, 0]), (), ways, frozenset({1}))
            else:
                found[at] = self._step(f"output {at}", (number,), (), [Way((WHOLE,), ())])
        return found

    def _held(self, node: fx.Node) -> list[Held]:
        return [way.gives[0] for way in self.steps[self.step_of[node]].ways]

    def _gradients(self) -> dict[fx.Node, int]:
        found: dict[fx.Node, int] = {}
        for node, gradient in self.captured.gradients:
            if not isinstance(gradient, fx.Node):
                continue
            ways = [Way((held, held), ()) for held in self._held(node)]
            if node in self._weights:
                reduced = self.rates.seconds("all_reduce", value_of(gradient).nbytes, self.n)
                ways.append(Way((SUM, WHOLE), (), self.ops.exposed * reduced))
            reads = (self.numbers[source_of(gradient)], self.numbers[node, 0])
            found[node] = self._step(f"gradient of {node.name}", reads, (), ways, frozenset({1}), is_backward=True)
        return found


def _is_kept(node: fx.Node, at: int) -> bool:
    """Whether backward reads this result of an op of forward, itself or a view of it."""
    if not is_forward(node) or is_view(node):
        return False
    taken = [user for user in node.users if name_of(user) == "getitem"]
    return any(_is_read_by_backward(each) for each in (taken or [node]) if not taken or each.args[1] == at)


def _is_read_by_backward(node: fx.Node) -> bool:
    return any(
        not is_forward(user) or (is_view(user) and _is_read_by_backward(user)) for user in node.users if user.op != "output"
    )


# ---------------------------------------------------------------------- seconds


def op_seconds(node: fx.Node, rule: Rule, n: int, ops: OpRates) -> float:
    """Of one rank: what it computes or what it moves through memory, whichever takes longer."""
    if is_view(node):
        return 0.0
    parts = n if rule.form == "plain" and any(isinstance(held, Cut) for held in (*rule.reads, *rule.gives)) else 1
    moved = [(value_of(each), held) for each, held in zip(reads_of(node), rule.reads, strict=True)]
    moved += [(value, held) for value, held in zip(tensors_of(node), rule.gives, strict=True) if value is not None]
    size = sum(float(value.nbytes) / share(held, n) for value, held in moved)
    return max(flops(node) / parts / ops.flops_per_second, size / ops.bytes_per_second)


def flops(node: fx.Node) -> float:
    """Of the ops that do nearly all of them."""
    name = name_of(node).removeprefix("aten.")
    shapes: list[tuple[int, ...]] = [tuple(value_of(each).shape) for each in reads_of(node)]
    if name in ("mm.default", "addmm.default", "bmm.default"):
        left, right = shapes[-2:]
        return 2.0 * math.prod(left) * right[-1]
    if name == "_grouped_mm.default":  # each row, column or inner place in one group
        left, right = shapes[:2]
        return 2.0 * math.prod(left[-2:]) * right[-1] * (left[0] if len(left) == len(right) == 3 else 1)
    if name.startswith("_scaled_dot_product"):
        is_backward = "_backward" in name
        query, key = shapes[1:3] if is_backward else shapes[:2]
        return (10.0 if is_backward else 4.0) * math.prod(query) * key[2]
    if name == "convolution.default":
        return 2.0 * float(value_of(node).numel()) * math.prod(shapes[1][1:])
    if name == "convolution_backward.default":
        return 4.0 * math.prod(shapes[0]) * math.prod(shapes[2][1:])
    return 0.0
