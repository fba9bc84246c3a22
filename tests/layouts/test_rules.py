"""Every rule holds on parts; one that does not is caught; and rules that nobody wrote are found."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, fx, nn

from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.check import discover, distinct, values_of, why_wrong
from anyfit.layouts.graph import is_random, name_of
from anyfit.layouts.parts import joined, part
from anyfit.layouts.rules.op import Op, Rule
from anyfit.layouts.rules.table import FAMILIES as KNOWN
from anyfit.layouts.rules.table import family_of, outers_of, rules_of
from anyfit.layouts.rules.views import through_view
from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .blocks import FAMILIES, LENGTH, NAMES, Called, called
from .test_capture import eager, given_to

FEW = ("gpt2, dropout", "llama, grouped heads", "t5, decoder", "plain mlp", "plain convolution")


@cache
def seen(family: str) -> tuple[Captured, Mapping[fx.Node, Any]]:
    call = called(family)
    captured = capture(call.block, call.args, call.kwargs)
    torch.manual_seed(3)
    for parameter in call.block.parameters():  # zeros and ones would hide mistakes
        parameter.data += torch.randn_like(parameter) / 10
    return captured, values_of(captured.module, [*given_to(captured, call), *eager(call)[1]])


FIRST = {("gpt2, dropout", 2), ("llama, grouped heads", 3), ("t5, decoder", 4), *(("plain convolution", n) for n in (2, 3, 4))}
ALL = [pytest.param(name, n, marks=() if (name, n) in FIRST else pytest.mark.full) for name in NAMES for n in (2, 3, 4)]


@pytest.mark.parametrize(("family", "n"), ALL)
def test_every_rule_of_a_block_holds_on_parts(family: str, n: int) -> None:
    captured, values = seen(family)
    outers = outers_of(captured.nodes, n)
    checked = 0
    for node in distinct(captured.nodes):
        for rule in rules_of(node, n, outers):
            assert why_wrong(node, rule, values, n) == "", (name_of(node), Op(node, n, outers).shapes, rule)
            checked += 1
    assert checked > 2 * len(distinct(captured.nodes))


class Rare(nn.Module):
    """Ops that no block of the families has."""

    def forward(self, x: Tensor, places: Tensor, few: Tensor) -> Tensor:
        x = x * 1.5
        found = [
            *(x.amax(-1, keepdim=True), x.amin(1, keepdim=True), x.max(1, keepdim=True)[0], x.argmax(1, keepdim=True)),
            *(x.cumsum(1), x.flip(1), x.flip(0, 2), x.roll(3, 1), x.sort(-1)[0], x.sort(1)[0], torch.triu(x), torch.tril(x)),
            *(x.gather(1, places), x.scatter(1, places, 3.0), x.scatter_add(1, places, x * 2), x.scatter_add(2, places, x)),
            *(x.index_select(2, few).repeat(1, 1, 2), x.index_add(2, few, x[..., :24]), x.index_select(1, few)),
            *(
                x.unbind(1)[3][:, None],
                torch.stack(x.unbind(0)),
                torch.cat(x.chunk(3, -1), -1),
                x[:, :, None, None].squeeze((2, 3)),
            ),
            *(x.sum(), x.mean(), x.mean(1, keepdim=True), x.log_softmax(-1), x.log_softmax(1)),
            *(torch.rand_like(x), torch.randn_like(x), x.topk(24, 1)[0], x.topk(24, 2)[0].repeat(1, 1, 2)),
        ]
        total: Tensor = sum(found, x)
        return total


@cache
def seen_rarely() -> tuple[Captured, Mapping[fx.Node, Any]]:
    drawn = torch.Generator().manual_seed(1)
    x = torch.randn(12, 24, 48, dtype=torch.float64, generator=drawn).requires_grad_()
    call = Called(Rare(), (x, torch.randint(24, (12, 24, 48), generator=drawn), torch.randperm(24, generator=drawn)), {})
    captured = capture(*call)
    return captured, values_of(captured.module, [*given_to(captured, call), *eager(call)[1]])


@pytest.mark.parametrize("n", [2, 3, 4])
def test_every_rule_of_rare_ops_holds_on_parts(n: int) -> None:
    captured, values = seen_rarely()
    outers = outers_of(captured.nodes, n)
    for node in distinct(captured.nodes):
        for rule in rules_of(node, n, outers):
            assert why_wrong(node, rule, values, n) == "", (name_of(node), Op(node, n, outers).shapes, rule)


ELSEWHERE = (
    "_scaled_dot_product",
    "_fused_rms_norm",
    "_grouped_mm",
    "native_dropout",
    "nll_loss",
)  # test_kernels, test_vocabulary


@pytest.mark.full
def test_every_op_that_has_rules_is_run_on_parts() -> None:
    blocks = [seen_rarely()[0], *(seen(family)[0] for family in NAMES)]
    found = {name_of(node).removeprefix("aten.") for captured in blocks for node in captured.nodes if is_op(node)}
    assert {name for name in KNOWN if not name.startswith(ELSEWHERE)} - found == set()


# Ops that no family knows, and why that is fine.
WHOLE_ONLY = {
    "aten.arange.default": "a few numbers that every rank counts for itself",
    "aten.arange.start": "the same",
    "aten.scalar_tensor.default": "one number",
    "aten.histc.default": "one number an expert: how many tokens each has",
}


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in NAMES])
def test_every_op_of_a_block_has_a_family(family: str) -> None:
    captured, _ = seen(family)
    assert {name_of(node) for node in captured.nodes if is_op(node) and family_of(node) is None} <= set(WHOLE_ONLY)
    outers = outers_of(captured.nodes, 2)
    large = [node for node in captured.nodes if is_op(node) and family_of(node) is not None and size_of(node) > LENGTH**2]
    assert [name_of(node) for node in large if len(rules_of(node, 2, outers)) == 1] == []


def test_every_op_of_experts_by_grouped_products_has_a_family(monkeypatch: pytest.MonkeyPatch) -> None:
    options = FAMILIES["qwen3 moe"].options | {"experts_implementation": "grouped_mm"}
    monkeypatch.setitem(FAMILIES, "qwen3 moe", FAMILIES["qwen3 moe"]._replace(options=options))
    captured = capture(*called("qwen3 moe", torch.bfloat16))
    names = {name_of(node) for node in captured.nodes if is_op(node)}
    assert "aten._grouped_mm.default" in names
    assert {name_of(node) for node in captured.nodes if is_op(node) and family_of(node) is None} <= set(WHOLE_ONLY)


def is_op(node: fx.Node) -> bool:
    return node.op == "call_function" and name_of(node) != "getitem"


def size_of(node: fx.Node) -> int:
    return max((math.prod(shape) for shape in Op(node, 1, {}).results if shape is not None), default=0)


def mutants(op: Op, rule: Rule) -> Iterator[Rule]:
    """The same rule with one result held otherwise, or one tensor read otherwise."""
    for at, (held, shape) in enumerate(zip(rule.gives, op.results, strict=True)):
        if shape is not None and math.prod(shape):
            for other in _others(held, shape, op.n):
                yield rule._replace(gives=(*rule.gives[:at], other, *rule.gives[at + 1 :]))
    for at, (held, shape) in enumerate(zip(rule.reads, op.shapes, strict=True)):
        if (op.name, at) == ("native_layer_norm_backward.default", 5):  # a bias, whose values it does not read
            continue
        for other in _others(held, shape, op.n):
            yield rule._replace(reads=(*rule.reads[:at], other, *rule.reads[at + 1 :]))


def _others(held: Held, shape: tuple[int, ...], n: int) -> list[Held]:
    options: list[Held] = [WHOLE, SUM, *(Cut(dim) for dim in range(len(shape)) if Cut(dim).divides(shape, n))]
    return [each for each in options if each != held]


def tried(captured: Captured, values: Mapping[fx.Node, Any], n: int) -> tuple[int, list[tuple[str, str]]]:
    """How many mutants are caught; and those that are not, with their op."""
    caught, missed = 0, []
    outers = outers_of(captured.nodes, n)
    for node in distinct(captured.nodes):
        if is_random(node):  # which reads no values
            continue
        op, rules = Op(node, n, outers), rules_of(node, n, outers)
        known = {(rule.reads, rule.gives) for rule in rules}
        for rule in rules:
            for mutant in mutants(op, rule):
                if (mutant.reads, mutant.gives) in known or not op.allows(mutant):
                    continue
                if why_wrong(node, mutant, values, n):
                    caught += 1
                else:
                    missed.append((op.name, f"{op.shapes} {op.results} {rule} as {mutant}"))
    return caught, missed


def test_a_mutated_rule_is_caught() -> None:
    caught, missed = 0, []
    for family in ("plain mlp", "plain convolution"):
        found = tried(*seen(family), 2)
        caught, missed = caught + found[0], missed + found[1]
    assert caught > 400
    assert missed == []


# Of rare ops, those whose mutants are right for what they read here: zeros, or one number everywhere.
ALIKE = {"stack.default", "scatter.src", "expand.default", "mean.default", "mean.dim", "index_add.default"}
ALIKE |= {"div.Scalar", "div.Tensor"}


@pytest.mark.full
def test_a_mutated_rule_of_a_rare_op_is_caught() -> None:
    caught, missed = tried(*seen_rarely(), 2)
    assert caught > 5000
    assert [each for each in missed if each[0] not in ALIKE] == []


@pytest.mark.parametrize("wrong", [Rule((Cut(0), WHOLE), (Cut(1),)), Rule((Cut(1), Cut(0)), (Cut(0),)), Rule((SUM, SUM), (SUM,))])
def test_a_wrong_rule_of_a_product_is_caught(wrong: Rule) -> None:
    captured, values = seen("plain mlp")
    node = next(node for node in captured.nodes if name_of(node) == "aten.mm.default")
    assert why_wrong(node, wrong, values, 2) != ""


class Written(nn.Module):
    """Values that are longer than the places they are written to, of which only the beginning is."""

    def forward(self, x: Tensor, places: Tensor, values: Tensor) -> Tensor:
        return x.scatter(1, places, values) + x.argmax()


def test_what_is_written_is_not_cut_with_places_that_are_fewer() -> None:
    x, places, values = torch.randn(4, 6), torch.randint(6, (4, 2)), torch.randn(8, 4)
    captured = capture(Written(), (x, places, values))
    found = values_of(captured.module, [x, places, values])
    for node in filter(is_op, captured.nodes):
        for rule in rules_of(node, 2, {}):
            assert why_wrong(node, rule, found, 2) == "", (name_of(node), rule)


# ---------------------------------------------------------------------- inner factors


@given(st.data())
def test_a_cut_is_where_a_view_says_it_is(data: st.DataObject) -> None:
    factors = data.draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=5))
    a, b = (_grouped(factors, data) for _ in range(2))
    n = data.draw(st.sampled_from([2, 3, 4]))
    x = torch.arange(math.prod(factors)).reshape(a)
    for dim, outer in itertools.product(range(len(a)), (1, 2, 3, 4)):
        cut = Cut(dim, outer)
        if cut.divides(a, n) and (found := through_view(a, b, cut, n)) is not None:
            parts = [part(x, cut, n, rank).reshape(found.part(b, n)) for rank in range(n)]
            assert torch.equal(joined(parts, found), x.reshape(b))


def _grouped(factors: list[int], data: st.DataObject) -> tuple[int, ...]:
    """A shape of neighbouring factors, some multiplied."""
    ends = sorted(data.draw(st.sets(st.integers(1, len(factors) - 1)))) if len(factors) > 1 else []
    return tuple(math.prod(factors[start:end]) for start, end in itertools.pairwise([0, *ends, len(factors)]))


def test_packed_projections_and_flattened_rows_are_cuts_of_an_inner_factor() -> None:
    captured, _ = seen("gpt2, dropout")
    outers = outers_of(captured.nodes, 2)
    packed = next(node for node in captured.nodes if name_of(node) == "aten.addmm.default" and Op(node, 2, {}).result[1] == 144)
    found = rules_of(packed, 2, outers)
    assert Rule((Cut(0, 3), WHOLE, Cut(1, 3)), (Cut(1, 3),)) in found  # q|k|v, each cut by columns
    assert Rule((WHOLE, Cut(0, 12), WHOLE), (Cut(0, 12),)) in found  # the sequence, within each of 12 rows of the batch


# ---------------------------------------------------------------------- rules that nobody wrote


@pytest.mark.parametrize("op", ["mm.default", "native_layer_norm.default", "relu.default", "sum.dim_IntList"])
def test_discovery_finds_the_rules_that_were_written(op: str) -> None:
    captured, values = seen("plain mlp")
    node = next(node for node in captured.nodes if name_of(node) == f"aten.{op}")
    written = {(rule.reads, rule.gives) for rule in rules_of(node, 2, {})[1:]}
    found = {(rule.reads, rule.gives) for rule in discover(node, values, 2)}
    assert written <= found


class Distances(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.ops.aten._cdist_forward(x, y, 2.0, None)  # type: ignore[no-any-return]


def test_discovery_finds_the_rules_of_an_op_that_nobody_knows() -> None:
    x, y = torch.randn(4, 8, 6), torch.randn(4, 12, 6)
    captured = capture(Distances(), (x, y))
    node = next(node for node in captured.nodes if node.op == "call_function")
    assert family_of(node) is None
    assert len(rules_of(node, 2, {})) == 1
    found = {(rule.reads, rule.gives) for rule in discover(node, values_of(captured.module, [x, y]), 2)}
    assert found == {
        ((Cut(0), Cut(0)), (Cut(0),)),
        ((Cut(1), WHOLE), (Cut(1),)),
        ((WHOLE, Cut(1)), (Cut(2),)),
    }


def test_every_family_is_named_by_an_op_that_torch_has() -> None:
    for name in KNOWN:
        packet, _, overload = name.partition(".")
        assert hasattr(getattr(torch.ops.aten, packet), overload), name
