"""A loss that is divided by a number of its own batch, as a sum and its weight."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from anyfit.values.loss_rule import LossRule, divisors


def as_sum(loss: Tensor, rule: LossRule, share: float) -> tuple[Tensor, Tensor]:
    """A micro-batch's loss as (sum, weight), by the number that it is divided by. Where no label counts it is 0 / 0 in torch, and
    adds nothing here. Where all do, weights are shares of the batch, and the result is that of a mean to the bit."""
    found = divisors(loss)
    if rule.divisor >= len(found):
        raise RuntimeError(
            f"the loss of this micro-batch is not divided as that of Job(sample=) was ({rule.why}); return (sum, weight) from it"
        )
    by = found[rule.divisor]
    weight = torch.as_tensor(by.exact, dtype=torch.float32, device=loss.device).detach().reshape(())
    if by.most:
        weight = weight / by.most * share
    is_empty = weight == 0

    def without_nothing(gradients: Sequence[Tensor | None], _given: Any) -> tuple[Tensor | None, ...]:
        return tuple(None if each is None else torch.where(is_empty, torch.zeros_like(each), each) for each in gradients)

    if by.counts == "given":
        by.node.register_hook(without_nothing)  # its own division is by 0 too; a cross-entropy of no labels has no gradients
    return torch.where(is_empty, torch.zeros_like(loss), loss * weight.to(loss.dtype)), weight
