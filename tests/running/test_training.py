"""The engine beside plain PyTorch: same losses, same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

import anyfit
from anyfit.meshing import Axes
from anyfit.probing.cache import corrections_of
from anyfit.starting import Start
from tests.machines import small_machine
from tests.models import (
    Convolutional,
    Tangled,
    byte_batches,
    image_batches,
    image_loss,
    next_byte_loss,
    padded_loss,
    tiny_gpt,
)
from tests.oracle import assert_bit_equal, assert_close, train_plainly

ROWS = 8


def two_groups(model: nn.Module, kind: Any = torch.optim.AdamW, **options: Any) -> torch.optim.Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1 and parameter.requires_grad]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1 and parameter.requires_grad]
    return kind([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "lr": 2e-3}], lr=1e-3, **options)


def job_for(model: Any, loss: Any = next_byte_loss, **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: two_groups(model, foreach=True), "precision": "fp32"} | options
    sample = image_batches(1, ROWS)[0] if model is Convolutional else byte_batches(1, ROWS)[0]
    return anyfit.Job(model=model, loss=loss, sample=sample, batch_size=ROWS, **options)


def train(job: anyfit.Job, batches: list[Any]) -> tuple[list[float], dict[str, Tensor]]:
    with anyfit.start(job, machine=small_machine()) as run:
        losses = [float(run.step(batch)) for batch in batches]
        return losses, run.state_dict()


@pytest.mark.parametrize("model", [Tangled, tiny_gpt])
@pytest.mark.parametrize("accumulation", [1, 4])
def test_fp32_weights_are_bit_equal_after_30_steps_with_groups_clipping_accumulation_and_a_scheduler(
    model: Any, accumulation: int
) -> None:
    job = job_for(
        model,
        scheduler=lambda optimizer: CosineAnnealingLR(optimizer, 30),
        clip_norm=0.5,
        micro_batch=ROWS // accumulation,
    )
    batches = byte_batches(30, ROWS)
    losses, weights = train(job, batches)
    plain_losses, plain_weights = train_plainly(job, batches, accumulation)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


OPTIMIZERS = {
    "adamw": lambda model: two_groups(model),
    "adam amsgrad": lambda model: torch.optim.Adam(model.parameters(), amsgrad=True),
    "sgd momentum": lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=1e-3, centered=True),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=1e-2),
    "some parameters": lambda model: torch.optim.AdamW([p for p in model.parameters() if p.dim() > 1]),
}


@given(
    model=st.sampled_from([Tangled, tiny_gpt, Convolutional]),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    precision=st.sampled_from(["fp32", "bf16"]),
    accumulation=st.sampled_from([1, 2, 4]),
    clip_norm=st.sampled_from([None, 0.1, 1e6]),
    schedule=st.booleans(),
    chunk_bytes=st.sampled_from([1, 4096, 2**26]),
)
def test_any_setting_gives_the_losses_and_weights_of_plain_pytorch(
    model: Any, optimizer: str, precision: Any, accumulation: int, clip_norm: float | None, schedule: bool, chunk_bytes: int
) -> None:
    if optimizer == "some parameters" and precision == "bf16" and accumulation > 1:
        clip_norm = None  # bf16 gradients that nobody applies add up in bf16, which only the norm could show
    convolutional = model is Convolutional
    job = job_for(
        model,
        loss=image_loss if convolutional else next_byte_loss,
        optimizer=OPTIMIZERS[optimizer],
        precision=precision,
        clip_norm=clip_norm,
        scheduler=(lambda optimizer: CosineAnnealingLR(optimizer, 10)) if schedule else None,
        micro_batch=ROWS // accumulation,
        agree=["batch-norm-of-micro-batches"],
    )
    batches = image_batches(10, ROWS) if convolutional else byte_batches(10, ROWS)
    plan = replace(anyfit.plan(job, small_machine()), chunk_bytes=chunk_bytes)
    with anyfit.start(job, plan, small_machine()) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
    plain_losses, plain_weights = train_plainly(job, batches, accumulation)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)


def test_sum_and_weight_with_padding_over_micro_batches_equals_the_one_batch_result() -> None:
    batches = byte_batches(12, ROWS)
    for batch in batches:
        for row in range(ROWS):
            batch[row, 3 + row :] = 0  # every sample, so every micro-batch, has another number of tokens
    whole = job_for(tiny_gpt, loss=padded_loss, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), clip_norm=1.0)
    plain_losses, plain_weights = train_plainly(whole, batches)
    losses, weights = train(whole, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)
    for micro_batch in (1, 3, 4):
        losses, weights = train(replace(whole, micro_batch=micro_batch), batches)
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert_close(weights, plain_weights, 1e-5)


def test_uneven_micro_batches_of_a_mean_loss_equal_the_one_batch_result() -> None:
    batches = byte_batches(8, ROWS)
    job = job_for(tiny_gpt, optimizer=lambda m: torch.optim.SGD(m.parameters(), lr=0.1), micro_batch=3)
    losses, weights = train(job, batches)
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    assert_close(weights, plain_weights, 1e-5)


def test_a_loop_of_ones_own_equals_step() -> None:
    batches = byte_batches(6, ROWS)
    job = job_for(tiny_gpt, clip_norm=0.5, micro_batch=4)
    losses, weights = train(job, batches)
    with anyfit.start(job, machine=small_machine()) as run:
        for batch, expected in zip(batches, losses, strict=True):
            for part in batch.split(4):
                loss = run.loss(part)
                run.backward(loss)
            run.update()
            assert run.metrics.loss == pytest.approx(expected)
        assert_bit_equal(run.state_dict(), weights)


@pytest.mark.parametrize("micro_batch", [ROWS, 4])
def test_a_loop_of_ones_own_shows_the_mean_of_a_weighted_loss(micro_batch: int) -> None:
    batch = byte_batches(1, ROWS)[0]
    job = job_for(tiny_gpt, loss=padded_loss, micro_batch=micro_batch)
    expected = train(job, [batch])[0][0]
    with anyfit.start(job, machine=small_machine()) as run:
        for part in batch.split(micro_batch):
            run.backward(run.loss(part))
        run.update()
        assert run.metrics.loss == pytest.approx(expected)


def test_a_loop_of_ones_own_is_told_what_it_does_wrong() -> None:
    job = job_for(tiny_gpt, micro_batch=4)
    batch = byte_batches(1, ROWS)[0]
    with anyfit.start(job, machine=small_machine()) as run:
        loss = run.loss(batch[:4])
        with pytest.raises(ValueError, match=r"run.backward takes a loss that run.loss returned, or run.accept took"):
            run.backward(loss * 2)
        run.backward(loss)
        with pytest.raises(ValueError, match="after 4 of 8 samples"):
            run.update()
        with pytest.raises(RuntimeError, match=r"run.update\(\)"):
            run.step(batch)
        with pytest.raises(RuntimeError, match="whole steps"):
            run.save("nowhere")


def test_a_model_given_as_a_module_trains_in_place() -> None:
    torch.manual_seed(0)
    model = tiny_gpt()
    job = job_for(model)
    batches = byte_batches(5, ROWS)
    expected = train_plainly(job_for(tiny_gpt), batches)[1]
    train(job, batches)
    assert_bit_equal({name: tensor.detach() for name, tensor in model.state_dict().items()}, expected)


def test_dropout_draws_the_same_numbers_as_plain_pytorch() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = tiny_gpt()
            self.drop = nn.Dropout(0.2)

        def forward(self, ids: Tensor) -> Tensor:
            return self.drop(self.gpt(ids))

    job = job_for(Dropping)
    batches = byte_batches(5, ROWS)
    losses, weights = train(job, batches)
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses)
    assert_bit_equal(weights, plain_weights)


def test_a_non_finite_gradient_leaves_the_step_out_and_counts_it() -> None:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        value = next_byte_loss(model, ids)
        return value * float("inf") if int(ids[0, 0]) == 7 else value

    batches = byte_batches(4, ROWS)
    for batch in batches:
        batch[0, 0] = 1
    batches[2][0, 0] = 7
    sample = byte_batches(1, ROWS)[0]
    job = job_for(tiny_gpt, loss=next_byte_loss)
    plan = anyfit.plan(job, small_machine())
    with anyfit.start(replace(job, loss=loss), plan, small_machine()) as run:
        for batch in batches:
            run.step(batch)
        assert run.skipped == 1
        assert run.steps == 4
        weights = run.state_dict()
    expected = train_plainly(job, [batches[0], batches[1], batches[3]])[1]
    assert_bit_equal(weights, expected)
    assert sample.shape == batches[0].shape


def test_an_error_in_the_model_leaves_the_last_completed_step() -> None:
    class Fragile(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gpt = tiny_gpt()
            self.fails = False

        def forward(self, ids: Tensor) -> Tensor:
            if self.fails and ids[0, 0] == 5:
                raise RuntimeError("bad luck")
            return self.gpt(ids)

    batches = byte_batches(6, ROWS)
    for batch in batches:
        batch[:, 0] = 1
    broken = batches[0].clone()
    broken[ROWS // 2 :, 0] = 5  # the second micro-batch fails, when the first has left gradients
    job = job_for(Fragile, micro_batch=ROWS // 2)
    with anyfit.start(job, machine=small_machine()) as run:
        for index, batch in enumerate(batches):
            if index == 3:
                run.model.fails = True
                with pytest.raises(RuntimeError, match="bad luck"):
                    run.step(broken)
                run.model.fails = False
            run.step(batch)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches, 2)[1])


def test_evaluate_changes_nothing() -> None:
    job = job_for(Convolutional, loss=image_loss)
    batch = image_batches(1, ROWS)[0]
    with anyfit.start(job, machine=small_machine()) as run:
        run.step(batch)
        before = run.state_dict()
        modes = [module.training for module in run.model.modules()]
        first, second = run.evaluate(batch), run.evaluate(batch)
        assert torch.equal(first, second)
        assert not first.requires_grad
        assert_bit_equal(run.state_dict(), before)
        assert [module.training for module in run.model.modules()] == modes


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_edits_inside_weights_become_part_of_the_run(precision: Any) -> None:
    job = job_for(tiny_gpt, precision=precision)
    batch = byte_batches(1, ROWS)[0]
    with anyfit.start(job, machine=small_machine()) as run:
        run.step(batch)
        before = run.state_dict()
        with run.weights() as model:
            model.norm.weight.data.mul_(2)
            model.norm.bias.data = torch.full_like(model.norm.bias, 0.25)
        after = run.state_dict()
        assert torch.equal(after["norm.bias"], torch.full_like(after["norm.bias"], 0.25))
        assert torch.allclose(after["norm.weight"], 2 * before["norm.weight"], rtol=1e-2)
        untouched = {name: tensor for name, tensor in after.items() if not name.startswith("norm.")}
        assert_bit_equal(untouched, {name: before[name] for name in untouched})
        run.step(batch)  # and the model still trains on its chunks
        assert not torch.equal(run.state_dict()["norm.bias"], after["norm.bias"])


def test_the_state_dict_loads_into_the_plain_model() -> None:
    job = job_for(Tangled, precision="bf16")
    with anyfit.start(job, machine=small_machine()) as run:
        run.step(byte_batches(1, ROWS)[0])
        Tangled().load_state_dict(run.state_dict(), strict=True)


def test_measured_peak_on_the_cpu_device_is_what_the_plan_forecast() -> None:
    for precision in ("fp32", "bf16"):
        for micro_batch in (ROWS, 2):
            job = job_for(tiny_gpt, precision=precision, micro_batch=micro_batch)
            with anyfit.start(job, machine=small_machine()) as run:
                for batch in byte_batches(3, ROWS):
                    run.step(batch)
                measured, predicted = run.metrics.peak_bytes["device"], run.plan.forecast.peak_bytes["device"]
            assert measured == pytest.approx(predicted, rel=run.plan.forecast.peak_error), (precision, micro_batch)


def test_wrong_batches_are_refused_with_what_to_do() -> None:
    job = job_for(tiny_gpt)
    with anyfit.start(job, machine=small_machine()) as run:
        with pytest.raises(ValueError, match="the batch has 5 samples"):
            run.step(byte_batches(1, 5)[0])
        with pytest.raises((TypeError, KeyError), match="slice"):  # as the loss says itself, by the version of Python
            run.step({"text": "hello"})
    with pytest.raises(RuntimeError, match="closed"):
        run.step(byte_batches(1, ROWS)[0])


def test_a_plan_for_another_model_or_machine_is_refused_until_unbound() -> None:
    plan = anyfit.plan(job_for(tiny_gpt), small_machine())
    with pytest.raises(ValueError, match="another model"):
        anyfit.start(job_for(Tangled), plan, small_machine())
    with pytest.raises(ValueError, match="another machine"):
        anyfit.start(job_for(tiny_gpt), plan, small_machine(cores=99))
    with anyfit.start(job_for(Tangled), plan.unbound(), small_machine()) as run:
        run.step(byte_batches(1, ROWS)[0])


def test_losses_that_cannot_be_trained_on_are_refused_before_the_run_starts() -> None:
    machine = small_machine()
    with pytest.raises(ValueError, match="scalar"):
        anyfit.plan(job_for(tiny_gpt, loss=lambda model, ids: model(ids[:, :-1])), machine)
    with pytest.raises(ValueError, match="not connected"):
        anyfit.plan(job_for(tiny_gpt, loss=lambda model, ids: next_byte_loss(model, ids).detach()), machine)


def test_the_models_own_error_comes_with_what_anyfit_was_doing() -> None:
    job = job_for(tiny_gpt)
    with pytest.raises(RuntimeError, match="broadcast") as caught:
        anyfit.plan(replace(job, sample=torch.zeros(ROWS, 17, 2, dtype=torch.long)), small_machine())
    assert any("anyfit was running the model on a fake batch of 8 samples" in note for note in caught.value.__notes__)


def test_a_scheduler_that_needs_a_metric_is_refused() -> None:
    job = job_for(tiny_gpt, scheduler=torch.optim.lr_scheduler.ReduceLROnPlateau)
    with pytest.raises(TypeError, match="needs a metric"):
        anyfit.start(job, machine=small_machine())


# ---------------------------------------------------------------------- one run a model


def job_of(model: nn.Module) -> anyfit.Job:
    return anyfit.Job(
        model=model,
        loss=lambda model, batch: model(batch).square().mean(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=torch.ones(4, 8),
        batch_size=4,
        precision="fp32",
    )


def test_a_model_that_another_run_holds_is_refused_until_that_is_closed() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    run = anyfit.start(job_of(model), machine=small_machine())
    run.step(torch.ones(4, 8))
    other = nn.Linear(8, 8)
    other.weight = model[0].weight
    for held in (model, model[1], other, lambda: model):
        with pytest.raises(
            RuntimeError, match=r"another run that is not closed holds this .*: close the first run, with run\.close"
        ):
            anyfit.start(job_of(held), machine=small_machine())  # type: ignore[arg-type]
    run.step(torch.ones(4, 8))
    run.close()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with anyfit.start(job_of(model), machine=small_machine()) as again:
        assert_bit_equal(again.state_dict(), before)
        again.step(torch.ones(4, 8))


def test_a_start_that_fails_leaves_the_model_to_another_one(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    with pytest.raises(FileNotFoundError):
        anyfit.start(job_of(model), machine=small_machine(), resume=tmp_path / "nothing")
    with anyfit.start(job_of(model), machine=small_machine()) as run:
        run.step(torch.ones(4, 8))


def test_clipped_steps_are_counted_and_told_when_the_run_ends() -> None:
    job, batches = job_for(tiny_gpt, loss=next_byte_loss), byte_batches(4, ROWS)
    plan, told = anyfit.plan(job, small_machine()), list[tuple[int, int]]()
    norms = []
    with anyfit.start(replace(job, clip_norm=None), plan, small_machine()) as run:
        for batch in batches:
            run.step(batch)
            norms.append(run.metrics.gradient_norm)
            assert run.metrics.clipped_share == 0
    with anyfit.start(replace(job, clip_norm=norms[0] * 0.999), plan, small_machine()) as run:
        run._keep_clipped = lambda clipped, steps: told.append((clipped, steps))
        run.step(batches[0])
        assert run.metrics.clipped_share == 1
        for batch in batches[1:]:
            run.step(batch)
        share = run.metrics.clipped_share
    assert told == [(round(4 * share), 4)]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_clipped_steps_are_kept_for_later_plans_on_a_gpu(kind: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path))
    job = job_for(tiny_gpt, loss=next_byte_loss, clip_norm=2.0)
    machine = replace(small_machine(), device=replace(small_machine().device, kind=kind))
    start = Start(job, anyfit.plan(job, small_machine()), None, Axes(), None)
    start._plan, start._machine = anyfit.plan(job, small_machine()), machine
    keep = start._keep_clipped()
    if kind == "cpu":
        assert keep is None
        return
    assert keep is not None
    keep(3, 4)
    keep(1, 4)
    plan = start._plan
    known = corrections_of(machine).clipped_steps_of(plan.model, plan.parameters, plan.precision, 2.0)
    assert (known.clipped, known.steps) == (4, 8)
