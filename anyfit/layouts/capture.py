"""Capture: one block, called with some arguments, as one graph of its forward and its backward.

The graph is what eager does: the block's own Python runs once on fake tensors, autograd makes the backward, and every aten op of
both is noted. Nothing is computed and the block is left as it was. It takes, in this order,

    parameters, buffers, tensors among the arguments, tangents (gradients of the outputs that have one)

and gives the outputs and the gradients of all that asked for one. What a graph cannot say refuses the capture by name, and the
block runs whole: hooks inside, control that depends on data, changed buffers, attributes or arguments, random numbers in backward
(a checkpoint inside the block) and those of Python or numpy, tensors that are neither parameter nor buffer nor argument.

Sizes are plain numbers. Capturing with symbols was tried: it takes six times as long, and dropout on a CPU takes another kernel
than eager does. So a new length is captured anew; where `form` is equal its layout may be kept.
"""

from __future__ import annotations

import contextlib
import copy
import hashlib
import pickle
import random
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .alike import noting_reads
from .fakes import Fakes
from .graph import Output, ancestors, cleaned, is_random, written
from .guard import HOOKS, Conditions, NotCaptured, caches, conditions, containers, differences, hooks_of_all, tensor_leaves
from .noting import Notes


@dataclass(frozen=True, eq=False)
class Captured:
    module: fx.GraphModule  # its own constants are numbers that the block made tensors of
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    arguments: tuple[str, ...]  # paths of the tensors among the arguments
    outputs: tuple[Output, ...]  # of the block, flat
    with_tangents: tuple[int, ...]  # outputs that have a gradient
    output_tree: pytree.TreeSpec
    gradients: tuple[tuple[fx.Node, Output], ...]  # of which placeholder; no node where it does not depend on it
    guard: Conditions
    reads: frozenset[str]  # attributes of the block's modules that it looked at

    @property
    def nodes(self) -> list[fx.Node]:
        return list(self.module.graph.nodes)

    @property
    def placeholders(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "placeholder"]

    def _taken(self, first: int, count: int) -> list[fx.Node]:
        return self.placeholders[first : first + count]

    @property
    def parameter_nodes(self) -> list[fx.Node]:
        return self._taken(0, len(self.parameters))

    @property
    def buffer_nodes(self) -> list[fx.Node]:
        return self._taken(len(self.parameters), len(self.buffers))

    @property
    def argument_nodes(self) -> list[fx.Node]:
        return self._taken(len(self.parameters) + len(self.buffers), len(self.arguments))

    @property
    def tangent_nodes(self) -> list[fx.Node]:
        return self.placeholders[len(self.parameters) + len(self.buffers) + len(self.arguments) :]

    @cached_property
    def key(self) -> str:
        """Equal for graphs that are equal, constant by constant, of parameters that have the same names in their blocks."""
        return hashlib.sha256(f"{self.parameters} {written(self.module, with_sizes=True)}".encode()).hexdigest()

    @cached_property
    def form(self) -> str:
        """Equal for graphs that are equal but for numbers: the same block at another length."""
        return hashlib.sha256(written(self.module, with_sizes=False).encode()).hexdigest()

    def why_not(self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        """What of a call is not as it was when this was captured; nothing where the graph is right for it."""
        return ", ".join(differences(self.guard, conditions(block, args, kwargs)))


def capture(
    block: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None = None,
    shapes: Mapping[str, Sequence[int]] | None = None,
) -> Captured:
    """The call block.forward(*args, **kwargs) and its backward; with parameters of these shapes, where a block has but parts."""
    kwargs = kwargs or {}
    _refuse_hooks(block)
    guard = conditions(block, args, kwargs)
    call = _Call(block, args, kwargs, shapes or {})
    with _left_as_it_was(block, guard, args, kwargs), noting_reads(block) as reads:
        traced = call.traced()
    _refuse_effects(traced, call)
    _refuse_order_in_memory(traced)
    _refuse_sparse(traced)
    module, outputs, gradients = cleaned(traced, call.output_count)
    wanted = [node for node, asks in zip(module.graph.nodes, call.asks, strict=False) if asks]
    return Captured(
        module=module,
        parameters=tuple(call.parameters),
        buffers=tuple(call.buffers),
        arguments=tuple(path for path, _ in call.tensors),
        outputs=outputs,
        with_tangents=tuple(call.with_tangents),
        output_tree=call.output_tree,
        gradients=tuple(zip(wanted, gradients, strict=True)),
        guard=guard,
        reads=frozenset(reads),
    )


class Forward(nn.Module):
    """A block without the hooks that are its own: they run around whatever stands for its forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


class _Noticed(Forward):
    """That refuses a call which puts other tensors in the place of parameters or buffers: they would be lost."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        held, before = self._held(), self._where()  # held: so that no other tensor takes the place of one
        result = super().forward(*args, **kwargs)
        changed = [name for name, each in self._where().items() if before.get(name) != each]
        if changed and held:
            raise NotCaptured(f"{changed[0]} is assigned anew, which a captured block would not do")
        return result

    def _held(self) -> dict[str, Tensor]:
        block = self.block
        return {**dict(block.named_parameters(remove_duplicate=False)), **dict(block.named_buffers(remove_duplicate=False))}

    def _where(self) -> dict[str, tuple[int, int]]:
        """Each tensor, and its memory: user code may put other memory in its place, as its data."""
        return {name: (id(each), each.untyped_storage()._cdata) for name, each in self._held().items()}


class _Call:
    """The call as a function of flat lists of tensors."""

    def __init__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._forward = _Noticed(block)
        self._shapes, self._caches = shapes, caches(block)
        self.parameters = dict(block.named_parameters())
        self.buffers = dict(block.named_buffers())
        self.tensors = tensor_leaves(args, kwargs)
        self._leaves, self._tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.asks = [each.requires_grad for each in (*self.parameters.values(), *self.buffers.values())]
        self.asks += [each.requires_grad for _, each in self.tensors]
        held = (*self.parameters.values(), *self.buffers.values(), *(each for _, each in self.tensors))
        fakes = [each for each in held if isinstance(each, FakeTensor)]
        self._mode = fakes[0].fake_mode if fakes else Fakes()
        self.output_count = 0
        self.with_tangents: list[int] = []
        self.output_tree: Any = None

    def traced(self) -> fx.GraphModule:
        given = [*self.parameters.values(), *self.buffers.values(), *(each for _, each in self.tensors)]
        if len({id(each) for each in given}) < len(given):
            raise NotCaptured("one tensor is given twice, as argument, parameter or buffer")
        with _refusing():
            names = [*self.parameters, *[""] * (len(given) - len(self.parameters))]
            with torch._C.DisableTorchFunctionSubclass():  # nobody is to fetch weights for it
                fakes = [self._fake(each.detach(), self._shapes.get(name)) for each, name in zip(given, names, strict=True)]
            notes = Notes(fakes, self._mode)
            try:
                self._forget()
                with notes.taken(), torch.enable_grad():
                    outputs, tangents, gradients = self._joint(notes, fakes)
            finally:
                self._forget()
            flat = [*fakes, *tangents]
            first = notes.module((outputs, gradients))
            _refuse_random_backward(first)
            return _without_changes(first, flat)

    def _forget(self) -> None:
        """What functions keep of a call is of fakes, or made outside of the graph."""
        for each in self._caches:
            each.cache_clear()

    def _fake(self, x: Tensor, shape: Sequence[int] | None) -> Tensor:
        if shape is not None:
            with self._mode:
                return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
        return x if isinstance(x, FakeTensor) else self._mode.from_tensor(x)

    def _run(self, given: Sequence[Tensor]) -> list[Any]:
        held = [each.detach().requires_grad_(asks) for each, asks in zip(given, self.asks, strict=True)]
        self._held = held
        names = [f"block.{name}" for name in (*self.parameters, *self.buffers)]
        tensors = iter(held[len(names) :])
        leaves = [next(tensors) if isinstance(leaf, Tensor) else leaf for leaf in self._leaves]
        args, kwargs = pytree.tree_unflatten(leaves, self._tree)
        result = functional_call(self._forward, dict(zip(names, held, strict=False)), args, kwargs)
        outputs, self.output_tree = pytree.tree_flatten(result)
        return outputs

    def _joint(self, notes: Notes, given: Sequence[Tensor]) -> tuple[list[Any], list[Tensor], list[Any]]:
        """The outputs, the tangents that are given with them, and the gradients."""
        outputs = self._run(given)
        self.output_count = len(outputs)
        self.with_tangents = [at for at, each in enumerate(outputs) if isinstance(each, Tensor) and each.requires_grad]
        wanted = [each for each in self._held if each.requires_grad]
        tangents = [notes.another(outputs[at]) for at in self.with_tangents]
        if not tangents or not wanted:
            return outputs, tangents, [None] * len(wanted)
        ends = [outputs[at] for at in self.with_tangents]
        return outputs, tangents, list(torch.autograd.grad(ends, wanted, tangents, allow_unused=True))


def _without_changes(module: fx.GraphModule, flat: Sequence[Tensor]) -> fx.GraphModule:
    """With ops that give new tensors in the place of those that change one."""
    if not any(_changes(node) for node in module.graph.nodes):
        return module
    return make_fx(functionalize(module, remove="mutations"), tracing_mode="fake")(*flat)


def _changes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# ---------------------------------------------------------------------- what is refused


def _refuse_hooks(block: nn.Module) -> None:
    if any(hooks_of_all()) and len(list(block.modules())) > 1:
        raise NotCaptured("hooks are registered for all modules, which would not run inside a captured block")
    for name, module in block.named_modules():
        if name and any(getattr(module, kind) for kind in HOOKS):
            raise NotCaptured(f"{name} ({type(module).__name__}) has a hook, which would not run inside a captured block")


def _refuse_random_backward(module: fx.GraphModule) -> None:
    """The masks of a recomputed forward are those of the first one, which a graph cannot say."""
    outputs: Any = module.graph.output_node().args[0]
    forward = ancestors(module.graph, outputs[0])
    for node in module.graph.nodes:
        if is_random(node) and node not in forward and not any(user in forward for user in node.users):
            raise NotCaptured(f"{node.target} in backward: random numbers are drawn again, as by a checkpoint inside the block")


def _refuse_sparse(module: fx.GraphModule) -> None:
    for node in module.graph.nodes:
        for each in pytree.tree_leaves(node.meta.get("val")):
            if isinstance(each, Tensor) and each.layout != torch.strided:
                raise NotCaptured(f"a tensor in it is {str(each.layout).removeprefix('torch.')}, which is not cut")


def _refuse_order_in_memory(module: fx.GraphModule) -> None:
    """A part lies in memory in the order of its dimensions, whatever the whole does."""
    for node in module.graph.nodes:
        if not str(node.target).startswith("aten.as_strided"):
            continue
        given, *sizes = [each for each in node.args if not (isinstance(each, fx.Node) and each is not node.args[0])]
        size, stride, offset = [*sizes, None][:3]
        x = given.meta["val"]
        reaches = (offset or 0) + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
        if not x.is_contiguous() or (offset is not None and x.storage_offset()) or reaches >= x.numel():
            raise NotCaptured(f"{node.target} reads a tensor in the order of its memory, which is another one for a part of it")


def _refuse_effects(module: fx.GraphModule, call: _Call) -> None:
    names = [*call.parameters, *call.buffers, *(path for path, _ in call.tensors)]
    taken = dict(zip((node for node in module.graph.nodes if node.op == "placeholder"), names, strict=False))
    for node in module.graph.nodes:
        if _changes(node):
            changed = taken.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
            what = f"{changed} is changed in place" if changed else f"{node.target} changes a tensor"
            raise NotCaptured(f"{what}, which a captured block would not do")


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What fake tensors and tracing cannot do, as a refusal that says what it was."""
    from torch._subclasses import fake_tensor

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    except NotCaptured:
        raise
    except (fake_tensor.DataDependentOutputException, fake_tensor.DynamicOutputShapeException) as error:
        raise NotCaptured(f"{getattr(error, 'func', error)}: what the block does next depends on data") from error
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        if "convert all Tensors to FakeTensors" in str(error):
            first = "a tensor that is neither parameter, buffer nor argument is read"
        raise NotCaptured(f"{type(error).__name__}: {first}") from error


@contextlib.contextmanager
def _left_as_it_was(block: nn.Module, guard: Conditions, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[None]:
    """Attributes that the call sets, and what it puts into containers, are put back, and refuse it. So do random numbers of
    Python or numpy that it draws: the graph would have those of one call for all."""
    before = [(module, dict(vars(module))) for module in block.modules()]
    contents = [(each, copy.copy(each)) for each in containers(block)]
    changed: list[str] = []
    by_python, by_numpy = random.getstate(), np.random.get_state(legacy=False)
    try:
        yield
        found = differences(guard, conditions(block, args, kwargs))
        changed = [name for name in found if name.startswith(("attribute", "argument", "variable"))]
        draws = random.getstate() != by_python or pickle.dumps(np.random.get_state(legacy=False)) != pickle.dumps(by_numpy)
    finally:
        random.setstate(by_python)
        np.random.set_state(by_numpy)
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
        for container, items in contents:
            container.clear()
            container.extend(items) if isinstance(container, list | deque) else container.update(items)
    if changed:
        raise NotCaptured(f"the call changes {', '.join(changed)}")
    if draws:
        raise NotCaptured("the call draws random numbers of Python or numpy")
