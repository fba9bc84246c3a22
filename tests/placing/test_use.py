"""What user code may do with a model whose state is elsewhere: all that works as ever, and what is refused with a reason."""

from __future__ import annotations

import copy
import gc
import weakref
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import anyfit
from anyfit.placing import activations
from anyfit.placing.lanes import STREAMED_DEPTH
from anyfit.placing.slots import Saved
from anyfit.values.plan import Placement
from tests.machines import small_machine
from tests.models import Experts, Tangled, byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, random_delays, started

ROWS = 4
ALL = [STREAMED, ON_HOST, AWAY, AWAY_STREAMED]


def job_for(model: Any = tiny_gpt, **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), "precision": "fp32"} | options
    return anyfit.Job(model=model, loss=next_byte_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


@pytest.mark.parametrize("placement", ALL)
def test_evaluation_generation_and_other_shapes_between_steps_change_nothing(placement: Placement) -> None:
    job = job_for()
    batches = byte_batches(6, ROWS)
    with started(job, hand_written(job, placement, slots=8), random_delays(3)) as run:
        for batch in batches:
            run.step(batch)
            run.evaluate(byte_batches(1, 3, length=9)[0])
            with torch.no_grad():
                run.model(batch[:1, :5]).argmax(-1)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches)[1])


@pytest.mark.parametrize("placement", ALL)
def test_several_micro_batches_in_flight_forward_between_backwards(placement: Placement) -> None:
    job = job_for(micro_batch=1)
    batches = byte_batches(5, ROWS)
    with started(job, hand_written(job, placement, slots=8, accumulation=4), random_delays(4)) as run:
        for batch in batches:
            parts = list(batch.split(1))
            losses = [run.loss(parts[0]), run.loss(parts[1])]
            run.backward(losses.pop(0))
            losses.append(run.loss(parts[2]))
            run.backward(losses.pop(0))
            losses.append(run.loss(parts[3]))
            run.backward(losses.pop(0))
            run.backward(losses.pop(0))
            run.update()
        assert_bit_equal(run.state_dict(), train_plainly(job, batches, 4)[1])


@pytest.mark.parametrize("placement", ALL)
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_inside_weights_become_part_of_the_run(placement: Placement, precision: Any) -> None:
    job = job_for(precision=precision)
    batch = byte_batches(1, ROWS)[0]
    with started(job, hand_written(job, placement, slots=4)) as run:
        run.step(batch)
        before = run.state_dict()
        with run.weights() as model, torch.no_grad():
            model.norm.weight.mul_(2)
            model.norm.bias.data = torch.full_like(model.norm.bias, 0.25)
            model.blocks[0].mix.bias.data.fill_(0.5)
            for parameter in model.blocks[1].parameters():
                parameter.sum()  # only looked at, with few slots: others leave
        after = run.state_dict()
        assert torch.equal(after["norm.bias"], torch.full_like(after["norm.bias"], 0.25))
        assert torch.equal(after["blocks.0.mix.bias"], torch.full_like(after["blocks.0.mix.bias"], 0.5))
        assert torch.allclose(after["norm.weight"], 2 * before["norm.weight"], rtol=1e-2)
        edited = {"norm.bias", "norm.weight", "blocks.0.mix.bias"}
        assert_bit_equal(
            {name: tensor for name, tensor in after.items() if name not in edited},
            {name: tensor for name, tensor in before.items() if name not in edited},
        )
        run.step(batch)
        assert not torch.equal(run.state_dict()["norm.bias"], after["norm.bias"])


@pytest.mark.parametrize("placement", ALL)
def test_gradients_that_have_left_are_refused_with_a_reason(placement: Placement) -> None:
    job = job_for()
    batch = byte_batches(1, ROWS)[0]
    with started(job, hand_written(job, placement, slots=8)) as run:
        run.step(batch)
        weight = run.model.norm.weight
        with pytest.raises(RuntimeError, match="cannot be set"):
            weight.grad = torch.ones_like(weight)
        run.backward(run.loss(batch))
        if placement.gradients == "host":
            with pytest.raises(RuntimeError, match="has left for the host"):
                _ = weight.grad
        else:
            assert weight.grad is not None
        run.update()
        assert weight.grad is None
        run.model.zero_grad()


