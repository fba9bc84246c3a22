"""Blocks that a plan replays: recorded once for all that are alike, the results of eager, and op by op where that cannot be."""

from __future__ import annotations

import random
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anyfit
from anyfit.placing import local_gradients, replayed
from anyfit.running.run import Run
from anyfit.values.plan import Placement, Plan
from tests import stacks
from tests.models import byte_batches
from tests.oracle import assert_bit_equal, assert_close, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, random_delays, started
from tests.stacks import BLOCKS, LAYERS, ROWS, WIDTH

STEPS = 6


class Layer(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)
        self.register_buffer("scale", torch.full((WIDTH,), 0.5 + index))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.scale.to(x.dtype) * F.dropout(self.down(F.gelu(self.up(self.norm(x)))), 0.1, self.training)


class Stack(stacks.Stack):
    def __init__(self, layer: Any = Layer) -> None:
        super().__init__(layer)


def job_for(model: Any = Stack, **options: Any) -> anyfit.Job:
    return stacks.stacked_job(model, **options)


def plan_for(job: anyfit.Job, *chunks: Placement, choice: Any = "recompute", **options: Any) -> Plan:
    return hand_written(job, *chunks, activations=dict.fromkeys(BLOCKS, choice), replayed=BLOCKS, **options)


def trained(job: anyfit.Job, plan: Plan, batches: list[Any], delays: int | None = None) -> tuple[list[float], Any, Run]:
    with started(job, plan, None if delays is None else random_delays(delays)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        return losses, run.state_dict(), run


@pytest.fixture
def replays(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Which blocks were replayed backward, in order."""
    seen: list[str] = []
    backward = replayed._Replay.backward

    def counted(ctx: Any, *slopes: Any) -> Any:
        seen.append(ctx.block.name)
        return backward(ctx, *slopes)

    monkeypatch.setattr(replayed._Replay, "backward", staticmethod(counted))
    return seen


# ---------------------------------------------------------------------- the same results


@pytest.mark.parametrize("choice", ["keep", "recompute"])
@pytest.mark.parametrize(
    "placement", [RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED], ids=lambda each: each.route + each.weights
)
def test_replayed_blocks_train_as_plain_ones_to_the_bit(placement: Placement, choice: str, replays: list[str]) -> None:
    accumulation = 2 if placement in (RESIDENT, AWAY) else 1
    job, batches = job_for(clip_norm=0.3), byte_batches(STEPS, ROWS)
    plan = plan_for(job, placement, choice=choice, accumulation=accumulation)
    losses, weights, run = trained(job, plan, batches, delays=1)
    assert placed_of(run).replayed.reasons == {}
    assert replays.count("blocks.1") >= (STEPS - 2) * accumulation  # the first two are watched op by op, for their memory
    expected, plain = train_plainly(job, batches, accumulation=accumulation)
    assert losses == pytest.approx(expected, rel=1e-7)  # a mean of means is rounded otherwise
    assert_bit_equal(weights, plain)


class Doubled(torch.autograd.Function):
    """Runs a block by a graph of its own, and doubles the gradients of its weights."""

    @staticmethod
    def forward(ctx: Any, block: nn.Module, x: Tensor, *weights: Tensor) -> Tensor:
        with torch.enable_grad():
            ctx.x, ctx.weights = x.detach().requires_grad_(), weights
            ctx.out = block(ctx.x)
        return ctx.out.detach()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        first, *others = torch.autograd.grad(ctx.out, (ctx.x, *ctx.weights), slope)
        return None, first, *(2 * each for each in others)


def in_a_checkpoint(block: nn.Module, x: Tensor) -> Tensor:
    return checkpoint(block, x, use_reentrant=True)  # type: ignore[no-any-return]


def in_a_function(block: nn.Module, x: Tensor) -> Tensor:
    return Doubled.apply(block, x, *block.parameters())  # type: ignore[no-any-return]


@pytest.mark.parametrize("called", [in_a_checkpoint, in_a_function])
@pytest.mark.parametrize("placement", [RESIDENT, ON_HOST], ids=lambda each: each.route)
def test_a_backward_inside_of_the_steps_gives_its_gradients_to_who_began_it(placement: Placement, called: Any) -> None:
    class Nested(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                x = called(block, x)
            return self.head(x)  # type: ignore[no-any-return]

    job, batches = job_for(Nested), byte_batches(STEPS, ROWS)
    losses, weights, _ = trained(job, plan_for(job, placement, choice="keep"), batches)
    expected, plain = train_plainly(job, batches)
    assert losses == expected
    assert_bit_equal(weights, plain)


@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_recomputed_blocks_that_are_alike_share_their_recordings(choice: str) -> None:
    job, batches = job_for(), byte_batches(STEPS, ROWS)
    _, _, run = trained(job, plan_for(job, AWAY, choice=choice), batches)
    assert recordings(run) == (LAYERS if choice == "keep" else 1)


def test_a_kept_block_that_is_called_twice_in_a_pass_is_replayed_once(replays: list[str]) -> None:
    """Its second call must not write over what its first one saved."""

    class Twice(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in (*self.blocks, self.blocks[1]):
                x = block(x)
            return self.head(x)  # type: ignore[no-any-return]

    job, batches = job_for(Twice), byte_batches(STEPS, ROWS)
    losses, weights, _ = trained(job, plan_for(job, RESIDENT, choice="keep"), batches)
    expected, plain = train_plainly(job, batches)
    assert replays.count("blocks.1") == replays.count("blocks.0") > 0
    assert losses == expected
    assert_bit_equal(weights, plain)


def test_a_forward_without_backward_leaves_a_kept_block_free(replays: list[str]) -> None:
    def measured(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).square().mean()
        return found + model(batch).detach().mean() * 0

    job, batches = job_for(loss=measured), byte_batches(STEPS, ROWS)
    losses, weights, _ = trained(job, plan_for(job, RESIDENT, choice="keep"), batches)
    expected, plain = train_plainly(job, batches)
    assert replays.count("blocks.1") >= STEPS - 2
    assert losses == expected
    assert_bit_equal(weights, plain)


def test_a_block_that_computes_by_its_number_is_recorded_by_itself() -> None:
    class Numbered(Layer):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) / (1 + self.index)

    assert_equal_to_plain(job_for(lambda: Stack(Numbered)), tapes=LAYERS)


def test_bf16_blocks_train_as_recomputed_ones_to_the_bit(replays: list[str]) -> None:
    job, batches = job_for(precision="bf16", clip_norm=0.3), byte_batches(STEPS, ROWS)
    plan = plan_for(job, AWAY)
    losses, weights, _ = trained(job, plan, batches)
    others, expected, _ = trained(job, plan.without_replayed(BLOCKS), batches)
    assert replays
    assert losses == others
    assert_bit_equal(weights, expected)


def test_what_gets_no_gradient_gets_none_from_a_recording() -> None:
    """An output that the loss does not use leaves its weights as they are: weight decay would change them."""

    class Two(Layer):
        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.other = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Any:  # type: ignore[override]
            return {"x": super().forward(x), "unused": self.other(x), "number": self.index}

    class Chain(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            for block in self.blocks:
                found = block(x)
                x = found["x"] * (1 + found["number"])
            return self.head(x)  # type: ignore[no-any-return]

    optimizer = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)}
    assert_equal_to_plain(job_for(lambda: Chain(Two), **optimizer), tapes=LAYERS)


def test_frozen_weights_and_masks_are_inputs_like_others() -> None:
    class Masked(Layer):
        def forward(self, x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:  # type: ignore[override]
            return super().forward(x) * mask * scale

    class Chain(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            mask = (ids > 40).unsqueeze(-1).to(x.dtype).expand(x.shape)
            for block in self.blocks:
                block.norm.requires_grad_(False)
                x = block(x, mask, scale=0.9)
            return self.head(x)  # type: ignore[no-any-return]

    def build() -> nn.Module:
        made = Chain(Masked)
        for block in made.blocks:
            block.norm.requires_grad_(False)  # type: ignore[union-attr]
        return made

    optimizer = lambda model: torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)  # noqa: E731
    assert_equal_to_plain(job_for(build, optimizer=optimizer), tapes=1)


def test_what_a_block_hands_on_is_handed_on() -> None:
    """As T5's layers do with their position bias."""

    class Biased(Layer):
        def forward(self, x: Tensor, bias: Tensor) -> Any:  # type: ignore[override]
            return super().forward(x + bias), bias

    class Chain(Stack):
        def __init__(self) -> None:
            super().__init__(Biased)
            self.bias = nn.Parameter(torch.full((WIDTH,), 0.1))

        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids)
            first = bias = self.bias * 2
            for block in self.blocks:
                x, bias = block(x, bias)
                assert bias is first
            return self.head(x)  # type: ignore[no-any-return]

    job, batches = job_for(Chain), byte_batches(STEPS, ROWS)
    losses, _, run = trained(job, plan_for(job, AWAY), batches)
    assert placed_of(run).replayed.reasons == {}
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-6)


