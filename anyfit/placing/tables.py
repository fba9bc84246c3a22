"""Parameters that the ranks of a tensor axis divide, as the model sees them: those of cut blocks, and tables.

What lies in a chunk is this rank's part. To the model the parameter has the shape of the whole, and every function of torch that
takes it comes here first: it is put together for it, so that a penalty on weights in the loss, or a layer that uses a block's
weight, is right. A cut block itself takes its part (`local`).

A table is a parameter outside of blocks whose rows are divided, such as an embedding or a head. What is done with words is done
on parts (layouts/vocabulary.py).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.layouts.axis import Axis
from anyfit.layouts.vocabulary import ROWS, InParts, used
from anyfit.values.cuts import Parted, all_have_rows
from anyfit.values.demands import StaysUncut
from anyfit.values.record import nearest

from .chunks import quietly
from .watched import DATA, FACTS, READ_GRADIENT, SET_DATA, SET_GRADIENT, called

_Tensor: Any = torch.Tensor
OF_SHAPE: Mapping[Any, Any] = {
    _Tensor.shape.__get__: lambda shape: shape,
    torch.Tensor.size: lambda shape, *dim, **named: shape if not (dim or named) else shape[(*dim, *named.values())[0]],
    torch.Tensor.numel: lambda shape: shape.numel(),
    torch.Tensor.nelement: lambda shape: shape.numel(),
    torch.numel: lambda shape: shape.numel(),
    torch.Tensor.__len__: lambda shape: shape[0],
}  # what tells of the whole


class Divided(nn.Parameter):
    """Of which this rank has a part. Whoever reads it outside of the block that is cut has all of it."""

    comes_first = True  # before what watches its use (watched.py): a use is of the part
    anyfit_divided: tuple[str, Parted, Axis]
    # What watched parameters answer by themselves comes here too.
    data, grad, detach = _Tensor.data, _Tensor.grad, _Tensor.detach

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in OF_SHAPE and isinstance(args[0], Divided):
            return OF_SHAPE[func](torch.Size(args[0].anyfit_divided[1].shape), *args[1:], **kwargs)
        if func in (DATA, SET_DATA):
            name = args[0].anyfit_divided[0]
            raise RuntimeError(f"{name}.data: it lies in parts on several ranks; read and edit it inside `with run.weights():`")
        if func is torch.autograd.grad:
            raise RuntimeError(
                "torch.autograd.grad of a weight that lies in parts on several ranks, each of which has the gradient of its own; "
                "leave its block out of `cut`, or plan without a tensor axis: tensor=1"
            )
        if func in FACTS or func in (READ_GRADIENT, SET_GRADIENT):
            with quietly():
                return func(*args, **kwargs) if func in FACTS else called(func, args, kwargs)
        return used(func, args, kwargs, _part_of)

    def local(self) -> Tensor:
        """What this rank has."""
        with quietly():
            found: Tensor = called(torch.Tensor.view_as, (self, self), {})  # a view is what tells that it is used
        return found


class Table(Divided):
    """Whose rows are divided, outside of blocks."""

    def of_ranks(self) -> tuple[Tensor, Axis]:
        """This rank's rows, and the ranks, for losses.sliced_cross_entropy."""
        mine = _part_of(self)
        assert mine is not None
        return mine.local, mine.axis


def _part_of(value: Any) -> InParts | None:
    if not isinstance(value, Divided):
        return None
    _, parted, axis = value.anyfit_divided
    if parted.is_even:
        return InParts(value.local(), parted.cut, axis)
    return InParts(value.local()[: parted.rows], parted.cut, axis.over(parted.shape[0]))  # without what fills it up


def divided(names: Collection[str], model: nn.Module, n: int, rank: int, cut_blocks: Collection[str]) -> dict[str, Parted]:
    """What one of n ranks has of these tables. Nothing is changed; raises where one cannot be divided."""
    own = dict(model.named_parameters())
    found: dict[str, Parted] = {}
    for name in names:
        if name not in own:
            raise ValueError(f"the plan divides table {name!r}, and the model has none" + nearest(name, list(own)))
        parameter = own[name]
        holders = [
            (path, module)
            for path, module in model.named_modules()
            if any(each is parameter for each in module._parameters.values())
        ]
        for path, module in holders:
            _refuse_holder(name, path, module, cut_blocks)
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise StaysUncut(f"{name} has a hook on its gradient, of which no rank has all; leave it out of `tables`")
        if type(parameter) is not nn.Parameter:
            raise StaysUncut(f"{name} is a {type(parameter).__name__}, whose own ways would be lost; leave it out of `tables`")
        if parameter.dim() != 2 or not all_have_rows(len(parameter), n):
            raise StaysUncut(
                f"the plan divides the rows of {name}, of shape {tuple(parameter.shape)}, over {n} ranks, which is for tables of "
                "words with rows for each rank; leave it out of `tables`"
            )
        found[name] = Parted(tuple(parameter.shape), ROWS, n, rank)
    for path, module in model.named_modules():
        inside = {id(each) for each in module.parameters()} if module._compiled_call_impl is not None else set()
        held = next((name for name in found if id(own[name]) in inside), None)
        if held is not None:
            raise StaysUncut(f"{held} is part of {path or 'a model'!r}, which is compiled; leave it out of `tables`")
    return found


def _refuse_holder(name: str, path: str, module: nn.Module, cut_blocks: Collection[str]) -> None:
    block = next((each for each in cut_blocks if path == each or path.startswith(f"{each}.")), None)
    if block is not None:
        raise StaysUncut(f"{name} is part of block {block!r}, which is cut as one piece; leave it out of `tables`")
    for option, value in (("max_norm", None), ("sparse", False), ("scale_grad_by_freq", False)):
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and getattr(module, option) != value:
            raise StaysUncut(f"{name} is of an embedding with {option}=, which needs it whole; leave it out of `tables`")


def divide(parameters: Mapping[str, nn.Parameter], parted: Mapping[str, Parted], tables: Collection[str], axis: Axis) -> None:
    """Makes parameters of which this rank has parts say so. Those of a class of the user's own stay what they are."""
    for name, each in parted.items():
        if type(parameters[name]) is nn.Parameter:
            parameter: Any = parameters[name]
            parameter.__class__ = Table if name in tables else Divided
            parameter.anyfit_divided = (name, each, axis)


def undivide(parameters: Mapping[str, nn.Parameter], parted: Collection[str]) -> None:
    for each in map(parameters.__getitem__, parted):
        if vars(each).pop("anyfit_divided", None) is not None:
            each.__class__ = nn.Parameter
