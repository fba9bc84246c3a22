"""Optimizers, what is hung on them, and schedulers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import lr_scheduler

import anyfit

from ..case import Chain, Refused, Trial, adamw, hostile, sgd, squared, trial, vectors

Make = Callable[[nn.Module], torch.optim.Optimizer]


CAPTURABLE = Refused(r"(?is)capturable")  # on a CPU torch refuses it too
DIFFERENTIABLE = Refused(r"(?is)differentiable")  # torch refuses to step leaves in place


# Of plans by hand that step chunks apart.
TOGETHER = Refused(r"(?is)have to be stepped together|are? stepped together")
NOT_TRAINED = Refused(r"(?is)add_param_group.*start")
KEPT_IN_CHUNKS = Refused(r"(?is)run\.optimizer\.state is not kept there")


def optimized(optimizer: Make, model: Callable[[], nn.Module] = Chain, **options: Any) -> Trial:
    return trial(model, squared, vectors(), optimizer, **options)


@hostile(also=("resumed", "ranks"))
def sgd_with_nesterov() -> Trial:
    return optimized(lambda m: torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01))


@hostile(also=("resumed", "ranks"))
def adam_with_amsgrad() -> Trial:
    return optimized(lambda m: torch.optim.Adam(m.parameters(), lr=0.01, amsgrad=True))


@hostile(also=("resumed",))
def adamw_fused() -> Trial:
    return optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, fused=True))


@hostile()
def adamw_foreach() -> Trial:
    return optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, foreach=True))


@hostile(ample=CAPTURABLE, tight=CAPTURABLE, recomputed=CAPTURABLE, host=CAPTURABLE, cut=CAPTURABLE)
def adamw_capturable() -> Trial:
    return optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, capturable=True))


@hostile(ample=DIFFERENTIABLE, tight=DIFFERENTIABLE, recomputed=DIFFERENTIABLE, host=DIFFERENTIABLE, cut=DIFFERENTIABLE)
def adamw_differentiable() -> Trial:
    return optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, differentiable=True))


@hostile()
def adamw_that_maximizes() -> Trial:
    return trial(
        Chain,
        lambda model, batch: -squared(model, batch),
        vectors(),
        lambda m: torch.optim.AdamW(m.parameters(), lr=0.01, maximize=True),
    )


@hostile(also=("resumed",))
def learning_rate_as_a_tensor() -> Trial:
    return optimized(lambda m: torch.optim.AdamW(m.parameters(), lr=torch.tensor(0.01)))


@hostile(also=("resumed", "ranks"))
def adafactor() -> Trial:
    return optimized(lambda m: torch.optim.Adafactor(m.parameters(), lr=0.02))


@hostile(also=("resumed",))
def adagrad() -> Trial:
    return optimized(lambda m: torch.optim.Adagrad(m.parameters(), lr=0.02, initial_accumulator_value=0.1))


@hostile(also=("resumed",))
def rmsprop_centered() -> Trial:
    return optimized(lambda m: torch.optim.RMSprop(m.parameters(), lr=0.002, momentum=0.5, centered=True))


@hostile(also=("resumed",))
def nadam() -> Trial:
    return optimized(lambda m: torch.optim.NAdam(m.parameters(), lr=0.01))


@hostile(also=("resumed",))
def radam() -> Trial:
    return optimized(lambda m: torch.optim.RAdam(m.parameters(), lr=0.01))


@hostile(also=("resumed",))
def rprop() -> Trial:
    return optimized(lambda m: torch.optim.Rprop(m.parameters(), lr=0.001))


@hostile(also=("resumed",))
def asgd() -> Trial:
    return optimized(lambda m: torch.optim.ASGD(m.parameters(), lr=0.02, t0=3))


@hostile(also=("resumed",))
def adamax() -> Trial:
    return optimized(lambda m: torch.optim.Adamax(m.parameters(), lr=0.01))


@hostile(also=("resumed",))
def adadelta() -> Trial:
    return optimized(lambda m: torch.optim.Adadelta(m.parameters(), lr=1.0))


@hostile(tolerance_when_cut=1e-2)
def muon() -> Trial:
    """Of whole matrices."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([each for each in model.parameters() if each.dim() == 2], lr=0.02)

    return optimized(make)


