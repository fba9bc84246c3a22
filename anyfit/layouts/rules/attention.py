"""Attention kernels, the CPU's and CUDA's: by rows or heads; by queries too, where no causal mask is implied.

A part of the queries would begin its causal mask anew. Attention that drops some of itself is not cut: which weights it drops
depends on the kernel's launch. What the kernels give beside their output:

    kernel       logsumexp              besides
    CPU          rows, heads, queries
    flash        rows, heads, queries   lengths, a generator's state, a mask of nothing: whole, and read by no one
    efficient    queries, up to 32s     a generator's state
    cuDNN        queries, 1             lengths, a generator's state
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from torch import fx

from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from ..graph import name_of
from .op import Op, Rules, Shape

ROWS, HEADS, QUERIES = 0, 1, 2
MASKS = ("attn_mask", "attn_bias")  # as the kernels call it
GRADIENTS = ("grad_out", "grad_out_")
ALIGNED = 32  # of the efficient kernel's logsumexp


def attention(op: Op) -> Rules:
    for dim in _dims(op):
        by_key = dict.fromkeys(("key", "value"), Cut(dim)) if dim != QUERIES else {}
        gives: list[Held] = [WHOLE] * len(op.results)
        gives[0] = Cut(dim)
        if op.results[1] is not None and 0 not in op.results[1]:
            gives[1] = Cut(dim)
        yield op.rule({"query": Cut(dim), **by_key, **_of_masks(op, dim)}, *gives)


def attention_backward(op: Op) -> Rules:
    by_query = (*GRADIENTS, "query", "out", "logsumexp")
    for dim in _dims(op):
        reads: dict[str, Held] = dict.fromkeys((*by_query, *(("key", "value") if dim != QUERIES else ())), Cut(dim))
        of_key: Held = SUM if dim == QUERIES else Cut(dim)
        gives: list[Held] = [Cut(dim), of_key, of_key]
        gives += [_of_masks(op, dim).get("attn_bias", WHOLE)] * (len(op.results) - len(gives))
        gives = [SUM if at > 2 and held == WHOLE and op.results[at] else held for at, held in enumerate(gives)]  # broadcast
        local: dict[str, Any] = {"max_q": _query(op)[QUERIES] // op.n} if dim == QUERIES and op.has("max_q") else {}
        yield op.rule({**reads, **_of_masks(op, dim)}, *gives, **local)


def why_whole(nodes: Iterable[fx.Node], n: int) -> str:
    """Why the ranks of an axis would each make all of a block's attention; nothing where they can share it.

    A sequence that is cut needs its attention cut by heads. Keys and values that go round in a ring, which would do without, are
    not built.
    """
    for node in nodes:
        if "_scaled_dot_product" not in name_of(node) or "_backward" in name_of(node):
            continue
        op = Op(node, n, {})
        if any(op.allows(rule) for rule in attention(op)):
            continue
        (rows, heads, length, _), key = _query(op), op.shape("key") or ()
        if op.arg("dropout_p") != 0.0:
            return f"attention that drops {op.arg('dropout_p'):.0%} of itself inside its kernel is not cut; set its dropout to 0"
        shared = math.gcd(heads, key[1])
        fitting = [str(size) for size in range(2, n) if shared % size == 0]
        instead = f"a tensor axis of {' or '.join(fitting)} divides its heads" if fitting else "no smaller tensor axis does"
        few = f"{heads} heads" if key[1] == heads else f"{heads} heads on {key[1]} of keys"
        return (
            f"{n} ranks divide neither the {few} nor the {rows} rows of attention over {length} tokens, "
            f"so a cut sequence would be gathered whole on each; {instead}"
        )
    return ""


def _query(op: Op) -> Shape:
    query = op.shape("query")
    assert query is not None
    return query


def _dims(op: Op) -> Iterator[int]:
    if op.arg("dropout_p") != 0.0:
        return
    yield from (ROWS, HEADS)
    step = op.n * (ALIGNED if "efficient" in op.name else 1)
    if not op.arg("is_causal") and _query(op)[QUERIES] % step == 0:
        yield QUERIES


def _of_masks(op: Op, dim: int) -> dict[str, Held]:
    """A mask is cut with the dimension where it has it, and broadcast where not."""
    found: dict[str, Held] = {}
    for name in MASKS:
        mask = op.shape(name) if op.has(name) else None
        if mask is not None:
            own = dim - (4 - len(mask))
            found[name] = Cut(own) if own >= 0 and mask[own] == _query(op)[dim] else WHOLE
    return found
