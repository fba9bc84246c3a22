"""What a forward reads and may change besides its inputs: noted before it runs, and put back for the time it runs again.

State lies in *cells* (cells.py). A walk finds the cells that a block can reach, once; from then on a note is a shallow copy of
each, and is compared by identity. Where a cell holds something new, the block is walked again. Tensors are copied on write: a
note costs no bytes before that. Iterators have no state that could be read: a block that holds one is not recomputed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from .cells import Cell, Numpy, device_generator_name, equal, generators
from .chunks import quietly
from .walk import INERT, Walk

FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
]


class Settings:
    """Of torch, as they were around a forward: backward runs outside of the user's `with`."""

    __slots__ = ("_autocast", "_flags", "_modes")

    def __init__(self, device: torch.device) -> None:
        self._flags = [get() for get, _ in FLAGS]
        self._modes = _get_current_function_mode_stack()
        kinds = ("cpu",) if device.type in ("cpu", "meta") else ("cpu", device.type)
        self._autocast = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]

    @property
    def facts(self) -> tuple[Any, ...]:
        return (*self._flags, *self._autocast)

    @contextmanager
    def again(self) -> Iterator[None]:
        with contextlib.ExitStack() as inside:
            for (get, put), then in zip(FLAGS, self._flags, strict=True):
                if (now := get()) != then:
                    put(then)
                    inside.callback(put, now)
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    inside.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            around = _get_current_function_mode_stack()
            for mode in self._modes:
                if mode not in around:
                    inside.enter_context(mode)
            yield


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _copied(tensor: Tensor) -> Tensor:
    """Its values, copied when somebody writes; at once where the memory is not torch's own."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return tensor.detach().clone()


_address: Callable[[Tensor], int] = vars(torch._C)["_data_address"]  # which makes no copy, as `data_ptr` would


def _is_changed(tensor: Tensor, version: int, copy: Tensor) -> bool:
    """By the memory that tensor and copy share until somebody writes, too: batch norm writes without a new version."""
    if version_of(tensor) != version:
        return True
    return tensor.layout != torch.strided or _address(tensor) != _address(copy)


def _unwatched() -> contextlib.AbstractContextManager[Any]:
    """Inside, what counts or keeps the model's ops sees none."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


class Note:
    """The state of some places as it was when this was made."""

    __slots__ = ("_copies", "_places", "_read", "_requires_grad", "_settings", "_versions", "device")

    def __init__(self, places: Places, read: list[Any], device: torch.device) -> None:
        self._places, self._read, self.device = places, read, device
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        with quietly():
            if places.tensors:
                with torch.no_grad(), _unwatched():
                    self._copies = [_copied(tensor) for tensor, _ in places.tensors]
                self._versions = [version_of(tensor) for tensor, _ in places.tensors]
            self._requires_grad = [(parameter.requires_grad, version_of(parameter)) for parameter, _ in places.parameters]
        self._settings = Settings(device)

    def edited(self) -> str | None:
        """A parameter that was edited since."""
        with quietly():
            for (parameter, name), (_, version) in zip(self._places.parameters, self._requires_grad, strict=True):
                if version_of(parameter) != version:
                    return name
        return None

    def now(self) -> Note:
        return Note(self._places, self._places.read(), self.device)

    def differences(self, other: Note, but: str | None = None) -> list[str]:
        """Places that do not hold equal values in two notes, `but` one."""
        found = []
        for cell, one, two in zip(self._places.cells, self._read, other._read, strict=True):
            if cell.name != but and not cell.is_same(one, two) and not equal(one, two):
                keys = _keys_apart(one, two)
                found += [f"{cell.name}.{key}" for key in keys] or [cell.name]
        for (_, name), one, two in zip(self._places.tensors, self._copies, other._copies, strict=True):
            if not equal(one, two):
                found.append(name)
        return list(dict.fromkeys(found))

    def put_back(self, now: list[Any] | None = None) -> set[int]:
        """Where cells hold something else, `now` or when they are read. Gives the storages whose values were others."""
        changed = set()
        for cell, read, other in zip(self._places.cells, self._read, self._places.read() if now is None else now, strict=True):
            if not cell.is_same(read, other):
                cell.write(read)
        with torch.no_grad(), quietly():
            if self._copies:
                with _unwatched():
                    for (tensor, _), version, copy in zip(self._places.tensors, self._versions, self._copies, strict=True):
                        if _is_changed(tensor, version, copy):
                            tensor.detach().copy_(copy)
                            changed.add(tensor.untyped_storage()._cdata)
            for (parameter, _), (needed, _) in zip(self._places.parameters, self._requires_grad, strict=True):
                if parameter.requires_grad != needed:
                    parameter.requires_grad_(needed)
        return changed

    @contextmanager
    def again(self) -> Iterator[set[int]]:
        """Inside, all is as it was then; afterwards as it is now. Of the storages that it gives, copy what is to outlive this."""
        now = self.now()
        # What else autograd has saved of these tensors is as it was, once their values are.
        tensors = tuple(tensor for tensor, _ in self._places.tensors if not tensor.is_inference())
        with _unsafe_preserve_version_counter(tensors) if tensors else contextlib.nullcontext(), self._settings.again():
            try:
                yield self.put_back(now._read)
            finally:
                now.put_back()


