"""Parameters in flat chunks: none overlap, none is lost, and kinds are never mixed."""

from __future__ import annotations

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from anyfit.values.layout import ALIGN_ELEMENTS, Chunk, Placeable, lay_out

shapes = st.lists(st.integers(0, 40), max_size=3).map(tuple)
kinds = st.tuples(st.sampled_from([("float32", 4), ("bfloat16", 2)]), st.booleans(), st.integers(-1, 1))
chunk_sizes = st.integers(1, 2**15)


@st.composite
def parameter_lists(draw: st.DrawFn) -> list[Placeable]:
    drawn = draw(st.lists(st.tuples(shapes, kinds), max_size=12))
    return [
        Placeable(f"p{index}", shape, dtype, size, trainable, group)
        for index, (shape, ((dtype, size), trainable, group)) in enumerate(drawn)
    ]


def kind_of(each: Placeable | Chunk) -> tuple[str, int, bool, int]:
    return each.dtype, each.element_bytes, each.trainable, each.group


@given(parameter_lists(), chunk_sizes)
def test_every_parameter_lies_once_in_a_chunk_of_its_kind_with_its_shape(parameters: list[Placeable], chunk_bytes: int) -> None:
    placed = {slot.name: (kind_of(chunk), slot) for chunk in lay_out(parameters, chunk_bytes) for slot in chunk.slots}
    assert sum(len(chunk.slots) for chunk in lay_out(parameters, chunk_bytes)) == len(placed) == len(parameters)
    for parameter in parameters:
        kind, slot = placed[parameter.name]
        assert kind == kind_of(parameter)
        assert slot.shape == parameter.shape
        assert slot.elements == math.prod(parameter.shape)


@given(parameter_lists(), chunk_sizes)
def test_parameters_are_aligned_in_order_and_do_not_overlap(parameters: list[Placeable], chunk_bytes: int) -> None:
    for chunk in lay_out(parameters, chunk_bytes):
        assert all(slot.offset % ALIGN_ELEMENTS == 0 for slot in chunk.slots)
        assert chunk.elements % ALIGN_ELEMENTS == 0
        for slot, after in itertools.pairwise(chunk.slots):
            assert slot.offset + slot.elements <= after.offset
        last = chunk.slots[-1]
        assert last.offset + last.elements <= chunk.elements < last.offset + last.elements + ALIGN_ELEMENTS


@given(parameter_lists(), chunk_sizes)
def test_the_parameters_of_a_kind_keep_the_order_they_came_in(parameters: list[Placeable], chunk_bytes: int) -> None:
    chunks = lay_out(parameters, chunk_bytes)
    for kind in {kind_of(chunk) for chunk in chunks}:
        names = [slot.name for chunk in chunks if kind_of(chunk) == kind for slot in chunk.slots]
        assert names == [parameter.name for parameter in parameters if kind_of(parameter) == kind]


@given(parameter_lists(), chunk_sizes)
def test_a_chunk_is_larger_than_asked_for_only_when_a_parameter_stands_alone(
    parameters: list[Placeable], chunk_bytes: int
) -> None:
    for chunk in lay_out(parameters, chunk_bytes):
        assert chunk.bytes == chunk.elements * chunk.element_bytes
        assert chunk.bytes <= chunk_bytes or len(chunk.slots) == 1


@given(parameter_lists(), chunk_sizes)
def test_a_new_chunk_is_begun_only_when_the_next_parameter_does_not_fit(parameters: list[Placeable], chunk_bytes: int) -> None:
    chunks = lay_out(parameters, chunk_bytes)
    for kind in {kind_of(chunk) for chunk in chunks}:
        for chunk, after in itertools.pairwise(chunk for chunk in chunks if kind_of(chunk) == kind):
            padded = -(-after.slots[0].elements // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
            assert (chunk.elements + padded) * chunk.element_bytes > chunk_bytes


def test_only_trainable_parameters_of_a_group_are_updated() -> None:
    def is_updated(trainable: bool, group: int) -> bool:
        (chunk,) = lay_out([Placeable("p", (3,), "float32", 4, trainable, group)], 2**20)
        return chunk.is_updated

    assert is_updated(True, 0)
    assert not is_updated(False, 0)
    assert not is_updated(True, -1)
