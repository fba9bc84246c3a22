"""What a model asks of its placing: parameters whose memory other tensors share, whose elements do not lie in order, or whose
gradients are of a kind that only torch's own step knows. Such parameters keep their memory and are updated on the device.

Memory is shared where storages are the same: parameters tied by `.data`, slices of one flat tensor, buffers and attributes that
are views of a weight. What no module shows (a detached weight in a closure, a numpy array) shows in how many hold the storage.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from .coupling import coupled
from .nests import is_strided, is_tensor

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.optim import Optimizer

DEEPEST = 4  # containers in containers that are looked through
OWN = ("_parameters", "_buffers", "_modules")  # of a module, which names them itself


class StaysOnDevice(ValueError):  # noqa: N818  (what a model asks of a plan)
    """A plan moves state off the device that has to stay on it, for this reason."""

    def __init__(self, reason: str, message: str, mirrored_bytes: int = 0) -> None:
        super().__init__(reason, message)
        self.reason, self.mirrored_bytes = reason, mirrored_bytes

    def __str__(self) -> str:
        return f"{self.args[0]}{self.args[1]}"


class StaysWhole(ValueError):  # noqa: N818
    """A plan shards over ranks what has to be whole on each."""


class StaysUncut(ValueError):  # noqa: N818
    """A plan cuts over a tensor axis what cannot be cut."""


class StaysInOneStage(ValueError):  # noqa: N818
    """A plan cuts into stages what cannot be cut."""


@dataclass(frozen=True)
class Demands:
    """Why, by name of a parameter, and what to type instead."""

    kept: Mapping[str, str]  # it keeps the memory that it has
    shared: Mapping[str, str]  # of these: other tensors share it
    special: Mapping[str, str]  # only torch's own step knows its gradients
    coupled: str | None  # of the optimizer: all parameters are stepped in one call

    @property
    def together(self) -> str | None:
        """Why all parameters are stepped in one call, if they are."""
        return self.coupled or next(iter({**self.shared, **self.special}.values()), None)

    @property
    def reason(self) -> str | None:
        """Why all state has to be on the device, updated there by torch; None where it need not be."""
        return self.together or next(iter(self.kept.values()), None)


def demands_of(model: nn.Module, optimizer: Optimizer, *, casts: bool, elsewhere: Collection[str] = ()) -> Demands:
    """`casts`: all parameters get new memory at the start, so that what other code holds is not theirs any more. Those whose
    elements are `elsewhere`, in a folder of weights, have none yet: what stands for them is one number, expanded."""
    shared, held = shared_memory(model)
    shared |= {} if casts else held
    made = {name: each for name, each in model.named_parameters() if name not in elsewhere}
    for name, each in made.items():
        if each.requires_grad and any(size > 1 and not stride for size, stride in zip(each.shape, each.stride(), strict=True)):
            raise ValueError(
                f"{name} is an expanded tensor, whose elements share memory and cannot be updated; give it a clone()"
            )
    strided = {
        name: f"{name} does not lie in order in memory (strides {tuple(each.stride())}, as channels_last or a transpose has "
        "them); build it with .contiguous()"
        for name, each in made.items()
        if is_strided(each) and not each.is_contiguous()
    }
    return Demands(kept=strided | shared, shared=shared, special=_special(model), coupled=coupled(optimizer))


def _special(model: nn.Module) -> dict[str, str]:
    """Parameters that are, or whose gradients are, no plain arrays of numbers."""
    from torch import nn

    found = {
        name: f"{name} is complex; view_as_real of it trains like any other"
        for name, each in model.named_parameters()
        if each.requires_grad and each.is_complex()
    }
    for name, each in model.named_parameters():
        if type(each).__torch_function__ is not nn.Parameter.__torch_function__:
            found[name] = f"{name} is a {type(each).__name__}, which has ops of its own"
    for name, module in sparse_layers(model).items():
        if module.weight.requires_grad:
            found[f"{name}.weight"] = f"{name} has sparse gradients; sparse=False gives it dense ones"
    return found


def sparse_layers(model: nn.Module) -> dict[str, nn.Embedding | nn.EmbeddingBag]:
    """By name, those whose weights get sparse gradients."""
    from torch import nn

    kinds = (nn.Embedding, nn.EmbeddingBag)
    return {name: module for name, module in model.named_modules() if isinstance(module, kinds) and module.sparse}


def shared_memory(model: nn.Module) -> tuple[dict[str, str], dict[str, str]]:
    """By name of a trainable parameter, what else of the model shares its memory; and which of the others' other code holds."""
    import torch

    def uses(tensor: Tensor) -> int:
        count: Any = torch._C._storage_Use_Count
        return int(count(tensor.untyped_storage()._cdata))

    parameters = dict(model.named_parameters())
    holders: dict[int, list[tuple[str, Tensor]]] = {}
    for label, tensor in [*parameters.items(), *_others(model)]:
        if is_strided(tensor) and _has_storage(tensor):
            holders.setdefault(tensor.untyped_storage()._cdata, []).append((label, tensor))
    alone = uses(torch.empty(1))
    found: dict[str, str] = {}
    held: dict[str, str] = {}
    for name, parameter in parameters.items():
        if not parameter.requires_grad or not parameter.numel() or not _has_storage(parameter):
            continue
        same = holders.get(parameter.untyped_storage()._cdata, [])
        others = [label for label, tensor in same if label and tensor is not parameter and _overlap(tensor, parameter)]
        if others:
            is_tie = others[0] in parameters
            instead = "tie them as one object: module.a.weight = module.b.weight" if is_tie else "give that a clone()"
            found[name] = f"{name} shares its memory with {others[0]}; {instead}"
        elif uses(parameter) > alone + len(same) - 1:
            held[name] = (
                f"{name} shares its memory with a tensor or array that other code keeps (a state_dict(), .detach(), .data or "
                ".numpy() of it); give that a clone(), or drop it"
            )
    return found, held


def _has_storage(tensor: Tensor) -> bool:
    """Neither without bytes nor sharded by other code."""
    return not tensor.is_meta and not hasattr(tensor, "_local_tensor")


def _overlap(one: Tensor, other: Tensor) -> bool:
    def ends(tensor: Tensor) -> tuple[int, int]:
        first = int(tensor.storage_offset()) * tensor.element_size()
        last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
        return first, first + (last + 1) * tensor.element_size()

    if not one.numel() or not other.numel():
        return False
    (start, end), (first, last) = ends(one), ends(other)
    return start < last and first < end


def _others(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every tensor that a module holds and that is no parameter, with a name; without, where nobody reads it."""
    seen = {id(each) for each in model.parameters()}
    for path, module in model.named_modules():
        at = f"{path}." if path else ""
        for name, buffer in module._buffers.items():
            if buffer is not None and id(buffer) not in seen:
                seen.add(id(buffer))
                yield at + name, buffer
        replaced = {getattr(hook, "name", None) for hook in module._forward_pre_hooks.values()}  # spectral_norm sets it anew
        for name, value in vars(module).items():
            if name in OWN or name.endswith("_hooks"):
                continue
            for tensor in _tensors(value, DEEPEST):
                if id(tensor) not in seen:
                    seen.add(id(tensor))
                    yield "" if name in replaced else at + name, tensor


def _tensors(value: Any, depth: int) -> Iterator[Tensor]:
    if is_tensor(value):
        yield value
    elif depth and isinstance(value, Mapping | list | tuple | set | frozenset):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors(each, depth - 1)
