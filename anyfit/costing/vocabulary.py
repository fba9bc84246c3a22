"""What one rank of a tensor axis does outside of blocks where tables of words are divided by rows (layouts/vocabulary.py).

An op is of the words if a tensor that it is given has a dimension as long as a divided table: products with the table, and all
that is done to logits. A rank does its share of it. Exchanged are

    what is looked up          summed, each time
    a product over the words   summed: the gradient of what the head was given
    log-softmax, and its loss  a number or two for each row
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from anyfit.values.call import Call, TensorForm
from anyfit.values.cut_figures import Moving
from anyfit.values.graph import Graph

ROW_BYTES = 4  # of a row's number
LOOKS_UP = "embedding.default"
OF_TABLES = ("embedding_dense_backward.default",)  # is told how many words there are
PRODUCTS = ("mm.default", "addmm.default", "bmm.default", "baddbmm.default")
GIVES_ROWS = ("_log_softmax.default", "_log_softmax_backward_data.default", "nll_loss_forward.default")


@dataclass(frozen=True)
class OfWords:
    ops: dict[int, float] = field(default_factory=dict)  # by index: a rank's share of an op
    values: dict[int, float] = field(default_factory=dict)  # of a storage
    exchanges: dict[int, Moving] = field(default_factory=dict)  # after which op


def of_words(graph: Graph, tables: Collection[str], n: int) -> OfWords:
    sizes = {each.shape[0] for each in graph.parameters if each.name in tables}
    found, share = OfWords(), max((-(-size // n) / size for size in sizes), default=1.0)
    for index, op in enumerate(graph.ops if sizes else ()):
        call = _Given.of(graph.calls[op.call], sizes) if op.block == graph.outside else None
        if call is None or not call.has_words:
            continue
        values = [graph.values[at] for at in graph.writes[index]]
        made = [each for each in values if each.born == index and each.kind != "gradient"]
        if op.name != LOOKS_UP:
            found.ops[index] = share
            if call.gives_words:
                wide = (at for at in graph.writes[index] if graph.values[at] in made and graph.values[at].bytes >= min(sizes))
                found.values.update(dict.fromkeys(wide, share))
        size = sum(each.bytes for each in made) if op.name == LOOKS_UP or call.sums_words else 0.0
        size += ROW_BYTES * n * call.rows if op.name in GIVES_ROWS else 0.0
        if size:
            found.exchanges[index] = Moving("all_reduce", size / graph.micro_batch)
    return found


@dataclass(frozen=True)
class _Given:
    """What an op was given, by the sizes of its tensors."""

    op: str
    shapes: tuple[tuple[int, ...], ...]
    sizes: frozenset[int]  # of tables
    has_words: bool

    @classmethod
    def of(cls, text: str, sizes: Collection[int]) -> _Given:
        call, known = Call.read(text), frozenset(sizes)
        shapes = tuple(each.shape for each in (*call.arguments, *call.options.values()) if isinstance(each, TensorForm))
        named = {each for each in call.arguments if isinstance(each, int)} if call.op in OF_TABLES else set[int]()
        return cls(call.op, shapes, known, bool(known & named.union(*shapes)))

    @property
    def _product(self) -> tuple[tuple[int, ...], tuple[int, ...]] | None:
        """The two matrices of a product: the last two tensors that it was given."""
        if self.op not in PRODUCTS or len(self.shapes) < 2:
            return None
        return self.shapes[-2][-2:], self.shapes[-1][-2:]

    @property
    def gives_words(self) -> bool:
        return self._product is None or not self.sizes.isdisjoint((self._product[0][0], self._product[1][1]))

    @property
    def sums_words(self) -> bool:
        return self._product is not None and self._product[0][1] in self.sizes

    @property
    def rows(self) -> int:
        return max(math.prod(shape) // max(self.sizes.intersection(shape), default=1) for shape in self.shapes)
