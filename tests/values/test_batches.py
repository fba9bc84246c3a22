"""Batches of any nest are cut into views, each sample once and in order."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import BatchEncoding

from anyfit.values.batches import cut, map_tensors, named_tensors, rows_of


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclass(frozen=True)
class Framed:
    inside: Any
    count: int = field(init=False, default=0)

    def __post_init__(self) -> None:
        object.__setattr__(self, "count", self.count + 1)


@dataclass(slots=True)
class Slotted:
    inside: Any


def tensors(rows: int) -> st.SearchStrategy[Tensor]:
    """Every element differs, whatever the shape; some are expanded or transposed."""

    def make(shape: list[int], layout: str) -> Tensor:
        tensor = torch.arange(rows * max(1, torch.Size(shape).numel())).reshape(rows, *shape)
        if layout == "expanded":
            return tensor.unsqueeze(-1).expand(*tensor.shape, 2)
        return tensor.transpose(0, -1).contiguous().transpose(0, -1) if layout == "transposed" else tensor

    shapes = st.lists(st.integers(1, 3), max_size=2)
    return st.builds(make, shapes, st.sampled_from(["plain", "expanded", "transposed"]))


def nests(rows: int) -> st.SearchStrategy[Any]:
    others = st.sampled_from([None, "text", 7]) | st.builds(torch.tensor, st.floats(0, 1))
    return st.recursive(
        tensors(rows) | others,
        lambda inner: st.one_of(
            st.dictionaries(st.sampled_from("abc"), inner, max_size=3),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(OrderedDict),
            st.dictionaries(st.sampled_from("abc"), inner, max_size=2).map(BatchEncoding),
            st.lists(inner, max_size=3),
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Pair, inner, inner),
            st.builds(Framed, inner),
            st.builds(Slotted, inner),
        ),
        max_leaves=8,
    )


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Any, list[int]]:
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    rows = sum(sizes)
    return {"certain": draw(tensors(rows)), "nest": draw(nests(rows))}, sizes


def shape_of(batch: Any) -> Any:
    """The nest with the classes of everything and the values of what is no tensor."""
    if isinstance(batch, Tensor):
        return Tensor
    if isinstance(batch, Mapping):
        return type(batch), {key: shape_of(item) for key, item in batch.items()}
    if isinstance(batch, list | tuple):
        return type(batch), [shape_of(item) for item in batch]
    if isinstance(batch, Framed):
        return Framed, batch.count, shape_of(batch.inside)
    if isinstance(batch, Slotted):
        return Slotted, shape_of(batch.inside)
    return batch


@given(cuts())
def test_every_sample_is_in_one_part_in_order_and_without_a_copy(batch_and_sizes: tuple[Any, list[int]]) -> None:
    batch, sizes = batch_and_sizes
    parts = cut(batch, sizes)
    wholes = dict(named_tensors(batch))
    assert len(parts) == len(sizes)
    for part, size in zip(parts, sizes, strict=True):
        assert shape_of(part) == shape_of(batch)
        assert rows_of(part) == size
    for path, whole in wholes.items():
        pieces = [dict(named_tensors(part))[path] for part in parts]
        assert all(piece.untyped_storage().data_ptr() == whole.untyped_storage().data_ptr() for piece in pieces)
        if whole.dim():
            assert torch.equal(torch.cat(pieces), whole)
        else:
            assert all(piece is whole for piece in pieces)


@given(cuts())
def test_mapping_tensors_changes_them_and_nothing_else(batch_and_sizes: tuple[Any, list[int]]) -> None:
    batch, _ = batch_and_sizes
    changed = map_tensors(batch, lambda tensor: tensor + 1)
    assert shape_of(changed) == shape_of(batch)
    for (path, before), (other_path, after) in zip(named_tensors(batch), named_tensors(changed), strict=True):
        assert path == other_path
        assert torch.equal(after, before + 1)


def test_a_tensor_is_named_by_the_expression_that_reaches_it() -> None:
    batch = {"ids": torch.zeros(2), "more": [Framed(Pair("text", torch.zeros(2)))]}
    names = [path for path, _ in named_tensors(batch)]
    assert names == ["batch['ids']", "batch['more'][0].inside[1]"]
    for name, tensor in named_tensors(batch):
        assert eval(name, {"batch": batch}) is tensor


def test_a_mapping_that_cannot_be_built_from_a_dict_becomes_one() -> None:
    batch = defaultdict(list, ids=torch.arange(4))
    assert [part["ids"].tolist() for part in cut(batch, [1, 3])] == [[0], [1, 2, 3]]


def test_rows_that_disagree_name_both_tensors_and_what_to_type() -> None:
    batch = {"ids": torch.zeros(4, 2), "scale": torch.tensor(1.0), "labels": [torch.zeros(3)]}
    with pytest.raises(ValueError, match=r"batch\['ids'\] has 4 samples .* batch\['labels'\]\[0\] has 3; give Job\(split=\)"):
        cut(batch, [4])


@pytest.mark.parametrize("batch", [{}, [], "text", {"scale": torch.tensor(1.0)}, [[1, 2], [3, 4]]])
def test_a_batch_without_samples_says_what_to_type(batch: Any) -> None:
    with pytest.raises(ValueError, match=r"no tensor with a sample dimension; give Job\(split=\)"):
        rows_of(batch)


@pytest.mark.parametrize("sizes", [[], [3], [2, 3], [4, 1]])
def test_sizes_that_do_not_make_the_batch_are_refused(sizes: list[int]) -> None:
    with pytest.raises(ValueError, match="cannot cut 4 samples into micro-batches of"):
        cut(torch.zeros(4), sizes)
