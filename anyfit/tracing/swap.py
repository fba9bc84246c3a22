"""Other tensors in place of a model's own, while it is traced: the module stays the user's, whoever else holds it.

A copy of a module is not the module: a forward that was patched closes over the original, hooks and wrappers know it, and some
hold what cannot be copied. So the module itself is run, with each parameter and buffer replaced wherever the job's code holds it
(`values/memento.py` finds where), and the very same objects are there again afterwards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.values.memento import Memento


@contextmanager
def swapped(
    model: nn.Module,
    memento: Memento,
    parameter_like: Callable[[str, nn.Parameter], nn.Parameter],
    buffer_like: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """Inside, the model computes with what these make of its parameters, by name, and buffers; tied ones stay one."""
    instead: dict[int, Any] = {}  # by identity
    for name, parameter in model.named_parameters():
        instead[id(parameter)] = made = parameter_like(name, parameter)
        vars(made).update(_of_its_class(parameter, made))
        vars(made).update(vars(parameter))  # marks that the user has set, such as those an optimizer's groups go by
    for buffer in model.buffers():
        instead[id(buffer)] = buffer_like(buffer)
    for tensor in memento.tensors:  # made with the model, and held by something else: a constant, a second model
        if tensor.is_meta and id(tensor) not in instead:
            held = buffer_like(tensor)
            instead[id(tensor)] = nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else held
    registered = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        memento.put(instead)
        for tensors, name, tensor in registered:
            tensors[name] = instead[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in registered:
            tensors[name] = tensor  # type: ignore[assignment]


def _of_its_class(parameter: nn.Parameter, made: nn.Parameter) -> dict[str, Any]:
    """What a subclass of Parameter has that Parameter has not, for a tensor that cannot be of that class."""
    kinds = type(parameter).__mro__[: type(parameter).__mro__.index(nn.Parameter)]
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    held = {name: getattr(parameter, name) for name in names}
    return {name: MethodType(each.__func__, made) if isinstance(each, MethodType) else each for name, each in held.items()}


def refuse_unmade(model: nn.Module) -> None:
    """Lazy modules make their parameters in the first forward, from its shapes: after an optimizer was to have them."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(parameter):
            module = model.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"{name} has no shape yet: {type(module).__name__} makes it in its first forward; run the model once on a batch "
                "before it is trained, as its optimizer needs too: in the function that makes it, or before Job(model=model)"
            )
