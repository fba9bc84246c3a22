"""Batches as users have them: tensors, arrays, numbers and text in any nest.

A batch that goes through whole is as the user made it. To be cut, it has to be told which of it belongs to which sample:

| entry | cut |
|---|---|
| a tensor or numpy array whose dim 0 is the number of samples | along dim 0, as a view |
| a list, tuple, deque or range with one entry a sample | entry by entry: captions, labels, dicts, tensors of any length |
| a mapping, dataclass or named tuple; a list or tuple of such fields | field by field |
| a number, text, None, a tensor without dims | not: it belongs to all samples |
| anything else: a tensor of other size, a list of other length, an object | refused by name |

A list of R entries that all have R rows may be either, R fields or R samples. It is fields where its entries are not alike, as
inputs and labels are not, and else refused. How many samples there are is what tensors and arrays outside of lists say; without
any, the number for which the whole batch can be told apart.
"""

from __future__ import annotations

import collections
import functools
import numbers
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from .nests import (
    FOR_ALL,
    SEQUENCES,
    fields_of,
    is_array,
    is_dense,
    is_sequence,
    is_tensor,
    is_torchs,
    map_tensors,
    parts_of,
    reached,
    shape_of,
    with_entries,
    with_fields,
)

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["samples", "fields", "all", "either", "unclear"]
Change: TypeAlias = Callable[[Any], Any]
WAY_OUT = "give Job(split=) to say how such a batch is cut"
NO_SAMPLES = f"how many samples the batch has cannot be told; {WAY_OUT}"


# ---------------------------------------------------------------------- samples


def rows_of(batch: Any, expected: int | None = None) -> int | None:
    """How many samples a batch has: `expected` where that is possible; None where nothing tells."""
    if is_tensor(batch):
        return _first_dim(batch)
    refuse_iterators(batch)
    certain, others = Counter[int](), dict[int, None]()  # what tensors outside of lists say, and what else could be
    _count(batch, certain, others, in_list=False)
    candidates = list(certain) or list(others)
    clear = [each for each in candidates if not _unclear(batch, each)]
    if expected in candidates:
        return expected
    if clear:
        return clear[0]
    most = certain.most_common(2)
    return most[0][0] if len(most) == 1 or (most and most[0][1] > most[1][1]) else None


def _count(value: Any, certain: Counter[int], others: dict[int, None], *, in_list: bool) -> None:
    rows = _first_dim(value)
    if rows is not None:
        certain.update(() if in_list else (rows,))
        others[rows] = None
    elif (fields := fields_of(value)) is not None:
        for item in fields.values():
            _count(item, certain, others, in_list=in_list)
    elif is_sequence(value) and value:
        if all(isinstance(item, Mapping) for item in value):  # a list of dicts is rather one of samples
            others[len(value)] = None
        for item in value:
            _count(item, certain, others, in_list=True)
        others[len(value)] = None


def refuse_iterators(batch: Any, path: str = "batch") -> None:
    """What can be read only once: planning reads a batch, and so does a step that is repeated."""
    if isinstance(batch, Iterator):
        raise TypeError(
            f"{path} is a {type(batch).__name__}, which can be read only once, and planning and a step that is repeated read "
            "a batch as well: make it a list"
        )
    for key, item in () if isinstance(batch, range) else parts_of(batch) or ():
        if not isinstance(item, FOR_ALL):
            refuse_iterators(item, reached(batch, path, key))


def uncuttable(batch: Any, rows: int) -> str | None:
    """Why a batch of so many samples cannot be cut, and what to type; None where it can."""
    return f"{unclear}; {WAY_OUT}" if (unclear := _unclear(batch, rows)) else None


