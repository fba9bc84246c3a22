"""From a solved layout to figures: which share of a block's work, of what it keeps and of its parameters a rank has."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Literal

from torch import fx

from anyfit.values.block_layouts import BlockLayout, BlockProblem
from anyfit.values.cut_figures import CutFigures, Moving, OpRow, PassShares, layout_of
from anyfit.values.cuts import FREE, Cut, Held, move, share
from anyfit.values.plan import BlockCut

from .graph import is_forward, is_view, name_of, reads_of, tensors_of, value_of
from .problem import Posed, flops


def figures_of(posed: Posed, problem: BlockProblem, layout: BlockLayout, samples: int) -> CutFigures:
    """Of a call with so many samples. `problem` is the posed one, or that with more steps at its end."""
    cut = _cut(posed, problem, layout)
    entry, leaves = (0.0 if each < 0 else problem.tensors[each].bytes / samples for each in (problem.entry, problem.exit))
    return CutFigures(
        layout=layout_of(cut, layout.counts),
        cut=cut,
        kept_share=_kept_share(posed, problem, layout),
        forward=_shares(posed, problem, layout, samples, is_backward=False),
        backward=_shares(posed, problem, layout, samples, is_backward=True),
        entry_bytes=entry,
        exit_bytes=leaves,
    )


def _cut(posed: Posed, problem: BlockProblem, layout: BlockLayout) -> BlockCut:
    captured = posed.captured
    named = zip(captured.parameters, captured.parameter_nodes, strict=True)
    held = {name: layout.held(problem, posed.number(node)) for name, node in named}
    borders = [layout.held(problem, each) for each in (problem.entry, problem.exit)]
    entry, leaves = (each if isinstance(each, Cut) else None for each in borders)
    return BlockCut({name: each for name, each in held.items() if isinstance(each, Cut)}, entry, leaves)


def _kept_share(posed: Posed, problem: BlockProblem, layout: BlockLayout) -> float:
    """Of what forward leaves for backward, weights apart."""
    weights = {posed.number(node) for node in posed.captured.parameter_nodes}
    whole = sum(each.kept_bytes for at, each in enumerate(problem.tensors) if at not in weights)
    state = sum(problem.kept(at, layout.held(problem, at)) for at in weights)
    return (layout.kept_bytes - state) / whole if whole else 1.0


def _shares(posed: Posed, problem: BlockProblem, layout: BlockLayout, samples: int, *, is_backward: bool) -> PassShares:
    n = problem.n
    work: dict[str, list[float]] = defaultdict(lambda: [0.0] * 4)  # by kind: FLOPs of all and of a rank, bytes likewise
    given = given_here = 0.0
    for node, rules in posed.rules.items():
        if is_view(node) or is_forward(node) == is_backward:
            continue
        rule = rules[layout.ways[posed.steps[node]]]
        is_parted = rule.form == "plain" and any(isinstance(held, Cut) for held in (*rule.reads, *rule.gives))
        sums, whole = work[kind_of(node)], flops(node)
        sums[0] += whole
        sums[1] += whole / (n if is_parted else 1)
        for value, held in _touched(node, rule.reads, rule.gives):
            sums[2] += value
            sums[3] += value / share(held, n)
        for each, held in zip(tensors_of(node), rule.gives, strict=True):
            given += 0 if each is None else each.nbytes
            given_here += 0 if each is None else each.nbytes / share(held, n)
    moves = (
        Moving(kind, problem.tensors[each.tensor].bytes / samples)
        for each in layout.moves
        if each.in_backward == is_backward and (kind := move(each.held, each.wanted)) is not None
    )
    return PassShares(
        {kind: sums[1] / sums[0] for kind, sums in work.items() if sums[0]},
        {kind: sums[3] / sums[2] for kind, sums in work.items() if sums[2]},
        given_here / given if given else 1.0,
        tuple(moves),
    )


def op_rows(posed: Posed, problem: BlockProblem, layout: BlockLayout) -> Iterator[OpRow]:
    """Op by op, without views for which nothing is exchanged; an exchange stands with the first op of a pass that needs it."""
    unpaid = {(each.tensor, each.held, each.wanted, each.in_backward) for each in layout.moves}
    for node, rules in posed.rules.items():
        rule, is_backward = rules[layout.ways[posed.steps[node]]], not is_forward(node)
        exchanges = []
        for number, wanted in zip(problem.steps[posed.steps[node]].reads, rule.reads, strict=True):
            held = layout.held(problem, number)
            kind, key = move(held, wanted) if held != wanted else None, (number, held, wanted, is_backward)
            if kind is not None and kind not in FREE and key in unpaid:
                unpaid.remove(key)
                exchanges.append(f"{kind} of {problem.tensors[number].name}")
        if is_view(node) and not exchanges:
            continue
        name = name_of(node).removeprefix("aten.").removesuffix(".default")
        phase: Literal["forward", "backward"] = "backward" if is_backward else "forward"
        yield OpRow(name, phase, tuple(exchanges), tuple(map(str, rule.reads)), tuple(map(str, rule.gives)))
    for step, way in zip(problem.steps, layout.ways, strict=True):
        if step.gives or step.name == "border":
            continue
        wanted = step.ways[way].reads[0]
        held = layout.held(problem, step.reads[0])
        kind = move(held, wanted) if (step.reads[0], held, wanted, step.is_backward) in unpaid else None
        exchanges = [f"{kind} of {problem.tensors[step.reads[0]].name}"] if kind is not None and kind not in FREE else []
        yield OpRow(step.name, "backward" if step.is_backward else "forward", tuple(exchanges), (str(wanted),), ())


def _touched(node: fx.Node, reads: tuple[Held, ...], gives: tuple[Held, ...]) -> list[tuple[float, Held]]:
    """Bytes of all that it reads and gives, and how a rank holds each."""
    found: list[tuple[float, Held]] = [
        (float(value_of(each).nbytes), held) for each, held in zip(reads_of(node), reads, strict=True)
    ]
    return found + [(float(each.nbytes), held) for each, held in zip(tensors_of(node), gives, strict=True) if each is not None]


def kind_of(node: fx.Node) -> str:
    """As a trace has it (graph.OpKind)."""
    name = name_of(node).removeprefix("aten.")
    if name.startswith("_scaled_dot_product"):
        return "attention"
    if name.startswith("convolution"):
        return "convolution"
    return "matmul" if flops(node) else "memory"
