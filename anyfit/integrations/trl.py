"""TRL's SFTTrainer on anyfit. A script gets one more line, after its own imports:
`from anyfit.integrations.trl import AnyfitSFTTrainer as SFTTrainer`."""

from __future__ import annotations

import torch
from torch import Tensor
from trl import SFTTrainer

from .huggingface import AnyfitMixin
from .windows import Window, counted_in, pieces_of

BY_BATCH = ("entropy", "mean_token_accuracy")  # what SFTTrainer logs: means over the labels of a batch, a list of batches


class AnyfitSFTTrainer(AnyfitMixin, SFTTrainer):  # type: ignore[misc]
    """TRL's SFTTrainer, trained by anyfit. Its metrics are of batches, where the plan cuts these as well."""

    def _step(self, window: Window) -> Tensor:
        loss = super()._step(window)
        assert self.run is not None
        groups = [pieces_of(batch, self.run.plan.micro_batch) for batch in window]
        if all(len(pieces) == 1 for pieces in groups):
            return loss
        labels = torch.tensor([counted_in(piece.inputs).next_labels for pieces in groups for piece in pieces])
        labels = self.accelerator.reduce(labels.to(self.args.device, torch.float64), reduction="sum").cpu()
        for name in BY_BATCH:
            metrics = self._metrics["train"][name]
            values = torch.tensor(metrics[-len(labels) :], dtype=torch.float64)
            parts = zip(*((each.split(list(map(len, groups)))) for each in (values, labels)), strict=True)
            metrics[-len(labels) :] = [float((value * count).sum() / count.sum().clamp(min=1)) for value, count in parts]
        return loss
