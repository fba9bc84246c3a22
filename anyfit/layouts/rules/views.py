"""Ops that only arrange: views by factor, permutations, slices, pieces put together or taken apart.

A view keeps the order of elements. Runs of dimensions of both shapes with equal products are the same elements, so a cut after
`before` blocks of a run is found again in the dimension of the other shape that lies there: flattening (batch, sequence) with the
sequence cut gives rows cut within each of `batch` outer blocks, and the other way round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from anyfit.values.cuts import SUM, WHOLE, Cut

from .op import Op, Rules, Shape


def runs(a: Shape, b: Shape) -> Iterator[tuple[range, range]]:
    """Dimensions of both that hold the same elements.

    >>> list(runs((2, 3, 8), (6, 4, 2)))
    [(range(0, 2), range(0, 1)), (range(2, 3), range(1, 3))]
    """
    i = j = 0
    while i < len(a) or j < len(b):
        first, second = i, j
        left = right = 1
        while (first == i and second == j) or left != right:
            if i < len(a) and (left <= right or j == len(b)):
                left, i = left * a[i], i + 1
            else:
                right, j = right * b[j], j + 1
        yield range(first, i), range(second, j)


def through_view(a: Shape, b: Shape, cut: Cut, n: int) -> Cut | None:
    """Where a cut of shape a lies in shape b.

    >>> through_view((4, 6, 8), (24, 8), Cut(1), 2)
    Cut(dim=0, outer=4)
    >>> through_view((24, 8), (4, 6, 8), Cut(0, outer=4), 2)
    Cut(dim=1, outer=1)
    """
    for mine, theirs in runs(a, b):
        if cut.dim not in mine:
            continue
        before = cut.outer * math.prod(a[mine.start : cut.dim])
        passed = 1
        for dim in theirs:
            found = Cut(dim, before // passed) if before % passed == 0 and before >= passed else None
            if found is not None and found.divides(b, n):
                return found
            passed *= b[dim]
    return None


def view(op: Op) -> Rules:
    (shape,) = op.shapes
    for cut in op.cuts(shape):
        found = through_view(shape, op.result, cut, op.n)
        if found is not None:
            yield op.rule_of([cut], found, size=list(found.part(op.result, op.n)))
    yield op.rule_of([SUM], SUM)


def same_order(op: Op) -> Rules:
    """A dimension of one more or less; no sizes are said."""
    (shape,) = op.shapes
    for cut in op.cuts(shape):
        found = through_view(shape, op.result, cut, op.n)
        if found is not None:
            yield op.rule_of([cut], found)
    yield op.rule_of([SUM], SUM)


def expand(op: Op) -> Rules:
    (shape,) = op.shapes
    new = len(op.result) - len(shape)
    for cut in op.cuts(op.result):
        dim = cut.dim - new
        is_repeated = dim < 0 or shape[dim] != op.result[cut.dim]
        yield op.rule_of([WHOLE if is_repeated else Cut(dim, cut.outer)], cut, size=list(cut.part(op.result, op.n)))
    yield op.rule_of([SUM], SUM)


def permute(op: Op) -> Rules:
    rank = len(op.result)
    order = list(range(rank))
    if op.name == "permute.default":
        order = [dim % rank for dim in op.arg("dims")]
    elif rank >= 2:
        first, second = (0, 1) if op.name == "t.default" else (op.dim("dim0", rank), op.dim("dim1", rank))
        order[first], order[second] = order[second], order[first]
    for cut in op.cuts(op.shapes[0]):
        yield op.rule_of([cut], Cut(order.index(cut.dim), cut.outer))
    yield op.rule_of([SUM], SUM)


# ---------------------------------------------------------------------- parts of a dimension


def piece(size: int, start: int | None, end: int | None, step: int) -> tuple[int, int] | None:
    """(which, of how many) where a slice is one of equal pieces.

    >>> piece(12, 4, 8, 1), piece(12, 0, 5, 1), piece(12, 6, 2**63 - 1, 1)
    ((1, 3), None, (1, 2))
    """
    start, end = start or 0, size if end is None else min(end, size)
    start, end = start % size if start < 0 else start, end % size if end < 0 else end
    length = end - start
    if step != 1 or length <= 0 or size % length or start % length:
        return None
    return start // length, size // length


def slice_(op: Op) -> Rules:
    (shape,) = op.shapes
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape, [other for other in range(len(shape)) if other != dim]):
        yield op.rule_of([cut], cut)
    found = piece(shape[dim], op.arg("start"), op.arg("end"), op.arg("step"))
    if found is not None:
        which, count = found
        length = shape[dim] // count // op.n
        yield op.rule_of([Cut(dim, count)], Cut(dim), start=which * length, end=(which + 1) * length)
    yield op.rule_of([SUM], SUM)


def slice_backward(op: Op) -> Rules:
    shape = op.result
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape, [other for other in range(len(shape)) if other != dim]):
        yield op.rule_of([cut], cut, input_sizes=list(cut.part(shape, op.n)))
    found = piece(shape[dim], op.arg("start"), op.arg("end"), op.arg("step"))
    if found is not None:
        which, count = found
        length = shape[dim] // count // op.n
        sizes = list(Cut(dim).part(shape, op.n))
        yield op.rule_of([Cut(dim)], Cut(dim, count), input_sizes=sizes, start=which * length, end=(which + 1) * length)
    yield op.rule_of([SUM], SUM)


def select(op: Op) -> Rules:
    (shape,) = op.shapes
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape, [other for other in range(len(shape)) if other != dim]):
        yield op.rule_of([cut], Cut(cut.dim - (cut.dim > dim), cut.outer))
    yield op.rule_of([SUM], SUM)


def select_backward(op: Op) -> Rules:
    shape = op.result
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape, [other for other in range(len(shape)) if other != dim]):
        yield op.rule_of([Cut(cut.dim - (cut.dim > dim), cut.outer)], cut, input_sizes=list(cut.part(shape, op.n)))
    yield op.rule_of([SUM], SUM)


def unbind(op: Op) -> Rules:
    yield from select(op)


def split(op: Op) -> Rules:
    (shape,) = op.shapes
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape, [other for other in range(len(shape)) if other != dim]):
        yield op.rule_of([cut], cut)
    count, sizes = len(op.results), {each[dim] for each in op.results if each is not None}
    if len(sizes) == 1:
        (size,) = sizes
        local: dict[str, object] = {"split_size": size // op.n}
        if op.name == "split_with_sizes.default":
            local = {"split_sizes": [size // op.n] * count}
        yield op.rule_of([Cut(dim, count)], Cut(dim), **local)
    yield op.rule_of([SUM], SUM)


def cat(op: Op) -> Rules:
    rank, count = len(op.result), len(op.shapes)
    dim = op.dim("dim", rank)
    if any(len(shape) != rank for shape in op.shapes):  # an empty tensor of one dimension, which cat leaves out
        return
    for cut in op.cuts(op.result, [other for other in range(rank) if other != dim]):
        yield op.rule_of([cut] * count, cut)
    if len(set(op.shapes)) == 1:
        yield op.rule_of([Cut(dim)] * count, Cut(dim, count))
    yield op.rule_of([SUM] * count, SUM)


def stack(op: Op) -> Rules:
    dim, count = op.dim("dim", len(op.result)), len(op.shapes)
    for cut in op.cuts(op.shapes[0]):
        yield op.rule_of([cut] * count, Cut(cut.dim + (cut.dim >= dim), cut.outer))
    yield op.rule_of([SUM] * count, SUM)


def outers_of(op: Op) -> Iterator[tuple[int, int]]:
    """(size of a dimension, what it holds side by side) that this op shows."""
    if op.name in ("view.default", "_unsafe_view.default"):
        for a, b in ((op.shapes[0], op.result), (op.result, op.shapes[0])):
            for mine, theirs in runs(_long(a), _long(b)):
                yield from _flattened(_long(a)[mine.start : mine.stop], _long(b)[theirs.start : theirs.stop])
    elif op.name.startswith("split") and len(set(op.results)) == 1:
        yield op.shapes[0][op.dim("dim", len(op.shapes[0]))], len(op.results)
    elif op.name == "cat.default" and len(set(op.shapes)) == 1:
        yield op.result[op.dim("dim", len(op.result))], len(op.shapes)


def _long(shape: Shape) -> Shape:
    return tuple(size for size in shape if size != 1)


def _flattened(several: Sequence[int], one: Sequence[int]) -> Iterator[tuple[int, int]]:
    if len(one) == 1 and len(several) > 1:
        for count in range(1, len(several)):
            yield one[0], math.prod(several[:count])
