"""The user's own optimizer beside plain PyTorch: whatever it does, it is equal where all state is on the device; elsewhere it is
equal, or refused before the first step where its parameters do not stand by themselves."""

from __future__ import annotations

import copy
import types
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

import anyfit
from anyfit.values.coupling import coupled
from anyfit.values.plan import Placement
from tests.oracle import PlainBf16, PlainFp32, assert_bit_equal
from tests.plans import AWAY, AWAY_ON_DISK, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, chunk_count, hand_written, started

Act = Callable[[nn.Module, Optimizer, int], None]
PLACEMENTS = {"resident": RESIDENT, "streamed": STREAMED, "on host": ON_HOST, "away": AWAY}


def perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))


def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    error: Tensor = model(batch["x"]) - batch["y"]
    return error.square().mean()


def batches(count: int = 4) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(3)
    return [{key: torch.randn(4, 8, generator=generator) for key in ("x", "y")} for _ in range(count)]


def job_for(optimizer: Any, **options: Any) -> anyfit.Job:
    options = {"model": perceptron, "loss": loss, "precision": "fp32"} | options
    return anyfit.Job(optimizer=optimizer, sample=batches(1)[0], batch_size=4, **options)


def compare(job: anyfit.Job, placement: Placement, act: Act = lambda _model, _optimizer, _step: None) -> None:
    """Both do `act` before each step."""
    torch.manual_seed(job.seed)
    plain = (PlainFp32 if job.precision == "fp32" else PlainBf16)(job, job.build())
    for step, batch in enumerate(batches()):
        act(plain.model, plain.optimizer, step)
        plain.step(batch, 1)
    with started(job, hand_written(job, placement, slots=8, chunk_bytes=256)) as run:
        for step, batch in enumerate(batches()):
            act(run.model, run.optimizer, step)
            run.step(batch)
        assert run.skipped == 0
        assert_bit_equal(run.state_dict(), plain.weights())


class Signs(Optimizer):
    """By parameter, as most are."""

    def __init__(self, parameters: Any, lr: float = 1e-2) -> None:
        super().__init__(parameters, {"lr": lr})

    def parameters(self) -> list[nn.Parameter]:
        return [each for group in self.param_groups for each in group["params"] if each.grad is not None]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.parameters():
            state = self.state[parameter]
            mean = state.setdefault("mean", torch.zeros_like(parameter))
            assert parameter.grad is not None
            mean.lerp_(parameter.grad, 0.1)
            parameter.sub_(mean.sign(), alpha=self.param_groups[0]["lr"])


class Counting(Signs):
    count = 0

    def step(self, closure: Any = None) -> None:
        self.count += 1
        self.param_groups[0]["lr"] = 1e-2 / self.count
        super().step()


class GlobalNorm(Signs):
    def step(self, closure: Any = None) -> None:
        gradients = [each.grad for each in self.parameters()]
        nn.utils.clip_grad_norm_(self.parameters(), 1e-2) if gradients else None
        super().step()


class Noisy(Signs):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        for parameter in self.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=1e-3)


class Wrapping(Optimizer):
    def __init__(self, inner: Optimizer) -> None:
        self.inner = inner
        super().__init__(inner.param_groups, {})

    def step(self, closure: Any = None) -> Any:
        return self.inner.step(closure)


