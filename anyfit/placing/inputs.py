"""Arguments of a block's call, kept so that the block can be called with them again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from .chunks import quietly
from .forward_state import version_of
from .walk import INERT

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Input:
    __slots__ = ("given", "needs_grad", "packed", "version")

    def __init__(self, tensor: Tensor, pack: Pack) -> None:
        with quietly():
            self.needs_grad = tensor.requires_grad
            self.packed = pack(tensor)
            self.version = version_of(tensor) if isinstance(self.packed, Tensor) else None
        self.given: Tensor | None = None

    @property
    def is_changed(self) -> bool:
        return self.version is not None and version_of(self.packed) != self.version


class Named:
    """A named tuple that holds inputs: its own constructor would ask them what they are."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: list[Any]) -> None:
        self.kind, self.fields = kind, fields


class Inputs:
    """Arguments of a call, without the graph they come from. Containers are copied, since the caller's may change."""

    def __init__(self, arguments: Any, pack: Pack, unpack: Unpack) -> None:
        self._pack, self._unpack = pack, unpack
        self._tensors: dict[int, Input] = {}
        self.objects: list[Any] = []  # whose state is to be noted
        self._taken = self._take(arguments)

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind in INERT:
            return value
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            found = self._tensors.get(id(value))
            if found is None:
                found = self._tensors[id(value)] = Input(value, self._pack)
                if found.packed is value:
                    found.packed = value.detach()
            return found
        if kind is tuple or kind is list:
            return kind([self._take(each) for each in value])
        if kind is dict:
            return {key: self._take(each) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Named(kind, [self._take(each) for each in value])
        if not isinstance(value, nn.Parameter):
            self.objects.append(value)
        return value

    @property
    def are_changed(self) -> bool:
        return any(each.is_changed for each in self._tensors.values())

    def give(self) -> Any:
        """The arguments again."""
        try:
            return self._given(self._taken)
        finally:
            for each in self._tensors.values():
                each.given = None

    def _given(self, value: Any) -> Any:
        if isinstance(value, Input):
            if value.given is None:
                value.given = self._unpack(value.packed).detach()
                if value.needs_grad:
                    value.given.requires_grad_()
            return value.given
        if isinstance(value, Named):
            fields = [self._given(each) for each in value.fields]
            return tuple.__new__(value.kind, fields)  # its own constructor may want other arguments (PackedSequence)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._given(each) for each in value])
        if kind is dict:
            return {key: self._given(each) for key, each in value.items()}
        return value
