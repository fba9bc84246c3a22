"""Hooks of the user's on gradients: whether what one makes of the gradients of micro-batches adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

MOST_HOOKED = 2**24  # elements of a parameter whose hooks are tried


def hooks_on_gradients(model: nn.Module) -> dict[str, list[Hook]]:
    """Those of the user's, by name of the parameter. They see the gradient of each micro-batch, where the batch is cut."""
    found = {}
    for name, parameter in model.named_parameters():
        hooks = [Hook(each, parameter.shape, parameter.dtype) for each in (parameter._backward_hooks or {}).values()]
        if parameter._post_accumulate_grad_hooks:
            hooks.append(Hook(None, parameter.shape, parameter.dtype))
        if hooks:
            found[name] = hooks
    return found


@dataclass(frozen=True)
class Hook:
    function: Callable[[Tensor], Tensor | None] | None  # None: one that is given the parameter, and may do anything
    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def adds_up(hook: Hook, device: torch.device) -> bool:
    """Whether what it makes of two gradients adds up to what it makes of their sum, as with a factor or a mask: for small ones
    and large ones, and without hiding that one is not finite."""
    function = hook.function
    if function is None or not hook.dtype.is_floating_point or not 0 < hook.shape.numel() <= MOST_HOOKED:
        return False

    def made(gradient: Tensor) -> Tensor:
        given = gradient.to(device, copy=True)  # it may change it in place
        result = function(given)
        return (given if result is None else result).cpu()

    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-5 if hook.dtype.itemsize >= 4 else 3e-2
    try:
        for size in (1e-4, 1.0, 1e4):
            one, other = (size * torch.randn(hook.shape, generator=generator, dtype=hook.dtype) for _ in range(2))
            if not (made(one) + made(other) - made(one + other)).abs().max() <= tolerance * size:
                return False
        passes = made(torch.ones(hook.shape, dtype=hook.dtype)) != 0
        return bool(made(torch.full(hook.shape, math.nan, dtype=hook.dtype))[passes].isnan().all())
    except Exception:  # it asks for more than a gradient of this shape
        return False
