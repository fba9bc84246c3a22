"""Guard: what a captured graph has frozen, so that a call under other conditions is noticed.

A graph is what one call did. Another call may use it only if all that can steer Python's way through the block is as it was:

    arguments     of tensors dtype, shape, strides, device and requires_grad; the values of all others
    modules       the train flag, plain attributes and hooks of every submodule; the attributes of objects they hold (configs)
    variables     what the forwards of submodules read from outside, themselves and through methods and functions of their files:
                  globals, what closures hold, attributes of classes and of imported modules. Plain values and containers
    parameters    dtype and requires_grad, of buffers the shape too: a parameter's own shape may be that of a rank's part
    settings      grad mode, autocast, default dtype, determinism, allowed attention kernels

`conditions` writes all of it down by name; two that differ say what is different.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import random
import types
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_EVERY_MODULE = set(vars(nn.Module())) - {"training"}
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
CONTAINERS = (list, dict, set, deque)  # whose contents may change

Conditions = Mapping[str, Hashable]


class NotCaptured(Exception):  # noqa: N818 -- says what is so, as NoPlan does
    """This block runs whole: the message names what cannot be captured."""


def conditions(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Hashable]:
    return dict(
        [
            *((f"argument {path}", form) for path, form in _arguments(args, kwargs)),
            ("order of arguments", tuple(path for path, _ in tensor_leaves(args, kwargs))),  # in which a graph takes them
            *_modules(block),
            *_variables(block),
            *((f"parameter {name}", (each.dtype, each.requires_grad)) for name, each in block.named_parameters()),
            *((f"buffer {name}", (each.dtype, tuple(each.shape))) for name, each in block.named_buffers()),
            *_settings(),
        ]
    )


def differences(before: Conditions, after: Conditions) -> list[str]:
    """Names of what is not the same."""
    missing = object()
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


def tensor_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among a call's arguments, each with the path to it."""
    found = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    return [(_path(path), leaf) for path, leaf in found if isinstance(leaf, Tensor)]


def _path(path: tuple[Any, ...]) -> str:
    """
    >>> found, _ = pytree.tree_flatten_with_path(((1,), {"mask": [2]}))
    >>> [_path(path) for path, _ in found]
    ['0', 'mask[0]']
    """
    first, *rest = path[1:]
    return str(getattr(first, "key", getattr(first, "idx", first))) + pytree.keystr(tuple(rest))


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        if isinstance(leaf, Tensor):
            yield _path(path), (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device, leaf.requires_grad)
        elif isinstance(leaf, PLAIN):
            yield _path(path), (type(leaf), leaf)
        else:
            instead = "; call the model with use_cache=False" if "Cache" in type(leaf).__name__ else ""
            raise NotCaptured(f"argument {_path(path)} is a {type(leaf).__name__}, which may change from call to call{instead}")


def attributes(block: nn.Module) -> Iterator[tuple[str, Any]]:
    """Of every submodule, by path and name."""
    for name, module in block.named_modules():
        inside = f"{name}." if name else ""
        for key, value in vars(module).items():
            if key not in OF_EVERY_MODULE and (name or key != "forward"):  # what stands for the block's own forward is ours
                yield f"{inside}{key}", value


