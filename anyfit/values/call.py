"""Call: one op as the dispatcher was asked for it, without its data: all that is needed to ask again.

As text it is compact JSON, [op, arguments, options], in which what JSON has no word for is an object with one key:

    {"tensor": [dtype, shape]}            or [dtype, shape, stride] where it is not contiguous
    {"torch": "bfloat16"}                 a dtype, layout or memory format, by its name in torch
    {"device": null}                      the device that computes, whichever it is
    {"other": "Generator"}                something that cannot be made anew

Equal calls have equal texts, so a text names what was measured.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class TensorForm:
    """A tensor without its data."""

    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def extent(self) -> int:
        """Elements from its first to its last in memory; an expanded one has fewer of them than of its own."""
        if 0 in self.shape:
            return 0
        return 1 + sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))


@dataclass(frozen=True)
class TorchName:
    """A dtype, layout or memory format."""

    name: str


@dataclass(frozen=True)
class TheDevice:
    """The device that computes."""


@dataclass(frozen=True)
class Other:
    """What has no description."""

    kind: str


@dataclass(frozen=True)
class Call:
    op: str  # as Op.name: "mm.default"
    arguments: tuple[Any, ...]  # forms, names, numbers, texts, None, and lists of them
    options: Mapping[str, Any]

    def text(self) -> str:
        options = {name: _written(value) for name, value in self.options.items()}
        return json.dumps([self.op, _written(self.arguments), options], separators=(",", ":"))

    @classmethod
    def read(cls, text: str) -> Call:
        op, arguments, options = json.loads(text)
        return cls(op, tuple(map(_read, arguments)), {name: _read(value) for name, value in options.items()})


def _written(item: Any) -> Any:
    if isinstance(item, TensorForm):
        strides = [] if item.stride == _contiguous(item.shape) else [item.stride]
        return {"tensor": [item.dtype, item.shape, *strides]}
    if isinstance(item, TorchName):
        return {"torch": item.name}
    if isinstance(item, TheDevice):
        return {"device": None}
    if isinstance(item, Other):
        return {"other": item.kind}
    return list(map(_written, item)) if isinstance(item, list | tuple) else item


def _read(item: Any) -> Any:
    if isinstance(item, list):
        return list(map(_read, item))
    if not isinstance(item, dict):
        return item
    ((tag, value),) = item.items()
    if tag == "tensor":
        dtype, shape, *strides = value
        return TensorForm(dtype, tuple(shape), tuple(strides[0]) if strides else _contiguous(shape))
    return {"torch": TorchName, "other": Other}[tag](value) if tag != "device" else TheDevice()


def _contiguous(shape: Sequence[int]) -> tuple[int, ...]:
    strides = [1] * len(shape)
    for dim in range(len(shape) - 1, 0, -1):
        strides[dim - 1] = strides[dim] * max(shape[dim], 1)
    return tuple(strides)


def leaves(nest: Any) -> Iterator[Any]:
    """What an op's arguments hold, through tuples, lists and dicts."""
    for item in nest:
        if isinstance(item, tuple | list):
            yield from leaves(item)
        elif isinstance(item, dict):
            yield from leaves(item.values())
        else:
            yield item
