"""An optimizer that looks at more than an element is found out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from anyfit.placing.optimizers import BY_ELEMENT, _is_by_element, refuse_unless_by_element


class Sign(torch.optim.Optimizer):
    """By element, and not torch's."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                state = self.state[parameter]
                state["mean"] = 0.9 * state.get("mean", 0.0) + parameter.grad
                parameter.sub_(state["mean"].sign() * group["lr"])


class ByNorm(Sign):
    """As LARS and LAMB do."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad * group["lr"] * parameter.norm() / parameter.grad.norm())


def parameters() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(4, 4))]


@pytest.mark.parametrize("kind", [*BY_ELEMENT, Sign])
def test_optimizers_that_treat_elements_by_themselves_may_step_pieces(kind: Any) -> None:
    optimizer = kind(parameters())
    refuse_unless_by_element(optimizer)
    if kind is not torch.optim.Adagrad:  # which only works with what its constructor made
        assert _is_by_element(optimizer, optimizer.param_groups[0])


@pytest.mark.parametrize("kind", [ByNorm, torch.optim.Adafactor, torch.optim.LBFGS])
def test_optimizers_that_need_whole_parameters_are_refused(kind: Any) -> None:
    with pytest.raises(ValueError, match=f"{kind.__name__} steps a piece of a parameter otherwise .* optimizer_shards 1"):
        refuse_unless_by_element(kind(parameters()))
