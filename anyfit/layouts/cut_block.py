"""CutBlock: a module's forward, made by generated code over the ranks of an axis.

`CutBlock(...).install()` cuts the block's parameters to what this rank holds and puts the generated code in the place of its
forward: one autograd function, whose backward is the generated one. Hooks of the block itself run around it as before. A call
under other conditions than those it was captured under is an error that names them: a rank's parts cannot run the block's own
Python.

Gradients of parameters come as the parameters lie; those of `summed` are summands that the ranks of the axis have yet to add up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from anyfit.values.block_layouts import BlockLayout
from anyfit.values.cuts import SUM, Cut, Held

from .axis import Axis
from .generate import generate
from .guard import Conditions, conditions, differences, tensor_leaves
from .parts import part
from .problem import Posed


class OtherConditions(RuntimeError):  # noqa: N818 -- says what is so, as NoPlan does
    """A cut block was called otherwise than it was captured."""


class CutBlock:
    def __init__(self, block: nn.Module, posed: Posed, layout: BlockLayout, axis: Axis) -> None:
        self.block, self.posed, self.layout, self.axis = block, posed, layout, axis
        captured = posed.captured
        keys = axis.all_of(captured.key)
        if len(set(keys)) > 1:
            where = next(rank for rank, key in enumerate(keys) if key != keys[0])
            raise ValueError(
                f"{type(block).__name__} does other things on rank {where} than on rank 0: "
                "give all ranks of a tensor axis the same batch"
            )
        self.held = {name: self._held(node) for name, node in zip(captured.parameters, captured.parameter_nodes, strict=True)}
        named = zip(captured.parameters, captured.parameter_nodes, strict=True)
        self.summed = tuple(name for name, node in named if self._is_summed(node))  # in one order on all ranks
        self.entry: Held = layout.held(posed.problem, posed.problem.entry)
        self.exit: Held = layout.held(posed.problem, posed.problem.exit)
        self.code = generate(posed, layout, axis)
        self._expected = self._conditions()
        self._asks = [node for node, _ in captured.gradients]

    def _held(self, node: fx.Node) -> Held:
        return self.layout.held(self.posed.problem, self.posed.number(node))

    def _is_summed(self, node: fx.Node) -> bool:
        end = self.posed.gradient_ends.get(node)
        return end is not None and self.posed.problem.steps[end].ways[self.layout.ways[end]].reads[0] == SUM

    def _conditions(self) -> dict[str, Any]:
        """Those of the capture, but for what enters cut."""
        expected = _without_strides(self.posed.captured.guard)
        entry = self.posed.problem.entry
        for path, node in zip(self.posed.captured.arguments, self.posed.captured.argument_nodes, strict=True):
            if self.posed.number(node) == entry and isinstance(self.entry, Cut):
                dtype, shape, *rest = expected[f"argument {path}"]
                expected[f"argument {path}"] = (dtype, self.entry.part(shape, self.axis.n), *rest)
        return expected

    def install(self) -> None:
        parameters = dict(self.block.named_parameters())
        for name, held in self.held.items():
            if isinstance(held, Cut):
                parameters[name].data = part(parameters[name].data, held, self.axis.n, self.axis.rank).clone()
        self.block.forward = self.forward

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        trouble = differences(self._expected, _without_strides(conditions(self.block, args, kwargs)))
        if trouble:
            raise OtherConditions(
                f"{type(self.block).__name__} is cut over {self.axis.n} ranks for calls that are like the one that was captured; "
                f"other are: {', '.join(trouble)}. Capture it anew"
            )
        captured = self.posed.captured
        held: dict[str, Tensor] = dict(self.block.named_parameters())
        buffers = dict(self.block.named_buffers())
        tensors = [*(held[name] for name in captured.parameters), *(buffers[name] for name in captured.buffers)]
        given = [each for _, each in tensor_leaves(args, kwargs)]
        asks = {node.name for node in self._asks}
        wanted = [each for each, node in zip([*tensors, *given], captured.placeholders, strict=False) if node.name in asks]
        results = iter(_Made.apply(self, tensors, given, *wanted))  # type: ignore[no-untyped-call]
        leaves = [next(results) if isinstance(each, fx.Node) else each for each in captured.outputs]
        return pytree.tree_unflatten(leaves, captured.output_tree)

    @property
    def without_gradient(self) -> list[int]:
        """Outputs that have none, among those that are tensors."""
        captured = self.posed.captured
        tensors = [at for at, each in enumerate(captured.outputs) if isinstance(each, fx.Node)]
        return [place for place, at in enumerate(tensors) if at not in captured.with_tangents]


def _without_strides(found: Conditions) -> dict[str, Any]:
    """How a tensor lies in memory steers eager's views alone, and generated code reshapes instead."""
    tensors = {name: form for name, form in found.items() if name.startswith("argument ") and isinstance(form[0], torch.dtype)}  # type: ignore[index]
    return dict(found) | {name: (*form[:2], *form[3:]) for name, form in tensors.items()}  # type: ignore[index]


class _Made(torch.autograd.Function):
    """One call. Parameters are among the inputs for autograd's sake alone; the code reads them when it needs them."""

    @staticmethod
    def forward(context: Any, cut: CutBlock, tensors: Sequence[Tensor], given: Sequence[Tensor], *wanted: Tensor) -> Any:
        read = _reader(tensors)
        outputs, saved = cut.code.forward(read, [each.detach() for each in given])
        context.cut, context.read = cut, read
        context.save_for_backward(*saved)
        context.mark_non_differentiable(*(outputs[at] for at in cut.without_gradient))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> Any:
        cut: CutBlock = context.cut
        without = set(cut.without_gradient)
        tangents = [each.contiguous() for at, each in enumerate(gradients) if at not in without]
        found = cut.code.backward(context.read, context.saved_tensors, tangents)
        return (None, None, None, *found)


def _reader(tensors: Sequence[Tensor]) -> Callable[[int], Tensor]:
    return lambda at: tensors[at].detach()
