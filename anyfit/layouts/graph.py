"""The captured graph made plain: no op twice, none that only renames, and which part of it is forward.

Forward is what the outputs need, and every random op; all else is backward, though it may not depend on a gradient: eager makes
it there too, and it need not be kept. A backward op that equals one of forward is taken from there only where it is a view,
which takes no memory.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx

Output: TypeAlias = fx.Node | int | float | bool | str | None
FILL = torch.ops.aten.full.default
RENAMES = {"aten.detach.default", "aten.alias.default", "aten.lift_fresh_copy.default"}
KEEPS_IF_SHAPE = {
    "aten.view.default",
    "aten._unsafe_view.default",
    "aten.expand.default",
    "aten.slice.Tensor",
}
# By op, the number; None: the second argument. What is empty is filled later, and then it does not matter with what.
FILLED = {
    "aten.zeros_like.default": 0, "aten.ones_like.default": 1, "aten.empty_like.default": 0, "aten.new_zeros.default": 0,
    "aten.new_ones.default": 1, "aten.full_like.default": None,
}  # fmt: skip
VIEWS = {
    "aten.view.default", "aten._unsafe_view.default", "aten.t.default", "aten.transpose.int",
    "aten.permute.default", "aten.expand.default", "aten.unsqueeze.default", "aten.squeeze.dim", "aten.squeeze.dims",
    "aten.select.int", "aten.slice.Tensor", "aten.split.Tensor", "aten.split_with_sizes.default", "aten.unbind.int",
    "aten.as_strided.default", "aten.unfold.default", "aten.diagonal.default",
}  # fmt: skip


def name_of(node: fx.Node) -> str:
    return "getitem" if node.target is operator.getitem else _written(node.target)


@functools.cache
def _written(target: Any) -> str:
    return str(target)


def is_view(node: fx.Node) -> bool:
    if node.op != "call_function":
        return False
    return is_view(_first(node)) if node.target is operator.getitem else name_of(node) in VIEWS


def _first(node: fx.Node) -> fx.Node:
    first = node.args[0]
    assert isinstance(first, fx.Node)
    return first


def is_random(node: fx.Node) -> bool:
    if node.op != "call_function" or not isinstance(node.target, torch._ops.OpOverload):
        return False
    return torch.Tag.nondeterministic_seeded in node.target.tags and not _has_no_dropout(node)


def _has_no_dropout(node: fx.Node) -> bool:
    """Attention kernels draw only where some of it is dropped, and in forward: backward is given the state they drew from."""
    if "attention" not in str(node.target):
        return False
    if "_backward" in str(node.target):
        return True
    named = {argument.name: value for argument, value in zip(node.target._schema.arguments, node.args, strict=False)}  # type: ignore[union-attr]
    return bool((named | dict(node.kwargs)).get("dropout_p", 0.0) == 0.0)


def value_of(node: fx.Node) -> Any:
    """What the node gave when it was captured, without data: a tensor, or several."""
    return node.meta["val"]


def tensors_of(node: fx.Node) -> list[Tensor | None]:
    """The results of an op, one by one."""
    value = value_of(node)
    return [value] if isinstance(value, Tensor) else [each if isinstance(each, Tensor) else None for each in value]


def reads_of(node: fx.Node) -> list[fx.Node]:
    """The tensors that it reads, in order, as often as it does."""
    found: list[fx.Node] = []
    fx.map_arg((node.args, node.kwargs), lambda each: found.append(each) if isinstance(value_of(each), Tensor) else None)
    return found


def cleaned(module: fx.GraphModule, output_count: int) -> tuple[fx.GraphModule, tuple[Output, ...], tuple[Output, ...]]:
    """The graph, its outputs and its gradients."""
    graph = module.graph
    for node in list(graph.nodes):
        same = _same(node) if node.op == "call_function" else None
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        elif name_of(node) in FILLED:
            _fill(graph, node)
    graph.eliminate_dead_code(lambda node: node.op in ("placeholder", "output") or is_random(node))
    _mark_forward(graph, output_count)
    _merge(graph)
    graph.lint()
    module.recompile()
    (results,) = graph.output_node().args
    outputs, gradients = results[:output_count], results[output_count:]  # type: ignore[index]
    return module, tuple(outputs), tuple(gradients)  # type: ignore[arg-type]


def _same(node: fx.Node) -> fx.Node | None:
    """What it is another name of: it keeps the shape, or is the transpose of a transpose."""
    name = name_of(node)
    if name == "aten.t.default" and name_of(_first(node)) == name:
        return _first(_first(node))
    if name in RENAMES or (name in KEEPS_IF_SHAPE and value_of(_first(node)).shape == value_of(node).shape):
        return _first(node)
    return None


def _fill(graph: fx.Graph, node: fx.Node) -> None:
    """One number everywhere, whatever tensor gave the shape: so the op reads none."""
    value, number = value_of(node), FILLED[name_of(node)]
    with graph.inserting_before(node):
        made = graph.call_function(
            FILL,
            (list(value.shape), node.args[1] if number is None else number),
            {"dtype": value.dtype, "device": value.device},
        )
    made.meta["val"] = value
    node.replace_all_uses_with(made)
    graph.erase_node(node)


def _mark_forward(graph: fx.Graph, output_count: int) -> None:
    end = graph.output_node()
    (results,) = end.args
    flat = list(torch.utils._pytree.tree_leaves(results))
    end.args = (tuple(flat),)
    needed = ancestors(graph, [*flat[:output_count], *filter(is_random, graph.nodes)])
    for node in graph.nodes:
        node.meta["forward"] = node in needed


def ancestors(graph: fx.Graph, ends: Iterable[Any]) -> set[fx.Node]:
    """The nodes among them, and all that these are made from."""
    found = {each for each in ends if isinstance(each, fx.Node)}
    for node in reversed(graph.nodes):
        if node in found:
            found.update(node.all_input_nodes)
    return found


def is_forward(node: fx.Node) -> bool:
    return bool(node.meta["forward"])


def _merge(graph: fx.Graph) -> None:
    first: dict[Any, fx.Node] = {}
    for node in list(graph.nodes):
        if node.op != "call_function" or is_random(node):
            continue
        lies = value_of(node).stride() if node.target is FILL else ()  # in what order numbers are drawn for it
        key = (node.target, _key(node.args), _key(node.kwargs), lies)
        parts = [key, (*key, is_forward(node))]
        same = first.get(parts[0] if is_view(node) else parts[1])
        if same is not None:
            node.replace_all_uses_with(same)
            graph.erase_node(node)
        else:
            first.update({part: node for part in parts if part not in first})


def _key(item: Any) -> Any:
    if isinstance(item, list | tuple):
        return tuple(_key(each) for each in item)
    if isinstance(item, dict):
        return tuple((name, _key(each)) for name, each in sorted(item.items()))
    return item if isinstance(item, fx.Node) else (type(item), item)


def written(module: fx.GraphModule, *, with_sizes: bool) -> str:
    """The graph as text. Two that are equal do the same; without sizes, but for numbers."""
    numbers = {node: f"%{at}" for at, node in enumerate(module.graph.nodes)}

    def say(item: Any) -> str:
        if isinstance(item, fx.Node):
            return numbers[item]
        if isinstance(item, list | tuple):
            return f"[{', '.join(map(say, item))}]"
        if isinstance(item, dict):
            return f"{{{', '.join(f'{name}: {say(each)}' for name, each in sorted(item.items()))}}}"
        return "#" if type(item) is int and not with_sizes else repr(item)

    def of(node: fx.Node) -> str:
        target = repr(getattr(module, str(node.target)).tolist()) if node.op == "get_attr" else str(node.target)
        forms = [f"{each.dtype}{tuple(each.shape) if with_sizes else each.dim()}" for each in _all_tensors(node)]
        if with_sizes and is_random(node):
            forms += [str(value_of(each).stride()) for each in reads_of(node)]
        return (
            f"{node.op} {target if node.op != 'placeholder' else ''} {say(node.args)} {say(dict(node.kwargs))} {' '.join(forms)}"
        )

    return "\n".join(map(of, module.graph.nodes))


def _all_tensors(node: fx.Node) -> list[Tensor]:
    return [each for each in tensors_of(node) if each is not None] if "val" in node.meta else []
