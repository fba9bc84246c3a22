"""Recomputation: a block's forward runs a second time inside backward, and gives what it gave the first time.

The first forward saves nothing: each tensor that autograd would save becomes a `Holder`. The first of them that backward asks for
runs the forward again, from the inputs, state, random numbers and settings it had (`forward_state.py`), as far as the last tensor
that is still wanted; what this saves goes into the holders, and what it changes is put back. Saved tensors that are views of
weights become places (`Residency.pack`), so that a recomputed block holds no slot, whether its weights are trained or frozen.

Selective recomputation also keeps the results of COSTLY_OPS, in their order, and takes them instead of running the op. A result
that somebody has written into since, and one that draws random numbers, is computed again.

`rehearsing` finds out before training which blocks do not give the same when they are run again. What can only be seen later (an
input that is written into, another number of saved tensors) is an error that names the block: never other numbers.
"""

from __future__ import annotations

import functools
import sys
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from anyfit.values.graph import COSTLY_OPS

from .cells import equal
from .chunks import quietly
from .forward_state import ForwardState, version_of
from .walk import INERT

aten = torch.ops.aten
COSTLY = {getattr(aten, name).default for name in COSTLY_OPS if hasattr(aten, name)}
NOTHING = object()

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class _Enough(BaseException):
    """All that backward needs is recomputed. No Exception: a block's own `except` is not to catch it."""


class Holder:
    """Stands for a tensor that the first forward would have saved."""

    __slots__ = ("__weakref__", "frame", "packed", "version")

    def __init__(self, frame: Frame) -> None:
        self.frame = frame
        self.packed: Any = NOTHING  # what the recomputed forward saved, from then until it is asked for
        self.version = 0


class Recomputed:
    """A block's forward, recomputed in backward."""

    def __init__(
        self,
        name: str,
        module: nn.Module,
        device: torch.device,
        pack: Pack,
        unpack: Unpack,
        *,
        selective: bool,
    ) -> None:
        self.name, self.forward, self.pack, self.unpack = name, module.forward, pack, unpack
        self.state = ForwardState(module, name, device)
        self._selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not _may_be_recomputed():
            return self.forward(*args, **kwargs)
        frame = Frame(self, args, kwargs, Kept() if self._selective else None)
        with saved_tensors_hooks(frame.hold, Frame.give), frame.first():
            result = self.forward(*args, **kwargs)
        frame.check()
        return result

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"block {self.name!r} cannot be recomputed: {what}; use a plan that keeps it (activations={{{self.name!r}: 'keep'}})"
        )


