"""The arithmetic of one chunk's update, wherever its numbers are.

For torch's own Adam and AdamW it is one pass of a kernel over flat buffers (kernels/). Any other optimizer steps the masters of a
chunk in scratch, through a copy of it that sees these parameters alone: no fp32 copy of the model ever exists. Moments of a
parameter's own shape lie in flat buffers that share the chunk's offsets.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from anyfit.kernels.adamw import Begun, Part, Settings, State, adamw
from anyfit.kernels.adamw_gpu import adamw_on_gpu, can_run_on_gpu
from anyfit.kernels.split import Masters
from anyfit.values.layout import Chunk
from anyfit.values.machine import update_threads

from ..chunks import ChunkState
from ..lanes import Ticket
from ..optimizer_state import Entries, Flat, OptimizerState, Views
from ..optimizers import narrowed
from ..tiers import Scratch

ADAM_KEYS = ("exp_avg", "exp_avg_sq")
Groups = list[dict[str, Any]]
Factor = float | Tensor | None


@dataclass(frozen=True, eq=False)
class Inputs:
    """What the update of one chunk starts from."""

    gradients: dict[str, Tensor]  # by parameter that has one; emptied when the update needs them no more
    arrived: Ticket | None  # of those that are on their way
    factor: Factor | Callable[[], Factor]  # that scales them; on the GPU, or to be asked for, where the host does not know it yet
    groups: Groups  # settings, as they were when the update was asked for
    before: Ticket | None = None  # the old weights have been read
    step: int = 0  # in which it was asked for

    @property
    def known_factor(self) -> Factor:
        """To be asked where the update is made, once the gradients are there."""
        return self.factor() if callable(self.factor) else self.factor


class Stepper:
    def __init__(self, optimizer: Optimizer, device: torch.device, coupled: str | None) -> None:
        self._optimizer, self._device = optimizer, device
        self.coupled = coupled  # why all parameters are stepped at once, if they are
        self._threads = update_threads(torch.get_num_threads())
        self._parameters: dict[int, list[nn.Parameter]] = {}  # by chunk, of its masters in scratch
        self.step = 0  # counts those that were begun

    def groups(self) -> Groups:
        """Learning rates and the like of every group as they are now: a scheduler may change them while an update runs."""
        return [
            {key: value.clone() if isinstance(value, Tensor) else value for key, value in group.items() if key != "params"}
            for group in self._optimizer.param_groups
        ]

    def one_pass(self, state: ChunkState, groups: Sequence[Mapping[str, Any]] | None = None) -> Settings | None:
        """Where a one-pass kernel steps the chunk: its group's settings."""
        placement = state.placement
        if self.coupled is not None or state.dtype.is_complex:
            return None
        if placement.route == "resident" and self._device.type == "cpu":  # forecasts of the CPU device rest on torch's own
            return None
        if placement.update == "device" and self._device.type == "cuda" and not can_run_on_gpu(self._device):
            return None
        return _adam(self._optimizer, (groups or self._optimizer.param_groups)[state.chunk.group])

    def counts_device(self, state: ChunkState) -> torch.device:
        """Where torch's optimizer wants its step counts."""
        group = self._optimizer.param_groups[state.chunk.group]
        wanted = group.get("fused") or group.get("capturable")
        on_device = bool(wanted) and state.placement.update == "device" and self.one_pass(state) is None
        return self._device if on_device else torch.device("cpu")

    def make_adam(self, chunk: OptimizerState) -> None:
        """Moments as torch's Adam makes them in its first step, taken at the start instead."""
        keys = adam_keys(self._optimizer, chunk.state.chunk)
        if not keys:
            return
        for key in keys:
            if key not in chunk.moments:
                chunk.moments[key] = chunk.zeros()
        where = self.counts_device(chunk.state)
        for slot in chunk.own_slots:
            chunk.rest[slot.name] = {"step": torch.zeros((), device=where), **{key: Flat() for key in keys}}

    def in_one_pass(
        self, chunk: OptimizerState, inputs: Inputs, gradient: Tensor, now: State, out: State | None = None, part: Part = "all"
    ) -> tuple[Entries, Begun | None]:
        """Steps parameters that have a gradient. Gives what is then known of each and what the host still has under way."""
        settings, factor = self.one_pass(chunk.state, inputs.groups), inputs.known_factor
        assert settings is not None
        made: Entries = {}
        ranges: dict[int, list[tuple[int, int]]] = {}  # by step count: a parameter without a gradient has stayed behind
        slots = chunk.own_slots
        for slot in slots:
            if slot.name in inputs.gradients:
                entry = chunk.rest[slot.name]
                step = int(entry["step"]) + 1
                made[slot.name] = {**entry, "step": _count(step)}
                ranges.setdefault(step, []).append((slot.offset, slot.offset + slot.elements))
        begun, last = None, next(reversed(ranges), None)
        for step, stretches in ranges.items():
            own_ranges = stretches if len(stretches) < len(slots) else None  # all of it, and the padding between
            if now.weights.is_cuda:
                adamw_on_gpu(now, gradient, settings, step, out=out, scale=factor, ranges=own_ranges)
            else:
                assert not isinstance(factor, Tensor)
                waits = chunk.state.placement.update != "host" or step != last
                on_gpu = self._device.type == "cuda"  # the same bits, wherever it is updated
                how = functools.partial(adamw, part=part, threads=self._threads, as_on_gpu=on_gpu, waits=waits)
                begun = how(now, gradient, settings, step, out=out, scale=factor, ranges=own_ranges)
            now, out = out or now, None
        return made, begun

    def by_torch(
        self, chunk: OptimizerState, inputs: Inputs, own: Views, exact: Tensor, entries: Entries, asked: list[str] | None = None
    ) -> Entries:
        """Steps the optimizer on masters in `exact`, these parameters alone; what it then knows of each, or of those `asked`."""
        factor, groups = inputs.known_factor, inputs.groups
        assert not isinstance(factor, Tensor)
        if factor is not None:
            torch._foreach_mul_(list(own.values()), factor)
        working = zip(chunk.own_slots, self._masters(chunk.state, exact), strict=True)
        parameters = {slot.name: parameter for slot, parameter in working if slot.name in own}
        for name, parameter in parameters.items():
            parameter.grad = own[name]
        given = [{**group, "params": []} for group in groups]
        given[chunk.state.chunk.group]["params"] = list(parameters.values())
        known = {parameters[name]: entries[name] for name in parameters if entries[name]}
        optimizer = narrowed(self._optimizer, given, known)
        try:
            optimizer.step()
        finally:
            for parameter in parameters.values():
                parameter.grad = None
        _refuse_coupled(groups, optimizer.param_groups, type(self._optimizer).__name__)
        return {name: dict(optimizer.state[parameters[name]]) for name in (parameters if asked is None else asked)}

    def in_scratch(
        self, chunk: OptimizerState, inputs: Inputs, own: Views, masters: Masters, moments: Views, scratch: Scratch
    ) -> tuple[Tensor, Entries]:
        """The same of masters that stay as they are: what they are after the step, in scratch. Moments are updated in place."""
        exact = scratch.flat("exact", chunk.state.own.elements)
        masters.read(exact)
        entries = moved(chunk.entries(moments, own), scratch.device)
        return exact, self.by_torch(chunk, inputs, widened(chunk.state, own, scratch), exact, entries)

    def _masters(self, state: ChunkState, exact: Tensor) -> list[nn.Parameter]:
        known = self._parameters.get(state.index)
        if known is None or known[0].data_ptr() != state.view(exact, state.own.slots[0]).data_ptr():
            known = self._parameters[state.index] = [nn.Parameter(state.view(exact, slot)) for slot in state.own.slots]
        return known


