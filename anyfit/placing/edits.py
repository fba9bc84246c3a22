"""Weights that user code writes: in place, through views and `.data`, or by putting another tensor in their place.

A parameter counts the writes into it and into every view of it. So an edit of weights that live elsewhere is found, and written
back to where they live, when the op returns, when they leave the device, and before a step or a reader needs them. A numpy array
has no such count: what is lent as one is a copy that cannot be written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from .chunks import ChunkState, ModelState, quietly


class Versions:
    """Of every parameter of some chunks: how often it has been written, as far as that is known."""

    def __init__(self, parameters: Mapping[int, list[tuple[str, nn.Parameter]]]) -> None:
        self._parameters = parameters
        with quietly():
            self._known = {name: each._version for members in parameters.values() for name, each in members}

    def edited(self, chunk: int) -> str | None:
        """A parameter of the chunk that has been written since."""
        with quietly():
            for name, each in self._parameters[chunk]:
                if each._version != self._known[name]:
                    return name
        return None

    def note(self, chunk: int) -> None:
        with quietly():
            for name, each in self._parameters[chunk]:
                self._known[name] = each._version


class Lent(Tensor):
    """A weight without its history (`.data`, `.detach()`), or a view of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with quietly():
            result = func(*args, **(kwargs or {}))
            if func in AS_ARRAY:
                result = result.copy()
                result.flags.writeable = False
            elif type(result) is Tensor and args and isinstance(args[0], Lent) and _is_view(result, args[0]):
                return result.as_subclass(Lent)
            return result


AS_ARRAY: set[Any] = {Tensor.numpy, Tensor.__array__}


def _is_view(tensor: Tensor, other: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


class Bound:
    """Parameters that are views of buffers on the device, and modules that hold them: whether they still are."""

    def __init__(self, model: nn.Module, state: ModelState, watched: set[int]) -> None:
        self._homes: list[tuple[str, nn.Parameter, Tensor, int]] = []
        for each in state.chunks:
            if each.index in watched or each.on_device is None:
                continue
            for slot in each.chunk.slots:
                if slot.elements and slot.name not in state.kept:
                    mine = each.view(each.on_device, slot)
                    self._homes.append((slot.name, state.parameters[slot.name], mine, mine.data_ptr()))
        self._storages = {each.on_device.untyped_storage()._cdata for each in state.chunks if each.on_device is not None}
        names = {id(each): name for name, each in state.parameters.items()}
        self._holders = [
            (module._parameters, key, each, names[id(each)])
            for module in model.modules()
            if isinstance(module._parameters, dict)  # a scripted module has no others than it had
            for key, each in module._parameters.items()
            if each is not None and id(each) in names
        ]

    def refuse_replaced(self) -> None:
        """Raises where a module holds another parameter than it did at the start."""
        for name in [each[3] for each in self._holders if each[0].get(each[1]) is not each[2]]:
            raise RuntimeError(
                f"{name} is not the parameter any more that it was when the run started, so the run does not train it; "
                "change its values (copy_, load_state_dict), or start a new run: anyfit.start"
            )

    def take_back(self) -> None:
        """Takes over tensors that user code has put in the place of weights (`p.data = tensor`)."""
        with quietly():
            for name, parameter, mine, _address in [home for home in self._homes if home[1].data_ptr() != home[3]]:
                given = parameter.data
                if given.shape != mine.shape or given.dtype != mine.dtype or given.device != mine.device:
                    raise RuntimeError(f"{name}.data was replaced by {_kind(given)}, and is {_kind(mine)} in this run")
                if given.untyped_storage()._cdata in self._storages:
                    raise RuntimeError(
                        f"{name}.data was made the memory of another weight; tie parameters as one object before the run starts: "
                        "module.a.weight = module.b.weight"
                    )
                mine.copy_(given)  # views of buffers, which have no history
                parameter.data = mine


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def take_over(state: ChunkState, edited: Tensor) -> None:
    """Weights of a chunk as they were edited on the device, to where they live."""
    state.update.finish()
    if state.on_host is not None:
        state.adopt(edited if state.on_device is not None else edited.to(state.on_host.device, copy=True), state.on_host)
