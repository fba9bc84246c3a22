"""Cut blocks train as plain ones do, in real processes, whatever the layout."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint

from anyfit.layouts.axis import Axis
from anyfit.layouts.border import Part
from anyfit.layouts.capture import capture
from anyfit.layouts.guard import tensor_leaves
from anyfit.layouts.problem import OpRates, pose
from anyfit.planning.layouts import Ask, solve
from anyfit.values.cuts import WHOLE, Cut, Held
from anyfit.values.demands import StaysUncut
from tests.dist.pool import pool_of

from .blocks import HIDDEN, LENGTH, NAMES, ROWS, Residual, called
from .test_capture import assert_same, eager
from .work import RATES, Trained, cut_block, posed_on, refusal_of, trained

# Whose norms or experts compute in fp32 whatever the model's dtype is.
COARSE = ("llama", "qwen3", "gemma3", "t5", "mixtral", "mamba")
FEW = ("gpt2, dropout", "plain convolution")


def assert_equal(found: list[Trained], family: str) -> None:
    tolerance = 1e-5 if family.startswith(COARSE) else 1e-9
    assert max(each.loss_error for each in found) < tolerance
    assert max(each.weight_error for each in found) < tolerance


@pytest.mark.parametrize("family", [*FEW, "torch's encoder layer, dropping"])  # which draws for what lies transposed in memory
def test_generated_code_of_one_rank_gives_what_eager_gives(family: str) -> None:
    call = called(family)
    outputs, _, gradients = eager(call)
    posed = pose(capture(*call), 1, OpRates(1e12, 1e11), RATES)
    cut_block(call.block, posed, solve(posed.problem), Axis())
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
    cut_block(block, posed, solve(posed.problem), Axis())
    return block, plain, x


def test_a_call_under_other_conditions_gets_a_version_of_its_own() -> None:
    block, plain, x = cut_residual()
    torch.testing.assert_close(block(x[:, :5]), plain(x[:, :5]))
    block.eval()
    with torch.no_grad():
        torch.testing.assert_close(block(x), plain(x))


class Scaled(nn.Module):
    def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
        return x * scale


def said_of_many_numbers() -> list[str]:
    axis, block, lines, x = Axis.of_all(), Scaled(), list[str](), torch.ones(4, 4, requires_grad=True)
    question = posed_on(axis, capture(block, (x, 0.0)))
    cut_block(block, question, axis.agreed(solve(question.problem)), axis)._say = lines.append
    for step in range(20):
        torch.testing.assert_close(block(x, float(step)), x * step)
    return lines


def test_a_number_that_differs_in_every_call_is_named_once() -> None:
    assert pool_of(2).run(said_of_many_numbers)[0] == [
        "block 'block' has been captured 16 times, as argument 1 differs between calls: pad to fewer lengths, and give numbers "
        "that change as tensors"
    ]


class Weighing(nn.Module):
    def forward(self, x: torch.Tensor, more: torch.Tensor, less: torch.Tensor) -> torch.Tensor:
        return x * more - less


def test_arguments_by_name_may_come_in_any_order() -> None:
    block, (x, more, less) = Weighing(), torch.randn(3, 4, 8)
    posed = pose(capture(block, (x,), {"more": more, "less": less}), 1, OpRates(1e12, 1e11), RATES)
    cut_block(block, posed, solve(posed.problem), Axis())
    for kwargs in ({"more": more, "less": less}, {"less": less, "more": more}):
        torch.testing.assert_close(block(x, **kwargs), x * more - less)


def test_hooks_of_the_block_itself_still_run() -> None:
    block, plain, x = cut_residual()
    block.register_forward_hook(lambda _, args, result: result * 2)
    torch.testing.assert_close(block(x), plain(x) * 2)


def test_a_second_derivative_is_refused_and_not_zero_in_silence() -> None:
    block, _, x = cut_residual()
    with pytest.raises(StaysUncut, match="its gradients have none of their own; plan without a tensor axis: tensor=1"):
        torch.autograd.grad(block(x).square().sum(), x, create_graph=True)


@pytest.mark.parametrize("family", [*FEW, *(pytest.param(name, marks=pytest.mark.full) for name in NAMES if name not in FEW)])
def test_forward_keeps_the_bytes_that_the_program_counts_and_no_parameter(family: str) -> None:
    call = called(family)
    posed = pose(capture(*call), 1, OpRates(1e12, 1e11), RATES)
    layout = solve(posed.problem)
    cut = cut_block(call.block, posed, layout, Axis())
    kept: dict[int, int] = {}

    def note(x: torch.Tensor) -> torch.Tensor:
        kept[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    args, kwargs = call.fresh()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        result = call.block(*args, **kwargs)
    elsewhere = [
        each for path, each in tensor_leaves(args, kwargs) if path != cut.versions[0].entry_path
    ]  # masks, turns: of all blocks
    for each in (*elsewhere, *call.block.buffers()):
        kept.pop(each.untyped_storage().data_ptr(), None)
    assert not {each.untyped_storage().data_ptr() for each in call.block.parameters()} & set(kept)
    weights = {posed.number(node) for node in posed.captured.parameter_nodes}
    counted = sum(each.kept_bytes for at, each in enumerate(posed.problem.tensors) if at not in weights)
    assert sum(kept.values()) == pytest.approx(counted, rel=2e-3)  # but for a few numbers that stand alone
    assert result is not None


class Between(nn.Module):
    """Three blocks, with something that reads what is in between."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(3))
        self.between: str = "nothing"
        self.seen: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = self.blocks[0](x)
        x = self.blocks[1](first)
        if self.between == "a skip":
            x = x + first
        if self.between == "pooling":
            x = x * first[:, :1] * x[0]
        if self.between == "a change":
            x += 1
        if self.between == "a change of the data":
            x.mul_(2)
        if self.between == "a hook on its gradient":
            x.register_hook(lambda gradient: gradient * 3)
        if self.between == "its gradient by hand":
            (gradient,) = torch.autograd.grad(self.blocks[2](x).square().sum() + first.mean(), first, retain_graph=True)
            return self.blocks[2](x) * gradient
        if self.between == "a checkpoint":
            x = first + checkpoint(self.blocks[1], first, use_reentrant=True)
        if self.between == "a function of one's own":
            x = Doubled.apply(x)
        if self.between == "a list of all":
            return torch.stack([first, x, self.blocks[2](x)])
        result: torch.Tensor = self.blocks[2](x)
        return result


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        return gradients[0] * 2


