"""Guard: what a captured graph has frozen, so that a call under other conditions is noticed.

A graph is what one call did. Another call may use it only if all that can steer Python's way through the block is as it was:

    arguments     of tensors dtype, shape, strides, device and requires_grad; the values of all others
    modules       the train flag, plain attributes and hooks of every submodule; the attributes of objects they hold (configs)
    parameters    dtype and requires_grad, of buffers the shape too: a parameter's own shape may be that of a rank's part
    settings      grad mode, autocast, default dtype, determinism, allowed attention kernels

`conditions` writes all of it down by name; two that differ say what is different.
"""

from __future__ import annotations

import types
from collections.abc import Hashable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_EVERY_MODULE = set(vars(nn.Module())) - {"training"}
PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)

Conditions = Mapping[str, Hashable]


class NotCaptured(Exception):  # noqa: N818 -- says what is so, as NoPlan does
    """This block runs whole: the message names what cannot be captured."""


def conditions(block: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Hashable]:
    return dict(
        [
            *((f"argument {path}", form) for path, form in _arguments(args, kwargs)),
            *_modules(block),
            *((f"parameter {name}", (each.dtype, each.requires_grad)) for name, each in block.named_parameters()),
            *((f"buffer {name}", (each.dtype, tuple(each.shape))) for name, each in block.named_buffers()),
            *_settings(),
        ]
    )


def differences(before: Conditions, after: Conditions) -> list[str]:
    """Names of what is not the same."""
    missing = object()
    names = [*before, *(name for name in after if name not in before)]
    return [name for name in names if before.get(name, missing) != after.get(name, missing)]


def tensor_leaves(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """The tensors among a call's arguments, each with the path to it."""
    found = pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]
    return [(_path(path), leaf) for path, leaf in found if isinstance(leaf, Tensor)]


def _path(path: tuple[Any, ...]) -> str:
    """
    >>> found, _ = pytree.tree_flatten_with_path(((1,), {"mask": [2]}))
    >>> [_path(path) for path, _ in found]
    ['0', 'mask[0]']
    """
    first, *rest = path[1:]
    return str(getattr(first, "key", getattr(first, "idx", first))) + pytree.keystr(tuple(rest))


def _arguments(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[tuple[str, Hashable]]:
    for path, leaf in pytree.tree_flatten_with_path((tuple(args), dict(kwargs)))[0]:
        if isinstance(leaf, Tensor):
            yield _path(path), (leaf.dtype, tuple(leaf.shape), leaf.stride(), leaf.device, leaf.requires_grad)
        elif isinstance(leaf, PLAIN):
            yield _path(path), (type(leaf), leaf)
        else:
            raise NotCaptured(f"argument {_path(path)} is a {type(leaf).__name__}, which may change from call to call")


def _modules(block: nn.Module) -> Iterator[tuple[str, Hashable]]:
    for name, module in block.named_modules():
        inside = f"{name}." if name else ""
        for key, value in vars(module).items():
            if key not in OF_EVERY_MODULE and (name or key != "forward"):  # what stands for the block's own forward is ours
                yield f"attribute {inside}{key}", _frozen(value)
        if name:  # the block's own hooks run around its forward, whatever that is
            yield f"hooks of {name}", tuple(len(getattr(module, kind)) for kind in HOOKS)


def _frozen(value: Any, depth: int = 2) -> Hashable:
    """A value that is equal as long as what it was made of is."""
    if isinstance(value, PLAIN):
        return (type(value), value)
    if isinstance(value, list | tuple):
        return (type(value), *(_frozen(each, depth) for each in value))
    if isinstance(value, dict):
        return (dict, *((_frozen(key, depth), _frozen(each, depth)) for key, each in value.items()))
    if isinstance(value, types.FunctionType | types.BuiltinFunctionType | types.MethodType | type):
        return (getattr(value, "__module__", ""), value.__qualname__)
    if isinstance(value, Tensor | nn.Module) or depth == 0:
        return (type(value), id(value))
    return (type(value), *((key, _frozen(each, depth - 1)) for key, each in sorted(getattr(value, "__dict__", {}).items())))


def _settings() -> Iterator[tuple[str, Hashable]]:
    yield "grad mode", (torch.is_grad_enabled(), torch.is_inference_mode_enabled())
    for kind in ("cpu", "cuda"):
        yield f"autocast on {kind}", (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
    yield "default dtype", torch.get_default_dtype()
    yield "determinism", torch.are_deterministic_algorithms_enabled()
    kernels = torch.backends.cuda
    yield (
        "attention kernels",
        (
            kernels.flash_sdp_enabled(),
            kernels.mem_efficient_sdp_enabled(),
            kernels.math_sdp_enabled(),
            kernels.cudnn_sdp_enabled(),
        ),
    )
