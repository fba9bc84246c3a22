"""The dry run: one forward with fake weights and a real batch, op by op, from which a Flow follows.

Calls run on fake tensors, so that they take no time and no memory. Glue runs as it is: on numbers where all that it reads has
them, such as a mask of the batch, else on fakes. Of each storage it is known which results and parameters it is made of. A
tensor that leaves a call in another way than by being returned, through a hook, an attribute or a cache, is refused: it would
be missing where another stage makes the call.

Forwards have to be alike. Where code outside of calls draws random numbers, other forwards are tried for whether they make the
same calls; where a forward leaves numbers or results behind in the model, another one is, for whether it does so every time and
reads them: no rank would have them all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DynamicOutputShapeException, FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.values.stages import Call, Flow, Value

from .alike import PLAIN, Checkpoints, Numbers, OwnGenerators, refuse_backward_hooks, refuse_other_calls
from .calls import Calls, Forward
from .dynamic import of_right_shape
from .keys import Draws, drawing, is_random

CPU = torch.device("cpu")
OTHER_FORWARDS = 3  # with other random numbers


@dataclass(frozen=True)
class Inside:
    """A tensor that a call has made."""

    call: int


@dataclass(frozen=True)
class Held:
    """A parameter."""

    name: str


@dataclass(frozen=True)
class Before:
    """Made by a call of the forward before."""

    path: str


Source: TypeAlias = Value | Inside | Held | Before


@dataclass(frozen=True, eq=False)
class Dry:
    """What a dry run has found: the flow, and in which structure each call returns its leaves."""

    flow: Flow
    structures: tuple[pytree.TreeSpec, ...]
    draws_elsewhere: bool = False  # random numbers of Python's or numpy's, too
    draws: str = ""  # what draws random numbers first, if anything does


@dataclass(eq=False)
class Open:
    """A call that is being looked at, or has been."""

    path: str
    is_block: bool
    reads: set[Value] = field(default_factory=set)
    parameters: set[str] = field(default_factory=set)
    buffers: set[str] = field(default_factory=set)
    changed: set[int] = field(default_factory=set)
    structure: Any = None

    def done(self) -> Call:
        reads, parameters, changed = frozenset(self.reads), frozenset(self.parameters), frozenset(self.changed)
        return Call(self.path, self.is_block, reads, parameters, changed, frozenset(self.buffers))


def dry_run(
    model: nn.Module, modules: Mapping[str, nn.Module], blocks: frozenset[str], loss: Callable[[], Any], mode: FakeTensorMode
) -> Dry:
    """Of the loss of a model whose parameters are fake. `modules` are those whose calls count, some of them blocks."""

    def forward(origins: Origins) -> Dry:
        return _forward(modules, blocks, loss, mode, origins, draws)

    refuse_backward_hooks(model, modules)
    with drawing(CPU, elsewhere=True):  # the same on all ranks
        draws, origins, numbers, generators = Draws(), Origins(model), Numbers(model, modules), OwnGenerators(model, modules)
        found = forward(origins)
    first = origins.draws or ("Python's or numpy's generator" if draws.elsewhere else "")
    found = replace(found, draws_elsewhere=draws.elsewhere, draws=first)
    generators.refuse_shared()
    others = OTHER_FORWARDS if draws.by_glue else 0
    if numbers.have_changed() or origins.are_kept_by(model):
        origins.begin_another()
        forward(origins)
        numbers.refuse_counting()
    for number in range(others):
        with drawing(CPU, number, elsewhere=True):
            refuse_other_calls(found.flow, forward(Origins(model)).flow)
    return found


def _forward(
    modules: Mapping[str, nn.Module],
    blocks: frozenset[str],
    loss: Callable[[], Any],
    mode: FakeTensorMode,
    origins: Origins,
    draws: Draws,
) -> Dry:
    noted = _Noted(modules, blocks, origins, mode, draws)
    calls = Calls(modules)
    calls.install()
    try:
        with calls.handled_by(noted), Watching(origins):
            result = loss()
    finally:
        calls.remove()
    draws.note(by_glue=True)
    end = Open("", is_block=False)
    origins.now, origins.index = end, len(noted.calls)
    for each in pytree.tree_leaves(result):
        if isinstance(each, Tensor):
            origins.read(each)
    noted.note_changes()
    found = tuple(each.done() for each in noted.calls)
    return Dry(Flow(found, end.done()), tuple(each.structure for each in noted.calls))


class Origins:
    """By storage, what it is made of. `now`: the call that is under way."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = {_key(each): name for name, each in model.named_parameters()}
        self._buffers = {_key(each): name for name, each in model.named_buffers()}
        self._of: dict[int, frozenset[Source]] = {}
        self._kept: list[Any] = []  # so that no storage takes the place of another
        self.calls: list[Open] = []
        self.now: Open | None = None
        self.index = -1  # of it
        self.draws = ""  # the first op that does, and where

    def are_kept_by(self, model: nn.Module) -> bool:
        """Whether anything that calls have made or returned lies in an attribute."""
        held = pytree.tree_leaves([dict(vars(each)) for each in model.modules()])
        return any(
            isinstance(source, Value | Inside)
            for each in held
            if isinstance(each, Tensor)
            for source in self._of.get(_key(each), ())
        )

    def begin_another(self) -> None:
        """Forward, of the same model: what is there is the last one's."""
        paths = [each.path for each in self.calls]
        for key, sources in self._of.items():
            self._of[key] = frozenset(Before(paths[each.call]) if isinstance(each, Value | Inside) else each for each in sources)
        self.calls, self.now, self.index = [], None, -1

    def op(self, func: Any, args: Any, kwargs: Any) -> Any:
        if self.now is None and torch._C._current_graph_task_id() != -1:
            raise ValueError(
                "code outside of the model's blocks goes backward by itself (autograd.grad, or a gradient penalty), and a rank "
                "of a pipeline has only its own part of the graph; do that inside of one block, or train without a pipeline axis"
            )
        given = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        sources = frozenset[Source]().union(*map(self.read, given))
        if not self.draws and is_random(func, args, kwargs):
            self.draws = f"{func._overloadpacket.__name__} in {self.now.path if self.now else 'code outside of blocks'}"
        try:
            result = func(*args, **kwargs)
        except DynamicOutputShapeException as error:
            if self.now is not None:
                raise
            result = of_right_shape(func, args, kwargs, error)
        there = {_key(each) for each in given}
        made = Inside(self.index) if self.now is not None else None
        for each in pytree.tree_leaves(result):
            if isinstance(each, Tensor) and _key(each) not in there:
                self._set(each, frozenset({made}) if made else sources)
        for each in _written(func, args, kwargs):
            self._write(each, sources)
        return result

    def _write(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        key = _key(tensor)
        name, before = self._buffers.get(key), self._of.get(key, frozenset())
        if self.now is not None and name:
            self.now.buffers.add(name)
        elif self.now is not None and Inside(self.index) not in before:
            raise ValueError(
                f"{self.now.path!r} writes in place into {self._parameters.get(key, 'a tensor that it is given')}, where another "
                "rank of a pipeline would not see it; write into a tensor of its own (inplace=False), and return that"
            )
        elif name:
            raise ValueError(
                f"buffer {name} is written outside of the model's blocks, and ranks of a pipeline run other parts of a forward: "
                "they would have other numbers in it; write it inside of a block"
            )
        elif self.now is None:
            self._set(tensor, before | sources)

    def read(self, tensor: Tensor) -> frozenset[Source]:
        """What a reader outside of calls goes on to be made of; a call notes what it reads."""
        key = _key(tensor)
        found = self._of.get(key, frozenset())
        if key in self._parameters:
            found |= {Held(self._parameters[key])}
        if self.now is None:
            self._refuse_escaped(found, "the model's code outside of it")
            return found
        for each in found:
            if isinstance(each, Value):
                self.now.reads.add(each)
            elif isinstance(each, Held):
                self.now.parameters.add(each.name)
        self._refuse_escaped(found - {Inside(self.index)}, f"{self.now.path!r}" if self.now.path else "the loss")
        return frozenset()

    def _refuse_escaped(self, sources: frozenset[Source], reader: str) -> None:
        for each in sources:
            if isinstance(each, Before) and (self.now is None or self.now.path != each.path):
                raise ValueError(
                    f"what {each.path!r} has made in one forward is read by {reader} in the next, where another rank of a "
                    "pipeline does not have it; train without a pipeline axis"
                )
            if isinstance(each, Inside):
                raise ValueError(
                    f"a tensor that {self.calls[each.call].path!r} makes and does not return is read by {reader}: it leaves the "
                    "module through a hook, an attribute or a cache, and is missing where another rank of a pipeline makes the "
                    "call; return it, or train without a pipeline axis"
                )

    def returned(self, tensor: Tensor, value: Value) -> None:
        """By the call under way. Of what is given back as it came, or as a view, it is what it was as well."""
        before = self._of.get(_key(tensor), frozenset()) - {Inside(self.index)}
        self._set(tensor, before | {value})

    def _set(self, tensor: Tensor, sources: frozenset[Source]) -> None:
        self._kept.append(tensor)
        self._of[_key(tensor)] = sources


class Watching(TorchDispatchMode):
    """`inside`: of calls, over the fake mode; else of all else, under it."""

    def __init__(self, origins: Origins, *, inside: bool = False) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._origins, self._inside = origins, inside

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._inside != (self._origins.now is not None):
            return func(*args, **(kwargs or {}))
        return self._origins.op(func, args, kwargs or {})


class _Noted:
    """Is told of calls, and makes them on fake tensors."""

    def __init__(
        self, modules: Mapping[str, nn.Module], blocks: frozenset[str], origins: Origins, mode: FakeTensorMode, draws: Draws
    ) -> None:
        self._modules, self._blocks, self._origins, self._mode, self._draws = modules, blocks, origins, mode, draws
        self.calls = origins.calls
        self._returned: list[tuple[int, int, Tensor, int, bool]] = []  # with its version, and whether it needs a gradient
        self._checkpoints = Checkpoints()

    def __call__(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        self._draws.note(by_glue=True)
        origins, index = self._origins, len(self.calls)
        now = Open(path, path in self._blocks)
        self.calls.append(now)
        self._checkpoints.note(index)
        now.buffers |= set(_running_statistics(path, self._modules[path]))
        origins.now, origins.index = now, index
        for each in pytree.tree_leaves((args, kwargs)):
            if isinstance(each, Tensor):
                origins.read(each)  # whether this forward does or not: another may
        try:
            with self._mode, Watching(origins, inside=True):
                result = forward(*args, **kwargs)
            leaves, now.structure = pytree.tree_flatten(result)
            for at, leaf in enumerate(leaves):
                if isinstance(leaf, Tensor):
                    origins.returned(leaf, Value(index, at))
                    self._returned.append((index, at, leaf, leaf._version, leaf.requires_grad))
                elif not isinstance(leaf, PLAIN):
                    raise ValueError(
                        f"{path!r} returns a {type(leaf).__name__}, which another rank of a pipeline cannot be sent; return "
                        "tensors and plain values, in tuples, lists and dicts"
                    )
        finally:
            origins.now, origins.index = None, -1
        self._draws.note(by_glue=False)
        return result

    def note_changes(self) -> None:
        for index, at, leaf, version, needs_grad in self._returned:
            if leaf._version != version:
                self.calls[index].changed.add(at)
            elif leaf.requires_grad and not needs_grad:
                raise ValueError(
                    f"{self.calls[index].path!r} is called inside of an autograd function, such as "
                    "checkpoint(use_reentrant=True), which goes backward through it by itself, and stages may be cut before and "
                    "after it; use checkpoint(use_reentrant=False), or train without a pipeline axis"
                )
        if torch.is_grad_enabled():
            self._checkpoints.refuse_cut([each.path for each in self.calls], [each.is_block for each in self.calls])


def _running_statistics(path: str, module: nn.Module) -> Iterator[str]:
    """Buffers that norms write past torch's schemas."""
    for name, inner in module.named_modules():
        if inner.training and getattr(inner, "track_running_stats", False):
            yield from (f"{path}.{name}.{each}" if name else f"{path}.{each}" for each in inner._buffers)


def _written(func: Any, args: Any, kwargs: Any) -> Iterator[Tensor]:
    if not func._schema.is_mutable:
        return
    for at, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[at] if at < len(args) else kwargs.get(argument.name)
            yield from (each for each in pytree.tree_leaves(given) if isinstance(each, Tensor))


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else id(tensor)
