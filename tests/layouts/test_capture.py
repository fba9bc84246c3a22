"""A captured block is what eager does, or is refused by name."""

from __future__ import annotations

import dataclasses
import functools
import random
import re
import sys
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import checkpoint

from anyfit.layouts import noting
from anyfit.layouts.capture import Captured, capture
from anyfit.layouts.fakes import quickly
from anyfit.layouts.graph import is_forward, is_random, name_of
from anyfit.layouts.guard import NotCaptured, tensor_leaves

from .blocks import FAMILIES, HIDDEN, LENGTH, NAMES, Called, Residual, called

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
def test_ops_that_are_run_without_torchs_detours_give_what_it_gives(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes, dtypes, strides, offsets and devices, and whose memory it is."""
    ran: list[str] = []

    def beside(func: Any, args: Any, kwargs: Any, mode: Any) -> Any:
        wanted = NotImplemented if func._schema.is_mutable else func(*args, **kwargs)
        found = quickly(func, args, kwargs, mode)
        if found is not NotImplemented and wanted is not NotImplemented:
            ran.append(str(func))
            assert tree_map_only(Tensor, form, found) == tree_map_only(Tensor, form, wanted), func
            given = {each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)}
            lies = [[each.untyped_storage()._cdata in given for each in tree_leaves(made)] for made in (found, wanted)]
            assert lies[0] == lies[1], func
        return found

    def form(x: Tensor) -> Any:
        return (type(x), x.dtype, x.device, tuple(x.shape), x.stride(), x.storage_offset(), x.requires_grad)

    monkeypatch.setattr(noting, "quickly", beside)
    capture(*called(family))
    assert len(ran) > 10


def test_what_changes_a_tensor_of_its_own_is_noted_as_a_new_one_and_all_else_as_it_is() -> None:
    class Changing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            mask = torch.empty_like(x).bernoulli_(p=0.5).div_(0.5) + torch.empty_like(x).bernoulli_()
            half = (x * 2)[:, : x.shape[1] // 2]
            half.mul_(3)  # in memory that x * 2 has too
            return torch.cat([half, mask[:, :2], F.dropout(x, 0.1)], 1)

    x = torch.randn(4, 6, requires_grad=True)
    call = Called(Changing(), (x,), {})
    captured = capture(*call)
    assert not [
        node for node in captured.nodes if node.op == "call_function" and str(node.target).partition(".")[0].endswith("_")
    ]
    outputs, tangents, gradients = eager(call)
    torch.manual_seed(3)
    made = captured.module(*given_to(captured, call), *tangents)
    assert_same(list(made), [*outputs, *gradients])


@pytest.mark.parametrize("family", [pytest.param(name, marks=() if name in FEW else pytest.mark.full) for name in NAMES])
def test_a_captured_block_gives_what_eager_gives_to_the_bit(family: str) -> None:
    call = called(family)
    captured = capture(call.block, call.args, call.kwargs)
    outputs, tangents, gradients = eager(call)
    torch.manual_seed(3)
    got = captured.module(*given_to(captured, call), *tangents)
    assert_same(list(got), [*outputs, *gradients])
    assert captured.why_not(call.block, call.args, call.kwargs) == ""


def test_experts_by_grouped_products_are_captured_in_fp32_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which torch's own fake tensors refuse."""
    options = FAMILIES["qwen3 moe"].options | {"experts_implementation": "grouped_mm"}
    monkeypatch.setitem(FAMILIES, "qwen3 moe", FAMILIES["qwen3 moe"]._replace(options=options))
    call = called("qwen3 moe", torch.float32)
    captured = capture(*call)
    assert "aten._grouped_mm.default" in {name_of(node) for node in captured.nodes}
    outputs, tangents, gradients = eager(call)
    assert_same(list(captured.module(*given_to(captured, call), *tangents)), [*outputs, *gradients], tolerance=1e-6)


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
        self.table, self.places, self.thinned = np.ones(3), range(3), np.float32(2.0)
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
    "attribute table": (lambda block: block.table.__imul__(2), (X,), {}),
    "attribute places": (lambda block: setattr(block, "places", range(1, 4)), (X,), {}),
    "attribute thinned": (lambda block: setattr(block, "thinned", np.float32(3.0)), (X,), {}),
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


class Remembering(nn.Module):
    """In a container that is not the block's own."""

    def __init__(self, kept: Any) -> None:
        super().__init__()
        self.kept = kept

    def forward(self, x: Tensor) -> Tensor:
        self.kept.append(x.square().mean())
        return x * 2


class Slotted:
    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Tensor] = []

    def append(self, x: Tensor) -> None:
        self.items.append(x)


