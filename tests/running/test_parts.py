"""Losses that a loop's own code makes of the run's model: trained as those of Job(loss=), or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import anyfit
from anyfit.values.plan import Placement
from tests.machines import small_machine
from tests.models import Convolutional, byte_batches, image_batches, image_loss, next_byte_loss, padded_loss, tiny_gpt
from tests.oracle import assert_bit_equal, assert_close, train_plainly
from tests.plans import AWAY, AWAY_STREAMED, RESIDENT, hand_written, random_delays, started

ROWS = 8


def plain_descent(model: nn.Module) -> torch.optim.Optimizer:
    """Adam would make much of what is zero but for rounding."""
    return torch.optim.SGD(model.parameters(), lr=0.1)


def job_for(loss: Any = next_byte_loss, **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), "precision": "fp32"} | options
    return anyfit.Job(model=tiny_gpt, loss=loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


def own_loss(run: anyfit.Run, part: Tensor) -> Tensor:
    """Logits inside, and the loss of them outside: it reads no weights."""
    with run.forward() as model:
        logits = model(part[:, :-1])
    return cross_entropy(logits.flatten(0, 1).float(), part[:, 1:].flatten())


@pytest.mark.parametrize("placement", [RESIDENT, AWAY, AWAY_STREAMED], ids=lambda each: f"{each.weights} {each.route}")
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_loss_of_ones_own_trains_as_the_jobs(placement: Placement, precision: Any) -> None:
    job = job_for(precision=precision, clip_norm=0.5, micro_batch=2)
    batches = byte_batches(4, ROWS)
    plan = hand_written(job, placement, slots=8, accumulation=4)
    with started(job, plan, random_delays(1)) as run:
        expected = [float(run.step(batch)) for batch in batches]
        weights = run.state_dict()
    with started(job, plan, random_delays(2)) as run:
        for batch, mean in zip(batches, expected, strict=True):
            for part in batch.split(2):
                loss = own_loss(run, part)
                run.accept(loss, samples=2)
                run.backward(loss)
            assert run.is_within_step
            run.update()
            assert run.metrics.loss == pytest.approx(mean)
            assert run.metrics.tokens_per_second == run.plan.forecast.tokens_per_second * (
                run.plan.forecast.step_seconds / run.metrics.seconds
            )  # nobody knows which batch the loss is of
        assert_bit_equal(run.state_dict(), weights)


def test_several_forwards_may_make_one_loss_and_parts_of_other_sizes_a_step() -> None:
    job = job_for(optimizer=plain_descent)
    batches = byte_batches(4, ROWS)
    with anyfit.start(job, machine=small_machine()) as run:
        for batch in batches:
            losses = [own_loss(run, part) for part in batch.split([3, 3, 1, 1])]
            both = (losses[0] + losses[1]) / 2
            for loss, samples in ((both, 6), (losses[2], 1), (losses[3], 1)):
                run.accept(loss, samples=samples)
                run.backward(loss)
            run.update()
        assert_close(run.state_dict(), train_plainly(job, batches)[1], 1e-5)


@pytest.mark.parametrize("micro_batch", [ROWS, 2])
def test_a_sum_with_its_weight_is_normalised_over_the_whole_batch(micro_batch: int) -> None:
    job = job_for(padded_loss, clip_norm=0.5, optimizer=plain_descent)
    batches = byte_batches(4, ROWS)
    for index, batch in enumerate(batches):
        batch[index % 3 :: 3, 5:] = 0  # padding
    with anyfit.start(job, machine=small_machine()) as run:
        losses = []
        for batch in batches:
            for part in batch.split(micro_batch):
                with run.forward() as model:
                    total, weight = padded_loss(model, part)
                run.accept(total, samples=len(part), weight=weight)
                run.backward(total)
            run.update()
            losses.append(run.metrics.loss)
        plain_losses, plain_weights = train_plainly(job, batches)
        assert losses == pytest.approx(plain_losses, rel=1e-5)
        assert_close(run.state_dict(), plain_weights, 1e-5)


def test_a_loss_that_is_not_the_runs_is_refused() -> None:
    batch = byte_batches(1, ROWS)[0]
    with anyfit.start(job_for(), machine=small_machine()) as run:
        with run.forward():
            other = next_byte_loss(tiny_gpt(), batch)
        with pytest.raises(ValueError, match=r"made of run\.model, and none of its parameters is in this one"):
            run.accept(other, samples=ROWS)
        outside = next_byte_loss(run.model, batch)
        with pytest.raises(ValueError, match=r"not made inside of run\.forward\(\), in this step; with run\.forward"):
            run.accept(outside, samples=ROWS)
        loss, stale = own_loss(run, batch), own_loss(run, batch)
        run.accept(loss, samples=ROWS)
        with pytest.raises(ValueError, match="this loss has been accepted"):
            run.accept(loss, samples=ROWS)
        with pytest.raises(ValueError, match=r"run\.backward takes a loss that run\.loss returned, or run\.accept took"):
            run.backward(loss * 2)
        run.backward(loss)
        with pytest.raises(ValueError, match="took, once"):
            run.backward(loss)
        run.update()
        with pytest.raises(ValueError, match=r"not made inside of run\.forward\(\), in this step"):
            run.accept(stale, samples=ROWS)


def test_a_loss_that_cannot_be_is_refused() -> None:
    batch = byte_batches(1, ROWS)[0]
    with anyfit.start(job_for(), machine=small_machine()) as run:
        loss = own_loss(run, batch)
        for samples in (0, ROWS + 1, 2.0, True):
            with pytest.raises(ValueError, match=r"the samples that the loss is of, 1 to 8"):
                run.accept(loss, samples=samples)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match=r"run.accept takes a scalar tensor.* shape \(2,\); take its .mean"):
            run.accept(torch.stack([loss, loss]), samples=ROWS)
        with pytest.raises(ValueError, match="was it detached, or made under no_grad"):
            run.accept(loss.detach(), samples=ROWS)
        with torch.no_grad(), pytest.raises(ValueError, match="needs no gradients"):
            run.accept(own_loss(run, batch), samples=ROWS)
        run.accept(loss, samples=4)
        run.backward(loss)
        with pytest.raises(ValueError, match="after 4 of 8 samples"):
            run.update()


def test_a_batch_that_is_not_cut_is_not_cut_by_a_loop_either() -> None:
    batch = image_batches(1, ROWS)[0]
    job = anyfit.Job(Convolutional, image_loss, plain_descent, batch, ROWS, precision="fp32")
    with anyfit.start(job, machine=small_machine()) as run:
        with run.forward() as model:
            loss = image_loss(model, {name: each[:4] for name, each in batch.items()})
        with pytest.raises(ValueError, match=r"run\.accept\(samples=4\) of 8: the batch is not cut .*batch"):
            run.accept(loss, samples=4)
