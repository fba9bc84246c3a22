"""The one visible order in which a plan becomes a placed model: build, optimizer, layout, chunks, residency, gradients, updates,
activations."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from anyfit.values.job import Job
from anyfit.values.layout import Placeable, lay_out
from anyfit.values.plan import Placement, Plan
from anyfit.values.record import nearest

from .activations import Activations
from .chunks import ModelState
from .gradients import Gradients
from .lanes import Lanes
from .residency import Residency
from .tiers import HostSlabs, let_segments_grow
from .updates import Updates


@dataclass(frozen=True)
class Placed:
    """A model ready to train, and everything that holds its state."""

    model: nn.Module
    state: ModelState
    residency: Residency
    gradients: Gradients
    updates: Updates
    activations: Activations
    lanes: Lanes
    slabs: HostSlabs
    device: torch.device

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around every forward whose backward will come."""
        with self.lanes.computing("forward"), self.residency.watching(), self.activations.watching():
            yield

    @property
    def device_bytes(self) -> int:
        """Held between steps on the device."""
        buffers = sum(buffer.nbytes for buffer in self.model.buffers())
        parts = (self.state, self.residency, self.gradients, self.updates)
        return buffers + sum(part.device_bytes for part in parts)

    @property
    def host_bytes(self) -> int:
        return self.slabs.bytes

    def close(self) -> None:
        """The model is plain again, with its weights; no thread is left."""
        try:
            self.residency.close()
        finally:
            self.gradients.close()
            self.activations.close()
            self.lanes.close()
            self.slabs.close()


def place(job: Job, plan: Plan, model: nn.Module, device: torch.device, delay: Callable[[], None] | None = None) -> Placed:
    """Moves the state of a real model where the plan wants it. The model object stays the user's own.

    `delay` is called before every copy and update on a lane: tests give one that waits for a random time.
    """
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
    placements = plan.chunks or (Placement(),)
    if len(placements) == 1:
        placements *= len(layout)
    if len(placements) != len(layout):
        raise ValueError(
            f"the plan places {len(placements)} chunks, and this model makes {len(layout)} of about {plan.chunk_bytes} bytes"
        )
    if plan.chunks and device.type == "cuda":
        let_segments_grow()
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = buffer.to(device)
    lanes = Lanes(device, delay)
    slabs = HostSlabs(device, plan.limit_bytes["host"])
    try:
        state = ModelState(model, layout, placements, device, slabs)
        residency = Residency(state, lanes, plan.slots, plan.prefetch)
        stage = plan.stages[0]
        undo = [_compile(model, block) for block in stage.compiled]
        residency.watch_compiled(model)
        residency.undo += undo
        gradients = Gradients(state, lanes, slabs, plan.accumulation, residency.moved_gradients)
        updates = Updates(optimizer, state, gradients, residency, lanes, slabs)
        activations = Activations(model, stage.activations, lanes, slabs, residency)
        slabs.prepared()
    except BaseException:
        lanes.close()
        slabs.close()
        raise
    return Placed(model, state, residency, gradients, updates, activations, lanes, slabs, device)


def _compile(model: nn.Module, block: str) -> Callable[[], None]:
    """Compiles a block; what undoes it."""
    modules: dict[str, Any] = dict(model.named_modules())
    if block not in modules:
        raise ValueError(f"the plan compiles block {block!r}, and the model has none" + nearest(block, list(modules)))
    module, own = modules[block], vars(modules[block]).get("forward")
    module.forward = torch.compile(module.forward)
    return (lambda: delattr(module, "forward")) if own is None else (lambda: setattr(module, "forward", own))