PENALTIES: list[Tensor] = []


class Penalised(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        PENALTIES.append(x.square().mean())
        return x * 2


class Averaging(nn.Module):
    """That puts another tensor in the place of its buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: Tensor) -> Tensor:
        self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
        return x - self.mean


class Projecting(nn.Module):
    """That puts other data in the place of its weight's."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.inner.weight.data = self.inner.weight.data / self.inner.weight.data.norm(dim=1, keepdim=True)
        result: Tensor = self.inner(x)
        return result


class Drawing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator = torch.Generator()

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.rand(x.shape, generator=self.generator)


class Striding(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        turned = (x * 2).t()
        return torch.as_strided(turned, (8, 2), turned.stride())


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


class Tossing(nn.Module):
    """By random numbers that torch does not know of."""

    def __init__(self, draw: Callable[[], float], rng: Any = None) -> None:
        super().__init__()
        self.draw, self.rng = draw, rng

    def forward(self, x: Tensor) -> Tensor:
        return x * (2 if self.draw() < 0.5 else 3)


def _tossing_by_its_own() -> nn.Module:
    rng = np.random.default_rng(0)
    return Tossing(rng.random, rng)


def _hooked() -> nn.Module:
    block = nn.Sequential(nn.Linear(8, 8))
    block[0].register_forward_hook(lambda *_: None)
    return block


REFUSED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "a hook inside": (_hooked, r"0 \(Linear\) has a hook"),
    "control by data": (DataDependent, "depends on data"),
    "a counter": (Counting, "changes attribute calls"),
    "a log": (Logging, "changes attribute seen"),
    "a queue": (lambda: Remembering(deque(maxlen=2)), "changes attribute kept"),
    "an object with slots": (lambda: Remembering(Slotted()), "changes attribute kept"),
    "a list of the script's": (Penalised, "changes variable .*PENALTIES"),
    "another buffer": (Averaging, "mean is assigned anew"),
    "other data": (Projecting, "inner.weight is assigned anew"),
    "a generator of its own": (Drawing, "draws from a generator of its own"),
    "an order in memory": (Striding, "as_strided.* in the order of its memory"),
    "batch statistics": (lambda: nn.Sequential(nn.BatchNorm1d(8)), "(running_mean|num_batches_tracked) is changed in place"),
    "noise in backward": (Noisy, "rand_like.* in backward"),
    "a checkpoint with dropout": (Checkpointed, "neither parameter, buffer nor argument"),
    "Python's random numbers": (lambda: Tossing(random.random), "draws random numbers of Python or numpy"),
    "numpy's random numbers": (lambda: Tossing(np.random.rand), "draws random numbers of Python or numpy"),
    "random numbers of its own": (_tossing_by_its_own, "changes attribute rng"),
    "a tensor of its own": (Holding, "neither parameter, buffer nor argument"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_a_graph_cannot_say_is_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(NotCaptured, match=message):
        capture(make(), (X,))


def test_hooks_of_all_modules_are_refused_and_noticed() -> None:
    block = nn.Sequential(nn.Linear(8, 8))
    captured = capture(block, (X,))
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert captured.why_not(block, (X,), {}) == "hooks of all modules"
        with pytest.raises(NotCaptured, match="hooks are registered for all modules"):
            capture(block, (X,))
    finally:
        handle.remove()


class Spreading(nn.Module):
    def forward(self, x: Tensor, near: Tensor) -> Tensor:
        result: Tensor = torch.sparse.mm(near, x)
        return result


def test_a_sparse_argument_is_refused_by_name() -> None:
    near = torch.sparse_coo_tensor(torch.tensor([[0, 1], [1, 0]]), torch.ones(2), (4, 4), check_invariants=False)
    with pytest.raises(NotCaptured, match="a tensor in it is sparse_coo"):
        capture(Spreading(), (X, near))


def test_an_argument_that_may_change_is_refused_by_name() -> None:
    with pytest.raises(NotCaptured, match=re.escape("argument times is a object")):
        capture(Scaled(), (X,), {"times": object()})
    with pytest.raises(NotCaptured, match=r"argument times is a DynamicCache, .*; call the model with use_cache=False"):
        capture(Scaled(), (X,), {"times": transformers.DynamicCache()})


def test_a_refused_block_is_left_as_it_was() -> None:
    block, kept = Counting(), [X]
    for each in (block, Remembering(kept), Penalised()):
        with pytest.raises(NotCaptured):
            capture(each, (X,))
    assert block.calls == 0
    assert len(kept) == 1
    assert kept[0] is X
    assert PENALTIES == []


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


FACTOR = 2.0


def _scaled(x: Tensor) -> Tensor:
    return x * FACTOR


def _adding(more: float) -> type[nn.Module]:
    class Adding(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return _scaled(x) + more

        def add(self, less: float) -> None:
            nonlocal more
            more -= less

    return Adding


def test_a_variable_outside_of_the_block_that_changes_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    block = _adding(3.0)()
    captured = capture(block, (X,))
    assert captured.why_not(block, (X,), {}) == ""
    block.add(1.0)  # type: ignore[operator]
    assert re.search(r"variable .*Adding\.forward\.more", captured.why_not(block, (X,), {}))
    block.add(-1.0)  # type: ignore[operator]
    monkeypatch.setattr(sys.modules[__name__], "FACTOR", 3.0)
    assert captured.why_not(block, (X,), {}) == f"variable {__name__}.FACTOR"


@functools.cache
def _table(size: int) -> Tensor:
    return torch.arange(size) * 1.0


class Tabled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * _table(x.shape[-1])


@pytest.mark.parametrize("is_known", [False, True])
def test_what_a_function_keeps_is_made_in_the_graph_and_is_no_fake_afterwards(is_known: bool) -> None:
    _table.cache_clear()
    wanted = Tabled()(X) if is_known else X * torch.arange(8)
    captured = capture(Tabled(), (X,))
    assert torch.equal(captured.module(X, X)[0], wanted)
    assert torch.equal(Tabled()(X), wanted)


SETTINGS = {"shift": 0.0}


@dataclasses.dataclass
class Options:
    scale: float = 1.0


OPTIONS = Options()


class Mixing(nn.Module):
    times = 1

    def forward(self, x: Tensor) -> Tensor:
        return self._mixed(x) * self.times

    def _mixed(self, x: Tensor) -> Tensor:
        return x * FACTOR * OPTIONS.scale + SETTINGS["shift"]


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("FACTOR", lambda patch: patch.setattr(sys.modules[__name__], "FACTOR", 3.0)),
        ("OPTIONS", lambda patch: patch.setattr(OPTIONS, "scale", 3.0)),
        ("SETTINGS", lambda patch: patch.setitem(SETTINGS, "shift", 3.0)),
        ("Mixing.times", lambda patch: patch.setattr(Mixing, "times", 3)),
    ],
)
def test_what_a_method_reads_outside_of_the_block_is_noticed_too(
    name: str, change: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    block = Mixing()
    captured = capture(block, (X,))
    assert captured.why_not(block, (X,), {}) == ""
    change(monkeypatch)
    assert re.fullmatch(rf"variable \S*{re.escape(name)}", captured.why_not(block, (X,), {}))
