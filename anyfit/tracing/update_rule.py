"""What the user's optimizer does to each element, learnt by stepping it once on small stand-ins.

The user's own factory makes it over the fake model, so its parameter groups and options are the real ones; every group is then
given small real parameters and stepped while its ops and storages are counted. No optimizer has to be known by name.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.values.graph import UpdateRule
from anyfit.values.job import OPTIMIZERS

from .needs import written_by

ELEMENTS = 4096  # of a stand-in: large enough that step counters do not matter


def learn(optimizer: Optimizer, device: str, *, sparse: bool = False) -> UpdateRule:
    """Steps `optimizer` on stand-ins for its own parameters; it is of no further use afterwards. `sparse`: the model has layers
    with sparse gradients, the only ones that SparseAdam takes."""
    for group in optimizer.param_groups:
        if device == "cuda" and group.get("foreach", True) is None and not group.get("fused"):
            group["foreach"] = True  # torch's own choice: one op for all parameters on a GPU, one for each on a CPU
        if device == "cuda" and group.get("capturable"):  # the same numbers; a CPU's does not know it
            group["capturable"] = False
    optimizer.state.clear()  # what a constructor made for the fake parameters (Adagrad) is made for the stand-ins below
    own = [list(group["params"]) for group in optimizer.param_groups]
    shapes = [_shape_like(parameters) for parameters in own]
    sparse = sparse and isinstance(optimizer, torch.optim.SparseAdam)
    counts: dict[int, _Meter] = {}
    for copies in (1, 2, 4):
        optimizer.state.clear()
        stand_ins = []
        for group, shape in zip(optimizer.param_groups, shapes, strict=True):
            made = [nn.Parameter(torch.ones(shape)) for _ in range(copies)]
            for parameter in made:
                parameter.grad = torch.ones(shape).to_sparse() if sparse else torch.ones(shape)
            group["params"] = made
            stand_ins.append(made)
        _initialise(optimizer)
        try:
            optimizer.step()  # the first step makes the state; the second is like all that follow
            with _Meter() as counts[copies]:
                optimizer.step()
        except Exception as error:
            with suppress(Exception):
                return _learnt_whole(optimizer, own)
            name, why = type(optimizer).__name__, " ".join(str(error).split())
            others = f"; these of torch.optim do: {', '.join(OPTIMIZERS)}" if name not in OPTIMIZERS else ""
            options = f" with the options {_unusual(optimizer)}" if others == "" else ""
            raise ValueError(
                f"{name}{options} does not step ordinary parameters with dense gradients on the CPU ({why}){others}"
            ) from error
    parameters = 2 * len(stand_ins)
    state = [_state_bytes(optimizer, made[0]) / ELEMENTS for made in stand_ins]
    grows = counts[4].peak_bytes > 1.5 * counts[2].peak_bytes
    return UpdateRule(
        name=type(optimizer).__name__,
        state_bytes_per_element=tuple(state),
        bytes_per_element=counts[2].touched_bytes / (parameters * ELEMENTS),
        ops_per_parameter=counts[2].ops / parameters,
        # of one parameter after another, one may begin with what the last has left
        scratch_bytes_per_element=counts[1 if grows else 2].peak_bytes / ELEMENTS,
        scratch_is_shared=not grows,
    )


def _learnt_whole(optimizer: Optimizer, own: Sequence[Sequence[torch.Tensor]]) -> UpdateRule:
    """Of an optimizer that knows its parameters beforehand, such as one with copies of them: by stepping the fakes themselves."""
    optimizer.state.clear()
    parameters = [parameter for group in own for parameter in group]
    assert all(isinstance(parameter, FakeTensor) for parameter in parameters)
    for group, given in zip(optimizer.param_groups, own, strict=True):
        group["params"] = list(given)
    with parameters[0].fake_mode:  # type: ignore[attr-defined]
        for parameter in parameters:
            parameter.grad = torch.empty_like(parameter)
        try:
            optimizer.step()
            with _Meter() as meter:
                optimizer.step()
        finally:
            for parameter in parameters:
                parameter.grad = None
    elements = max(sum(parameter.numel() for parameter in parameters), 1)
    known = {id(parameter) for parameter in parameters}
    held = sum(each.numel() * each.element_size() for each in _held(optimizer) if id(each) not in known)
    return UpdateRule(
        name=type(optimizer).__name__,
        state_bytes_per_element=(held / elements,) * len(own),
        bytes_per_element=meter.touched_bytes / elements,
        ops_per_parameter=meter.ops / len(parameters),
        scratch_bytes_per_element=meter.peak_bytes / elements,
        scratch_is_shared=False,
    )


def _held(optimizer: Optimizer) -> list[torch.Tensor]:
    """All tensors of an optimizer and of those inside it."""
    leaves = pytree.tree_leaves([*vars(optimizer).values(), list(optimizer.state.values())])
    inner = [tensor for each in leaves if isinstance(each, Optimizer) for tensor in _held(each)]
    return [*inner, *(each for each in leaves if isinstance(each, torch.Tensor))]


def _state_bytes(optimizer: Optimizer, parameter: torch.Tensor) -> int:
    """Without step counters, which cost nothing by the element."""
    held = pytree.tree_leaves(optimizer.state.get(parameter, {}))
    return sum(item.numel() * item.element_size() for item in held if isinstance(item, torch.Tensor) and item.dim())


def _shape_like(parameters: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Of a stand-in: as many dimensions as the group's largest parameter has. Some optimizers take matrices alone."""
    largest = max(parameters, key=lambda each: each.numel(), default=None)
    dimensions = {2: (64, 64), 3: (16, 16, 16), 4: (8, 8, 8, 8)}
    return (ELEMENTS,) if largest is None else dimensions.get(largest.dim(), (ELEMENTS,))


def _unusual(optimizer: Optimizer) -> str:
    """What the user asked of an optimizer that works without."""
    flags = {key for group in optimizer.param_groups for key, value in group.items() if value is True}
    return ", ".join(f"{key}=True" for key in sorted(flags)) or "it was given"


def _initialise(optimizer: Optimizer) -> None:
    """Optimizers that make their state in the constructor get it for the stand-ins too."""
    if isinstance(optimizer, torch.optim.Adagrad):
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                optimizer.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "sum": torch.full_like(parameter, group["initial_accumulator_value"]),
                }


class _Meter(TorchDispatchMode):
    """Counts ops, bytes touched and the peak of what they allocate."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0
        self.touched_bytes = 0
        self.peak_bytes = 0
        self._live: dict[int, int] = {}
        self._references: list[weakref.ref[Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        inputs = [item for item in pytree.tree_leaves((args, kwargs)) if _is_dense(item)]
        there = {tensor.untyped_storage()._cdata for tensor in inputs}
        result = func(*args, **kwargs)
        outputs = [item for item in pytree.tree_leaves(result) if _is_dense(item)]
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in there]
        if not fresh and not func._schema.is_mutable:
            return result
        self.ops += 1
        written = outputs or written_by(func, args, {})  # the foreach ops return nothing
        self.touched_bytes += sum(tensor.numel() * tensor.element_size() for tensor in inputs + written)
        for tensor in fresh:
            storage = tensor.untyped_storage()
            self._live[storage._cdata] = storage.nbytes()
            self._references.append(weakref.ref(storage, functools.partial(self._forget, storage._cdata)))
        self.peak_bytes = max(self.peak_bytes, sum(self._live.values()))
        return result

    def _forget(self, identity: int, _reference: Any) -> None:
        self._live.pop(identity, None)


def _is_dense(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.layout == torch.strided
