"""Plain data as JSON: numbers, words, containers of them, arrays, tensors and random generators.

Nothing is executed when it is read (unplain.py). An object that is no plain data is not made from a file: it is found where it
was (`live`), and the plain data inside is restored in place, as is all that was changed in place.

    [..], {..}, 1, "a"                                as they are
    {"!tuple": ..}, {"!dict": ..}, {"!tensor": ..}    what JSON does not know, by kind
    {"!ref": ..}                                      a parameter, buffer or module of the model, by name
    {"!same": path}                                   what was met before, at this path from the top of what is written alone
    {"!object": [class, fields]}                      an object that is there at the start; its fields
    {"!opaque": type}                                 what cannot be written, and is as it was at the start
    {"!new": ..}                                      what follows is another object than the one at the start
"""

from __future__ import annotations

import base64
import collections
import decimal
import enum
import functools
import io
import itertools
import json
import pathlib
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyfit.kernels.bytes import crc32

Path = tuple[str, ...]  # where something is: names of attributes, keys, positions
MOST_LEAVES = 1_000_000  # of one thing that is looked through
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
STATE_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
CONTAINERS: dict[str, type] = {
    each.__name__: each
    for each in (list, set, dict, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
}
FACTORIES: dict[str, type] = {each.__name__: each for each in (int, float, list, dict, set, str, bool, tuple)}
OF_GENERATOR = ("state of a generator",)
BIT_GENERATORS = ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
# Of these, no number of a training run depends on what they hold.
INERT = frozenset(
    {"anyfit", "threading", "_thread", "logging", "weakref", "_io", "io", "concurrent", "multiprocessing", "asyncio", "queue"}
    | {"_queue", "datetime", "tensorboard", "tensorboardX", "wandb", "tqdm", "rich", "loguru", "mlflow", "comet_ml", "neptune"}
)
INERT_OF_TORCH = ("torch._dynamo", "torch._inductor", "torch.cuda", "torch.utils", "torch.distributed", "torch._C")
LOOKED_INTO = ("types", "argparse", "collections", "dataclasses")  # of the standard library
AROUND = ("class", "global", "variables of", "function", "loss")  # where libraries' own objects lie beside what trains


class Weak(weakref.ref[Any]):
    """Stands for a tensor that was at a path and may be freed."""


class NotPlainError(TypeError):
    """Something that a checkpoint cannot hold."""


def in_base64(data: Any) -> str:
    return base64.b64encode(data).decode()


from_base64 = functools.partial(base64.b64decode, validate=True)


def name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


# By tag, what cannot change in place: its class, how it is written, how it is read.
IMMUTABLE: dict[str, tuple[type, Callable[[Any], Any], Callable[[Any], Any]]] = {
    "!decimal": (decimal.Decimal, str, decimal.Decimal),
    "!fraction": (Fraction, lambda it: [it.numerator, it.denominator], lambda found: Fraction(*map(int, found))),
    "!complex": (complex, lambda it: [it.real, it.imag], lambda found: complex(*map(float, found))),
    "!bytes": (bytes, in_base64, from_base64),
    "!range": (range, lambda it: [it.start, it.stop, it.step], lambda found: range(*map(int, found))),
    "!dtype": (torch.dtype, name_of, dtype_of),
    "!device": (torch.device, str, torch.device),
    "!path": (pathlib.PurePath, str, pathlib.Path),
}


def is_owned_by_library(kind: type | types.FunctionType, libraries: frozenset[str]) -> bool:
    """Whether it is of an installed package other than these, and not of the user's own code."""
    name = getattr(kind, "__module__", None) or "builtins"
    root = name.partition(".")[0]
    if root in libraries:
        return False
    if root in sys.stdlib_module_names or root in ("torch", "numpy", "anyfit"):
        return True
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


def fields_of(thing: Any) -> Iterator[tuple[str, Any]]:
    """What an object holds: its attributes; of a module those that not every module has, and its state."""
    held = getattr(thing, "__dict__", {})
    if isinstance(thing, nn.Module):
        held = {name: value for name, value in held.items() if name not in OF_EVERY_MODULE or name in STATE_OF_MODULES}
    yield from held.items()
    for kind in type(thing).__mro__:
        slots = vars(kind).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            member = vars(kind).get(name)
            if isinstance(member, types.MemberDescriptorType):
                try:
                    yield name, member.__get__(thing)
                except AttributeError:
                    continue  # not set


def inline(_path: Path, value: Tensor) -> Any:
    return in_base64(bytes_of(value).numpy().tobytes())


def _refuse(path: Path, value: Any) -> Any:
    raise NotPlainError(
        f"a checkpoint cannot hold {shown(path)}: {type(value).__name__} is neither a tensor nor plain data (numbers, words, "
        "lists, dictionaries, arrays, random generators)"
    )


@dataclass(eq=False)
class Writer:
    """Writes values as JSON."""

    ref: Mapping[int, list[str]] = field(default_factory=dict)  # by identity, the name of what has its own place in a checkpoint
    tensor: Callable[[Path, Tensor], Any] = inline  # writes a tensor's numbers
    opaque: Callable[[Path, Any], Any] = _refuse  # what is written for what cannot be, or an error
    start: Mapping[Path, Any] | None = None  # at the start, by path: another object is marked as new; None marks nothing
    libraries: frozenset[str] = frozenset()  # whose objects are looked into, besides the user's own and torch's
    compares: bool = False  # written to be compared, and not to be read: objects are looked into wherever they are
    met: dict[Path, Any] = field(default_factory=dict)  # what can change in place, or cannot be written, by where it is
    _first: dict[int, Path] = field(default_factory=dict)
    _leaves: int = 0

    def write(self, value: Any, path: Path) -> Any:
        self._leaves = 0
        self._root = path if self.start is None and not self.compares else ()  # others are written with many beside them
        return self._write(value, path)

    def _write(self, value: Any, path: Path) -> Any:
        self._leaves += 1
        if self._leaves > MOST_LEAVES:
            raise NotPlainError(f"{shown(path)} holds more than {MOST_LEAVES} values")
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if id(value) in self.ref:
            return {"!ref": self.ref[id(value)]}
        written = self._immutable(value, path)
        if written is not None:
            return written
        if id(value) in self._first:
            return {"!same": list(self._first[id(value)][len(self._root) :])}
        self._first[id(value)] = path
        self.met[path] = value
        written = self._mutable(value, path)
        if self.start is not None and "!opaque" not in written and there_at(self.start, path) is not value:
            written = {"!new": written}
        return written

    def _immutable(self, value: Any, path: Path) -> Any:
        if isinstance(value, tuple):
            if isinstance(value, torch.Size):
                return {"!size": list(value)}
            items = [self._write(item, (*path, str(index))) for index, item in enumerate(value)]
            if type(value) is tuple:
                return {"!tuple": items}
            self._refuse_unless_there(value, path)
            return {"!tuple": items, "class": class_name(type(value))}
        if isinstance(value, enum.Enum):
            self._refuse_unless_there(value, path)
            return {"!enum": [class_name(type(value)), value.name]}
        if isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
            return {"!scalar": [value.dtype.str, in_base64(value.tobytes())]}
        if isinstance(value, frozenset):
            return {"!frozenset": [self._write(item, (*path, "")) for item in sorted(value, key=repr)]}
        if isinstance(value, slice):
            return {"!slice": [self._write(each, path) for each in (value.start, value.stop, value.step)]}
        return next(({tag: write(value)} for tag, (kind, write, _) in IMMUTABLE.items() if isinstance(value, kind)), None)

    def _refuse_unless_there(self, value: Any, path: Path) -> None:
        """Marks a user's class as opaque unless one of it was at this path: it can be found there, and not be made."""
        self.met[path] = value
        if not self.compares and (self.start is None or type(self.start.get(path)) is not type(value)):
            self.opaque(path, value)

    def _mutable(self, value: Any, path: Path) -> dict[str, Any] | list[Any]:
        kind = type(value)
        if kind is list:
            return [self._write(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, Tensor):
            return self._of_tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUmM":
            flat = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes() or b"", np.uint8).copy())
            return {"!array": [value.dtype.str, list(value.shape), self.tensor(path, flat)]}
        if isinstance(value, dict | list | set | collections.deque):
            return self._of_container(value, path)
        written = _of_generator(value)
        if written is not None:
            return written
        if isinstance(value, bytearray):
            return {"!bytearray": in_base64(value)}
        if type(value) is io.BytesIO:
            return {"!bytesio": in_base64(value.getvalue())}
        if self._is_looked_into(value, path):
            if not self.compares and (self.start is None or type(self.start.get(path)) is not kind):
                return self._mark_opaque(path, value)
            fields = {name: self._write(item, (*path, f".{name}")) for name, item in fields_of(value)}
            return {"!object": [class_name(kind), fields]}
        return self._mark_opaque(path, value)

    def _mark_opaque(self, path: Path, value: Any) -> dict[str, Any]:
        written = None if self._is_inert(value, path) else self.opaque(path, value)
        return {"!opaque": type(value).__name__} if written is None else {"!opaque": written}

    def _is_looked_into(self, value: Any, path: Path) -> bool:
        kind = type(value)
        if isinstance(value, (type, types.ModuleType, *_FUNCTIONS)) or not (hasattr(value, "__dict__") or _has_slots(kind)):
            return False
        root = kind.__module__.partition(".")[0]
        if isinstance(value, nn.Module) or root in LOOKED_INTO:
            return True
        if root in INERT or kind.__module__.startswith(INERT_OF_TORCH) or root in ({*sys.stdlib_module_names} | {"numpy"}):
            return False
        return path[0] not in AROUND or root == "torch" or not is_owned_by_library(kind, self.libraries)

    def _is_inert(self, value: Any, path: Path) -> bool:
        if isinstance(value, types.ModuleType | weakref.ReferenceType):
            return True
        if is_iterator(value):
            return False
        while isinstance(value, functools.partial):
            value = value.func
        if isinstance(value, (*_FUNCTIONS, type)):
            return (getattr(value, "__module__", None) or "").partition(".")[0] == "anyfit"
        name = type(value).__module__
        if name.partition(".")[0] in INERT or name.startswith(INERT_OF_TORCH):
            return True
        return path[0] in AROUND and name != "builtins" and is_owned_by_library(type(value), self.libraries)

    def _of_tensor(self, value: Tensor, path: Path) -> dict[str, Any]:
        is_odd = value.layout != torch.strided or value.is_meta or type(value) not in (Tensor, nn.Parameter, nn.Buffer)
        if is_odd or value.is_quantized or value.is_nested:
            return self._mark_opaque(path, value)
        if self.start is None and not value.dim() and not value.dtype.is_complex and not value.requires_grad and value.is_cpu:
            return {"!number": [name_of(value.dtype), value.item()]}
        about: dict[str, Any] = {"dtype": name_of(value.dtype), "shape": list(value.shape)}
        if not value.is_contiguous() and torch.empty_like(value).stride() == value.stride():  # dense
            about["stride"] = list(value.stride())
        if value.requires_grad and value.is_leaf:
            about["requires_grad"] = True
        if not value.is_cpu:
            about["on_device"] = True
        return {"!tensor": [about, self.tensor(path, value.detach())]}

    def _of_container(self, value: Any, path: Path) -> dict[str, Any] | list[Any]:
        kind = type(value)
        found: dict[str, Any]
        if isinstance(value, dict):
            if kind is dict and all(type(key) is str and not key.startswith("!") for key in value):
                return {key: self._write(item, (*path, key)) for key, item in value.items()}
            items = []
            for key, item in dict.items(value):
                written = self._write(key, (*path, "key"))
                items.append([written, self._write(item, (*path, key if type(key) is str else json.dumps(written)))])
            found = {"!dict": items}
            if isinstance(value, collections.defaultdict):
                factory = value.default_factory
                if factory is not None and FACTORIES.get(getattr(factory, "__name__", "")) is not factory:
                    self._refuse_unless_there(value, path)
                found["factory"] = getattr(factory, "__name__", None)
        elif isinstance(value, set):
            found = {"!set": [self._write(item, (*path, "")) for item in sorted(value, key=repr)]}
        else:
            found = {"!list": [self._write(item, (*path, str(index))) for index, item in enumerate(value)]}
            if isinstance(value, collections.deque):
                found["most"] = value.maxlen
        found["class"] = class_name(kind)
        if CONTAINERS.get(kind.__name__) is not kind:  # of the user's
            self._refuse_unless_there(value, path)
            found["fields"] = {name: self._write(item, (*path, f".{name}")) for name, item in fields_of(value)}
        return found


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)