def adam_keys(optimizer: Optimizer, chunk: Chunk) -> tuple[str, ...]:
    """Moments that torch's own Adam will make for a chunk; none of another, which nobody knows before its first step."""
    if type(optimizer) not in (Adam, AdamW) or getattr(torch, chunk.dtype).is_complex:
        return ()
    return (*ADAM_KEYS, "max_exp_avg_sq") if optimizer.param_groups[chunk.group]["amsgrad"] else ADAM_KEYS


def adam_state(masters: Masters, moments: Views) -> State:
    """One generation of a chunk, as the one-pass kernels take it."""
    return State(masters.weights, masters.low, *(moments[key] for key in ADAM_KEYS))


def gathered(state: ChunkState, gradients: Views, scratch: Scratch) -> Tensor:
    """Gradients that autograd made, side by side at the chunk's offsets."""
    flat = scratch.flat("gathered", state.own.elements, next(iter(gradients.values())).dtype)
    names = [slot.name for slot in state.own.slots]
    places = scratch.places("gathered", state.index, flat, lambda flat: views(state, names, flat))
    torch._foreach_copy_([places[name] for name in gradients], list(gradients.values()), non_blocking=True)
    return flat


def widened(state: ChunkState, gradients: Mapping[str, Tensor], scratch: Scratch, name: str = "gradient") -> dict[str, Tensor]:
    """The gradients in fp32 on the scratch's device, free to be scaled."""
    found = views(state, gradients, scratch.flat(name, state.own.elements))
    if gradients:
        torch._foreach_copy_(list(found.values()), list(gradients.values()), non_blocking=True)
    return found


def views(state: ChunkState, names: Iterable[str], flat: Tensor) -> Views:
    slots = {slot.name: slot for slot in state.own.slots}
    return {name: state.view(flat, slots[name]) for name in names}


def moved(entries: Entries, device: torch.device) -> Entries:
    """The same with arrays on the device; single numbers (step counts) stay where torch keeps them."""

    def at(value: object) -> object:
        return value.to(device) if isinstance(value, Tensor) and value.dim() else value

    return {name: {key: at(value) for key, value in entry.items()} for name, entry in entries.items()}


@functools.lru_cache(8)
def _count(step: int) -> Tensor:
    """As torch keeps it, one for all: it is replaced and not changed."""
    return torch.tensor(float(step))


def _adam(optimizer: Optimizer, group: Mapping[str, Any]) -> Settings | None:
    """The settings of torch's own Adam or AdamW, where the one-pass kernel does what it does."""
    if type(optimizer) not in (Adam, AdamW):
        return None
    if group["amsgrad"] or group["capturable"] or group["differentiable"] or isinstance(group["lr"], Tensor):
        return None
    return Settings(
        lr=group["lr"],
        beta1=group["betas"][0],
        beta2=group["betas"][1],
        eps=group["eps"],
        weight_decay=group["weight_decay"],
        decoupled=bool(group.get("decoupled_weight_decay", isinstance(optimizer, AdamW))),
        maximize=group["maximize"],
    )


def _refuse_coupled(before: Groups, after: Sequence[Mapping[str, Any]], name: str) -> None:
    for old, new in zip(before, after, strict=True):
        for key, value in old.items():
            if new[key] is not value and new[key] != value:
                raise RuntimeError(
                    f"{name} changes its group's {key!r} in a step, so its parameters do not stand by themselves and cannot be "
                    "updated chunk by chunk; use an optimizer that keeps its state by parameter, such as AdamW"
                )
