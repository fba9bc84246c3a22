"""Ops on fake tensors whose results have a shape that numbers decide, such as the rows that a mask selects.

Where these numbers are there, and only floats are not, the op is made with zeros in place of those: its result has the right
shape, and is a fake again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensor
from torch.utils import _pytree as pytree


def of_right_shape(func: Any, args: Any, kwargs: Any, error: DynamicOutputShapeException) -> Any:
    """What a failed op returns. Raises its error where that cannot be known."""
    fakes = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, FakeTensor)]
    if not fakes or not all(each.dtype.is_floating_point for each in fakes):
        raise error
    zeros = {id(each): torch.zeros(each.shape, dtype=each.dtype) for each in fakes}
    given, named = pytree.tree_map_only(FakeTensor, lambda each: zeros[id(each)], (args, kwargs))
    return pytree.tree_map_only(Tensor, fakes[0].fake_mode.from_tensor, func(*given, **named))
