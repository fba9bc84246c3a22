"""A step of a rank that has some stages of the model: the passes of a table, one after the other.

All ranks of a pipeline have the same batch. Each plays its own row of the table; the last stage has the loss, whose share all
learn in the exchange at the step's end. Gradients are final when the rank's last backward is through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor

from anyfit.placing.lanes import Task
from anyfit.values.job import Batch
from anyfit.values.loss_rule import MEAN
from anyfit.values.schedule import Action, table

from .engine import Phase
from .evaluating import drawing_of, refuse_unless_adds_up
from .step import FEWER_WITHOUT_WEIGHT, Step


class StagedStep(Step):
    """Of a plan with a pipeline axis."""

    _has_tried = False  # whether the loss may be cut

    def attempt(self, batch: Batch) -> Tensor:
        if not self._has_tried and self._engine.plan.cuts:
            with self._peers.telling():
                refuse_unless_adds_up(self._engine, self._progress.steps, batch)
            self._has_tried = True
        return super().attempt(batch)

    def _forward_backward(self, parts: Sequence[Batch]) -> Tensor:
        engine = self._engine
        placed, plan, stages = engine.placed, engine.plan, engine.placed.stages
        assert stages.looked is not None
        plays = table(plan.pipeline, len(plan.stages), len(parts))
        mine, totals, losses = plays[stages.ranks.place], dict[int, Tensor](), list[Tensor]()
        try:
            stages.pipe.begin(stages.looked.training)
            for action in mine:
                self._part = parts[action.micro_batch]
                if action.of == "forward":
                    total = self._forward(action, parts)
                    if total is not None:
                        totals[action.micro_batch] = total
                        losses.append(total.detach())
                else:
                    self._progress.enter(Phase.BACKWARD)
                    placed.gradients.begin_backward(None, is_last=action == mine[-1])
                    with placed.lanes.computing(Task.BACKWARD), placed.residency.watching():
                        stages.pipe.backward(action.stage, action.micro_batch, totals.pop(action.micro_batch, None))
                        placed.gradients.end_backward()
            stages.pipe.end()
        except BaseException as error:
            stages.pipe.fail(error)
            raise
        placed.gradients.sum_over_places()
        self.rows = sum(plan.micro_batches[: len(parts)])
        return torch.stack(losses).sum() if losses else torch.zeros((), device=engine.device)

    def _forward(self, action: Action, parts: Sequence[Batch]) -> Tensor | None:
        """On the last stage, this micro-batch's part of the loss."""
        engine, at = self._engine, action.micro_batch
        self._progress.enter(Phase.FORWARD)
        with engine.placed.watching(), self._drawing(at):
            made = engine.placed.stages.pipe.forward(action.stage, at, lambda: engine.evaluate(parts[at]))
        if made.loss is None:
            return None
        total, weight = made.loss
        if weight is None and len(parts) < len(engine.plan.micro_batches):
            raise ValueError(FEWER_WITHOUT_WEIGHT)
        rows = engine.plan.micro_batches[at]
        return self._share_of(total, weight, rows, engine.plan.loss or MEAN, alone=len(parts) == 1)

    def _drawing(self, micro_batch: int) -> Any:
        return drawing_of(self._engine.job, self._engine.placed, self._progress.steps, micro_batch)

    # ------------------------------------------------------------------ what needs all of the model at once

    @contextmanager
    def forward(self) -> Iterator[None]:
        yield _refuse("run.forward()")

    def loss(self, batch: Batch) -> Tensor:
        return _refuse("run.loss(batch)")

    def accept(self, loss: Tensor, samples: int, weight: Tensor | float | None) -> None:
        _refuse("run.accept(loss)")

    def backward(self, loss: Tensor) -> None:
        _refuse("run.backward(loss)")


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"{what} runs the whole model, and each rank of this plan has only its stages of a pipeline, whose micro-batches take "
        "turns: use run.step(batch), or start without stages: mesh={'pipeline': 1}"
    )
