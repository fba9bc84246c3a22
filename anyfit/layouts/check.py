"""The checker: a rule holds if the op, run on parts, gives the parts of what it gives on the whole.

Every op of a captured block is run on the block's own values (so that indices are valid, and statistics fit their input), once
whole and once for each of n ranks on what the rule says a rank reads; joined as the rule says, the results must be equal.
Summands are drawn at random. The same code runs in generated blocks (`parts.expression`).

`discover` goes the other way: of an op that no family knows, it tries every way to cut each tensor, and looks at what comes out.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .forms import FORMS
from .graph import is_random, name_of, reads_of
from .meeting import met
from .parts import as_held, expression, joined, names_in_code
from .rules.op import Op, Rule

TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 5e-2}
MOST_TRIED = 2000  # ways to cut the tensors of an unknown op
SEED = 7
LARGE = 1e30  # numbers that stand for infinity, which no sum of others makes


class Values(fx.Interpreter):
    """What every op of a graph read and gave, on given tensors."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.found: dict[fx.Node, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.found[n] = super().run_node(n)
        return self.found[n]


def values_of(module: fx.GraphModule, given: Sequence[Tensor]) -> Mapping[fx.Node, Any]:
    watched = Values(module)
    with torch.no_grad():
        watched.run(*given)
    return watched.found


def distinct(nodes: Iterable[fx.Node]) -> list[fx.Node]:
    """One op of each distinct call."""
    found: dict[str, fx.Node] = {}
    for node in nodes:
        if node.op == "call_function" and name_of(node) != "getitem":
            op = Op(node, 1, {})
            plain = [repr(each) for each in (*node.args, *node.kwargs.values()) if not isinstance(each, fx.Node)]
            found.setdefault(f"{op.name} {op.shapes} {op.results} {plain if len(op.shapes) < 2 else ''}", node)
    return list(found.values())


def why_wrong(node: fx.Node, rule: Rule, values: Mapping[fx.Node, Any], n: int) -> str:
    """What is wrong with a rule of this call; nothing where it holds."""
    reads = [values[each] for each in reads_of(node)]
    whole = _several(_run(node, _whole_rule(node), [(x,) for x in reads], 1)[0])
    try:
        parts = [
            _several(each) for each in _run(node, rule, [_held(x, held, n) for x, held in zip(reads, rule.reads, strict=True)], n)
        ]
    except Exception as error:
        return f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
    for at, (wanted, held) in enumerate(zip(whole, rule.gives, strict=True)):
        if isinstance(wanted, Tensor) and wanted.numel() and not _is_state(node, wanted):
            trouble = _compared([each[at] for each in parts], held, wanted, _tolerance([*reads, *whole]))
            if trouble:
                return f"result {at}: {trouble}"
    return ""


def _is_state(node: fx.Node, result: Tensor) -> bool:
    """The generator's state that a kernel of attention gives: of no meaning where it drew nothing."""
    return "attention" in name_of(node) and not result.is_floating_point()


def _tolerance(tensors: Sequence[Any]) -> float:
    """Of the coarsest numbers in it."""
    return max((TOLERANCE.get(each.dtype, 0.0) for each in tensors if isinstance(each, Tensor)), default=0.0)


def _compared(parts: Sequence[Tensor], held: Held, wanted: Tensor, tolerance: float) -> str:
    if held == WHOLE:
        made = list(parts)
    elif held == SUM:
        made = [torch.stack(list(parts)).sum(0)]
    else:
        shape = tuple(held.part(tuple(wanted.shape), len(parts)))
        other = next((tuple(each.shape) for each in parts if tuple(each.shape) != shape), None)
        if other is not None:
            return f"{other} instead of {shape}"
        made = [joined(parts, held)]
    for each in made:
        if each.shape != wanted.shape:
            return f"{tuple(each.shape)} instead of {tuple(wanted.shape)}"
        if not _is_close(each, wanted, tolerance, [wanted, *parts]):
            return "other values"
    return ""


def _is_close(x: Tensor, wanted: Tensor, tolerance: float, made: Sequence[Tensor]) -> bool:
    """By the size of all that was rounded on the way: summands may be larger than what they add up to."""
    if not wanted.is_floating_point():
        return torch.equal(x.to(wanted.dtype), wanted)
    sizes = [float(each.abs().nan_to_num(0.0, 0.0).max()) for each in made if each.numel()]
    return torch.allclose(x, wanted, rtol=tolerance, atol=tolerance * max(1.0, *sizes), equal_nan=True)


