"""Ops that work along some dimensions and repeat themselves along the others: reductions, softmax, norms, sorts, attention."""

from __future__ import annotations

from collections.abc import Sequence

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .op import Op, Rules, Shape


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


# ---------------------------------------------------------------------- attention


def attention(op: Op) -> Rules:
    """By rows or heads; by queries too, where no causal mask is implied: a part would begin its mask anew."""
    if op.arg("dropout_p") != 0.0:
        return
    query, mask = op.shape("query"), op.shape("attn_mask")
    assert query is not None
    for dim in (0, 1):
        reads: dict[str, Held] = {name: Cut(dim) for name in ("query", "key", "value")}
        yield op.rule({**reads, "attn_mask": _of_mask(mask, query, dim)}, Cut(dim))
    if not op.arg("is_causal"):
        yield op.rule({"query": Cut(2), "attn_mask": _of_mask(mask, query, 2)}, Cut(2))


def attention_backward(op: Op) -> Rules:
    if op.arg("dropout_p") != 0.0:
        return
    query, mask = op.shape("query"), op.shape("attn_mask")
    assert query is not None
    by_query = ("grad_out", "query", "out", "logsumexp")
    for dim in (0, 1):
        reads: dict[str, Held] = {name: Cut(dim) for name in (*by_query, "key", "value")}
        yield op.rule({**reads, "attn_mask": _of_mask(mask, query, dim)}, Cut(dim))
    if not op.arg("is_causal"):
        cut: dict[str, Held] = {name: Cut(2) for name in by_query}
        yield op.rule({**cut, "attn_mask": _of_mask(mask, query, 2)}, Cut(2), SUM, SUM)


def _of_mask(mask: Shape | None, query: Shape, dim: int) -> Held:
    """A mask is cut with the dimension where it has it, and broadcast where not."""
    if mask is None:
        return WHOLE
    own = dim - (4 - len(mask))
    return Cut(own) if own >= 0 and mask[own] == query[dim] else WHOLE