def _may_be_recomputed() -> bool:
    """Not without gradients, and not inside a transform of torch.func or forward-mode differentiation, whose tensors are gone
    when they end."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return torch.is_grad_enabled() and not inside


class Frame:
    """One call of a recomputed block: what it needs to be made again."""

    def __init__(self, of: Recomputed, args: Any, kwargs: Any, kept: Kept | None) -> None:
        self.of, self._kept = of, kept
        self._inputs = Inputs((args, kwargs), of.pack, of.unpack)
        self._note = of.state.note(self._inputs.objects)
        self._glance = of.state.glance()
        self._holders: list[weakref.ref[Holder]] = []
        self._facts: list[tuple[torch.Size, torch.dtype]] = []

    def first(self) -> AbstractContextManager[Any]:
        return nullcontext() if self._kept is None else Keeping(self._kept)

    def hold(self, tensor: Tensor) -> Holder:
        holder = Holder(self)
        self._holders.append(weakref.ref(holder))
        with quietly():
            self._facts.append((tensor.shape, tensor.dtype))
        return holder

    def check(self) -> None:
        """After the first forward: what no recomputation could put back."""
        self.of.state.ran(self._glance)
        if self._inputs.are_changed:
            raise self.of.error("it writes into its input in place")
        edited = self._note.edited()
        if edited is not None:
            raise self.of.error(f"it edits its parameter {edited} in forward")
        if self.of.state.iterators:
            raise self.of.error(f"it holds an iterator, which cannot be put back ({self.of.state.iterators[0]})")

    @staticmethod
    def give(holder: Holder) -> Tensor:
        frame = holder.frame
        if holder.packed is NOTHING:
            frame._recompute()
        packed, holder.packed = holder.packed, NOTHING
        if isinstance(packed, Tensor) and version_of(packed) != holder.version:  # as autograd checks without hooks
            raise RuntimeError(f"a tensor that block {frame.of.name!r} saves for backward is written into in place afterwards")
        return frame.of.unpack(packed)

    def _recompute(self) -> None:
        if self._inputs.are_changed:
            raise self.of.error("its input was written into in place, after the block was called")
        wanted = [reference() for reference in self._holders]
        last = max(index for index, holder in enumerate(wanted) if holder is not None)
        met, plain_before, is_enough = 0, False, False
        put_back: set[int] = set()

        def pack(tensor: Tensor) -> Any:
            nonlocal met, plain_before, is_enough
            index, met = met, met + 1
            if index >= len(wanted):
                raise self.of.error(f"run again, it saves more tensors for backward than the {len(wanted)} it saved")
            with quietly():
                facts = tensor.shape, tensor.dtype
                if facts != self._facts[index]:
                    raise self.of.error(
                        f"run again, it saves {_shown(facts)} where it saved {_shown(self._facts[index])} (tensor {index})"
                    )
                packed = self.of.pack(tensor)
                if put_back and isinstance(packed, Tensor) and _storage(packed) in put_back:
                    packed = packed.detach().clone()  # of state, which is about to get other values
            holder = wanted[index]
            if holder is not None:
                holder.packed = packed
                holder.version = version_of(packed) if isinstance(packed, Tensor) else 0
            # What an op saves, it saves before it runs, and a tensor without gradient may be one that it writes (rrelu's noise).
            is_plain = isinstance(packed, Tensor) and not tensor.requires_grad
            if index == last and not (is_plain or plain_before):
                is_enough = True
                raise _Enough
            plain_before = is_plain
            return packed

        args, kwargs = self._inputs.give()
        again: AbstractContextManager[Any] = nullcontext() if self._kept is None else Reusing(self._kept, self.of)
        try:
            with self._note.again() as put_back, saved_tensors_hooks(pack, self.of.unpack), torch.enable_grad(), again:
                self.of.forward(*args, **kwargs)
        except _Enough:
            return
        except RuntimeError:  # which an interpreter of scripts makes of it
            if not is_enough:
                raise
            return
        finally:
            if self._kept is not None:
                self._kept.spend()
        if met <= last:
            raise self.of.error(f"run again, it saves {met} tensors for backward where it saved {len(wanted)}")


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata) if tensor.layout == torch.strided else 0


def _shown(facts: tuple[torch.Size, torch.dtype]) -> str:
    shape, dtype = facts
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}"


# ---------------------------------------------------------------------- inputs


class Input:
    __slots__ = ("given", "needs_grad", "packed", "version")

    def __init__(self, tensor: Tensor, pack: Pack) -> None:
        with quietly():
            self.needs_grad = tensor.requires_grad
            self.packed = pack(tensor)
            self.version = version_of(tensor) if isinstance(self.packed, Tensor) else None
        self.given: Tensor | None = None

    @property
    def is_changed(self) -> bool:
        return self.version is not None and version_of(self.packed) != self.version


class Named:
    """A named tuple that holds inputs: its own constructor would ask them what they are."""

    __slots__ = ("fields", "kind")

    def __init__(self, kind: type, fields: list[Any]) -> None:
        self.kind, self.fields = kind, fields


class Inputs:
    """Arguments of a call, without the graph they come from. Containers are copied, since the caller's may change."""

    def __init__(self, arguments: Any, pack: Pack, unpack: Unpack) -> None:
        self._pack, self._unpack = pack, unpack
        self._tensors: dict[int, Input] = {}
        self.objects: list[Any] = []  # whose state is to be noted
        self._taken = self._take(arguments)

    def _take(self, value: Any) -> Any:
        kind = type(value)
        if kind in INERT:
            return value
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
            found = self._tensors.get(id(value))
            if found is None:
                found = self._tensors[id(value)] = Input(value, self._pack)
                if found.packed is value:
                    found.packed = value.detach()
            return found
        if kind is tuple or kind is list:
            return kind([self._take(each) for each in value])
        if kind is dict:
            return {key: self._take(each) for key, each in value.items()}
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return Named(kind, [self._take(each) for each in value])
        if not isinstance(value, nn.Parameter):
            self.objects.append(value)
        return value

    @property
    def are_changed(self) -> bool:
        return any(each.is_changed for each in self._tensors.values())

    def give(self) -> Any:
        """The arguments again."""
        try:
            return self._given(self._taken)
        finally:
            for each in self._tensors.values():
                each.given = None

    def _given(self, value: Any) -> Any:
        if isinstance(value, Input):
            if value.given is None:
                value.given = self._unpack(value.packed).detach()
                if value.needs_grad:
                    value.given.requires_grad_()
            return value.given
        if isinstance(value, Named):
            fields = [self._given(each) for each in value.fields]
            return tuple.__new__(value.kind, fields)  # its own constructor may want other arguments (PackedSequence)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._given(each) for each in value])
        if kind is dict:
            return {key: self._given(each) for key, each in value.items()}
        return value


