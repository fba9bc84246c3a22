"""Parameters that keep the memory they have (values/demands.py): others share it, or its elements do not lie in order there.

Their chunk has a mirror of each, in its order: what is saved is read from it. Where torch steps such a parameter itself, the
mirror follows; where its chunk is stepped, or loaded, the parameter does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from anyfit.values.demands import Demands, StaysOnDevice
from anyfit.values.layout import Chunk, Slot
from anyfit.values.plan import Placement

from ..kernels.split import forget_low
from .chunks import ChunkState, quietly
from .optimizers import refuse_apart, steps_together

LOST_ELSEWHERE = (
    ". This plan has weights or updates off the device, where that is lost; else use a plan with all state on the device"
)


def refuse_elsewhere(
    demands: Demands, layout: Sequence[Chunk], placements: Sequence[Placement], precision: str, device: torch.device
) -> None:
    """Raises where what the model demands is not what the plan does."""
    wanted = {**demands.special, **demands.kept}
    all_together = all(steps_together(each) for each, chunk in zip(placements, layout, strict=True) if chunk.is_updated)
    for chunk, placement in zip(layout, placements, strict=True):
        stays = placement.weights == "device" and placement.weight_shards == 1 and (not chunk.is_updated or all_together)
        for slot in chunk.slots:
            if slot.name in wanted and not stays:
                raise StaysOnDevice(wanted[slot.name], LOST_ELSEWHERE, mirrored_bytes(demands, layout))
    refuse_apart(demands.coupled, [each for each, chunk in zip(placements, layout, strict=True) if chunk.is_updated])
    if demands.shared and casts(precision, device):
        how = "weights are cast to bf16" if precision == "bf16" else f"the model is moved to {device}"
        raise ValueError(f"{next(iter(demands.shared.values()))}. Here {how}, which gives each its own memory")


def mirrored_bytes(demands: Demands, layout: Sequence[Chunk]) -> int:
    """Of parameters that share memory, and so have a mirror beside it. A trace counts those with strides of their own."""
    return sum(slot.elements * chunk.element_bytes for chunk in layout for slot in chunk.slots if slot.name in demands.shared)


def casts(precision: str, device: torch.device) -> bool:
    """Whether every parameter gets new memory at the start, as `model.to` gives it."""
    return precision == "bf16" or device.type != "cpu"


@dataclass(frozen=True)
class Mirrors:
    parameters: Mapping[str, nn.Parameter]
    states: Mapping[str, ChunkState] = field(default_factory=dict)  # by name, of those that are mirrored

    def collect(self) -> None:
        """The chunks' mirrors are as the parameters are."""
        for state, slot, mine, parameter in self._mirrored():
            with torch.no_grad():
                if state.is_split:
                    forget_low(state.view(state.low, slot), mine != parameter)
                mine.copy_(parameter)

    def write_back(self) -> None:
        """The parameters are as the chunks' mirrors are."""
        for _state, _slot, mine, parameter in self._mirrored():
            with torch.no_grad():
                parameter.copy_(mine)

    def _mirrored(self) -> Iterator[tuple[ChunkState, Slot, Tensor, Tensor]]:
        for name, state in self.states.items():
            slot = next(each for each in state.chunk.slots if each.name == name)
            with quietly():
                mine, parameter = state.view(state.weights, slot), self.parameters[name].detach()
            yield state, slot, mine, parameter

    @property
    def device_bytes(self) -> int:
        return sum(self.parameters[name].nbytes for name in self.states)
