"""Gradients add up in place, and a trace cannot see that.

Where a tensor gets gradients from several sides, autograd adds the later ones to the first, unless something else holds it.
Under a dispatch mode, as a trace is, it never dares to and makes a new storage for each sum: of a residual stream's gradient a
trace sees two where a GPU has one.
"""

from __future__ import annotations

from typing import Any

import torch

from .recorder import Recorder, Storage


class GpuRecorder(Recorder):
    """Knows which sums of gradients a GPU's memory would not see."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._sums: list[tuple[int, Storage, Storage]] = []  # the op, what it makes, and the summand it would add to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        before, count = self._summand(func, args), len(self.storages)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if before is not None and len(self.storages) == count + 1 and self.storages[-1].bytes == before.bytes:
            self._sums.append((len(self.ops) - 1, self.storages[-1], before))
        return result

    def _summand(self, func: Any, args: Any) -> Storage | None:
        """Autograd adds to the gradient that came first, but not where that is a view: its storage is its base's as well
        (torch/csrc/autograd/input_buffer.cpp). The few formulas of backward that add by themselves cannot be told apart."""
        in_backward = self.phase == "backward" and len(self._stack) == 1
        if func is not torch.ops.aten.add.Tensor or not in_backward or args[0]._is_view():
            return None
        return self._known.get(args[0].untyped_storage()._cdata)

    def settle(self) -> set[int]:
        """After backward: gives every such sum the storage of its summand, if nothing else needed that any more. Identities of
        these."""
        stands_for: dict[int, Storage] = {}
        for moment, total, summand in self._sums:
            first = stands_for.get(id(summand), summand)
            if first.dies == moment:
                first.dies, first.kind = total.dies, total.kind
                stands_for[id(total)] = first
        self.storages = [storage for storage in self.storages if id(storage) not in stands_for]
        return set(stands_for)