# ---------------------------------------------------------------------- results of costly ops


class Kept:
    """Results of costly ops in their order."""

    def __init__(self) -> None:
        self._results: list[Any] = []
        self._next = 0
        self.is_spent = False  # what is recomputed once more is computed in full

    def add(self, op: Any, args: Any, kwargs: Any, result: Any) -> None:
        if _draws(op, args, kwargs):
            self._results.append((op, None, ()))
            return
        tensors: list[Tensor] = []

        def alias(tensor: Tensor) -> Tensor:
            # Below autograd, and yet with the version of the result itself, which tells whether somebody wrote into it.
            with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
                tensors.append(tensor.detach())
            return tensors[-1]

        kept = tree_map_only(Tensor, alias, result)
        self._results.append((op, kept, [(tensor, tensor._version) for tensor in tensors]))

    def take(self, op: Any) -> Any:
        """What this op gave; NOTHING where it has to be computed."""
        if self._next >= len(self._results):
            raise IndexError
        known, kept, versions = self._results[self._next]
        self._results[self._next] = (known, None, ())
        self._next += 1
        if known is not op:
            raise LookupError(f"{op} where it was {known}")
        if not versions or any(tensor._version != version for tensor, version in versions):
            return NOTHING
        return kept

    def spend(self) -> None:
        self._results.clear()
        self.is_spent = True


@functools.cache
def _dropout_index(op: Any) -> int | None:
    names = [argument.name for argument in op._schema.arguments]
    return names.index("dropout_p") if "dropout_p" in names else None


def _draws(op: Any, args: Any, kwargs: Any) -> bool:
    """Whether it draws random numbers: taken from what was kept, it would leave them to the next op."""
    index = _dropout_index(op)
    return index is not None and bool(args[index] if index < len(args) else kwargs.get("dropout_p", 0.0))


class Keeping(TorchDispatchMode):
    """Around the first forward."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COSTLY:
            self._kept.add(func, args, kwargs or {}, result)
        return result


class Reusing(TorchDispatchMode):
    """Around the recomputed forward."""

    def __init__(self, kept: Kept, of: Recomputed) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept, self._of = kept, of

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in COSTLY and not self._kept.is_spent:
            try:
                kept = self._kept.take(func)
            except (IndexError, LookupError) as error:
                raise self._of.error(f"run again, it calls other ops than before ({error or func})") from None
            if kept is not NOTHING:
                return kept
        return func(*args, **(kwargs or {}))


class Verifying(TorchDispatchMode):
    """Around a forward that is run again to see whether what was kept is what would be computed."""

    def __init__(self, kept: Kept) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self.reason: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in COSTLY and self.reason is None:
            try:
                kept = self._kept.take(func)
            except (IndexError, LookupError):
                self.reason = f"its products come in another order when it is run again ({func})"
                return result
            if kept is not NOTHING and not equal(_plain(kept), _plain(result)):
                self.reason = f"a product differs when it is run again ({func})"
        return result


def _plain(result: Any) -> Any:
    return list(result) if isinstance(result, tuple | list) else result


# ---------------------------------------------------------------------- before training


class Unfit(dict[str, str]):
    """By block, why it must not be recomputed, in part or in full; `selective`: why it may be in full, and not in part."""

    def __init__(self) -> None:
        super().__init__()
        self.selective: dict[str, str] = {}


@contextmanager
def rehearsing(modules: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> Iterator[Unfit]:
    """Inside, the caller runs the loss forward once, with gradients enabled. At the end, the first call of each distinct kind of
    block is run once more, as its recomputation would be, and compared: its output and the state it leaves, to the bit. What it
    yields is filled then: by block the reason why it must not be recomputed, and in `.selective` the reason why it may be
    recomputed in full and not in part. All members of a kind (`kinds[name]`) get the verdict of the one that was tried.

    Calls without gradients are passed over, and a block that is not called gets no verdict. The state of the blocks and all
    random numbers are as before afterwards."""
    unfit, trials = Unfit(), dict[str, Trial]()
    notes = [ForwardState(module, name, _device_of(module)).note() for name, module in modules.items()]
    undo = [_tried(name, module, kinds[name], trials) for name, module in modules.items()]
    try:
        try:
            yield unfit
        finally:
            for each in undo:
                each()
        for kind, trial in reversed(trials.items()):  # as backward would
            reason, only_selective = trial.verdict()
            for name in modules:
                if kinds[name] == kind and reason is not None:
                    unfit[name] = reason
                elif kinds[name] == kind and only_selective is not None:
                    unfit.selective[name] = only_selective
    finally:
        for note in notes:
            note.put_back()


def _tried(name: str, module: nn.Module, kind: str, trials: dict[str, Trial]) -> Callable[[], None]:
    """The first call of the kind becomes a trial; what ends that. A plan may recompute the block already: its own forward is
    what is tried."""
    before = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)  # past `disable`
    forward = before.forward if isinstance(before, Recomputed) else before

    def tried(*args: Any, **kwargs: Any) -> Any:
        if kind in trials or not _may_be_recomputed():
            return forward(*args, **kwargs)
        trials[kind] = Trial(name, module, forward)
        return trials[kind].first(args, kwargs)

    return stand_in(module, tried)


def stand_in(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Sets a module's forward; gives what undoes it. A traced module hands attributes that are set on to another, so that
    this goes past it. Compilers leave it as it is, with all that it calls."""
    own = vars(module)
    before = own.get("forward", NOTHING)
    compilers = sys.modules.get("torch._dynamo")  # slow to import: what is compiled has done it
    own["forward"] = forward if compilers is None else compilers.disable(forward)

    def undo() -> None:
        if before is NOTHING:
            del own["forward"]
        else:
            own["forward"] = before

    return undo


