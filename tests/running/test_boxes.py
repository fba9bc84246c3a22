"""Boxes: a flat stretch is found again in them, element by element."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfit.running.boxes import Box, boxes_of, tile, whole

SHAPES = st.lists(st.integers(1, 5), max_size=4).map(tuple)


@given(SHAPES, st.data())
def test_the_boxes_of_a_stretch_are_its_elements_in_order(shape: tuple[int, ...], data: st.DataObject) -> None:
    elements = math.prod(shape)
    start = data.draw(st.integers(0, elements))
    end = data.draw(st.integers(start, elements))
    tensor = torch.arange(elements).view(shape)
    boxes = boxes_of(shape, start, end)
    found = [int(each) for box in boxes for each in tensor[box.slices].reshape(-1)]
    assert found == list(range(start, end))
    assert len(boxes) <= max(2 * len(shape) - 1, 1)
    assert all(box.is_within(shape) and box.elements for box in boxes)


@given(SHAPES, st.data())
def test_the_boxes_of_stretches_that_follow_each_other_tile_the_tensor(shape: tuple[int, ...], data: st.DataObject) -> None:
    elements = math.prod(shape)
    cuts = sorted({0, elements, *data.draw(st.lists(st.integers(0, elements), max_size=5))})
    boxes = [box for start, end in pairwise(cuts) for box in boxes_of(shape, start, end)]
    assert tile(boxes, shape)
    if len(boxes) > 1:
        assert not tile(boxes[1:], shape)
        assert not tile([*boxes[1:], boxes[1]], shape)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(1, 3), st.integers(1, 3)), max_size=6))
def test_tiling_is_every_element_once(made: list[tuple[int, int, int, int]]) -> None:
    boxes = [Box((top, left), (height, width)) for top, left, height, width in made]
    counts = torch.zeros(8, 8, dtype=torch.int)
    for box in boxes:
        counts[box.slices] += 1
    inside = all(box.is_within((4, 4)) for box in boxes)
    assert tile(boxes, (4, 4)) == (inside and bool((counts[:4, :4] == 1).all()))


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_a_single_number_and_an_empty_tensor_are_one_box(shape: tuple[int, ...]) -> None:
    assert boxes_of(shape, 0, math.prod(shape)) == [whole(shape)]
    assert tile([whole(shape)], shape)
