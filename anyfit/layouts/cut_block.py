"""CutBlock: a module's forward, made by generated code over the ranks of an axis.

`BlockCut` says how the ranks hold the block's parameters and what enters and leaves it; a rank's parameters are its parts. The
first call captures the block, with whole parameters though a rank has but parts, and what is in between is solved: one autograd
function, whose backward is generated too. Every call under other conditions (another length, evaluation, autocast) gets a
version of its own in the same way, with the same parts; the border is whole where the axis does not divide it. What cannot be
captured then runs as the block's own Python, with its parameters put together for the call.

What stands for the block's forward is, from the outside: the border, which brings what enters to the way in which this version
takes it (border.py); whatever else stands around a block's forward, such as recomputation; the generated code. So recomputation
and offloading see plain tensors of a rank's own.

Gradients of cut parameters come as the parameters lie. Those of whole ones come so that their mean over the ranks of the axis
is the gradient: each rank has all of it, or n times a summand of it. It is the same for parameters outside of cut blocks, so
that one may be used inside and outside, and in versions with other layouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from anyfit.values.block_layouts import BlockLayout
from anyfit.values.cuts import SUM, WHOLE, Held
from anyfit.values.demands import StaysUncut
from anyfit.values.plan import BlockCut

from .alike import Alike
from .axis import Axis, moved
from .border import Part, entered, whole_of
from .capture import Captured, Forward, capture
from .fakes import Fakes
from .generate import generate
from .graph import ancestors, is_random, name_of, value_of
from .guard import Conditions, NotCaptured, conditions, differences, tensor_leaves
from .problem import Posed

NOTHING = object()
MANY = 16  # versions of a block, each of which took a part of a second to capture


@dataclass(frozen=True, eq=False)
class Solved:
    """A captured block with its layout, for all blocks whose graphs are equal."""

    posed: Posed
    layout: BlockLayout
    axis: Axis

    @cached_property
    def code(self) -> Any:
        return generate(self.posed, self.layout, self.axis)

    @cached_property
    def entry(self) -> Held:
        return self.layout.held(self.posed.problem, self.posed.problem.entry)

    @cached_property
    def exit(self) -> Held:
        return self.layout.held(self.posed.problem, self.posed.problem.exit)

    @property
    def held(self) -> list[Held]:
        """How each parameter is."""
        return [self.layout.held(self.posed.problem, self.posed.number(node)) for node in self.posed.captured.parameter_nodes]

    @cached_property
    def summands(self) -> list[int]:
        """Places among the gradients of those that the ranks have yet to add up."""
        return [place for place, (node, _) in enumerate(self.posed.captured.gradients) if self._sums(node)]

    def _sums(self, node: fx.Node) -> bool:
        end = self.posed.gradient_ends.get(node)
        return end is not None and self.posed.problem.steps[end].ways[self.layout.ways[end]].reads[0] == SUM


# Poses a captured block and chooses its layout, with some of its tensors held in given ways, alike on all ranks. A version that
# the block has already is one to keep to, where the graph has the same form.
Choose: TypeAlias = Callable[[Captured, Mapping[fx.Node, Held], Solved | None], Solved]


@dataclass(frozen=True, eq=False)
class Version:
    """The block for calls under some conditions."""

    captured: Captured
    solved: Solved

    @cached_property
    def expected(self) -> Mapping[str, Any]:
        return self.captured.guard if self.reads_memory else _without_strides(self.captured.guard)

    @cached_property
    def reads_memory(self) -> bool:
        """Whether how arguments lie in memory decides what comes out: random numbers are drawn in that order."""
        return any(is_random(node) or name_of(node).startswith("aten.as_strided") for node in self.captured.nodes)

    @cached_property
    def entry_path(self) -> str:
        """Of the argument that may be cut."""
        posed = self.solved.posed
        for path, node in zip(self.captured.arguments, posed.captured.argument_nodes, strict=True):
            if posed.number(node) == posed.problem.entry:
                return path
        return ""

    @cached_property
    def output_strides(self) -> dict[int, tuple[int, ...]]:
        """How each output lies in memory when eager makes it: random numbers that others draw for it come in that order."""
        outputs = enumerate(self.captured.outputs)
        return {at: value_of(each).stride() for at, each in outputs if isinstance(each, fx.Node)}

    @cached_property
    def without_gradient(self) -> list[int]:
        """Outputs that have none, among those that are tensors."""
        tensors = [at for at, each in enumerate(self.captured.outputs) if isinstance(each, fx.Node)]
        return [place for place, at in enumerate(tensors) if at not in self.captured.with_tangents]

    @cached_property
    def depends(self) -> list[set[int]]:
        """By gradient, on which tangents."""
        tangents = self.captured.tangent_nodes
        made_from = (ancestors(self.captured.module.graph, [gradient]) for _, gradient in self.captured.gradients)
        return [{at for at, node in enumerate(tangents) if node in found} for found in made_from]

    @cached_property
    def asks(self) -> list[bool]:
        """Which of parameters, buffers and arguments have a gradient."""
        wanted = {node for node, _ in self.captured.gradients}
        return [node in wanted for node in self.captured.placeholders[: -len(self.captured.tangent_nodes) or None]]


class CutBlock:
    def __init__(
        self,
        name: str,
        block: nn.Module,
        cut: BlockCut,
        shapes: Mapping[str, Sequence[int]],  # of the whole parameters
        axis: Axis,
        choose: Choose,
        say: Callable[[str], None] = lambda _line: None,
        alike: Alike | None = None,  # what was captured of other blocks
    ) -> None:
        self.name, self.block, self.cut, self.axis, self._shapes = name, block, cut, axis, shapes
        self._choose, self._say, self._said = choose, say, set[str]()
        self._alike = alike or Alike()
        self.versions: list[Version] = []
        self._own = vars(block).get("forward", NOTHING)
        self.eager_forward: Callable[..., Any] = block.forward
        self.made: Callable[..., Any] = Made(self)  # around which others may stand
        self.is_whole = False  # its parameters are put together for a while

    def install(self) -> None:
        self.block.forward = self.made

    def close_border(self) -> None:
        """Once all that stands around the generated code is there."""
        self.made = self.block.forward
        self.block.forward = self.forward

    def remove(self) -> None:
        if self._own is NOTHING:
            vars(self.block).pop("forward", None)
        else:
            self.block.forward = self._own

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if self.is_whole:
            args, kwargs = whole_of((args, kwargs))
            return self.eager_forward(*args, **kwargs)
        try:
            at = self._version(args, kwargs)
        except NotCaptured as reason:
            return self._together(str(reason), args, kwargs)
        version = self.versions[at]
        args, kwargs = self._entered(version, args, kwargs)
        leaves, tree = pytree.tree_flatten(self.made(at, *args, **kwargs))
        for at, strides in version.output_strides.items():
            held = version.solved.exit if at in version.captured.with_tangents[:1] else WHOLE
            leaves[at] = Part.of(leaves[at], held, self.axis, strides)
        return pytree.tree_unflatten(leaves, tree)

    def _entered(self, version: Version, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """With what enters held as the version takes it, and all else whole."""
        leaves, tree = pytree.tree_flatten((tuple(args), dict(kwargs)))
        tensors = [at for at, each in enumerate(leaves) if isinstance(each, Tensor)]
        for at, path in zip(tensors, version.captured.arguments, strict=True):
            if path == version.entry_path:  # and not the same tensor elsewhere among the arguments
                leaves[at] = entered(leaves[at], version.solved.entry, self.axis)
        found: tuple[Any, Any] = pytree.tree_unflatten(whole_of(leaves), tree)
        return found

    # ------------------------------------------------------------------ versions

    def _version(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
        with torch._C.DisableTorchFunctionSubclass():  # no parameter is used
            exactly = conditions(self.block, args, kwargs)
        now = _without_strides(exactly)
        for at in reversed(range(len(self.versions))):
            version = self.versions[at]
            if version.expected == (exactly if version.reads_memory else now):
                return at
        self.versions.append(self._made_for(args, kwargs))
        if len(self.versions) == MANY:
            what = ", ".join(differences(self.versions[-2].captured.guard, self.versions[-1].captured.guard))
            self._say(
                f"block {self.name!r} has been captured {MANY} times, as {what} differs between calls: pad to fewer lengths, and "
                "give numbers that change as tensors"
            )
        return len(self.versions) - 1

    def _made_for(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Version:
        captured = self._captured(*_without_parts((args, dict(kwargs))))
        named = zip(captured.parameters, captured.parameter_nodes, strict=True)
        fixed: dict[fx.Node, Held] = {node: self.cut.parameters.get(name, WHOLE) for name, node in named}
        entry = next((node for node in captured.argument_nodes if value_of(node).is_floating_point()), None)
        leaving = captured.tangent_nodes[0] if captured.tangent_nodes else None
        for node, held in ((entry, self.cut.entry), (leaving, self.cut.exit)):
            if node is not None:
                fixed[node] = held if held is not None and held.divides(value_of(node).shape, self.axis.n) else WHOLE
        return Version(captured, self._choose(captured, fixed, self.versions[0].solved if self.versions else None))

    def _captured(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Captured:
        """The same on all ranks, or an error on all of them."""
        found: Captured | None = None
        refused, other, drawn = "", "", b""
        try:
            with self._as_it_was(), _disable_current_modes(), saved_tensors_hooks(_same, _same):  # nobody is to count it
                found = self._alike.find(self.block, args, kwargs, self._shapes)
                if found is None:
                    found = capture(self.block, args, kwargs, self._shapes)
                    self._alike.keep(found, self.block, self._shapes)
        except NotCaptured as error:
            refused = str(error)
        except Exception as error:  # of one rank alone, it would leave the others waiting
            other = f"{type(error).__name__}: {error}"
        if found is not None and any(map(is_random, found.nodes)):
            drawn = _random_state(self.block)
        everybody = self.axis.all_of((refused, other, found and found.key, drawn))
        for rank, each in enumerate(everybody):
            if each[0]:
                raise NotCaptured(each[0])
            if each[1]:
                raise RuntimeError(f"block {self.name!r} could not be captured on rank {rank} of its tensor axis: {each[1]}")
            if each[2] != everybody[0][2]:
                raise ValueError(
                    f"block {self.name!r} does other things on rank {rank} of its tensor axis than on rank 0: give all of them "
                    "the same batch"
                )
            if each[3] != everybody[0][3]:
                raise ValueError(
                    f"block {self.name!r} draws random numbers, and the generator of rank {rank} of its tensor axis is not where "
                    "that of rank 0 is: seed all of them alike (torch.manual_seed)"
                )
        assert found is not None
        return found

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        """The block with its own forward."""
        now = vars(self.block).get("forward", NOTHING)
        self.remove()
        try:
            yield
        finally:
            if now is not NOTHING:
                self.block.forward = now

    # ------------------------------------------------------------------ as its own Python

    def _together(self, reason: str, args: Any, kwargs: Any) -> Any:
        """The block's own forward, with all parameters put together for the call. Not in the first training call: what is never
        captured is not to be cut."""
        if not self.versions and torch.is_grad_enabled() and self.block.training:
            raise StaysUncut(
                f"block {self.name!r} cannot be cut over the tensor axis: {reason}. Leave it out of `cut`, and it runs whole"
            ) from None
        if reason not in self._said:
            self._said.add(reason)
            self._say(f"block {self.name!r} runs with its weights put together over the tensor axis: {reason}")
        whole = {
            f"block.{name}": moved((mine := own_part(each)).view_as(mine), held, WHOLE, self.axis)  # a view tells that it is used
            for name, each in self.block.named_parameters()
            if (held := self.cut.parameters.get(name)) is not None
        }
        args, kwargs = whole_of((args, kwargs))
        with self._as_it_was():
            return functional_call(Forward(self.block), whole, args, kwargs)


class Made:
    """The generated code of one of a block's versions."""

    def __init__(self, of: CutBlock) -> None:
        self._of = of
        self.eager_forward = of.eager_forward

    def __call__(self, at: int, *args: Any, **kwargs: Any) -> Any:
        version, block = self._of.versions[at], self._of.block
        captured = version.captured
        parameters, buffers = dict(block.named_parameters()), dict(block.named_buffers())
        tensors: list[Tensor] = [
            *(parameters[name] for name in captured.parameters),
            *(buffers[name] for name in captured.buffers),
        ]
        given = [each for _, each in tensor_leaves(args, kwargs)]
        wanted = [each for each, asks in zip([*tensors, *given], version.asks, strict=True) if asks]
        results = iter(_Made.apply(version, tensors, given, *wanted))  # type: ignore[no-untyped-call]
        leaves = [next(results) if isinstance(each, fx.Node) else each for each in captured.outputs]
        return pytree.tree_unflatten(leaves, captured.output_tree)