CLOSURE = Refused(r"(?is)LBFGS.*closure")


@hostile(ample=CLOSURE, host=CLOSURE, without=("tight", "recomputed", "cut"))
def lbfgs() -> Trial:
    return optimized(lambda m: torch.optim.LBFGS(m.parameters()))


SPARSE = Refused(r"(?is)sparse")


@hostile(host=SPARSE)
def sparse_adam() -> Trial:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(20, 8, sparse=True)

        def forward(self, x: Any) -> Any:
            return self.embed(x.abs().mul(7).long() % 20).mean(1)

    return trial(Words, squared, vectors(), lambda m: torch.optim.SparseAdam(m.parameters(), lr=0.01))


@hostile(also=("resumed",))
def learning_rates_by_layer() -> Trial:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        groups = [
            {"params": list(child.parameters()), "lr": 0.01 * 0.7**depth, "weight_decay": 0.1 * depth}
            for depth, child in enumerate(model.children())
        ]
        return torch.optim.AdamW(groups)

    return optimized(make)


@hostile(also=("resumed",))
def some_parameters_only() -> Trial:
    return optimized(lambda m: torch.optim.SGD([each for each in m.parameters() if each.dim() > 1], lr=0.05, momentum=0.9))


class Lion(torch.optim.Optimizer):
    """Own: sign of a momentum, and a number of steps a parameter."""

    def __init__(self, parameters: Any, lr: float = 0.002) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"], state["step"] = torch.zeros_like(parameter), 0
                state["step"] += 1
                update = state["momentum"].mul(0.9).add(parameter.grad, alpha=0.1).sign()
                parameter.mul_(1 - group["lr"] * 0.1).add_(update, alpha=-group["lr"] / state["step"] ** 0.1)
                state["momentum"].mul_(0.99).add_(parameter.grad, alpha=0.01)


@hostile(also=("resumed", "ranks"))
def own_lion() -> Trial:
    return optimized(lambda m: Lion(m.parameters()))


@hostile(also=("resumed",), host=TOGETHER)
def a_counter_on_the_optimizer() -> Trial:
    class Counting(torch.optim.SGD):
        count = 0

        def step(self, closure: Any = None) -> Any:
            self.count += 1
            for group in self.param_groups:
                group["lr"] = 0.05 / self.count
            return super().step(closure)

    return optimized(lambda m: Counting(m.parameters(), lr=0.05))


