"""Gradients of one step: where they add up over micro-batches, how large they are, and whether they are finite.

One micro-batch: autograd's own gradient is used as it is. Several: fp32 gradients add up where autograd put them; bf16 ones
are added in fp32 to a buffer beside the chunk as soon as each is complete, and freed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from .chunks import ChunkState, ModelState


class Gradients:
    def __init__(self, state: ModelState, accumulation: int) -> None:
        self._parameters = state.parameters
        self._sums: dict[str, Tensor] = {}  # fp32, views of flat buffers
        self._filled: set[str] = set()
        self.bytes = 0
        if accumulation > 1:
            for chunk in state.chunks:
                if chunk.is_split:
                    self._accumulate(chunk)

    def _accumulate(self, state: ChunkState) -> None:
        flat = torch.zeros(state.chunk.elements, dtype=torch.float32, device=state.weights.device)
        self.bytes += flat.nbytes
        for slot in state.chunk.slots:
            self._sums[slot.name] = state.view(flat, slot)
            self._parameters[slot.name].register_post_accumulate_grad_hook(self._collector(slot.name))

    def _collector(self, name: str) -> Callable[[Tensor], None]:
        def collect(parameter: Tensor) -> None:
            assert parameter.grad is not None
            if name in self._filled:
                self._sums[name].add_(parameter.grad)
            else:
                self._sums[name].copy_(parameter.grad)
                self._filled.add(name)
            parameter.grad = None

        return collect

    def collected(self) -> dict[str, Tensor]:
        """By parameter name, in the model's order, the gradients of this step; parameters without one are not there."""
        found = {}
        for name, parameter in self._parameters.items():
            if name in self._filled:
                found[name] = self._sums[name]
            elif parameter.grad is not None:
                found[name] = parameter.grad
        return found

    def clear(self) -> None:
        self._filled.clear()
        for parameter in self._parameters.values():
            parameter.grad = None


def total_norm(gradients: Mapping[str, Tensor]) -> Tensor:
    """The norm of all gradients together: of the norms of each, in order, as torch's clip_grad_norm_ combines them."""
    norms = torch._foreach_norm(list(gradients.values()), 2, dtype=torch.float32)
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def clip_factor(norm: Tensor, clip_norm: float) -> Tensor:
    """What scales gradients of this norm down to `clip_norm`, never up (torch's clip_grad_norm_, to the bit)."""
    return torch.clamp(clip_norm / (norm + 1e-6), max=1.0)
