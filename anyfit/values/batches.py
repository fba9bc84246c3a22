"""Batches as users have them: tensors in any nest of mappings, sequences and dataclasses. Torch is known here by shape only."""

from __future__ import annotations

import copy
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def is_tensor(value: object) -> bool:
    return hasattr(value, "untyped_storage") and hasattr(value, "narrow")


def map_tensors(batch: Any, change: Callable[[Tensor], Any]) -> Any:
    """The same nest with every tensor changed; what is not a tensor stays."""
    if is_tensor(batch):
        return change(batch)
    if isinstance(batch, Mapping):
        changed = {key: map_tensors(item, change) for key, item in batch.items()}
        if type(batch) is dict:
            return changed
        try:
            return type(batch)(changed)  # type: ignore[call-arg]  # a Hugging Face BatchEncoding, an OrderedDict
        except TypeError:
            return changed
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*(map_tensors(item, change) for item in batch))
    if isinstance(batch, list | tuple):
        return type(batch)(map_tensors(item, change) for item in batch)
    if dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        twin = copy.copy(batch)  # not built anew: fields outside __init__ stay, and __post_init__ has run
        for field in dataclasses.fields(batch):
            object.__setattr__(twin, field.name, map_tensors(getattr(batch, field.name), change))
        return twin
    return batch


def named_tensors(batch: Any, path: str = "batch") -> Iterator[tuple[str, Tensor]]:
    """Every tensor with the expression that reaches it, such as `batch['input_ids']`."""
    if is_tensor(batch):
        yield path, batch
    elif isinstance(batch, Mapping):
        for key, item in batch.items():
            yield from named_tensors(item, f"{path}[{key!r}]")
    elif isinstance(batch, list | tuple):
        for index, item in enumerate(batch):
            yield from named_tensors(item, f"{path}[{index}]")
    elif dataclasses.is_dataclass(batch) and not isinstance(batch, type):
        for field in dataclasses.fields(batch):
            yield from named_tensors(getattr(batch, field.name), f"{path}.{field.name}")


def rows_of(batch: Any) -> int:
    """How many samples lie along dim 0; tensors without dims belong to all of them."""
    first: tuple[str, int] | None = None
    for path, tensor in named_tensors(batch):
        if tensor.dim() == 0:
            continue
        if first is None:
            first = (path, tensor.shape[0])
        elif tensor.shape[0] != first[1]:
            raise ValueError(
                f"{first[0]} has {first[1]} samples along dim 0 and {path} has {tensor.shape[0]}; "
                "give Job(split=) for batches laid out otherwise"
            )
    if first is None:
        raise ValueError("the batch holds no tensor with a sample dimension; give Job(split=) to say how it is cut")
    return first[1]


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive slices along dim 0 of every tensor. They are views: nothing is copied."""
    rows = rows_of(batch)
    if sum(sizes) != rows:
        raise ValueError(f"cannot cut {rows} samples into micro-batches of {list(sizes)}")
    parts, start = [], 0
    for size in sizes:
        parts.append(map_tensors(batch, functools.partial(_rows_from, start, size)))
        start += size
    return parts


def _rows_from(start: int, size: int, tensor: Tensor) -> Tensor:
    return tensor.narrow(0, start, size) if tensor.dim() else tensor
