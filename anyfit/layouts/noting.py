"""Noting: what code does on fake tensors, op by op, as a graph.

    notes = Notes(given, mode)
    with notes.taken():
        found = ...                                of the given tensors, and of more that are given on the way
    module = notes.module(found)

It is what torch's make_fx gives, in a quarter of the time. A dispatch mode sees each aten op after autograd, those of forward and
of backward alike, and writes down a node whose inputs are the nodes that gave them. Tensors are known by identity, and held, so
that each stays one. What autograd saves and gives back it makes anew by `detach`, which is an op as well. An op that changes a
tensor which nothing else shares memory with, as dropout does its mask, is written as one that gives a new tensor.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from .fakes import quickly
from .guard import NotCaptured

aten = torch.ops.aten
DEVICE = torch.ops.prim.device.default
BY_OTHER_NAMES = {aten.bernoulli_.float: aten.bernoulli.p}  # of ops that give a new tensor


@functools.cache
def _has_kernel(op: Any) -> bool:
    """Of its own, and is not only made of other ops."""
    return any(torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in ("CPU", "CUDA"))


@functools.cache
def _without_change(op: Any) -> Any:
    """The op that gives a new tensor where this one changes its first argument, and nothing else; None where there is none."""
    name, arguments = op._schema.name.removeprefix("aten::"), op._schema.arguments
    written = [at for at, each in enumerate(arguments) if each.alias_info is not None and each.alias_info.is_write]
    if written != [0] or not name.endswith("_") or torch.Tag.inplace_view in op.tags:
        return None
    packet = getattr(aten, name.removesuffix("_"), None)
    other = BY_OTHER_NAMES.get(op) or getattr(packet, op._overloadname, None)
    if other is None or [each.name for each in other._schema.arguments] != [each.name for each in arguments]:
        return None
    return other


def _in_order(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What has a place without its name, and with what is meant where nothing is given."""
    rest = [each for each in op._schema.arguments[len(args) :] if not each.kwarg_only]
    named = {name: value for name, value in kwargs.items() if name not in [each.name for each in rest]}
    return (*args, *(kwargs.get(each.name, each.default_value) for each in rest)), named


def _storage_of(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata if tensor.layout == torch.strided else id(tensor)


class Notes(TorchDispatchMode):
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nobody compiles what is noted

    def __init__(self, given: Sequence[Tensor], mode: FakeTensorMode) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._mode = mode
        self._graph, self._root = fx.Graph(), nn.Module()
        self._nodes: dict[int, fx.Node] = {}  # by identity of a tensor
        self._held: list[Tensor] = []
        self._lies_in: Counter[int] = Counter()  # by storage, how many tensors are known to
        self._last_given: fx.Node | None = None
        self._constants = 0
        for each in given:
            self._take(each)

    @contextmanager
    def taken(self) -> Iterator[None]:
        with self._mode, self:
            yield

    def another(self, like: Tensor) -> Tensor:
        """One more tensor that is given, as this one is."""
        with _disable_current_modes(), self._mode:
            made = torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)
        self._take(made)
        return made

    def module(self, found: Any) -> fx.GraphModule:
        self._graph.output(self._noted(found))
        return _LazyGraphModule(self._root, self._graph)  # whose code nobody may ever run

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is DEVICE and isinstance(args[0], FakeTensor):  # autograd asks for it all the time
            return args[0].fake_device
        if func.namespace == "prim":  # what a tensor says of itself
            return func(*args, **kwargs)
        if not _has_kernel(func):
            with self:
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
        inputs = self._noted(tuple(args)), self._noted(dict(kwargs))
        found = quickly(func, args, kwargs, self._mode)
        if found is NotImplemented:
            found = func(*args, **kwargs)
        if func._schema.is_mutable and self._is_alone(args[0]) and found is args[0] and _without_change(func):
            func, inputs = _without_change(func), _in_order(func, *inputs)
        node = self._graph.call_function(func, *inputs)
        if isinstance(found, Tensor):
            self._know(found, node)
            return found
        node.meta["val"] = found
        for place, each in enumerate(found if isinstance(found, list | tuple) else ()):
            if isinstance(each, Tensor):
                self._know(each, self._graph.call_function(operator.getitem, (node, place)))
        return found

    def _is_alone(self, tensor: Any) -> bool:
        """Made here, and in memory of its own: whatever reads it from now on comes here for it."""
        if not isinstance(tensor, Tensor) or self._nodes[id(tensor)].op != "call_function":
            return False
        return self._lies_in[_storage_of(tensor)] == 1

    def _take(self, tensor: Tensor) -> None:
        after = self._last_given
        with self._graph.inserting_before() if after is None else self._graph.inserting_after(after):
            self._last_given = self._graph.placeholder(f"given_{len(self._held)}")
        self._know(tensor, self._last_given)

    def _know(self, tensor: Tensor, node: fx.Node) -> None:
        node.meta["val"] = tensor
        if id(tensor) not in self._nodes:
            self._lies_in[_storage_of(tensor)] += 1
            self._held.append(tensor)
        self._nodes[id(tensor)] = node

    def _noted(self, value: Any) -> Any:
        """With nodes for the tensors in it."""
        if type(value) in (tuple, list):
            return type(value)(map(self._noted, value))
        if type(value) is dict:
            return {key: self._noted(each) for key, each in value.items()}
        return self._node_of(value)

    def _node_of(self, value: Any) -> Any:
        if isinstance(value, torch.Generator):
            raise NotCaptured("it draws from a generator of its own, which ranks would have to share")
        if not isinstance(value, Tensor):
            return value
        if id(value) not in self._nodes:
            self._know(value, self._constant(value))
        return self._nodes[id(value)]

    def _constant(self, value: Tensor) -> fx.Node:
        """A number that the code has made a tensor of."""
        if isinstance(value, FakeTensor):
            raise RuntimeError("a tensor that is neither parameter, buffer nor argument is read")
        name = f"_tensor_constant{self._constants}"
        self._constants += 1
        setattr(self._root, name, value)
        return self._graph.get_attr(name)