def _modules(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    known: dict[int, Hashable] = {}  # of objects that several modules hold: configs are large
    for name, value in attributes(block):
        if isinstance(value, PLAIN):
            yield f"attribute {name}", (type(value), value)
            continue
        if id(value) not in known:
            known[id(value)] = frozen(value)
        yield f"attribute {name}", known[id(value)]
    for name, module in block.named_modules():
        if name:  # the block's own hooks run around its forward, whatever that is
            yield f"hooks of {name}", tuple(len(getattr(module, kind)) for kind in HOOKS)


def _variables(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    for name, value in _outside(block):
        if isinstance(value, PLAIN):
            yield f"variable {name}", (type(value), value)
        elif _is_data(value):
            yield f"variable {name}", frozen(value)


def _outside(block: nn.Module) -> Iterator[tuple[str, Any]]:
    for kind in _kinds(block):
        for name, read in _read_outside(kind):
            yield name, read()


def _kinds(block: nn.Module) -> dict[Any, None]:
    return dict.fromkeys(map(type, block.modules()))


def _is_data(value: Any) -> bool:
    """A container, or an object that a script has for its settings; not a logger or a registry, that change as they please."""
    kind = type(value)
    if isinstance(value, np.ndarray | np.generic):
        return True
    return kind in (tuple, *CONTAINERS, types.SimpleNamespace) or dataclasses.is_dataclass(kind)


@functools.cache
def _read_outside(kind: Any) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Of the variables that it names, functions aside: what each is now."""
    return tuple((name, read) for name, read in _named(kind) if not callable(read()))


def caches(block: nn.Module) -> list[Any]:
    """Functions that its forwards call and that keep what they gave."""
    found = [read() for kind in _kinds(block) for _, read in _named(kind)]
    return [each for each in found if isinstance(each, functools._lru_cache_wrapper)]


@functools.cache
def _named(kind: Any) -> tuple[tuple[str, Callable[[], Any]], ...]:
    """Of the variables that its forward names, and what it calls of its own methods and of functions of the same file."""
    found: dict[str, Callable[[], Any]] = {}
    functions = _definitions(kind, "forward")
    for function in functions:
        code, outside = getattr(function, "__code__", None), getattr(function, "__globals__", {})
        if code is None:
            continue
        names = [each for code_of in _codes(code) for each in code_of.co_names]
        for name in names:
            value = outside.get(name)
            called = [value] if isinstance(value, types.FunctionType) and value.__globals__ is outside else []
            functions += [each for each in (*called, *_definitions(kind, name)) if each not in functions]
            if isinstance(value, types.ModuleType):
                if not value.__name__.startswith("torch"):
                    found |= {f"{value.__name__}.{each}": functools.partial(getattr, value, each, None) for each in names}
            elif name in outside:  # else it is an attribute's, or Python's own
                found[f"{outside.get('__name__', '')}.{name}"] = functools.partial(outside.get, name)
            if any(name in vars(base) for base in _own_classes(kind)):
                found[f"{kind.__qualname__}.{name}"] = functools.partial(getattr, kind, name, None)
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            found[f"{function.__qualname__}.{name}"] = functools.partial(_content, cell)
    return tuple(found.items())


def _own_classes(kind: type[nn.Module]) -> Iterator[type]:
    """Those that it is made of, but for torch's."""
    return (each for each in kind.__mro__ if not each.__module__.startswith("torch.") and each is not object)


def _definitions(kind: type[nn.Module], name: str) -> list[Any]:
    """A method of this name, as each class defines it: one may call the other's."""
    found = []
    for base in _own_classes(kind):
        each = vars(base).get(name)
        each = getattr(each, "fget", None) or getattr(each, "__func__", each)  # of a property, or of a static or class method
        if callable(each) and not isinstance(each, type):
            found.append(inspect.unwrap(each))
    return found


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """With functions that are written inside."""
    yield code
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from _codes(each)


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing yet
        return cell


def frozen(value: Any, depth: int = 2, around: frozenset[int] = frozenset()) -> Hashable:
    """A value that is equal as long as what it was made of is. Objects are looked into to some depth, settings all the way."""
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, random.Random):
        return (type(value), value.getstate())
    if isinstance(value, np.random.Generator | np.random.RandomState):
        return (type(value), str(value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state()))
    if isinstance(value, np.ndarray):
        return (type(value), str(value.dtype), value.shape, value.tobytes())
    if id(value) in around:
        return (type(value), id(value))
    inside = functools.partial(frozen, depth=depth, around=around | {id(value)})
    if isinstance(value, list | tuple | deque):
        return (type(value), *map(inside, value))
    if isinstance(value, set | frozenset):
        return (type(value), frozenset(map(inside, value)))
    if isinstance(value, dict):
        return (dict, *((inside(key), inside(each)) for key, each in value.items()))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return (getattr(value, "__module__", ""), value.__qualname__)
    if isinstance(value, Tensor | nn.Module) or depth == 0:
        return (type(value), id(value))
    attributes, deeper = _attributes(value), depth if _is_data(value) else depth - 1
    if not attributes:  # a range, a number of numpy's, a partial function
        return (type(value), repr(value))
    return (type(value), *((key, inside(each, depth=deeper)) for key, each in sorted(attributes.items())))


def _attributes(value: Any) -> dict[str, Any]:
    slots = itertools.chain.from_iterable(
        [names] if isinstance(names := vars(base).get("__slots__", ()), str) else names for base in type(value).__mro__
    )
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def containers(block: nn.Module) -> list[Any]:
    """All that a call might put something into: containers among attributes and variables, and those inside of them."""
    found: dict[int, Any] = {}
    given = [value for module in block.modules() for key, value in vars(module).items() if key not in OF_EVERY_MODULE]
    given += [value for _, value in _outside(block) if _is_data(value)]
    waiting = [(value, 2) for value in given]
    while waiting:
        value, depth = waiting.pop()
        if id(value) in found or isinstance(value, (*PLAIN, Tensor, nn.Module, types.FunctionType, type)):
            continue
        found[id(value)] = value
        if isinstance(value, dict):
            waiting += [(each, depth) for each in value.values()]
        elif isinstance(value, list | tuple | deque):
            waiting += [(each, depth) for each in value]
        elif depth:
            waiting += [(each, depth if _is_data(value) else depth - 1) for each in _attributes(value).values()]
    given = [each for each in found.values() if isinstance(each, CONTAINERS)]
    return [each for each in given if type(each).__module__ in ("builtins", "collections")]  # others copy as they please


def hooks_of_all() -> tuple[int, ...]:
    """How many hooks of each kind run around every module there is."""
    return tuple(len(getattr(nn.modules.module, f"_global{kind}")) for kind in HOOKS)


def _settings() -> Iterator[tuple[str, Hashable]]:
    yield "hooks of all modules", hooks_of_all()
    yield "grad mode", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    for kind in ("cpu", "cuda"):
        yield f"autocast on {kind}", (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    yield "default dtype", torch.get_default_dtype()
    yield "determinism", torch.are_deterministic_algorithms_enabled()
    kernels = torch.backends.cuda
    yield (
        "attention kernels",
        (
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
        ),
    )
