"""Models whose parameters are no plain arrays of their own: shared memory, other strides, sparse and complex gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer, SparseAdam

import anyfit
from anyfit.values.demands import shared_memory
from tests.machines import small_machine
from tests.oracle import assert_close, train_plainly
from tests.placing.test_optimizers import batches, compare, job_for
from tests.plans import AWAY, ON_HOST, RESIDENT, STREAMED, hand_written, started


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


class Holder(nn.Module):
    """A layer, and something that shares its weight's memory."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.other = nn.Linear(8, 8), nn.Linear(8, 8)
        weight = self.layer.weight
        if kind == "tied by .data":
            self.other.weight.data = weight.data
        elif kind == "buffer":
            self.register_buffer("view", weight.data[0])
        elif kind == "attribute":
            self.views = {"first": [weight.detach()[0]]}
        elif kind == "closure":
            first = weight.detach()[0]
            self.first = lambda: first
        elif kind == "numpy":
            array = weight.detach().numpy()
            self.first = lambda: torch.from_numpy(array[0])
        elif kind == "slice":
            self.other.bias.data = weight.data[1]

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.other(self.layer(x).tanh())
        if hasattr(self, "view"):
            out = out + self.view
        if hasattr(self, "views"):
            out = out + self.views["first"][0]
        if hasattr(self, "first"):
            out = out + self.first()
        return out


SHARED = {
    "tied by .data": "shares its memory with other.weight; tie them as one object",
    "slice": "shares its memory with other.bias; tie them",
    "buffer": r"shares its memory with view; give that a clone\(\)",
    "attribute": r"shares its memory with views; give that a clone\(\)",
    "closure": "shares its memory with a tensor or array that other code keeps",
    "numpy": "shares its memory with a tensor or array that other code keeps",
}


@pytest.mark.parametrize("kind", SHARED)
def test_memory_that_a_weight_shares_stays_shared_or_is_refused_before_the_first_step(kind: str) -> None:
    for optimizer in (sgd, adamw):
        compare(job_for(optimizer, model=lambda: Holder(kind), clip_norm=0.5), RESIDENT)
    for placement in (STREAMED, ON_HOST, AWAY):
        job = job_for(adamw, model=lambda: Holder(kind))
        with pytest.raises(ValueError, match=rf"layer\.weight {SHARED[kind]}"):
            started(job, hand_written(job, placement, slots=8))


def test_memory_that_is_shared_in_the_model_is_not_cast_apart_in_silence() -> None:
    job = job_for(adamw, model=lambda: Holder("tied by .data"), precision="bf16")
    with pytest.raises(ValueError, match=r"layer\.weight shares its memory with other\.weight.*cast to bf16"):
        started(job, hand_written(job))


def test_slices_of_one_storage_that_do_not_meet_are_nobody_elses() -> None:
    flat = torch.randn(16)
    model = nn.ParameterList([nn.Parameter(flat[:8]), nn.Parameter(flat[8:])])
    assert len(shared_memory(model)[1]) == 2  # `flat` itself is still there
    del flat
    assert shared_memory(model) == ({}, {})
    assert shared_memory(nn.LSTM(4, 4)) == ({}, {})
    assert shared_memory(nn.utils.spectral_norm(nn.Linear(4, 4))) == ({}, {})


class Turned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).t())
        self.convolution = nn.Conv2d(2, 2, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x: Tensor) -> Tensor:
        x = self.convolution(x.view(-1, 2, 2, 2)).flatten(1)
        return x @ self.weight * (1 if self.weight.is_contiguous() else 2)


def test_strides_are_kept_or_the_plan_is_refused() -> None:
    for optimizer in (sgd, adamw):
        compare(job_for(optimizer, model=Turned), RESIDENT)
    job = job_for(adamw, model=Turned)
    with pytest.raises(ValueError, match=r"weight does not lie in order in memory \(strides \(1, 8\).*contiguous"):
        started(job, hand_written(job, AWAY, slots=8))


