"""Recomputation: a block's forward runs a second time inside backward, and gives what it gave the first time.

The first forward saves nothing: each tensor that autograd would save becomes a `Holder`. The first of them that backward asks for
runs the forward again, from the inputs, state, random numbers and settings it had (`forward_state.py`), as far as the last tensor
that is still wanted; what this saves goes into the holders, and what it changes is put back. Saved tensors that are views of
weights become places (`Residency.pack`), so that a recomputed block holds no slot, whether its weights are trained or frozen.

Selective recomputation also keeps the results of costly ops (`kept_results.py`), and takes them instead of running the op. A
result that somebody has written into since, and one that draws random numbers, is computed again.

`trial.py` finds out before training which blocks do not give the same when they are recomputed. What can only be seen later (an
input that is written into, another number of saved tensors) is an error that names the block: never other numbers.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks

from .chunks import quietly
from .forward_state import ForwardState, version_of
from .kept_results import NOTHING, Keeping, Kept, Reusing
from .walk import INERT

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


class Input:
    __slots__ = ("given", "needs_grad", "packed", "version")

    def __init__(self, tensor: Tensor, pack: Pack) -> None:
        with quietly():
            self.needs_grad = tensor.requires_grad
            self.packed = pack(tensor)
            self.version = version_of(self.packed) if isinstance(self.packed, Tensor) else None
        self.given: Tensor | None = None


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
        return any(each.version is not None and version_of(each.packed) != each.version for each in self._tensors.values())

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

    def __init__(self, name: str, block: nn.Module, device: torch.device, pack: Pack, unpack: Unpack, *, selective: bool) -> None:
        self.name, self.forward, self.pack, self.unpack = name, block.forward, pack, unpack
        self.state = ForwardState(block, name, device, own_forward(block))
        self._selective = selective

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not may_be_recomputed():
            return self.forward(*args, **kwargs)
        kept = Kept() if self._selective else None
        frame = Frame(self, args, kwargs, kept)
        with saved_tensors_hooks(frame.hold, Frame.give), nullcontext() if kept is None else Keeping(kept):
            result = self.forward(*args, **kwargs)
        frame.check(getattr(self.forward, "is_served", None))
        return result

    def run(self, args: Any, kwargs: Any, is_served: bool | None) -> Any:
        """The forward once more; `is_served` says how, where compiled code stands in for it."""
        if is_served is None:
            return self.forward(*args, **kwargs)
        return self.forward.again(args, kwargs, is_served=is_served)  # type: ignore[attr-defined]

    def error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"block {self.name!r} cannot be recomputed: {what}; use a plan that keeps it (activations={{{self.name!r}: 'keep'}})"
        )


def reason_against(inputs: Inputs, edited: str | None, state: ForwardState) -> str | None:
    """Why a forward that has run must not be recomputed; `edited` is a parameter that it has edited."""
    if inputs.are_changed:
        return "it writes into its input in place"
    if edited is not None:
        return f"it edits its parameter {edited} in forward"
    return f"it holds an iterator, which cannot be put back ({state.iterators[0]})" if state.iterators else None


def may_be_recomputed() -> bool:
    """Not without gradients, nor inside torch.func or forward-mode differentiation, whose tensors are gone when they end."""
    inside = torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
    return torch.is_grad_enabled() and not inside


class Frame:
    """One call of a recomputed block: what it needs to be recomputed."""

    def __init__(self, of: Recomputed, args: Any, kwargs: Any, kept: Kept | None) -> None:
        self.of, self._kept = of, kept
        self._inputs = Inputs((args, kwargs), of.pack, of.unpack)
        self._note = of.state.note(self._inputs.objects)
        self._glance = of.state.glance()
        self._is_served: bool | None = None
        self._holders: list[weakref.ref[Holder]] = []
        self._facts: list[tuple[torch.Size, torch.dtype]] = []

    def hold(self, tensor: Tensor) -> Holder:
        holder = Holder(self)
        self._holders.append(weakref.ref(holder))
        with quietly():
            self._facts.append((tensor.shape, tensor.dtype))
        return holder

    def check(self, is_served: bool | None) -> None:
        """After the first forward: what no recomputation could put back. Of compiled code: whether it served the call."""
        self._is_served = is_served
        self.of.state.ran(self._glance)
        reason = reason_against(self._inputs, self._note.edited(), self.of.state)
        if reason is not None:
            raise self.of.error(reason)

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
        again: AbstractContextManager[Any] = nullcontext() if self._kept is None else Reusing(self._kept, self.of.error)
        try:
            with self._note.again() as put_back, saved_tensors_hooks(pack, self.of.unpack), torch.enable_grad(), again:
                self.of.run(args, kwargs, self._is_served)
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


def own_forward(block: nn.Module) -> Callable[..., Any]:
    """The user's, where compiled code stands in for it."""
    forward: Callable[..., Any] = getattr(block.forward, "eager_forward", block.forward)
    return forward


def stand_in(module: nn.Module, forward: Callable[..., Any]) -> Callable[[], None]:
    """Sets a module's forward; gives what undoes it. Compilers leave it as it is, with all that it calls."""
    compilers = sys.modules.get("torch._dynamo")  # slow to import: what is compiled has done it
    return set_attribute(module, "forward", forward if compilers is None else compilers.disable(forward))


def set_attribute(module: nn.Module, name: str, value: Any) -> Callable[[], None]:
    """Sets it past the setters of traced and scripted modules, which hand it on or refuse it; gives what undoes it."""
    own = vars(module)
    before, own[name] = own.get(name, NOTHING), value

    def undo() -> None:
        if before is NOTHING:
            own.pop(name, None)
        else:
            own[name] = before

    return undo
