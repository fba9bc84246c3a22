"""What the ranks of a run must have alike, or their replicas part: the optimizer with its groups, the learning-rate schedule, the
loss, the order of the data.

All of it is compared before the first exchange (`facts_of`). What a script may change later, settings of groups and the place in
the data, is compared again in every step, as two numbers in the exchange that a step ends with; only where they differ are the
values themselves sent, to name the first one.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import re
import types
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyfit.values.job import Job

from .loader import Loader

NOWHERE = -1  # of a rank that takes part with no data of its own


# ---------------------------------------------------------------------- in every step


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    """Every plain setting of every group, by its name and group."""
    return {
        f"{name} in group {index}": repr(value)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in _settings(group)
    }


def data_of(loader: Loader | None, is_weighted: bool) -> dict[str, str]:
    """Where a rank is in its data, and of what kind its loss is."""
    return {"kind of loss": "(sum, weight)" if is_weighted else "a mean"} | ({} if loader is None else loader.facts)


def number_of_settings(optimizer: Optimizer) -> int:
    """The same on ranks whose settings are."""
    number = 0
    for group in optimizer.param_groups:
        try:  # in C, as a step is made more often than a setting is no plain value; version 0 depends on values alone
            told = marshal.dumps([value for name, value in group.items() if name != "params"], 0)
        except ValueError:
            told = repr([value for _, value in _settings(group)]).encode()
        number = zlib.crc32(told, number)
    return number


def number_of(facts: Mapping[str, str]) -> int:
    return zlib.crc32(repr(facts).encode())


def _settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, plain) for name, value in group.items() if name != "params" and (plain := _plain(value)) is not _OTHER]


def difference(everybody: Sequence[Mapping[str, str]], ranks: Sequence[int]) -> str:
    """The first fact that a rank has otherwise than the first of them, in words."""
    first = everybody[0]
    for rank, theirs in zip(ranks, everybody, strict=True):
        for name in (*first, *theirs):
            if theirs.get(name) != first.get(name):
                what, within, where = name.partition(" in group ")
                return (
                    f"rank {rank} has {what} {theirs.get(name, 'none')}{within}{where}, "
                    f"rank {ranks[0]} has {first.get(name, 'none')}"
                )
    return "ranks differ"


# ---------------------------------------------------------------------- at the start


def facts_of(job: Job, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What all ranks must have alike before they exchange weights."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {"optimizer": _class(optimizer)}
    facts |= {
        f"group of {names.get(id(parameter), '?')}": str(index)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    facts |= settings_of(optimizer)
    facts |= {
        f"optimizer.{name}": repr(plain)
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OF_TORCH and (plain := _plain(value)) is not _OTHER
    }
    facts["structure of the model"] = _digest(re.sub(r"\b0x[0-9a-f]+", "", repr(model)))  # less the addresses of objects
    facts["code of Job(loss=)"] = code_of(job.loss)
    facts["code of Job(split=)"] = "none" if job.split is None else code_of(job.split)
    facts["options that were agreed to"] = repr(sorted(job.agree))
    return facts


def facts_of_schedule(scheduler: LRScheduler | None) -> dict[str, str]:
    if scheduler is None:
        return {"scheduler": "none"}
    state = {f"scheduler.{name}": repr(_plain(value)) for name, value in sorted(scheduler.state_dict().items())}
    lambdas = getattr(scheduler, "lr_lambdas", [])
    return {"scheduler": _class(scheduler), **state} | {
        f"code of scheduler.lr_lambdas[{index}]": code_of(each) for index, each in enumerate(lambdas)
    }


def code_of(function: Any) -> str:
    """A digest of a function's code, of the functions it wraps too; not of values, which may well be a rank's own."""
    return _digest(repr(_code(function, 0)))


def _code(function: Any, depth: int) -> object:
    if depth > 8:
        return ""
    if isinstance(function, functools.partial):
        return "partial", _code(function.func, depth + 1)
    if isinstance(function, types.MethodType):
        return _code(function.__func__, depth + 1)
    if isinstance(function, types.FunctionType):
        cells = (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
        return _bytes(function.__code__), [_code(each, depth + 1) for each in cells if callable(each)]
    called = type(function).__call__ if callable(function) else None
    return _class(function), _bytes(called.__code__) if isinstance(called, types.FunctionType) else ""


def _bytes(code: types.CodeType) -> object:
    """What runs; neither files nor lines, which may lie elsewhere on another node."""
    constants = [
        _bytes(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, constants


def _class(thing: object) -> str:
    kind = thing if isinstance(thing, type) else type(thing)
    return f"{kind.__module__}.{kind.__qualname__}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


_OTHER = object()
_OF_TORCH = ("defaults", "state", "param_groups")  # attributes of every optimizer


def _plain(value: Any) -> Any:
    """A value that is the same text on every rank, or _OTHER: objects show their addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else _OTHER
    if isinstance(value, list | tuple):
        found: Any = [_plain(each) for each in value]
        return _OTHER if _OTHER in found else found
    if isinstance(value, Mapping):
        return {str(key): plain for key, each in value.items() if (plain := _plain(each)) is not _OTHER}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return _OTHER
