"""Recordings of a block: its ops as CUDA graphs, which read and write fixed memory, and the memory that a call is copied to.

Two recordings make all of a block. Where it is recomputed, it saves nothing: they are forward; and backward, which is the forward
again and the gradients of it. Where it is kept, backward is the gradients alone, of what the recorded forward saved, in memory
that is this block's own for as long as the recordings are there. So are its results then.

On a CPU nothing is launched: there a recording runs its ops again, so that all else can be tried where there is no GPU.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from .chunks import quietly
from .compiled_trial import as_it_is, without_history
from .fixed import Arena, Fixed
from .forward_state import Settings

ASKING = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
FAILED: list[Any] = []  # recordings, which torch's allocator may ask again
PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


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


class Ops(TorchDispatchMode):
    """The ops that run inside, with all that they are given but the values of tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.seen: list[Any] = []
        self.asks = False  # for a value on the device, on which what comes next may depend

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append((func, [_fact(each) for each in tree_leaves((args, kwargs))]))
        self.asks |= bool(ASKING & set(func.tags)) and not _is_plain_index(func, args)
        return func(*args, **(kwargs or {}))


class Hooks(TorchFunctionMode):
    """Whether hooks are added to tensors inside."""

    are_added = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.are_added |= func in (Tensor.register_hook, Tensor.register_post_accumulate_grad_hook, Tensor.retain_grad)
        return func(*args, **(kwargs or {}))


def _is_plain_index(func: Any, args: Any) -> bool:
    """Whether it reads by numbers, of which there are as many as results; by flags it has to count them."""
    if func.overloadpacket is not torch.ops.aten.index:
        return False
    return all(each is None or each.dtype not in (torch.bool, torch.uint8) for each in args[1])


def _fact(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    return value if isinstance(value, PLAIN) else type(value)


class Pool:
    """Memory that recordings share while they run. It is there as long as this is, also where the only recording of it fails."""

    def __init__(self, device: torch.device) -> None:
        self.handle: Any = None
        if device.type == "cuda":
            self.handle, self._held = torch.cuda.graph_pool_handle(), torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._held, self.handle, _side_stream(device), capture_error_mode="thread_local"):
                torch.zeros(1, device=device)


class Recording:
    """Ops that run again at the same addresses: a CUDA graph, or, on a CPU, the function itself."""

    def __init__(self, run: Callable[[], None], device: torch.device, pool: Any) -> None:
        self.replay = self._run = run  # which holds what it saved for another recording
        if device.type != "cuda":
            run()
            return
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(device)
        wrong: list[BaseException] = []
        try:
            with torch.cuda.graph(graph, pool=pool, stream=_side_stream(device), capture_error_mode="thread_local"):
                try:
                    run()
                except BaseException as error:
                    wrong.append(error)  # what ends the recording says less
                    raise
        except RuntimeError as error:
            FAILED.append(graph)
            _leave(device, pool, stream)
            raise (wrong[0] if wrong else error) from None
        self.replay = graph.replay


def _leave(device: torch.device, pool: Any, stream: Any) -> None:
    """After a recording that failed: torch would go on to launch ops on its stream, to take memory from its pool, and random
    numbers as if it were recording. A recording that succeeds ends the last."""
    torch.cuda.set_stream(stream)
    end = vars(torch._C).get("_cuda_endAllocateToPool")
    if end is not None:
        with contextlib.suppress(RuntimeError):
            end(device.index or 0, pool)
    with torch.cuda.graph(torch.cuda.CUDAGraph(), capture_error_mode="thread_local"):
        torch.zeros(1, device=device)


@dataclass(eq=False)
class Used:
    """A call whose backward is to come: what it saved must not be written over."""

    is_done: bool = False
    is_one_of_several: bool = False  # calls of one block, whose gradients autograd adds up


class Made:
    """Tensors that a recording makes, in memory that stays theirs."""

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []


@dataclass(eq=False)
class Tape:
    """Both recordings, for calls of one signature."""

    signature: Signature
    inputs: Fixed
    state: Fixed  # parameters, and buffers; without those that are read where they are
    outputs: Fixed | Made
    slopes: Fixed  # gradients of the outputs that learn
    gradients: Fixed
    has_gradient: tuple[bool, ...]  # of the inputs and parameters that learn
    form: TreeSpec  # of what the block returns
    values: tuple[Any, ...]  # of it
    learns: tuple[bool, ...]  # by output
    is_kept: bool
    forward: Recording
    backward: Recording
    _used: Any = None  # a reference to the last use

    @property
    def is_busy(self) -> bool:
        """Whether the backward of a call is still to come, for which this block's memory is held."""
        used = None if self._used is None else self._used()
        return used is not None and not used.is_done

    def use(self, used: Used) -> None:
        self._used = weakref.ref(used)

    def is_last(self, used: Used) -> bool:
        """Whether no other call came after it."""
        return self._used is not None and self._used() is used

    def outputs_for(self, inputs: Sequence[Tensor], state: Sequence[Tensor]) -> list[Tensor]:
        self.inputs.take(inputs)
        self.state.take(state)
        self.forward.replay()
        return [each.clone() for each in self.outputs.tensors]

    def gradients_for(self, inputs: Sequence[Tensor], state: Sequence[Tensor], slopes: Sequence[Tensor]) -> list[Tensor | None]:
        """Of the inputs and parameters that learn, in this order, in memory that the next recording writes to."""
        if not self.is_kept:
            self.inputs.take(inputs)
        self.state.take(state)
        self.slopes.take(slopes)
        self.backward.replay()
        found = iter(self.gradients.tensors)
        return [next(found) if has else None for has in self.has_gradient]

    def returned(self, outputs: Sequence[Tensor], inputs: Sequence[Tensor]) -> Any:
        """As the block returns it: what it made, and what it was given and hands on."""
        kinds = {Output: outputs, Input: inputs}
        values = [kinds[type(each)][each.number] if type(each) in kinds else each for each in self.values]
        return tree_unflatten(values, self.form)


