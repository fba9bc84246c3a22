"""CutBlock: a module's forward, made by generated code over the ranks of an axis.

`CutBlock(...).install()` cuts the block's parameters to what this rank holds and puts generated code in the place of its forward:
one autograd function, whose backward is the generated one. Hooks of the block itself run around it as before.

The first call's capture decides how parameters are cut. A call with tensors of other shapes (another length) is captured anew,
with whole parameters though a rank has but parts, and gets a version of its own with the same parameter cuts: cut at the border
where the axis divides it, whole where not. A call that differs in anything else is an error that names it: parts of a block
cannot run its own Python.

What enters the first of several cut blocks is whole, and is cut here. What enters the next ones is the very tensor that the block
before gave, or it is an error: a part that something else has read or changed may be wrong in silence. After the last one, or
before anything else reads its output, `leaving` makes it whole.

Gradients of parameters come as the parameters lie; those of `summed` are summands that the ranks of the axis have yet to add up.
That may be so in one version and not in another: ask `last.summed` after a backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from anyfit.values.block_layouts import BlockLayout
from anyfit.values.cuts import SUM, WHOLE, Cut, Held

from .axis import Axis, entering, held_as, marked
from .capture import Captured, capture
from .generate import generate
from .graph import is_random, value_of
from .guard import Conditions, conditions, differences, tensor_leaves
from .parts import part
from .problem import Posed

# Poses a captured block and chooses its layout, with some of its tensors held in given ways, alike on all ranks. The first
# version of the block is one to keep to, where the graph has the same form.
Choose: TypeAlias = "Callable[[Captured, Mapping[fx.Node, Held], Version], tuple[Posed, BlockLayout]]"


class OtherConditions(RuntimeError):  # noqa: N818 -- says what is so, as NoPlan does
    """A cut block was called otherwise than it was captured."""


@dataclass(frozen=True, eq=False)
class Version:
    """The block for calls of one shape."""

    posed: Posed
    layout: BlockLayout
    axis: Axis

    @property
    def captured(self) -> Captured:
        return self.posed.captured

    @cached_property
    def code(self) -> Any:
        return generate(self.posed, self.layout, self.axis)

    @cached_property
    def entry(self) -> Held:
        return self.layout.held(self.posed.problem, self.posed.problem.entry)

    @cached_property
    def exit(self) -> Held:
        return self.layout.held(self.posed.problem, self.posed.problem.exit)

    @cached_property
    def entry_path(self) -> str:
        for path, node in zip(self.captured.arguments, self.captured.argument_nodes, strict=True):
            if self.posed.number(node) == self.posed.problem.entry:
                return path
        return ""

    def held(self) -> dict[str, Held]:
        """How each parameter is."""
        named = zip(self.captured.parameters, self.captured.parameter_nodes, strict=True)
        return {name: self.layout.held(self.posed.problem, self.posed.number(node)) for name, node in named}

    @cached_property
    def summed(self) -> tuple[str, ...]:
        """Parameters whose gradients are summands, in one order on all ranks."""
        return tuple(
            name for name, node in zip(self.captured.parameters, self.captured.parameter_nodes, strict=True) if self._sums(node)
        )

    def _sums(self, node: fx.Node) -> bool:
        end = self.posed.gradient_ends.get(node)
        return end is not None and self.posed.problem.steps[end].ways[self.layout.ways[end]].reads[0] == SUM

    @cached_property
    def expected(self) -> dict[str, Any]:
        """The conditions of the capture, but for what enters cut."""
        found = _without_strides(self.captured.guard)
        if isinstance(self.entry, Cut):
            dtype, shape, *rest = found[f"argument {self.entry_path}"]
            found[f"argument {self.entry_path}"] = (dtype, self.entry.part(shape, self.axis.n), *rest)
        return found

    @cached_property
    def without_gradient(self) -> list[int]:
        """Outputs that have none, among those that are tensors."""
        tensors = [at for at, each in enumerate(self.captured.outputs) if isinstance(each, fx.Node)]
        return [place for place, at in enumerate(tensors) if at not in self.captured.with_tangents]

    @cached_property
    def asks(self) -> list[bool]:
        """Which of parameters, buffers and arguments have a gradient."""
        wanted = {node for node, _ in self.captured.gradients}
        return [node in wanted for node in self.captured.placeholders[: -len(self.captured.tangent_nodes) or None]]


class CutBlock:
    def __init__(
        self,
        block: nn.Module,
        posed: Posed,
        layout: BlockLayout,
        axis: Axis,
        choose: Choose | None = None,
        *,
        follows: bool = False,  # another cut block, whose output is what enters
    ) -> None:
        self.block, self.axis, self._choose, self._follows = block, axis, choose, follows
        self.first = self.last = Version(posed, layout, axis)
        self.versions = [self.first]
        self.held = self.first.held()
        self._own_forward = vars(block).get("forward")
        self._agree(posed.captured)

    def _agree(self, captured: Captured) -> None:
        name = type(self.block).__name__
        where = _other(self.axis.all_of(captured.key))
        if where:
            raise ValueError(
                f"{name} does other things on rank {where} than on rank 0: give all ranks of a tensor axis the same batch"
            )
        if any(map(is_random, captured.nodes)):
            where = _other(self.axis.all_of(_random_state(self.block)))
            if where:
                raise ValueError(
                    f"{name} draws random numbers, and the generator of rank {where} is not where rank 0's is: "
                    "seed all ranks of a tensor axis alike (torch.manual_seed)"
                )

    def install(self) -> None:
        """Once: a parameter that other blocks hold too stays whole in all of them."""
        parameters = dict(self.block.named_parameters())
        for name, node in zip(self.first.captured.parameters, self.first.captured.parameter_nodes, strict=True):
            held, parameter = self.held[name], parameters[name]
            if parameter.shape != value_of(node).shape:
                raise ValueError(
                    f"{name} of {type(self.block).__name__} is cut already, as a parameter of another block too: "
                    "leave one of the blocks uncut, or hold it whole"
                )
            if isinstance(held, Cut):
                parameter.data = part(parameter.data, held, self.axis.n, self.axis.rank).clone()
        self.block.forward = self.forward

    def entry_of(self, x: Tensor) -> Held:
        """How a whole tensor is to enter."""
        entry = self.first.entry
        return entry if isinstance(entry, Cut) and entry.divides(x.shape, self.axis.n) else WHOLE

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = self._entered(args, kwargs)
        version = self.last = self._version(args, kwargs)
        captured = version.captured
        parameters, buffers = dict(self.block.named_parameters()), dict(self.block.named_buffers())
        tensors: list[Tensor] = [
            *(parameters[name] for name in captured.parameters),
            *(buffers[name] for name in captured.buffers),
        ]
        given = [each for _, each in tensor_leaves(args, kwargs)]
        wanted = [each for each, asks in zip([*tensors, *given], version.asks, strict=True) if asks]
        results = iter(_Made.apply(version, tensors, given, *wanted))  # type: ignore[no-untyped-call]
        leaves = [next(results) if isinstance(each, fx.Node) else each for each in captured.outputs]
        if captured.with_tangents:
            first: Any = leaves[captured.with_tangents[0]]
            marked(first, version.exit)
        return pytree.tree_unflatten(leaves, captured.output_tree)

    def _entered(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """With what enters held as this block takes it. A whole tensor is cut; a part is known by its mark."""
        x = self._entry(args, kwargs)
        if x is None or held_as(x) is not None:
            return args, kwargs
        if self._follows:
            raise OtherConditions(
                f"what enters {type(self.block).__name__} is not the very tensor that the cut block before it gave: "
                "what reads or changes a tensor between two blocks needs it whole"
            )
        return _replaced(args, kwargs, x, marked(entering(x, self.entry_of(x), self.axis), self.entry_of(x)))

    def _entry(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Tensor | None:
        return next((each for path, each in tensor_leaves(args, kwargs) if path == self.first.entry_path), None)

    # ------------------------------------------------------------------ versions

    def _version(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Version:
        now = _without_strides(conditions(self.block, args, kwargs))
        x = self._entry(args, kwargs)
        for version in [self.last, *self.versions]:
            if version.expected == now and (x is None or held_as(x) == version.entry):
                return version
        trouble = differences(self.first.expected, now)
        if self._choose is None or not all(_is_shape(self.first.expected.get(name), now.get(name)) for name in trouble):
            raise OtherConditions(
                f"{type(self.block).__name__} is cut over {self.axis.n} ranks for calls that are like the one that was captured; "
                f"other are: {', '.join(trouble)}. Capture it anew"
            )
        self.versions.append(self._made_for(self._choose, args, kwargs))
        return self.versions[-1]

    def _made_for(self, choose: Choose, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Version:
        first, n = self.first, self.axis.n
        named = zip(first.captured.parameters, first.captured.parameter_nodes, strict=True)
        shapes = {name: tuple(value_of(node).shape) for name, node in named}
        x = self._entry(args, kwargs)
        entry = (x is not None and held_as(x)) or WHOLE
        whole = (args, dict(kwargs)) if x is None else _replaced(args, kwargs, x, _whole_of(x, entry, n))
        with self._as_it_was():
            captured = capture(self.block, *whole, shapes)
        self._agree(captured)
        fixed: dict[fx.Node, Held] = {
            node: self.held[name] for name, node in zip(captured.parameters, captured.parameter_nodes, strict=True)
        }
        entries = dict(zip(captured.arguments, captured.argument_nodes, strict=True))
        if first.entry_path:
            fixed[entries[first.entry_path]] = entry
        if captured.tangent_nodes:
            leaves = captured.tangent_nodes[0]
            fits = isinstance(first.exit, Cut) and first.exit.divides(value_of(leaves).shape, n)
            fixed[leaves] = first.exit if fits else WHOLE
        return Version(*choose(captured, fixed, first), self.axis)

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The block with the forward that it had."""
        if self._own_forward is None:
            del self.block.forward
        else:
            self.block.forward = self._own_forward
        try:
            yield
        finally:
            self.block.forward = self.forward


