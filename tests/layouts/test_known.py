"""The layouts that people found by hand come out where they are best, by counts of what is exchanged."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anyfit.layouts.capture import capture
from anyfit.layouts.problem import OpRates, Posed, pose
from anyfit.planning.layouts import Ask, solve
from anyfit.values.block_layouts import BlockLayout, LayoutRates
from anyfit.values.cuts import WHOLE, Cut, Held
from anyfit.values.profile import Exchange

from .blocks import NAMES, called

GIB = 2.0**30
OPS = OpRates(flops_per_second=400e12, bytes_per_second=2.5e12)


def link(n: int, latency: float = 10e-6, bytes_per_second: float = 150e9) -> LayoutRates:
    """A ring of n ranks."""
    per_byte = (n - 1) / n / bytes_per_second
    exchanges = {
        "all_gather": Exchange(latency, per_byte),
        "reduce_scatter": Exchange(latency, per_byte),
        "all_reduce": Exchange(latency, 2 * per_byte),
        "all_to_all": Exchange(latency, per_byte / n),
    }
    return LayoutRates(exchanges, 1 / OPS.bytes_per_second)  # type: ignore[arg-type]


def llama(rows: int, length: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers.models.llama.modeling_llama import LlamaDecoderLayer

    config = transformers.LlamaConfig(hidden_size=4096, intermediate_size=11008, num_attention_heads=32, num_key_value_heads=32)
    config._attn_implementation = "sdpa"
    turns = torch.empty(1, length, 128), torch.empty(1, length, 128)
    return LlamaDecoderLayer(config, 0), (torch.empty(rows, length, 4096, requires_grad=True),), {"position_embeddings": turns}


def gpt2(rows: int, length: int) -> tuple[nn.Module, tuple[Any, ...], dict[str, Any]]:
    from transformers.models.gpt2.modeling_gpt2 import GPT2Block

    config = transformers.GPT2Config(n_embd=4096, n_head=32, n_positions=length, resid_pdrop=0.0, attn_pdrop=0.0)
    config._attn_implementation = "sdpa"
    return GPT2Block(config, 0), (torch.empty(rows, length, 4096, requires_grad=True),), {}


def posed(make: Callable[[int, int], Any], rows: int, length: int, **rates: float) -> Posed:
    """Of weights and inputs that take no memory."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            block, args, kwargs = make(rows, length)
    finally:
        torch.set_default_dtype(before)
    return pose(capture(block, args, kwargs), 4, OPS, link(4, **rates))


def solved(question: Posed, limit: float | None = None) -> tuple[BlockLayout, Held, dict[str, Held]]:
    """The layout of a repeated block, its border and its parameters."""
    problem = question.problem.repeated()
    layout = solve(problem, Ask(limit_bytes=limit))
    names = dict(zip(question.captured.parameters, question.captured.parameter_nodes, strict=True))
    weights = {name: layout.held(problem, question.number(node)) for name, node in names.items()}
    return layout, layout.held(problem, problem.entry), weights


def test_a_batch_that_divides_is_data_parallel() -> None:
    layout, border, weights = solved(posed(llama, 8, 2048))
    assert border == Cut(0)
    assert set(weights.values()) == {WHOLE}
    assert layout.counts == {}


def test_one_long_sequence_exchanges_heads_as_ulysses_does() -> None:
    layout, border, weights = solved(posed(llama, 1, 65536))
    assert border == Cut(1)
    assert set(weights.values()) == {WHOLE}
    assert layout.counts == {"forward all_to_all": 4, "backward all_to_all": 4}


def test_little_memory_gives_megatron_with_sequence_parallelism() -> None:
    layout, border, weights = solved(posed(llama, 2, 2048), limit=GIB)
    assert border == Cut(1)
    columns = {
        name: held for name, held in weights.items() if name.endswith(("q_proj.weight", "up_proj.weight", "gate_proj.weight"))
    }
    rows = {name: held for name, held in weights.items() if name.endswith(("o_proj.weight", "down_proj.weight"))}
    assert set(columns.values()) == {Cut(0)}
    assert set(rows.values()) == {Cut(1)}
    assert layout.counts["forward all_gather"] == layout.counts["forward reduce_scatter"] == 2
    assert layout.counts["backward reduce_scatter"] == 2
    assert layout.kept_bytes <= GIB


def test_a_length_that_does_not_divide_gives_megatron() -> None:
    layout, border, weights = solved(posed(gpt2, 2, 2049, latency=1e-4), limit=1.2 * GIB)
    assert border == WHOLE
    assert weights["attn.c_attn.weight"] == Cut(1, outer=3)  # each of q|k|v by columns
    assert weights["mlp.c_fc.weight"] == Cut(1)
    assert weights["attn.c_proj.weight"] == weights["mlp.c_proj.weight"] == Cut(0)
    assert layout.counts == {"forward all_reduce": 2, "backward all_reduce": 2}


def test_what_enters_whole_and_leaves_whole_is_free_on_one_rank_of_work() -> None:
    """Links so slow that nothing is worth an exchange: the batch does not divide, so all is whole."""
    layout, border, _ = solved(posed(gpt2, 2, 2049, bytes_per_second=1e6))
    assert border == WHOLE
    assert layout.counts == {}


@pytest.mark.parametrize("family", [pytest.param(name, marks=pytest.mark.full) for name in NAMES])
def test_without_a_limit_the_relaxed_program_is_nearly_as_good(family: str) -> None:
    call = called(family, torch.float32)
    captured = capture(call.block, call.args, call.kwargs)
    problem = pose(captured, 2, OpRates(1e12, 1e11), link(2, 1e-7, 1e10)).problem
    best, bound = solve(problem), solve(problem, relaxed=True)
    assert bound.seconds <= best.seconds * (1 + 1e-6)
    assert best.seconds <= bound.seconds * 1.01
