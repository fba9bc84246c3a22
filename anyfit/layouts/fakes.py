"""Fakes, and ops on them without torch's detours.

Each time torch's fake mode asks some twenty questions of an op whose answers depend on the op alone. What an op gave is kept for
calls with the same shapes, and at a new length no shape is the same. `quickly` asks once for each op. Where torch would run the
op's own kernel for shapes, as it does for most, it does that and nothing else, in a third of the time. All other ops are torch's.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._decomp import meta_table
from torch._subclasses.fake_impls import op_implementations_checks
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager

from anyfit.values.fakes import grouped_product

aten = torch.ops.aten
# That have no kernel for shapes, as they are made of others that share memory, or a rule that is for sizes without a number.
VIEWS = {
    aten.view.default, aten._unsafe_view.default, aten.slice.Tensor, aten.select.int, aten.t.default, aten.transpose.int,
    aten.permute.default, aten.expand.default, aten.unsqueeze.default, aten.squeeze.dim, aten.squeeze.dims, aten.detach.default,
    aten.split.Tensor, aten.split_with_sizes.default, aten.unbind.int,
}  # fmt: skip
ODD = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape, torch.Tag.inplace_view)


class Fakes(FakeTensorMode):
    """torch's, that takes grouped products of any dtype."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            with self:
                return grouped_product(func, args, kwargs or {})
        return super().__torch_dispatch__(func, types, args, kwargs)


def quickly(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], mode: FakeTensorMode) -> Any:
    """What an op gives for fakes; NotImplemented where it is torch's to say."""
    if not _has_only_a_kernel(func) or "device" in kwargs:
        return NotImplemented
    given = [each for each in _flat((*args, *kwargs.values())) if isinstance(each, Tensor)]
    if not all(_is_plain(each, mode) for each in given) or len({each.fake_device for each in given}) != 1:  # type: ignore[attr-defined]
        return NotImplemented
    device = given[0].fake_device  # type: ignore[attr-defined]
    with in_kernel_invocation_manager(mode):
        found = func(*args, **kwargs)

    def fake(x: Any) -> Any:
        return FakeTensor(mode, x, device) if isinstance(x, Tensor) and not isinstance(x, FakeTensor) else x

    if isinstance(found, list | tuple):
        return [fake(each) for each in found] if isinstance(found, list) else tuple(map(fake, found))
    return fake(found)


def _is_plain(x: Tensor, mode: FakeTensorMode) -> bool:
    return isinstance(x, FakeTensor) and x.constant is None and x.fake_mode is mode and x.layout == torch.strided


def _flat(values: Sequence[Any]) -> list[Any]:
    return [each for value in values for each in (value if isinstance(value, list | tuple) else (value,))]


@functools.cache
def _has_only_a_kernel(func: Any) -> bool:
    """Whether that is all that torch runs for it, whatever it is given."""
    if func.namespace != "aten" or func is aten._grouped_mm.default or any(tag in func.tags for tag in ODD):
        return False
    if func in VIEWS:
        return True
    if any(asks(func) for asks, _ in op_implementations_checks):
        return False
    return func in meta_table or torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "Meta")