class Words(nn.Module):
    def __init__(self, *, bag: bool = False) -> None:
        super().__init__()
        self.words: Any = (nn.EmbeddingBag if bag else nn.Embedding)(16, 8, sparse=True)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.words((x[:, :3].abs() * 5).long().clamp(max=15))
        return out.sum(1) if out.dim() == 3 else out


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.Parameter(torch.randn(8, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x * self.factors).real


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [
        (Words, sgd),
        (lambda: Words(bag=True), sgd),
        (Words, lambda model: SparseAdam(model.parameters())),
        (Complex, adamw),
    ],
)
def test_sparse_and_complex_gradients_train_where_all_is_on_the_device(model: Any, optimizer: Any) -> None:
    job = job_for(optimizer, model=model)
    compare(job, RESIDENT)
    for placement in (STREAMED, AWAY):
        with pytest.raises(ValueError, match=r"(sparse gradients|is complex).*all state on the device"):
            started(job, hand_written(job, placement, slots=8))
    assert anyfit.plan(job)


class WordsAndLayer(Words):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(super().forward(x))
        return out


class DenseWordsAndLayer(WordsAndLayer):
    def __init__(self) -> None:
        super().__init__()
        self.words.sparse = False


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_sparse_gradients_train_beside_dense_ones(precision: Any) -> None:
    compare(job_for(sgd, model=WordsAndLayer, precision=precision, clip_norm=None), RESIDENT)


def test_sparse_gradients_are_clipped_beside_dense_ones() -> None:
    """As torch clips dense ones: it has no norm of sparse ones."""
    job, dense = (job_for(sgd, model=model, clip_norm=0.01) for model in (WordsAndLayer, DenseWordsAndLayer))
    with started(job, hand_written(job, RESIDENT, chunk_bytes=256)) as run:
        for batch in batches():
            run.step(batch)
        assert_close(run.state_dict(), train_plainly(dense, batches())[1], 1e-6)


class Small(nn.Module):
    """Parameters without dimensions, without elements, of integers; and one whose gradient a hook takes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.taken = nn.Linear(8, 8), nn.Linear(8, 8)
        self.scale, self.nothing = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.empty(0, 3))
        self.order = nn.Parameter(torch.arange(8).flip(0), requires_grad=False)
        self.taken.weight.register_post_accumulate_grad_hook(lambda parameter: setattr(parameter, "grad", None))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.taken(self.layer(x))[:, self.order] * self.scale + self.nothing.sum()
        return out


@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, ON_HOST, AWAY])
def test_parameters_without_dimensions_and_gradients_that_hooks_take(placement: Any) -> None:
    compare(job_for(adamw, model=Small, clip_norm=0.5), placement)


def test_a_checkpoint_of_shared_memory_comes_back(tmp_path: Any) -> None:
    job = job_for(adamw, model=lambda: Holder("tied by .data"))
    with started(job, hand_written(job)) as run:
        for batch in batches():
            run.step(batch)
        expected = run.state_dict()
        run.save(tmp_path / "one")
    with started(job, hand_written(job)) as run:
        run.resume(tmp_path / "one")
        assert torch.equal(run.model.layer.weight, expected["layer.weight"])
        assert run.model.layer.weight.data_ptr() == run.model.other.weight.data_ptr()


class Taught(nn.Module):
    """An LSTM beside one like it that is run without gradients, and keeps nothing for backward."""

    def __init__(self) -> None:
        super().__init__()
        self.learns, self.teaches = nn.LSTM(8, 8, batch_first=True), nn.LSTM(8, 8, batch_first=True).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            taught = self.teaches(x[:, None])[0]
        return (self.learns(x[:, None])[0] - taught)[:, 0]


def test_what_an_lstm_keeps_for_backward_is_forecast() -> None:
    job = job_for(lambda model: SGD(model.learns.parameters(), lr=0.1), model=Taught)
    with anyfit.start(job, machine=small_machine()) as run:
        run.step(job.sample)
        assert run.metrics.peak_bytes["device"] == pytest.approx(run.plan.forecast.peak_bytes["device"], rel=0.02)
