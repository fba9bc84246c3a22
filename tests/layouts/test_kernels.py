"""The rules of CUDA's kernels hold, by stand-ins that compute what the kernels do; their shapes, by the kernels' own fakes.

On a GPU `benchmarks/layout_rules.py` runs the kernels themselves.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anyfit.layouts import check
from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import capture
from anyfit.layouts.check import why_wrong
from anyfit.layouts.generate import generate
from anyfit.layouts.graph import is_random
from anyfit.layouts.parts import aligned, as_held, expression, names_in_code
from anyfit.layouts.problem import pose
from anyfit.layouts.rules.attention import why_whole
from anyfit.layouts.rules.op import Op, Rule
from anyfit.layouts.rules.table import rules_of
from anyfit.planning.layouts import Ask, solve
from anyfit.values.cuts import SUM, WHOLE, Cut

from .test_known import OPS, link
from .test_rules import mutants

aten = torch.ops.aten
ROWS, HEADS, KEYS, WIDTH = 12, 12, 8, 4
RANKS = (2, 3, 4)
KERNELS = ("flash", "efficient", "cudnn")


# ---------------------------------------------------------------------- what the kernels compute


def attended(query: Tensor, key: Tensor, value: Tensor, bias: Tensor | None, is_causal: bool) -> tuple[Tensor, Tensor]:
    repeats = query.shape[1] // key.shape[1]
    key, value = (each.repeat_interleave(repeats, 1) for each in (key, value))
    scores = query @ key.transpose(-2, -1) / math.sqrt(query.shape[-1])
    if bias is not None:
        scores = scores + bias
    if is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1) @ value, scores.logsumexp(-1)


def forward_of(kernel: str) -> Callable[..., Any]:
    def run(query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> Any:
        bias, is_causal = (None, rest[1]) if kernel == "flash" else (rest[0], rest[3])
        output, logs = attended(query, key, value, bias, is_causal)
        state = torch.randint(100, ()), torch.randint(100, ())  # of no meaning
        if kernel == "flash":
            return output, logs, None, None, query.shape[2], key.shape[2], *state, query.new_empty(0)
        if kernel == "efficient":
            return output, torch.nn.functional.pad(logs, (0, -logs.shape[2] % 32), value=math.inf), *state
        return output, logs[..., None], None, None, query.shape[2], key.shape[2], *state, None

    return run


def backward_of(kernel: str) -> Callable[..., Any]:
    names = [each.name for each in getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default._schema.arguments]

    def run(*args: Any) -> Any:
        given = dict(zip(names, args, strict=False))
        query, logs, bias = given["query"], given["logsumexp"], given.get("attn_bias")
        assert logs.shape[2] == -(-query.shape[2] // 32) * 32 if kernel == "efficient" else query.shape[2]
        assert given.get("max_q", query.shape[2]) == query.shape[2]
        assert given["out"].shape == query.shape
        leaves = [query, given["key"], given["value"], *([] if bias is None else [bias])]
        with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in leaves]
            output, _ = attended(*leaves[:3], leaves[3] if bias is not None else None, given["is_causal"])
            found = torch.autograd.grad(output, leaves, given[names[0]])
        return (*found[:3], found[3] if bias is not None else None) if kernel == "efficient" else found[:3]

    return run


class Standing:
    """The ops of aten, with stand-ins for those that no CPU has."""

    def __init__(self) -> None:
        for kernel in KERNELS:
            for name, run in (("", forward_of(kernel)), ("_backward", backward_of(kernel))):
                setattr(self, f"_scaled_dot_product_{kernel}_attention{name}", SimpleNamespace(default=run))

    def __getattr__(self, name: str) -> Any:
        return getattr(aten, name)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "names_in_code", lambda: names_in_code() | {"aten": Standing()})


# ---------------------------------------------------------------------- calls of them


def call_of(target: Any, *args: Any) -> tuple[fx.Node, Mapping[fx.Node, Any]]:
    """One call in a graph of its own, with what the op's own fake gives for it, and the values that it reads."""
    graph, mode = fx.Graph(), FakeTensorMode()
    values: dict[fx.Node, Any] = {}

    def placed(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        node = graph.placeholder(f"x{len(values)}")
        values[node], node.meta["val"] = value, mode.from_tensor(value)
        return node

    node = graph.call_function(target, tuple(map(placed, args)))
    with mode:
        node.meta["val"] = target(*fx.map_arg(node.args, lambda each: each.meta["val"]))
    return node, values


def attention_calls(kernel: str, n: int, *, is_causal: bool, biased: bool, key_heads: int = HEADS) -> list[Any]:
    """Forward and backward."""
    drawn = torch.Generator().manual_seed(0)
    queries = 32 * n if kernel == "efficient" else 24
    keys = queries if is_causal else KEYS
    query, gradient = (torch.randn(ROWS, HEADS, queries, WIDTH, generator=drawn, dtype=torch.float64) for _ in range(2))
    key, value = (torch.randn(ROWS, key_heads, keys, WIDTH, generator=drawn, dtype=torch.float64) for _ in range(2))
    bias = torch.randn(ROWS, HEADS, queries, keys, generator=drawn, dtype=torch.float64) if biased else None
    forward = getattr(aten, f"_scaled_dot_product_{kernel}_attention").default
    backward = getattr(aten, f"_scaled_dot_product_{kernel}_attention_backward").default
    extra = () if kernel == "flash" else (bias, True)
    found = call_of(forward, query, key, value, *extra, 0.0, is_causal)
    output, logs, *_ = forward_of(kernel)(query, key, value, *extra, 0.0, is_causal)
    state = torch.zeros((), dtype=torch.long), torch.zeros((), dtype=torch.long)
    by_name = {
        "grad_out": gradient, "grad_out_": gradient, "query": query, "key": key, "value": value, "out": output, "logsumexp": logs,
        "cum_seq_q": None, "cum_seq_k": None, "max_q": queries, "max_k": keys, "dropout_p": 0.0, "is_causal": is_causal,
        "philox_seed": state[0], "philox_offset": state[1], "attn_bias": bias, "grad_input_mask": [True, True, True, biased],
    }  # fmt: skip
    return [found, call_of(backward, *(by_name[each.name] for each in backward._schema.arguments if not each.kwarg_only))]


def fake_shapes(node: fx.Node, rule: Rule, n: int, values: Mapping[fx.Node, Any]) -> list[tuple[int, ...] | None]:
    """Of what the kernel itself gives on a part, by its fake."""
    constants: dict[str, Any] = {}
    reads = [as_held(values[each], held, n, 0) for each, held in zip(values, rule.reads, strict=True)]
    code = expression(node, rule, [f"reads[{at}]" for at in range(len(reads))], n, constants)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = [mode.from_tensor(each) for each in reads]
        result = eval(code, {**names_in_code(), **constants, "reads": fakes, "rank": 0})
    several = [result] if isinstance(result, Tensor) else result
    return [tuple(each.shape) if isinstance(each, Tensor) else None for each in several]


CASES = [
    pytest.param(kernel, n, is_causal, biased, id=f"{kernel} {n} {'causal' if is_causal else ''} {'biased' if biased else ''}")
    for kernel in KERNELS
    for n in RANKS
    for is_causal, biased in ((True, False), (False, False), (False, True))
    if not (biased and kernel == "flash")
]


@pytest.mark.parametrize(("kernel", "n", "is_causal", "biased"), CASES)
def test_attention_is_cut_by_rows_heads_and_queries_where_no_mask_is_implied(
    kernel: str, n: int, is_causal: bool, biased: bool
) -> None:
    for node, values in attention_calls(kernel, n, is_causal=is_causal, biased=biased):
        rules = rules_of(node, n, {})
        assert len(rules) == (3 if is_causal else 4)
        for rule in rules:
            assert why_wrong(node, rule, values, n) == "", rule
            given = zip(rule.gives, Op(node, n, {}).results, strict=True)
            parts = [held.part(whole, n) if isinstance(held, Cut) and whole else whole for held, whole in given]
            assert fake_shapes(node, rule, n, values) == parts


def test_grouped_heads_are_cut_where_the_keys_divide() -> None:
    for node, _ in attention_calls("flash", 2, is_causal=True, biased=False, key_heads=6):
        assert [len(rules_of(node, n, {})) for n in (2, 3, 4)] == [3, 3, 2]  # whole, rows, and heads


def unseen(op: Op, rule: Rule, mutant: Rule) -> bool:
    """Changes of what stand-ins do not read, of a generator's state, and of a gradient that the op is linear in."""
    read = ("query", "key", "value", "attn_bias", "grad_out", "grad_out_")
    counted = [at for name in read for at in op._read_by.get(name, [])]
    changed = [at for at, held in enumerate(mutant.reads) if held != rule.reads[at]]
    otherwise = [at for at, held in enumerate(mutant.gives) if held != rule.gives[at]]
    is_backward = "_backward" in op.name
    if is_backward and changed == [0] and mutant.reads[0] == SUM:
        return True
    return any(at not in counted for at in changed) or (not is_backward and any(at > 1 for at in otherwise))


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_mutated_rule_of_a_kernel_is_caught(kernel: str) -> None:
    caught = 0
    for node, values in attention_calls(kernel, 2, is_causal=False, biased=kernel != "flash"):
        op, rules = Op(node, 2, {}), rules_of(node, 2, {})
        known = {(rule.reads, rule.gives) for rule in rules}
        for rule in rules:
            for mutant in mutants(op, rule):
                if (mutant.reads, mutant.gives) in known or not op.allows(mutant) or unseen(op, rule, mutant):
                    continue
                assert why_wrong(node, mutant, values, 2) != "", (rule, mutant)
                caught += 1
    assert caught > 40


def test_attention_that_drops_is_not_cut_and_its_backward_draws_nothing() -> None:
    query = torch.randn(4, 4, 64, 8)
    forward, _ = call_of(aten._scaled_dot_product_efficient_attention.default, query, query, query, None, True, 0.1, False)
    assert len(rules_of(forward, 2, {})) == 1
    assert is_random(forward)
    state = torch.zeros((), dtype=torch.long)
    backward, _ = call_of(
        aten._scaled_dot_product_efficient_attention_backward.default, query, query, query, query, None, query,
        torch.randn(4, 4, 64), state, state, 0.1, [True, True, True, False], False,
    )  # fmt: skip
    assert len(rules_of(backward, 2, {})) == 1
    assert not is_random(backward)


def test_heads_that_run_out_are_named_with_the_axis_that_fits() -> None:
    def of(rows: int, heads: int, key_heads: int, dropout: float = 0.0, *, is_causal: bool = True) -> list[fx.Node]:
        query, key = torch.randn(rows, heads, 64, 8), torch.randn(rows, key_heads, 64, 8)
        return [call_of(aten._scaled_dot_product_flash_attention.default, query, key, key, dropout, is_causal)[0]]

    assert why_whole(of(1, 8, 8), 4) == ""
    assert why_whole(of(4, 6, 6), 4) == ""
    assert why_whole(of(1, 6, 6, is_causal=False), 4) == ""  # by queries
    assert why_whole(of(1, 6, 6), 4) == (
        "4 ranks divide neither the 6 heads nor the 1 rows of attention over 64 tokens, so a cut sequence would be gathered "
        "whole on each; a tensor axis of 2 or 3 divides its heads"
    )
    assert "8 heads on 2 of keys" in why_whole(of(1, 8, 2), 4)
    assert "a tensor axis of 2 divides" in why_whole(of(1, 8, 2), 4)
    assert "no smaller tensor axis does" in why_whole(of(1, 1, 1), 4)
    assert "drops 10% of itself" in why_whole(of(4, 8, 8, 0.1), 4)


def test_queries_are_not_cut_where_the_efficient_kernel_would_pad_their_logsumexp() -> None:
    query = torch.randn(4, 4, 96, 8)
    node, _ = call_of(aten._scaled_dot_product_efficient_attention.default, query, query, query, None, True, 0.0, False)
    assert [rule.gives[0] for rule in rules_of(node, 2, {})] == [WHOLE, Cut(0), Cut(1)]  # 48 is no multiple of 32
    assert [rule.gives[0] for rule in rules_of(node, 3, {})] == [WHOLE, Cut(2)]


def test_a_bias_that_lost_its_padding_on_the_way_is_padded_again() -> None:
    bias = torch.randn(2, 3, 5, 7)
    assert aligned(bias).stride()[-2] == 16
    assert torch.equal(aligned(bias), bias)
    assert aligned(aligned(bias)).data_ptr() != bias.data_ptr()
    broadcast = torch.randn(2, 1, 1, 7).expand(2, 3, 5, 7)
    assert aligned(broadcast) is broadcast


class ByKernel(nn.Module):
    """Attention and dropout as CUDA has them."""

    def __init__(self, kernel: str) -> None:
        super().__init__()
        self.norm, self.packed, self.out, self.kernel = nn.LayerNorm(64), nn.Linear(64, 192), nn.Linear(64, 64), kernel

    def forward(self, x: Tensor) -> Tensor:
        pieces = (each.unflatten(2, (4, 16)).transpose(1, 2) for each in self.packed(self.norm(x)).split(64, -1))
        attend = getattr(aten, f"_scaled_dot_product_{self.kernel}_attention")
        attended = attend(*pieces, *(() if self.kernel == "flash" else (None, True)), 0.0, True)[0]
        dropped: Tensor = aten.native_dropout(self.out(attended.transpose(1, 2).flatten(2)), 0.1, True)[0]
        return x + dropped


@pytest.mark.parametrize("kernel", KERNELS)
def test_a_block_by_a_kernel_is_captured_cut_and_written(kernel: str) -> None:
    posed = pose(capture(ByKernel(kernel), (torch.randn(2, 96, 64, requires_grad=True),)), 2, OPS, link(2))
    source = generate(posed, solve(posed.problem, Ask(price=1e-6)), Axis(2, 0)).source
    calls = [line for line in source.splitlines() if "_scaled_dot_product" in line]
    assert len(calls) == 2
    assert all("_cut1_1" in line for line in calls)  # by heads
    assert "dropped(" in source


# ---------------------------------------------------------------------- dropout and grouped products


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("lies", ["contiguous", "transposed"])
def test_dropout_draws_for_the_whole_tensor_as_it_lies_and_takes_its_part(n: int, lies: str) -> None:
    x = torch.randn(12, 24, dtype=torch.float64)
    x = x if lies == "contiguous" else x.t()
    node, values = call_of(aten.native_dropout.default, x, 0.4, True)
    rules = rules_of(node, n, {})
    assert [rule.form for rule in rules] == ["plain", "drawn", "drawn"]
    for rule in rules:
        assert why_wrong(node, rule, values, n) == "", rule
    plain = [rule._replace(form="plain") for rule in rules[1:]]
    assert all(why_wrong(node, rule, values, n) for rule in plain)


def grouped_calls() -> Iterator[Any]:
    offsets = torch.tensor([5, 5, 17, 48], dtype=torch.int32)
    rows, weights = torch.randn(48, 96).bfloat16(), torch.randn(4, 96, 192).bfloat16()
    yield call_of(aten._grouped_mm.default, rows, weights, offsets)
    yield call_of(aten._grouped_mm.default, rows.t().contiguous(), torch.randn(48, 192).bfloat16(), offsets)  # to the weights
    yield call_of(aten._grouped_mm.default, weights.transpose(1, 2).contiguous(), rows.t().contiguous(), offsets)
    yield call_of(aten._grouped_mm.default, torch.randn(12, 24, 96).bfloat16(), torch.randn(12, 96, 48).bfloat16(), None)


@pytest.mark.parametrize("n", RANKS)
def test_grouped_products_are_cut_by_what_is_not_in_groups(n: int) -> None:
    counts = []
    for node, values in grouped_calls():
        rules = rules_of(node, n, {})
        counts.append(len(rules))
        for rule in rules:
            assert why_wrong(node, rule, values, n) == "", rule
    assert counts == [5, 5, 5, {2: 6, 3: 7, 4: 5}[n]]


def test_what_a_grouped_product_reads_transposed_stays_so_when_it_is_cut() -> None:
    """Groups of a size that is no multiple of 16 bytes end a GPU's process where they lie along the innermost dimension."""
    rows = torch.randn(48, 96).bfloat16()
    offsets = torch.tensor([10, 20, 31, 48], dtype=torch.int32)
    node, _ = call_of(aten._grouped_mm.default, rows.t(), torch.randn(48, 192).bfloat16(), offsets)
    for rule in rules_of(node, 2, {}):
        code = expression(node, rule, ["a", "b", "ends"], 2, {})
        cut = as_held(rows.t(), rule.reads[0], 2, 1)  # contiguous, as all that was sliced
        read = eval(code.partition("(")[2].partition(", ")[0], {"a": cut})
        assert read.stride(-2) == 1, code
        assert torch.equal(read, cut)


def test_a_mutated_rule_of_a_grouped_product_is_caught() -> None:
    caught = 0
    for node, values in grouped_calls():
        op, rules = Op(node, 2, {}), rules_of(node, 2, {})
        known = {(rule.reads, rule.gives) for rule in rules}
        for rule in rules:
            for mutant in mutants(op, rule):
                if (mutant.reads, mutant.gives) not in known and op.allows(mutant):
                    assert why_wrong(node, mutant, values, 2) != "", (rule, mutant)
                    caught += 1
    assert caught > 50