class Converting(nn.Module):
    """As mixtures of experts do with their router, whatever its weights are."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.dtype = dtype
        self.words = nn.Embedding(256, 16)
        self.inner = nn.Linear(16, 16)
        self.head = nn.Linear(16, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        self.inner = self.inner.to(self.dtype)
        logits: Tensor = self.head(self.inner(self.words(tokens)).relu())
        return logits


@pytest.mark.parametrize("placement", [*ALL, RESIDENT])
def test_a_forward_may_convert_its_modules_to_what_they_are(placement: Placement) -> None:
    job = job_for(Converting, micro_batch=1)
    batches = byte_batches(4, ROWS)
    with started(job, hand_written(job, placement, slots=8, accumulation=ROWS), random_delays(5)) as run:
        for batch in batches:
            run.step(batch)
        assert_bit_equal(run.state_dict(), train_plainly(job, batches, ROWS)[1])
    assert anyfit.plan(job, small_machine()).micro_batches == [1] * ROWS


def test_a_forward_that_converts_its_modules_to_something_else_is_refused_with_its_own_line() -> None:
    job = job_for(lambda: Converting(torch.float64))
    with pytest.raises(ValueError, match=r"`self.inner = self.inner.to\(self.dtype\)` converts weights while"):
        anyfit.plan(job, small_machine())


def test_weights_may_be_read_and_copied_at_any_time() -> None:
    job = job_for()
    with started(job, hand_written(job, AWAY, slots=2, chunk_bytes=1)) as run:
        run.step(byte_batches(1, ROWS)[0])
        expected = run.state_dict()
        for name, parameter in run.model.named_parameters():
            assert torch.equal(parameter.detach().clone(), expected[name]), name
            assert torch.equal(parameter.float().norm().detach(), expected[name].norm())
            assert parameter.numel() == expected[name].numel()
        with run.weights() as model:
            copied = copy.deepcopy(model)
        assert_bit_equal({name: tensor.detach() for name, tensor in copied.state_dict().items()}, expected)


def test_weights_that_user_code_keeps_hold_their_slot_and_others_get_one_more() -> None:
    job = job_for()
    with started(job, hand_written(job, AWAY, slots=2, chunk_bytes=1)) as run, torch.no_grad():
        parameters, residency = list(run.model.parameters()), placed_of(run).residency
        kept = [parameters[0].view(-1), parameters[1].view(-1)]
        before = residency.device_bytes
        parameters[2].sum()
        parameters[3].sum()
        assert residency.slots.added == 1
        assert residency.device_bytes == before * 3 // 2
        assert torch.equal(kept[0], parameters[0].view(-1))
        del kept
        parameters[4].sum()
        assert residency.slots.added == 1


@pytest.mark.parametrize("recomputed", [False, True])
def test_ops_that_need_more_chunks_than_there_are_slots_get_more_within_the_limit(recomputed: bool) -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ParameterList(nn.Parameter(torch.randn(16, 16)) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.relu(x @ torch.cat(list(self.parts), 1))

    job = anyfit.Job(
        lambda: nn.Sequential(Joined(), nn.Linear(96, 1)),
        lambda model, batch: model(batch).square().mean(),
        lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        torch.randn(4, 16),
        4,
        precision="fp32",
    )
    batches = [torch.randn(4, 16, generator=torch.Generator().manual_seed(step)) for step in range(3)]
    losses, weights = train_plainly(job, batches)
    plan = hand_written(job, AWAY, slots=2, chunk_bytes=1, activations={"0": "recompute"} if recomputed else {})
    with started(job, plan) as run:
        assert [float(run.step(batch)) for batch in batches] == losses
        assert_bit_equal(run.state_dict(), weights)
        assert placed_of(run).residency.slots.added == 4
        least = placed_of(run).device_bytes
    tight = replace(plan, limit_bytes={**plan.limit_bytes, "device": least - 1})
    with started(job, tight) as run, pytest.raises(MemoryError, match="of device memory are needed"):
        run.step(batches[0])


def test_freezing_during_a_run_is_honoured_and_thawing_is_refused() -> None:
    job = job_for(Tangled)
    batches = byte_batches(6, ROWS)
    for placement in (*ALL, Placement()):
        with started(job, hand_written(job, placement, slots=8)) as run:
            for index, batch in enumerate(batches):
                if index == 3:
                    run.model.twice.requires_grad_(False)
                    before = run.state_dict()
                run.step(batch)
            after = run.state_dict()
            assert torch.equal(after["twice.weight"], before["twice.weight"])
            assert not torch.equal(after["norm.weight"], before["norm.weight"])
            run.model.frozen.requires_grad_(True)
            with pytest.raises(RuntimeError, match="frozen when the run started"):
                run.step(batches[0])


class Adapted(nn.Module):
    """A frozen base with adapters of low rank beside its products."""

    def __init__(self) -> None:
        super().__init__()
        self.base = tiny_gpt()
        self.base.requires_grad_(False)
        self.down = nn.ModuleList(nn.Linear(32, 4, bias=False) for _ in range(2))
        self.up = nn.ModuleList(nn.Linear(4, 32, bias=False) for _ in range(2))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.base.bytes(ids) + self.base.places(torch.arange(ids.shape[1]))
        for block, down, up in zip(self.base.blocks, self.down, self.up, strict=True):
            x = block(x) + up(down(x))
        logits: Tensor = self.base.head(self.base.norm(x))
        return logits


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_adapters_train_beside_a_frozen_base_on_the_host(precision: Any) -> None:
    job = job_for(Adapted, precision=precision, clip_norm=1.0)
    batches = byte_batches(30, ROWS)
    bare = hand_written(job)
    with started(job, bare) as run:
        trained = [state.chunk.trainable for state in placed_of(run).state.chunks]
    frozen = Placement(weights="host", optimizer="host")
    plan = hand_written(job, *(Placement() if each else frozen for each in trained), slots=6)
    with started(job, plan) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
        placed = placed_of(run)
        base_bytes = sum(state.chunk.bytes for state in placed.state.chunks if not state.chunk.trainable)
        rounding = 4096 * len(placed.state.chunks)
        assert placed.host_bytes <= base_bytes + rounding  # the weights of the base, and nothing else of it
        assert not any(name.startswith("base.") for name in placed.updates.state_dict())
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


class Shared(nn.Module):
    """One layer in two reentrant checkpoints: backward gives its weights a gradient twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.shared, self.head = nn.Embedding(256, 8), nn.Linear(8, 8), nn.Linear(8, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for _ in range(2):
            x = checkpoint(lambda y: torch.tanh(self.shared(y)), x, use_reentrant=True)
        logits: Tensor = self.head(x)
        return logits


@pytest.mark.parametrize("placement", [*ALL, *(replace(each, speculates=True) for each in (AWAY, STREAMED))])
@pytest.mark.parametrize("chunk_bytes", [1, 2**20])
@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_gradient_that_comes_twice_in_one_backward_counts_twice(
    placement: Placement, chunk_bytes: int, accumulation: int
) -> None:
    job = job_for(Shared, clip_norm=None if placement.speculates else 0.1)
    batches = byte_batches(6, ROWS)
    plan = hand_written(job, placement, chunk_bytes=chunk_bytes, slots=8, accumulation=accumulation)
    with started(job, plan, random_delays(5)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
    plain_losses, plain_weights = train_plainly(job, batches, accumulation)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


class Halves(nn.Module):
    """Uses one layer or two, and may give no number, as the batch says."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Embedding(256, 256), nn.Embedding(256, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.first(ids)
        if int(ids[0, 0]) < 128:
            x = x + self.second(ids)
        return x * float("nan") if int(ids[0, 1]) == 255 else x


def test_what_was_speculated_in_a_step_that_does_not_count_is_not_used_by_the_next() -> None:
    job = job_for(Halves)
    batches = byte_batches(5, ROWS)
    for batch in batches:
        batch[0, 0], batch[0, 1] = 1, 0
    batches[2][0, 1] = 255  # left out
    batches[3][0, 0] = 200  # and then only half of the chunk has gradients
    with started(job, hand_written(job, replace(AWAY, speculates=True), chunk_bytes=2**20, slots=4)) as run:
        for batch in batches:
            run.step(batch)
        assert run.skipped == 1
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, [batch for batch in batches if int(batch[0, 1]) != 255])[1])


def test_forwards_without_a_backward_take_no_host_memory_for_good(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 256)
    job = job_for()
    batch = byte_batches(1, ROWS)[0]
    plan = hand_written(job, AWAY, slots=8, activations={"blocks.0": "offload", "blocks.1": "offload"})
    with started(job, plan) as run:
        run.step(batch)
        run.step(batch)
        before = placed_of(run).host_bytes
        for _ in range(5):
            run.loss(batch)  # and no backward
            run._step.abandon()
            run.step(batch)
        assert placed_of(run).host_bytes == before


def test_hooks_of_the_user_see_what_they_would() -> None:
    job = job_for()
    batch = byte_batches(1, ROWS)[0]
    seen: dict[str, list[Any]] = {"plain": [], "mine": []}

    def watch(model: nn.Module, into: list[Any]) -> None:
        model.blocks[0].register_forward_hook(lambda _module, _inputs, output: into.append(output.detach().clone()))
        model.blocks[0].register_full_backward_hook(lambda _module, _into, out: into.append(out[0].clone()))
        model.norm.weight.register_hook(lambda gradient: into.append(gradient.clone()))

    torch.manual_seed(0)
    plain = job.build()
    watch(plain, seen["plain"])
    next_byte_loss(plain, batch).backward()
    with started(job, hand_written(job, AWAY, slots=8)) as run:
        watch(run.model, seen["mine"])
        run.step(batch)
    assert len(seen["plain"]) == len(seen["mine"]) == 3
    for mine, expected in zip(seen["mine"], seen["plain"], strict=True):
        assert torch.equal(mine, expected)


def test_runs_side_by_side_do_not_touch_each_other() -> None:
    job, other = job_for(), job_for(Experts, seed=1)
    batches = byte_batches(4, ROWS)
    with (
        started(job, hand_written(job, AWAY, slots=8), random_delays(1)) as first,
        started(other, hand_written(other, AWAY_STREAMED, slots=8), random_delays(2)) as second,
    ):
        for batch in batches:
            first.step(batch)
            second.step(batch)
        assert_bit_equal(first.state_dict(), train_plainly(job, batches)[1])
        assert_bit_equal(second.state_dict(), train_plainly(other, batches)[1])


def test_a_checkpoint_moves_between_placements(tmp_path: Any) -> None:
    job = job_for(precision="bf16", clip_norm=0.5)
    batches = byte_batches(6, ROWS)
    expected = train_plainly(job, batches)[1]
    placements = [AWAY, Placement(), STREAMED, ON_HOST, AWAY_STREAMED]
    for before, after in zip(placements, placements[1:] + placements[:1], strict=True):
        with started(job, hand_written(job, before, slots=8)) as run:
            for batch in batches[:3]:
                run.step(batch)
            run.save(tmp_path / before.route)
        with started(job, hand_written(job, after, slots=8, chunk_bytes=2**20)) as run:
            run.step(batches[5])  # what was there before is forgotten
            run.resume(tmp_path / before.route)
            for batch in batches[3:]:
                run.step(batch)
            assert_bit_equal(run.state_dict(), expected)


def test_host_memory_is_a_hard_limit() -> None:
    job = job_for()
    with pytest.raises(MemoryError, match=r"host memory is 64\.0 KiB"):
        started(job, hand_written(job, AWAY, slots=8, host_bytes=2**16))


def test_a_plan_for_another_number_of_chunks_or_blocks_is_refused() -> None:
    job = job_for()
    with pytest.raises(ValueError, match="the plan places 2 chunks, and this model makes"):
        started(job, hand_written(job, Placement(), Placement()))
    with pytest.raises(ValueError, match=r"did you mean 'blocks\.0'"):
        started(job, hand_written(job, activations={"block.0": "recompute"}))


@pytest.mark.filterwarnings("ignore")  # of torch's own, when it compiles
def test_a_user_compiled_block_trains_as_the_plain_one() -> None:
    def model() -> nn.Module:
        made = tiny_gpt()
        for block in made.blocks:
            block.compile(backend="aot_eager")
        return made

    job = job_for(model)
    batches = byte_batches(5, ROWS)
    with started(job, hand_written(job, AWAY, slots=12)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
    plain_losses, plain_weights = train_plainly(job_for(), batches)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, expected in plain_weights.items():
        assert torch.allclose(weights[name], expected, atol=1e-4), name


def test_functions_that_take_many_weights_at_once() -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(256, 8)
            self.rnn = nn.LSTM(8, 8, 2, batch_first=True)
            self.head = nn.Linear(8, 256)

        def forward(self, ids: Tensor) -> Tensor:
            joined = torch.cat([self.head.weight, self.embed.weight]).norm()
            logits: Tensor = self.head(self.rnn(self.embed(ids))[0]) * F.softplus(joined)
            return logits

    job = job_for(Recurrent)
    batches = byte_batches(5, ROWS)
    with started(job, hand_written(job, AWAY, slots=12, chunk_bytes=512)) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


@pytest.mark.parametrize("placement", [Placement(), AWAY])
def test_an_lstm_that_flattens_its_weights_leaves_them_in_their_chunk(
    placement: Placement, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moved(self: nn.LSTM) -> None:  # as on a GPU
        for parameter in self.parameters():
            parameter.data = parameter.data.clone()

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.rnn, self.head = nn.Embedding(256, 8), nn.LSTM(8, 8, batch_first=True), nn.Linear(8, 256)

        def forward(self, ids: Tensor) -> Tensor:
            self.rnn.flatten_parameters()
            logits: Tensor = self.head(self.rnn(self.embed(ids))[0])
            return logits

    job, batches = job_for(Recurrent), byte_batches(3, ROWS)
    losses, weights = train_plainly(job, batches)
    monkeypatch.setattr(nn.LSTM, "flatten_parameters", moved)
    with started(job, hand_written(job, placement, slots=6)) as run:
        lstm = run.model.rnn
        places = {name: parameter.data_ptr() for name, parameter in lstm.named_parameters()} if placement == Placement() else {}
        assert [float(run.step(batch)) for batch in batches] == losses
        assert_bit_equal(run.state_dict(), weights)
        assert all(lstm.get_parameter(name).data_ptr() == place for name, place in places.items())
    assert "flatten_parameters" not in vars(lstm)


def test_device_memory_is_a_hard_limit_and_the_error_says_where_and_what_to_change() -> None:
    job = job_for()
    with started(job, hand_written(job, AWAY, slots=8)) as run:
        run.step(byte_batches(1, ROWS)[0])
        needed = run.metrics.peak_bytes["device"]
    batches = byte_batches(2, ROWS)
    with started(job, hand_written(job, AWAY, slots=8, device_bytes=needed)) as run:
        run.step(batches[0])
        run.step(batches[1])
    with started(job, hand_written(job, AWAY, slots=8, device_bytes=needed * 2 // 3)) as run:
        with pytest.raises(MemoryError, match=r"are needed in blocks\.\d.*are allowed; .*micro_batch"):
            run.step(batches[0])
        assert run.steps == 0


def test_a_batch_of_another_shape_is_held_to_the_limit_too() -> None:
    job = job_for()
    with started(job, hand_written(job, slots=8)) as run:
        run.step(byte_batches(1, ROWS, length=9)[0])
        short = run.metrics.peak_bytes["device"]
    with started(job, hand_written(job, slots=8, device_bytes=short)) as run:
        for batch in byte_batches(4, ROWS, length=9):
            run.step(batch)
        with pytest.raises(MemoryError, match="device memory are needed"):
            run.step(byte_batches(1, ROWS, length=17)[0])


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # of torch's own, when it compiles
def test_blocks_that_the_plan_compiles_train_as_plain_ones() -> None:
    job = job_for()
    batches = byte_batches(4, ROWS)
    blocks = ("blocks.0", "blocks.1")
    plan = hand_written(job, AWAY, slots=12, activations={"blocks.1": "recompute"})
    plan = replace(plan, stages=(replace(plan.stages[0], compiled=blocks),))
    with started(job, plan) as run:
        model = run.model
        losses = [float(run.step(batch)) for batch in batches]
    assert losses == pytest.approx(train_plainly(job, batches)[0], rel=1e-4)
    assert "forward" not in vars(model.blocks[0])


def test_a_forward_that_is_never_taken_backward_is_forgotten() -> None:
    def saved() -> int:
        gc.collect()
        return sum(type(item) is Saved for item in gc.get_objects())

    job, others = job_for(), saved()  # that an earlier test may still hold
    batch = byte_batches(1, ROWS)[0]
    with started(job, hand_written(job, AWAY, slots=8)) as run:
        run.step(batch)
        loss = run.loss(batch)
        assert saved() > others
        run._step.abandon()
        assert loss.isfinite()
        del loss
        assert saved() <= others


SPECULATES = replace(STREAMED, speculates=True)


@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("placement", [Placement(), SPECULATES, *ALL])
def test_after_the_end_the_model_is_plain_and_the_state_is_gone(placement: Placement, accumulation: int) -> None:
    job = job_for(precision="bf16", micro_batch=ROWS // accumulation)
    batch = byte_batches(1, ROWS)[0]
    with started(job, hand_written(job, placement, slots=8, accumulation=accumulation)) as run:
        run.step(batch)
    model, state, lanes = run.model, weakref.ref(placed_of(run).state), placed_of(run).lanes.all
    del run
    gc.collect()
    assert state() is None
    assert not any(lane._thread.is_alive() for lane in lanes)
    next_byte_loss(model, batch).backward()  # type: ignore[arg-type]
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize("placement", [STREAMED, AWAY_STREAMED])
def test_where_every_step_clips_the_first_states_are_lifted_before_the_norm_is_known(placement: Placement) -> None:
    job = job_for(precision="bf16", clip_norm=1e-3)
    batches = byte_batches(16, ROWS)
    plan = hand_written(job, replace(placement, speculates=True), chunk_bytes=4096, slots=8)
    with started(job, plan, random_delays(7)) as run:
        for index, batch in enumerate(batches):
            if index == 8:  # by then it is known that steps clip
                timeline = run.record()
            run.step(batch)
        mine, events = run.state_dict(), timeline.document("a test")["traceEvents"]
    assert_bit_equal(mine, train_plainly(job, batches)[1])
    lifts = Counter(event["name"] for event in events if event["name"].startswith("lift"))
    counts = [lifts[f"lift state of chunk {index}"] for index in range(6)]
    # Each of the first ahead, and where nothing is left to be lifted; one more or less at the edges of what was recorded.
    assert sum(counts[:STREAMED_DEPTH]) >= sum(counts[STREAMED_DEPTH : 2 * STREAMED_DEPTH]) + STREAMED_DEPTH, counts
