"""Watched parameters: torch calls `__torch_function__` before any op that takes one, and so weights are ready for every op."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.values.call import leaves

from .chunks import quietly
from .edits import Lent

_Tensor: Any = torch.Tensor  # whose properties are typed as what they give


class Watched(nn.Parameter):
    """A parameter that tells its residency when it is used."""

    anyfit: tuple[Any, str, int]  # its residency, its name, its chunk

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with quietly():
            if func in FACTS:
                return func(*args, **kwargs)
            watched = [item for item in leaves((args, kwargs)) if isinstance(item, Watched) and hasattr(item, "anyfit")]
            if not watched:  # a copy the user made
                return func(*args, **kwargs)
            return called(watched[0].anyfit[0], func, args, kwargs, watched)


def watched_kind(kind: type[nn.Parameter]) -> type[Watched]:
    """A parameter of the user's own class keeps what that class has."""
    return Watched if kind is nn.Parameter else type(kind.__name__, (Watched, kind), {})


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


# What may be asked of a parameter that is not there.
FACTS = _properties(
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "itemsize", "nbytes", "names", "output_nr", "retains_grad", "is_cpu", "is_xpu", "is_mps",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base",
) | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.register_hook, torch.Tensor.__len__,
    torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.requires_grad_, torch.Tensor.__hash__,
    _Tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.is_pinned,
    torch.Tensor.get_device, torch.Tensor.ndimension, torch.Tensor.__dir__,
}  # fmt: skip
READ_GRADIENT, SET_GRADIENT, SET_DATA = _Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.data.__set__
LENDS = {_Tensor.data.__get__, torch.Tensor.detach, torch.detach}


def called(residency: Any, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], watched: Sequence[Any]) -> Any:
    """An op with watched parameters: their weights are made ready, and edits of them taken over."""
    name = watched[0].anyfit[1]
    if func == READ_GRADIENT:
        if name in residency.moved_gradients:
            raise RuntimeError(
                f"the gradient of {name} has left for the host, as the plan says; run.metrics.gradient_norm is there "
                "after the step, and a plan with gradients on the device keeps p.grad"
            )
        return func(*args, **kwargs)
    if func == SET_GRADIENT:
        if args[1] is not None:
            raise RuntimeError(f"p.grad of {name} cannot be set: its chunk is updated by the plan's own schedule")
        return func(*args, **kwargs)
    chunks = {each.anyfit[2] for each in watched}
    with _untransformed(), _outside_inference():
        residency.touch(chunks)
    if func == SET_DATA:
        _set_data(name, watched[0], args[1])
        result = None
    elif func in LENDS:
        return watched[0].detach().as_subclass(Lent)
    else:
        result = func(*args, **kwargs)
    writes_list = _writes_list(func, args)
    for index in chunks:
        residency.heed(index, is_written=writes_list)
    return result


def _set_data(name: str, parameter: Tensor, given: Tensor) -> None:
    """Of a parameter whose memory is the plan's: its values."""
    if given.shape != parameter.shape or given.dtype != parameter.dtype:
        kind = f"{given.dtype} of shape {tuple(given.shape)}"
        raise RuntimeError(f"{name}.data cannot become {kind}: it is part of a chunk of the plan")
    if isinstance(given, Lent) and given.data_ptr() != parameter.data_ptr():
        raise RuntimeError(
            f"{name}.data would become the memory of another weight; tie parameters as one object before the run starts: "
            "module.a.weight = module.b.weight"
        )
    parameter.detach().copy_(given)


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Inside, no transform of torch.func is at work: what it would make of a weight is gone when the transform is."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Inside, views of weights are made that serve after the user's inference mode too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def _writes_list(func: Any, args: Sequence[Any]) -> bool:
    """Whether it writes into a list of tensors, as torch._foreach_mul_ does: under a dispatch mode torch does not count that."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_") and bool(args) and isinstance(args[0], list | tuple)
