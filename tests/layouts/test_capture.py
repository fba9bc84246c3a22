"""A captured block is what eager does, or is refused by name."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.graph import is_forward, is_random, name_of
from anyfit.layouts.guard import NotCaptured, tensor_leaves

from .blocks import HIDDEN, LENGTH, NAMES, Called, Residual, called

FEW = ("gpt2, dropout", "llama, grouped heads", "t5, decoder", "swin", "qwen3 moe", "llama, adapted")


def given_to(captured: Captured, call: Called) -> list[Tensor]:
    """What the graph takes, but for the tangents."""
    parameters, buffers = dict(call.block.named_parameters()), dict(call.block.named_buffers())
    tensors = [each for _, each in tensor_leaves(call.args, call.kwargs)]
    held = [*(parameters[name] for name in captured.parameters), *(buffers[name] for name in captured.buffers), *tensors]
    return [each.detach() for each in held]


def eager(call: Called, seed: int = 3) -> tuple[list[Any], list[Tensor], list[Tensor | None]]:
    """Outputs, random tangents and gradients."""
    torch.manual_seed(seed)
    args, kwargs = call.fresh()
    outputs = torch.utils._pytree.tree_leaves(call.block(*args, **kwargs))
    ends = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
    tangents = [torch.randn_like(each) for each in ends]
    wanted = [each for each in call.block.parameters() if each.requires_grad]
    wanted += [each for _, each in tensor_leaves(args, kwargs) if each.requires_grad]
    return outputs, tangents, list(torch.autograd.grad(ends, wanted, tangents, allow_unused=True))


def assert_same(got: list[Any], wanted: list[Any], tolerance: float = 0.0) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        if isinstance(theirs, Tensor):
            torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance)
        else:
            assert mine == theirs


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in NAMES])
def test_a_captured_block_gives_what_eager_gives_to_the_bit(family: str) -> None:
    call = called(family)
    captured = capture(call.block, call.args, call.kwargs)
    outputs, tangents, gradients = eager(call)
    torch.manual_seed(3)
    got = captured.module(*given_to(captured, call), *tangents)
    assert_same(list(got), [*outputs, *gradients])
    assert captured.why_not(call.block, call.args, call.kwargs) == ""


def test_dropout_is_drawn_in_forward_and_never_merged() -> None:
    call = called("gpt2, dropout")
    captured = capture(call.block, call.args, call.kwargs)
    drawn = [node for node in captured.nodes if is_random(node)]
    assert len(drawn) == 3
    assert all(map(is_forward, drawn))


def test_no_op_changes_a_tensor_and_none_is_there_twice() -> None:
    call = called("gpt2, dropout")
    captured = capture(call.block, call.args, call.kwargs)
    ops = [node for node in captured.nodes if node.op == "call_function"]
    assert not any(name_of(node).split(".")[1].endswith("_") for node in ops if name_of(node) != "getitem")
    views = [(node.target, node.args) for node in ops if name_of(node) == "aten.t.default"]
    assert len(views) == len(set(views))


def test_another_length_has_the_same_form_and_another_key() -> None:
    block = Residual(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN))
    short, long = (capture(block, (torch.randn(2, length, HIDDEN, requires_grad=True),)) for length in (8, 12))
    assert short.form == long.form
    assert short.key != long.key
    assert short.key == capture(block, (torch.randn(2, 8, HIDDEN, requires_grad=True),)).key


def test_blocks_that_differ_in_one_constant_are_not_the_same() -> None:
    x = torch.randn(2, HIDDEN, requires_grad=True)
    first, second = (capture(nn.LayerNorm(HIDDEN, eps=eps), (x,)) for eps in (1e-5, 1e-6))
    assert first.key != second.key
    assert first.form != second.form


# ---------------------------------------------------------------------- guards


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))
        self.scale = 2.0
        self.options = {"shift": [1.0]}
        self.register_buffer("offset", torch.zeros(8))

    def forward(self, x: Tensor, mask: Tensor | None = None, times: int = 1) -> Tensor:
        y: Tensor = self.inner(x) * self.scale * times + self.options["shift"][0] + self.offset
        return y if mask is None else y * mask


def _other_config(block: Scaled) -> None:
    block.options["shift"][0] = 2.0


X = torch.randn(4, 8, requires_grad=True)
CHANGES: dict[str, tuple[Callable[[Scaled], Any], tuple[Any, ...], dict[str, Any]]] = {
    "argument 0": (lambda block: None, (torch.randn(6, 8, requires_grad=True),), {}),
    "argument 0, of other strides": (lambda block: None, (torch.randn(8, 4).t().requires_grad_(),), {}),
    "argument 0, without gradient": (lambda block: None, (X.detach(),), {}),
    "argument mask": (lambda block: None, (X,), {"mask": torch.ones(8)}),
    "argument times": (lambda block: None, (X,), {"times": 2}),
    "attribute scale": (lambda block: setattr(block, "scale", 3.0), (X,), {}),
    "attribute options": (_other_config, (X,), {}),
    "attribute inner.1.training": (lambda block: block.inner[1].eval(), (X,), {}),
    "parameter inner.0.weight": (lambda block: block.inner[0].weight.requires_grad_(False), (X,), {}),
    "hooks of inner.0": (lambda block: block.inner[0].register_forward_hook(lambda *_: None), (X,), {}),
    "buffer offset": (lambda block: setattr(block, "offset", torch.zeros(1)), (X,), {}),
}


@pytest.mark.parametrize("what", CHANGES)
def test_a_call_under_other_conditions_is_noticed_by_name(what: str) -> None:
    change, args, kwargs = CHANGES[what]
    block = Scaled()
    captured = capture(block, (X,))
    assert captured.why_not(block, (X,), {}) == ""
    change(block)
    assert what.partition(",")[0] in captured.why_not(block, args, kwargs)


def test_settings_of_torch_are_conditions_too() -> None:
    block = nn.Linear(8, 8)
    captured = capture(block, (X,))
    with torch.no_grad():
        assert captured.why_not(block, (X,), {}) == "grad mode"
    with torch.autocast("cpu", torch.bfloat16):
        assert captured.why_not(block, (X,), {}) == "autocast on cpu"
    assert captured.why_not(block, (X,), {}) == ""


# ---------------------------------------------------------------------- refusals


class DataDependent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x * 2


class Logging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        self.seen.append(len(x))
        return x * 2


class Noise(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, gradient: Tensor) -> Tensor:
        return gradient + torch.rand_like(gradient)


class Noisy(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Noise.apply(x)
        return result


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = checkpoint(self.inner, x, use_reentrant=False)
        return result


class Holding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.randn(8)  # no buffer

    def forward(self, x: Tensor) -> Tensor:
        return x * self.table


def _hooked() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 8))
    block[0].register_forward_hook(lambda *_: None)
    return block


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook inside": (_hooked, r"0 \(Linear\) has a hook"),
    "control by data": (DataDependent, "depends on data"),
    "a counter": (Counting, "changes attribute calls"),
    "a log": (Logging, "changes attribute seen"),
    "batch statistics": (lambda: nn.Sequential(nn.BatchNorm1d(8)), "(running_mean|num_batches_tracked) is changed in place"),
    "noise in backward": (Noisy, "rand_like.* in backward"),
    "a checkpoint with dropout": (Checkpointed, "neither parameter, buffer nor argument"),
    "a tensor of its own": (Holding, "neither parameter, buffer nor argument"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_say_is_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(NotCaptured, match=message):
        capture(make(), (X,))


def test_an_argument_that_may_change_is_refused_by_name() -> None:
    with pytest.raises(NotCaptured, match=re.escape("argument times is a object")):
        capture(Scaled(), (X,), {"times": object()})


def test_a_refused_block_is_left_as_it_was() -> None:
    block = Counting()
    with pytest.raises(NotCaptured):
        capture(block, (X,))
    assert block.calls == 0


def test_capturing_draws_no_random_numbers_and_leaves_no_gradients() -> None:
    block, x = Scaled(), torch.randn(LENGTH, 8, requires_grad=True)
    before = torch.get_rng_state()
    capture(block, (x,))
    assert torch.equal(torch.get_rng_state(), before)
    assert x.grad is None
    assert all(each.grad is None for each in block.parameters())


def test_the_blocks_own_hooks_are_no_part_of_its_graph() -> None:
    block = nn.Linear(8, 8)
    plain = capture(block, (X,)).key
    block.register_forward_hook(lambda _, args, result: result * 3)
    assert capture(block, (X,)).key == plain
