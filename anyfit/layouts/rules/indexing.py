"""Ops that read or write at places given by a tensor of indices."""

from __future__ import annotations

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .op import Op, Rules


def embedding(op: Op) -> Rules:
    indices = op.shape("indices") or ()
    for cut in op.cuts(indices):
        yield op.rule({"indices": cut}, cut)
    for cut in op.cuts(op.shape("weight") or (), [1]):
        yield op.rule({"weight": cut}, Cut(len(indices), cut.outer))
    yield op.rule({"weight": Cut(0)}, SUM, form="own_embedding")
    yield op.rule({"weight": SUM}, SUM)


def embedding_backward(op: Op) -> Rules:
    gradient, indices = op.shape("grad_output") or (), op.shape("indices") or ()
    for cut in op.cuts(indices):
        if not op.arg("scale_grad_by_freq"):
            yield op.rule({"grad_output": cut, "indices": cut}, SUM)
    for cut in op.cuts(gradient, [len(indices)]):
        yield op.rule({"grad_output": cut}, Cut(1, cut.outer))
    yield op.rule({}, Cut(0), form="own_embedding_backward")
    yield op.rule({"grad_output": SUM}, SUM)


def _places(op: Op) -> tuple[int, int] | None:
    """Of a read or write by neighbouring index tensors of one shape: the first indexed dimension, and how many there are."""
    given = [at for at, each in enumerate(op.arg("indices")) if each is not None]
    shapes = {shape for shape, is_float in zip(op.shapes, op.floats, strict=True) if not is_float}
    if not given or given != list(range(given[0], given[0] + len(given))) or len(shapes) != 1:
        return None
    return given[0], len(given)


def index(op: Op) -> Rules:
    """self[..., i, j, ...]: the indexed dimensions become those of the indices."""
    found = _places(op)
    if found is None or not op.floats[0]:
        return
    first, count = found
    shape, indices = op.shapes[0], op.shapes[1]
    for cut in op.cuts(shape):
        if not first <= cut.dim < first + count:
            yield op.rule({"self": cut}, Cut(cut.dim + (len(indices) - count if cut.dim >= first else 0), cut.outer))
    for cut in op.cuts(indices):
        yield op.rule({"indices": cut}, Cut(cut.dim + first, cut.outer))
    yield op.rule({"self": SUM}, SUM)


def index_put(op: Op) -> Rules:
    """The way back: values are written, or added, where the indices say."""
    found = _places(op)
    values = op.shape("values")
    if found is None or not op.floats[0] or values is None:
        return
    first, count = found
    shape, indices = op.shapes[0], op.shapes[1]
    if len(values) != len(shape) - count + len(indices):  # broadcast
        return
    for cut in op.cuts(shape):
        if not first <= cut.dim < first + count:
            moved = Cut(cut.dim + (len(indices) - count if cut.dim >= first else 0), cut.outer)
            if values[moved.dim] == shape[cut.dim]:
                yield op.rule({"self": cut, "values": moved}, cut)
    if op.arg("accumulate"):
        for cut in op.cuts(indices):
            yield op.rule({"self": SUM, "indices": cut, "values": Cut(cut.dim + first, cut.outer)}, SUM)
        yield op.rule({"self": SUM, "values": SUM}, SUM)


def gather(op: Op) -> Rules:
    """Reads along one dimension. Along the others, tensor and indices are cut alike where both have them whole."""
    shape, indices = op.shape("self") or (), op.shape("index") or ()
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(indices):
        if cut.dim == dim:
            yield op.rule({"index": cut}, cut)
        elif indices[cut.dim] == shape[cut.dim]:
            yield op.rule({"self": cut, "index": cut}, cut)
    yield op.rule({"self": SUM}, SUM)


def scatter(op: Op) -> Rules:
    """Writes along one dimension. What is written may be larger than the indices, of which it is the beginning then."""
    shape, indices, written = op.shape("self") or (), op.shape("index") or (), op.shape("src")
    dim = op.dim("dim", len(shape))
    adds = op.name == "scatter_add.default"
    for cut in op.cuts(indices):
        if written is not None and written[cut.dim] != indices[cut.dim]:
            continue
        if cut.dim != dim and indices[cut.dim] == shape[cut.dim]:
            yield op.rule({"self": cut, "index": cut, "src": cut}, cut)
        elif cut.dim == dim and adds:
            yield op.rule({"self": SUM, "index": cut, "src": cut}, SUM)
    if "src" in {each.name for each in op.node.target._schema.arguments}:  # type: ignore[union-attr]
        yield op.rule({"self": SUM, "src": SUM}, SUM)


def index_select(op: Op) -> Rules:
    shape = op.shape("self") or ()
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape):
        if cut.dim != dim:
            yield op.rule({"self": cut}, cut)
    for cut in op.cuts(op.shape("index") or ()):
        yield op.rule({"index": cut}, Cut(dim, cut.outer))
    yield op.rule({"self": SUM}, SUM)


def index_add(op: Op) -> Rules:
    shape = op.shape("self") or ()
    dim = op.dim("dim", len(shape))
    for cut in op.cuts(shape):
        if cut.dim != dim:
            yield op.rule({"self": cut, "source": cut}, cut)
    for cut in op.cuts(op.shape("index") or ()):
        added: Held = Cut(dim, cut.outer)
        yield op.rule({"self": SUM, "index": cut, "source": added}, SUM)
    yield op.rule({"self": SUM, "source": SUM, "index": WHOLE}, SUM)
