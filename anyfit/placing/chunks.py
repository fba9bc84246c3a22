"""Model state in flat buffers: the bytes behind a layout, each where its placement says.

A bf16 chunk that is updated has a buffer of low halves beside its weights; together they are the exact fp32 masters. Weights
lie on the device, on the host, or, where the host updates weights that stay on the device, on both.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.kernels.split import merge, split
from anyfit.values.layout import Chunk, Slot
from anyfit.values.plan import Placement

from .lanes import Ticket
from .tiers import HostSlabs

WRITTEN_AT_ONCE = 2**22  # elements: scratch is little, and stays in the cache
quietly = torch._C.DisableTorchFunctionSubclass  # parameters that watch their use do not watch the engine's


@dataclass(frozen=True)
class Carried:
    """All state of a model on its way from one placing to another, by parameter name. Each tensor is a view of the old buffers
    until its new chunk has it, and then of that: nothing is held twice but the chunk at hand, and at no time is anything lost."""

    weights: dict[str, Tensor]
    low: dict[str, Tensor]  # halves of the masters, where there are any
    optimizer_state: dict[str, dict[str, Any]]
    optimizer: Optimizer


class ChunkState:
    """One chunk's buffers, and the update that is under way on it."""

    def __init__(self, index: int, chunk: Chunk, placement: Placement, device: torch.device, slabs: HostSlabs) -> None:
        self.index, self.chunk, self.placement = index, chunk, placement
        self.dtype: torch.dtype = getattr(torch, chunk.dtype)
        self.is_split = chunk.is_updated and self.dtype == torch.bfloat16
        self._device, self._slabs = device, slabs
        self.on_device: Tensor | None = None
        self.on_host: Tensor | None = None
        on_host = placement.weights == "host" or (chunk.is_updated and placement.update == "host")
        if placement.weights == "device":
            self.on_device = torch.zeros(chunk.elements, dtype=self.dtype, device=device)
        if on_host:
            self.on_host = slabs.zeros(chunk.elements, self.dtype, crosses=True)
        self.low = self.optimizer_zeros(torch.int16, elements=chunk.elements if self.is_split else 0)
        self.fresh: Ticket | None = None  # of the update under way
        self.again: Callable[[], Ticket] | None = None  # starts that update once more, should it have failed

    @property
    def weights(self) -> Tensor:
        """Where they live. Between a step and the update's end they are the old ones."""
        return self._there(self.on_device if self.placement.weights == "device" else self.on_host)

    @staticmethod
    def _there(buffer: Tensor | None) -> Tensor:
        assert buffer is not None
        return buffer

    def optimizer_zeros(self, dtype: torch.dtype, elements: int | None = None) -> Tensor:
        """A flat buffer in the tier of the optimizer's state."""
        elements = self.chunk.elements if elements is None else elements
        if self.placement.optimizer == "device":
            return torch.zeros(elements, dtype=dtype, device=self._device)
        return self._slabs.zeros(elements, dtype, crosses=self.placement.update == "device")

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.elements].view(slot.shape)

    def write(self, slot: Slot, value: Tensor) -> None:
        """Sets one parameter from `value`, exactly where the chunk has masters."""
        homes = [self.view(buffer, slot) for buffer in (self.on_device, self.on_host) if buffer is not None]
        if not self.is_split:
            for home in homes:
                home.copy_(value)
            return
        given, low = value.detach().reshape(-1), self.view(self.low, slot).view(-1)
        scratch = torch.empty(min(WRITTEN_AT_ONCE, slot.elements), dtype=torch.float32, device=low.device)
        halves = torch.empty_like(scratch, dtype=torch.bfloat16)
        for start in range(0, slot.elements, WRITTEN_AT_ONCE):
            part = slice(start, start + WRITTEN_AT_ONCE)
            exact, high = (buffer[: len(given[part])] for buffer in (scratch, halves))
            exact.copy_(given[part])
            split(exact, high, low[part])
            for home in homes:
                home.view(-1)[part].copy_(high)

    def take_over(self, slot: Slot, carried: Carried) -> None:
        """Sets one parameter to what it was in another placing."""
        for home in (self.on_device, self.on_host):
            if home is not None:
                self.view(home, slot).copy_(carried.weights[slot.name])
        carried.weights[slot.name] = self.view(self.weights, slot)
        if self.is_split:
            self.view(self.low, slot).copy_(carried.low[slot.name])
            carried.low[slot.name] = self.view(self.low, slot)

    def read(self, slot: Slot) -> Tensor:
        """One parameter on the host: the fp32 master where the chunk has masters, a copy in any case."""
        weights = self.view(self.weights, slot)
        if not self.is_split:
            return weights.detach().to("cpu", copy=True)
        low = self.view(self.low, slot)
        exact = torch.empty(slot.shape, dtype=torch.float32, device=low.device)
        merge(weights.to(low.device), low, exact)
        return exact.cpu()

    def adopt(self, edited: Tensor, before: Tensor) -> None:
        """Takes over weights that the user edited: a changed bf16 weight is its own new master."""
        if self.is_split:
            self.low.masked_fill_((edited != before.to(edited.device)).to(self.low.device), 0)
        for home in (self.on_device, self.on_host):
            if home is not None and home is not edited:
                home.copy_(edited)

    @property
    def device_bytes(self) -> int:
        there = [self.on_device, self.low if self.placement.optimizer == "device" else None]
        return sum(buffer.nbytes for buffer in there if buffer is not None)


