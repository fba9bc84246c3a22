"""The update: the user's own torch optimizer, run chunk by chunk on exact fp32 masters.

Any optimizer that treats each parameter by itself works: for each chunk in turn its groups are narrowed to that chunk's
parameters and stepped. An fp32 chunk's parameters are updated where they lie. A bf16 chunk's masters are merged into one
scratch buffer, updated there in fp32, and split again: no fp32 copy of the model ever exists.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from anyfit.kernels.split import merge, split

from .chunks import ChunkState, ModelState


class Updates:
    """Owns the optimizer. In its groups a bf16 parameter is represented by an fp32 master: a view of one scratch buffer that
    all chunks share, and that holds its numbers only while its own chunk is updated."""

    def __init__(self, optimizer: Optimizer, state: ModelState) -> None:
        self.optimizer = optimizer
        self._chunks = [chunk for chunk in state.chunks if chunk.chunk.is_updated]
        largest = max((chunk.chunk.elements for chunk in self._chunks if chunk.is_split), default=0)
        device = state.chunks[0].weights.device
        self._exact = torch.zeros(largest, dtype=torch.float32, device=device)
        self._gradient = torch.zeros(largest, dtype=torch.float32, device=device)
        self._widened: dict[str, Tensor] = {}  # by name, where a bf16 gradient goes to become fp32
        self.masters: dict[str, nn.Parameter] = {}  # by name, what the optimizer knows the parameter as
        for chunk in self._chunks:
            for slot in chunk.chunk.slots:
                parameter = state.parameters[slot.name]
                self.masters[slot.name] = parameter
                if chunk.is_split:
                    self.masters[slot.name] = self._master(parameter, chunk.view(self._exact, slot))
                    self._widened[slot.name] = chunk.view(self._gradient, slot)
        known_as = {id(state.parameters[name]): master for name, master in self.masters.items()}
        for group in optimizer.param_groups:
            group["params"] = [known_as.get(id(parameter), parameter) for parameter in group["params"]]
        self._params = [list(group["params"]) for group in optimizer.param_groups]

    def _master(self, parameter: nn.Parameter, place: Tensor) -> nn.Parameter:
        master = nn.Parameter(place)
        if parameter in self.optimizer.state:  # made by the constructor, as Adagrad does
            self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        return master

    def apply(self, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """One optimizer step with `gradients` (times `factor`) on every parameter that has one."""
        groups = self.optimizer.param_groups
        try:
            for chunk in self._chunks:
                names = [slot.name for slot in chunk.chunk.slots if slot.name in gradients]
                if not names:
                    continue
                for group in groups:
                    group["params"] = []
                groups[chunk.chunk.group]["params"] = [self.masters[name] for name in names]
                own = {name: gradients[name] for name in names}
                if chunk.is_split:
                    self._step_split(chunk, own, factor)
                else:
                    self._step(own, factor)
        finally:
            for group, params in zip(groups, self._params, strict=True):
                group["params"] = params

    def _step(self, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """Steps the optimizer, which sees these parameters alone; scales their gradients where they lie."""
        if factor is not None:
            torch._foreach_mul_(list(gradients.values()), factor)
        for name, gradient in gradients.items():
            self.masters[name].grad = gradient
        self.optimizer.step()

    def _step_split(self, chunk: ChunkState, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        exact = self._exact[: chunk.chunk.elements]
        merge(chunk.weights, chunk.low, exact)
        if next(iter(gradients.values())).dtype != torch.float32:
            widened = {name: self._widened[name] for name in gradients}
            torch._foreach_copy_(list(widened.values()), list(gradients.values()))
            gradients = widened
        self._step(gradients, factor)
        split(exact, chunk.weights, chunk.low)

    # ------------------------------------------------------------------ state, by parameter name

    def state_dict(self) -> dict[str, dict[str, Any]]:
        """The optimizer's state of every parameter that has any."""
        return {name: dict(self.optimizer.state[m]) for name, m in self.masters.items() if m in self.optimizer.state}

    def load(self, state: Mapping[str, Mapping[str, Any]]) -> None:
        for name, entries in state.items():
            self.optimizer.state[self.masters[name]] = dict(entries)

    @property
    def bytes(self) -> int:
        """Held between steps: the optimizer's state and the scratch buffers."""
        tensors = [item for state in self.optimizer.state.values() for item in state.values() if isinstance(item, Tensor)]
        return self._exact.nbytes + self._gradient.nbytes + sum(tensor.nbytes for tensor in tensors)