def there_at(live: Mapping[Path, Any], path: Path) -> Any:
    """What is at a path; None where nothing is, or no more."""
    found = live.get(path)
    return found() if isinstance(found, Weak) else found


def _has_slots(kind: type) -> bool:
    return any("__slots__" in vars(each) for each in kind.__mro__[:-1]) and not kind.__module__.startswith("builtins")


def is_iterator(value: Any) -> bool:
    """Whether it holds a position that cannot be read."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _of_generator(value: Any) -> dict[str, Any] | None:
    if isinstance(value, torch.Generator):
        return {"!torch.Generator": [str(value.device), in_base64(value.get_state().numpy().tobytes())]}
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in BIT_GENERATORS:
        return {"!numpy.Generator": plain(value.bit_generator.state, OF_GENERATOR)}
    if isinstance(value, np.random.BitGenerator) and type(value).__name__ in BIT_GENERATORS:
        return {"!numpy.BitGenerator": plain(value.state, OF_GENERATOR)}
    if isinstance(value, np.random.RandomState):
        return {"!numpy.RandomState": plain(value.get_state(legacy=False), OF_GENERATOR)}
    if type(value) is random.Random:
        version, numbers, gauss = value.getstate()
        return {"!random.Random": [version, list(numbers), gauss]}
    if isinstance(value, itertools.count):
        numbers = re.fullmatch(r"count\((-?\d+)(?:, (-?\d+))?\)", repr(value))
        return None if numbers is None else {"!count": [int(numbers[1]), int(numbers[2] or 1)]}
    return None


def plain(value: Any, path: Path) -> Any:
    """JSON of plain data; an error names what is not plain."""
    return Writer().write(value, path)


def bytes_of(value: Tensor) -> Tensor:
    """A tensor's bytes, in row-major order, on the host."""
    flat = value.detach().to("cpu").contiguous().reshape(-1)
    return flat.view(torch.uint8) if flat.numel() else torch.empty(0, dtype=torch.uint8)


def checksum(_path: Path, value: Tensor) -> Any:
    """In place of a tensor's numbers, where they are only to be compared."""
    return crc32(bytes_of(value))


def shown(path: Path) -> str:
    """
    >>> shown(("module", "blocks.0", "counts", "7", ".mean")), shown(("optimizer", "calls")), shown(("scheduler", "gadget"))
    ('blocks.0.counts[7].mean', 'optimizer.calls', 'scheduler.gadget')
    """
    text, *rest = path[1:] if path[0] in ("module", "class", "global", "variables of") else path
    text = text or "the model"
    text = f"{text}.{rest.pop(0)}" if rest else text
    return text + "".join(each if each.startswith(".") else f"[{each}]" for each in rest)


def class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
