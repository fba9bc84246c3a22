"""Ops that make tensors: the same number everywhere, or random ones."""

from __future__ import annotations

from anyfit.values.cuts import SUM

from .op import Op, Rules


def filled(op: Op) -> Rules:
    """One number everywhere; a sum only of nothing."""
    for cut in op.cuts(op.result):
        yield op.rule({}, cut, size=list(cut.part(op.result, op.n)))
    if op.name.startswith("zeros") or (op.name == "full.default" and op.arg("fill_value") == 0):
        yield op.rule({}, SUM)


def drawn(op: Op) -> Rules:
    """Random numbers of the shape of the one tensor that is read: drawn for all of it, by the generator that all ranks share."""
    for cut in op.cuts(op.result):
        yield op.rule_of([cut], cut)._replace(form="drawn")


def dropped(op: Op) -> Rules:
    """Dropout with its mask: the mask is drawn for the whole tensor, since a kernel's numbers depend on how many there are."""
    if op.arg("train") is not False:
        yield from drawn(op)
