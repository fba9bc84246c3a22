"""Results without history. A forward that no backward follows need not hold what the blocks before have saved for one, which
leaves room to record blocks and to try them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only


class Severing:
    """Of all that blocks return, while it is on."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: Tensor | None = None  # what results hang on, instead of all that came before

    @contextmanager
    def on(self) -> Iterator[None]:
        self._anchor = torch.zeros((), device=self._device, requires_grad=True)
        try:
            yield
        finally:
            self._anchor = None

    def of(self, returned: Any) -> Any:
        anchor = self._anchor
        if anchor is None:
            return returned

        def severed(tensor: Tensor) -> Tensor:
            return _Severed.apply(anchor, tensor.detach()) if tensor.requires_grad else tensor  # type: ignore[no-untyped-call]

        return tree_map_only(Tensor, severed, returned)


class _Severed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, tensor: Tensor) -> Tensor:
        return tensor.clone()  # that may be written in place

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> Any:
        raise RuntimeError("gradients are taken within the forward")
