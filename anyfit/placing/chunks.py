"""Model state in flat buffers: the bytes behind a layout.

Parameters of the model become views of their chunk's buffer, so user code reads and trains them as always. A bf16 chunk
that is updated has a buffer of low halves beside it; together they are the exact fp32 masters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from anyfit.kernels.split import merge, split
from anyfit.values.layout import Chunk, Slot


class ChunkState:
    """One chunk's buffers on its device."""

    def __init__(self, chunk: Chunk, device: torch.device) -> None:
        self.chunk = chunk
        dtype = getattr(torch, chunk.dtype)
        self.weights = torch.zeros(chunk.elements, dtype=dtype, device=device)
        self.is_split = chunk.is_updated and dtype == torch.bfloat16
        self.low = torch.zeros(chunk.elements if self.is_split else 0, dtype=torch.int16, device=device)

    def view(self, flat: Tensor, slot: Slot) -> Tensor:
        return flat[slot.offset : slot.offset + slot.elements].view(slot.shape)

    def write(self, slot: Slot, value: Tensor) -> None:
        """Sets one parameter from `value`, exactly where the chunk has masters."""
        weights = self.view(self.weights, slot)
        if self.is_split:
            split(value.to(weights.device, torch.float32, copy=True).contiguous(), weights, self.view(self.low, slot))
        else:
            weights.copy_(value)

    def read(self, slot: Slot) -> Tensor:
        """One parameter on the host: the fp32 master where the chunk has masters, a copy in any case."""
        weights = self.view(self.weights, slot)
        if not self.is_split:
            return weights.detach().to("cpu", copy=True)
        exact = torch.empty(slot.shape, dtype=torch.float32, device=weights.device)
        merge(weights, self.view(self.low, slot), exact)
        return exact.cpu()

    @property
    def bytes(self) -> int:
        return self.weights.nbytes + self.low.nbytes


class ModelState:
    """All chunks of a model, and the model's parameters as views of them."""

    def __init__(self, model: nn.Module, layout: Sequence[Chunk], device: torch.device) -> None:
        self.chunks = [ChunkState(chunk, device) for chunk in layout]
        self.parameters: Mapping[str, nn.Parameter] = dict(model.named_parameters())
        with torch.no_grad():
            for state in self.chunks:
                for slot in state.chunk.slots:
                    parameter = self.parameters[slot.name]
                    state.write(slot, parameter)
                    parameter.data = state.view(state.weights, slot)  # frees the original as it goes

    def state_dict(self) -> dict[str, Tensor]:
        """Every parameter by name, on the host: fp32 masters where there are any."""
        return {slot.name: state.read(slot) for state in self.chunks for slot in state.chunk.slots}

    def load(self, weights: Mapping[str, Tensor]) -> None:
        with torch.no_grad():
            for state in self.chunks:
                for slot in state.chunk.slots:
                    state.write(slot, weights[slot.name])

    def snapshot(self) -> list[Tensor]:
        """The weights as they are, to tell later what the user edited."""
        return [state.weights.clone() for state in self.chunks]

    def adopt_edits(self, before: Sequence[Tensor]) -> None:
        """Makes the user's edits of weights part of the state: a changed bf16 weight is its own new master."""
        with torch.no_grad():
            for state, old in zip(self.chunks, before, strict=True):
                for slot in state.chunk.slots:
                    parameter, mine = self.parameters[slot.name], state.view(state.weights, slot)
                    if parameter.data_ptr() != mine.data_ptr():  # the user put another tensor there
                        if parameter.shape != mine.shape:
                            raise ValueError(
                                f"{slot.name} had shape {tuple(mine.shape)} and was replaced by {tuple(parameter.shape)}"
                            )
                        mine.copy_(parameter)
                        parameter.data = mine
                if state.is_split:
                    state.low.masked_fill_(state.weights != old, 0)

    @property
    def bytes(self) -> int:
        return sum(state.bytes for state in self.chunks)
