"""Blocks that a plan compiles: one graph for all that are alike, the results of eager, and eager where that cannot be."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.nn import functional as F

import anyfit
from anyfit.kernels import native
from anyfit.placing import activations, compiled
from anyfit.running.run import Run
from anyfit.values.plan import Placement, Plan, Stage
from tests import stacks
from tests.models import byte_batches, next_byte_loss
from tests.oracle import assert_bit_equal, assert_close, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, random_delays, started
from tests.stacks import BLOCKS, LAYERS, ROWS, WIDTH

try:
    native.find_compiler()
except native.NotBuilt as error:
    pytest.skip(f"inductor needs a C++ compiler: {error}", allow_module_level=True)

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.timeout(300)]  # of torch's own, when it compiles


@pytest.fixture(autouse=True)
def _as_before(fresh_compiler: None) -> None:
    """What one test has learnt of a block is nothing to the next; its code is found again in inductor's own cache."""
    counters.clear()


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.mixes = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.tanh(self.mixes(x.cumsum(1))) / x.shape[1]
        return x + F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(stacks.Stack):
    def __init__(self, layer: Any = Layer) -> None:
        super().__init__(layer)


def job_for(model: Any = Stack, **options: Any) -> anyfit.Job:
    return stacks.stacked_job(model, **options)


def trained(job: anyfit.Job, plan: Plan, batches: list[Tensor], delays: int | None = None) -> tuple[list[float], Any, Run]:
    with started(job, plan, None if delays is None else random_delays(delays)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        return losses, run.state_dict(), run


def graphs() -> int:
    return int(counters["stats"]["unique_graphs"])


# ---------------------------------------------------------------------- the same results


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_all_blocks_that_are_alike_share_one_graph_and_train_as_eager_ones(precision: Any) -> None:
    job, batches = job_for(precision=precision), byte_batches(6, ROWS)
    losses, weights, run = trained(job, hand_written(job, compiled=BLOCKS), batches)
    assert placed_of(run).compiled.reasons == {}
    assert graphs() == 1
    backend = compiled.backend_for("eager")
    assert backend.runs >= LAYERS * len(batches)
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-5 if precision == "fp32" else 2e-3)
    if precision == "fp32":
        assert_close(weights, plain_weights, 1e-5)


def test_any_placement_and_any_activations_of_compiled_blocks_are_the_same_to_the_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 256)
    job, batches = job_for(clip_norm=0.3), byte_batches(5, ROWS)
    cases: Any = itertools.product((1, 2), (RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED), ("keep", "recompute", "offload"))
    expected: dict[int, Any] = {}
    for accumulation, placement, choice in cases:
        plan = hand_written(
            job,
            placement,
            slots=14,
            chunk_bytes=1024,
            accumulation=accumulation,
            compiled=BLOCKS,
            activations=dict.fromkeys(BLOCKS[:2], choice),
        )
        losses, weights, run = trained(job, plan, batches, delays=accumulation)
        assert placed_of(run).compiled.reasons == {}
        assert placed_of(run).residency.slots.added == 0
        first = expected.setdefault(accumulation, (losses, weights))
        assert losses == first[0]
        assert_bit_equal(weights, first[1])
    for accumulation, (losses, weights) in expected.items():
        plain_losses, plain_weights = train_plainly(job, batches, accumulation)
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert_close(weights, plain_weights, 1e-5)
    assert graphs() == 2  # one for each size of a micro-batch


def test_a_first_layer_whose_input_needs_no_gradient_has_code_of_its_own() -> None:
    class Frozen(Stack):
        def __init__(self) -> None:
            super().__init__()
            self.embed.requires_grad_(False)

    job, batches = job_for(Frozen), byte_batches(4, ROWS)
    losses, _, run = trained(job, hand_written(job, AWAY, slots=12, compiled=BLOCKS), batches)
    assert placed_of(run).compiled.reasons == {}
    assert graphs() == 2
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-5)


def test_faster_numerics_are_used_where_the_job_allows_them() -> None:
    job, batches = job_for(compile="fast", precision="bf16"), byte_batches(4, ROWS)
    losses, _, run = trained(job, hand_written(job, compiled=BLOCKS), batches)
    assert placed_of(run).compiled.reasons == {}
    assert compiled.backend_for("fast").runs
    assert not compiled.backend_for("eager").runs
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=5e-2)


# ---------------------------------------------------------------------- eager where it has to be


class Breaking(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.sum().detach()) > 1e9 else 1.0)


