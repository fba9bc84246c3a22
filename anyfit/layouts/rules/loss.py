"""The loss of log-probabilities, (rows, classes) with a target a row: by rows, or by classes.

A mean is over all rows that count. By rows, ranks may have other numbers of them, so they add up what they divide by; a mean of
each part's own mean would be wrong in silence.
"""

from __future__ import annotations

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from ..forms import MEAN, NONE
from .op import Op, Rules

CLASSES = Cut(1)


def nll(op: Op) -> Rules:
    if len(op.shapes[0]) != 2:
        return
    reduction = op.arg("reduction")
    for cut in op.cuts(op.shape("target") or ()):
        rows: dict[str, Held] = {"self": cut, "target": cut}
        if reduction == NONE:
            yield op.rule(rows, cut, WHOLE)
        elif reduction == MEAN:
            yield op.rule(rows, SUM, WHOLE, form="joint_mean_nll", exchanges=(("all_reduce", 8.0),))
        else:
            yield op.rule(rows, SUM, SUM)
    if op.shape("weight") is None:
        yield op.rule({"self": CLASSES}, SUM, WHOLE, form="own_nll")


def nll_backward(op: Op) -> Rules:
    if len(op.shapes[1]) != 2:
        return
    for cut in op.cuts(op.shape("target") or ()):
        rows: dict[str, Held] = {"self": cut, "target": cut}
        yield op.rule(rows | ({"grad_output": cut} if op.arg("reduction") == NONE else {}), cut)
    if op.shape("weight") is None:
        yield op.rule({"self": CLASSES}, CLASSES, form="own_nll_backward")
