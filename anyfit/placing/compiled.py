"""Compiled and scripted modules: their ops are not seen one by one, so all their weights are ready before they are called."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from .residency import Residency
from .watched import Watched, watched_kind


def watch_compiled(residency: Residency, model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            _watch_scripted(residency, module)
            continue
        attribute = "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"
        compiled = getattr(module, attribute)
        if attribute == "forward" and not hasattr(compiled, "_torchdynamo_orig_callable"):
            continue
        watched = [parameter for parameter in module.parameters() if isinstance(parameter, Watched)]
        if watched:
            setattr(module, attribute, functools.partial(_call_compiled, residency, compiled, watched))
            residency.undo.append(functools.partial(setattr, module, attribute, compiled))


def _watch_scripted(residency: Residency, module: nn.Module) -> None:
    """TorchScript reads weights itself."""
    chunks = {parameter.anyfit[2] for parameter in module.parameters() if isinstance(parameter, Watched)}
    forward = module.forward

    def ready(*args: Any, **kwargs: Any) -> Any:
        with residency.pinning(chunks):
            return forward(*args, **kwargs)

    if chunks:  # past its own setter, which takes scripted methods alone
        vars(module)["forward"] = ready
        residency.undo.append(functools.partial(vars(module).pop, "forward"))


def _call_compiled(residency: Residency, compiled: Callable[..., Any], watched: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
    with residency.pinning({parameter.anyfit[2] for parameter in watched}), _as_compiled(residency, watched):
        return compiled(*args, **kwargs)


@contextmanager
def _as_compiled(residency: Residency, watched: Sequence[Any]) -> Iterator[None]:
    """Inside, parameters are of the class that the module was compiled for."""
    for parameter in watched:
        parameter.__class__ = residency.kinds[parameter.anyfit[1]]
    try:
        yield
    finally:
        for parameter in watched:
            parameter.__class__ = watched_kind(type(parameter))
