"""What the ranks of a test do: train a case, which is all names and numbers, and so can be sent to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

import anyfit
from anyfit.placing import activations, place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from anyfit.values.layout import Chunk, lay_out
from anyfit.values.plan import Activations, Placement, Plan
from tests.models import (
    Branching,
    Convolutional,
    Experts,
    Scaled,
    Tangled,
    byte_batches,
    image_batches,
    image_loss,
    next_byte_loss,
    padded_loss,
    tiny_gpt,
)
from tests.plans import hand_written, placed_of, random_delays

from .pool import HANG_SECONDS

ROWS, STEPS = 12, 20  # rows divide by 2, 3 and 4 ranks

# By model, the blocks whose activations a plan may choose for.
MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "gpt": (tiny_gpt, ["blocks.0", "blocks.1"]),
    "tangled": (Tangled, ["twice"]),
    "scaled": (Scaled, ["twice"]),
    "convolutional": (Convolutional, ["layers.0", "layers.1"]),
    "experts": (Experts, ["experts.1"]),
    "branching": (Branching, ["left", "after"]),
}


class Lopsided(Branching):
    """One way is wider than the other."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(16, 16, bias=False)
        self.right = nn.Sequential(nn.Linear(16, 64), nn.Linear(64, 16))


MODELS["lopsided"] = (Lopsided, [])
GO_THEIR_OWN_WAYS = ("experts", "branching", "lopsided")  # by what is in a rank's batch


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3}], lr=1e-3)


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": two_groups,
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3),
}
MORE_OPTIMIZERS = OPTIMIZERS | {"adafactor": lambda model: torch.optim.Adafactor(model.parameters())}


@dataclass(frozen=True)
class Case:
    model: str = "gpt"
    optimizer: str = "adamw"
    precision: Literal["fp32", "bf16"] = "fp32"
    clip_norm: float | None = None
    placements: tuple[Placement, ...] = (Placement(),)
    chunk_bytes: int = 8192
    slots: int = 8
    prefetch: int = 2
    accumulation: int = 1
    reduction: Literal["fp32", "bf16"] = "fp32"
    activations: Mapping[str, Activations] = field(default_factory=dict)
    compiled: tuple[str, ...] = ()
    delays: int | None = None  # a seed
    is_padded: bool = False  # the loss is a sum and its weight
    device_bytes: int = 2**33
    nudge: float = 0.0  # by which the weights are off at the start, as a share of themselves

    def _nudged(self) -> nn.Module:
        model: nn.Module = MODELS[self.model][0]()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1 + self.nudge)
        return model

    @property
    def job(self) -> anyfit.Job:
        has_images = self.model == "convolutional"
        return anyfit.Job(
            model=self._nudged if self.nudge else MODELS[self.model][0],
            loss=image_loss if has_images else padded_loss if self.is_padded else next_byte_loss,
            optimizer=MORE_OPTIMIZERS[self.optimizer],
            sample=self.batches(1)[0],
            batch_size=ROWS,
            precision=self.precision,
            clip_norm=self.clip_norm,
        )

    def batches(self, count: int = STEPS) -> list[Any]:
        """Of all ranks together."""
        if self.model == "convolutional":
            return image_batches(count, ROWS)
        batches = byte_batches(count, ROWS)
        if self.is_padded:
            for batch in batches:
                for row, ids in enumerate(batch):
                    ids[2 + row :] = 0  # so that ranks have very different weights
        return batches

    def plan(self, ranks: int) -> Plan:
        return hand_written(
            self.job,
            *self.placements,
            chunk_bytes=self.chunk_bytes,
            slots=self.slots,
            prefetch=self.prefetch,
            accumulation=self.accumulation,
            activations=self.activations,
            compiled=self.compiled,
            device_bytes=self.device_bytes,
            ranks=ranks,
            reduction=self.reduction,
        )

    def layout(self, ranks: int) -> tuple[Chunk, ...]:
        job = self.job
        model = job.build()
        _, group_of = job.build_optimizer(model)
        return lay_out(job.placeables(model, group_of), self.chunk_bytes, ranks)


@dataclass(frozen=True)
class Trained:
    """What a rank has to tell of its training."""

    losses: list[float]
    weights: dict[str, Tensor]  # of all parameters
    held: list[int]  # on the device after each step, in bytes
    host_bytes: int  # before the first step
    peak_bytes: int
    skipped: int


def part_of(batch: Any, index: int, count: int) -> Any:
    """A rank's part of a batch."""
    if isinstance(batch, dict):
        return {key: part_of(value, index, count) for key, value in batch.items()}
    return batch.chunk(count)[index]


def started(case: Case) -> Run:
    ranks = Ranks.of_process_group(HANG_SECONDS)
    job, plan = case.job, case.plan(ranks.count)
    delay = None if case.delays is None else random_delays(case.delays * 10 + ranks.index)
    torch.manual_seed(job.seed + ranks.index)  # rank 0's weights are everybody's
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), delay, ranks=ranks))


def train(case: Case, steps: int = STEPS) -> Trained:
    before, activations.LEAST_BYTES = activations.LEAST_BYTES, 256
    try:
        with started(case) as run:
            losses, held, host_bytes = [], [], placed_of(run).host_bytes
            for batch in case.batches(steps):
                losses.append(float(run.step(part_of(batch, run.ranks.index, run.ranks.count))))
                held.append(placed_of(run).device_bytes)
            return told(run, losses, held, host_bytes)
    finally:
        activations.LEAST_BYTES = before


def told(run: Run, losses: list[float], held: list[int], host_bytes: int) -> Trained:
    names = dict(run.model.named_parameters(remove_duplicate=False))
    weights = {name: tensor for name, tensor in run.state_dict().items() if name in names}
    return Trained(losses, weights, held, host_bytes, run.metrics.peak_bytes["device"], run.skipped)
