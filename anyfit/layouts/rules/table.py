"""Which family an op belongs to, and all ways in which one call of it may be cut."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable

import torch
from torch import fx

from anyfit.values.cuts import WHOLE

from ..forms import FORMS
from ..graph import name_of
from . import along, attention, indexing, loss, making, products, views
from .op import Op, Outers, Rule, Rules
from .pointwise import POINTWISE, pointwise

FAMILIES: dict[str, Callable[[Op], Rules]] = {
    "mm.default": products.mm,
    "addmm.default": products.addmm,
    "bmm.default": products.bmm,
    "_grouped_mm.default": products.grouped,
    "convolution.default": products.convolution,
    "convolution_backward.default": products.convolution_backward,
    "view.default": views.view,
    "_unsafe_view.default": views.view,
    "unsqueeze.default": views.same_order,
    "squeeze.dim": views.same_order,
    "squeeze.dims": views.same_order,
    "expand.default": views.expand,
    "t.default": views.permute,
    "transpose.int": views.permute,
    "permute.default": views.permute,
    "slice.Tensor": views.slice_,
    "slice_backward.default": views.slice_backward,
    "select.int": views.select,
    "select_backward.default": views.select_backward,
    "unbind.int": views.unbind,
    "split.Tensor": views.split,
    "split_with_sizes.default": views.split,
    "cat.default": views.cat,
    "stack.default": views.stack,
    "sum.dim_IntList": along.reduction,
    "sum.default": along.reduction,
    "mean.dim": along.reduction,
    "mean.default": along.reduction,
    "amax.default": along.extreme,
    "amin.default": along.extreme,
    "max.dim": along.extreme,
    "argmax.default": along.extreme,
    "_softmax.default": along.along_one,
    "_log_softmax.default": along.log_softmax,
    "_safe_softmax.default": along.along_one,
    "_softmax_backward_data.default": along.along_one,
    "_log_softmax_backward_data.default": along.log_softmax_backward,
    "cumsum.default": along.along_one,
    "sort.default": along.along_one,
    "topk.default": along.along_one,
    "tril.default": along.along_last_two,
    "triu.default": along.along_last_two,
    "roll.default": along.moved,
    "flip.default": along.moved,
    "constant_pad_nd.default": along.moved,
    "native_layer_norm.default": along.layer_norm,
    "native_layer_norm_backward.default": along.layer_norm_backward,
    "_fused_rms_norm.default": along.layer_norm,
    "_fused_rms_norm_backward.default": along.layer_norm_backward,
    "native_group_norm.default": along.group_norm,
    "native_group_norm_backward.default": along.group_norm_backward,
    "_scaled_dot_product_flash_attention_for_cpu.default": attention.attention,
    "_scaled_dot_product_flash_attention_for_cpu_backward.default": attention.attention_backward,
    "_scaled_dot_product_flash_attention.default": attention.attention,
    "_scaled_dot_product_flash_attention_backward.default": attention.attention_backward,
    "_scaled_dot_product_efficient_attention.default": attention.attention,
    "_scaled_dot_product_efficient_attention_backward.default": attention.attention_backward,
    "_scaled_dot_product_cudnn_attention.default": attention.attention,
    "_scaled_dot_product_cudnn_attention_backward.default": attention.attention_backward,
    "embedding.default": indexing.embedding,
    "embedding_dense_backward.default": indexing.embedding_backward,
    "nll_loss_forward.default": loss.nll,
    "nll_loss_backward.default": loss.nll_backward,
    "index.Tensor": indexing.index,
    "index_put.default": indexing.index_put,
    "gather.default": indexing.gather,
    "scatter.src": indexing.scatter,
    "scatter.value": indexing.scatter,
    "scatter_add.default": indexing.scatter,
    "index_select.default": indexing.index_select,
    "index_add.default": indexing.index_add,
    "zeros.default": making.filled,
    "ones.default": making.filled,
    "full.default": making.filled,
    "bernoulli.p": making.drawn,
    "rand_like.default": making.drawn,
    "randn_like.default": making.drawn,
    "native_dropout.default": making.dropped,
}


def family_of(node: fx.Node) -> Callable[[Op], Rules] | None:
    name = name_of(node).removeprefix("aten.")
    if name in FAMILIES:
        return FAMILIES[name]
    is_pointwise = name in POINTWISE or torch.Tag.pointwise in getattr(node.target, "tags", ())
    seeded = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
    return pointwise if is_pointwise and not seeded else None


def rules_of(node: fx.Node, n: int, outers: Outers, wanted: Callable[[Rule], bool] | None = None) -> list[Rule]:
    """Whole first; that alone where no family knows the op. Or, of these, one that is wanted, or those."""
    op = Op(node, n, outers)
    found = [Rule((WHOLE,) * len(op.shapes), (WHOLE,) * len(op.results))]
    if wanted is not None:
        found = list(filter(wanted, found))
        if found:
            return found
    family = family_of(node)
    if family is None or any(0 in shape for shape in (*op.shapes, *filter(None, op.results[:1]))):
        return found
    for rule in family(op) if wanted is None else filter(wanted, family(op)):
        if rule not in found and op.allows(rule) and (n > 1 or rule.form not in FORMS):
            found.append(rule)
    return found


def outers_of(nodes: Iterable[fx.Node], n: int) -> Outers:
    """What dimensions of each size hold side by side, as the views and splits of a graph show."""
    found: defaultdict[int, set[int]] = defaultdict(set)
    for node in nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload):
            for size, outer in views.outers_of(Op(node, n, {})):
                found[size].add(outer)
    return {size: frozenset(each) for size, each in found.items()}
