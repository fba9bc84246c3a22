"""What a rank has of a tensor, how parts make the tensor again, and the one op that a rank makes under a rule, as code.

`part` and `joined` are what `Cut` means, in torch. `expression` writes one op as a rank makes it; generated blocks are made of
these expressions, and the checker runs the same ones.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from anyfit.values.cuts import Cut, Held

from .forms import FORMS
from .graph import FILL, is_random, name_of, reads_of, value_of
from .rules.op import Rule

aten = torch.ops.aten
NEEDS_CONTIGUOUS = {
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default", "aten.as_strided.default", "aten.as_strided_scatter.default",
}  # fmt: skip
AS_RESHAPE = {"aten.view.default": "size", "aten._unsafe_view.default": "size"}  # a part may lie otherwise in memory


def part(x: Tensor, cut: Cut, n: int, rank: int) -> Tensor:
    """Contiguous: some kernels take that for granted, and layer norm's backward is silently wrong without.

    >>> part(torch.arange(12), Cut(0, outer=3), 2, 1)
    tensor([ 2,  3,  6,  7, 10, 11])
    """
    if cut.outer == 1:
        size = x.shape[cut.dim] // n
        return x.narrow(cut.dim, rank * size, size).contiguous()
    seen: Tensor = x.unflatten(cut.dim, (cut.outer, n, -1))
    return seen.select(cut.dim + 1, rank).flatten(cut.dim, cut.dim + 1).contiguous()


def rows_of(x: Tensor, dim: int, n: int, rank: int) -> Tensor:
    """As `part`, where n need not divide the dimension: the last rank has fewer.

    >>> rows_of(torch.arange(7), 0, 3, 2)
    tensor([6])
    """
    size = -(-x.shape[dim] // n)
    return x.narrow(dim, rank * size, min(size, x.shape[dim] - rank * size)).contiguous()


def filled_up(x: Tensor, dim: int, size: int) -> Tensor:
    """With zeros behind it, up to this length."""
    missing = size - x.shape[dim]
    return x if not missing else torch.cat([x, x.new_zeros((*x.shape[:dim], missing, *x.shape[dim + 1 :]))], dim)


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """
    >>> joined([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], Cut(0, outer=2))
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if cut.outer == 1:
        return torch.cat(list(parts), cut.dim)
    seen = [each.unflatten(cut.dim, (cut.outer, -1)) for each in parts]
    return torch.stack(seen, cut.dim + 1).flatten(cut.dim, cut.dim + 2)


def contiguous_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """
    >>> contiguous_strides((2, 3, 4))
    (12, 4, 1)
    """
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def lying(x: Tensor, strides: Sequence[int]) -> Tensor:
    """The same, in the order of memory that these strides have; as it is, where they leave gaps or repeat."""
    order = sorted(range(x.dim()), key=lambda dim: -strides[dim])
    is_dense = [strides[dim] for dim in order] == list(contiguous_strides([x.shape[dim] for dim in order]))
    if not is_dense or x.stride() == tuple(strides) or x.permute(order).is_contiguous():
        return x
    back = sorted(range(x.dim()), key=order.__getitem__)
    return x.permute(order).contiguous().permute(back)