def _held(x: Tensor, held: Held, n: int) -> tuple[Tensor, ...]:
    """What each rank has of it."""
    if held != SUM:
        return tuple(as_held(x, held, n, rank) for rank in range(n))
    drawn = []
    for rank in range(n - 1):  # of the size of the elements, so that nothing cancels, and of both signs
        generator = torch.Generator(x.device).manual_seed(rank)
        share = torch.randn(x.shape, dtype=torch.float64, device=x.device, generator=generator)
        drawn.append(torch.where(x.abs() < LARGE, x, 0) * share.to(x))
    return (*drawn, x - sum(drawn))


def _run(node: fx.Node, rule: Rule, held: Sequence[Sequence[Tensor]], n: int) -> list[Any]:
    """The results of each rank."""
    constants: dict[str, Any] = {}
    code = expression(node, rule, [f"reads[{at}]" for at in range(len(held))], n, constants)
    run = eval(f"lambda axis, rank, reads: {code}", {**names_in_code(), **constants})
    if rule.form in FORMS:
        return met(n, lambda seat: run(seat, seat.rank, [each[seat.rank] for each in held]))
    results = []
    for rank in range(n):
        torch.manual_seed(SEED)  # ranks share a generator
        with torch.no_grad():
            results.append(run(None, rank, [each[rank] for each in held]))
    return results


def _whole_rule(node: fx.Node) -> Rule:
    return Rule((WHOLE,) * len(reads_of(node)), ())


def _several(result: Any) -> list[Any]:
    return [result] if isinstance(result, Tensor) else list(result)


# ---------------------------------------------------------------------- rules that nobody wrote


def discover(node: fx.Node, values: Mapping[fx.Node, Any], n: int) -> list[Rule]:
    """The ways in which this call can be cut with its arguments as they are, found by trying.

    What holds for these values holds by accident where they are special, so draw them at random; and it is known of these shapes
    alone. Random ops are not tried.
    """
    op = Op(node, n, {})
    if is_random(node) or name_of(node) == "getitem":
        return []
    reads = [values[each] for each in reads_of(node)]
    whole = _several(_run(node, _whole_rule(node), [(x,) for x in reads], 1)[0])
    found: list[Rule] = []
    for needs in itertools.islice(_ways(op), MOST_TRIED):
        try:
            held = [_held(x, each, n) for x, each in zip(reads, needs, strict=True)]
            parts = [_several(each) for each in _run(node, Rule(needs, ()), held, n)]
        except Exception:
            continue
        tolerance = _tolerance([*reads, *whole])
        gives = [_found([each[at] for each in parts], wanted, n, tolerance) for at, wanted in enumerate(whole)]
        if None not in gives:
            found.append(Rule(needs, tuple(each for each in gives if each is not None)))
    return found


def _ways(op: Op) -> Iterator[tuple[Held, ...]]:
    """Cuts of some tensors, or one or more of them as sums, the others whole; the simplest first."""
    cuts: list[list[Held]] = [[WHOLE, *op.cuts(shape)] for shape in op.shapes]
    sums: list[list[Held]] = [[WHOLE, SUM] if is_float else [WHOLE] for is_float in op.floats]
    ways = [way for options in (cuts, sums) for way in itertools.product(*options) if any(held != WHOLE for held in way)]
    yield from sorted(ways, key=lambda way: sum(held != WHOLE for held in way))


def _found(parts: Sequence[Tensor], wanted: Any, n: int, tolerance: float) -> Held | None:
    """How the result is held, if in any way; the whole of nothing is whole."""
    if not isinstance(wanted, Tensor):
        return WHOLE
    options: list[Held] = [Cut(dim) for dim in range(wanted.dim()) if Cut(dim).divides(wanted.shape, n)]
    if wanted.is_floating_point():
        options.append(SUM)
    for held in [WHOLE, *options] if wanted.numel() else [WHOLE]:
        try:
            if not _compared(parts, held, wanted, tolerance):
                return held
        except RuntimeError:
            continue
    return None
