"""Recordings of a block: its ops as CUDA graphs, which read and write fixed memory, and the memory that a call is copied to.

A recomputed block saves nothing from forward to backward, so two recordings make all of it: forward; and backward, which is the
forward again and the gradients of it. On a CPU nothing is launched: there a recording runs its ops again, so that all else can be
tried where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .chunks import quietly
from .compiled_trial import as_it_is, without_history
from .forward_state import Settings

PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)
ALIGNED = 128  # elements: where a gradient begins in the memory of all


@dataclass(frozen=True)
class Input:
    """Stands for a tensor among the values of a call."""

    number: int


@dataclass(frozen=True)
class Output:
    """Stands for a tensor among the values that a call returns."""

    number: int


@dataclass(frozen=True)
class Signature:
    """All that calls of one recording have in common."""

    form: TreeSpec
    values: tuple[Any, ...]
    inputs: tuple[tuple[Any, ...], ...]  # facts of each
    settings: tuple[Any, ...]  # of torch

    def leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """These as inputs, without history: those learn that did."""
        return [each.detach().requires_grad_(facts[-1]) for each, facts in zip(tensors, self.inputs, strict=True)]

    def arguments(self, inputs: Sequence[Tensor]) -> Any:
        values = [inputs[each.number] if isinstance(each, Input) else each for each in self.values]
        return tree_unflatten(values, self.form)


class Call:
    """The arguments of a call, taken apart. A tensor that is given twice is one input."""

    def __init__(self, args: Any, kwargs: Any, device: torch.device) -> None:
        leaves, form = tree_flatten((args, kwargs))
        self.inputs: list[Tensor] = []
        self.unfit: str | None = None  # why it cannot be recorded
        numbers: dict[int, int] = {}
        values: list[Any] = []
        for each in leaves:
            if type(each) is Tensor and each.layout == torch.strided and each.device == device:
                if id(each) not in numbers:
                    numbers[id(each)] = len(self.inputs)
                    self.inputs.append(each)
                values.append(Input(numbers[id(each)]))
            else:
                values.append(each)
                if not isinstance(each, PLAIN):
                    self.unfit = f"it is given a {type(each).__name__}, and only tensors on {device} and plain values can be"
        facts = tuple((each.shape, each.stride(), each.dtype, each.requires_grad) for each in self.inputs)
        self.signature = Signature(form, tuple(values), facts, Settings(device).facts)


class Fixed:
    """Tensors whose memory stays where it is, like some others, and which take what those hold."""

    def __init__(self, like: Sequence[Tensor]) -> None:
        self.tensors: list[Tensor] = []
        self._homes: list[Tensor] = []  # of each, but for what is expanded
        self._parts: list[tuple[slice, ...] | None] = []
        with torch.no_grad(), quietly():
            for each in like:
                is_expanded = 0 in each.stride()
                part = tuple(slice(1) if step == 0 else slice(None) for step in each.stride())
                known = each[part] if is_expanded else each
                home = torch.empty_strided(known.shape, known.stride(), dtype=each.dtype, device=each.device)
                self._homes.append(home)
                self._parts.append(part if is_expanded else None)
                self.tensors.append(home.expand(each.shape) if is_expanded else home)
        self.take(like)

    def take(self, given: Sequence[Tensor]) -> None:
        with torch.no_grad(), quietly():
            copied(self._homes, [each if part is None else each[part] for each, part in zip(given, self._parts, strict=True)])


def copied(targets: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """In one launch for each dtype."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        pair = by_dtype.setdefault(target.dtype, ([], []))
        pair[0].append(target)
        pair[1].append(source)
    for into, of in by_dtype.values():
        torch._foreach_copy_(into, of)


