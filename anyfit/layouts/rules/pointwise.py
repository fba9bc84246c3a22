"""Ops that make every element from the elements at its place: any dimension may be cut, broadcast ones aside."""

from __future__ import annotations

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .op import Op, Rules

# Not tagged so by torch.
POINTWISE = {
    "clone.default", "_to_copy.default", "masked_fill.Scalar", "masked_fill.Tensor", "native_dropout_backward.default",
    "softplus_backward.default", "leaky_relu_backward.default", "elu_backward.default", "hardtanh_backward.default",
    "floor_divide.default",
}  # fmt: skip
# By which of the tensors they read they are linear: a sum of them, the others whole, gives a sum.
LINEAR: dict[str, tuple[tuple[int, ...], ...]] = {
    "neg.default": ((0,),), "clone.default": ((0,),), "_to_copy.default": ((0,),), "mul.Scalar": ((0,),), "div.Scalar": ((0,),),
    "mul.Tensor": ((0,), (1,)), "div.Tensor": ((0,),), "add.Tensor": ((0, 1),), "sub.Tensor": ((0, 1),), "where.self": ((1, 2),),
}  # fmt: skip


def pointwise(op: Op) -> Rules:
    for cut in op.cuts(op.result):
        reads = [_aligned(cut, len(op.result), op.result[cut.dim], shape) for shape in op.shapes]
        if any(held != WHOLE for held in reads):
            yield op.rule_of(reads, cut)
    yield from _linear(op)


def _aligned(cut: Cut, rank: int, size: int, shape: tuple[int, ...]) -> Held:
    """How an operand is cut with the result: not at all where it is broadcast."""
    dim = cut.dim - (rank - len(shape))
    return Cut(dim, cut.outer) if dim >= 0 and shape[dim] == size else WHOLE


def _linear(op: Op) -> Rules:
    count = len(op.shapes)
    ways = ((0,),) if "_backward" in op.name else LINEAR.get(op.name, ())  # a backward op is linear in the gradient
    if op.name == "where.self" and count < 3:
        return
    if op.name in ("add.Tensor", "sub.Tensor") and count < 2:  # a number is added
        return
    if op.name == "masked_fill.Scalar" and op.arg("value") == 0:
        ways = ((0,),)
    for way in ways:
        if max(way) < count:
            yield op.rule_of([SUM if at in way else WHOLE for at in range(count)], SUM)