BETWEEN = [
    *("nothing", "a skip", "pooling", "a change", "a change of the data", "a hook on its gradient", "a list of all"),
    *("a function of one's own", "its gradient by hand", "a checkpoint"),
]


def gradients_between(between: str) -> tuple[float, bool]:
    """How far those of cut blocks, held in parts at their borders, are off; and whether all were left in parts."""
    axis = Axis.of_all()
    torch.manual_seed(0)
    model, x = Between(), torch.randn(ROWS, HIDDEN, dtype=torch.float64)
    model.between = between
    plain = copy.deepcopy(model)
    plain(x).square().sum().backward()
    for at, block in enumerate(model.blocks):
        given = x.clone().requires_grad_(at > 0)
        question = posed_on(axis, capture(block, (given,)))
        fixed: dict[int, Held] = dict.fromkeys(map(question.number, question.captured.parameter_nodes), WHOLE)
        fixed |= {question.problem.entry: Cut(0), question.problem.exit: Cut(0)}
        cut_block(block, question, axis.agreed(solve(question.problem, Ask(fixed=fixed))), axis)
    result = model(x)
    is_part = isinstance(result, Part)
    result.square().sum().backward()
    worst = 0.0
    for mine, other in zip(model.parameters(), plain.parameters(), strict=True):
        assert mine.grad is not None
        assert other.grad is not None
        dist.all_reduce(mine.grad)
        worst = max(worst, float((mine.grad / axis.n - other.grad).abs().max() / other.grad.abs().max()))
    return worst, is_part


