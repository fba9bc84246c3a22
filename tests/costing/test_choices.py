"""What a block may do with its activations: forecast from a plain trace, and seen in traces of models that do it."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import anyfit
from anyfit.costing import cost
from anyfit.demo import GPT
from anyfit.tracing import trace
from anyfit.values.graph import COSTLY_OPS, Graph
from tests.machines import small_machine
from tests.models import byte_batches, next_byte_loss, tiny_llama
from tests.planning.profiles import MIB

aten = torch.ops.aten
COSTLY = {getattr(aten, name).default for name in COSTLY_OPS if hasattr(aten, name)}
ROWS, LENGTH = 8, 64


def policy(_context: Any, op: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in COSTLY else CheckpointPolicy.PREFER_RECOMPUTE


def wrapped(model: nn.Module, blocks: Any, choice: str) -> nn.Module:
    for block in blocks(model):
        more = {}
        if choice == "selective":
            more["context_fn"] = functools.partial(create_selective_checkpoint_contexts, policy)
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False, **more)
    return model


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (lambda: GPT(width=64, layers=4, heads=4, length=LENGTH), lambda model: model.blocks),
    "llama": (tiny_llama, lambda model: model.llama.model.layers),
}


def graph_of(name: str, choice: str, kind: str) -> Graph:
    build, blocks = MODELS[name]
    model = build if choice == "keep" else (lambda: wrapped(build(), blocks, choice))
    job = anyfit.Job(
        model=model,
        loss=next_byte_loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=byte_batches(1, ROWS, length=LENGTH + 1)[0],
        batch_size=ROWS,
        precision="bf16",
    )
    return trace(job, ROWS, kind)


def kept_bytes(graph: Graph) -> int:
    return sum(value.bytes for value in graph.values if graph.kept(value))


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_what_recomputation_keeps_and_does_again_is_forecast_from_a_plain_trace(name: str, kind: str) -> None:
    machine = small_machine()
    plain = graph_of(name, "keep", kind)
    blocks = cost([plain], machine, ROWS).passes[0].blocks
    outside = sum(block.kept_bytes for block in blocks if len(block.choices) == 1)
    for choice in ("recompute", "selective"):
        real = graph_of(name, choice, kind)
        forecast = outside + sum(block.choices[choice].kept_bytes for block in blocks if len(block.choices) > 1)
        assert forecast == pytest.approx(kept_bytes(real), rel=0.05), choice
        if choice == "recompute":  # selectively, torch's bookkeeping is most of what is done again on such small tensors
            again = cost([real], machine, ROWS).passes[0].seconds_recompute
            expected = sum(block.choices[choice].seconds for block in blocks if len(block.choices) > 1)
            assert expected == pytest.approx(again, rel=0.2)


class Shared(nn.Module):
    """Blocks that all keep one tensor, which is made outside them, beside what is their own."""

    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(WIDE, WIDE, bias=False)

        def forward(self, stream: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            return self.inner(stream).tanh() * shared

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDE, WIDE, bias=False)
        self.blocks = nn.ModuleList(self.Layer() for _ in range(7))

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = self.first(stream)
        shared = stream.detach().sigmoid()
        for block in self.blocks:
            stream = block(stream, shared)
        return stream.sum()


WIDE = 256
ONE = 4 * 128 * WIDE  # bytes of a tensor in it


def test_what_several_blocks_keep_stays_and_each_moves_a_copy_of_it() -> None:
    job = anyfit.Job(
        model=Shared,
        loss=lambda model, batch: model(batch),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=torch.randn(128, WIDE),
        batch_size=128,
        precision="fp32",
    )
    graph = trace(job, 128, "cpu")
    kept = [value for value in graph.values if graph.kept(value) and value.bytes == ONE]
    of_block = [sum(graph.home(value) == index for value in kept) for index in range(len(graph.blocks))]
    assert of_block == [2] * 7 + [1]  # a block's input and what tanh made; what they share
    for block, each in zip(graph.blocks[:-1], cost([graph], small_machine(), 128).passes[0].blocks, strict=False):
        assert block.offload_bytes == 3 * ONE
        assert each.choices["keep"].kept_bytes == 2 * ONE
        assert (each.choices["offload"].kept_bytes, each.choices["offload"].moved_bytes) == (0, 3 * ONE)


def test_choices_are_ordered_as_one_would_expect() -> None:
    blocks = cost([graph_of("gpt", "keep", "cuda")], small_machine(), ROWS).passes[0].blocks
    for block in blocks:
        kept = {choice: each.kept_bytes for choice, each in block.choices.items()}
        assert kept["keep"] == block.kept_bytes
        if block.name:
            assert kept["recompute"] <= min(kept["selective"], kept["keep"])
            assert block.choices["offload"].moved_bytes + kept["offload"] == kept["keep"]
            assert 0 < block.choices["selective"].seconds < block.choices["recompute"].seconds <= block.seconds_forward
        else:
            assert list(kept) == ["keep"]
    assert sum(block.kept_bytes for block in blocks) < 64 * MIB
