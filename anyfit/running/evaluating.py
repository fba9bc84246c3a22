"""A forward in the stages of a pipeline, of a batch that nothing is trained on; and by it, whether a loss may be cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import Tensor, nn

from anyfit.placing import Placed
from anyfit.stages.keys import drawing
from anyfit.stages.pipe import Plumbing
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import MEAN, WAYS_OUT
from anyfit.values.schedule import forward_only

from .divided import as_sum

if TYPE_CHECKING:
    from .engine import Engine

Loss: TypeAlias = tuple[Tensor, Tensor | None]
EVALUATION = -1  # in the place of a micro-batch
TOLERANCE = {"fp32": 1e-3, "bf16": 3e-2}  # relative, of a batch's loss and that of its parts


def drawing_of(job: Job, placed: Placed, steps: int, micro_batch: int) -> AbstractContextManager[None]:
    """Random numbers by key: the same for any cut of the model."""
    looked = placed.stages.looked
    assert looked is not None
    elsewhere = looked.training.dry.draws_elsewhere
    return drawing(placed.device, job.seed, steps, placed.ranks.replica, micro_batch, elsewhere=elsewhere)


def evaluated(engine: Engine, steps: int, batch: Batch, evaluate: Callable[[Batch], Loss] | None = None) -> Loss | None:
    """The loss of a batch, on ranks that have the last stage; all ranks of a pipeline do it together. `evaluate`: in the place of
    the engine's own."""
    looked = engine.placed.stages.looked
    assert looked is not None
    if looked.evaluation is None:
        raise RuntimeError(f"the model cannot be evaluated in the stages of a pipeline: {looked.against}")
    evaluate = evaluate or engine.evaluate
    return run_forward(engine.job, engine.placed, looked.evaluation, steps, lambda: evaluate(batch))


def run_forward(job: Job, placed: Placed, plumbing: Plumbing, steps: int, loss: Callable[[], Loss]) -> Loss | None:
    stages, found = placed.stages, None
    plays = forward_only(placed.ranks.pipeline, plumbing.stages.count, 1)
    try:
        stages.pipe.begin(plumbing)
        for action in plays[stages.ranks.place]:
            with drawing_of(job, placed, steps, EVALUATION):
                made = stages.pipe.forward(action.stage, action.micro_batch, loss)
            found = made.loss
        stages.pipe.end()
    except BaseException as error:
        stages.pipe.fail(error)
        raise
    return found


@contextmanager
def reading(model: nn.Module) -> Iterator[nn.Module]:
    """The model in evaluation mode, without gradients."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield model
    finally:
        for module, training in modes:
            module.training = training


def refuse_unless_adds_up(engine: Engine, steps: int, batch: Batch) -> None:
    """Raises where the loss of samples is not made of the losses of their halves, as the plan has it: no rehearsal can try that,
    as no rank has all of the model. A micro-batch's samples are tried, or two."""
    plan, job, looked = engine.plan, engine.job, engine.placed.stages.looked
    rule, count = plan.loss or MEAN, min(max(plan.micro_batch, 2), plan.share)
    is_known = rule.proved or job.split is not None or "mean-of-micro-batches" in job.agree
    if is_known or count == 1 or looked is None or looked.evaluation is None:
        return
    whole = job.cut(batch, [count, plan.share - count])[0] if count < plan.share else batch
    rows = [count // 2, count - count // 2]

    def divided(batch: Batch) -> Loss:
        """By its number of labels, which is read off its graph."""
        with torch.enable_grad(), engine.placed.watching():
            total, _ = engine.evaluate(batch)
            total, weight = as_sum(total, rule, 1.0)
        return total.detach(), weight

    evaluate = divided if rule.kind == "divided" else None
    with reading(engine.model):
        every = [evaluated(engine, steps, each, evaluate) for each in (whole, *job.cut(whole, rows))]
    engine.placed.residency.forget()
    told = [each for each in every if each is not None]
    refusal = ""
    if told:  # else another rank has the loss
        found = _together(told[:1], [count], adds_up=rule.kind == "sum")
        expected = _together(told[1:], rows, adds_up=rule.kind == "sum")
        if abs(found - expected) > TOLERANCE[job.precision] * max(abs(found), abs(expected)):
            refusal = f"the loss of {count} samples is {found:.6g}, and that of its halves together {expected:.6g}"
    for each in engine.ranks.objects(refusal):
        if each:
            raise ValueError(
                f"{each}: it is not made of those of micro-batches, which take turns in a pipeline; {WAYS_OUT}; or start without "
                "stages: mesh={'pipeline': 1}"
            )


def _together(losses: Sequence[Loss], rows: Sequence[int], *, adds_up: bool) -> float:
    """What they make: by their weights, as a sum, or as a mean over samples."""
    if losses[0][1] is not None:
        return sum(float(total) for total, _ in losses) / sum(float(weight) for _, weight in losses if weight is not None)
    if adds_up:
        return sum(float(total) for total, _ in losses)
    return sum(count * float(total) for (total, _), count in zip(losses, rows, strict=True)) / sum(rows)