@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_reads_what_is_between_two_cut_blocks_has_all_of_it(between: str) -> None:
    for worst, is_part in pool_of(2).run(gradients_between, between):
        assert worst < 1e-12
        assert is_part == (between not in ("a list of all", "its gradient by hand"))


class Heads(nn.Module):
    """Gives two things, of which a loss may need one."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.left, self.right = (nn.Linear(HIDDEN, HIDDEN) for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.left(hidden), self.right(hidden)


@pytest.mark.parametrize("used", [0, 1])
def test_what_the_loss_needs_nothing_of_has_no_gradient_rather_than_zeros(used: int) -> None:
    """An optimizer would decay it."""
    torch.manual_seed(0)
    block, x = Heads(), torch.randn(ROWS, LENGTH, HIDDEN)
    plain = copy.deepcopy(block)
    posed = pose(capture(block, (x,)), 1, OpRates(1e12, 1e11), RATES)
    cut_block(block, posed, solve(posed.problem), Axis())
    for each in (block, plain):
        each(x)[used].square().mean().backward()
    for mine, other in zip(block.parameters(), plain.parameters(), strict=True):
        assert (mine.grad is None) == (other.grad is None)
        if other.grad is not None:
            torch.testing.assert_close(mine.grad, other.grad)


class Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.key = (nn.Linear(HIDDEN, HIDDEN, dtype=torch.float64) for _ in range(2))

    def forward(self, x: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
        scores = self.query(x) @ self.key(memory).transpose(-1, -2)
        return x + scores.softmax(-1) @ memory


def outputs_of_crossing(twice: bool) -> float:
    """How far a block is off that was captured with two tensors, and is given one for both; or parts for both."""
    axis = Axis.of_all()
    torch.manual_seed(0)
    blocks, (x, memory) = [Crossing() for _ in range(3)], torch.randn(2, ROWS, LENGTH, HIDDEN, dtype=torch.float64)
    plain = copy.deepcopy(blocks)
    for block in blocks:
        question = posed_on(axis, capture(block, (x, memory)))
        fixed: dict[int, Held] = {question.problem.entry: Cut(1), question.problem.exit: Cut(1)}
        cut_block(block, question, axis.agreed(solve(question.problem, Ask(fixed=fixed))), axis)
    found = []
    for first, second, third in (blocks, plain):
        left, right = first(x, memory), second(memory, x)
        found.append(first(x, x) if twice else third(left, right))
    return float((found[0] - found[1]).detach().abs().max())


@pytest.mark.parametrize("twice", [True, False])
def test_what_enters_is_cut_and_other_arguments_are_whole_whatever_they_are(twice: bool) -> None:
    assert max(pool_of(2).run(outputs_of_crossing, twice)) < 1e-12


def late_hook() -> str:
    axis = Axis.of_all()
    model, x = Between(), torch.randn(ROWS, HIDDEN, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for at, block in enumerate(model.blocks):
        question = posed_on(axis, capture(block, (x.clone().requires_grad_(at > 0),)))
        fixed: dict[int, Held] = {question.problem.entry: Cut(0), question.problem.exit: Cut(0)}
        cut_block(block, question, axis.agreed(solve(question.problem, Ask(fixed=fixed))), axis)
    first = model.blocks[0](x)
    model.blocks[1](first)
    try:
        first.retain_grad()
    except RuntimeError as error:
        return str(error)
    return "nothing"


def test_a_hook_that_would_miss_what_the_next_block_has_taken_is_refused() -> None:
    assert all("ask for it before that block is called" in each for each in pool_of(2).run(late_hook))


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("nothing", "nothing"),
        ("seeds", "generator of rank 1 of its tensor axis is not where that of rank 0 is"),
        ("batches", "other things on rank 1"),
    ],
)
def test_what_does_not_fit_is_refused_by_name(what: str, message: str) -> None:
    assert all(message in each for each in pool_of(2).run(refusal_of, what))
