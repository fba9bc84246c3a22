"""Weights that user code writes between steps, and inside the loss: the edit counts wherever they live, or is refused by name."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from anyfit.values.plan import Placement
from tests.placing.test_optimizers import batches, compare, job_for
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, started

PLACEMENTS = {
    "resident": RESIDENT, "streamed": STREAMED, "on host": ON_HOST, "away": AWAY, "away, streamed": AWAY_STREAMED,
    "speculates": replace(AWAY, speculates=True),
}  # fmt: skip
ELSEWHERE = [each for name, each in PLACEMENTS.items() if name != "resident"]


def adamw(model: nn.Module) -> Optimizer:
    return AdamW(model.parameters(), lr=1e-2)


def set_data(model: Any, step: int) -> None:
    model[0].weight.data = torch.full_like(model[0].weight, 0.1 * step)


def clamp_data(model: nn.Module, _step: int) -> None:
    for parameter in model.parameters():
        parameter.data.clamp_(-0.1, 0.1)


EDITS: dict[str, Callable[[Any, int], Any]] = {
    ".data": clamp_data,
    "a row": lambda model, _: model[0].weight[0].zero_(),
    "in place": lambda model, _: model[0].weight.mul_(0.5),
    "a detached view": lambda model, _: model[0].weight.detach().view(-1)[3:9].fill_(0.3),
    "another tensor": set_data,
    "foreach": lambda model, _: torch._foreach_mul_(list(model.parameters()), 0.5),
    "init": lambda model, _: nn.init.constant_(model[2].bias, 0.1),
    "copied": lambda model, _: model[2].weight.copy_(model[0].weight),
    "out=": lambda model, _: torch.mul(model[0].bias, 0.5, out=model[0].bias),
}


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_edits_between_steps_count(placement: Placement) -> None:
    def act(edit: Any, model: nn.Module, _optimizer: Optimizer, step: int) -> None:
        if step:
            with torch.no_grad():
                edit(model, step)

    for edit in EDITS.values():
        compare(job_for(adamw), placement, functools.partial(act, edit))


class Renormed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(16, 8, max_norm=0.5), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(self.words((x[:, :3].abs() * 5).long().clamp(max=15)).sum(1))
        return out


def clipped(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    clamp_data(model, 0)
    return (model(batch["x"]) - batch["y"]).square().mean()


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_edits_that_forward_makes_count(placement: Placement) -> None:
    compare(job_for(adamw, model=Renormed), placement)
    compare(job_for(adamw, loss=clipped), placement)


class Named(nn.Parameter):
    """A parameter class of the user's own."""

    label = "mine"


class OfOwnClass(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self[0].weight = Named(self[0].weight.detach())


def test_edits_of_fresh_weights_count_and_gradients_that_left_are_named() -> None:
    """Weights that are fresh, and stay on the device, are not watched op by op."""
    kinds, refusals = set(), list[str]()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        for parameter in model.parameters():
            parameter.sum()  # which makes its weights fresh
        clamp_data(model, 0)
        out = model(batch["x"])
        assert model[0].weight.label == "mine"
        kinds.add(type(model[2].weight).__mro__[0].__name__)
        return (out - batch["y"]).square().mean()

    placement = replace(ON_HOST, speculates=True)
    for each in (ON_HOST, placement):
        compare(replace(job_for(adamw, model=OfOwnClass), loss=loss), each)
    assert "Present" in kinds

    def reads_gradient(model: Any, batch: dict[str, Tensor]) -> Tensor:
        hidden = model[1](model[0](batch["x"]))

        def look(_gradient: Tensor) -> None:
            try:
                model[2].weight.grad  # noqa: B018
            except RuntimeError as error:
                refusals.append(str(error))

        hidden.register_hook(look)
        return (model[2](hidden) - batch["y"]).square().mean()

    job = replace(job_for(adamw, model=OfOwnClass), loss=reads_gradient)
    with started(job, hand_written(job, placement)) as run:
        for batch in batches(4):
            run.step(batch)
    assert any("the gradient of 2.weight has left for the host" in each for each in refusals)


@pytest.mark.parametrize("placement", ELSEWHERE)
def test_arrays_of_weights_that_live_elsewhere_cannot_be_written(placement: Placement) -> None:
    job = job_for(adamw)
    with started(job, hand_written(job, placement, slots=8)) as run:
        run.step(batches()[0])
        weight = run.model[0].weight
        assert torch.equal(torch.tensor(weight.detach().numpy()), run.state_dict()["0.weight"])
        for array in (weight.data.numpy(), weight.detach()[0].numpy()):
            with pytest.raises(ValueError, match="read-only"):
                array[:] = 0


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_weights_that_become_other_objects_are_refused_by_name(placement: Placement) -> None:
    def tied(model: Any, _optimizer: Optimizer, step: int) -> None:
        if step:
            model[0].weight.data = model[2].weight.data

    def replaced(model: Any, _optimizer: Optimizer, step: int) -> None:
        if step:
            model[0].weight = nn.Parameter(torch.ones(8, 8))

    with pytest.raises(RuntimeError, match=r"0\.weight\.data .* the memory of another weight; tie parameters"):
        compare(job_for(adamw), placement, tied)
    with pytest.raises(RuntimeError, match=r"0\.weight is not the parameter any more"):
        compare(job_for(adamw), placement, replaced)


class Keeping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)
        self.kept: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.kept is None:
            self.kept = self.layer.weight.detach()
        out: Tensor = self.layer(x) + x @ self.kept
        return out


def test_a_view_that_is_kept_from_step_to_step_follows_the_updates_or_is_refused() -> None:
    for placement in (RESIDENT, STREAMED, ON_HOST):
        compare(job_for(adamw, model=Keeping), placement)
    with pytest.raises(RuntimeError, match=r"a view of layer\.weight is kept from step to step"):
        compare(job_for(adamw, model=Keeping), AWAY)


class Product(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(x @ self.weight)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("placement", ELSEWHERE)
def test_scripted_modules_read_fresh_weights_and_scripted_functions_are_named(placement: Placement) -> None:
    traced = job_for(adamw, model=lambda: nn.Sequential(torch.jit.trace(Product(), torch.ones(4, 8)), nn.Linear(8, 8)))
    compare(traced, placement)
    product = torch.jit.script(scripted_product)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out: Tensor = model[1](product(batch["x"], model[0].weight)) - batch["y"]
        return out.square().mean()

    job = job_for(adamw, model=lambda: nn.Sequential(Product(), nn.Linear(8, 8)), loss=loss)
    with pytest.raises(RuntimeError, match=r"0\.weight is read by code that torch does not tell of"):
        compare(job, placement)


def scripted_product(x: Tensor, weight: Tensor) -> Tensor:
    return torch.tanh(x @ weight)
