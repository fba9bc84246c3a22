"""A step in parts, for a loop of one's own, in which Job(loss=) makes the loss or the loop's own code does.

loss = run.loss(batch)                          with run.forward() as model:
                                                    loss = cross_entropy(model(batch["x"]), batch["y"])
                                                run.accept(loss, samples=len(batch["x"]))
run.backward(loss)                              run.backward(loss)
run.update()                                    run.update()
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from anyfit.values.job import Batch

from .engine import Progress
from .step import Step


class Parts:
    """Of a run: forward, loss, backward and update, each by itself."""

    model: nn.Module
    _progress: Progress
    _step: Step

    def loss(self, batch: Batch) -> Tensor:
        """The mean loss of one micro-batch, for a loop of your own: follow with `run.backward(loss)`."""
        self._progress.check_open()
        return self._step.loss(batch)

    @contextmanager
    def forward(self) -> Iterator[nn.Module]:
        """The model, for a loss that your own code makes of it inside: follow with `run.accept(loss, samples=...)`. What it reads
        is to be on `run.device`, and in the dtype of its weights."""
        self._progress.check_open()
        with self._step.forward():
            yield self.model

    def accept(self, loss: Tensor, *, samples: int, weight: Tensor | float | None = None) -> None:
        """Takes a loss that your own code made inside of `run.forward()`: follow with `run.backward(loss)`.

        samples   how many of the batch it is of: those of a step, over all its losses, make this rank's share of the batch
        weight    None: the loss is the mean over these samples. Else it is a sum, and the weight what it is over, such as the
                  number of labels that count: gradients are then normalised by the weight of the whole batch
        """
        self._progress.check_open()
        self._step.accept(loss, samples, weight)

    def backward(self, loss: Tensor) -> None:
        """Backward of a loss that `run.loss` returned, or `run.accept` took."""
        self._step.backward(loss)

    def update(self) -> None:
        """Clips, updates and steps the scheduler; leaves the step out where a gradient is not finite."""
        self._progress.check_open()
        self._step.update()

    @property
    def device(self) -> torch.device:
        """On which the model computes."""
        return self._step.device
