"""The stages of a model, one after the other, do what the whole model does: all families, all on one rank."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from .families import FAMILIES, Family, squares, vectors
from .work import Pass, built, evenly, in_double, looked_at, on_threads, parts_of, plainly, through_a_pipe

QUICK = ("sequential", "unet", "tied by hand", "unused")


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.full) for name in FAMILIES])
def test_stages_make_the_losses_and_gradients_of_the_whole_model(name: str, count: int) -> None:
    family, model, blocks, batch = built(name)
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0]))
    stages = dry.flow.cut(evenly(dry, count))
    expected = plainly(family, copy.deepcopy(model), blocks, batch)
    assert_equal(through_a_pipe(family, model, blocks, stages, dry, batch), expected)


@pytest.mark.parametrize(("ranks", "count"), [(2, 2), (2, 4), (3, 3), (2, 6), (3, 6)])
@pytest.mark.parametrize("name", ["unet", "unused"])
def test_ranks_whose_sends_wait_for_receives_make_them_too(name: str, ranks: int, count: int) -> None:
    """Skips from any stage to any later one, with as many stages a rank as there are."""
    family, model, blocks, batch = built(name)
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0]))
    stages = dry.flow.cut(evenly(dry, count))
    expected = plainly(family, copy.deepcopy(model), blocks, batch)
    assert_equal(on_threads(family, model, blocks, stages, dry, batch, ranks), expected)


def test_a_stage_without_parameters_gives_on_what_it_makes() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16)).double()
    family, blocks = Family(lambda: model, vectors, squares), ["0", "1", "2"]
    batch = in_double(family.batch())
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0]))
    stages = dry.flow.cut([(0, 0), (1, 1), (2, 2)])
    assert set(stages.holders({}).values()) == {(0,), (2,)}
    expected = plainly(family, copy.deepcopy(model), blocks, batch)
    assert_equal(on_threads(family, model, blocks, stages, dry, batch, 3), expected)


def assert_equal(found: Pass, expected: Pass) -> None:
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for parameter, gradient in expected.gradients.items():
        mine = found.gradients[parameter]
        assert (mine is None) == (gradient is None), parameter
        if gradient is not None:
            torch.testing.assert_close(mine, gradient, rtol=1e-9, atol=1e-12, msg=parameter)
