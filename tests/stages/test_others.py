"""Any model trains in stages as it is, or is refused by name before it trains."""

from __future__ import annotations

import copy

import pytest

from .others import EQUAL, QUICK, REFUSED
from .test_pipe import assert_equal
from .work import built, evenly, looked_at, parts_of, plainly, through_a_pipe


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in EQUAL])
def test_models_nobody_thought_of_make_the_losses_and_gradients_of_the_whole(name: str, count: int) -> None:
    family, model, blocks, batch = built(name)
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0]))
    stages = dry.flow.cut(evenly(dry, count))
    expected = plainly(family, copy.deepcopy(model), blocks, batch)
    assert_equal(through_a_pipe(family, model, blocks, stages, dry, batch), expected)


@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.full) if "layers" in name else name for name in REFUSED])
def test_models_whose_forwards_are_not_alike_are_refused_by_name(name: str) -> None:
    family, model, blocks, batch = built(name)
    with pytest.raises(ValueError, match=REFUSED[name][1]):
        looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0]))
