"""A whole model for a while, for user code that reads or edits its weights as they are by themselves: cut parameters are put
together, and those of other stages fetched from them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import ChunkState, ModelState, quietly
from .cutting import CutBlocks, of_rank
from .residency import Residency
from .staging import Form, StagedModel
from .tables import Divided


@contextmanager
def together(cuts: CutBlocks, state: ModelState, residency: Residency) -> Iterator[None]:
    """Inside, every parameter is whole on the device, and blocks run as the user wrote them. What is edited is cut again at the
    end, and is then in its chunk. Ranks do it together."""
    if not cuts.parameters:
        yield
        return
    residency.drop_all()
    chunks = [each for each in state.chunks if each.chunk.is_cut]
    before: dict[str, tuple[type[nn.Parameter], Tensor]] = {}
    with quietly(), torch.no_grad():
        for chunk in chunks:
            flat = _weights_of(chunk)
            for slot in chunk.chunk.slots:
                parameter: Any = state.parameters[slot.name]
                before[slot.name] = type(parameter), parameter.data
                kind = residency.kinds.get(slot.name, type(parameter))
                parameter.__class__ = nn.Parameter if issubclass(kind, Divided) else kind
                parameter.data = cuts.of_all(slot.name, chunk.view(flat, slot))
    for block in cuts.blocks:
        block.is_whole = True
    try:
        yield
        for chunk in chunks:
            _take_over(chunk, cuts, state)
    finally:
        for block in cuts.blocks:
            block.is_whole = False
        with quietly():
            for name, (kind, data) in before.items():
                there: Any = state.parameters[name]
                there.data = data
                there.__class__ = kind


@contextmanager
def of_all_places(stages: StagedModel, state: ModelState, model: nn.Module) -> Iterator[None]:
    """Inside, every rank of a pipeline has all parameters and buffers, and modules run as they are. Of what several places hold,
    each has its own; all ranks edit alike, so that each takes over what is its own. Ranks do it together."""
    if stages.looked is None:
        yield
        return
    slots = {slot.name: (chunk, slot) for chunk in state.chunks for slot in chunk.chunk.slots}
    fetched: dict[int, Tensor] = {}  # the weights of one chunk, by its index

    def mine(name: str) -> Tensor:
        chunk, slot = slots[name]
        if chunk.chunk.is_cut:
            return state.parameters[name].data
        if chunk.index not in fetched:
            fetched.clear()
            fetched[chunk.index] = _weights_of(chunk)
        return chunk.view(fetched[chunk.index], slot)

    def form(name: str) -> Form:
        chunk, slot = slots[name]
        return tuple(state.parameters[name].shape) if chunk.chunk.is_cut else slot.shape, chunk.dtype

    with quietly(), torch.no_grad():
        stages.share_buffers(model)
        absent = stages.fetch(model, {name: form(name) for name in slots}, mine, state.device)
    try:
        with stages.as_written():
            yield
    finally:
        with quietly():
            for parameter, nothing in absent:
                parameter.data = nothing


def _weights_of(chunk: ChunkState) -> Tensor:
    """All of a chunk's, on the device, in memory of their own."""
    return chunk.whole(chunk.weights).to(chunk.device, copy=True)


def _take_over(chunk: ChunkState, cuts: CutBlocks, state: ModelState) -> None:
    with quietly(), torch.no_grad():
        flat = _weights_of(chunk)
        for slot in chunk.chunk.slots:
            chunk.view(flat, slot).copy_(of_rank(state.parameters[slot.name].data, cuts.parameters[slot.name]))
        if chunk.on_device is not None and not chunk.is_gathered:
            chunk.on_device.copy_(flat)  # whence `ModelState.adopt_edits` takes it
        else:
            chunk.adopt(flat[chunk.stretch].to(chunk.weights.device, copy=True), chunk.weights)
