"""LossRule: how the losses of micro-batches make the loss of their batch, and whether they do at all.

With r samples of R in a micro-batch i, and its loss L_i, the loss of the batch is

    mean       sum r_i / R * L_i
    sum        sum L_i
    weighted   sum S_i / sum w_i             the user's loss returns (S_i, w_i)
    divided    sum n_i L_i / sum n_i         n_i divides the loss: labels that are not ignored, ones of a mask
    whole      not made of them: the batch is not cut

`divisors` finds the n_i of a loss in its autograd graph, where torch keeps them for backward. Torch is known here by shape only.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from torch import Tensor

Kind = Literal["mean", "sum", "weighted", "divided", "whole"]
# What a user can agree to, in Job(agree=), and what that changes.
AGREEMENTS = {
    "mean-of-micro-batches": "the loss of a batch may be the mean of its micro-batches' losses",
    "batch-norm-of-micro-batches": "batch norms may take their statistics from micro-batches",
}
AGREED_MEAN = "to agree to that: Job(agree=['mean-of-micro-batches'])"
WAYS_OUT = "two ways out: return (sum, weight) from the loss, or agree to a mean of means: Job(agree=['mean-of-micro-batches'])"
MOST_NODES = 64  # of a graph, that are looked through from the loss
# Ops of one number after which a divisor is still one of the loss.
LINEAR = (
    "AddBackward", "SubBackward", "NegBackward", "ViewBackward", "ReshapeAliasBackward", "UnsafeViewBackward", "AliasBackward",
    "CloneBackward", "ToCopyBackward", "SqueezeBackward", "UnsqueezeBackward", "ExpandBackward",
)  # fmt: skip


@dataclass(frozen=True)
class LossRule:
    kind: Kind
    why: str
    divisor: int = 0  # of "divided": which of `divisors`
    ways_out: str = WAYS_OUT  # of "whole"
    proved: bool = False  # by running it: a rule that was only read off a trace is tried before the first step
    # Entries of the batch that decide a divisor: labels, with the value of those that are ignored, and others such as masks.
    labels: Mapping[str, int] = field(default_factory=dict)
    counted: tuple[str, ...] = ()

    @property
    def entries(self) -> tuple[str, ...]:
        """Of the batch, all that decide a divisor."""
        return tuple(dict.fromkeys((*self.labels, *self.counted)))

    @property
    def may_be_cut(self) -> bool:
        return self.kind != "whole"


MEAN = LossRule("mean", "the loss is a mean over samples")


@dataclass(frozen=True)
class Divisor:
    """A number in a loss's graph that the loss, or a summand of it, is divided by."""

    value: Any  # a tensor of one element, or a number
    counts: Literal["labels", "elements", "given"]  # of a cross-entropy, of a mean, or written by the user
    node: Any = None  # of the graph, that divides

    @property
    def most(self) -> int | None:
        """The number of all labels, where each counts for one."""
        if self.counts != "labels" or getattr(self.node, "_saved_weight", None) is not None:
            return None
        return int(self.node.anyfit_labels if hasattr(self.node, "anyfit_labels") else self.node._saved_target.numel())

    @property
    def exact(self) -> Any:
        """The same, where torch's own count of labels is rounded to the precision of the logits."""
        node = self.node
        if self.counts == "labels" and getattr(node, "_saved_weight", self) is None:
            return (node._saved_target != node._saved_ignore_index).sum()
        return self.value


def divisors(loss: Tensor) -> list[Divisor]:
    """In an order that is the same for every batch."""
    found: list[Divisor] = []
    nodes: list[Any] = [loss.grad_fn]
    for node in itertools.islice(nodes, MOST_NODES):  # a list that grows meanwhile
        if node is None:
            continue
        name = node.name()
        inputs = [each for each, _ in node.next_functions]
        needing = [each for each in inputs if each is not None]
        if name.startswith("NllLoss") and node._saved_reduction == 1:
            found.append(Divisor(node._saved_total_weight, "labels", node))
        elif name.startswith("MeanBackward0"):
            found.append(Divisor(node._saved_self_sym_numel, "elements", node))
        elif hasattr(node, "anyfit_divisor"):
            found.append(Divisor(node.anyfit_divisor, "labels", node))
        elif name.startswith("DivBackward"):
            if node._saved_other.numel() == 1 and len(needing) == 1:
                found.append(Divisor(node._saved_other, "given", node))
                nodes.append(inputs[0])
        elif name.startswith("MulBackward"):
            if len(needing) == 1:  # times a number
                nodes.append(needing[0])
        elif name.startswith("SumBackward"):
            if math.prod(map(int, getattr(node, "_saved_self_sym_sizes", (2,)))) == 1:  # of one number
                nodes += inputs
        elif name.startswith(LINEAR):
            nodes += inputs
    return found