def cut(batch: Any, sizes: Sequence[int]) -> list[Any]:
    """Consecutive parts of the batch. Those of tensors and arrays are views: nothing is copied."""
    rows = sum(sizes)
    found = rows_of(batch, rows)
    if found is not None and found != rows:
        raise ValueError(f"cannot cut {found} samples into micro-batches of {list(sizes)}")
    if len(sizes) == 1:
        return [batch]
    reason = NO_SAMPLES if found is None else uncuttable(batch, rows)
    if reason is not None:
        raise ValueError(reason)
    parts, start = [], 0
    for size in sizes:
        parts.append(_changed(batch, rows, functools.partial(_sliced, start, size)))
        start += size
    return parts


def joined(parts: Sequence[Any], rows: int) -> Any:
    """Batches of so many samples each as one of all, in their order. What is not by sample is that of the first."""
    columns: list[list[Any]] = []
    for part in parts:
        own: list[Any] = []
        _changed(part, rows, own.append)
        columns.append(own)
    if len({len(own) for own in columns}) > 1:
        raise ValueError("they are not made alike")
    values = zip(*columns, strict=True)
    return _changed(parts[0], rows, lambda _: _one_of(next(values)))


def _one_of(values: Sequence[Any]) -> Any:
    """Of the same samples' entries in several batches."""
    first = values[0]
    if not is_tensor(first) and not is_array(first):
        return with_entries(first, [entry for value in values for entry in value])
    shapes = {(str(value.dtype), tuple(value.shape[1:])) for value in values}
    if len(shapes) > 1 or (is_tensor(first) and not all(map(is_dense, values))):
        raise ValueError(" and ".join(map(_described, values)) + " do not make one")
    if is_tensor(first):
        import torch

        return torch.cat(list(values))
    return sys.modules["numpy"].concatenate(list(values))


def reordered(batch: Any, order: Sequence[int]) -> Any:
    """A batch that can be cut, its samples in another order."""

    def taken(value: Any) -> Any:
        if is_tensor(value):
            return _taken(value, order)
        return value[list(order)] if is_array(value) else with_entries(value, [list(value)[index] for index in order])

    return _changed(batch, len(order), taken)


def with_rows(batch: Any, rows: int | None, wanted: int, of_samples: Change, of_all: Change = lambda tensor: tensor) -> Any:
    """A batch of `wanted` samples made from one of `rows`: `of_samples` makes tensors with a row a sample, `of_all` all others;
    lists and arrays repeat their samples. What is unclear stays as it is."""
    if not rows:
        return map_tensors(batch, of_all)
    chosen = [index % rows for index in range(wanted)]

    def repeat(value: Any) -> Any:
        if is_tensor(value):
            return of_samples(value)
        if is_array(value):
            return value[chosen]
        return with_entries(value, [map_tensors(value[index], of_all) for index in chosen])

    return _changed(batch, rows, repeat, lambda other: map_tensors(other, of_all))


def _changed(value: Any, rows: int, of_samples: Change, of_all: Change = lambda other: other) -> Any:
    kind = _kind(value, rows)
    if kind == "samples":
        return of_samples(value)
    if (fields := fields_of(value)) is not None:
        return with_fields(value, {key: _changed(item, rows, of_samples, of_all) for key, item in fields.items()})
    if kind in ("fields", "either"):
        return with_entries(value, [_changed(item, rows, of_samples, of_all) for item in value])
    return of_all(value)


def _sliced(start: int, size: int, value: Any) -> Any:
    if not is_tensor(value):
        part = value[start : start + size] if type(value) is not collections.deque else list(value)[start : start + size]
        return part if type(part) is type(value) else with_entries(value, list(part))
    return value.narrow(0, start, size) if is_dense(value) else _taken(value, range(start, start + size))


def repeated(tensor: Tensor, wanted: int) -> Tensor:
    """So many rows of a tensor: its own, and from the first again where it has fewer."""
    return _taken(tensor, [index % tensor.size(0) for index in range(wanted)])


