"""Gradients that add up on the host have their norm from the adding, whichever of a chunk's came together."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfit.kernels.adamw import is_native
from anyfit.placing import local_gradients
from anyfit.placing.local_gradients import HostGradients
from anyfit.values.layout import ALIGN_ELEMENTS, Slot

Passes = list[list[list[int]]]  # of each, which parameters' gradients came together


def slots_of(sizes: list[int]) -> list[Slot]:
    found: list[Slot] = []
    offset = 0
    for index, size in enumerate(sizes):
        found.append(Slot(f"p{index}", (size,), offset, size))
        offset += -(-size // ALIGN_ELEMENTS) * ALIGN_ELEMENTS
    return found


@st.composite
def chunks(draw: st.DrawFn) -> tuple[list[int], Passes]:
    sizes = draw(st.lists(st.sampled_from([1, 3, ALIGN_ELEMENTS, 5 * ALIGN_ELEMENTS, 3000]), min_size=1, max_size=5))
    passes = []
    for _ in range(draw(st.integers(1, 3))):
        there = draw(st.permutations(range(len(sizes))))[draw(st.integers(0, len(sizes) - 1)) :]
        cut = draw(st.integers(0, len(there)))
        passes.append([group for group in (there[:cut], there[cut:]) if group])
    return sizes, passes


@given(chunk=chunks())
@pytest.mark.parametrize("is_in_cpp", [True, False])
def test_a_norm_is_that_of_the_gradients_that_came(is_in_cpp: bool, chunk: tuple[list[int], Passes]) -> None:
    sizes, passes = chunk
    slots = slots_of(sizes)
    flat = torch.full((slots[-1].offset + slots[-1].elements,), 7.0)  # the padding is nobody's
    home = HostGradients(flat, {slot.name: flat[slot.offset : slot.offset + slot.elements] for slot in slots}, ())
    expected: dict[str, torch.Tensor] = {}
    generator = torch.Generator().manual_seed(len(sizes))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("anyfit.kernels.sums.is_native", lambda: is_in_cpp and is_native())
        for groups in passes:
            for group in groups:
                summand = torch.randn(len(flat), generator=generator).bfloat16()
                for is_first in (True, False):
                    now = [slots[each] for each in group if (slots[each].name not in home.names) == is_first]
                    home.add(now, summand, is_first=is_first, threads=2)
                for slot in (slots[each] for each in group):
                    own = summand[slot.offset : slot.offset + slot.elements].float()
                    expected[slot.name] = expected[slot.name] + own if slot.name in expected else own
                    home.names.add(slot.name)
        together = torch.cat(list(expected.values()))
        assert float(home.norm(2)) == pytest.approx(float(together.double().norm()), rel=3e-7)
    for name, each in expected.items():
        assert torch.equal(home.views[name], each)


def test_it_is_not_read_once_more_when_every_part_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("read once more")

    (slot,) = slots_of([3000])
    home = HostGradients(torch.zeros(3000), {}, ())
    home.views[slot.name] = home.flat
    home.names.add(slot.name)
    home.add([slot], torch.ones(3000), is_first=True, threads=1)
    monkeypatch.setattr(local_gradients, "norm", refuse)
    assert float(home.norm(1)) == pytest.approx(3000**0.5)