@hostile(host=TOGETHER)
def a_norm_across_parameters() -> Trial:
    """LAMB and LARS take one a parameter; this one takes one of all."""

    class Normed(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            own = [each for group in self.param_groups for each in group["params"] if each.grad is not None]
            norm = torch.stack([each.grad.norm() for each in own]).norm()
            for each in own:
                each.sub_(each.grad / (norm + 1e-6), alpha=0.05)

    return optimized(lambda m: Normed(m.parameters(), lr=0.05))


@hostile(also=("ranks",))
def a_norm_of_every_parameter() -> Trial:
    class Lars(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        rate = (each.norm() + 1e-3) / (each.grad.norm() + 1e-3)
                        each.sub_(each.grad * rate, alpha=0.05)

    return optimized(lambda m: Lars(m.parameters(), lr=0.05))


@hostile(host=TOGETHER)
def noise_in_the_update() -> Trial:
    """Langevin dynamics: draws random numbers in the step."""

    class Langevin(torch.optim.SGD):
        @torch.no_grad()
        def step(self, closure: Any = None) -> Any:
            super().step(closure)
            for group in self.param_groups:
                for each in group["params"]:
                    each.add_(torch.randn_like(each), alpha=1e-3)

    return optimized(lambda m: Langevin(m.parameters(), lr=0.05))


@hostile(host=TOGETHER)
def step_hooks() -> Trial:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.05)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            for group in optimizer.param_groups:
                for each in group["params"]:
                    if each.grad is not None:
                        each.grad.mul_(0.5)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            with torch.no_grad():
                for group in optimizer.param_groups:
                    for each in group["params"]:
                        each.clamp_(-0.4, 0.4)

        made.register_step_pre_hook(before)
        made.register_step_post_hook(after)
        return made

    return optimized(make)


@hostile(host=TOGETHER)
def a_step_hook_that_counts() -> Trial:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.AdamW(model.parameters(), lr=0.01)
        made.calls = 0  # type: ignore[attr-defined]

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            optimizer.calls += 1
            for group in optimizer.param_groups:
                group["lr"] = 0.01 * 0.9**optimizer.calls

        made.register_step_post_hook(after)
        return made

    return optimized(make)


@hostile(host=TOGETHER)
def a_replaced_step() -> Trial:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        made = torch.optim.SGD(model.parameters(), lr=0.05)
        usual = made.step

        def step(closure: Any = None) -> Any:
            with torch.no_grad():
                for group in made.param_groups:
                    for each in group["params"]:
                        if each.grad is not None:
                            each.grad.sub_(each.grad.mean(0, keepdim=True))  # centralised gradients
            return usual()

        made.step = step  # type: ignore[method-assign]
        return made

    return optimized(make)


@hostile()
def centralised_gradients_in_a_subclass() -> Trial:
    class Centred(torch.optim.AdamW):
        def step(self, closure: Any = None) -> Any:
            for group in self.param_groups:
                for each in group["params"]:
                    if each.grad is not None and each.grad.dim() > 1:
                        each.grad.sub_(each.grad.mean(tuple(range(1, each.grad.dim())), keepdim=True))
            return super().step(closure)

    return optimized(lambda m: Centred(m.parameters(), lr=0.01))


@hostile(host=TOGETHER)
def lookahead_around_another_optimizer() -> Trial:
    class Lookahead(torch.optim.Optimizer):
        def __init__(self, base: torch.optim.Optimizer) -> None:
            self.base, self.count = base, 0
            super().__init__(base.param_groups, {})
            self.slow = [each.detach().clone() for group in base.param_groups for each in group["params"]]

        def step(self, closure: Any = None) -> None:  # type: ignore[override]
            self.base.step()
            self.count += 1
            if self.count % 4 == 0:
                own = (each for group in self.base.param_groups for each in group["params"])
                with torch.no_grad():
                    for slow, each in zip(self.slow, own, strict=True):
                        slow.lerp_(each, 0.5)
                        each.copy_(slow)

    return optimized(lambda m: Lookahead(sgd(m)))


@hostile()
def sharpness_kept_in_the_optimizer() -> Trial:
    """Reads the parameters' names: weight decay by hand, on some."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.named_parameters(), lr=0.01, weight_decay=0.1)

    return optimized(make)


def adding_groups(run_optimizer: Any, model: Any) -> None:
    run_optimizer.add_param_group({"params": list(model.head.parameters()), "lr": 0.02})


@hostile(without=("cut",), ample=NOT_TRAINED, tight=NOT_TRAINED, recomputed=NOT_TRAINED, host=NOT_TRAINED)
def a_group_added_after_the_start() -> Trial:
    def make(model: Any) -> torch.optim.Optimizer:
        own = {id(each) for each in model.head.parameters()}
        return torch.optim.SGD([each for each in model.parameters() if id(each) not in own], lr=0.05)

    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses = [float(run.step(batch)) for batch in batches[:4]]
        adding_groups(run.optimizer, run.model)
        return losses + [float(run.step(batch)) for batch in batches[4:]]

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for index, batch in enumerate(batches):
            if index == 4:
                adding_groups(optimizer, model)
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return optimized(make, train=train, plainly=plainly)


@hostile(without=("cut",), tight=KEPT_IN_CHUNKS, host=KEPT_IN_CHUNKS)
def state_that_is_cleared() -> Trial:
    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            if index == 5:
                run.optimizer.state.clear()
            losses.append(float(run.step(batch)))
        return losses

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for index, batch in enumerate(batches):
            if index == 5:
                optimizer.state.clear()
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return optimized(adamw, train=train, plainly=plainly)


@hostile(without=("cut",))
def a_learning_rate_set_by_hand() -> Trial:
    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            run.optimizer.param_groups[0]["lr"] = 0.05 / (1 + index)
            losses.append(float(run.step(batch)))
        return losses

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for index, batch in enumerate(batches):
            optimizer.param_groups[0]["lr"] = 0.05 / (1 + index)
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return optimized(sgd, train=train, plainly=plainly)


@hostile(also=("resumed",))
def one_cycle() -> Trial:
    return optimized(adamw, scheduler=lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.02, total_steps=20))


@hostile(also=("resumed",))
def schedulers_in_sequence() -> Trial:
    def make(optimizer: Any) -> Any:
        warm = lr_scheduler.LinearLR(optimizer, 0.1, total_iters=4)
        return lr_scheduler.SequentialLR(optimizer, [warm, lr_scheduler.CosineAnnealingLR(optimizer, 8)], milestones=[4])

    return optimized(sgd, scheduler=make)


@hostile(also=("resumed",))
def a_scheduler_of_lambdas_by_group() -> Trial:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD([{"params": list(child.parameters())} for child in model.children()], lr=0.05)

    return optimized(make, scheduler=lambda o: lr_scheduler.LambdaLR(o, [lambda e: 0.9**e, lambda e: 1.0, lambda e: 1 / (1 + e)]))


@hostile(also=("resumed",))
def warm_restarts_and_cyclic_momentum() -> Trial:
    return optimized(
        sgd,
        scheduler=lambda o: lr_scheduler.CyclicLR(o, base_lr=0.01, max_lr=0.05, step_size_up=3, cycle_momentum=True),
    )


PLATEAU = Refused(r"(?is)ReduceLROnPlateau.*run\.optimizer")


@hostile(ample=PLATEAU, host=PLATEAU, without=("tight", "recomputed", "cut"))
def reduce_on_plateau() -> Trial:
    return optimized(sgd, scheduler=lambda o: lr_scheduler.ReduceLROnPlateau(o))


@hostile(also=("resumed", "ranks"))
def clipping_that_fires() -> Trial:
    return optimized(adamw, clip_norm=0.05)


@hostile()
def clipping_that_seldom_fires() -> Trial:
    return optimized(sgd, clip_norm=1.0)


TWO = Refused(r"(?is)optimizer")


@hostile(ample=TWO, without=("tight", "recomputed", "host", "cut"))
def two_optimizers() -> Trial:
    return optimized(lambda m: [sgd(m), adamw(m)])  # type: ignore[arg-type,return-value]


@hostile(without=("cut",))
def weights_clamped_between_steps() -> Trial:
    """Wasserstein GANs do that, after each step."""

    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses = []
        for batch in batches:
            losses.append(float(run.step(batch)))
            with run.weights(), torch.no_grad():
                for each in run.model.parameters():
                    each.clamp_(-0.2, 0.2)
        return losses

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for batch in batches:
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            with torch.no_grad():
                for each in model.parameters():
                    each.clamp_(-0.2, 0.2)
            losses.append(float(loss.detach()))
        return losses

    return optimized(sgd, train=train, plainly=plainly)


@hostile(without=("cut",))
def exponential_average_of_the_weights_beside_the_run() -> Trial:
    """Read after each step; what it averages to is shown as the last losses."""

    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses, kept = [], {}
        for batch in batches:
            losses.append(float(run.step(batch)))
            for name, tensor in run.state_dict().items():
                kept[name] = tensor.clone() if name not in kept else kept[name].lerp(tensor, 0.1)
        return losses + [float(tensor.norm()) for tensor in kept.values()]

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses, kept = job.optimizer(model), [], {}
        for batch in batches:
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
            for name, tensor in model.state_dict().items():
                kept[name] = tensor.clone() if name not in kept else kept[name].lerp(tensor, 0.1)
        return losses + [float(tensor.norm()) for tensor in kept.values()]

    return optimized(sgd, train=train, plainly=plainly)
