"""The trace beside a real run: the same ops, the same bytes, the same facts about parameters."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import anyfit
from anyfit.placing.tiers import LiveBytes
from anyfit.tracing import trace
from anyfit.tracing.blocks import find_blocks
from anyfit.values.graph import Graph
from tests.models import Convolutional, Tangled, byte_batches, image_batches, image_loss, next_byte_loss, tiny_gpt

ROWS = 4


class Recomputing(nn.Module):
    """Every block under torch's own activation checkpointing."""

    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()

    def forward(self, ids: Tensor) -> Tensor:
        gpt = self.gpt
        x = gpt.bytes(ids) + gpt.places(torch.arange(ids.shape[1]))
        for block in gpt.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return gpt.head(gpt.norm(x))


class InPlace(nn.Module):
    """In-place ops and views, which allocate nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 16)
        self.inner = nn.Linear(16, 32)
        self.head = nn.Linear(32, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.inner(self.embed(ids)).mul_(2).relu_()
        return self.head(x.view(ids.shape[0], -1, 32).transpose(1, 2).transpose(1, 2))


def job_for(model: Any, **options: Any) -> anyfit.Job:
    images = model is Convolutional
    defaults = {
        "loss": image_loss if images else next_byte_loss,
        "optimizer": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.requires_grad]),
        "sample": image_batches(1, ROWS)[0] if images else byte_batches(1, ROWS)[0],
        "precision": "fp32",
    }
    return anyfit.Job(model=model, batch_size=ROWS, **(defaults | options))


def really_live(job: anyfit.Job) -> int:
    """Peak bytes of the storages a real pass makes."""
    model = job.build()
    for name, parameter in model.named_parameters():
        parameter.data = parameter.data.to(job.dtypes(model)[name])
    batch = job.prepare(job.sample, torch.device("cpu"))
    gc.collect()
    with LiveBytes() as live:
        job.evaluate(model, batch)[0].backward()
    return live.peak_bytes


@pytest.mark.parametrize("model", [tiny_gpt, Tangled, Convolutional, Recomputing, InPlace])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_live_peak_is_that_of_a_real_pass(model: Any, precision: Any) -> None:
    job = job_for(model, precision=precision)
    graph = trace(job, ROWS)
    inputs = sum(value.bytes for value in graph.values if value.kind == "input")
    assert max(graph.live_bytes("kept")) - inputs == pytest.approx(really_live(job), rel=0.01)


def test_flops_follow_the_closed_formula() -> None:
    width, layers, length = 32, 2, 16
    graph = trace(job_for(tiny_gpt), ROWS)
    tokens = ROWS * length
    weights = layers * 12 * width**2 + width * 256
    attention = layers * 2 * 2 * ROWS * length**2 * width  # scores and mixing, counted whole
    forward = sum(op.flops for op in graph.ops if op.phase == "forward")
    backward = sum(op.flops for op in graph.ops if op.phase == "backward")
    assert forward == 2 * tokens * weights + attention
    assert backward == 4 * tokens * weights + 5 * attention // 2


def test_tied_frozen_unused_and_grouped_parameters_are_told_apart() -> None:
    graph = trace(job_for(Tangled), ROWS)
    by_name = {parameter.name: parameter for parameter in graph.parameters}
    assert by_name["embed.weight"].names == ("embed.weight", "head.weight")
    assert "head.weight" not in by_name
    assert not by_name["frozen.weight"].trainable
    assert by_name["frozen.weight"].group == -1
    assert by_name["unused.weight"].trainable
    assert not by_name["unused.weight"].used
    assert by_name["twice.weight"].used
    assert graph.buffer_bytes == 16 * 4


def test_recomputation_in_the_model_is_seen() -> None:
    plain, recomputing = trace(job_for(tiny_gpt), ROWS), trace(job_for(Recomputing), ROWS)
    assert not any(op.recomputes for op in plain.ops)
    again = sum(op.flops for op in recomputing.ops if op.recomputes)
    in_blocks = sum(op.flops for op in plain.ops if op.phase == "forward" and plain.blocks[op.block].name)
    last_product = 2 * (ROWS * 16) * (4 * 32) * 32  # nothing in backward needs a block's last output: torch stops before it
    assert again == in_blocks - 2 * last_product

    def kept(graph: Graph) -> int:
        return sum(value.bytes for value in graph.values if graph.kept(value))

    assert kept(recomputing) < kept(plain) / 2


def test_layers_that_differ_in_a_number_alone_are_blocks() -> None:
    """As those whose share of dropped paths grows with depth; the first of them drops none."""

    class Dropping(nn.Module):
        def __init__(self, rate: float) -> None:
            super().__init__()
            self.mix, self.rate = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)), rate
            self.drop = nn.Dropout(rate) if rate else nn.Identity()

    stages = nn.ModuleList(nn.ModuleList(Dropping(0.1 * index) for index in range(3)) for _ in range(1))
    found = find_blocks(nn.ModuleDict({"stages": stages}))
    assert [block.name for block in found.blocks] == ["stages.0.0", "stages.0.1", "stages.0.2", ""]
    assert len(set(found.chains[0].kinds)) == 3  # no two are run alike


def test_blocks_are_the_layers_of_towers_and_of_lists_in_lists() -> None:
    def layer() -> nn.Module:
        return nn.ModuleDict({"mix": nn.Linear(8, 8), "norm": nn.LayerNorm(8)})

    def names(model: dict[str, nn.Module]) -> list[str]:
        return [block.name for block in find_blocks(nn.ModuleDict(model)).blocks[:-1]]

    def tower() -> nn.Module:
        return nn.ModuleDict({"layers": nn.ModuleList(layer() for _ in range(3))})

    layers = [f"{which}.layers.{number}" for which in ("question", "answer") for number in range(3)]
    assert names({"question": tower(), "answer": tower()}) == layers
    assert names({"one": nn.Linear(8, 8), "other": nn.Linear(8, 8), "question": tower(), "answer": tower()}) == layers
    assert names({"question": tower(), "first": nn.Linear(8, 8), "second": nn.Linear(8, 8)}) == layers[:3]
    assert names({"first": layer(), "second": layer(), "head": nn.Linear(8, 8)}) == ["first", "second", "head"]
    pairs = nn.ModuleList(nn.ModuleList([layer(), nn.Linear(8, 8)]) for _ in range(2))
    assert names({"down": pairs}) == ["down.0.0", "down.0.1", "down.1.0", "down.1.1"]


def test_ops_of_backward_belong_to_the_blocks_of_forward() -> None:
    for model in (tiny_gpt, Recomputing):
        graph = trace(job_for(model), ROWS)
        forward, backward = ([0] * len(graph.blocks) for _ in range(2))
        for op in graph.ops:
            if not op.recomputes:
                (forward if op.phase == "forward" else backward)[op.block] += op.flops
        attention = 2 * 2 * ROWS * 16**2 * 32
        for block, (first, second) in enumerate(zip(forward, backward, strict=True)):
            if graph.blocks[block].name:
                assert second == 2 * first + attention // 2


def test_a_trace_leaves_no_mark() -> None:
    state = torch.get_rng_state()
    model = tiny_gpt()
    torch.set_rng_state(state)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    trace(job_for(model), ROWS)
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert type(tensor) is Tensor
        assert torch.equal(tensor, before[name])
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks for module in model.modules())


def test_a_model_far_larger_than_memory_is_traced() -> None:
    def huge() -> nn.Module:
        return nn.Sequential(nn.Linear(100_000, 100_000), nn.ReLU(), nn.Linear(100_000, 100_000))

    job = anyfit.Job(
        model=huge,
        loss=lambda model, x: model(x).pow(2).mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=torch.zeros(2, 100_000),
        batch_size=2,
    )
    graph = trace(job, 2)
    assert sum(parameter.elements for parameter in graph.parameters) == 2 * (10**10 + 10**5)
    assert max(graph.live_bytes("kept")) > 2 * 2 * 10**10


def test_everything_frozen_is_refused() -> None:
    def frozen() -> nn.Module:
        return tiny_gpt().requires_grad_(False)

    job = job_for(frozen, optimizer=lambda model: torch.optim.SGD([torch.zeros(1, requires_grad=True)]))
    with pytest.raises(ValueError, match="not of the model"):
        trace(job, ROWS)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_element"),
    [
        (lambda model: torch.optim.AdamW(model.parameters()), 8),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), 12),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 4),
        (lambda model: torch.optim.Adagrad(model.parameters()), 4),
        (lambda model: torch.optim.RMSprop(model.parameters(), centered=True, momentum=0.5), 12),
    ],
)
def test_the_optimizers_state_is_learnt_by_stepping_it(optimizer: Any, bytes_per_element: int) -> None:
    graph = trace(job_for(tiny_gpt, optimizer=optimizer), ROWS)
    assert graph.update.state_bytes_per_element == (bytes_per_element,)


def test_a_graph_travels_as_json() -> None:
    graph = trace(job_for(tiny_gpt), ROWS)
    assert Graph.from_json(graph.to_json()) == graph


class Fed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.narrow, self.wide = nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        narrow = torch.relu(self.narrow(x.view(-1, 4)))
        narrow.add_(1.0)
        return self.wide(narrow)


def test_an_op_knows_what_it_reads_and_writes_through_views() -> None:
    job = anyfit.Job(
        model=Fed,
        loss=lambda model, batch: model(batch).sum(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=torch.randn(2, 2, 4),
        batch_size=2,
    )
    graph = trace(job, 2)
    names = [op.name for op in graph.ops[: graph.backward_starts]]
    narrow, relu, add, wide = (names.index(each) for each in ("mm.default", "relu.default", "add_.Tensor", "mm.default"))
    wide = names.index("mm.default", narrow + 1)
    [batch] = (index for index, value in enumerate(graph.values) if value.kind == "input")
    [product], [kept] = graph.writes[narrow], graph.writes[relu]
    assert (graph.reads[narrow], graph.reads[relu], graph.reads[wide]) == ((batch,), (product,), (kept,))
    assert graph.writes[add] == (kept,)
    assert narrow in graph.parameters[0].reads
    assert wide in graph.parameters[1].reads
    gradients = [index for index, op in enumerate(graph.ops) if op.phase == "backward" and batch in graph.reads[index]]
    assert [graph.ops[each].name for each in gradients] == ["mm.default"]  # the weight's gradient, from the batch as it was
