"""What a rank does in the place of an op, where the op on its parts is not enough: with the vocabulary or the rows of a loss cut.

A rule's form is the name of a function here. It is given the axis and then the op's own arguments, as this rank has them.

    own_...      of a table that is cut by rows, or logits by columns, a rank looks up or writes what lies in its own part. What
                 lies in no part at all is an error, as it is of the whole.
    joint_...    ranks exchange a number or two for each row: a log-softmax over a cut dimension is each part less the logarithm
                 of all parts' sum of exponentials; a mean over cut rows divides by all rows that count.

The loss of logits that are cut by columns therefore never has a row whole anywhere.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor

aten = torch.ops.aten
OTHERS = -100  # a target that is another rank's, or does not count
HALF = (torch.bfloat16, torch.float16)  # summed in fp32, as kernels do
NONE, MEAN, SUM_OF_ALL = 0, 1, 2  # reductions, as torch numbers them


class Ranks(Protocol):
    """Those that make an op together, from the side of one."""

    @property
    def n(self) -> int: ...

    @property
    def rank(self) -> int: ...

    def counted(self, own: int) -> tuple[int, int]:
        """Of a dimension of which this rank has `own`: where they begin, and how many all have."""
        ...

    def all_reduce(self, x: Tensor) -> Tensor: ...

    def stacked(self, x: Tensor) -> Tensor:
        """What all of them have, one after the other."""
        ...


def _own(ranks: Ranks, places: Tensor, counts: Tensor, size: int, others: int) -> Tensor:
    """Places in a dimension of which this rank has `size`, counted from its first; `others` where not its own."""
    first, total = ranks.counted(size)
    aten._assert_async.msg((~counts | ((places >= 0) & (places < total))).all(), "an index is out of range")
    own = places - first
    return torch.where(counts & (own >= 0) & (own < size), own, others)


# ---------------------------------------------------------------------- tables


def own_embedding(ranks: Ranks, weight: Tensor, indices: Tensor, *unread: Any) -> Tensor:
    """A summand: zeros for words of other ranks."""
    own = _own(ranks, indices, torch.ones_like(indices, dtype=torch.bool), len(weight), -1)
    found: Tensor = aten.embedding(weight, own.clamp(min=0))
    return found.masked_fill_((own < 0).unsqueeze(-1), 0.0)


def own_embedding_backward(
    ranks: Ranks, gradient: Tensor, indices: Tensor, num_weights: int, padding_idx: int, scale_grad_by_freq: bool
) -> Tensor:
    return of_own_rows(ranks, gradient, indices, num_weights // ranks.n, padding_idx, scale_grad_by_freq)


def of_own_rows(
    ranks: Ranks, gradient: Tensor, indices: Tensor, rows: int, padding_idx: int, scale_grad_by_freq: bool = False
) -> Tensor:
    """The gradient of this rank's rows. Words of others, and padding, lie in one more row, which has none."""
    own = _own(ranks, indices, indices != padding_idx, rows, rows)
    found: Tensor = aten.embedding_dense_backward(gradient, own, rows + 1, rows, scale_grad_by_freq)
    return found[:rows]


# ---------------------------------------------------------------------- the loss of logits cut by columns


def joint_log_softmax(ranks: Ranks, x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    exact = x.float() if x.dtype in HALF else x
    total = ranks.stacked(exact.logsumexp(dim, keepdim=True)).logsumexp(0)
    found = exact - total
    return found if half_to_float else found.to(x.dtype)


def joint_log_softmax_backward(ranks: Ranks, gradient: Tensor, output: Tensor, dim: int, input_dtype: torch.dtype) -> Tensor:
    exact = gradient.float() if gradient.dtype in HALF else gradient
    total = ranks.all_reduce(exact.sum(dim, keepdim=True))
    return (exact - output.exp() * total).to(input_dtype)


def own_nll(
    ranks: Ranks, logs: Tensor, targets: Tensor, weight: None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """A summand of the loss, and the number of targets that count, which all ranks know."""
    counts = targets != ignore_index
    own = _own(ranks, targets, counts, logs.shape[1], OTHERS)
    loss: Tensor = aten.nll_loss_forward(logs, own, weight, NONE if reduction == NONE else SUM_OF_ALL, OTHERS)[0]
    count = counts.sum() if reduction != NONE else logs.new_zeros(())
    exact = loss.float() if loss.dtype in HALF else loss
    return (exact / count if reduction == MEAN else exact).to(loss.dtype), count.to(logs.dtype)


def own_nll_backward(
    ranks: Ranks, gradient: Tensor, logs: Tensor, targets: Tensor, weight: None, reduction: int, ignore_index: int, count: Tensor
) -> Tensor:
    own = _own(ranks, targets, targets != ignore_index, logs.shape[1], OTHERS)
    found: Tensor = aten.nll_loss_backward(gradient, logs, own, weight, reduction, OTHERS, count)
    return found


# ---------------------------------------------------------------------- the loss of rows that are cut


def joint_mean_nll(
    ranks: Ranks, logs: Tensor, targets: Tensor, weight: Tensor | None, reduction: int, ignore_index: int
) -> tuple[Tensor, Tensor]:
    """A summand of the mean, and what it divides by: ranks may have other numbers of targets that count."""
    loss, count = aten.nll_loss_forward(logs, targets, weight, SUM_OF_ALL, ignore_index)
    total = ranks.all_reduce(count)
    return loss / total, total


FORMS = {
    each.__name__: each
    for each in (
        own_embedding, own_embedding_backward, joint_log_softmax, joint_log_softmax_backward, own_nll, own_nll_backward,
        joint_mean_nll,
    )
}  # fmt: skip