def _other(found: Sequence[Any]) -> int:
    """The first rank that has something else than rank 0, or 0."""
    return next((rank for rank, each in enumerate(found) if each != found[0]), 0)


def _random_state(block: nn.Module) -> bytes:
    """Of the generator that the block's device draws from."""
    device = next((each.device for each in block.parameters()), torch.device("cpu"))
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return bytes(state.tolist())


def _whole_of(x: Tensor, held: Held, n: int) -> Tensor:
    """Of a part, the whole tensor without data."""
    if not isinstance(held, Cut):
        return x
    shape = [size * n if dim == held.dim else size for dim, size in enumerate(x.shape)]
    with FakeTensorMode():
        return torch.empty(shape, dtype=x.dtype, device=x.device).requires_grad_(x.requires_grad)


def _replaced(args: tuple[Any, ...], kwargs: Mapping[str, Any], x: Tensor, by: Tensor) -> tuple[tuple[Any, ...], dict[str, Any]]:
    found: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(lambda each: by if each is x else each, (args, dict(kwargs)))
    return found


def _is_shape(before: Any, now: Any) -> bool:
    """Whether two conditions of an argument differ in the shape of a tensor alone."""
    if not isinstance(before, tuple) or not isinstance(now, tuple) or not isinstance(before[0], torch.dtype):
        return False
    return len(before) == len(now) and before[0] == now[0] and before[2:] == now[2:]


