"""The state of a placed model by tensor: of each, the flat stretch that this rank has of it, to be read and set piece by piece.

A checkpoint is written from these and read into them: nothing here puts a tensor together, or copies more than is asked for.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from anyfit.kernels.split import merge

from .chunks import put
from .place import Placed

BUFFERS = -1  # in place of a chunk


@dataclass(frozen=True)
class Stretch:
    """Elements of one tensor, from `start` of it in row-major order: flat in a buffer, or in two that together are exact."""

    name: str
    shape: tuple[int, ...]  # of the whole tensor
    start: int
    values: Tensor
    low: Tensor | None = None  # halves; `values` are then the high ones
    others: tuple[Tensor, ...] = ()  # where the same values also lie
    chunk: int = BUFFERS  # the index of the one it is in
    changes: bool = True  # in a step

    @property
    def elements(self) -> int:
        return self.values.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype if self.low is None else torch.float32

    def read(self, start: int, end: int, out: Tensor) -> None:
        """Some of its elements into a flat tensor on the host."""
        high = self.values[start:end]
        low = None if self.low is None else self.low[start:end]
        if low is None and high.is_cuda:
            out.copy_(high)
        elif low is None:
            copy_on_host(high, out)
        elif low.is_cuda:
            exact = torch.empty(end - start, device=low.device)
            merge(high.to(low.device), low, exact)
            out.copy_(exact)
        else:
            bits = out.view(torch.int32).numpy()
            np.copyto(bits, high.cpu().view(torch.int16).numpy())
            np.left_shift(bits, 16, out=bits)
            np.add(bits, low.numpy(), out=bits)

    def write(self, start: int, values: Tensor) -> None:
        """Sets some of its elements, from `start` of it on."""
        part = slice(start, start + values.numel())
        homes = [each[part] for each in (self.values, *self.others)]
        put(values, homes, None if self.low is None else self.low[part], is_split=self.low is not None)


def copy_on_host(source: Tensor, out: Tensor) -> None:
    """By this thread alone: torch would wake a team of its own for every thread that copies, and those would take turns with
    the ones that train."""
    np.copyto(out.view(torch.uint8).numpy(), source.detach().view(torch.uint8).numpy())


def weights_of(placed: Placed) -> Iterator[Stretch]:
    """Parameters under their names, as far as they are this rank's; an empty one is everybody's."""
    for state in placed.state.chunks:
        own = {slot.name: slot for slot in state.own.slots}
        for slot in state.chunk.slots:
            mine = own.get(slot.name)
            if mine is None and slot.elements:
                continue
            part = slice(0, 0) if mine is None else slice(mine.offset, mine.offset + mine.elements)
            homes = [home[part] for home in (state.on_host, state.own_on_device) if home is not None]  # the same
            yield Stretch(
                slot.name,
                slot.shape,
                0 if mine is None else state.start_in(slot, mine),
                homes[0],
                state.low[part] if state.is_split else None,
                tuple(homes[1:]),
                state.index,
                state.chunk.is_updated,
            )


def buffers_of(placed: Placed) -> Iterator[Stretch]:
    for name, buffer in placed.model.named_buffers():
        flat = buffer.detach()
        yield Stretch(name, tuple(buffer.shape), 0, flat.view(-1) if flat.is_contiguous() else flat.reshape(-1))


def moments_of(placed: Placed) -> Iterator[Stretch]:
    """What the optimizer keeps of every parameter that is no single number, under the parameter's name and its key."""
    for each in placed.updates.chunks:
        whole = {slot.name: slot for slot in each.state.chunk.slots}
        for mine, key, values in each.arrays():
            is_by_element = values.shape == mine.shape
            yield Stretch(
                f"{mine.name}/{key}",
                whole[mine.name].shape if is_by_element else tuple(values.shape),
                each.state.start_in(whole[mine.name], mine) if is_by_element else 0,
                values.reshape(-1),
                chunk=each.state.index,
            )


def home_of(placed: Placed, name: str, key: str, shape: tuple[int, ...], dtype: torch.dtype) -> Stretch | None:
    """Where such a thing belongs that another run had; None where it is other ranks' alone."""
    found = placed.updates.home(name, key, shape, dtype)
    if found is None:
        return None
    each, values = found
    whole, mine = (next(slot for slot in chunk.slots if slot.name == name) for chunk in (each.state.chunk, each.state.own))
    start = each.state.start_in(whole, mine) if shape == whole.shape else 0
    return Stretch(f"{name}/{key}", shape, start, values.view(-1), chunk=each.state.index)


def spread(placed: Placed) -> None:
    """After weights were set: a rank that has all of a chunk gets what others have set of it. All ranks do it together."""
    for state in placed.state.chunks:
        whole, own = state.on_device, state.own_on_device
        if state.is_spread and whole is not None and own is not None:
            state.ranks.gather("small", state.shards, whole, own, f"chunk {state.index}")
