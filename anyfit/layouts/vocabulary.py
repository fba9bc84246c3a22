"""Vocabulary: embedding, head and loss of a model whose table of words is cut by rows over the ranks of an axis.

No graph is captured for it. The table's parameter hands every function of torch that takes it to `used`:

    F.embedding           each rank looks up its own words; what they find is added up
    F.linear              each rank has the logits of its own words: what leaves is `Logits`, a tensor left in parts
    F.cross_entropy       of such logits: ranks exchange a few numbers a row (forms.py), and no rank has a row whole
    casts, scales, views  of such logits, that leave the words alone: each rank's own; so is a number for each word, added
    anything else         is given the whole: of the table, or of the logits

Where the ranks do not divide the words, the last has fewer (`Axis.over`), and nothing else changes.

So any model's own code runs as it was written, and what is not known here is right too, if slower. Ranks run the same code on the
same batch, so that all of them meet at each exchange.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812

from anyfit.values.cuts import WHOLE, Cut

from .axis import Axis, moved
from .border import FACTS, Part
from .forms import MEAN, NONE, SUM_OF_ALL, joint_log_softmax, joint_log_softmax_backward, of_own_rows, own_embedding, own_nll
from .forms import own_nll_backward as _own_nll_backward

ROWS = Cut(0)  # of a table
REDUCTIONS = {"none": NONE, "mean": MEAN, "sum": SUM_OF_ALL}


@dataclass(frozen=True, eq=False)
class InParts:
    """What a rank has of a parameter, with its history."""

    local: Tensor
    cut: Cut
    axis: Axis

    def whole(self) -> Tensor:
        return moved(self.local, self.cut, WHOLE, self.axis)


PartOf: TypeAlias = Callable[[Any], InParts | None]  # what a rank has of an argument, if it is a divided parameter


def used(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any], part_of: PartOf) -> Any:
    """A function of torch that takes a divided parameter. What is made of words is made on parts, of one cut by rows."""

    def rows(value: Any) -> InParts | None:
        found = part_of(value)
        return found if found is not None and found.cut == ROWS else None

    if func is F.embedding:
        given = _bound(func, args, kwargs)
        table = rows(given["weight"])
        if table is not None and not (given["sparse"] or given["scale_grad_by_freq"] or given["max_norm"] is not None):
            return _looked_up(table, given["input"], given["padding_idx"])
    if func is F.linear:
        given = _bound(func, args, kwargs)
        table, bias = rows(given["weight"]), given["bias"]
        if table is not None and part_of(given["input"]) is None and part_of(bias) is None:
            return _logits(table, given["input"], bias)
    if _writes(func, kwargs):
        raise RuntimeError(
            f"{getattr(func, '__name__', func)} writes into a weight that lies in parts on several ranks, where that would be "
            "lost; edit weights inside `with run.weights():`"
        )
    args, kwargs = torch.utils._pytree.tree_map(
        lambda each: each if (part := part_of(each)) is None else part.whole(), (args, kwargs)
    )
    return func(*args, **kwargs)


# ---------------------------------------------------------------------- words


def _looked_up(table: InParts, words: Tensor, padding_idx: int | None) -> Tensor:
    _, size = table.axis.counted(len(table.local))
    if padding_idx is not None and not -size <= padding_idx < size:
        raise ValueError(f"padding_idx is {padding_idx}, and the table has {size} words")
    padding = -1 if padding_idx is None else padding_idx % size
    found: Tensor = _Embedding.apply(table.local, words, padding, table.axis)  # type: ignore[no-untyped-call]
    return found


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, words: Tensor, padding: int, axis: Axis) -> Tensor:
        context.save_for_backward(words)
        context.rows, context.padding, context.axis = len(local), padding, axis
        return axis.all_reduce(own_embedding(axis, local, words))

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        (words,) = context.saved_tensors
        found = of_own_rows(context.axis, gradient, words, context.rows, context.padding)
        return found, None, None, None


def _logits(table: InParts, x: Tensor, bias: Tensor | None) -> Tensor:
    own = None if bias is None else table.axis.own(bias)
    x = x.whole() if isinstance(x, Part) else x
    return Logits.of(F.linear(table.axis.shared(x), table.local, own), Cut(x.dim() - 1), table.axis)


# ---------------------------------------------------------------------- logits

ELEMENTWISE: set[Any] = {
    Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16, Tensor.to, Tensor.type, Tensor.contiguous, Tensor.clone,
    torch.clone, Tensor.tanh, torch.tanh, Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide, torch.true_divide,
    Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__,
}  # fmt: skip
SHAPING: set[Any] = {
    Tensor.view, Tensor.reshape, torch.reshape, Tensor.flatten, torch.flatten, Tensor.squeeze, torch.squeeze, Tensor.unsqueeze,
    torch.unsqueeze,
}  # fmt: skip


ADDS: set[Any] = {Tensor.add, torch.add, Tensor.__add__, Tensor.__radd__}


class Logits(Part):
    """Cut in their last dimension, that of the words."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = None if func in FACTS else _of_own_words(func, args, kwargs or {})
        return super().__torch_function__(func, types, args, kwargs) if found is None else found