def together(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    """Copies of these, of one dtype in one piece of memory."""
    places: dict[torch.dtype, int] = {}
    offsets = []
    for each in tensors:
        if each is not None:
            offsets.append(places.get(each.dtype, 0))
            places[each.dtype] = offsets[-1] + -(-each.numel() // ALIGNED) * ALIGNED
    device = next((each.device for each in tensors if each is not None), None)
    flat = {dtype: torch.empty(size, dtype=dtype, device=device) for dtype, size in places.items()}
    found: list[Tensor | None] = []
    at = iter(offsets)
    for each in tensors:
        if each is None:
            found.append(None)
            continue
        start = next(at)
        found.append(flat[each.dtype][start : start + each.numel()].view(each.shape))
    pairs = [(to, of) for to, of in zip(found, tensors, strict=True) if to is not None and of is not None]
    copied([to for to, _ in pairs], [of for _, of in pairs])
    return found


class Recording:
    """Ops that run again at the same addresses: a CUDA graph, or, on a CPU, the function itself."""

    def __init__(self, run: Callable[[], list[Tensor | None]], device: torch.device, pool: Any) -> None:
        self._run, self._graph = run, None
        if device.type != "cuda":
            self.results = [None if each is None else each.clone() for each in run()]
            return
        self._graph = torch.cuda.CUDAGraph()
        wrong: list[BaseException] = []
        try:
            with torch.cuda.graph(self._graph, pool=pool, capture_error_mode="thread_local"):
                try:
                    self.results = run()
                except BaseException as error:
                    wrong.append(error)  # what ends the recording says less
                    raise
        except RuntimeError as error:
            _leave(device, pool)
            raise (wrong[0] if wrong else error) from None

    def replay(self) -> None:
        if self._graph is not None:
            self._graph.replay()
            return
        for result, found in zip(self.results, self._run(), strict=True):
            if result is not None and found is not None:
                result.copy_(found)


def _leave(device: torch.device, pool: Any) -> None:
    """After a recording that failed: torch would go on to take memory from its pool."""
    end = vars(torch._C).get("_cuda_endAllocateToPool")
    if end is not None:
        with contextlib.suppress(RuntimeError):
            end(device.index or 0, pool)


@dataclass(eq=False)
class Tape:
    """Both recordings, for calls of one signature."""

    signature: Signature
    inputs: Fixed
    state: Fixed  # parameters, and buffers
    slopes: Fixed  # gradients of the outputs that learn
    forward: Recording
    backward: Recording
    form: TreeSpec  # of what the block returns
    values: tuple[Any, ...]  # of it
    learns: tuple[bool, ...]  # by output

    def outputs_for(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        self.inputs.take(inputs)
        self.state.take(state)
        self.forward.replay()
        return [each.clone() for each in self.forward.results if each is not None]

    def gradients_for(self, inputs: Sequence[Tensor], state: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the inputs and parameters that learn, in this order."""
        self.inputs.take(inputs)
        self.state.take(state)
        self.slopes.take(slopes)
        self.backward.replay()
        return together(self.backward.results)

    def returned(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """As the block returns it: what it made, and what it was given and hands on."""
        kinds = {Output: outputs, Input: inputs}
        values = [kinds[type(each)][each.number] if type(each) in kinds else each for each in self.values]
        return tree_unflatten(values, self.form)


class Recorder:
    """Records a module's calls. `pool` is memory that recordings share while they run."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], device: torch.device, pool: Any) -> None:
        self._module, self._forward, self._device, self._pool = module, forward, device, pool
        self._parameters, self._buffers = list(module.parameters()), list(module.buffers())

    def record(self, call: Call) -> Tape:
        signature, inputs, state = call.signature, Fixed(call.inputs), Fixed([*self._parameters, *self._buffers])
        run = functools.partial(self._run, signature, inputs, state)

        def outputs() -> list[Tensor | None]:
            returned, leaves, _ = run()
            return [each.detach() for each in made_in(returned, leaves)]

        def gradients() -> list[Tensor | None]:
            returned, leaves, wanted = run()
            learning = [each for each in made_in(returned, leaves) if each.requires_grad]
            return list(torch.autograd.grad(learning, wanted, slopes.tensors, allow_unused=True))

        # What is made at first calls is there before anything is recorded.
        with beside_default_stream(self._device):
            returned, leaves, wanted = run()
            found = made_in(returned, leaves)
            form, values = described(returned, leaves)
            _refuse_unfit(found, values, wanted, [*call.inputs, *inputs.tensors, *state.tensors])
            learns = tuple(each.requires_grad for each in found)
            slopes = Fixed([each.detach() for each in found if each.requires_grad])
            del returned, leaves, wanted, found
            gradients()
        first, second = (Recording(each, self._device, self._pool) for each in (outputs, gradients))
        return Tape(signature, inputs, state, slopes, first, second, form, values, learns)

    def _run(self, signature: Signature, inputs: Fixed, state: Fixed) -> tuple[Any, list[Tensor], list[Tensor]]:
        """What the module returns, what it was given, and what learns. Leaves are new at each run: autograd waits for the stream
        on which a leaf was first used, and a recording must not wait for another's."""
        leaves = signature.leaves(inputs.tensors)
        weights = [nn.Parameter(each, of.requires_grad) for each, of in zip(state.tensors, self._parameters, strict=False)]
        own = zip([*self._parameters, *self._buffers], [*weights, *state.tensors[len(weights) :]], strict=True)
        args, kwargs = signature.arguments(leaves)
        with self._with({id(old): new for old, new in own}), torch.enable_grad():
            returned = self._forward(*args, **kwargs)
        return returned, leaves, [each for each in (*leaves, *weights) if each.requires_grad]

    @contextmanager
    def _with(self, new: dict[int, Any]) -> Iterator[None]:
        """Inside, the module's parameters and buffers are these, and nobody watches what is saved."""
        homes: list[tuple[Any, str, Any]] = [
            (part, key, each)
            for module in self._module.modules()
            for part in (module._parameters, module._buffers)
            for key, each in part.items()
            if each is not None
        ]
        try:
            for part, key, each in homes:
                part[key] = new[id(each)]
            with saved_tensors_hooks(without_history, as_it_is):
                yield
        finally:
            for part, key, each in homes:
                part[key] = each


def made_in(returned: Any, given: Sequence[Tensor]) -> list[Tensor]:
    """The tensors that a call has made, of those it returns: not what it was given and hands on."""
    handed_on = {id(each) for each in given}
    return [each for each in tree_leaves(returned) if isinstance(each, Tensor) and id(each) not in handed_on]


@contextmanager
def beside_default_stream(device: torch.device) -> Iterator[None]:
    """Inside, ops run on a stream of their own, after all that was launched before and before all that comes."""
    if device.type != "cuda":
        yield
        return
    stream: Any = torch.cuda.Stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)  # before memory of the one is given to the other


def described(returned: Any, given: Sequence[Tensor]) -> tuple[TreeSpec, tuple[Any, ...]]:
    """The form of what a block returns, and its values, with a number for each tensor."""
    leaves, form = tree_flatten(returned)
    places = {id(each): Input(number) for number, each in enumerate(given)}
    numbers = itertools.count()
    return form, tuple(places.get(id(each)) or Output(next(numbers)) if isinstance(each, Tensor) else each for each in leaves)


def _refuse_unfit(outputs: Sequence[Tensor], values: Sequence[Any], wanted: Sequence[Tensor], given: Sequence[Tensor]) -> None:
    if not wanted or not any(each.requires_grad for each in outputs):
        raise ValueError("nothing in it learns")
    for each in values:
        if not isinstance(each, (Input, Output, *PLAIN)):
            raise ValueError(f"it returns a {type(each).__name__}")
    known = {each.untyped_storage()._cdata for each in given}
    for each in outputs:
        if type(each) is not Tensor or each.untyped_storage()._cdata in known:
            raise ValueError("it returns memory of its inputs or weights")
        known.add(each.untyped_storage()._cdata)
