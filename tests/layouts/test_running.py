"""Cut blocks train as plain ones do, in real processes, whatever the layout."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from anyfit.layouts.axis import Axis
from anyfit.layouts.capture import capture
from anyfit.layouts.cut_block import CutBlock, OtherConditions
from anyfit.layouts.guard import tensor_leaves
from anyfit.layouts.problem import OpRates, pose
from anyfit.planning.layouts import solve
from tests.dist.pool import pool_of

from .blocks import HIDDEN, LENGTH, NAMES, ROWS, Residual, called
from .test_capture import assert_same, eager
from .work import RATES, Trained, refusal_of, trained

# Whose norms or experts compute in fp32 whatever the model's dtype is.
COARSE = ("llama", "qwen3", "gemma3", "t5", "mixtral", "mamba")
FEW = ("gpt2, dropout", "plain convolution")


def assert_equal(found: list[Trained], family: str) -> None:
    tolerance = 1e-5 if family.startswith(COARSE) else 1e-9
    assert max(each.loss_error for each in found) < tolerance
    assert max(each.weight_error for each in found) < tolerance


@pytest.mark.parametrize("family", FEW)
def test_generated_code_of_one_rank_gives_what_eager_gives(family: str) -> None:
    call = called(family)
    outputs, _, gradients = eager(call)
    posed = pose(capture(*call), 1, OpRates(1e12, 1e11), RATES)
    CutBlock(call.block, posed, solve(posed.problem), Axis()).install()
    mine, _, my_gradients = eager(call)
    assert_same([*mine, *my_gradients], [*outputs, *gradients], tolerance=1e-12)


@pytest.mark.parametrize("family", ["plain mlp", "plain convolution"])
def test_two_ranks_train_as_one_process_by_the_solvers_choice_and_by_a_random_one(family: str) -> None:
    assert_equal(pool_of(2).run(trained, family), family)
    found = pool_of(2).run(trained, family, objective=1)
    assert_equal(found, family)
    assert found[0].cuts > 0
    assert any(found[0].counts)


def test_a_price_on_memory_cuts_the_weights() -> None:
    found = pool_of(2).run(trained, "gpt2", price=1e-9)
    assert_equal(found, "gpt2")
    assert found[0].cuts >= 12  # of both blocks, all large ones and some biases
    assert all(each.counts == found[0].counts for each in found)


@pytest.mark.parametrize("family", ["gpt2", *(pytest.param(each, marks=pytest.mark.full) for each in ("llama", "t5, decoder"))])
def test_other_lengths_keep_the_cuts_of_the_weights_whether_the_axis_divides_them_or_not(family: str) -> None:
    found = pool_of(2).run(trained, family, objective=0, lengths=(LENGTH, 18, 7, LENGTH, 7))
    assert_equal(found, family)
    assert found[0].border == "cut 1"
    assert found[0].cuts > 0
    assert (found[0].versions, found[0].kept) == (3, 2)  # 7 is not divided


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2, dropout", "llama, grouped heads"])
def test_recomputed_blocks_train_as_plain_ones(family: str) -> None:
    for objective in (None, 2):
        assert_equal(pool_of(2).run(trained, family, objective, recomputes=True), family)


@pytest.mark.full
@pytest.mark.parametrize("family", ["gpt2", "vit"])
def test_replicas_of_a_tensor_axis_train_as_one_process(family: str) -> None:
    for objective in (None, 0):
        assert_equal(pool_of(4).run(trained, family, objective, tensor=2), family)


@pytest.mark.full
@pytest.mark.parametrize("family", NAMES)
@pytest.mark.parametrize(("ranks", "objective"), [(2, None), (2, 0), (4, 1)])
def test_any_layout_of_any_block_trains_as_one_process(family: str, ranks: int, objective: int | None) -> None:
    assert_equal(pool_of(ranks).run(trained, family, objective), family)


# ---------------------------------------------------------------------- conditions


def cut_residual() -> tuple[nn.Module, nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    block = Residual(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.GELU(), nn.Linear(96, HIDDEN))
    plain, x = copy.deepcopy(block), torch.randn(ROWS, LENGTH, HIDDEN, requires_grad=True)
    posed = pose(capture(block, (x,)), 1, OpRates(1e12, 1e11), RATES)
    CutBlock(block, posed, solve(posed.problem), Axis()).install()
    return block, plain, x


def test_a_call_that_differs_is_refused_by_name() -> None:
    block, _, x = cut_residual()
    with pytest.raises(OtherConditions, match="argument 0"):
        block(x[:, :5])
    block.eval()
    with pytest.raises(OtherConditions, match="attribute training"):
        block(x)


def test_hooks_of_the_block_itself_still_run() -> None:
    block, plain, x = cut_residual()
    block.register_forward_hook(lambda _, args, result: result * 2)
    torch.testing.assert_close(block(x), plain(x) * 2)


def test_a_second_derivative_is_refused_and_not_zero_in_silence() -> None:
    block, _, x = cut_residual()
    (gradient,) = torch.autograd.grad(block(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


@pytest.mark.parametrize("family", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in NAMES if name not in FEW)])
def test_forward_keeps_the_bytes_that_the_program_counts_and_no_parameter(family: str) -> None:
    call = called(family)
    posed = pose(capture(*call), 1, OpRates(1e12, 1e11), RATES)
    layout = solve(posed.problem)
    cut = CutBlock(call.block, posed, layout, Axis())
    cut.install()
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    args, kwargs = call.fresh()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = call.block(*args, **kwargs)
    elsewhere = [
        each for path, each in tensor_leaves(args, kwargs) if path != cut.first.entry_path
    ]  # masks, turns: of all blocks
    for each in (*elsewhere, *call.block.buffers()):
        kept.pop(each.untyped_storage().data_ptr(), None)
    assert not {each.untyped_storage().data_ptr() for each in call.block.parameters()} & set(kept)
    weights = {posed.number(node) for node in posed.captured.parameter_nodes}
    counted = sum(each.kept_bytes for at, each in enumerate(posed.problem.tensors) if at not in weights)
    assert sum(kept.values()) == pytest.approx(counted, rel=2e-3)  # but for a few numbers that stand alone
    assert result is not None


class Between(nn.Module):
    """Two blocks, with something in between or not."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN) for _ in range(2))
        self.between: str = "nothing"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](x)
        if self.between == "pooling":
            x = x * x.mean(0, keepdim=True)
        if self.between == "a change":
            x += 1
        result: torch.Tensor = self.blocks[1](x)
        return result


@pytest.mark.parametrize("between", ["nothing", "pooling", "a change"])
def test_what_comes_between_two_cut_blocks_is_noticed(between: str) -> None:
    model, x = Between(), torch.randn(ROWS, HIDDEN)
    wanted = model(x)
    for block, follows in zip(model.blocks, (False, True), strict=True):
        given = x if not follows else x.clone().requires_grad_()
        posed = pose(capture(block, (given,)), 1, OpRates(1e12, 1e11), RATES)
        CutBlock(block, posed, solve(posed.problem), Axis(), follows=follows).install()
    model.between = between
    if between == "nothing":
        torch.testing.assert_close(model(x), wanted)
    else:
        with pytest.raises(OtherConditions, match="not the very tensor"):
            model(x)


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "nothing"),
        ("seeds", "generator of rank 1 is not where rank 0's is"),
        ("batches", "other things on rank 1"),
        ("shared", "0.weight of Sequential is cut already"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(what: str, message: str) -> None:
    assert all(message in each for each in pool_of(2).run(refusal_of, what))
