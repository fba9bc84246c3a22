"""A block is served by the capture of another where it does the same, and never where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from anyfit.layouts.alike import Alike
from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import capture
from anyfit.layouts.cut_block import CutBlock, Solved
from anyfit.planning.layouts import Ask, solve
from anyfit.values.plan import BlockCut

from .blocks import NAMES, built, calls_of
from .work import posed_on

WIDTH = 8


class Layer(nn.Module):
    scale = 1.0

    def __init__(self, index: int, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        self.index, self._does = index, does
        self.kept = {"index": index}

    @property
    def twice(self) -> int:
        return 2 * self.index

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self._does(self, self.inner(x))
        return found


class WithItsOwnAsk(Layer):
    def __getattr__(self, name: str) -> Any:
        return super().__getattr__(name)


def found_for(second: nn.Module, first: nn.Module, *args: Any) -> bool:
    """Whether the first one's capture serves the second; then it is what the second's own would be."""
    alike = Alike()
    assert alike.find(second, args, {}, {}) is None
    alike.keep(capture(first, args), first, {})
    found = alike.find(second, args, {}, {})
    if found is not None:
        own = capture(second, args)
        assert found.key == own.key
        assert found.guard == own.guard
    return found is not None


def _bent(_layer: Any, x: Tensor) -> Tensor:
    return x.relu()


def layers(does: Callable[[Any, Tensor], Tensor], kind: type[Layer] = Layer) -> tuple[Layer, Layer]:
    return kind(0, does), kind(1, does)


def test_a_number_that_is_never_read_does_not_tell_layers_apart() -> None:
    first, second = layers(_bent)
    x = torch.randn(3, WIDTH)
    assert found_for(second, first, x)
    assert found_for(second.eval(), first.eval(), x)


@pytest.mark.parametrize(
    "does",
    [
        lambda layer, x: x * layer.index,
        lambda layer, x: x * layer.twice,
        lambda layer, x: x * getattr(layer, "index", 3),
        lambda layer, x: x if hasattr(layer, "scale") and layer.kept["index"] else x.relu(),
        lambda layer, x: x * vars(layer).get("index", 7),
        lambda layer, x: x if layer.__dict__["kept"]["index"] else x.relu(),
    ],
    ids=["attribute", "property", "getattr", "dict", "vars", "__dict__"],
)
@pytest.mark.parametrize("kind", [Layer, WithItsOwnAsk])
def test_a_number_that_is_read_does(does: Callable[[Any, Tensor], Tensor], kind: type[Layer]) -> None:
    first, second = layers(does, kind)
    x = torch.randn(3, WIDTH)
    assert not found_for(second, first, x)
    second.index, second.kept = first.index, dict(first.kept)
    assert found_for(second, first, x)


def test_functions_that_layers_hold_are_the_same_only_if_they_are_one() -> None:
    def made(factor: float) -> Callable[[Any, Tensor], Tensor]:
        return lambda _layer, x: x * factor

    x = torch.randn(3, WIDTH)
    assert not found_for(Layer(0, made(2.0)), Layer(0, made(3.0)), x)
    one = made(2.0)
    assert found_for(Layer(0, one), Layer(0, one), x)


def test_what_only_one_of_them_has_or_is_made_of_tells_them_apart() -> None:
    x = torch.randn(3, WIDTH)
    first, second = layers(lambda layer, x: x * layer.scale)
    second.scale = 2.0  # beside that of the class
    assert not found_for(second, first, x)
    first, second = layers(lambda _layer, x: x)
    second.inner = nn.Linear(WIDTH, WIDTH, bias=False)
    assert not found_for(second, first, x)
    first, second = layers(lambda _layer, x: x)
    second.inner.weight.requires_grad_(False)
    assert not found_for(second, first, x)
    first, second = layers(lambda _layer, x: x)
    second.forward = lambda x: x.neg()  # type: ignore[method-assign, assignment]
    assert not found_for(second, first, x)


def test_a_capture_leaves_attributes_where_and_as_they_were() -> None:
    first, _ = layers(lambda layer, x: x * layer.index)
    before = {name: dict(vars(each)) for name, each in first.named_modules()}
    capture(first, (torch.randn(3, WIDTH),))
    assert {name: dict(vars(each)) for name, each in first.named_modules()} == before
    assert list(vars(first)) == list(before[""])


@pytest.mark.parametrize("lengths", [(3,), (3, 5, 3)], ids=str)
def test_layers_that_are_alike_are_captured_once_for_each_length(lengths: tuple[int, ...], monkeypatch: Any) -> None:
    captured: list[int] = []

    def counted(block: nn.Module, args: Any, kwargs: Any = None, shapes: Any = None) -> Any:
        captured.append(len(args[0]))
        return capture(block, args, kwargs, shapes)

    monkeypatch.setattr("anyfit.layouts.cut_block.capture", counted)
    torch.manual_seed(0)
    blocks = [Layer(at, _bent) for at in range(4)]
    given = [torch.randn(length, WIDTH, requires_grad=True) for length in lengths]
    wanted = [torch.nn.Sequential(*blocks)(x).detach() for x in given]
    alike, axis = Alike(), Axis()

    def choose(found: Any, _held: Any, _first: Any) -> Solved:
        posed = posed_on(axis, found)
        return Solved(posed, solve(posed.problem, Ask()), axis)

    for block in blocks:
        shapes = {name: tuple(each.shape) for name, each in block.named_parameters()}
        cut = CutBlock("block", block, BlockCut({}), shapes, axis, choose, alike=alike)
        cut.install()
        cut.close_border()
    for x, each in zip(given, wanted, strict=True):
        assert torch.equal(torch.nn.Sequential(*blocks)(x).detach(), each)
    assert captured == sorted(set(lengths))


FAMILIES = [name if name in ("llama", "gpt2") else pytest.param(name, marks=pytest.mark.full) for name in NAMES]


@pytest.mark.parametrize("name", FAMILIES)
def test_what_serves_a_layer_of_any_family_is_what_its_own_capture_gives(name: str) -> None:
    model, path, batch = built(name, torch.float32)
    blocks = list(model.get_submodule(path.rpartition(".")[0]).children())
    alike = Alike()
    served = 0
    for call in calls_of(model, blocks, batch):
        found = alike.find(*call, {})
        own = capture(*call)
        if found is None:
            alike.keep(own, call.block, {})
        else:
            served += 1
            assert (found.key, found.guard) == (own.key, own.guard)
    if name in ("llama", "gpt2", "bert", "vit", "mixtral"):
        assert served == len(blocks) - 1
