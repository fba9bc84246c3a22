"""Models whose forward needs values: traced by a real run, where the job allows it, with what a trace on fakes would find."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

import anyfit
from anyfit.costing import cost
from anyfit.planning import search
from anyfit.tracing import trace, trace_all
from anyfit.values.graph import Graph
from tests.machines import small_machine
from tests.models import tiny_gpt
from tests.tracing.test_trace import Recomputing, job_for

ROWS = 4
Device = Literal["cpu", "cuda"]


class Dropping(nn.Module):
    """Dropout inside and outside attention."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.2, batch_first=True)
        self.head = nn.Linear(32, 256)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.layer(self.embed(ids)))


class Branching(nn.Module):
    """One layer for what adds up to more than nothing, another for the rest."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.up(x) if x.sum().item() > 0 else self.down(x)


class Experts(nn.Module):
    """A mixture of experts as it is first written: each takes the rows that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 4, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x).softmax(-1)
        best = weights.argmax(-1)
        result = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = torch.nonzero(best == index).squeeze(-1)
            if rows.numel():
                result.index_add_(0, rows, expert(x[rows]) * weights[rows, index].unsqueeze(-1))
        return result


def job_of(model: Any, sample: Tensor, **options: Any) -> anyfit.Job:
    defaults = {
        "loss": lambda model, batch: model(batch).square().mean(),
        "optimizer": lambda model: torch.optim.AdamW(model.parameters()),
        "batch_size": len(sample),
        "precision": "fp32",
        "real_run": True,
    }
    return anyfit.Job(model=model, sample=sample, **(defaults | options))


def rows(count: int) -> Tensor:
    return torch.randn(count, 8, generator=torch.Generator().manual_seed(3))


# ---------------------------------------------------------------------- what a trace on fakes finds


@pytest.mark.parametrize("model", [tiny_gpt, Recomputing, Dropping])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_real_run_finds_what_a_trace_on_fakes_does(model: Any, precision: Any, device: Device) -> None:
    job = job_for(model, precision=precision)
    real = trace(replace(job, real_run=True), ROWS, device)
    assert real.notes
    assert replace(real, notes=()) == trace(job, ROWS, device)


@pytest.mark.parametrize("kind", ["gemma3_text", "mixtral"])  # grouped queries under a mask, and grouped products
@pytest.mark.parametrize(("device", "precision"), [("cpu", "fp32"), ("cuda", "fp32"), ("cuda", "bf16")])
def test_a_real_run_of_a_library_model_finds_what_a_trace_on_fakes_does(kind: str, device: Device, precision: Any) -> None:
    options = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    config = AutoConfig.for_model(kind, **options, num_key_value_heads=2, head_dim=16, sliding_window=8)
    job = anyfit.Job.from_huggingface(config, batch_size=2, length=16, precision=precision)
    real = trace(replace(job, real_run=True), 2, device)
    assert replace(real, notes=()) == trace(job, 2, device)


def test_the_values_of_a_gpus_attention_are_those_of_torch() -> None:
    from anyfit.tracing.gpu_kernels import AsOnGpu
    from anyfit.tracing.real_run import LentKernels

    query, key, value = (torch.randn(2, heads, 16, 16) for heads in (4, 2, 2))
    mask = torch.ones(16, 16, dtype=torch.bool).tril()
    for options in ({"is_causal": True}, {"attn_mask": mask}, {"scale": 0.5}):
        for dtype in (torch.float32, torch.bfloat16):
            given = [tensor.to(dtype) for tensor in (query, key, value)]
            if dtype == torch.float32:
                given = [query, *(tensor.repeat_interleave(2, dim=1) for tensor in (key, value))]
            grouped = {"enable_gqa": dtype == torch.bfloat16}
            with LentKernels(), AsOnGpu():
                lent = F.scaled_dot_product_attention(*given, **options, **grouped)  # type: ignore[arg-type]
            own = F.scaled_dot_product_attention(*given, **options, **grouped)  # type: ignore[arg-type]
            torch.testing.assert_close(lent, own)


# ---------------------------------------------------------------------- values decide


def names_of(graph: Graph) -> set[str]:
    return {op.module for op in graph.ops if op.kind == "matmul"}


