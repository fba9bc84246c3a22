"""Before training: which blocks do not give the same when their forward runs a second time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from .cells import equal
from .chunks import quietly
from .forward_state import ForwardState, Note
from .kept_results import Keeping, Kept, Verifying
from .recompute import Inputs, Recomputed, may_be_recomputed, reason_against, stand_in


class Unfit(dict[str, str]):
    """By block, why it must not be recomputed, in part or in full; `selective`: why it may be in full, and not in part."""

    def __init__(self) -> None:
        super().__init__()
        self.selective: dict[str, str] = {}


@contextmanager
def rehearsing(modules: Mapping[str, nn.Module], kinds: Mapping[str, str]) -> Iterator[Unfit]:
    """Inside, the caller runs the loss forward once, with gradients enabled. At the end the first call of each kind of block
    (`kinds[name]`) is recomputed, and its output and the state it leaves are compared to the bit. The verdict is for all blocks
    of the kind; one that is not called with gradients gets none. Blocks and random numbers are as before afterwards."""
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
    """The first call of the kind becomes a trial; gives what ends that. Of a recomputed block, its own forward is tried."""
    before = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)  # past `disable`
    own = before.forward if isinstance(before, Recomputed) else before
    forward = getattr(own, "eager_forward", own)  # the code of a compiled block is watched by nobody

    def tried(*args: Any, **kwargs: Any) -> Any:
        if kind in trials or not may_be_recomputed():
            return forward(*args, **kwargs)
        trials[kind] = Trial(name, module, forward)
        return trials[kind].first(args, kwargs)

    return stand_in(module, tried)


def _device_of(module: nn.Module) -> torch.device:
    with quietly():
        return next((each.device for each in (*module.parameters(), *module.buffers())), torch.device("cpu"))


class Trial:
    """A block's first call, and what it gave."""

    def __init__(self, name: str, module: nn.Module, forward: Callable[..., Any]) -> None:
        self._name, self._module, self._forward = name, module, forward
        self._state = ForwardState(module, name, _device_of(module), forward)
        self._not_in_part: str | None = None

    def first(self, args: Any, kwargs: Any) -> Any:
        self._inputs = Inputs((args, kwargs), lambda tensor: tensor, lambda packed: packed)
        self._note = self._state.note(self._inputs.objects)
        sums, kept = self._sums(), Kept()
        with Keeping(kept):
            result = self._forward(*args, **kwargs)
        self._after = self._note.now()
        self._result = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), _opened(result))
        edited = self._note.edited() or next((key for key, value in self._sums().items() if sums[key] != value), None)
        self._reason = reason_against(self._inputs, edited, self._state)
        verifying = Verifying(kept)  # at once: what is kept of the blocks of all kinds may be more than there is room for
        with suppress(Exception), verifying:  # at the end it fails again, and says so
            self._again()
        self._not_in_part = verifying.reason
        return result

    def _again(self) -> tuple[Any, Note]:
        """What it gives when it is run again, and the state that it leaves."""
        args, kwargs = self._inputs.give()
        with self._note.again(), torch.enable_grad():
            result = self._forward(*args, **kwargs)
            return _opened(result), self._note.now()

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
        try:
            again, after = self._again()
        except Exception as error:
            return f"it fails when it is run again: {type(error).__name__}: {error}", None
        if not equal(self._result, again):
            return "its output differs when it is run again" + _difference(self._result, again), None
        changed = self._after.differences(after)
        if changed:
            return f"it leaves another state when it is run again ({', '.join(changed[:3])})", None
        return None, self._not_in_part


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
