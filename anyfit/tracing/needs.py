"""Which parameters are needed at once: the weights that have to be on the device together, wherever they live between.

A run fetches weights that live on the host for each call of a torch function (placing/residency.py), and lets them go when nobody
holds a view of them. So all are needed at once that one call takes (`torch.lstm`, `torch.cat`), that are read while views of
others are alive (a kept `weight.t()`), or that one module or function transform takes past all watching (compiled, scripted). A
recomputed block holds views of all it has used. What autograd saves is no such view: backward looks it up again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from anyfit.values.call import leaves
from anyfit.values.graph import largest_sets

FEW = 3  # parameters that any plan has room for together
AS_ARRAY: set[Any] = {Tensor.numpy, Tensor.__array__}


@dataclass(frozen=True)
class SavedView:
    """What stands for a saved tensor that is a view of a parameter."""

    parameter: Tensor
    shape: torch.Size
    stride: tuple[int, ...]
    offset: int

    def view(self) -> Tensor:
        with _disable_current_modes(), torch.no_grad():  # no op of the pass
            return self.parameter.detach().as_strided(self.shape, self.stride, self.offset)


class Needs(TorchFunctionMode):
    """While active, notes what each call of a torch function takes; ops tell of the views they make and use."""

    def __init__(self, parameters: Sequence[Tensor], outside: int, block: Callable[[], int]) -> None:
        """`block`: that forward is in; `outside`: what is none."""
        super().__init__()
        self._outside, self._block = outside, block
        self.stay = ""  # why all state has to be on the device all the time, if it has to
        self.transformed = False  # nothing may come between ops, wherever they are
        self._index = {id(parameter): index for index, parameter in enumerate(parameters)}
        self._parameter = dict(enumerate(parameters))
        self._of_storage = {parameter.untyped_storage()._cdata: index for index, parameter in enumerate(parameters)}
        self._storage = {index: identity for identity, index in self._of_storage.items()}
        self._alone = {index: _uses(identity) for index, identity in self._storage.items()}
        self._viewed: set[int] = set()  # somebody may hold a view of these
        self._together: set[frozenset[int]] = set()
        self._by_block: dict[int, set[int]] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        taken = {self._index[id(item)] for item in leaves((args, kwargs)) if id(item) in self._index}
        if taken:
            self._note(taken)
            block = self._block()
            if block != self._outside:
                self._by_block.setdefault(block, set()).update(taken, self._held())
        if func in AS_ARRAY and self._viewed_by(args[0]) is not None:
            self.stay = "forward takes a weight as a numpy array, in which nobody sees what is written"
        return func(*args, **kwargs)

    def saved(self, tensor: Tensor) -> Tensor | SavedView:
        """What to keep of a tensor that autograd saves."""
        index = None if id(tensor) in self._index else self._viewed_by(tensor)
        if index is None:
            return tensor
        return SavedView(self._parameter[index], tensor.shape, tensor.stride(), int(tensor.storage_offset()))

    def of_op(self, inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> None:
        storages = (tensor.untyped_storage()._cdata for tensor in (*inputs, *outputs))
        taken = {self._of_storage[each] for each in storages if each in self._of_storage}
        if taken or len(self._viewed) > FEW:
            self._note(taken)
        self._viewed |= taken

    def _viewed_by(self, tensor: Tensor) -> int | None:
        storage = storage_of(tensor)
        return None if storage is None else self._of_storage.get(storage._cdata)

    def of_module(self, module: nn.Module) -> None:
        """It takes all it has at once."""
        if isinstance(module, torch.jit.ScriptModule):
            self.stay = f"a scripted module ({type(module).__name__}) takes weights past all watching"
        self._note({self._index[id(parameter)] for parameter in module.parameters() if id(parameter) in self._index})

    def of_transform(self, what: str = "torch.func") -> None:
        self.transformed, self.stay = True, f"{what} takes weights past all watching"

    def _held(self) -> set[int]:
        self._viewed = {index for index in self._viewed if _uses(self._storage[index]) > self._alone[index]}
        return self._viewed

    def _note(self, taken: set[int]) -> None:
        needed = taken | self._held()
        if len(needed) > FEW:
            self._together.add(frozenset(needed))

    def together(self, block_of: Sequence[int], twins: Sequence[Mapping[int, int]]) -> tuple[tuple[int, ...], ...]:
        """Parameters by their index, that are needed at once: sets that are part of no other. `block_of`: the block of each.
        `twins`: of each block that was not run, its parameters by those of the block that was run in its place."""
        found = self._together | {frozenset(each) for each in self._by_block.values() if len(each) > FEW}
        for needed in list(found):
            blocks = {block_of[index] for index in needed} - {self._outside}
            grown = needed
            for twin in twins:
                theirs = frozenset(twin.get(index, index) for index in needed)
                if len(blocks) == 1:
                    found.add(theirs)
                else:  # held beyond one block, and so by each that was not run
                    grown |= theirs
            found.add(grown)
        return largest_sets(found)


def is_whole(module: nn.Module) -> bool:
    """Whether its ops cannot be seen one by one: it is compiled, or scripted."""
    if module._compiled_call_impl is not None or isinstance(module, torch.jit.ScriptModule):
        return True
    return hasattr(module.forward, "_torchdynamo_orig_callable")


@contextmanager
def transforms_told(tell: Callable[[], None]) -> Iterator[None]:
    """Function transforms (torch.func.grad, jacrev) refuse hooks on saved tensors: inside one there are none, and it is told."""
    original = torch.autograd.graph.disable_saved_tensors_hooks

    @contextmanager
    def disable(message: str) -> Iterator[None]:
        tell()
        before = torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()
        torch._C._autograd._saved_tensors_hooks_disable(message, False)
        try:
            yield
        finally:
            if before is None:
                torch._C._autograd._saved_tensors_hooks_enable()
            else:
                torch._C._autograd._saved_tensors_hooks_disable(before, False)

    torch.autograd.graph.disable_saved_tensors_hooks = disable  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.autograd.graph.disable_saved_tensors_hooks = original


def tensors_in(nest: Any) -> list[Tensor]:
    return [item for item in pytree.tree_leaves(nest) if isinstance(item, Tensor)]


def arguments_of(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """What an op was called with, by its schema's names."""
    return dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)


def written_by(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """Arguments that an op changes in place."""
    changed = {each.name for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write}
    return tensors_in([value for name, value in arguments_of(func, args, kwargs).items() if name in changed])


def storage_of(tensor: Tensor) -> Any:
    """None where it has none of its own: inside a function transform, or sparse."""
    try:
        return tensor.untyped_storage()
    except (NotImplementedError, RuntimeError):
        return None


def _uses(storage: int) -> int:
    return int(torch._C._storage_Use_Count(storage))
