"""Ops that work along some dimensions and repeat themselves along the others: reductions, softmax, norms, sorts."""

from __future__ import annotations

import math
from collections.abc import Sequence

from anyfit.values.cuts import SUM, Cut, Held, Move

from .op import Op, Rules


def others(rank: int, dims: Sequence[int]) -> list[int]:
    return [dim for dim in range(rank) if dim not in {each % max(rank, 1) for each in dims}]


def reduction(op: Op) -> Rules:
    """Sums and means; a dimension that is summed over may be cut."""
    (shape,) = op.shapes
    named = op.arg("dim") if ".dim" in op.name else None
    dims = [dim % len(shape) for dim in named] if named else list(range(len(shape)))
    keeps = ".dim" in op.name and op.arg("keepdim")
    for cut in op.cuts(shape):
        if cut.dim in dims:
            yield op.rule({"self": cut}, SUM, form="averaged" if op.name.startswith("mean") else "plain")
        else:
            yield op.rule({"self": cut}, Cut(cut.dim if keeps else cut.dim - sum(dim < cut.dim for dim in dims), cut.outer))
    yield op.rule({"self": SUM}, SUM)


def extreme(op: Op) -> Rules:
    """Largest and smallest, with or without their places."""
    shape = op.shapes[0]
    named = op.arg("dim")
    if named is None or not shape:
        return
    dims = [named % len(shape)] if isinstance(named, int) else [dim % len(shape) for dim in named]
    for cut in op.cuts(shape, others(len(shape), dims) if dims else []):
        yield op.rule_of([cut], Cut(cut.dim if op.arg("keepdim") else cut.dim - sum(dim < cut.dim for dim in dims), cut.outer))


def along_one(op: Op) -> Rules:
    """Softmax, running sums, sorts: the tensors read and given have all dimensions of the first."""
    shape = op.shapes[0]
    for cut in op.cuts(shape, others(len(shape), [op.arg("dim")])):
        yield op.rule_of([cut] * len(op.shapes), cut)
    if op.name.endswith("_backward_data.default"):
        yield op.rule({"grad_output": SUM}, SUM)
    if op.name == "cumsum.default":
        yield op.rule({"self": SUM}, SUM)


def log_softmax(op: Op) -> Rules:
    """Over a cut dimension too: ranks tell each other the logarithm of their sums of exponentials."""
    yield from along_one(op)
    (shape,) = op.shapes
    cut = Cut(op.dim("dim", len(shape)))
    size = 4.0 * op.n * math.prod(shape) / shape[cut.dim]
    yield op.rule({"self": cut}, cut, form="joint_log_softmax", exchanges=(("all_gather", size),))


def log_softmax_backward(op: Op) -> Rules:
    yield from along_one(op)
    shape = op.shapes[0]
    cut = Cut(op.dim("dim", len(shape)))
    exchanges: tuple[tuple[Move, float], ...] = (("all_reduce", 4.0 * math.prod(shape) / shape[cut.dim]),)
    yield op.rule({"grad_output": cut, "output": cut}, cut, form="joint_log_softmax_backward", exchanges=exchanges)


def along_last_two(op: Op) -> Rules:
    """Triangles."""
    rank = len(op.result)
    for cut in op.cuts(op.result, others(rank, [rank - 1, rank - 2])):
        yield op.rule_of([cut], cut)
    yield op.rule_of([SUM], SUM)


def moved(op: Op) -> Rules:
    """Rolled, flipped or padded dimensions stay whole."""
    (shape,) = op.shapes
    if op.name == "constant_pad_nd.default":
        pads = op.arg("pad")
        dims = [len(shape) - 1 - at // 2 for at, pad in enumerate(pads) if pad]
    else:
        dims = list(op.arg("dims")) or list(range(len(shape)))
    for cut in op.cuts(shape, others(len(shape), dims)):
        yield op.rule_of([cut], cut)
    if op.name != "constant_pad_nd.default" or op.arg("value") == 0:
        yield op.rule_of([SUM], SUM)


# ---------------------------------------------------------------------- norms


def layer_norm(op: Op) -> Rules:
    shape = op.shapes[0]
    for cut in op.cuts(shape, range(len(shape) - len(op.arg("normalized_shape")))):
        yield op.rule({"input": cut}, cut)


def layer_norm_backward(op: Op) -> Rules:
    shape = op.shapes[0]
    for cut in op.cuts(shape, range(len(shape) - len(op.arg("normalized_shape")))):
        rows: dict[str, Held] = dict.fromkeys(("grad_out", "input", "mean", "rstd"), cut)
        yield op.rule(rows, cut, *[SUM] * (len(op.results) - 1))
    yield op.rule({"grad_out": SUM}, SUM)


def group_norm(op: Op) -> Rules:
    rows, channels, groups = op.arg("N"), op.arg("C"), op.arg("group")
    yield op.rule({"input": Cut(0)}, Cut(0), N=rows // op.n)
    if groups % op.n == 0:
        reads: dict[str, Held] = {"input": Cut(1), "weight": Cut(0), "bias": Cut(0)}
        yield op.rule(reads, Cut(1), C=channels // op.n, group=groups // op.n)


def group_norm_backward(op: Op) -> Rules:
    rows, channels, groups = op.arg("N"), op.arg("C"), op.arg("group")
    statistics = ("grad_out", "input", "mean", "rstd")
    yield op.rule({name: Cut(0) for name in statistics}, Cut(0), SUM, SUM, N=rows // op.n)
    if groups % op.n == 0:
        reads: dict[str, Held] = {**{name: Cut(1) for name in statistics}, "weight": Cut(0)}
        yield op.rule(reads, Cut(1), Cut(0), Cut(0), C=channels // op.n, group=groups // op.n)
    yield op.rule({"grad_out": SUM}, SUM)