def _keys_apart(one: Any, other: Any) -> list[str]:
    """Of two sets of attributes, those that differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return []
    return [key for key in {**one, **other} if isinstance(key, str) and not equal(one.get(key), other.get(key))]


class Places:
    """Where state lies that is noted together."""

    __slots__ = ("_shared", "cells", "parameters", "tensors")

    def __init__(self, shared: Sequence[Cell], *walks: Walk) -> None:
        self._shared = len(shared)  # generators, which hold no other state
        self.cells = [*shared, *(cell for walk in walks for cell in walk.cells)]
        self.tensors = [each for walk in walks for each in walk.tensors]
        self.parameters = [each for walk in walks for each in walk.parameters]

    def read(self) -> list[Any]:
        return [cell.read() for cell in self.cells]

    def holds_new(self, before: list[Any], now: list[Any]) -> bool:
        """Whether something was put into a cell that is a place for state itself."""
        return any(
            not cell.is_same(one, two) and any(type(value) not in INERT for value in cell.held(two))
            for cell, one, two in zip(self.cells[self._shared :], before[self._shared :], now[self._shared :], strict=True)
        )


class ForwardState:
    """Of one block, on one device."""

    def __init__(self, block: nn.Module, name: str, device: torch.device, forward: Callable[..., Any] | None = None) -> None:
        """`forward`: the block's own, where another stands in for it."""
        self._block, self._forward, self._name, self._device = block, forward or block.forward, name, device
        self._shared = generators(device)
        self._numpy = next(each for each in self._shared if isinstance(each, Numpy))
        self._walk: Walk | None = None
        self._places = Places(self._shared)
        self._read: list[Any] = []

    def note(self, arguments: Sequence[Any] = ()) -> Note:
        """Of what the block can reach now, also through these arguments."""
        read = self._places.read()
        if self._walk is None or self._places.holds_new(self._read, read):
            self._walk = Walk().of_block(self._block, self._forward, self._name)
            self._places = Places(self._shared, self._walk)
            read = self._places.read()
        self._read = read
        if not arguments:
            return Note(self._places, read, self._device)
        places = Places(self._shared, self._walk, Walk(self._walk).of(list(arguments), f"an argument of {self._name}"))
        return Note(places, places.read(), self._device)

    def facts(self) -> list[Any]:
        """Of what the block could reach when it was last noted, generators apart."""
        return self._places.read()[len(self._shared) :]

    def is_as(self, facts: list[Any]) -> bool:
        """Whether these are the same objects still."""
        cells = self._places.cells[len(self._shared) :]
        return len(cells) == len(facts) and all(cell.is_same(one, cell.read()) for cell, one in zip(cells, facts, strict=True))

    def walked_again(self) -> list[tuple[str, Any]]:
        """Facts by name, of what the block can reach now."""
        self._walk = None
        self.note()
        names = [cell.name for cell in self._places.cells[len(self._shared) :]]
        return list(zip(names, self.facts(), strict=True))

    @property
    def reached(self) -> list[tuple[Tensor, str]]:
        """Tensors and parameters that the block could reach when it was last noted."""
        return [*self._places.tensors, *self._places.parameters]

    @property
    def drawn_from(self) -> str:
        """What the device's own generator is called in a note."""
        return device_generator_name(self._device)

    @property
    def iterators(self) -> list[str]:
        return [] if self._walk is None else self._walk.iterators

    def glance(self) -> Any:
        """Of numpy's generator, whose exact state is noted from the first time on that the block draws from it."""
        return self._numpy.glance()

    def ran(self, glance: Any) -> None:
        self._numpy.is_exact = glance != self._numpy.glance() or glance is None
