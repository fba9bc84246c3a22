"""What planning could leave behind: random numbers drawn, files written, counters moved."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..case import Chain, Trial, hostile, squared, trial, vectors
from .losses import NO_MEAN


@hostile(cut=NO_MEAN)
def pythons_random_in_the_loss() -> Trial:
    """Mixup, with a share that Python draws."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squared(model, batch) * random.uniform(0.5, 1.5)

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def numpys_random_in_the_loss() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        share = float(np.random.beta(0.4, 0.4))
        mixed = share * batch["x"] + (1 - share) * batch["x"].flip(0)
        return (model(mixed) - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile(draws=True)
def torchs_random_in_the_loss() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"] + 0.1 * torch.randn_like(batch["x"])) - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def a_counter_in_the_loss() -> Trial:
    """Anneals a weight by how often it was called."""
    calls = [0]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        calls[0] += 1
        return squared(model, batch) + min(1.0, calls[0] / 10) * 0.1 * model(batch["x"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def a_loss_that_is_an_object() -> Trial:
    class Annealed:
        def __init__(self) -> None:
            self.calls = 0

        def __call__(self, model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
            self.calls += 1
            return squared(model, batch) * (1 + 0.1 * self.calls)

    return trial(Chain, Annealed(), vectors())


@hostile(cut=NO_MEAN)
def a_loss_with_a_generator_of_its_own() -> Trial:
    generator = random.Random(5)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squared(model, batch) * generator.uniform(0.5, 1.5)

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def a_loss_that_writes_a_file() -> Trial:
    """And reads how many lines are there."""
    folder = tempfile.TemporaryDirectory()
    log = Path(folder.name) / "log"

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        assert folder
        with log.open("a") as file:
            file.write("called\n")
        return squared(model, batch) * (1 + 0.05 * len(log.read_text().splitlines()))

    return trial(Chain, loss, vectors())


@hostile()
def a_model_that_draws_by_python_when_it_is_made() -> Trial:
    def make() -> nn.Module:
        model = Chain()
        with torch.no_grad():
            for each in model.parameters():
                each.mul_(random.uniform(0.8, 1.2))
                each.add_(float(np.random.randn()) * 1e-2)
        return model

    return trial(make, squared, vectors())


@hostile()
def a_factory_that_counts_its_calls() -> Trial:
    """Every model it makes is named after the number; the first is the one that is trained plainly."""
    made: list[int] = []

    def make() -> nn.Module:
        made.append(len(made))
        return Chain(count=3)

    return trial(make, squared, vectors())


@hostile()
def an_optimizer_that_draws_when_it_is_made() -> Trial:
    def make(model: nn.Module) -> Any:
        return torch.optim.SGD(model.parameters(), lr=0.05 * random.uniform(0.9, 1.1))

    return trial(Chain, squared, vectors(), make)


@hostile()
def an_anomaly_mode_and_a_default_dtype() -> Trial:
    """Global settings of torch, set and put back in the loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autograd.set_detect_anomaly(False), torch.random.fork_rng():
            torch.manual_seed(1)
            return squared(model, batch) + 0.0 * torch.randn(()).abs()

    return trial(Chain, loss, vectors())


@hostile()
def a_seed_set_in_the_loss() -> Trial:
    """The same noise in every step."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        torch.manual_seed(4)
        return (model(batch["x"]) - batch["y"] + 0.1 * torch.randn(8)).square().mean()

    return trial(Chain, loss, vectors())


@hostile()
def hidden_state_in_a_thread_local_object() -> Trial:
    """A context that the loss sets and the model reads."""
    import threading

    told = threading.local()

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * told.scale

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        told.scale = 0.7
        try:
            return squared(model, batch)
        finally:
            told.scale = 0.0

    return trial(Net, loss, vectors())
