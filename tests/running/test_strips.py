"""A rank's part of a cut tensor: read from the whole, and written as boxes of it."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfit.layouts.parts import part
from anyfit.placing import weights
from anyfit.placing.stretches import FETCHED_BYTES, Fetcher, Runs, Stretch
from anyfit.placing.weights import of_part, of_tensor
from anyfit.running.boxes import strips_of, tile
from anyfit.values.cuts import Cut, Parted


@st.composite
def cuts(draw: st.DrawFn) -> tuple[tuple[int, ...], Cut, int]:
    n, outer = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = draw(st.integers(0, len(shape) - 1))
    shape[dim] *= n * outer
    return tuple(shape), Cut(dim, outer), n


@given(cuts(), st.data())
def test_a_part_is_read_piece_by_piece_from_the_whole(drawn: tuple[tuple[int, ...], Cut, int], data: st.DataObject) -> None:
    shape, cut, n = drawn
    whole = torch.arange(math.prod(shape)).view(shape)
    rank = data.draw(st.integers(0, n - 1))
    wanted = part(whole, cut, n, rank).reshape(-1)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, wanted.numel())] * 2)))
    for short in (1, 2**14):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(weights, "SHORT_RUN", short)
            if start < end:
                found = of_part(of_tensor(whole), Parted(shape, cut, n, rank))(start, end)
                assert found.tolist() == wanted[start:end].tolist()


@given(cuts(), st.data())
def test_the_stretches_of_all_parts_are_boxes_that_make_up_the_whole(
    drawn: tuple[tuple[int, ...], Cut, int], data: st.DataObject
) -> None:
    shape, cut, n = drawn
    whole, again = torch.arange(math.prod(shape), dtype=torch.float32).view(shape), torch.full(shape, -1.0)
    size = math.prod(shape) // n
    middle = data.draw(st.integers(0, size))
    boxes = []
    for rank in range(n):
        parted, flat = Parted(shape, cut, n, rank), part(whole, cut, n, rank).reshape(-1)
        for start, end in ((0, middle), (middle, size)):
            stretch = Stretch("x", shape, start, flat[start:end].clone(), parted=parted)
            copy = Stretch("x", shape, start, torch.full((end - start,), -1.0), parted=parted)
            for strip in strips_of(shape, start, end, parted):
                boxes.append(strip.box)
                runs, out = Runs(*strip[1:]), torch.empty(strip.box.elements)
                stretch.read_runs(runs, 0, out.numel(), out, Fetcher())
                again[strip.box.slices] = out.view(strip.box.sizes)
                moved = torch.empty_like(out)
                stretch.move_runs(runs, moved)
                first = data.draw(st.integers(0, out.numel() - 1))
                rest = torch.empty(out.numel() - first)
                stretch.read_runs(runs, first, out.numel(), rest, Fetcher())
                assert rest.tolist() == out[first:].tolist()
                copy.write_runs(runs, out)
            assert copy.values.tolist() == stretch.values.tolist()
    assert tile(boxes, shape)
    assert torch.equal(again, whole)


def test_long_runs_are_read_one_by_one() -> None:
    run = FETCHED_BYTES // 4
    flat = torch.arange(2 * run + 6, dtype=torch.float32)
    out = torch.empty(run + 2)
    Stretch("x", (1,), 0, flat).read_runs(Runs(1, run, run + 2), run - 1, 2 * run + 1, out, Fetcher())
    assert (out[0], out[1], out[-1]) == (run, run + 3, 2 * run + 5)
