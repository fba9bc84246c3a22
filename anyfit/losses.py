"""Cross-entropy of a language model's head in slices of tokens: the logits never exist whole.

    loss = sliced_cross_entropy(hidden, head.weight, targets)          in place of
    loss = F.cross_entropy(F.linear(hidden, head.weight).flatten(0, 1).float(), targets.flatten())

Of 8192 tokens over 128 Ki words the logits take 2 GiB in bf16, and their fp32 copy, its log-softmax and the gradients of both
another 14. Here a slice's logits are made, their loss is added up, and their gradient is turned at once into what it gives to
the hidden states and to the weight:

    logits = hidden weight' + bias      of one slice, in the model's dtype
    g      = (softmax(logits) - onehot(targets)) / count, in fp32, then rounded to the model's dtype as autograd would
    to hidden: g weight     to weight: the sum of g' hidden over slices, in fp32     to bias: the sum of g over tokens

So nothing of the size of the logits waits for backward, and no product is made twice: backward only multiplies what is there by
the gradient that comes in. What does wait is the gradient of hidden, and that of the weight: in fp32 where there are several
slices, which is 4 bytes for each of its elements. Without gradients (`torch.no_grad`, frozen weights) none are made.

`Means` knows the mean that a model's own loss is as (sum, weight), so that micro-batches with other numbers of tokens add up.

Nothing of the house is imported here: this is for your own loss as well as for `Job.from_huggingface`.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

SLICE_BYTES = 2**28  # of one slice's logits in fp32; its log-softmax takes as much again
TILE = 128  # rows: a GPU's products work in multiples of them
OTHERS = -100  # a word that is another rank's, or does not count
_tanh_backward = torch.ops.aten.tanh_backward


def sliced_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    bias: Tensor | None = None,
    ignore_index: int = -100,
    slice_rows: int | None = None,
    reduction: Literal["mean", "sum"] = "mean",
    softcap: float | None = None,
) -> Tensor:
    """What `torch.nn.functional.cross_entropy` gives for the logits `hidden @ weight.T + bias` in fp32.

    hidden       what the head reads, (..., width)
    weight       of the head, (vocabulary, width); may be tied to the embedding, frozen, or away on the host
    targets      the right words, (...); those of `ignore_index` do not count
    slice_rows   tokens whose logits exist at a time; when not given, as many as 256 MiB hold in fp32, or all where slices would
                 not save memory
    softcap      logits are `softcap * tanh(logits / softcap)`, as Gemma's

    A weight whose rows are cut over several ranks has a method `of_ranks`: it gives this rank's rows, and the ranks.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction={reduction!r} is not known; 'mean' and 'sum' are")
    if targets.shape != hidden.shape[:-1]:
        raise ValueError(f"targets of shape {tuple(targets.shape)} do not belong to hidden states of {tuple(hidden.shape)}")
    rows, wanted, ranks = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1), None
    if hasattr(weight, "of_ranks"):
        weight, ranks = weight.of_ranks()
        rows, bias = ranks.shared(rows), None if bias is None else ranks.own(bias)
    learns = torch.is_grad_enabled()  # inside the function it never is
    if slice_rows is None:
        vocabulary, width = weight.shape
        if ranks is not None:  # the same number of slices on all of them, of which the last may have fewer words
            vocabulary = -(-ranks.counted(vocabulary)[1] // ranks.n)
        slice_rows = default_slice_rows(len(rows), vocabulary, width if learns and weight.requires_grad else 0)
    elif slice_rows < 1:
        raise ValueError(f"slice_rows must be at least 1, got {slice_rows}")
    apply: Any = _Sliced.apply
    loss: Tensor = apply(rows, weight, bias, wanted, ignore_index, slice_rows, reduction, softcap, learns, ranks)
    return loss


def default_slice_rows(rows: int, vocabulary: int, learnt_width: int) -> int:
    """As many as SLICE_BYTES hold; all, where their logits (8 bytes each, log-softmax included) would take no more than a slice's
    and the sum of the weight's gradient over slices (4 bytes for each element of the width that is learnt)."""
    fitting = SLICE_BYTES // (4 * vocabulary)
    fitting = max(fitting - fitting % TILE if fitting > TILE else fitting, 1)
    return max(rows, 1) if rows <= fitting + learnt_width // 2 else fitting


class Ranks(Protocol):
    """Those that have the words' rows of a head together, from the side of one."""

    @property
    def n(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def counted(self, own: int) -> tuple[int, int]:
        """Of words of which this rank has `own`: where they begin, and how many all have."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def stacked(self, x: Tensor) -> Tensor:
        """What all of them have, one after the other."""
        ...

    def shared(self, x: Tensor) -> Tensor:
        """The same tensor, whose gradient adds up over them."""
        ...

    def own(self, x: Tensor) -> Tensor:
        """This rank's part of what all of them have, cut as the rows are."""
        ...


class _Sliced(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        ignore_index: int,
        slice_rows: int,
        reduction: str,
        softcap: float | None,
        learns: bool,
        ranks: Ranks | None,
    ) -> Tensor:
        to_hidden, to_weight, to_bias = (learns and needed for needed in ctx.needs_input_grad[:3])
        counts = targets != ignore_index
        count = counts.sum().float() if reduction == "mean" else None
        shares = counts.float() if count is None else torch.where(counts, 1 / count, 0.0)  # of each token in the loss
        wanted, ignored, hits = targets, ignore_index, shares  # words as the rows here count them, and their share
        if ranks is not None:
            wanted, ignored = _own_words(targets, counts, len(weight), ranks), OTHERS
            hits = torch.where(wanted != ignored, shares, 0.0)
        places = torch.where(wanted != ignored, wanted, 0)
        losses: list[Tensor] = []
        of_hidden = torch.empty_like(hidden) if to_hidden else None
        of_weight: Tensor | None = None
        of_bias: Tensor | None = None
        slices = list(_slices(len(hidden), slice_rows))
        for rows in slices:
            logs, slope = _log_softmax(F.linear(hidden[rows], weight, bias), softcap, ranks)
            losses.append(F.nll_loss(logs, wanted[rows], ignore_index=ignored, reduction="sum"))
            if not (to_hidden or to_weight or to_bias):
                del logs, slope  # as large as a slice may be: the next is not to meet them
                continue
            gradient = slope(_of_logits(logs, places[rows], shares[rows], hits[rows]))
            del logs, slope
            if of_hidden is not None:
                of_hidden[rows] = gradient @ weight
            if to_weight:
                product = gradient.t() @ hidden[rows]
                if of_weight is not None:
                    of_weight.add_(product)
                else:
                    of_weight = product.float() if len(slices) > 1 else product
                del product
            if to_bias:
                added = gradient.sum(0, dtype=torch.float32)
                of_bias = added if of_bias is None else of_bias.add_(added)
            del gradient
        ctx.save_for_backward(of_hidden, of_weight, of_bias)
        ctx.counts = counts.any()
        if count is not None:
            ctx.anyfit_divisor, ctx.anyfit_labels = count, targets.numel()  # by which losses of micro-batches are weighted
        ctx.dtypes = hidden.dtype, weight.dtype, None if bias is None else bias.dtype
        total = losses[0] if len(losses) == 1 else torch.stack(losses).sum()
        total = total if ranks is None else ranks.all_reduce(total)
        return total if count is None else total / count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, incoming: Tensor) -> tuple[Tensor | None, ...]:
        incoming = torch.where(ctx.counts, incoming, 0.0)  # divided by no tokens it is infinite, and their gradient still zero
        made = (
            None if gradient is None else _scaled(gradient, incoming, dtype)
            for gradient, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        )
        return *made, None, None, None, None, None, None, None


def _slices(rows: int, slice_rows: int) -> Iterator[slice]:
    """At least one, so that no tokens at all give what they give in torch."""
    for start in range(0, max(rows, 1), slice_rows):
        yield slice(start, min(start + slice_rows, rows))


def _own_words(targets: Tensor, counts: Tensor, words: int, ranks: Ranks) -> Tensor:
    """Counted from this rank's first; those of others, and what does not count, are OTHERS. A word that is nobody's is an error,
    as it is of the whole."""
    first, total = ranks.counted(words)
    torch._assert_async((~counts | ((targets >= 0) & (targets < total))).all(), "a target is out of range")
    own = targets - first
    return torch.where(counts & (own >= 0) & (own < words), own, OTHERS)


def _log_softmax(logits: Tensor, softcap: float | None, ranks: Ranks | None) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Of the capped logits, in fp32; and what takes its gradient by them to that by the logits, in their dtype."""
    dtype = logits.dtype
    if softcap is None:
        logits = logits.float()  # and those in the model's dtype go
        return _logs(logits, ranks), lambda gradient: gradient.to(dtype)
    bent = torch.tanh(logits / softcap)
    logits = (bent * softcap).float()
    return _logs(logits, ranks), lambda gradient: _tanh_backward(gradient.to(dtype) * softcap, bent) / softcap


def _logs(logits: Tensor, ranks: Ranks | None) -> Tensor:
    """Over the words of all ranks."""
    if ranks is None:
        return F.log_softmax(logits, dim=-1)
    return logits - ranks.stacked(logits.logsumexp(-1, keepdim=True)).logsumexp(0)


def _of_logits(logs: Tensor, places: Tensor, shares: Tensor, hits: Tensor) -> Tensor:
    """The loss's gradient by the logits, in the place of their log-softmax: share * (softmax - onehot)."""
    return logs.exp_().mul_(shares[:, None]).scatter_add_(1, places[:, None], -hits[:, None])


def _scaled(gradient: Tensor, by: Tensor, dtype: torch.dtype) -> Tensor:
    """In fp32 and rounded once: as a factor of a bf16 tensor `by` would itself be rounded. In parts, since fp32 is large."""
    result = torch.empty_like(gradient, dtype=dtype)
    elements = max(gradient[:1].numel(), 1)
    for rows in _slices(len(gradient), max(SLICE_BYTES // (4 * elements), 1)):
        result[rows] = gradient[rows].float() * by
    return result


# ---------------------------------------------------------------------- means as sums and weights

OVER_TARGETS = (F.cross_entropy, F.nll_loss)  # their mean is over targets that count, by the weights of their classes
OVER_ELEMENTS = (
    F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.huber_loss, F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.kl_div,
    F.poisson_nll_loss, F.soft_margin_loss,
)  # fmt: skip
ADDS = (Tensor.add, torch.add)
SCALES = (Tensor.mul, torch.mul, Tensor.div, torch.div, Tensor.true_divide, torch.true_divide)
CASTS = (Tensor.to, Tensor.float, Tensor.squeeze, torch.squeeze)


@dataclass(frozen=True)
class _Mean:
    value: Tensor
    version: int  # of the value: a model may add to it in place
    total: Tensor
    weight: Tensor | float
    items: Hashable  # what it is a mean over


class Means(TorchFunctionMode):
    """Inside, the means that torch's losses make are also kept as sums and weights.

        with Means() as means:
            loss = model(**batch).loss
        total, weight = means.of(loss) or (loss, None)

    `of` knows a loss that is such a mean, or that adds up several over the same items. The sum of no items is 0, where their mean
    is not a number. Every call of a torch function passes through a mode: `left_by` takes it away while these modules run.
    """

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, _Mean] = {}  # by identity of the value, which is kept

    def of(self, loss: object) -> tuple[Tensor, Tensor | float] | None:
        found = self._found(loss)
        return None if found is None else (found.total, found.weight)

    def keep(self, total: Tensor, weight: Tensor | float, items: Hashable, value: Tensor | None = None) -> Tensor:
        """The mean, known from now on."""
        value = total / weight if value is None else value
        self._known[id(value)] = _Mean(value, _version(value), total, weight, items)
        return value

    def _found(self, value: object) -> _Mean | None:
        found = self._known.get(id(value))
        return found if found is not None and found.version == _version(found.value) else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OVER_TARGETS or func in OVER_ELEMENTS:
            given = inspect.signature(func).bind(*args, **kwargs)
            given.apply_defaults()
            weighed = _weighed(func, given.arguments)
            if weighed is not None:
                given.arguments["reduction"] = "sum"
                return self.keep(func(*given.args, **given.kwargs), *weighed)
        value = func(*args, **kwargs)
        if self._known and isinstance(value, Tensor) and id(value) not in self._known:
            self._follow(func, args, kwargs, value)
        return value

    def _follow(self, func: Any, args: Any, kwargs: Any, value: Tensor) -> None:
        """What is added, scaled or cast of means that are known is known as well."""
        takes_two = len(args) == 2 and not kwargs
        if func in ADDS and takes_two:
            first, second = (self._found(each) for each in args)
            only = first or second
            if first is not None and second is not None and first.items == second.items:
                self.keep(first.total + second.total, first.weight, first.items, value)
            elif only is not None and any(_is_number(each) and each == 0 for each in args):  # where Python's `sum` begins
                self.keep(only.total, only.weight, only.items, value)
        elif args and (func in CASTS or (func in SCALES and takes_two and _is_number(args[1]))):
            found = self._found(args[0])
            if found is not None:
                self.keep(func(found.total, *args[1:], **kwargs), found.weight, found.items, value)

    @contextlib.contextmanager
    def left_by(self, modules: Iterable[nn.Module]) -> Iterator[Means]:
        """The mode, but not inside of these modules: what they do costs what it did, and compiled ones stay as they are."""
        undo: list[tuple[nn.Module, str, Any]] = []
        for module in modules:
            name = "forward" if module._compiled_call_impl is None else "_compiled_call_impl"
            own = vars(module).get(name)
            undo.append((module, name, own))
            object.__setattr__(module, name, self._away(getattr(module, name)))
        try:
            with self:
                yield self
        finally:
            for module, name, own in reversed(undo):
                object.__delattr__(module, name) if own is None else object.__setattr__(module, name, own)

    def _away(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            if torch.overrides._get_current_function_mode() is not self:
                return forward(*args, **kwargs)
            with torch.overrides._pop_mode_temporarily():
                return forward(*args, **kwargs)

        return run


def _weighed(func: Any, given: dict[str, Any]) -> tuple[Tensor | float, Hashable] | None:
    """What the mean of this call divides by, and what it is over; None where it makes no mean, or one of its own kind."""
    if given["reduction"] != "mean" or given.get("size_average") is not None or given.get("reduce") is not None:
        return None
    input, target, weight = given["input"], given["target"], given.get("weight")
    if func in OVER_ELEMENTS:
        if weight is not None and "binary" not in func.__name__:
            return None
        count = torch.broadcast_shapes(input.shape, target.shape).numel()
        return float(count), ("elements", count)
    if target.is_floating_point():  # a distribution over classes for each
        count = input.numel() // max(input.shape[1 if input.dim() > 1 else 0], 1)
        return float(count), ("elements", count)
    ignored: int = given["ignore_index"]
    counts = target != ignored
    found = counts.sum() if weight is None else torch.where(counts, weight[torch.where(counts, target, 0)], 0).sum()
    return found, ("targets", _place(target), ignored, None if weight is None else id(weight))


def _place(tensor: Tensor) -> Hashable:
    """The same for any view of the same elements in their order."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.numel(), tensor.is_contiguous() or tensor.stride()


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _version(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version