class Recorder:
    """Records a module's calls. `pool` is memory that recordings share while they run, `arena` what they read and write."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any], device: torch.device, pool: Any, arena: Arena) -> None:
        self._module, self._forward, self._device, self._pool, self._arena = module, forward, device, pool, arena
        self._parameters, self._buffers = list(module.parameters()), list(module.buffers())

    def record(self, call: Call, *, is_kept: bool = False, stays: bool = False) -> Tape:
        """Of a block that is kept, or recomputed. `stays`: its weights never leave their memory, and are read there."""
        signature = call.signature
        with quietly():
            there = [each.detach() for each in self._parameters] if stays else []
            moving = self._buffers if stays else [*self._parameters, *self._buffers]
            own = [each.detach() for each in moving]
        # What is made at first calls is there before anything is recorded.
        with beside_default_stream(self._device):
            returned, leaves, wanted = self._run(signature, call.inputs, [*there, *own])
            found = made_in(returned, leaves)
            form, values = described(returned, leaves)
            _refuse_unfit(found, values, wanted, [*call.inputs, *there, *own])
            learning = [each for each in found if each.requires_grad]
            slopes_like = [each.detach() for each in learning]
            gradients_like = torch.autograd.grad(learning, wanted, slopes_like, allow_unused=True)
            learns = tuple(each.requires_grad for each in found)
            has_gradient = tuple(each is not None for each in gradients_like)
            given = [each for each in gradients_like if each is not None]
            shared = [] if is_kept else [[each.detach() for each in found], call.inputs]
            fixed = iter(self._arena.fixed(own, slopes_like, given, *shared))
            del returned, leaves, wanted, found, learning, slopes_like, gradients_like, given, shared
        state, slopes, gradients = next(fixed), next(fixed), next(fixed)
        outputs: Fixed | Made = Made() if is_kept else next(fixed)
        held = Fixed.alone(call.inputs, self._device) if is_kept else next(fixed)
        learned: list[Tensor] = []  # outputs of the last forward that learn: what it saved is theirs
        wanting: list[Tensor] = []  # what has a gradient

        def run() -> list[Tensor]:
            returned, leaves, wanting[:] = self._run(signature, held.tensors, [*there, *state.tensors])
            found = made_in(returned, leaves)
            learned[:] = [each for each in found if each.requires_grad]
            return [each.detach() for each in found]

        def forward() -> None:
            results = run()
            if isinstance(outputs, Made):
                outputs.tensors = results
            else:
                outputs.take(results)
                learned.clear()

        def backward() -> None:
            if not is_kept:
                run()
            made = torch.autograd.grad(learned, wanting, slopes.tensors, retain_graph=is_kept, allow_unused=True)
            gradients.take([each for each in made if each is not None])
            if not is_kept:
                learned.clear()

        recordings = [Recording(each, self._device, self._pool) for each in (forward, backward)]
        facts = signature, held, state, outputs, slopes, gradients, has_gradient, form, values, learns, is_kept
        return Tape(*facts, *recordings)

    def _run(
        self, signature: Signature, inputs: Sequence[Tensor], state: Sequence[Tensor]
    ) -> tuple[Any, list[Tensor], list[Tensor]]:
        """What the module returns, what it was given, and what learns. Leaves are new at each run: autograd waits for the stream
        on which a leaf was first used, and a recording must not wait for another's."""
        leaves = signature.leaves(inputs)
        weights = [nn.Parameter(each, of.requires_grad) for each, of in zip(state, self._parameters, strict=False)]
        own = zip([*self._parameters, *self._buffers], [*weights, *state[len(weights) :]], strict=True)
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


@functools.cache
def _side_stream(device: torch.device) -> Any:
    """One for all: matrix products keep a workspace for every stream that they ever ran on."""
    return torch.cuda.Stream(device)


@contextmanager
def beside_default_stream(device: torch.device) -> Iterator[None]:
    """Inside, ops run on a stream of their own, after all that was launched before and before all that comes."""
    if device.type != "cuda":
        yield
        return
    stream = _side_stream(device)
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


def unfit_within(module: nn.Module) -> str | None:
    """Why a module cannot be given other weights for a recording, if it cannot."""
    for each in module.modules():
        if isinstance(each, torch.jit.ScriptModule):
            return "part of it is scripted"
        beside = [value for key, value in vars(each).items() if key not in ("_parameters", "_buffers", "_modules")]
        if any(isinstance(value, nn.Parameter) for value in tree_leaves(beside)):
            return f"{type(each).__name__} holds its weights in a list too"
    return None


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