def recordings(run: Run) -> int:
    return placed_of(run).replayed.recorded


def assert_equal_to_plain(job: anyfit.Job, tapes: int | None = None, reason: str | None = None, **options: Any) -> None:
    batches = byte_batches(STEPS, ROWS)
    expected, plain = train_plainly(job, batches)
    for choice in ("recompute", "keep"):
        losses, weights, run = trained(job, plan_for(job, AWAY, choice=choice, **options), batches)
        assert losses == pytest.approx(expected, rel=1e-6)
        assert_bit_equal(weights, plain)
        if reason is not None:
            assert reason in placed_of(run).replayed.reasons["blocks.0"]
            continue
        assert placed_of(run).replayed.reasons == {}
        assert recordings(run) == (LAYERS if choice == "keep" else tapes)


# ---------------------------------------------------------------------- op by op, with a reason


class Counts(Layer):
    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls = self.calls + 1
        return super().forward(x)


class Averages(Layer):
    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.scale.mul_(0.9).add_(0.1 * x.detach().mean((0, 1)))
        return super().forward(x)


class Elsewhere(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.table = [torch.ones(WIDTH)]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * self.table[0]


class Views(Layer):
    def forward(self, x: Tensor) -> Any:
        super().forward(x)
        return x[:, :]


class Listed(Layer):
    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.both = [self.up.weight, self.down.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.both[0].sum() * 0


class Python(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + random.random())


class Asks(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2.0 if float(x.detach().sum()) > 0 else 1.0)


class Hooked(Layer):
    def forward(self, x: Tensor) -> Tensor:
        found = super().forward(x)
        found.register_hook(lambda slope: 0.9 * slope)
        return found


class Prints(Layer):
    def forward(self, x: Tensor) -> Tensor:
        print("forward")
        return super().forward(x)


class Noted(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[int]) -> Tensor:
        ctx.seen = seen
        return x.clone()

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        ctx.seen.append(1)
        return slope, None


class Notes(Layer):
    """Changes its state in backward."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.seen: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = Noted.apply(super().forward(x), self.seen)  # type: ignore[no-untyped-call]
        return found


REFUSED = {
    Hooked: "it adds hooks to tensors",
    Prints: "it prints",
    Notes: "it changes",
    Asks: "it asks for a value on the device",
    Counts: "it changes",
    Averages: "it changes",
    Elsewhere: "neither its own nor given to it",
    Views: "it returns memory of its inputs",
    Listed: "holds its weights in a list",
    Python: "it changes",
}


@pytest.mark.parametrize("layer", REFUSED, ids=lambda each: each.__name__)
def test_what_a_recording_cannot_do_again_runs_op_by_op(layer: Any) -> None:
    job, batches = job_for(lambda: Stack(layer)), byte_batches(STEPS, ROWS)
    for choice in ("recompute", "keep"):
        plan = plan_for(job, AWAY, choice=choice)
        random.seed(3)
        _, weights, run = trained(job, plan, batches)
        assert REFUSED[layer] in placed_of(run).replayed.reasons["blocks.0"]
        random.seed(3)
        _, expected, _ = trained(job, plan.without_replayed(BLOCKS), batches)
        assert_bit_equal(weights, expected)


def test_a_block_that_runs_other_ops_than_one_that_is_alike_is_no_copy_of_it() -> None:
    """Where both give the same when they are tried."""

    class Sometimes(Layer):
        def forward(self, x: Tensor) -> Tensor:
            scale = 1.0 if self.index == 0 else 1.0 + float(x.detach().mean() > 5)
            return super().forward(x) * scale

    job, batches = job_for(lambda: Stack(Sometimes)), byte_batches(STEPS, ROWS)
    _, weights, run = trained(job, plan_for(job, RESIDENT), batches)
    assert set(placed_of(run).replayed.reasons) == {"blocks.1", "blocks.2"}
    assert_bit_equal(weights, train_plainly(job, batches)[1])


def test_a_hook_inside_runs_op_by_op_and_so_does_one_that_is_added_later(replays: list[str]) -> None:
    job, batches = job_for(), byte_batches(STEPS, ROWS)
    seen: list[int] = []
    with started(job, plan_for(job, RESIDENT)) as run:
        for batch in batches:
            run.step(batch)
        before = len(replays)
        assert before
        run.model.get_submodule("blocks.1").up.register_forward_hook(lambda *_: seen.append(1))
        run.step(batches[0])
        assert replays[before:] == ["blocks.2", "blocks.0"]
        assert len(seen) == 2  # forward, and recomputed


def test_another_length_and_evaluation_run_op_by_op(replays: list[str]) -> None:
    job, batches = job_for(), byte_batches(STEPS, ROWS)
    with started(job, plan_for(job, RESIDENT)) as run:
        for batch in batches:
            run.step(batch)
        before = len(replays)
        run.evaluate(batches[0])
        short = [batch[:, :-3] for batch in batches]
        for batch in short:
            run.step(batch)
        assert len(replays) == before
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, [*batches, *short])[1])


def test_an_attribute_that_changes_is_heeded(replays: list[str]) -> None:
    class Scaled(Layer):
        factor = 1.0

        def __init__(self, index: int) -> None:
            super().__init__(index)
            self.factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    batches = byte_batches(STEPS, ROWS)

    def losses(replayed: bool) -> list[float]:
        job = job_for(lambda: Stack(Scaled))
        plan = plan_for(job, AWAY)
        found = []
        with started(job, plan if replayed else plan.without_replayed(BLOCKS)) as run:
            for number, batch in enumerate([*batches, *batches]):
                if number == STEPS + 2:
                    run.model.get_submodule("blocks.1").factor = 0.5
                found.append(float(run.step(batch)))
        return found

    assert losses(replayed=True) == losses(replayed=False)
    assert replays


@pytest.mark.parametrize("from_step", [1, 4])
@pytest.mark.parametrize("choice", ["keep", "recompute"])
def test_what_a_block_can_reach_and_does_not_read_may_change(choice: str, from_step: int, replays: list[str]) -> None:
    """As the first loss of a classifier sets its problem's type in the configuration that all blocks share."""

    class Config:
        kind: str | None = None
        labels: ClassVar[dict[int, str]] = {}

    class Configured(Layer):
        def __init__(self, index: int, config: Config) -> None:
            super().__init__(index)
            self.config = config

    def build() -> nn.Module:
        config = Config()
        return Stack(lambda index: Configured(index, config))

    def loss(model: Any, batch: Tensor) -> Tensor:
        config = model.blocks[0].config
        if step[0] >= from_step:
            config.kind, config.labels = "labels", {0: "none"}
        found: Tensor = model(batch).square().mean()
        if step[0] < 0:  # as of the first loss, in the rehearsal
            config.kind = "numbers"
        return found

    step, batches = [-1], byte_batches(STEPS, ROWS)
    job = job_for(build, loss=loss)
    with anyfit.start(job, plan_for(job, RESIDENT, choice=choice)) as run:
        known = [len(block._known) for block in placed_of(run).replayed.blocks.values()]
        assert known == [2] * LAYERS  # before the first step
        for step[0], batch in enumerate(batches):
            run.step(batch)
        assert replays[-LAYERS:] == list(reversed(BLOCKS))
        assert all(block._missed == 0 for block in placed_of(run).replayed.blocks.values())
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches)[1])


