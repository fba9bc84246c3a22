"""Weights that are needed at once are on the device at once: the planner's own plans run, and as plain PyTorch does."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from anyfit.planning import search
from anyfit.tracing import trace
from tests.machines import small_machine
from tests.oracle import assert_close, train_plainly

WIDTH = 64


class Chain(nn.Module):
    def __init__(self, count: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(count)])

    def forward(self, batch: Tensor) -> Tensor:
        for layer in self.layers:
            batch = torch.tanh(layer(batch))
        return batch


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm, self.rest = nn.LSTM(WIDTH, WIDTH, 2, batch_first=True), Chain()

    def forward(self, batch: Tensor) -> Tensor:
        return self.rest(self.lstm(batch)[0])


class HoldsViews(Chain):
    def forward(self, batch: Tensor) -> Tensor:
        views = [layer.weight.t() for layer in self.layers]
        for view in views:
            batch = torch.tanh(batch @ view)
        return batch


class Stacks(Chain):
    def forward(self, batch: Tensor) -> Tensor:
        weights = torch.stack([layer.weight for layer in self.layers])
        return torch.einsum("btd,ned->bnte", batch, weights).mean(1)


def compiled() -> nn.Module:
    model = nn.Sequential(Chain(), Chain())
    model[0] = torch.compile(model[0], backend="eager")
    return model


def scripted() -> nn.Module:
    return nn.Sequential(torch.jit.script(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))), Chain())


def job_of(model: Callable[[], nn.Module], loss: Any = None) -> anyfit.Job:
    return anyfit.Job(
        model,
        loss or (lambda model, batch: model(batch).square().mean()),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        sample=torch.ones(2, 4, WIDTH),
        batch_size=2,
        micro_batch=2,
        precision="fp32",
    )


def penalised(model: nn.Module, batch: Tensor) -> Tensor:
    batch = batch.detach().requires_grad_()
    output = model(batch)
    (gradient,) = torch.autograd.grad(output.sum(), batch, create_graph=True)
    return output.square().mean() + gradient.norm()


def per_sample(model: nn.Module, batch: Tensor) -> Tensor:
    gradients = torch.func.vmap(torch.func.grad(lambda sample: model(sample[None]).square().mean()))(batch)
    loss: Tensor = model(batch).square().mean() + gradients.square().sum()
    return loss


def forward_mode(model: nn.Module, batch: Tensor) -> Tensor:
    output, tangent = torch.func.jvp(model, (batch,), (torch.ones_like(batch),))
    loss: Tensor = output.square().mean() + tangent.square().mean()
    return loss


def flattened(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean() + 1e-3 * nn.utils.parameters_to_vector(model.parameters()).square().sum()
    return loss


CASES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "lstm": (Recurrent, None),
    "held views": (HoldsViews, None),
    "stacked": (Stacks, None),
    "compiled": (compiled, None),
    "gradient penalty": (Chain, penalised),
    "per-sample gradients": (Chain, per_sample),
    "forward mode": (Chain, forward_mode),
    "flattened": (Chain, flattened),
    "scripted": (scripted, None),
}
QUICK = ("lstm", "held views", "per-sample gradients")


@pytest.mark.filterwarnings("ignore")  # of torch.jit and torch.compile
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in CASES])
def test_the_planners_tightest_plans_run_as_plain_pytorch_does(name: str) -> None:
    model, loss = CASES[name]
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randn(2, 4, WIDTH, generator=generator) for _ in range(2)]
    _, plain = train_plainly(job_of(model, loss), copy.deepcopy(batches))
    machine = small_machine()
    profile = anyfit.profile(job_of(model, loss), machine)
    limit = search(profile).forecast.peak_bytes["device"]
    plan = None
    for share in (1.0, 0.8, 0.6, 0.5, 0.4, 0.3):  # the last that there is
        try:
            found = search(replace(profile, device_limit_bytes=int(share * limit)))
        except anyfit.NoPlan:
            break
        plan = replace(found, limit_bytes={**found.limit_bytes, "device": 2**40})
    torch.manual_seed(0)
    with anyfit.start(job_of(model, loss), plan, machine) as run:
        for batch in copy.deepcopy(batches):
            run.step(batch)
        assert_close({key: value.clone() for key, value in run.state_dict().items()}, plain, 1e-6)


def test_a_trace_knows_what_one_call_and_what_held_views_need() -> None:
    names = [parameter.name for parameter in trace(job_of(Recurrent), 2).parameters]
    (lstm,) = trace(job_of(Recurrent), 2).together
    assert [names[index] for index in lstm] == [name for name in names if name.startswith("lstm")]
    (held,) = trace(job_of(lambda: HoldsViews(12)), 2).together
    assert len(held) == 12
    assert trace(job_of(Chain), 2).together == ()


def test_a_repeated_block_that_was_not_run_needs_what_its_like_does() -> None:
    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([Stacks(4) for _ in range(8)])

        def forward(self, batch: Tensor) -> Tensor:
            for block in self.blocks:
                batch = F.gelu(block(batch))
            return batch

    graph = trace(job_of(Blocks), 2)
    assert [len(each) for each in graph.together] == [4] * 8


@pytest.mark.filterwarnings("ignore")  # of torch.jit
def test_weights_that_nobody_can_watch_stay_on_the_device() -> None:
    assert "torch.func" in trace(job_of(Chain, per_sample), 2).state_stays
    assert "scripted" in trace(job_of(scripted), 2).state_stays
    assert trace(job_of(Chain, penalised), 2).state_stays == ""
