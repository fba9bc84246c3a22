"""From a captured block to the problem that planning solves: its steps, their ways and what each takes, its tensors.

What enters and leaves is tied: an output leaves as its tangent comes, for autograd wants a gradient of its tensor's shape, and so
does a gradient as the tensor it is of. The gradient of a whole parameter may be left as summands: reducing them is the engine's
work, beside backward, and only `exposed` of it is paid here. Only the first argument of floats, and the first output, may be cut
at the border, along any dimension but the last; all others come and leave whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from torch import Tensor, fx

from anyfit.values.block_layouts import BlockProblem, Carried, LayoutRates, Step, Way
from anyfit.values.cuts import SUM, WHOLE, Cut, Held, share

from .capture import Captured
from .graph import is_forward, is_view, name_of, reads_of, tensors_of, value_of
from .rules.op import Op, Outers, Rule
from .rules.table import outers_of, rules_of


@dataclass(frozen=True)
class OpRates:
    """What one device does in a second, and what the state of a parameter takes."""

    flops_per_second: float
    bytes_per_second: float
    state_bytes_per_weight_byte: float = 8.0  # bf16 weights with fp32 masters and AdamW: 16 bytes of 2
    exposed: float = 0.3  # of a gradient's reduction that backward does not hide


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
        self.step_of[node] = len(self.steps)
        self.steps.append(Step(node.name, (), (number,), tuple(Way((), (held,)) for held in comes)))

    def _op(self, node: fx.Node, outers: Outers) -> None:
        rules = self.rules[node] = rules_of(node, self.n, outers)
        gives = []
        for at, value in enumerate(tensors_of(node)):
            if value is not None:
                kept = value.nbytes if _is_kept(node, at) else 0
                gives.append(self._carried(node, at, value, kept=kept, stays=self._is_of_weight(node)))
        there = [at for at, value in enumerate(tensors_of(node)) if value is not None]
        ways = tuple(
            Way(rule.reads, tuple(rule.gives[at] for at in there), op_seconds(node, rule, self.n, self.ops)) for rule in rules
        )
        reads = tuple(self.numbers[source_of(each)] for each in reads_of(node))
        self.step_of[node] = len(self.steps)
        self.steps.append(Step(node.name, reads, tuple(gives), ways, is_backward=not is_forward(node)))

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
            found[at] = len(self.steps)
            number = self.numbers[source_of(output)]
            if at in self.captured.with_tangents:
                tangent = next(tangents)
                ways = [Way((held, held), ()) for held in self._held(tangent)]
                reads = (number, self.numbers[tangent, 0])
                self.steps.append(Step(f"output {at}", reads, (), tuple(ways), frozenset({1})))
            else:
                self.steps.append(Step(f"output {at}", (number,), (), (Way((WHOLE,), ()),)))
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
            found[node] = len(self.steps)
            reads = (self.numbers[source_of(gradient)], self.numbers[node, 0])
            self.steps.append(Step(f"gradient of {node.name}", reads, (), tuple(ways), frozenset({1}), is_backward=True))
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
    if name.startswith("_scaled_dot_product"):
        is_backward = "_backward" in name
        query, key = shapes[1:3] if is_backward else shapes[:2]
        return (10.0 if is_backward else 4.0) * math.prod(query) * key[2]
    if name == "convolution.default":
        return 2.0 * float(value_of(node).numel()) * math.prod(shapes[1][1:])
    if name == "convolution_backward.default":
        return 4.0 * math.prod(shapes[0]) * math.prod(shapes[2][1:])
    return 0.0
