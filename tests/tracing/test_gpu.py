"""What a GPU does otherwise than the CPU that a trace runs on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from anyfit.costing.memory import chunk_costs, chunks_of
from anyfit.tracing import trace
from anyfit.values.graph import Graph

ROWS, LENGTH, HEADS, WIDTH = 2, 16, 4, 64


class Residual(nn.Module):
    """Gradients of x come from two sides, first through the sum and then through the norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x).tanh()
        return (x + self.norm(x)).tanh()


class Tied(nn.Module):
    """One weight at both ends, and one in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.outer, self.inner = (nn.Parameter(torch.ones(ROWS, LENGTH, WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return ((x * self.outer).tanh() * self.inner).tanh() * self.outer


class Attending(nn.Module):
    """Attention with a learnt bias, whose rows lie together or apart."""

    def __init__(self, *, together: bool) -> None:
        super().__init__()
        self.together = together
        self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        shape = (1, HEADS, LENGTH, LENGTH) if together else (1, LENGTH, LENGTH, HEADS)
        self.bias = nn.Parameter(torch.zeros(shape))

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.together else self.bias.permute(0, 3, 1, 2)
        query, key, value = (
            part.view(-1, LENGTH, HEADS, WIDTH // HEADS).transpose(1, 2) for part in self.inner(x).chunk(3, dim=-1)
        )
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias)


def graph_of(model: Any, device: Any) -> Graph:
    job = anyfit.Job(
        model=model,
        loss=lambda model, batch: model(batch).float().sum(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=torch.zeros(ROWS, LENGTH, WIDTH),
        batch_size=ROWS,
        precision="bf16",
    )
    return trace(job, ROWS, device)


def test_gradients_from_several_sides_add_up_in_place_on_a_gpu() -> None:
    on_cpu, on_gpu = graph_of(Residual, "cpu"), graph_of(Residual, "cuda")
    (moment,) = [index for index, op in enumerate(on_gpu.ops) if op.name == "add.Tensor" and op.phase == "backward"]
    assert [value.born for value in on_cpu.values if value.born == moment] == [moment]
    assert [value.born for value in on_gpu.values if value.born == moment] == []
    first = [value for value in on_gpu.values if value.born < moment < value.dies and value.born >= on_gpu.backward_starts]
    assert any(value.bytes == 2 * ROWS * LENGTH * WIDTH and value.kind == "activation" for value in first)
    assert max(on_gpu.live_bytes("kept")) <= max(on_cpu.live_bytes("kept"))


def test_a_gradient_that_adds_up_over_several_uses_is_known_and_there_from_the_first() -> None:
    graph = graph_of(Tied, "cuda")
    assert {parameter.name: parameter.adds_up for parameter in graph.parameters} == {"outer": True, "inner": False}
    costs = chunk_costs(graph, chunks_of(graph, 2**20))
    assert [cost.summed_bytes for cost in costs] == [2 * ROWS * LENGTH * WIDTH]
    born = sorted(value.born for value in graph.values if value.kind == "gradient")
    moment = max(index for index, op in enumerate(graph.ops) if op.name == "add.Tensor")
    assert born[0] < born[1] < moment
    assert not any(parameter.adds_up for parameter in graph_of(Tied, "cpu").parameters)


def test_gradients_outlive_the_pass() -> None:
    graph = graph_of(Residual, "cuda")
    assert {value.dies for value in graph.values if value.kind == "gradient"} == {len(graph.ops)}


@pytest.mark.parametrize(
    ("together", "kernel"), [(True, "_scaled_dot_product_efficient_attention.default"), (False, "_safe_softmax.default")]
)
def test_a_learnt_bias_goes_into_a_fused_kernel_if_its_rows_lie_together(*, together: bool, kernel: str) -> None:
    names = [op.name for op in graph_of(lambda: Attending(together=together), "cuda").ops]
    assert kernel in names
    assert "_scaled_dot_product_cudnn_attention.default" not in names