class ModelState:
    """All chunks of a model, and the model's parameters by name."""

    def __init__(
        self,
        model: nn.Module,
        layout: Sequence[Chunk],
        placements: Sequence[Placement],
        device: torch.device,
        slabs: HostSlabs,
        carried: Carried | None = None,
    ) -> None:
        self.device = device
        self.chunks: list[ChunkState] = []
        made = (
            ChunkState(index, chunk, placement, device, slabs)
            for index, (chunk, placement) in enumerate(zip(layout, placements, strict=True))
        )
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        placeholders: dict[torch.dtype, Tensor] = {}
        with torch.no_grad():
            # All at once, so that their pages are made ready meanwhile; or each when it is filled, as another's place is freed.
            for state in list(made) if carried is None else made:
                self.chunks.append(state)
                # Shape without memory, for weights that are away. Whoever reads it by mistake gets no number.
                absent = placeholders.setdefault(state.dtype, torch.full((1,), float("nan"), dtype=state.dtype, device=device))
                for slot in state.chunk.slots:
                    parameter = self.parameters[slot.name]
                    if carried is None:
                        state.write(slot, parameter)
                    else:
                        state.take_over(slot, carried)
                    home = absent.expand(slot.shape)
                    if state.on_device is not None:
                        home = state.view(state.on_device, slot)
                    parameter.data = home  # frees the original as it goes

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter by name, on the host: fp32 masters where there are any."""
        return {slot.name: state.read(slot) for state in self.chunks for slot in state.chunk.slots}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for state in self.chunks:
                for slot in state.chunk.slots:
                    state.write(slot, weights[slot.name])

    def snapshot(self) -> dict[int, Tensor]:
        """The weights of chunks that are nowhere but on the device, to tell later what the user edited."""
        return {state.index: state.weights.clone() for state in self.chunks if state.on_host is None}

    def adopt_edits(self, before: Mapping[int, Tensor]) -> None:
        """Makes the user's edits of weights on the device part of the state."""
        with torch.no_grad(), quietly():
            for state in self.chunks:
                if state.on_device is None:
                    continue
                for slot in state.chunk.slots:
                    parameter, mine = self.parameters[slot.name], state.view(state.on_device, slot)
                    if parameter.data_ptr() != mine.data_ptr():  # the user put another tensor there
                        if parameter.shape != mine.shape:
                            raise ValueError(
                                f"{slot.name} had shape {tuple(mine.shape)} and was replaced by {tuple(parameter.shape)}"
                            )
                        mine.copy_(parameter)
                        parameter.data = mine
                state.adopt(state.on_device, before[state.index] if state.on_host is None else state.on_host)

    @property
    def device_bytes(self) -> int:
        return sum(state.device_bytes for state in self.chunks)