def _same(x: Tensor) -> Tensor:
    return x


def _random_state(block: nn.Module) -> bytes:
    """Of the generator that the block's device draws from."""
    device = next((each.device for each in block.parameters()), torch.device("cpu"))
    state = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    return state.numpy().tobytes()


def _without_parts(arguments: Any) -> Any:
    """With a tensor of the whole's shape, and without data, for each part."""

    mode = Fakes()

    def shape_of(part: Part) -> Tensor:
        with mode:
            made = torch.empty_strided(part.shape, part.stride(), dtype=part.dtype, device=part.device)
            return made.requires_grad_(part.requires_grad)

    return pytree.tree_map_only(Part, shape_of, arguments)


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
        outputs, saved = version.solved.code.forward(read, [each.detach() for each in given])
        context.version, context.read = version, read
        context.forms = [(each.shape, each.dtype, each.device) for each in outputs]
        context.set_materialize_grads(False)  # what nothing was made of has no gradient, and neither has what it alone needs
        context.save_for_backward(*saved)
        context.mark_non_differentiable(*(outputs[at] for at in version.without_gradient))
        return tuple(outputs)

    @staticmethod
    def backward(context: Any, *gradients: Tensor) -> Any:
        version: Version = context.version
        if torch.is_grad_enabled():
            raise StaysUncut(
                "a gradient is taken with create_graph=True through a block that is cut over the tensor axis, and its gradients "
                "have none of their own; plan without a tensor axis: tensor=1"
            )
        without = set(version.without_gradient)
        wanted = [each for at, each in enumerate(zip(gradients, context.forms, strict=True)) if at not in without]
        tangents = [
            torch.zeros(form[0], dtype=form[1], device=form[2]) if each is None else each.contiguous() for each, form in wanted
        ]
        found = version.solved.code.backward(context.read, context.saved_tensors, tangents)
        for place in version.solved.summands:
            found[place] = found[place] * version.solved.axis.n  # of which the mean is taken
        if any(each is None for each, _ in wanted):
            there = {at for at, (each, _) in enumerate(wanted) if each is not None}
            found = [each if on & there else None for each, on in zip(found, version.depends, strict=True)]
        return (None, None, None, *found)


def own_part(parameter: Tensor) -> Tensor:
    """What this rank has of a parameter, which stands for the whole to all others."""
    local: Callable[[], Tensor] | None = getattr(parameter, "local", None)
    return parameter if local is None else local()


def _reader(tensors: Sequence[Tensor]) -> Callable[[int], Tensor]:
    """Plain tensors: to ask for one tells whoever looks after weights that it is about to be used."""

    def read(at: int) -> Tensor:
        found = own_part(tensors[at]).detach()
        return found if type(found) is Tensor else found.as_subclass(Tensor)

    return read