def with_hooks(model: nn.Module) -> Optimizer:
    optimizer = AdamW(model.parameters(), lr=1e-2)

    def clamp_gradients(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        for parameter in model.parameters():
            parameter.grad = None if parameter.grad is None else parameter.grad.clamp(-1e-3, 1e-3)

    def clamp_weights(_optimizer: Any, _args: Any, _kwargs: Any) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.clamp_(-0.2, 0.2)

    optimizer.register_step_pre_hook(clamp_gradients)
    optimizer.register_step_post_hook(clamp_weights)
    return optimizer


def with_another_step(model: nn.Module) -> Optimizer:
    optimizer = SGD(model.parameters(), lr=0.1)
    own = optimizer.step

    def step(self: Optimizer, closure: Any = None) -> Any:
        self.param_groups[0]["lr"] *= 0.5
        return own(closure)

    optimizer.step = types.MethodType(step, optimizer)  # type: ignore[method-assign]
    return optimizer


COUPLED: dict[str, tuple[Any, str]] = {
    "counting": (lambda model: Counting(model.parameters()), "Counting changes its 'count' in a step"),
    "norm": (lambda model: GlobalNorm(model.parameters()), "GlobalNorm steps parameters otherwise together"),
    "noise": (lambda model: Noisy(model.parameters()), "Noisy draws random numbers"),
    "wrapping": (lambda model: Wrapping(Signs(model.parameters())), "Wrapping keeps 'inner'"),
    "hooks": (with_hooks, "AdamW has hooks around its step"),
    "replaced": (with_another_step, "the step of SGD was replaced"),
}


@pytest.mark.parametrize("name", COUPLED)
def test_an_optimizer_that_couples_its_parameters_is_stepped_whole_or_refused_before_the_first_step(name: str) -> None:
    optimizer, reason = COUPLED[name]
    for precision in ("fp32", "bf16"):
        job = job_for(optimizer, precision=precision, clip_norm=0.5)
        compare(job, RESIDENT)
        for placement in (STREAMED, AWAY):
            some = [RESIDENT, *[placement] * (chunk_count(job, 256) - 1)]
            for placements in ([placement], some):
                with pytest.raises(ValueError, match=f"{reason}.*stepped together.*all optimizer state on the device"):
                    started(job, hand_written(job, *placements, slots=8, chunk_bytes=256))


def test_what_is_known_to_couple_nothing() -> None:
    def made(kind: Any, **options: Any) -> Optimizer:
        return kind([nn.Parameter(torch.ones(4, 4)), nn.Parameter(torch.ones(3, 4))], **options)

    for kind in (AdamW, SGD, Signs, torch.optim.Adafactor, torch.optim.Muon, type("Own", (AdamW,), {})):
        assert coupled(made(kind, lr=1e-3)) is None
    scheduled = made(SGD, lr=0.1)
    torch.optim.lr_scheduler.StepLR(scheduled, 1)
    assert coupled(scheduled) is None


def warmed_up(model: nn.Module) -> Optimizer:
    optimizer = AdamW(model.parameters(), lr=1e-2)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_that_an_optimizer_has_at_the_start_is_taken_over(placement: Placement, precision: Any) -> None:
    compare(job_for(warmed_up, precision=precision), placement)


def other_state(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        other = AdamW([nn.Parameter(torch.zeros(each.shape)) for each in model.parameters()], lr=3e-2)
        for parameter in other.param_groups[0]["params"]:
            parameter.grad = torch.ones_like(parameter)
        other.step()
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.parametrize("placement", PLACEMENTS.values(), ids=PLACEMENTS)
def test_load_state_dict_between_steps_is_honoured(placement: Placement) -> None:
    compare(job_for(lambda model: AdamW(model.parameters(), lr=1e-2)), placement, other_state)


def cleared(_model: nn.Module, optimizer: Optimizer, step: int) -> None:
    if step == 2:
        optimizer.state.clear()


def edited(model: nn.Module, optimizer: Optimizer, step: int) -> None:
    for parameter in model.parameters() if step == 2 else ():
        optimizer.state[parameter]["exp_avg"].mul_(3)
        optimizer.state[parameter]["step"] += 5


def taken_back(_model: nn.Module, optimizer: Any, step: int) -> None:
    if step == 1:
        optimizer.kept = copy.deepcopy(optimizer.state_dict())
    if step == 3:
        optimizer.load_state_dict(optimizer.kept)


@pytest.mark.parametrize("act", [cleared, edited, taken_back])
def test_what_user_code_does_to_the_state_counts_or_is_refused(act: Act) -> None:
    job = job_for(lambda model: AdamW(model.parameters(), lr=1e-2))
    compare(job, RESIDENT, act)
    if act is not taken_back:
        compare(job_for(lambda model: AdamW(model.parameters(), lr=1e-2), precision="bf16"), RESIDENT, act)
    for placement in (STREAMED, AWAY):
        with pytest.raises(RuntimeError, match=r"run\.optimizer\.state is not kept there"):
            compare(job, placement, act)


def test_hooks_and_groups_that_come_after_the_start_count_or_are_refused() -> None:
    def later(_model: nn.Module, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            optimizer.register_step_post_hook(lambda *_: optimizer.param_groups[0].update(lr=1e-4))

    def another(model: Any, optimizer: Optimizer, step: int) -> None:
        if step == 2:
            optimizer.add_param_group({"params": list(model[2].parameters())})

    job = job_for(lambda model: AdamW(model.parameters(), lr=1e-2))
    compare(job, RESIDENT, later)
    with pytest.raises(ValueError, match=r"AdamW has hooks around its step.*stepped together"):
        compare(job, AWAY, later)
    with pytest.raises(RuntimeError, match=r"parameter groups of \[2, 2\] parameters, and had \[2\] at the start"):
        compare(job_for(lambda model: AdamW(model[0].parameters())), RESIDENT, another)


def test_several_optimizers_and_options_that_cannot_be_are_refused_by_name() -> None:
    wrong: Sequence[tuple[Any, type[Exception], str]] = [
        (lambda model: (SGD(model.parameters()), SGD(model.parameters())), TypeError, "tuple of 2.*into one"),
        (lambda model: AdamW(model.parameters(), differentiable=True), ValueError, "leave differentiable out"),
        (lambda model: AdamW(model.parameters(), capturable=True), ValueError, "leave capturable out"),
    ]
    for optimizer, error, message in wrong:
        with pytest.raises(error, match=message):
            started(job_for(optimizer), hand_written(job_for(sgd)))


def sgd(model: nn.Module) -> Optimizer:
    return SGD(model.parameters(), lr=0.1)


def test_a_tensor_learning_rate_follows_its_scheduler_everywhere() -> None:
    job = job_for(
        lambda model: AdamW(model.parameters(), lr=torch.tensor(1e-2)),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
    )
    for placement in PLACEMENTS.values():
        compare(job, placement)


class Named(Optimizer):
    """Momentum and a mean, under names that the engine may want for itself."""

    def __init__(self, parameters: Any, lr: float = 0.05) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    state = self.state[parameter]
                    state["low"] = parameter.grad / 2 + state.get("low", torch.zeros_like(parameter)) / 2
                    state["weights"] = parameter / 4 + state.get("weights", parameter.clone()) * 3 / 4
                    parameter += (state["weights"] - parameter) / 8 - group["lr"] * state["low"]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_state_may_have_the_names_of_what_the_engine_has_beside_it(precision: Any) -> None:
    job = job_for(lambda model: Named(model.parameters()), precision=precision)
    for placement in (*PLACEMENTS.values(), AWAY_STREAMED, AWAY_ON_DISK):
        compare(job, placement)
