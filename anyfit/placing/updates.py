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
    """Owns the optimizer. In its groups, bf16 parameters are represented by fp32 masters that are empty between updates."""

    def __init__(self, optimizer: Optimizer, state: ModelState) -> None:
        self.optimizer = optimizer
        self._chunks = [chunk for chunk in state.chunks if chunk.chunk.is_updated]
        largest = max((chunk.chunk.elements for chunk in self._chunks if chunk.is_split), default=0)
        device = state.chunks[0].weights.device
        self._scratch = torch.empty(largest, dtype=torch.float32, device=device)
        self.masters: dict[str, nn.Parameter] = {}  # by name, what the optimizer knows the parameter as
        for chunk in self._chunks:
            for slot in chunk.chunk.slots:
                parameter = state.parameters[slot.name]
                self.masters[slot.name] = self._stand_in(parameter) if chunk.is_split else parameter
        known_as = {id(state.parameters[name]): master for name, master in self.masters.items()}
        for group in optimizer.param_groups:
            group["params"] = [known_as.get(id(parameter), parameter) for parameter in group["params"]]
        self._params = [list(group["params"]) for group in optimizer.param_groups]

    def _stand_in(self, parameter: nn.Parameter) -> nn.Parameter:
        master = nn.Parameter(torch.empty(0, dtype=torch.float32, device=parameter.device))
        if parameter in self.optimizer.state:  # made by the constructor, as Adagrad does
            self.optimizer.state[master] = self.optimizer.state.pop(parameter)
        return master

    def apply(self, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        """One optimizer step with `gradients` (times `factor`) on every parameter that has one."""
        groups = self.optimizer.param_groups
        try:
            for chunk in self._chunks:
                slots = [slot for slot in chunk.chunk.slots if slot.name in gradients]
                if not slots:
                    continue
                for group in groups:
                    group["params"] = []
                groups[chunk.chunk.group]["params"] = [self.masters[slot.name] for slot in slots]
                own = {slot.name: gradients[slot.name] for slot in slots}
                if chunk.is_split:
                    self._step_split(chunk, own, factor)
                else:
                    self._step_in_place(own, factor)
        finally:
            for group, params in zip(groups, self._params, strict=True):
                group["params"] = params

    def _step_in_place(self, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        for name, gradient in gradients.items():
            if factor is not None:
                gradient.mul_(factor)
            self.masters[name].grad = gradient
        self.optimizer.step()

    def _step_split(self, chunk: ChunkState, gradients: Mapping[str, Tensor], factor: Tensor | None) -> None:
        exact = self._scratch[: chunk.chunk.elements]
        merge(chunk.weights, chunk.low, exact)
        try:
            for slot in chunk.chunk.slots:
                if slot.name not in gradients:
                    continue
                master = self.masters[slot.name]
                master.data = chunk.view(exact, slot)
                gradient = gradients[slot.name].float()
                master.grad = gradient if factor is None else gradient.mul_(factor)
            self.optimizer.step()
        finally:
            for name in gradients:
                self.masters[name].grad = None
                self.masters[name].data = torch.empty(0, dtype=torch.float32, device=exact.device)
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
        """Held between steps: the optimizer's state and the scratch buffer."""
        tensors = [item for state in self.optimizer.state.values() for item in state.values() if isinstance(item, Tensor)]
        return self._scratch.nbytes + sum(tensor.nbytes for tensor in tensors)
