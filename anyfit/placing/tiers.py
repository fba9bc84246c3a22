"""What a run holds of each tier, by count and not by guess.

On a GPU torch's allocator knows. On the CPU device nobody does, so a `LiveBytes` mode watches the storages of a step: it
slows that step a little and is used on few.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode


class LiveBytes(TorchDispatchMode):
    """Peak bytes of all storages that ops make while active, on top of what was there before."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = set()
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, torch.Tensor):
                there.add(tensor.untyped_storage()._cdata)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in there and storage._cdata not in self._known:
                    self._watch(storage)
        return result

    def _watch(self, storage: Any) -> None:
        identity, size = storage._cdata, storage.nbytes()

        def forget(_reference: Any) -> None:
            self._known.pop(identity, None)
            self._now -= size

        self._known[identity] = weakref.ref(storage, forget)
        self._now += size
        self.peak_bytes = max(self.peak_bytes, self._now)


def peak_bytes_of_gpu(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)