@pytest.mark.parametrize("choice", ["keep", "recompute"])
@pytest.mark.parametrize("placement", [RESIDENT, AWAY], ids=["resident", "away"])
def test_second_derivatives_are_those_of_plain_pytorch(placement: Placement, choice: str) -> None:
    calls: list[int] = []

    def penalised(model: Any, batch: Tensor) -> Tensor:
        """At some steps alone, as some losses have it: not when blocks are recorded."""
        calls.append(1)
        embedded = model.embed(batch)
        x = embedded
        for block in model.blocks:
            x = block(x)
        if len(calls) % 3:
            return x.square().mean()
        (slope,) = torch.autograd.grad(x.sum(), embedded, create_graph=True)
        return slope.square().mean() + x.square().mean()

    job, batches = job_for(loss=penalised), byte_batches(2 * STEPS, ROWS)
    with started(job, plan_for(job, placement, choice=choice)) as run:
        calls.clear()
        losses = [float(run.step(batch)) for batch in batches]
        assert placed_of(run).replayed.reasons == {}
        weights = run.state_dict()
    calls.clear()
    expected, plain = train_plainly(job, batches)
    assert losses == pytest.approx(expected, rel=1e-6)
    assert_close(weights, plain, 1e-6)


def test_recordings_that_serve_few_calls_are_given_up(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(replayed, "MOST_MISSED", 4)
    job, batches = job_for(), byte_batches(STEPS, ROWS)
    with started(job, plan_for(job, RESIDENT, choice="keep")) as run:
        for batch in [*batches, *(batch[:, :-3] for batch in (*batches, *batches))]:
            run.step(batch)
        blocks = placed_of(run).replayed.blocks.values()
        assert all(block._tape is None for block in blocks)
    assert "of its calls in training had other shapes" in capsys.readouterr().err


def test_only_kept_and_recomputed_blocks_can_be_replayed() -> None:
    job = job_for()
    with pytest.raises(ValueError, match="only those that are kept or recomputed can be, not 'offload'"):
        hand_written(job, activations={"blocks.0": "offload"}, replayed=("blocks.0",))


def test_a_plan_that_replays_is_not_for_a_job_that_does_not() -> None:
    job = job_for(replay=False)
    plan = plan_for(job, RESIDENT)
    with pytest.raises(ValueError, match=r"the plan replays 3 blocks; use plan.without_replayed\(\)"):
        anyfit.start(job, plan)
    with anyfit.start(job, plan.without_replayed()) as run:
        assert run.plan.replayed == ()


def test_a_start_says_which_blocks_run_op_by_op_and_trains(capsys: pytest.CaptureFixture[str]) -> None:
    job, batches = job_for(lambda: Stack(Counts)), byte_batches(STEPS, ROWS)
    with anyfit.start(job, plan_for(job, RESIDENT)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        assert run.plan.replayed == ()
    assert "blocks 'blocks.0' to 'blocks.2' (3) run op by op: it changes its calls" in capsys.readouterr().err
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-6)


# ---------------------------------------------------------------------- gradients


@pytest.mark.parametrize(("precision", "accumulation"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("placement", [RESIDENT, ON_HOST], ids=["resident", "host"])
@pytest.mark.parametrize("case", ["plain", "hook", "late hook", "penalty", "own gradients"])
def test_gradients_of_a_replayed_block_go_together_unless_somebody_waits_for_them(
    case: str, placement: Placement, precision: Any, accumulation: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    taken: list[int] = []
    take = local_gradients.LocalGradients.take

    def counted(self: Any, given: Any) -> None:
        taken.append(len(given))
        take(self, given)

    monkeypatch.setattr(local_gradients.LocalGradients, "take", counted)

    def loss(model: Any, batch: Tensor) -> Tensor:
        found: Tensor = model(batch).float().square().mean()
        if case == "penalty":  # a second gradient of a weight, after or before the block's own
            found = found + 0.1 * sum(each.up.weight.float().square().mean() for each in model.blocks)
        if case == "own gradients":
            found = found + torch.autograd.grad(found, model.blocks[1].up.weight, retain_graph=True)[0].float().square().sum()
        return found

    def build() -> nn.Module:
        model = Stack()
        if case == "hook":
            model.blocks[1].up.weight.register_hook(lambda slope: 0.5 * slope)
        return model

    job, batches = job_for(build, loss=loss, precision=precision, clip_norm=0.3), byte_batches(6, ROWS)
    choice = "keep" if case == "own gradients" else "recompute"
    plan = plan_for(job, placement, choice=choice, accumulation=accumulation)
    found = []
    for each in (plan, plan.without_replayed(BLOCKS)):
        with started(job, each) as run:
            losses = []
            for index, batch in enumerate(batches):
                if case == "late hook" and index == 4:
                    hooked: Any = run.model
                    hooked.blocks[1].up.weight.register_hook(lambda slope: 0.5 * slope)
                losses.append(float(run.step(batch)))
            found.append((losses, run.state_dict()))
    weights = len(list(Layer(0).parameters()))
    fewer = {"hook": [weights, weights - 1, weights], "late hook": [weights, weights - 1, weights]}
    if case == "penalty" and (placement != RESIDENT or accumulation > 1):  # else both are autograd's
        fewer["penalty"] = [weights - 1] * LAYERS
    assert taken[-LAYERS:] == fewer.get(case, [weights] * LAYERS)
    if case != "hook":
        assert taken[:LAYERS] == [weights] * LAYERS
    assert_close(found[0][1], found[1][1], 1e-6 if precision == "fp32" else 1e-3)
    if case != "penalty":  # which is added in another order at first
        assert found[0][0] == found[1][0]
        assert_bit_equal(found[0][1], found[1][1])


class Shifted(nn.Module):
    """Its parameters have the very gradient of its result, all the same one."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.scale = 1.5 - index
        length = byte_batches(1, ROWS)[0].shape[1] - 1
        self.one, self.other, self.turned = (nn.Parameter(torch.randn(ROWS, length, WIDTH) / 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.one + self.other + self.turned.flip(0)


@pytest.mark.parametrize("placement", [RESIDENT, STREAMED], ids=["resident", "streamed"])
def test_parameters_that_share_a_gradient_have_one_each(placement: Placement) -> None:
    job = job_for(lambda: Stack(Shifted), clip_norm=0.05, precision="bf16", optimizer=lambda m: torch.optim.AdamW(m.parameters()))
    batches, plan = byte_batches(STEPS, ROWS), plan_for(job, placement, choice="keep")
    replayed, plain = (trained(job, each, batches) for each in (plan, plan.without_replayed(BLOCKS)))
    assert replayed[0] == plain[0]
    assert_bit_equal(replayed[1], plain[1])
