"""What torch's rules for fake tensors get wrong, for all who run a model on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def grouped_product(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """torch's rule of a grouped product takes bf16 alone: the form of one in any other dtype. Called inside of the mode."""
    import torch

    halves = [torch.empty_strided(each.shape, each.stride(), dtype=torch.bfloat16, device=each.device) for each in args[:2]]
    sized = func(*halves, *args[2:], **kwargs)
    return torch.empty_strided(sized.shape, sized.stride(), dtype=args[0].dtype, device=sized.device)
