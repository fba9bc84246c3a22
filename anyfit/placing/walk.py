"""The walk: which cells can be reached from a block, its forward, its arguments, or a loss."""

from __future__ import annotations

import collections
import dis
import enum
import functools
import pathlib
import re
import sys
import types
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .cells import MOST_ENTRIES, Array, Attributes, Cell, Closed, Elements, Entries, Globals, OfClass, Slots, generator_cell

MOST_CELLS = 4096  # that a block's walk follows
INERT = {
    int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern, torch.finfo,
    type(Ellipsis), type(NotImplemented), frozenset,
    np.dtype, property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType, functools.cached_property,
}  # fmt: skip
INERT_BASES = (enum.Enum, pathlib.PurePath, type, BaseException)
INTERNAL = set(vars(nn.Module()))  # attributes that every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
WITHOUT_STATE = (types.FunctionType, types.BuiltinFunctionType, types.ModuleType, type)
# Objects of torch, of the interpreter and of ours, which forwards do not change.
NOT_WALKED = {"torch", "anyfit", "logging", "threading", "_thread", "weakref", "_weakref", "io", "_io", "concurrent", "typing"}
LIBRARIES = {"torch", "numpy", "transformers", "anyfit", "accelerate", "peft", "logging", "threading", "weakref"}


def _is_library(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    if package in LIBRARIES or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Global variables that a function's code names, that of functions inside it too."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names_of(constant))
    return tuple(sorted(names))


class Walk:
    """The cells that are reachable from some objects."""

    def __init__(self, before: Walk | None = None, most: int = MOST_CELLS) -> None:
        """`before`: what that found is not found again. `most`: cells, after which nothing more is followed."""
        self._most = most
        self.cells: list[Cell] = []
        self.tensors: list[tuple[Tensor, str]] = []
        self.parameters: list[tuple[nn.Parameter, str]] = []
        self.iterators: list[str] = []
        # What is walked is kept alive with its identity, which then stands for one object.
        self._seen: dict[int, Any] = {} if before is None else dict(before._seen)
        self._left: collections.deque[tuple[Any, str]] = collections.deque()
        self._block: nn.Module | None = None if before is None else before._block

    def of_block(self, block: nn.Module, forward: Callable[..., Any], name: str) -> Walk:
        """`forward`: the block's own, which another may stand in for."""
        self._block = block
        self._own(block, name)
        self._left.append((forward, name))
        return self._through()

    def of(self, values: Any, name: str) -> Walk:
        self._left.append((values, name))
        return self._through()

    def _own(self, module: nn.Module, name: str) -> None:
        for path, each in module.named_modules():
            self._module(each, f"{name}.{path}" if path else name)

    def _through(self) -> Walk:
        while self._left and len(self.cells) < self._most:
            self._visit(*self._left.popleft())
        return self

    def _all(self, values: Any, name: str) -> None:
        self._left.extend((value, name) for value in values if type(value) not in INERT)

    def _by_key(self, values: Mapping[Any, Any], name: str, without: Any = ()) -> None:
        self._left.extend(
            (value, f"{name}.{key}") for key, value in values.items() if type(value) not in INERT and key not in without
        )

    def _module(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        own = vars(module)
        self.cells.append(Attributes(own, name))
        for part in ("_buffers", "_parameters", "_modules"):
            if own.get(part):
                self.cells.append(Entries(own[part], name))
        self._by_key(module._buffers, name)
        self._by_key(module._parameters, name)
        for part in HOOKS:
            if own.get(part):
                self._all(own[part].values(), f"{name}'s hook")
        self._by_key(own, name, INTERNAL)
        self._class(type(module))

    def _class(self, of: type) -> None:
        for base in of.__mro__:
            if id(base) in self._seen or _is_library(base.__module__):
                continue
            self._seen[id(base)] = base
            functions = [value for value in vars(base).values() if isinstance(value, types.FunctionType)]
            names = [
                name
                for name, value in vars(base).items()
                if not name.startswith("__") and not isinstance(value, types.FunctionType | property | staticmethod | classmethod)
            ]
            if names:
                self.cells.append(OfClass(base, base.__name__, names))
                self._by_key({name: vars(base)[name] for name in names}, base.__name__)
            self._left.extend((function, base.__name__) for function in functions)

    def _function(self, function: Any, name: str) -> None:
        for closed in function.__closure__ or ():
            if id(closed) in self._seen:
                continue
            self._seen[id(closed)] = closed
            cell = Closed(closed, f"a variable of {function.__qualname__}")
            self.cells.append(cell)
            self._all(cell.read(), name)
        self._all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), f"a default of {name}")
        if _is_library(function.__module__):
            return
        names = [each for each in _names_of(function.__code__) if each in function.__globals__]
        kept = [each for each in names if not isinstance(function.__globals__[each], WITHOUT_STATE)]
        if kept:
            self.cells.append(Globals(function.__globals__, f"a global of {function.__module__}", kept))
            self._by_key({each: function.__globals__[each] for each in kept}, function.__module__)
        self._all((function.__globals__[each] for each in names if each not in kept), name)

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in INERT or isinstance(value, INERT_BASES) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._foreign(value, name)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self.parameters.append((value, name))
            else:
                self.tensors.append((value, name))
        elif isinstance(value, dict):
            self.cells.append(Entries(value, name))
            if len(value) <= MOST_ENTRIES:
                self._by_key(value, name)
            self._object(value, name)
        elif isinstance(value, list | collections.deque | set | bytearray):
            self.cells.append(Elements(value, name))
            if len(value) <= MOST_ENTRIES and kind is not bytearray:
                self._all(value, name)
            self._object(value, name)
        elif isinstance(value, tuple):
            self._all(value, name)
        elif isinstance(value, np.ndarray):
            self.cells.append(Array(value, name))
        elif isinstance(value, functools.partial):
            self._all((value.func, *value.args, *value.keywords.values()), name)
        elif isinstance(value, types.MethodType):
            self._all((value.__self__, value.__func__), name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif (generator := generator_cell(value, name)) is not None:
            self.cells.append(generator)
        elif kind.__module__.partition(".")[0] in NOT_WALKED:
            return
        elif hasattr(kind, "__next__"):
            self.iterators.append(name)
        else:
            self._object(value, name)
            self._class(kind)

    def _foreign(self, module: nn.Module, name: str) -> None:
        """A module that is not part of the block: with what it is made of, unless that is the block too."""
        if self._block is not None and any(each is self._block for each in module.modules()):
            self._module(module, name)
        else:
            self._own(module, name)

    def _object(self, value: Any, name: str) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.cells.append(Attributes(own, name))
            self._by_key(own, name)
        slots = [
            each
            for base in type(value).__mro__
            for each in _slots_of(base)
            if each not in ("__dict__", "__weakref__") and not _is_library(base.__module__)
        ]
        if slots:
            cell = Slots(value, name, slots)
            self.cells.append(cell)
            self._by_key(cell.read(), name)


def _slots_of(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)