def _device_of(module: nn.Module) -> torch.device:
    with quietly():
        return next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))


class Trial:
    """A block's first call, and what it gave."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._state = ForwardState(module, name, _device_of(module), forward)
        self._kept = Kept()
        self._reason: str | None = None

    def first(self, args: Any, kwargs: Any) -> Any:
        self._inputs = Inputs((args, kwargs), lambda tensor: tensor, lambda packed: packed)
        self._note = self._state.note(self._inputs.objects)
        sums = self._sums()
        with Keeping(self._kept):
            result = self._forward(*args, **kwargs)
        self._after = self._note.now()
        self._result = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), _opened(result))
        edited = self._note.edited() or next((key for key, value in self._sums().items() if sums[key] != value), None)
        if self._inputs.are_changed:
            self._reason = "it writes into its input in place"
        elif edited is not None:
            self._reason = f"it edits its parameter {edited} in forward"
        elif self._state.iterators:
            self._reason = f"it holds an iterator, which cannot be put back ({self._state.iterators[0]})"
        return result

    def _sums(self) -> dict[str, int]:
        """Of the bits of each parameter, which is fetched for it: edits through `.data` leave no other trace."""
        with torch.no_grad():
            return {
                f"{self._name}.{name}": int(each.detach().reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
                for name, each in self._module.named_parameters()
                if each.layout == torch.strided and not each.is_meta
            }

    def verdict(self) -> tuple[str | None, str | None]:
        """Why it must not be recomputed; and why it must not be in part."""
        if self._reason is not None:
            return self._reason, None
        if self._inputs.are_changed:
            return "its input is written into in place, after it was called", None
        verifying = Verifying(self._kept)
        try:
            args, kwargs = self._inputs.give()
            with self._note.again(), verifying, torch.enable_grad():
                result = self._forward(*args, **kwargs)
                after = self._note.now()
                again = _opened(result)
        except Exception as error:
            return f"it fails when it is run again: {type(error).__name__}: {error}", None
        if not equal(self._result, again):
            return "its output differs when it is run again" + _difference(self._result, again), None
        changed = self._after.differences(after)
        if changed:
            return f"it leaves another state when it is run again ({', '.join(changed[:3])})", None
        return None, verifying.reason


def _opened(result: Any) -> Any:
    """What a block returns, as containers that can be compared."""
    if isinstance(result, dict):
        return {key: _opened(value) for key, value in result.items()}
    if isinstance(result, tuple | list):
        return [_opened(value) for value in result]
    if hasattr(result, "__dataclass_fields__") and not isinstance(result, type):
        return {name: _opened(getattr(result, name, None)) for name in result.__dataclass_fields__}
    return result


def _difference(one: Any, other: Any) -> str:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        if one.shape != other.shape:
            return f": {list(other.shape)} where it was {list(one.shape)}"
        if one.is_floating_point() and one.dtype == other.dtype:
            return f": by up to {float((one - other.detach()).abs().max()):.2g}"
    return ""
