"""Lightning Fabric on anyfit: a strategy for `Fabric(strategy=...)`; the loop stays as it is.

    strategy = AnyfitStrategy(loss=loss, sample=batch, batch_size=64)      the loss and a batch are what the plan is made by
    fabric = Fabric(devices=2, strategy=strategy)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)

    Fabric                          here
    fabric.setup                    anyfit.start(job): the user's own model and optimizer are the job's
    model(x)                        inside run.forward()
    fabric.backward(loss)           run.accept(loss, samples=...), run.backward(loss)
    fabric.clip_gradients           run.update(), which clips as Job(clip_norm=) says; the step after it has nothing left to do
    optimizer.step()                run.update()
    fabric.save                     weights as run.state_dict() has them; the optimizer's state is saved by strategy.run.save

Losses mean what they do in Fabric: those of a step add up, and the mean over ranks is taken.
"""

from __future__ import annotations

import copy
import os
from collections import defaultdict
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from lightning_fabric.plugins.precision import Precision
from lightning_fabric.strategies.ddp import DDPStrategy
from torch import Tensor, nn
from torch.optim import Optimizer

import anyfit


class AnyfitStrategy(DDPStrategy):
    """Fabric's training goes through a run of anyfit.

    loss          (model, batch) -> what the loop computes, as Job(loss=); the plan is made by it
    sample        a batch like those to come, of one rank and one backward
    batch_size    samples a step, over all ranks and all backwards
    backwards     calls of fabric.backward for one optimizer.step: more than 1 where the loop accumulates gradients
    clip_norm     what fabric.clip_gradients(max_norm=) is called with, where it is
    plan          a plan to start with; None makes one
    machine       what to plan for; None measures the one at hand
    options       any other argument of Job, such as precision ("fp32" unless it is given)

    `strategy.run` is the run, once fabric.setup was called.
    """

    def __init__(
        self,
        loss: Callable[[nn.Module, Any], Any],
        sample: Any,
        batch_size: int,
        *,
        backwards: int = 1,
        clip_norm: float | None = None,
        plan: anyfit.Plan | None = None,
        machine: anyfit.Machine | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        if not isinstance(backwards, int) or backwards < 1:
            raise ValueError(f"AnyfitStrategy(backwards={backwards!r}): calls of fabric.backward a step, at least 1")
        self._backward_sync_control = _NoSync()  # type: ignore[assignment]
        self._job = {
            "loss": loss,
            "sample": sample,
            "batch_size": batch_size,
            "clip_norm": clip_norm,
            "precision": "fp32",
        } | options
        if plan is not None and plan.replicas < plan.ranks:
            axis, length = next((axis, length) for axis, length in plan.mesh.items() if axis != "data" and length > 1)
            raise ValueError(
                f"the plan has a {axis} axis of {length}, whose ranks see the same samples; Fabric gives each rank others; plan "
                f"without one: anyfit plan --mesh {axis}=1"
            )
        self._backwards, self._clip_norm, self._plan, self._machine = backwards, clip_norm, plan, machine
        self._run: anyfit.Run | None = None
        self._is_updated = False  # by clipping, before the optimizer's own step

    @property
    def run(self) -> anyfit.Run:
        if self._run is None:
            raise RuntimeError("there is no run before fabric.setup(model, optimizer)")
        return self._run

    # ------------------------------------------------------------------ set-up

    def setup_environment(self) -> None:
        super().setup_environment()
        ranks = {"RANK": self.global_rank, "LOCAL_RANK": self.local_rank, "WORLD_SIZE": self.world_size}
        os.environ.update(
            {name: str(value) for name, value in ranks.items()}
        )  # as torchrun has them: Fabric's own lack the first

    def module_to_device(self, module: nn.Module) -> None:
        """Not here: the plan says what lies where."""

    def setup_module(self, module: nn.Module) -> Any:
        raise RuntimeError("anyfit places a model with its optimizer: model, optimizer = fabric.setup(model, optimizer)")

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: list[Optimizer], scheduler: Any = None) -> Any:
        if self._run is not None:
            raise RuntimeError("AnyfitStrategy trains one model; make another Fabric for another one")
        if len(optimizers) != 1:
            raise ValueError(f"a run steps one optimizer, got {len(optimizers)}; put the parameters of all into groups of one")
        if type(self.precision) is not Precision and self.precision.precision != "32-true":
            raise ValueError(
                f"Fabric(precision={self.precision.precision!r}) is not for AnyfitStrategy: leave it out, and give "
                "AnyfitStrategy(precision='bf16'), which keeps exact fp32 masters"
            )
        job = anyfit.Job(model=module, optimizer=_SameOptimizer(module, optimizers[0]), **self._job)
        if job.batch_size % (self._backwards * self.world_size):
            raise ValueError(
                f"batch_size={job.batch_size} over {self.world_size} ranks is not a multiple of backwards={self._backwards}"
            )
        own_samples = {"tensor": 1} if self._plan is None else None  # for each rank, as Fabric gives them
        self._run = anyfit.start(job, self._plan, self._machine, mesh=own_samples)
        return _InForward(self._run), optimizers, scheduler

    # ------------------------------------------------------------------ a step

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **options: Any) -> None:
        if args or options:
            raise ValueError("fabric.backward takes the loss alone: a run goes backward through it once")
        run = self.run
        self._is_updated = False
        loss = tensor * self._backwards if self._backwards > 1 else tensor  # of which a run takes the mean, where Fabric adds
        run.accept(loss, samples=run.plan.share // self._backwards)
        run.backward(loss)

    def optimizer_step(self, optimizer: Any, **options: Any) -> None:
        if options:
            raise ValueError("optimizer.step() takes no closure: a run steps once for the losses that went backward")
        if not self._is_updated:
            self.run.update()
        self._is_updated = False

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        """The norm, with the update made: it clips by the same norm, and nothing comes between it and optimizer.step()."""
        if norm_type != 2.0 or max_norm != self._clip_norm:
            raise ValueError(
                f"fabric.clip_gradients(max_norm={max_norm}, norm_type={norm_type}): a run clips the 2-norm to what is known "
                f"before it starts; AnyfitStrategy(clip_norm={max_norm})"
            )
        self.run.update()
        self._is_updated = True
        norm = torch.tensor(self.run.metrics.gradient_norm)
        if error_if_nonfinite and not norm.isfinite():
            raise RuntimeError(f"the norm of the gradients is {norm}; the step was left out; error_if_nonfinite=False goes on")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        raise ValueError("a run clips gradients by their norm: fabric.clip_gradients(model, optimizer, max_norm=...)")

    # ------------------------------------------------------------------ weights

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self.run.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        with self.run.weights() as model:
            model.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        raise ValueError(
            "the optimizer's state lies where the plan has it: strategy.run.save(folder) saves all of a run, and "
            "strategy.run.resume(folder) goes on; leave the optimizer out of fabric.save"
        )

    def teardown(self) -> None:
        if self._run is not None:
            self._run.close()
        super().teardown()


class _InForward(nn.Module):
    """What Fabric calls in the model's place: the model, inside of run.forward()."""

    def __init__(self, run: anyfit.Run) -> None:
        super().__init__()
        self.model, self._run = run.model, run

    def forward(self, *args: Any, **options: Any) -> Any:
        args, options = self._run.job.prepare((args, options), self._run.device)
        with self._run.forward() as model:
            return model(*args, **options)


class _SameOptimizer:
    """`Job(optimizer=)`: the user's own for the user's own model, which schedulers may hold already; its like for others."""

    def __init__(self, module: nn.Module, optimizer: Optimizer) -> None:
        if optimizer.state:
            raise ValueError(
                "the optimizer has stepped before fabric.setup; make a fresh one, or strategy.run.resume a checkpoint"
            )
        self._optimizer, self._names = optimizer, {id(each): name for name, each in module.named_parameters()}
        if any(id(each) not in self._names for group in optimizer.param_groups for each in group["params"]):
            raise ValueError("the optimizer holds parameters that are not of this model: make it of model.parameters()")

    def __call__(self, model: nn.Module) -> Optimizer:
        parameters = dict(model.named_parameters())
        if all(id(each) in self._names for each in parameters.values()):
            return self._optimizer
        made = copy.copy(self._optimizer)  # tracing gives the model other parameters
        made.state = defaultdict(dict)
        made.param_groups = [
            group | {"params": [parameters[self._names[id(each)]] for each in group["params"]]}
            for group in self._optimizer.param_groups
        ]
        return made


class _NoSync:
    """Ranks exchange gradients as the plan says, whatever the loop asks for."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        return nullcontext()
