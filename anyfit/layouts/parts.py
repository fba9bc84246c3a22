"""What a rank has of a tensor, how parts make the tensor again, and the one op that a rank makes under a rule, as code.

`part` and `joined` are what `Cut` means, in torch. `expression` writes one op as a rank makes it; generated blocks are made of
these expressions, and the checker runs the same ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from anyfit.values.cuts import Cut, Held

from .graph import name_of, tensors_of
from .rules.op import Rule

aten = torch.ops.aten
NEEDS_CONTIGUOUS = {
    "aten.native_layer_norm.default", "aten.native_layer_norm_backward.default", "aten.native_group_norm.default",
    "aten.native_group_norm_backward.default",
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


def joined(parts: Sequence[Tensor], cut: Cut) -> Tensor:
    """
    >>> joined([torch.tensor([0, 1, 4, 5]), torch.tensor([2, 3, 6, 7])], Cut(0, outer=2))
    tensor([0, 1, 2, 3, 4, 5, 6, 7])
    """
    if cut.outer == 1:
        return torch.cat(list(parts), cut.dim)
    seen = [each.unflatten(cut.dim, (cut.outer, -1)) for each in parts]
    return torch.stack(seen, cut.dim + 1).flatten(cut.dim, cut.dim + 2)


def expression(node: fx.Node, rule: Rule, reads: Sequence[str], n: int, constants: dict[str, Any]) -> str:
    """The op as code. `reads` are the names of the local tensors; constants that have no literal are put by name."""
    names = iter(reads)
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    local = dict(rule.local)
    positions = {argument.name: at for at, argument in enumerate(target._schema.arguments)}

    def say(item: Any) -> str:
        if isinstance(item, fx.Node):
            return f"{next(names)}.contiguous()" if name_of(node) in NEEDS_CONTIGUOUS else next(names)
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(say, item))}]"
        return _constant(item, constants)

    args = [
        _constant(local[name], constants) if name in local else say(value)
        for name, value in zip(positions, node.args, strict=False)
    ]
    options = {name: say(value) for name, value in node.kwargs.items()}
    for name, value in local.items():
        if positions[name] >= len(node.args):
            options[name] = _constant(value, constants)
    if name_of(node) in AS_RESHAPE:
        return f"{args[0]}.reshape({args[1]})"
    if rule.form == "drawn":
        (whole,) = [each for each in tensors_of(node) if each is not None]
        args[0] = f"{args[0]}.new_empty({list(whole.shape)})"
    op = f"aten.{name_of(node).removeprefix('aten.')}" if target.namespace == "aten" else _constant(target, constants)
    called = f"{op}({', '.join([*args, *(f'{name}={value}' for name, value in options.items())])})"
    if rule.form == "averaged":
        return f"{called} / {n}"
    if rule.form == "drawn":
        return f"part({called}, {rule.gives[0]!r}, {n}, rank)"
    return called


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
    return {"aten": aten, "part": part, "Cut": Cut, "torch": torch}


def as_held(x: Tensor, held: Held, n: int, rank: int) -> Tensor:
    """What a rank has of a whole tensor, summands aside."""
    return part(x, held, n, rank) if isinstance(held, Cut) else x