def _of_own_words(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
    """What a rank makes of its own part; None where the whole is needed."""
    if func is F.cross_entropy:
        return _loss(_bound(func, args, kwargs))
    if func in ADDS and len(args) == 2 and not kwargs:
        return _with_added(*args) if isinstance(args[0], Logits) else _with_added(*reversed(args))
    x, others = args[0] if args else None, (*args[1:], *kwargs.values())
    if not isinstance(x, Logits) or not x.is_untouched or any(isinstance(each, Tensor) for each in others):
        return None
    if func in ELEMENTWISE:
        return _again(x, func(x.local, *args[1:], **kwargs))
    if func in SHAPING:
        shape = func(torch.empty(x.shape, device="meta"), *args[1:], **kwargs).shape
        return _again(x, x.local.reshape(*shape[:-1], -1)) if shape[-1:] == x.shape[-1:] and x.numel() else None
    if func is Tensor.__getitem__ and not kwargs and _leaves_words(args[1], x.dim()):
        return _again(x, x.local[args[1]])
    return None


def _with_added(x: Logits, bias: Any) -> Tensor | None:
    """Logits and a number for each word, as some models add it."""
    is_bias = isinstance(bias, Tensor) and not isinstance(bias, Part) and not hasattr(bias, "anyfit_divided")
    if not is_bias or not x.is_untouched or bias.dim() > x.dim() or bias.shape != (1,) * (bias.dim() - 1) + x.shape[-1:]:
        return None
    return _again(x, x.local + moved(bias, WHOLE, Cut(bias.dim() - 1), x.axis))


def _again(x: Logits, local: Tensor) -> Tensor:
    return x if local is x.local else Logits.of(local, Cut(local.dim() - 1), x.axis)


def _leaves_words(index: Any, dims: int) -> bool:
    """Whether an index takes nothing of the last dimension.

    >>> _leaves_words((Ellipsis, slice(None, -1), slice(None)), 3), _leaves_words((0, 0, 0), 3)
    (True, False)
    """
    index = index if isinstance(index, tuple) else (index,)
    if not all(each is None or each is Ellipsis or type(each) in (int, slice) for each in index):
        return False
    after = index[index.index(Ellipsis) + 1 :] if Ellipsis in index else index
    taken = [each for each in after if each is not None]
    reaches = bool(taken) if Ellipsis in index else len(taken) >= dims
    return (not reaches or taken[-1] == slice(None)) and index[-1] is not None


def _loss(given: Mapping[str, Any]) -> Tensor | None:
    """The cross-entropy of rows of logits; None where it is of another kind."""
    x, targets, reduction = given["input"], given["target"], given["reduction"]
    is_known = isinstance(x, Logits) and x.is_untouched and x.dim() == 2 and reduction in REDUCTIONS
    is_usual = given["weight"] is None and not given["label_smoothing"] and given["size_average"] is given["reduce"] is None
    if not is_known or not is_usual or isinstance(targets, Part) or targets.is_floating_point() or targets.shape != x.shape[:1]:
        return None
    found: Tensor = _CrossEntropy.apply(x.local, targets, given["ignore_index"], reduction, x.axis)  # type: ignore[no-untyped-call]
    return found


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(context: Any, local: Tensor, targets: Tensor, ignore_index: int, reduction: str, axis: Axis) -> Tensor:
        logs = joint_log_softmax(axis, local, 1, False)
        loss, count = own_nll(axis, logs, targets, None, REDUCTIONS[reduction], ignore_index)
        context.save_for_backward(logs, targets, count)
        context.reduction, context.ignored, context.axis = REDUCTIONS[reduction], ignore_index, axis
        if reduction == "mean":
            context.anyfit_divisor = (targets != ignore_index).sum()  # by which losses of micro-batches are weighted
            context.anyfit_labels = targets.numel()
        return axis.all_reduce(loss)

    @staticmethod
    @once_differentiable
    def backward(context: Any, gradient: Tensor) -> Any:
        logs, targets, count = context.saved_tensors
        of_logs = _own_nll_backward(context.axis, gradient, logs, targets, None, context.reduction, context.ignored, count)
        return joint_log_softmax_backward(context.axis, of_logs, logs, 1, logs.dtype), None, None, None, None


# ---------------------------------------------------------------------- functions


def _bound(func: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    if func is F.linear:  # has no signature
        return (
            dict(zip(("input", "weight", "bias"), (*args, None), strict=False))
            | {"bias": args[2] if len(args) > 2 else None}
            | dict(kwargs)
        )
    given = inspect.signature(func).bind(*args, **kwargs)
    given.apply_defaults()
    return given.arguments


def _writes(func: Callable[..., Any], kwargs: Mapping[str, Any]) -> bool:
    name = getattr(func, "__name__", "")
    return "out" in kwargs or name in ("__setitem__", "__set__") or (name.endswith("_") and not name.endswith("__"))