def _without_strides(found: Conditions) -> dict[str, Any]:
    """How a tensor lies in memory steers eager's views alone, and generated code reshapes instead."""
    forms: dict[str, Any] = dict(found)
    tensors = [name for name, form in forms.items() if name.startswith("argument ") and isinstance(form[0], torch.dtype)]
    return forms | {name: (*forms[name][:2], *forms[name][3:]) for name in tensors}


class _Made(torch.autograd.Function):
    """One call. Parameters are among the inputs for autograd's sake alone; the code reads them when it needs them."""

    @staticmethod
    def forward(context: Any, version: Version, tensors: Sequence[Tensor], given: Sequence[Tensor], *wanted: Tensor) -> Any:
        read = _reader(tensors)
        outputs, saved = version.code.forward(read, [each.detach() for each in given])
        context.version, context.read = version, read
        context.save_for_backward(*saved)
        context.mark_non_differentiable(*(outputs[at] for at in version.without_gradient))
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(context: Any, *gradients: Tensor) -> Any:
        version: Version = context.version
        without = set(version.without_gradient)
        tangents = [each.contiguous() for at, each in enumerate(gradients) if at not in without]
        found = version.code.backward(context.read, context.saved_tensors, tangents)
        return (None, None, None, *found)


def _reader(tensors: Sequence[Tensor]) -> Callable[[int], Tensor]:
    return lambda at: tensors[at].detach()
