"""Results of costly ops that selective recomputation keeps, in their order, and takes instead of running the op again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from anyfit.values.graph import COSTLY_OPS

from .cells import equal

COSTLY = {getattr(torch.ops.aten, name).default for name in COSTLY_OPS if hasattr(torch.ops.aten, name)}
NOTHING = object()


class Kept:
    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next = 0
        self.is_spent = False  # what is recomputed once more is computed in full

    def add(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if _draws(op, args, kwargs):
            self._results.append((op, None, ()))
            return
        tensors: list[Tensor] = []

        def alias(tensor: Tensor) -> Tensor:
            # Below autograd, and yet with the version of the result itself, which tells whether somebody wrote into it.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                tensors.append(tensor.detach())
            return tensors[-1]

        kept = tree_map_only(Tensor, alias, result)
        self._results.append((op, kept, [(tensor, tensor._version) for tensor in tensors]))

    def take(self, op: Any) -> Any:
        """What this op gave; NOTHING where it has to be computed."""
        if self._next >= len(self._results):
            raise IndexError
        known, kept, versions = self._results[self._next]
        self._results[self._next] = (known, None, ())
        self._next += 1
        if known is not op:
            raise LookupError(f"{op} where it was {known}")
        if not versions or any(tensor._version != version for tensor, version in versions):
            return NOTHING
        return kept

    def spend(self) -> None:
        self._results.clear()
        self.is_spent = True


@functools.cache
def _dropout_index(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers: taken from what was kept, it would leave them to the next op."""
    index = _dropout_index(op)
    return index is not None and bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


class _WithKept(TorchDispatchMode):
    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept


class Keeping(_WithKept):
    """Around the first forward."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self._kept.add(func, args, kwargs or {}, result)
        return result


class Reusing(_WithKept):
    """Around the recomputed forward."""

    def __init__(self, kept: Kept, error: Callable[[str], RuntimeError]) -> None:
        super().__init__(kept)
        self._error = error

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COSTLY and not self._kept.is_spent:
            try:
                kept = self._kept.take(func)
            except (IndexError, LookupError) as error:
                raise self._error(f"run again, it calls other ops than before ({error or func})") from None
            if kept is not NOTHING:
                return kept
        return func(*args, **(kwargs or {}))


class Verifying(_WithKept):
    """Around a forward that is run again to see whether what was kept is what would be computed."""

    reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COSTLY and self.reason is None:
            try:
                kept = self._kept.take(func)
            except (IndexError, LookupError):
                self.reason = f"its products come in another order when it is run again ({func})"
                return result
            if kept is not NOTHING and not equal(_plain(kept), _plain(result)):
                self.reason = f"a product differs when it is run again ({func})"
        return result


def _plain(result: Any) -> Any:
    return list(result) if isinstance(result, tuple | list) else result
