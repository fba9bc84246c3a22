"""Plain PyTorch in one process that sums gradients as the ranks of a case do: bits, where the order of their sums is known.

Each rank's micro-batches go one after another. Their gradients add up, and the ranks' sums are then reduced; or, where a chunk's
are divided, each micro-batch's are reduced, and the results add up.
"""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.values.plan import Placement
from tests.oracle import PlainBf16, PlainFp32, equal_parts, to_bf16

from .work import Case


def train_as_ranks(case: Case, ranks: int) -> tuple[list[float], dict[str, Tensor]]:
    torch.manual_seed(case.job.seed)
    model = case.job.build()
    summing = _Summing(case, ranks, model)
    trainer = (_Fp32 if case.precision == "fp32" else _Bf16)(summing, case, model)
    losses = [trainer.step(batch, ranks * case.accumulation) for batch in case.batches()]
    return losses, trainer.weights()


class _Summing:
    """How the gradients of one step come together."""

    def __init__(self, case: Case, ranks: int, model: nn.Module) -> None:
        self.case, self.ranks, self.model = case, ranks, model
        layout = case.layout(ranks)
        chosen = case.placements if len(case.placements) > 1 else case.placements * len(layout)
        parameters = dict(model.named_parameters())
        self.placement: dict[nn.Parameter, Placement] = {}
        self.dtype: dict[nn.Parameter, torch.dtype] = {}  # in which ranks sum
        for chunk, placed in zip(layout, chosen, strict=True):
            for slot in chunk.slots:
                self.placement[parameters[slot.name]] = placed
                wide = case.reduction == "fp32" or chunk.dtype == "float32"
                self.dtype[parameters[slot.name]] = torch.float32 if wide else torch.bfloat16

    def of_step(self, batch: Any, parts: int) -> tuple[float, dict[nn.Parameter, Tensor]]:
        """The loss, and the gradients in fp32."""
        total, found = 0.0, []
        for part in equal_parts(batch, parts):
            loss = self.case.job.loss(self.model, to_bf16(part) if self.case.precision == "bf16" else part) / parts
            loss.backward()
            total += float(loss.detach())
            found.append({each: each.grad for each in self.model.parameters() if each.grad is not None})
            self.model.zero_grad()
        names = {each for part in found for each in part}
        return total, {each: self._sum([part.get(each) for part in found], each) for each in names}

    def _sum(self, parts: list[Tensor | None], parameter: nn.Parameter) -> Tensor:
        count, dtype, placed = self.case.accumulation, self.dtype[parameter], self.placement[parameter]
        by_rank = [parts[start : start + count] for start in range(0, len(parts), count)]
        zeros = torch.zeros_like(parameter, dtype=torch.float32)

        def over_ranks(gradients: list[Tensor]) -> Tensor:
            *_, total = accumulate((each.to(dtype) for each in gradients), lambda one, other: one + other)
            return total.float()

        def over_micro_batches(gradients: list[Tensor | None]) -> Tensor:
            there = [each.float() for each in gradients if each is not None]
            *_, total = accumulate(there or [zeros], lambda one, other: one + other)
            return total

        if count > 1 and (placed.gradients == "host" or placed.gradient_shards > 1):
            rows = zip(*by_rank, strict=True)
            return over_micro_batches([over_ranks([zeros if each is None else each for each in row]) for row in rows])
        return over_ranks([over_micro_batches(each) for each in by_rank])


class _Fp32(PlainFp32):
    def __init__(self, summing: _Summing, case: Case, model: nn.Module) -> None:
        super().__init__(case.job, model)
        self.summing = summing

    def _backward(self, batch: Any, accumulation: int) -> float:
        total, sums = self.summing.of_step(batch, accumulation)
        for parameter, gradient in sums.items():
            parameter.grad = gradient
        return total


class _Bf16(PlainBf16):
    def __init__(self, summing: _Summing, case: Case, model: nn.Module) -> None:
        super().__init__(case.job, model)
        self.summing = summing

    def _sums(self, batch: Any, accumulation: int) -> tuple[float, dict[nn.Parameter, Tensor]]:
        return self.summing.of_step(batch, accumulation)
