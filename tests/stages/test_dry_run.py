"""What a dry run finds of a forward, how it is cut, and what is refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyfit.stages.dry_run import Dry
from anyfit.staging import blocks_of
from anyfit.values.stages import Value

from .work import built, evenly, looked_at, parts_of, through_a_pipe


class Chain(nn.Module):
    """Four blocks; what `between` does with them is the test's."""

    def __init__(self, between: Callable[[Chain, Tensor], Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(4))
        self.between = between
        self.seen: list[Tensor] = []
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.between(self, x)


def dry_of(between: Callable[[Any, Tensor], Tensor], prepared: Callable[[Chain], Any] = lambda _model: None) -> Dry:
    model = Chain(between)
    prepared(model)
    return looked_at(model, blocks_of(model), lambda fake: fake(torch.randn(3, 8)).square().mean())


def plain(model: Any, x: Tensor) -> Tensor:
    for block in model.blocks:
        x = block(x)
    return x


def skipping(model: Any, x: Tensor) -> Tensor:
    first = model.blocks[0](x)
    mask = (x > 0).to(x.dtype)  # of the batch alone
    y = model.blocks[1](first * mask)
    z = model.blocks[2](y)
    result: Tensor = model.blocks[3](z + first.mean(0, keepdim=True))
    return result


def test_a_stage_receives_what_its_calls_are_made_of_from_whoever_made_it() -> None:
    stages = dry_of(skipping).flow.cut([(0, 0), (1, 1), (2, 2), (3, 3)])
    assert {pair: values for pair in [(0, 1), (0, 2), (0, 3), (1, 2), (2, 3)] if (values := stages.sent(*pair))} == {
        (0, 1): (Value(0, 0),),
        (0, 3): (Value(0, 0),),
        (1, 2): (Value(1, 0),),
        (2, 3): (Value(2, 0),),
    }
    assert stages.sources(2) == (1,)
    assert stages.users(0) == (1, 3)


def test_a_parameter_is_held_by_all_stages_that_use_it() -> None:
    family, model, blocks, batch = built("tied by hand")
    stages = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(batch)[0])).flow.cut([(0, 0), (1, 2), (3, 4)])
    holders = stages.holders({})
    assert holders["table.weight"] == (0, 2)
    assert holders["scale"] == (1, 2)
    assert holders["blocks.1.0.weight"] == (1,)


def by_attribute(model: Any, x: Tensor) -> Tensor:
    x = plain(model, x)
    return x + model.blocks[1].kept


class Keeping(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        self.kept = x * 2
        result: Tensor = super().forward(x)
        return result


def keeping(model: Chain) -> None:
    model.blocks[1] = Keeping(*model.blocks[1].children())


def in_place(model: Chain) -> None:
    block: Any = model.blocks[2]
    block.forward = lambda x: x.tanh_()


def returning_an_object(model: Chain) -> None:
    block: Any = model.blocks[0]
    block.forward = lambda x: (x, object())


def first_of(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.blocks[0](x)[0]
    return result


def writing_a_buffer(model: Any, x: Tensor) -> Tensor:
    x = plain(model, x)
    model.mean.lerp_(x.detach().mean(0), 0.1)
    return x


@pytest.mark.parametrize(
    ("between", "prepared", "message"),
    [
        (by_attribute, keeping, "a tensor that 'blocks.1' makes and does not return is read by the model's code outside of it"),
        (plain, in_place, "'blocks.2' writes in place into a tensor that it is given"),
        (first_of, returning_an_object, "'blocks.0' returns a object, which another rank of a pipeline cannot be sent"),
        (
            writing_a_buffer,
            lambda _model: None,
            "buffer mean is written outside of the model's blocks, and ranks of a pipeline run other parts",
        ),
    ],
)
def test_what_cannot_be_cut_is_refused_by_name(
    between: Callable[[Any, Tensor], Tensor], prepared: Callable[[Chain], Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message.replace("(", r"\(")):
        dry_of(between, prepared)


@pytest.mark.parametrize(
    ("borders", "message"),
    [
        ([(0, 0), (1, 1), (2, 2), (3, 3), (4, 4)], "5 stages, and a forward calls 4 blocks; use fewer stages"),
        ([(0, 1), (3, 3)], "stage 1 has block calls 3 to 3, and the one before it ends with 1"),
        ([(0, 1), (2, 2)], r"the stages end with block call 2, and a forward makes 4 \(blocks.0 to blocks.3\)"),
    ],
)
def test_stages_are_to_have_all_block_calls_one_after_the_other(borders: list[tuple[int, int]], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dry_of(plain).flow.cut(borders)


def test_another_forward_of_the_model_is_cut_at_the_same_calls() -> None:
    stages = dry_of(plain).flow.cut([(0, 1), (2, 3)])
    other = dry_of(lambda model, x: model.blocks[3](model.blocks[1](x))).flow.cut_like(stages)
    assert other.stage_of == (0, 1)


def by_data(model: Any, x: Tensor) -> Tensor:
    order = [0, 1, 2, 3] if x.sum() > 0 else [1, 0, 2, 3]
    for at in order:
        x = model.blocks[at](x)
    return x


def test_calls_in_an_order_that_changes_with_the_data_are_refused_when_it_does() -> None:
    family, _, _, batch = built("sequential")
    model = Chain(by_data).double()
    blocks = blocks_of(model)
    given = {"x": batch["x"][:, :8].abs(), "y": batch["y"][:, :8]}
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(given)[0]))
    stages = dry.flow.cut(evenly(dry, 2))
    through_a_pipe(family, model, blocks, stages, dry, given)
    with pytest.raises(RuntimeError, match=r"call 0 of a forward is of 'blocks\.1', and was of 'blocks\.0'"):
        through_a_pipe(family, model, blocks, stages, dry, given | {"x": -given["x"]})


def by_numbers_of_a_block(model: Any, x: Tensor) -> Tensor:
    x = model.blocks[1](model.blocks[0](x))
    if not model.calm and bool((x > 2).all()):
        x = x * 2
    return plain_rest(model, x)


def plain_rest(model: Any, x: Tensor) -> Tensor:
    result: Tensor = model.blocks[3](model.blocks[2](x))
    return result


def test_code_between_blocks_that_reads_what_another_stage_has_is_refused_when_it_does() -> None:
    family, _, _, batch = built("sequential")
    model: Any = Chain(by_numbers_of_a_block).double()
    model.calm = True
    blocks = blocks_of(model)
    given = {"x": batch["x"][:, :8], "y": batch["y"][:, :8]}
    dry = looked_at(model, blocks, lambda fake: family.loss(fake, parts_of(given)[0]))
    stages = dry.flow.cut([(0, 1), (2, 2), (3, 3)])
    model.calm = False
    with pytest.raises(RuntimeError, match="stage 2 of the pipeline runs code between blocks that reads numbers of what another"):
        through_a_pipe(family, model, blocks, stages, dry, given)
