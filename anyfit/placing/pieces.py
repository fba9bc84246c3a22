"""Whether an optimizer may step pieces of parameters: ranks divide chunks, and the cut goes through matrices.

Most optimizers treat every element by itself. Those that look at a row, a matrix or its norm would quietly train something else
on a piece, so one that is not known is tried on a small matrix, whole and in flat pieces.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from anyfit.values.demands import StaysWhole

BY_ELEMENT = (
    optim.SGD, optim.Adam, optim.AdamW, optim.NAdam, optim.RAdam, optim.Adamax, optim.Adagrad, optim.Adadelta, optim.RMSprop,
    optim.Rprop, optim.ASGD,
)  # fmt: skip
CUT = 21  # of 48 elements: inside a row


def refuse_unless_by_element(optimizer: Optimizer) -> None:
    if type(optimizer) not in BY_ELEMENT and not all(_is_by_element(optimizer, group) for group in optimizer.param_groups):
        raise StaysWhole(
            f"{type(optimizer).__name__} steps a piece of a parameter otherwise than the whole, and this plan divides parameters "
            "over ranks; use a plan with optimizer_shards 1, or an optimizer that treats every element by itself, such as AdamW"
        )


def _is_by_element(optimizer: Optimizer, group: dict[str, Any]) -> bool:
    generator = torch.Generator().manual_seed(0)
    weights, *gradients = (torch.randn(6, 8, generator=generator) for _ in range(3))
    try:
        whole = _stepped(optimizer, group, [weights], [[gradient] for gradient in gradients])
        pieces = [[flat[:CUT], flat[CUT:]] for flat in (each.flatten() for each in (weights, *gradients))]
        cut = _stepped(optimizer, group, pieces[0], pieces[1:])
    except Exception:  # it wants matrices, or a closure, or what only its constructor makes
        return False
    return torch.allclose(whole, cut, rtol=1e-5, atol=1e-7)


def _stepped(
    optimizer: Optimizer, group: dict[str, Any], weights: Sequence[Tensor], gradients: Sequence[Sequence[Tensor]]
) -> Tensor:
    """These weights after a step with each of the gradients, by an optimizer that knows of nothing else."""
    parameters = [nn.Parameter(each.clone()) for each in weights]
    other: Any = object.__new__(type(optimizer))
    other.__dict__.update({key: value for key, value in vars(optimizer).items() if key != "step"})
    other.param_groups, other.state = [{**group, "params": parameters}], defaultdict(dict)
    for step in gradients:
        for parameter, gradient in zip(parameters, step, strict=True):
            parameter.grad = gradient.clone()
        other.step()
    return torch.cat([each.detach().flatten() for each in parameters])