def test_a_branch_goes_the_way_of_the_sample() -> None:
    with pytest.raises(
        ValueError, match=r"test_real_run.py:\d+, in forward: .*\.item\(\).* needs the value of a tensor"
    ) as error:
        trace(job_of(Branching, torch.ones(ROWS, 8), real_run=False), ROWS)
    assert "Job(real_run=True) or --real-run" in str(error.value)
    assert names_of(trace(job_of(Branching, torch.ones(ROWS, 8)), ROWS)) == {"up"}
    assert names_of(trace(job_of(Branching, torch.ones(ROWS, 8), real_run=None), ROWS)) == {"up"}
    down = trace(job_of(Branching, -torch.ones(ROWS, 8)), ROWS)
    assert names_of(down) == {"down"}
    assert {each.name for each in down.parameters if each.used} == {"down.weight", "down.bias"}


def test_a_large_model_is_run_for_real_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[trace.__module__], "SMALL", 10)
    with pytest.raises(ValueError, match=r"needs the value of a tensor.*--real-run"):
        trace(job_of(Branching, torch.ones(ROWS, 8), real_run=None), ROWS)


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_each_expert_gets_the_rows_that_chose_it(device: Device) -> None:
    job = job_of(Experts, rows(64))
    with pytest.raises(ValueError, match=r"makes a tensor whose size depends on values .*--real-run"):
        trace(replace(job, real_run=False), 64, device)
    graph = trace(job, 64, device)
    first = [op for op in graph.ops if op.module.endswith(".0") and op.phase == "forward" and op.flops]
    assert len(first) == 4
    assert sum(op.flops for op in first) == 2 * 64 * 8 * 16
    assert sum(op.name.startswith("nonzero") for op in graph.ops) == 4