def _taken(tensor: Tensor, rows: Sequence[int]) -> Tensor:
    import torch

    if tensor.is_nested:
        samples = tensor.unbind()
        return torch.nested.as_nested_tensor([samples[index] for index in rows], layout=tensor.layout)
    chosen = torch.tensor(list(rows), dtype=torch.long, device=tensor.device)
    if is_dense(tensor) or tensor.layout is torch.sparse_coo:
        return tensor.index_select(0, chosen)
    found: Tensor = tensor.to_sparse_coo().index_select(0, chosen).to_sparse(layout=tensor.layout)
    return found


# ---------------------------------------------------------------------- what an entry is


def _kind(value: Any, rows: int) -> Kind:
    dim = _first_dim(value)
    if dim is not None:
        return "samples" if dim == rows and _can_be_sliced(value) else "unclear"
    if is_tensor(value) or is_array(value) or isinstance(value, FOR_ALL) or is_torchs(value):
        return "all"
    if fields_of(value) is not None:
        return "fields" if not _is_by_sample(value, rows) else "unclear"
    if not is_sequence(value):
        return "unclear"
    if all(each is None for each in value):
        return "all"
    if len(value) != rows:
        return "fields" if any(not isinstance(each, FOR_ALL) for each in value) else "unclear"
    as_samples = len({_likeness(each) for each in value if each is not None}) == 1  # None stands for one that is missing
    if not as_samples or not isinstance(value[0], FOR_ALL):
        as_fields = all(not _unclear(each, rows) for each in value) and any(_has_samples(each, rows) for each in value)
        if as_fields:
            return "either" if as_samples and rows > 1 else "fields"
    return "samples" if as_samples else "unclear"


def _unclear(value: Any, rows: int, path: str = "batch") -> str:
    """What of a batch of so many samples is not known to belong to one or to all; or nothing."""
    kind = _kind(value, rows)
    if kind in ("unclear", "either"):
        which = f": {len(value)} fields or {len(value)} samples, both can be" if kind == "either" else ""
        return f"{path} is {_described(value)}, and the batch has {rows} samples{which}"
    if kind == "fields":
        for key, item in parts_of(value) or ():
            if found := _unclear(item, rows, reached(value, path, key)):
                return found
    return ""


def _has_samples(value: Any, rows: int) -> bool:
    kind = _kind(value, rows)
    return kind == "samples" or (kind == "fields" and any(_has_samples(item, rows) for _, item in parts_of(value) or ()))


def _likeness(value: Any) -> Any:
    """What the samples of a batch have in common."""
    if is_tensor(value):
        return "tensor", value.dtype, value.dim()
    if isinstance(value, numbers.Number):
        return "number"
    if is_array(value):
        return "array", str(value.dtype), value.ndim
    if isinstance(value, Mapping):
        return "mapping", frozenset(value)
    return type(value)


def _is_by_sample(value: Any, rows: int) -> bool:
    """A mapping from samples to numbers, as far as can be seen: its keys are no names of fields."""
    if not isinstance(value, Mapping) or len(value) != rows or rows < 2 or any(isinstance(key, str) for key in value):
        return False
    return not any(_has_samples(item, rows) for item in value.values())


def _first_dim(value: Any) -> int | None:
    """Entries along dim 0 of a tensor or array that has one."""
    if is_tensor(value):
        return int(value.size(0)) if value.dim() else None
    return int(value.shape[0]) if is_array(value) and value.ndim else None


def _can_be_sliced(value: Any) -> bool:
    if is_array(value) or is_dense(value):
        return True
    try:
        _sliced(0, 1, value)
    except (RuntimeError, NotImplementedError):
        return False
    return True


def _described(value: Any) -> str:
    if is_tensor(value):
        layout = "" if is_dense(value) else "nested " if value.is_nested else f"{str(value.layout).removeprefix('torch.')} "
        return f"a {layout}tensor of shape {shape_of(value)}"
    if is_array(value):
        return f"an array of shape {tuple(value.shape)}"
    named = type(value).__name__
    article = "an" if named[:1].lower() in tuple("aeiou") else "a"
    return f"{article} {named}" + (f" of {len(value)}" if isinstance(value, SEQUENCES) else "")