class Counting(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return super().forward(x) * (1 + 1e-3 * (self.calls % 2))


class Writing(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.mul_(1.5))


@pytest.mark.parametrize(
    ("layer", "said"),
    [(Breaking, "one piece"), (Counting, "anew at every call"), (Writing, "in place")],
    ids=lambda each: str(each),
)
@pytest.mark.parametrize("placement", [RESIDENT, AWAY], ids=["resident", "away"])
def test_a_block_that_cannot_be_compiled_stays_eager_and_says_why(
    layer: Any, said: str, placement: Placement, capsys: pytest.CaptureFixture[str]
) -> None:
    job, batches = job_for(lambda: Stack(layer)), byte_batches(3, ROWS)
    losses, weights, run = trained(job, hand_written(job, placement, slots=8, compiled=BLOCKS), batches)
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 1
    assert "'blocks.0' to 'blocks.2' (3) run without torch.compile" in told[0]
    assert said in told[0]
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == plain_losses
    assert_bit_equal(weights, plain_weights)
    assert run.model.blocks[0].forward.__func__ is layer.forward


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_block_whose_compiled_code_gives_other_results_stays_eager(precision: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compiled.Backend.__call__

    def a_little_off(self: Any, graph: Any, inputs: Any) -> Any:
        run = made(self, graph, inputs)
        return lambda *args: tuple(each * (1 + 2e-5 if precision == "fp32" else 1 + 1e-2) for each in run(*args))

    monkeypatch.setattr(compiled.Backend, "__call__", a_little_off)
    job, batches = job_for(precision=precision), byte_batches(3, ROWS)
    _, weights, run = trained(job, hand_written(job, compiled=BLOCKS), batches)
    assert set(placed_of(run).compiled.reasons) == set(BLOCKS)
    assert "differ from eager's" in str(placed_of(run).compiled.reasons) or "as far from" in str(placed_of(run).compiled.reasons)
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_without_a_compiler_blocks_stay_eager_and_say_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    job, batches = job_for(), byte_batches(2, ROWS)
    _, weights, _ = trained(job, hand_written(job, compiled=BLOCKS), batches)
    assert "(3) run without torch.compile: CXX=no-such-compiler is not there" in capsys.readouterr().err
    assert graphs() == 0
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_lengths_that_change_run_eagerly_and_after_a_while_all_do(capsys: pytest.CaptureFixture[str]) -> None:
    job = job_for()
    batches = [byte_batches(1, ROWS, length=length)[0] for length in (17, 9, *range(18, 34))]
    losses, _, _ = trained(job, hand_written(job, AWAY, slots=12, compiled=BLOCKS), batches)
    assert graphs() == 1
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-5)
    told = [line for line in capsys.readouterr().err.splitlines() if "torch.compile" in line]
    assert len(told) == 1
    assert "other shapes" in told[0]


def test_evaluation_hooks_that_come_later_and_a_second_backward_are_as_in_eager() -> None:
    job, batches = job_for(), byte_batches(4, ROWS)
    with started(job, hand_written(job, AWAY, slots=12, compiled=BLOCKS)) as run:
        run.step(batches[0])
        seen: list[Tensor] = []
        handle = run.model.blocks[1].up.register_forward_hook(lambda _module, _args, out: seen.append(out.detach()))
        run.step(batches[1])
        assert len(seen) == 1
        handle.remove()
        run.step(batches[2])
        assert len(seen) == 1
        run.model.eval()
        with torch.no_grad():
            assert run.model(batches[0][:1, :5]).shape == (1, 5, 256)
        run.model.train()
        loss = run.loss(batches[3])
        torch.autograd.grad(loss, [run.model.head.bias], retain_graph=True)
        run.backward(loss)
        run.update()
        assert_close(run.state_dict(), train_plainly(job, batches)[1], 1e-5)
    assert graphs() == 1


@pytest.mark.full
def test_a_loss_that_wants_second_derivatives_runs_eagerly(capsys: pytest.CaptureFixture[str]) -> None:
    def penalised(model: nn.Module, ids: Tensor) -> Tensor:
        x = model.embed(ids[:, :-1])  # type: ignore[operator]
        y = x
        for block in model.blocks:  # type: ignore[union-attr]
            y = block(y)
        loss = F.cross_entropy(model.head(y).flatten(0, 1), ids[:, 1:].flatten())  # type: ignore[operator]
        (slope,) = torch.autograd.grad(loss, [x], create_graph=True)
        return loss + slope.square().sum()

    job, batches = job_for(loss=penalised), byte_batches(3, ROWS)
    with anyfit.start(job, hand_written(job, compiled=BLOCKS)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        assert run.plan.compiled == ()
    assert "the loss does not run with it" in capsys.readouterr().err
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-6)


# ---------------------------------------------------------------------- before training


def test_a_start_compiles_before_the_first_step_and_leaves_no_trace() -> None:
    job, batches = job_for(), byte_batches(3, ROWS)
    with anyfit.start(job, hand_written(job, AWAY, slots=12, compiled=BLOCKS, accumulation=2)) as run:
        assert graphs() == 1
        losses = [float(run.step(batch)) for batch in batches]
        assert run.plan.compiled == BLOCKS
    assert graphs() == 1
    assert losses == pytest.approx(train_plainly(job, batches, 2)[0], rel=1e-5)


def test_what_a_job_or_a_plan_cannot_mean_is_refused() -> None:
    job = job_for()
    with pytest.raises(ValueError, match=r"Job\(compile=True\)"):
        job_for(compile=True)
    with pytest.raises(ValueError, match="recomputed in part"):
        Stage(0, 0, {"blocks.0": "selective"}, ("blocks.0",))
    with pytest.raises(ValueError, match=r"the plan compiles block 'blocks\.9'"):
        started(job, hand_written(job, compiled=("blocks.9",)))
    with pytest.raises(ValueError, match="which it is part of"):
        started(job, hand_written(job, compiled=("blocks.0", "blocks.0.up")))
    with pytest.raises(ValueError, match=r"compile=False.*compiles 3 blocks"):
        anyfit.start(job_for(compile=False), hand_written(job, compiled=BLOCKS))


def test_a_block_that_turns_eager_between_forward_and_backward_is_recomputed_as_it_ran() -> None:
    """As where another block of its kind has found that calls keep changing."""
    placed: list[Any] = []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        found = next_byte_loss(model, batch)
        for each in placed:
            each.compiled.stay_eager(dict.fromkeys(BLOCKS, "a test says so"))
        return found

    job, batches = job_for(loss=loss), byte_batches(5, ROWS)
    with started(job, hand_written(job, compiled=BLOCKS, activations=dict.fromkeys(BLOCKS, "recompute"))) as run:
        losses = []
        for number, batch in enumerate(batches):
            if number == 3:
                placed.append(placed_of(run))
            losses.append(float(run.step(batch)))
        assert set(placed_of(run).compiled.reasons) == set(BLOCKS)
    assert losses == pytest.approx(train_plainly(job_for(), batches)[0], rel=1e-5)