def test_an_op_without_a_rule_for_fakes_is_run() -> None:
    @torch.library.custom_op("anyfit_tests::halve", mutates_args=())
    def halve(x: Tensor) -> Tensor:
        return x / 2

    torch.library.register_autograd("anyfit_tests::halve", lambda ctx, gradient: gradient / 2)

    class Halving(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return halve(super().forward(x))

    graph = trace(job_of(lambda: Halving(8, 8), rows(ROWS)), ROWS)
    assert any("halve" in op.name for op in graph.ops)


def test_an_op_that_no_cpu_has_is_named() -> None:
    library = torch.library.Library("anyfit_gpu_tests", "DEF")
    library.define("only(Tensor x) -> Tensor")
    library.impl("only", lambda x: x, "CUDA")

    class OnlyGpu(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.anyfit_gpu_tests.only(super().forward(x))

    with pytest.raises(ValueError, match=r"test_real_run.py:\d+, .* calls anyfit_gpu_tests::only, which does not run on a CPU"):
        trace(job_of(lambda: OnlyGpu(8, 8), rows(ROWS)), ROWS)
    library._destroy()


# ---------------------------------------------------------------------- every size, as far as it can be paid for


def test_every_size_is_run_and_rows_are_taken_again_where_the_sample_has_too_few() -> None:
    graphs = trace_all(job_of(Experts, rows(3), batch_size=8), [8, 4, 2, 1], "cpu")
    assert [graph.micro_batch for graph in graphs] == [8, 4, 2, 1]
    assert [next(value.bytes for value in graph.values if value.kind == "input") for graph in graphs] == [256, 128, 64, 32]
    assert len({graph.notes for graph in graphs}) == 1


def test_a_profile_and_a_plan_say_that_it_was_a_real_run(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = small_machine()
    job = job_of(Experts, rows(8))
    assert anyfit.profile(job_for(tiny_gpt), machine).notes == ()
    made = anyfit.plan(job, machine)
    assert made.decision("trace").choice == "a real run"
    assert "the values of Job(sample=)" in made.decision("trace").why
    monkeypatch.setattr(sys.modules[trace.__module__], "PATIENCE_SECONDS", 0.0)
    profile = anyfit.profile(job, machine)
    assert [each.micro_batch for each in profile.passes] == [1]
    (note,) = [note for note in profile.notes if "left out" in note]
    assert "micro-batches from 2 on are left out: a real run of 2 takes about" in note
    assert "Job(micro_batch=2)" in note
    assert note in search(profile).decision("trace").why


def test_sizes_that_memory_does_not_hold_are_left_out_and_named() -> None:
    job = job_of(Experts, rows(256))
    whole = trace(job, 64)
    weights = sum(each.elements * 4 for each in whole.parameters)
    graphs = trace_all(job, [256, 64], "cpu", weights + 1.5 * max(whole.live_bytes("kept")))
    assert [graph.micro_batch for graph in graphs] == [64]
    assert "micro-batches from 256 on are left out: a real run of 256 takes about" in graphs[0].notes[-1]
    assert cost(graphs, small_machine(), 256).notes == graphs[0].notes
    assert search(cost(graphs, small_machine(), 256)).micro_batch == 64


def test_a_pass_that_does_not_fit_is_stopped() -> None:
    job = job_of(Experts, rows(256))
    weights = sum(each.elements * 4 for each in trace(job, 1).parameters)
    with pytest.raises(ValueError, match=r"a real run of this batch takes more than the .* of memory that are free") as error:
        trace(job, 256, "cpu", 2 * weights + 1000)
    assert not getattr(error.value, "__notes__", None)


def test_a_model_larger_than_memory_is_refused_before_it_is_built() -> None:
    def build() -> nn.Module:
        model = nn.Linear(2**20, 2**20, bias=False)
        assert model.weight.is_meta
        return model

    with pytest.raises(
        ValueError, match=r"a real run of Linear needs 4.00 TiB .* gradients alone, and 2.00 GiB are free"
    ) as error:
        trace(job_of(build, rows(1), precision="bf16"), 1, "cpu", 2 * 2**30)
    assert not getattr(error.value, "__notes__", None)  # so that the command line says it in one line


# ---------------------------------------------------------------------- what is left behind


def test_a_real_run_leaves_no_mark() -> None:
    class Writing(nn.Module):
        """Changes its input, its buffer and the random state."""

        def __init__(self) -> None:
            super().__init__()
            self.norm, self.layer = nn.BatchNorm1d(8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x.add_(torch.rand([]))
            return self.layer(self.norm(x))

    model, sample = Writing(), rows(ROWS)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state, kept = torch.get_rng_state(), sample.clone()
    trace(job_of(model, sample, precision="bf16"), ROWS)
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.equal(sample, kept)
    assert all(
        torch.equal(tensor, before[name]) and tensor.dtype == before[name].dtype for name, tensor in model.state_dict().items()
    )
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_model_without_weights_is_refused() -> None:
    with torch.device("meta"):
        model = Branching()
    with pytest.raises(ValueError, match=r"needs real weights, and up.weight is on the meta device"):
        trace(job_of(model, rows(ROWS)), ROWS)


def test_a_batch_with_a_split_of_its_own_is_cut_by_it() -> None:
    job = job_of(
        Branching,
        rows(4).T.contiguous(),
        batch_size=4,
        loss=lambda model, batch: model(batch.T).square().mean(),
        split=lambda batch, sizes: batch.split(list(sizes), dim=1),
    )
    graph = trace(job, 3)
    assert next(value.bytes for value in graph.values if value.kind == "input") == 8 * 3 * 4


def test_a_job_that_needs_values_is_planned_and_trained() -> None:
    batches = [torch.randn(8, 8) for _ in range(3)]
    run = anyfit.start(job_of(Experts, batches[0], micro_batch=4), machine=small_machine())
    losses = [float(run.step(batch)) for batch in batches]
    assert all(map(math.isfinite, losses))
    run.close()


def test_a_number_that_the_constructor_takes_from_a_tensor_is_explained() -> None:
    class Spread(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * self.rates[1]

    for real_run in (False, True):
        with pytest.raises(
            ValueError, match=r"test_real_run.py:\d+, in .* while the model is built.* Job\(model=\) the model itself"
        ):
            trace(job_of(Spread, rows(ROWS), real_run=real_run), ROWS)
        assert trace(job_of(Spread(), rows(ROWS), real_run=real_run), ROWS).ops
