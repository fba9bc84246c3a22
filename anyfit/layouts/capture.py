"""Capture: one block, called with some arguments, as one graph of its forward and its backward.

The graph is what eager does: the block's own Python runs once on fake tensors, autograd makes the backward, and every aten op of
both is noted. Nothing is computed and the block is left as it was. It takes, in this order,

    parameters, buffers, tensors among the arguments, tangents (gradients of the outputs that have one)

and gives the outputs and the gradients of all that asked for one. What a graph cannot say refuses the capture by name, and the
block runs whole: hooks inside, control that depends on data, changed buffers, attributes or arguments, random numbers in backward
(a checkpoint inside the block), tensors that are neither parameter nor buffer nor argument.

Sizes are plain numbers. Capturing with symbols was tried: it takes six times as long, and dropout on a CPU takes another kernel
than eager does. A capture takes 0.1 to 0.3 s, so a new length is captured anew; where `form` is equal its layout may be kept.
"""

from __future__ import annotations

import contextlib
import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.func import functional_call, functionalize
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

from .graph import Output, ancestors, cleaned, is_random, written
from .guard import HOOKS, Conditions, NotCaptured, conditions, differences, tensor_leaves


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

    @property
    def key(self) -> str:
        """Equal for graphs that are equal, constant by constant."""
        return hashlib.sha256(written(self.module, with_sizes=True).encode()).hexdigest()

    @property
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
    with _left_as_it_was(block, guard, args, kwargs):
        traced = call.traced()
    _refuse_effects(traced, call)
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
    )


class _Forward(nn.Module):
    """A block without the hooks that are its own: they run around whatever stands for its forward."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block = block

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.block.forward(*args, **kwargs)


class _Call:
    """The call as a function of flat lists of tensors."""

    def __init__(
        self, block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]
    ) -> None:
        self._forward = _Forward(block)
        self._shapes = shapes
        self.parameters = dict(block.named_parameters())
        self.buffers = dict(block.named_buffers())
        self.tensors = tensor_leaves(args, kwargs)
        self._leaves, self._tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        self.asks = [each.requires_grad for each in (*self.parameters.values(), *self.buffers.values())]
        self.asks += [each.requires_grad for _, each in self.tensors]
        held = (*self.parameters.values(), *self.buffers.values(), *(each for _, each in self.tensors))
        fakes = [each for each in held if isinstance(each, FakeTensor)]
        self._mode = fakes[0].fake_mode if fakes else FakeTensorMode()
        self.output_count = 0
        self.with_tangents: list[int] = []
        self.output_tree: Any = None

    def traced(self) -> fx.GraphModule:
        given = [*self.parameters.values(), *self.buffers.values(), *(each for _, each in self.tensors)]
        if len({id(each) for each in given}) < len(given):
            raise NotCaptured("one tensor is given twice, as argument, parameter or buffer")
        with _refusing():
            names = [*self.parameters, *[""] * (len(given) - len(self.parameters))]
            fakes = [self._fake(each.detach(), self._shapes.get(name)) for each, name in zip(given, names, strict=True)]
            tangents = self._outputs_of(fakes)
            flat = [*fakes, *tangents]
            first = make_fx(self._joint, tracing_mode="fake")(*flat)
            _refuse_random_backward(first)
            return _without_changes(first, flat)

    def _fake(self, x: Tensor, shape: Sequence[int] | None) -> Tensor:
        if shape is not None:
            with self._mode:
                return torch.empty(tuple(shape), dtype=x.dtype, device=x.device)
        return x if isinstance(x, FakeTensor) else self._mode.from_tensor(x)

    def _outputs_of(self, fakes: Sequence[Tensor]) -> list[Tensor]:
        """One call on fakes alone, for the tangents that the graph takes."""
        with self._mode, torch.enable_grad():
            outputs = self._run(fakes)
            self.output_count = len(outputs)
            self.with_tangents = [at for at, each in enumerate(outputs) if isinstance(each, Tensor) and each.requires_grad]
            return [outputs[at].detach() for at in self.with_tangents]

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

    def _joint(self, *flat: Tensor) -> tuple[list[Any], list[Any]]:
        outputs = self._run(flat[: len(self.asks)])
        wanted = [each for each in self._held if each.requires_grad]
        ends = [each for each in outputs if isinstance(each, Tensor) and each.requires_grad]
        if not ends or not wanted:
            return outputs, [None] * len(wanted)
        gradients = torch.autograd.grad(ends, wanted, flat[len(self.asks) :], allow_unused=True)
        return outputs, list(gradients)


def _without_changes(module: fx.GraphModule, flat: Sequence[Tensor]) -> fx.GraphModule:
    """With ops that give new tensors in the place of those that change one."""
    if not any(_changes(node) for node in module.graph.nodes):
        return module
    return make_fx(functionalize(module, remove="mutations"), tracing_mode="fake")(*flat)


def _changes(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# ---------------------------------------------------------------------- what is refused


def _refuse_hooks(block: nn.Module) -> None:
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
    """Attributes that the call sets are put back, and refuse it."""
    before = [(module, dict(vars(module))) for module in block.modules()]
    changed: list[str] = []
    try:
        yield
        found = differences(guard, conditions(block, args, kwargs))
        changed = [name for name in found if name.startswith(("attribute", "argument"))]
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)
    if changed:
        raise NotCaptured(f"the call changes {', '.join(changed)}")
