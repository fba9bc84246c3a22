"""Nests of what users make batches of: mappings, sequences, dataclasses and objects of their own, with tensors in them."""

from __future__ import annotations

import collections
import copy
import dataclasses
import datetime
import enum
import numbers
import pathlib
import sys
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

SEQUENCES = (list, tuple, collections.deque, range)
FOR_ALL = (
    numbers.Number, str, bytes, type(None), enum.Enum, type, slice, types.FunctionType, types.BuiltinFunctionType,
    types.ModuleType, pathlib.PurePath, datetime.date, datetime.time, datetime.timedelta, uuid.UUID,
)  # fmt: skip
MOST_DEPTH = 8  # of objects in objects, where tensors are looked for


def is_tensor(value: object) -> bool:
    torch = sys.modules.get("torch")  # which whoever made a tensor has imported
    return torch is not None and isinstance(value, torch.Tensor)


def is_array(value: object) -> bool:
    """One of numpy's, or a scalar of its."""
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(value, numpy.ndarray | numpy.generic)


def map_tensors(batch: Any, change: Callable[[Tensor], Any], depth: int = MOST_DEPTH) -> Any:
    """The same nest with every tensor changed, also in objects that hold some; what is not a tensor stays."""
    if is_tensor(batch):
        return change(batch)
    if (fields := fields_of(batch)) is not None:
        changed = {key: map_tensors(item, change, depth) for key, item in fields.items() if not _stays(batch, key)}
        return with_fields(batch, fields | changed)
    if is_sequence(batch):
        return with_entries(batch, [map_tensors(item, change, depth) for item in batch])
    if depth and _is_object(batch) and any(True for _ in named_tensors(batch, "", depth)):
        twin = copy.copy(batch)
        for name, item in _attributes(twin).items():
            object.__setattr__(twin, name, map_tensors(item, change, depth - 1))
        return twin
    return batch


def named_tensors(batch: Any, path: str = "batch", depth: int = MOST_DEPTH) -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the expression that reaches it, such as `batch['input_ids']`."""
    if is_tensor(batch):
        yield path, batch
    elif (parts := parts_of(batch)) is not None:
        for key, item in parts:
            yield from named_tensors(item, reached(batch, path, key), depth)
    elif depth and _is_object(batch):
        for name, item in _attributes(batch).items():
            yield from named_tensors(item, f"{path}.{name}", depth - 1)


def is_strided(tensor: Tensor) -> bool:
    return str(tensor.layout) == "torch.strided"


def is_dense(tensor: Tensor) -> bool:
    """Neither nested nor sparse."""
    return not tensor.is_nested and is_strided(tensor)


def shape_of(tensor: Tensor) -> tuple[int, ...]:
    """Also of a nested tensor, which has only its number of samples and of dims."""
    return (tensor.size(0), tensor.dim()) if tensor.is_nested else tuple(tensor.shape)


def fields_of(value: Any) -> dict[Any, Any] | None:
    """By key or name, the fields of a mapping, a named tuple or a dataclass; None for anything else."""
    if isinstance(value, Mapping):
        return dict(value.items())
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return dict(enumerate(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return None


def parts_of(value: Any) -> Iterable[tuple[Any, Any]] | None:
    """By key, name or index, the fields or entries of a nest; None for anything else."""
    if (fields := fields_of(value)) is not None:
        return fields.items()
    return enumerate(value) if is_sequence(value) else None


def reached(value: Any, path: str, key: Any) -> str:
    return f"{path}.{key}" if dataclasses.is_dataclass(value) and not isinstance(value, Mapping) else f"{path}[{key!r}]"


def _stays(value: Any, key: Any) -> bool:
    """The sizes in a PackedSequence, which are read by the host."""
    return type(value).__name__ == "PackedSequence" and value._fields[key] == "batch_sizes"


def with_fields(value: Any, fields: dict[Any, Any]) -> Any:
    if isinstance(value, Mapping):
        return fields if type(value) is dict else _with_items(value, fields)
    if isinstance(value, tuple):
        return type(value)._make(fields.values())  # type: ignore[attr-defined]
    twin = copy.copy(value)  # not built anew: fields outside __init__ stay, and __post_init__ has run
    for name, item in fields.items():
        object.__setattr__(twin, name, item)
    return twin


def _with_items(value: Any, items: dict[Any, Any]) -> Any:
    """A mapping of the same class: with all else that it has, where its copy has items of its own."""
    before = dict(value.items())
    try:
        twin = copy.copy(value)
        for key, item in items.items():
            twin[key] = item
        if all(twin[key] is item for key, item in items.items()) and all(value[key] is item for key, item in before.items()):
            return twin
    except Exception:  # of a class that anyone may have written
        pass
    for key, item in before.items():
        if value[key] is not item:
            value[key] = item
    try:
        return type(value)(items)
    except TypeError:
        return items


def is_sequence(value: Any) -> bool:
    return isinstance(value, SEQUENCES) and not hasattr(value, "_fields") and not is_torchs(value)


def with_entries(value: Any, entries: list[Any]) -> Any:
    if type(value) in (list, range):
        return entries
    if isinstance(value, list):
        twin = copy.copy(value)
        twin[:] = entries
        return twin
    if isinstance(value, collections.deque):
        return collections.deque(entries, value.maxlen)
    try:
        return type(value)(entries)
    except TypeError:
        return tuple(entries)


def is_torchs(value: Any) -> bool:
    """A dtype, a device, a size: what torch says of tensors, and no tensor."""
    return type(value).__module__ == "torch" and not is_tensor(value)


def _is_object(value: Any) -> bool:
    """One of a class of somebody's own, that may hold tensors; a module's are its own."""
    if isinstance(value, FOR_ALL) or is_array(value) or is_torchs(value) or hasattr(value, "named_parameters"):
        return False
    return type(value).__module__ != "builtins" and bool(_attributes(value))


def _attributes(value: Any) -> dict[str, Any]:
    found = dict(getattr(value, "__dict__", None) or {})
    return found | {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}


def slots_of(kind: type) -> list[str]:
    """Attributes that objects of a class have in slots."""
    slots = (vars(base).get("__slots__", ()) for base in kind.__mro__)
    names = (name for each in slots for name in ((each,) if isinstance(each, str) else each))
    return [name for name in names if name not in ("__dict__", "__weakref__")]
