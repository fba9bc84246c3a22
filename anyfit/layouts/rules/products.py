"""Matrix products, and convolutions: rows, columns, or what is summed over."""

from __future__ import annotations

from collections.abc import Iterator

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from ..graph import reads_of, value_of
from .op import Op, Rules, Shape


def mm(op: Op) -> Rules:
    rows, columns = op.result
    inner = op.shapes[0][1]
    for cut in op.cuts((rows,)):
        yield op.rule({"self": cut}, cut)
    for cut in op.cuts((columns,)):
        yield op.rule({"mat2": Cut(1, cut.outer)}, Cut(1, cut.outer))
    for cut in op.cuts((inner,)):
        yield op.rule({"self": Cut(1, cut.outer), "mat2": cut}, SUM)
    yield op.rule({"self": SUM}, SUM)
    yield op.rule({"mat2": SUM}, SUM)


def addmm(op: Op) -> Rules:
    rows, columns = op.result
    bias = op.shape("self")
    inner = (op.shape("mat1") or ())[1]
    assert bias is not None
    has_rows, has_columns = len(bias) == 2 and bias[0] == rows, bias[-1] == columns
    for cut in op.cuts((rows,)):
        yield op.rule({"self": cut if has_rows else WHOLE, "mat1": cut}, cut)
    for cut in op.cuts((columns,)):
        added: Held = Cut(len(bias) - 1, cut.outer) if has_columns else WHOLE
        yield op.rule({"self": added, "mat2": Cut(1, cut.outer)}, Cut(1, cut.outer))
    for cut in op.cuts((inner,)):
        yield op.rule({"self": SUM, "mat1": Cut(1, cut.outer), "mat2": cut}, SUM)
    yield op.rule({"self": SUM, "mat1": SUM}, SUM)


def bmm(op: Op) -> Rules:
    batch, rows, columns = op.result
    inner = op.shapes[0][2]
    for cut in op.cuts((batch,)):
        yield op.rule({"self": cut, "mat2": cut}, cut)
    for cut in op.cuts((rows,)):
        yield op.rule({"self": Cut(1, cut.outer)}, Cut(1, cut.outer))
    for cut in op.cuts((columns,)):
        yield op.rule({"mat2": Cut(2, cut.outer)}, Cut(2, cut.outer))
    for cut in op.cuts((inner,)):
        yield op.rule({"self": Cut(2, cut.outer), "mat2": Cut(1, cut.outer)}, SUM)
    yield op.rule({"self": SUM}, SUM)
    yield op.rule({"mat2": SUM}, SUM)


def grouped(op: Op) -> Rules:
    """A product for each of several groups, of rows, columns or inner places that end where the offsets say: those stay whole.

    (rows, inner) x (groups, inner, columns), (groups, rows, inner) x (inner, columns), and the way back to the weights of all
    groups, (rows, inner) x (inner, columns) with inner places in groups.
    """
    left, right = op.shape("self") or (), op.shape("mat2") or ()
    if op.arg("bias") is not None:
        return
    if len(left) == 3 or len(right) == 2:  # the rows are all of one group, or of every one
        for cut in _aligned(op, left, len(left) - 2):
            yield op.rule({"self": cut}, Cut(len(op.result) - 2, cut.outer))
    if len(right) == 3 or len(left) == 2:
        for cut in _aligned(op, right, len(right) - 1):
            yield op.rule({"mat2": cut}, Cut(len(op.result) - 1, cut.outer))
    if len(left) == 3 or len(right) == 3:
        for cut in _aligned(op, left, len(left) - 1):
            yield op.rule({"self": cut, "mat2": Cut(len(right) - 2, cut.outer)}, SUM)
    if len(left) == len(right) == 3:
        yield op.rule({"self": Cut(0), "mat2": Cut(0)}, Cut(0))
    yield op.rule({"self": SUM}, SUM)
    yield op.rule({"mat2": SUM}, SUM)


def _aligned(op: Op, shape: Shape, dim: int) -> Iterator[Cut]:
    """Cuts whose parts have rows that begin at multiples of 16 bytes, however they lie: kernels of grouped products want that."""
    elements = 16 // value_of(reads_of(op.node)[0]).dtype.itemsize
    for cut in op.cuts(shape, [dim]):
        if cut.part(shape, op.n)[dim] % elements == 0:
            yield cut


def convolution(op: Op) -> Rules:
    groups = op.arg("groups")
    yield op.rule({"input": Cut(0)}, Cut(0))
    if op.arg("transposed"):
        return
    if groups == 1:
        yield op.rule({"weight": Cut(0), "bias": Cut(0)}, Cut(1))
        yield op.rule({"input": Cut(1), "weight": Cut(1), "bias": SUM}, SUM)
    elif groups % op.n == 0:
        yield op.rule({"input": Cut(1), "weight": Cut(0), "bias": Cut(0)}, Cut(1), groups=groups // op.n)
    yield op.rule({"input": SUM, "bias": SUM}, SUM)


def convolution_backward(op: Op) -> Rules:
    groups, sizes = op.arg("groups"), op.arg("bias_sizes")
    fewer = None if sizes is None else [sizes[0] // op.n]
    yield op.rule({"grad_output": Cut(0), "input": Cut(0)}, Cut(0), SUM, SUM)
    if not op.arg("transposed"):
        if groups == 1:
            yield op.rule({"grad_output": Cut(1), "weight": Cut(0)}, SUM, Cut(0), Cut(0), bias_sizes=fewer)
            yield op.rule({"input": Cut(1), "weight": Cut(1)}, Cut(1), Cut(1), WHOLE)
        elif groups % op.n == 0:
            reads: dict[str, Held] = {"grad_output": Cut(1), "input": Cut(1), "weight": Cut(0)}
            yield op.rule(reads, Cut(1), Cut(0), Cut(0), bias_sizes=fewer, groups=groups // op.n)
    yield op.rule({"grad_output": SUM}, SUM)
