"""A few samples of Job(sample=) for a rehearsal: whole, in halves, and in halves whose labels or masks count unevenly."""

from __future__ import annotations

import torch
from torch import Tensor

from anyfit.values.batches import map_tensors, named_tensors
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import LossRule

HALF = 2  # samples of each part


class Samples:
    """A few of Job(sample=): all of them, and halves."""

    def __init__(self, job: Job, half: int = HALF) -> None:
        self._job = job
        self._can_be_cut = job.batch_size > 1 and job.uncuttable() is None
        self.half = min(half, job.batch_size // 2)
        self.whole = job.sample
        if self._can_be_cut and job.split is None:
            self.whole = job.with_rows(job.sample, 2 * self.half)
        elif self._can_be_cut:
            rest = job.batch_size - 2 * self.half
            self.whole = job.cut(job.sample, [2 * self.half, rest] if rest else [2 * self.half])[0]

    @property
    def few(self) -> Batch:
        return self.halves(self.whole)[0] if self._can_be_cut else self.whole

    def of(self, rows: int) -> Batch:
        """As many as a micro-batch has."""
        is_whole = rows == self._job.batch_size or not self._can_be_cut or self._job.split is not None
        return self._job.sample if is_whole else self._job.with_rows(self._job.sample, rows)

    def reordered(self) -> list[Batch]:
        """The same samples, so that other ones make the halves."""
        if self._job.split is not None or self.half < HALF:
            return []
        return [self._job.reordered(self.whole, order) for order in ((0, 2, 1, 3), (0, 3, 1, 2))]

    def halves(self, batch: Batch) -> list[Batch]:
        return self._job.cut(batch, [self.half, self.half])

    def one_by_one(self) -> list[Batch]:
        return self._job.cut(self.whole, [1] * (2 * self.half))

    def uneven(self, emptied: str, rule: LossRule, *, leaves_one: bool) -> Batch:
        """In one entry nothing counts in the second half, or only the first place of each row. In the others only one row of
        each half counts, so that no two entries go together."""
        names = iter([name for name, _ in named_tensors(self.whole)])

        def change(tensor: Tensor) -> Tensor:
            name = next(names)
            if tensor.dim() == 0 or name not in rule.entries:
                return tensor
            changed, nothing = tensor.clone(), rule.labels.get(name, _least(tensor))
            if name != emptied:
                changed[1 : self.half] = changed[self.half + 1 :] = nothing
            elif leaves_one and tensor.dim() > 1:
                changed[self.half :, 1:] = nothing
            else:
                changed[self.half :] = nothing
            return changed

        return map_tensors(self.whole, change)


def _least(tensor: Tensor) -> float:
    """What counts least: 0 of a mask, and of other entries the least value that there is, which the model takes."""
    is_mask = tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())
    return 0 if is_mask or not tensor.numel() else tensor.min().item()
