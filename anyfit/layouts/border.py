"""Border: what a cut block gives, as all other code sees it.

A block may leave its output cut: the next cut block takes each rank's part as it is. Anything else that reads it (a skip, a
hook, `hidden[:, 0]`, a norm after the last block) needs all of it. Who will read a tensor is not known when a block gives it. So
a `Part` has the shape of the whole, and is put together when somebody reads it, once for all who do: every function of torch that
takes one is given the whole in its place. Gradients come back to the part from both ways.

All ranks run the same Python, so they meet at the same reads. Code that runs on one rank alone must not read one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from anyfit.values.cuts import WHOLE, Cut, Held

from .axis import Axis, moved
from .parts import contiguous_strides, lying

# What may be asked without anybody's part: all that does not depend on numbers.
PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "layout", "ndim", "is_cuda", "is_cpu", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "is_mps", "is_xpu", "itemsize", "nbytes", "_version",
)  # fmt: skip
FACTS: set[Any] = {getattr(torch.Tensor, name).__get__ for name in PROPERTIES if hasattr(torch.Tensor, name)} | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.ndimension, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.stride,
    torch.Tensor.element_size, torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.__len__,
    torch.Tensor.__hash__, torch.Tensor.get_device, torch.Tensor.is_contiguous, torch.Tensor.is_inference,
    torch.is_floating_point, torch.is_complex, torch.numel,
}  # fmt: skip
_Tensor: Any = torch.Tensor
WATCHES: set[Any] = {  # its gradient, which two ways lead to
    torch.Tensor.register_hook, torch.Tensor.retain_grad, torch.Tensor.requires_grad_, _Tensor.requires_grad.__set__,
}  # fmt: skip


class Part(Tensor):
    """One rank's part of a tensor, in the shape of the whole."""

    local: Tensor  # with its history
    held: Cut
    axis: Axis
    _whole: Tensor | None
    _noted: int  # its version, when it was put together
    _history: Any  # as it was made; another one is of an autograd function that gave it on
    _is_watched: bool
    _is_taken: bool  # by a cut block, as the part that it is

    @classmethod
    def of(cls, local: Tensor, held: Held, axis: Axis, strides: Sequence[int] | None = None) -> Tensor:
        """`strides`: how the whole lies in memory; contiguous, where that is not said."""
        if not isinstance(held, Cut):
            return local if strides is None else lying(local, strides)
        shape = list(local.shape)
        _, shape[held.dim] = axis.counted(shape[held.dim])
        strides = contiguous_strides(shape) if strides is None else strides
        found: Part = _Shown.apply(local, held, axis, cls, shape, strides)  # type: ignore[no-untyped-call]
        found.local, found.held, found.axis = local, held, axis
        found._whole, found._is_watched, found._is_taken = None, False, False
        found._history = _history_of(found)
        return found

    @property
    def is_untouched(self) -> bool:
        """Nobody has changed it, or waits for its gradient: the part stands for it."""
        has_changed = self._whole is not None and self._whole._version != self._noted
        return not self._is_watched and not has_changed and self._is_as_made

    @property
    def _is_as_made(self) -> bool:
        return _history_of(self) is self._history

    def _watch(self) -> None:
        if self._is_taken and self.is_untouched:
            raise RuntimeError(
                "a hook on the gradient of what a cut block gives comes too late: the next block has taken it in parts; ask "
                "for it before that block is called"
            )
        self._is_watched = True

    def whole(self) -> Tensor:
        """All of it, with its history."""
        if self._whole is None:
            with torch.enable_grad():  # once for all readers, in whatever mode the first of them is
                whole: Any = moved(self.local, self.held, WHOLE, self.axis) if self._is_as_made else _Given.apply(self)  # type: ignore[no-untyped-call]
                self._whole = lying(whole, self.stride())
            self._noted = self._whole._version
        return self._whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in FACTS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func in WATCHES:
            args[0]._watch()
        if func is torch.autograd.grad:
            return _gradients(*args, **(kwargs or {}))
        args, kwargs = whole_of((args, kwargs or {}))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        """For what reads it past torch's functions, such as an autograd function of the user's; autograd has seen the op."""
        if func._schema.is_mutable:
            raise RuntimeError(f"{func} writes into what a block that is cut over ranks has given, where the write would be lost")
        args, kwargs = tree_map_only(Part, _numbers, (args, kwargs or {}))
        return func(*args, **kwargs)


class _Shown(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, held: Cut, axis: Axis, kind: type[Part], shape: Any, strides: Any) -> Tensor:
        context.held, context.axis = held, axis
        found: Tensor = Tensor._make_wrapper_subclass(kind, shape, strides, dtype=local.dtype, device=local.device)
        return found

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return context.axis.moved(gradients[0], WHOLE, context.held), None, None, None, None, None


class _Given(torch.autograd.Function):
    """All of a part that another autograd function gave, such as a checkpoint: its gradient goes to that."""

    @staticmethod
    def forward(context: Any, part: Part) -> Tensor:
        return _numbers(part).clone()

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        return gradients[0]


def _history_of(part: Part) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return part.grad_fn


def _numbers(part: Part) -> Tensor:
    known = part._whole
    return part.axis.moved(part.local.detach(), part.held, WHOLE) if known is None else known.detach()


def whole_of(values: Any) -> Any:
    """The same with every part put together."""
    return tree_map_only(Part, Part.whole, values)


def _gradients(outputs: Any, inputs: Any, *args: Any, **kwargs: Any) -> tuple[Tensor | None, ...]:
    """torch.autograd.grad with respect to parts: all that was made of one came from what its rank has."""
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    parts = [each if isinstance(each, Part) and each.is_untouched else None for each in given]
    wanted = [whole_of(each) if part is None else part.local for each, part in zip(given, parts, strict=True)]
    found = torch.autograd.grad(whole_of(outputs), wanted, *whole_of(args), **whole_of(kwargs))
    return tuple(
        each if part is None or each is None else moved(each, part.held, WHOLE, part.axis)
        for each, part in zip(found, parts, strict=True)
    )


def entered(x: Tensor, wanted: Held, axis: Axis) -> Tensor:
    """What comes to a cut block, as it takes it; its gradient goes back the same way."""
    if isinstance(x, Part):
        x._is_taken = True
        return moved(x.local, x.held, wanted, axis) if x.is_untouched else moved(x.whole(), WHOLE, wanted, axis)
    return moved(x, WHOLE, wanted, axis)
