"""The one visible order in which a plan becomes a placed model: build, optimizer, layout, chunks, gradients, updates."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from anyfit.values.job import Job
from anyfit.values.layout import Placeable, lay_out
from anyfit.values.plan import Plan

from .chunks import ModelState
from .gradients import Gradients
from .updates import Updates


@dataclass(frozen=True)
class Placed:
    """A model ready to train, and everything that holds its state."""

    model: nn.Module
    state: ModelState
    gradients: Gradients
    updates: Updates
    device: torch.device

    @property
    def bytes(self) -> int:
        """Held between steps on the device."""
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        return self.state.bytes + self.gradients.bytes + self.updates.bytes + buffers


def place(job: Job, plan: Plan, model: nn.Module, device: torch.device) -> Placed:
    """Moves the state of a real model where the plan wants it. The model object stays the user's own."""
    dtypes = job.dtypes(model)
    optimizer, group_of = job.build_optimizer(model)
    layout = lay_out(
        (
            Placeable(
                name=name,
                shape=tuple(parameter.shape),
                dtype=str(dtypes[name]).removeprefix("torch."),
                element_bytes=dtypes[name].itemsize,
                trainable=parameter.requires_grad,
                group=group_of.get(id(parameter), -1),
            )
            for name, parameter in model.named_parameters()
        ),
        plan.chunk_bytes,
    )
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    state = ModelState(model, layout, device)
    gradients = Gradients(state, plan.accumulation)
    return Placed(model, state, gradients, Updates(optimizer, state), device)