def expression(node: fx.Node, rule: Rule, reads: Sequence[str], n: int, constants: dict[str, Any]) -> str:
    """The op as code. `reads` are the names of the local tensors; constants that have no literal are put by name."""
    names = iter(reads)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    local = dict(rule.local)
    positions = {argument.name: at for at, argument in enumerate(target._schema.arguments)}

    def say(item: Any) -> str:
        if isinstance(item, fx.Node):
            return _lying(node, item, next(names))
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(say, item))}]"
        return _constant(item, constants)

    args = [
        _constant(local[name], constants) if name in local else say(value)
        for name, value in zip(positions, node.args, strict=False)
    ]
    if "efficient_attention" in name_of(node) and isinstance(node.args[positions["attn_bias"]], fx.Node):
        args[positions["attn_bias"]] = f"aligned({args[positions['attn_bias']]})"
    options = {name: say(value) for name, value in node.kwargs.items()}
    for name, value in local.items():
        if positions[name] >= len(node.args):
            options[name] = _constant(value, constants)
    if name_of(node) in AS_RESHAPE:
        return f"{args[0]}.reshape({args[1]})"
    if rule.form in FORMS:
        return f"{rule.form}({', '.join(['axis', *args, *(f'{name}={value}' for name, value in options.items())])})"
    given = reads[0] if reads else ""
    if rule.form == "drawn":
        args[0] = _empty(given, value_of(reads_of(node)[0]))
    op = f"aten.{name_of(node).removeprefix('aten.')}" if target.namespace == "aten" else _constant(target, constants)
    called = f"{op}({', '.join([*args, *(f'{name}={value}' for name, value in options.items())])})"
    if name_of(node) == "aten.bernoulli.p" and reads_of(node)[0].target is FILL:  # eager fills an empty tensor, as dropout does
        called = f"{_empty(given, value_of(reads_of(node)[0]))}.bernoulli_({args[1]})"
    if rule.form == "averaged":
        return f"{called} / {n}"
    if rule.form == "drawn" and len(rule.gives) > 1:
        return f"dropped({given}, part({called}[1], {rule.gives[0]!r}, {n}, rank), {args[1]})"
    if rule.form == "drawn":
        return f"part({called}, {rule.gives[0]!r}, {n}, rank)"
    return called


def _empty(like: str, whole: Tensor) -> str:
    """A tensor to draw for: it lies in memory as eager's own does, since numbers are drawn in the order of memory."""
    if whole.is_contiguous():
        return f"{like}.new_empty({list(whole.shape)})"
    return f"{like}.new_empty_strided({list(whole.shape)}, {list(whole.stride())})"


def dropped(x: Tensor, mask: Tensor, p: float) -> tuple[Tensor, Tensor]:
    """Dropout by a mask that is there: dropout's backward does to its gradient what forward does to the input."""
    return aten.native_dropout_backward(x, mask, 0.0 if p == 1 else 1 / (1 - p)), mask


def aligned(bias: Tensor) -> Tensor:
    """The same numbers, with rows that begin at multiples of 16 elements: the efficient kernel wants that, so eager pads."""
    if bias.stride(-2) % 16 == 0 or bias.shape[-2] == 1:
        return bias
    padded: Tensor = aten.constant_pad_nd(bias, [0, -bias.shape[-1] % 16])
    return padded[..., : bias.shape[-1]]


def _lying(node: fx.Node, given: fx.Node, name: str) -> str:
    """A part that lies in memory as the op wants it. A grouped product takes groups of any size only along a dimension that is
    not the innermost in memory, so what was read transposed stays so; random numbers are drawn in the order of memory."""
    if name_of(node) in NEEDS_CONTIGUOUS:
        return f"{name}.contiguous()"
    value = value_of(given)
    if is_random(node) and isinstance(value, Tensor) and value.dim() > 1:
        return f"lying({name}, {list(value.stride())})"
    is_transposed = isinstance(value, Tensor) and value.dim() > 1 and value.stride(-2) == 1 != value.stride(-1)
    return f"{name}.mT.contiguous().mT" if name_of(node) == "aten._grouped_mm.default" and is_transposed else name


def _constant(item: Any, constants: dict[str, Any]) -> str:
    """
    >>> _constant([1, None, 0.5], {})
    '[1, None, 0.5]'
    """
    if isinstance(item, bool | int | str | None) or (isinstance(item, float) and item == item and abs(item) != float("inf")):
        return repr(item)
    if isinstance(item, list | tuple):
        return f"[{', '.join(_constant(each, constants) for each in item)}]"
    for name, known in constants.items():
        if known is item:
            return name
    name = f"constant_{len(constants)}"
    constants[name] = item
    return name


def names_in_code() -> dict[str, Any]:
    """What every expression may name."""
    own = {each.__name__: each for each in (part, dropped, aligned, lying)}
    return {"aten": aten, "Cut": Cut, "torch": torch, **own, **FORMS}


def as_held(x: Tensor, held: Held, n: int, rank: int) -> Tensor:
    """What a rank has of a whole tensor, summands aside."""
    return part(x, held, n, rank) if isinstance(held, Cut) else x
