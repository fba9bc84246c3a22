"""The blocks a model is a chain of, found by structure: siblings that are built alike, whatever they are called.

Two modules are alike when their trees of classes, parameters, buffers, plain attributes, hooks and functions are the same. An
attribute that only counts the siblings (a layer's index) does not make them differ. Members of a list are blocks also where they
are built alike but for their attributes, as layers are whose share of dropped paths grows with depth. Two siblings that hold
longer lists of their own are towers, and their layers are the blocks.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import types
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from anyfit.values.compiled import code_of
from anyfit.values.graph import Block

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class Chain:
    """Sibling blocks in one container, by index into the model's blocks, with what each is built like."""

    first: int
    kinds: tuple[str, ...]


@dataclass(frozen=True)
class Blocks:
    blocks: tuple[Block, ...]  # the last one, without a name, is what lies outside all others
    modules: tuple[nn.Module, ...]  # of each block but the last
    chains: tuple[Chain, ...]
    of_module: dict[int, int]  # by module identity, for modules inside blocks

    @property
    def outside(self) -> int:
        return len(self.blocks) - 1


def find_blocks(model: nn.Module) -> Blocks:
    """Blocks are siblings of which at least two are alike, in a list at least in form, outermost first."""
    blocks: list[Block] = []
    modules: list[nn.Module] = []
    chains: list[Chain] = []
    of_module: dict[int, int] = {}

    def visit(module: nn.Module, path: str) -> None:
        children = [(name, child) for name, child in _members(module) if any(True for _ in child.parameters())]
        counting = _counters([child for _, child in children])
        kinds = [_signature(child, counting) for _, child in children]
        is_list = isinstance(module, nn.ModuleList | nn.Sequential)
        composite = any(any(True for _ in child.children()) for _, child in children)
        forms = [_form(child) for _, child in children] if is_list and composite else kinds
        if not is_list:  # layers by name; of what has no parts, such as two projections, a model is no chain
            forms = [kind for kind, (_, child) in zip(kinds, children, strict=True) if any(True for _ in child.children())]
        alike = max(Counter(forms).values(), default=0)
        if alike > 1 and (is_list or not _are_towers([child for _, child in children], alike)):
            chains.append(Chain(len(blocks), tuple(kinds)))
            for name, child in children:
                for inner in child.modules():
                    of_module[id(inner)] = len(blocks)
                blocks.append(Block(f"{path}.{name}" if path else name, type(child).__name__, code=code_of(child)))
                modules.append(child)
            return
        for name, child in children:
            visit(child, f"{path}.{name}" if path else name)

    visit(model, "")
    blocks.append(Block("", type(model).__name__))
    return Blocks(tuple(blocks), tuple(modules), tuple(chains), of_module)


def _members(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Its children; of a list of lists, which nobody calls, what is in those."""
    for name, child in module.named_children():
        if isinstance(module, nn.ModuleList) and isinstance(child, nn.ModuleList):
            yield from ((f"{name}.{inner}", each) for inner, each in _members(child))
        else:
            yield name, child


def _are_towers(siblings: Sequence[nn.Module], alike: int) -> bool:
    """Whether they are two encoders of one kind, say, whose layers are the blocks."""
    lists = [each for sibling in siblings for each in sibling.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
    longest = max((max(Counter(map(_form, each)).values(), default=0) for each in lists), default=0)
    return alike == 2 and longest > alike


def kinds_of(model: nn.Module) -> dict[str, str]:
    """By block, what it is built like."""
    found = find_blocks(model)
    return {found.blocks[chain.first + place].name: kind for chain in found.chains for place, kind in enumerate(chain.kinds)}


def _counters(siblings: Sequence[nn.Module]) -> set[tuple[str, str]]:
    """Attributes that count the siblings: (path, name) of every whole number that grows by one from each to the next."""
    numbers = [
        {(path, key): value for path, inner in module.named_modules() for key, value in vars(inner).items() if type(value) is int}
        for module in siblings
    ]
    common = set.intersection(*(set(each) for each in numbers)) if numbers else set()
    return {key for key in common if all(each[key] == numbers[0][key] + index for index, each in enumerate(numbers))}


def _form(module: nn.Module) -> tuple[Any, ...]:
    """Its class, those of modules inside that have parameters of their own, and the shapes of these."""
    inside = ((path, _name_of(inner)) for path, inner in module.named_modules() if inner._parameters)
    return _name_of(module), *inside, *((name, tuple(each.shape)) for name, each in module.named_parameters())


def _name_of(module: nn.Module) -> str:
    """Of its class: a module whose weight is made of others (torch.nn.utils.parametrize) has a class of its own."""
    return f"{type(module).__module__}.{type(module).__qualname__}"


def _signature(module: nn.Module, counting: set[tuple[str, str]]) -> str:
    parts: list[str] = []
    for path, inner in module.named_modules():
        parts.append(f"{path}:{_name_of(inner)}")
        for kind, tensors in (("p", inner._parameters), ("b", inner._buffers)):
            for key, tensor in tensors.items():
                shape = None if tensor is None else (tuple(tensor.shape), str(tensor.dtype), tensor.requires_grad)
                parts.append(f"{kind}{key}{shape}")
        for key, value in sorted(vars(inner).items()):
            if isinstance(value, PLAIN) and (path, key) not in counting:
                parts.append(f"{key}={value!r}")
            elif callable(value) and not isinstance(value, type):  # a forward that was patched, an activation
                parts.append(f"{key}={_code_of(value)}")
        for hooks in (inner._forward_pre_hooks, inner._forward_hooks, inner._backward_hooks, inner._backward_pre_hooks):
            parts.append(f"hooks={[_code_of(hook) for hook in hooks.values()]}")
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]


def _code_of(called: Any, depth: int = 4) -> str:
    """What it runs, and the plain values that it runs with: the same for functions that do the same."""
    if isinstance(called, functools.partial):
        given = [each for each in (*called.args, *called.keywords.values()) if isinstance(each, PLAIN)]
        return f"{_code_of(called.func, depth)}{given!r}"
    function = getattr(called, "__func__", called)
    if not isinstance(function, types.FunctionType):
        return type(called).__qualname__
    held = list(function.__defaults__ or ())
    for cell in function.__closure__ or ():
        with contextlib.suppress(ValueError):  # empty
            held.append(cell.cell_contents)
    plain = [each for each in held if isinstance(each, PLAIN)]
    inner = [_code_of(each, depth - 1) for each in held if depth and isinstance(each, types.FunctionType | types.MethodType)]
    return f"{id(function.__code__)}{plain!r}{inner!r}"
