"""Plain data as JSON, and back: numbers, words, containers of them, arrays, tensors and random generators.

Nothing is executed when it is read: what is no such data is not made from a file. It can only be found where it was (`live`), and
the plain data inside it is then put there. So is everything else that was changed in place: whoever else holds it sees it too.

    [..], {..}, 1, "a"                                as they are
    {"!tuple": ..}, {"!dict": ..}, {"!tensor": ..}    what JSON does not know, by kind
    {"!ref": ..}                                      a parameter, buffer or module of the model, by name
    {"!same": path}                                   what was met before, there: seen from the top of what is written alone
    {"!object": [class, fields]}                      an object that is there at the start; its fields
    {"!opaque": type}                                 what cannot be written down, and is as it was at the start
    {"!new": ..}                                      what follows is another object than the one that was there at the start
"""

from __future__ import annotations

import base64
import collections
import decimal
import enum
import fractions
import functools
import io
import itertools
import json
import math
import pathlib
import random
import re
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from anyfit.kernels.bytes import crc32

Path = tuple[str, ...]  # where something is: names of attributes, keys, positions
INLINE_BYTES = 1024  # tensors up to this size are written into the JSON itself
MOST_LEAVES = 1_000_000  # of one thing that is looked through
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
STATE_OF_MODULES = frozenset({"_parameters", "_buffers", "_modules"})
CONTAINERS: dict[str, type] = {
    each.__name__: each
    for each in (list, set, dict, collections.OrderedDict, collections.defaultdict, collections.Counter, collections.deque)
}
FACTORIES: dict[str, type] = {each.__name__: each for each in (int, float, list, dict, set, str, bool, tuple)}
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
    """In place of what was at a path, where it may go meanwhile."""


class NotPlainError(TypeError):
    """Something that a checkpoint cannot hold."""


def is_owned_by_library(kind: type | types.FunctionType, libraries: frozenset[str]) -> bool:
    """Whether it comes with an installed package other than these, and not with the user's own code."""
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


class Writer:
    """Writes values as JSON.

    ref         by identity, how something is named that has its own place in a checkpoint
    tensor      how a tensor's numbers are written; inline where not given
    opaque      what is written for what cannot be, or an error
    start       what was there at the start, by path: what is not the same object is marked as new; None marks nothing
    compares    it is written to be compared, and not to be read: objects are looked into wherever they are
    libraries   packages whose objects are looked into, besides the user's own and torch's
    """

    def __init__(
        self,
        ref: Mapping[int, list[str]] | None = None,
        tensor: Callable[[Path, Tensor], Any] | None = None,
        opaque: Callable[[Path, Any], Any] | None = None,
        start: Mapping[Path, Any] | None = None,
        libraries: frozenset[str] = frozenset(),
        *,
        compares: bool = False,
    ) -> None:
        self._ref, self._tensor, self._opaque = ref or {}, tensor or _inline, opaque or _refuse
        self._start, self._compares, self._libraries = start, compares, libraries
        self.met: dict[Path, Any] = {}  # everything that can change in place, or cannot be written, by where it is
        self._first: dict[int, Path] = {}
        self._leaves = 0

    def write(self, value: Any, path: Path) -> Any:
        self._leaves = 0
        self._root = path if self._start is None and not self._compares else ()  # others are written with many beside them
        return self._write(value, path)

    def _write(self, value: Any, path: Path) -> Any:
        self._leaves += 1
        if self._leaves > MOST_LEAVES:
            raise NotPlainError(f"{shown(path)} holds more than {MOST_LEAVES} values")
        kind = type(value)
        if value is None or kind in (bool, int, float, str):
            return value
        if id(value) in self._ref:
            return {"!ref": self._ref[id(value)]}
        written = self._immutable(value, path)
        if written is not None:
            return written
        if id(value) in self._first:
            return {"!same": list(self._first[id(value)][len(self._root) :])}
        self._first[id(value)] = path
        self.met[path] = value
        written = self._mutable(value, path)
        if self._start is not None and "!opaque" not in written and not _is_same(self._start.get(path), value):
            written = {"!new": written}
        return written

    def _immutable(self, value: Any, path: Path) -> Any:
        if isinstance(value, tuple):
            if isinstance(value, torch.Size):
                return {"!size": list(value)}
            items = [self._write(item, (*path, str(index))) for index, item in enumerate(value)]
            if type(value) is tuple:
                return {"!tuple": items}
            self.met[path] = value
            self._refuse_unless_there(value, path)
            return {"!tuple": items, "class": _name(type(value))}
        if isinstance(value, enum.Enum):
            self.met[path] = value
            self._refuse_unless_there(value, path)
            return {"!enum": [_name(type(value)), value.name]}
        if isinstance(value, np.generic) and not isinstance(value, np.void | np.object_):
            return {"!scalar": [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        match value:
            case decimal.Decimal():
                return {"!decimal": str(value)}
            case fractions.Fraction():
                return {"!fraction": [value.numerator, value.denominator]}
            case complex():
                return {"!complex": [value.real, value.imag]}
            case bytes():
                return {"!bytes": base64.b64encode(value).decode()}
            case frozenset():
                return {"!frozenset": [self._write(item, (*path, "")) for item in sorted(value, key=repr)]}
            case range():
                return {"!range": [value.start, value.stop, value.step]}
            case slice():
                return {"!slice": [self._write(each, path) for each in (value.start, value.stop, value.step)]}
            case torch.dtype():
                return {"!dtype": str(value).removeprefix("torch.")}
            case torch.device():
                return {"!device": str(value)}
            case pathlib.PurePath():
                return {"!path": str(value)}
        return None

    def _refuse_unless_there(self, value: Any, path: Path) -> None:
        """What is made by code of the user's can be found where one of its kind was, and not be made."""
        if not self._compares and (self._start is None or type(self._start.get(path)) is not type(value)):
            self._opaque(path, value)

    def _mutable(self, value: Any, path: Path) -> dict[str, Any] | list[Any]:
        kind = type(value)
        if kind is list:
            return [self._write(item, (*path, str(index))) for index, item in enumerate(value)]
        if isinstance(value, Tensor):
            return self._of_tensor(value, path)
        if isinstance(value, np.ndarray) and value.dtype.kind in "biufcSUmM":
            flat = torch.from_numpy(np.frombuffer(np.ascontiguousarray(value).tobytes() or b"", np.uint8).copy())
            return {"!array": [value.dtype.str, list(value.shape), self._tensor(path, flat)]}
        if isinstance(value, dict | list | set | collections.deque):
            return self._of_container(value, path)
        written = _of_generator(value, self._write, path)
        if written is not None:
            return written
        if isinstance(value, bytearray):
            return {"!bytearray": base64.b64encode(value).decode()}
        if type(value) is io.BytesIO:
            return {"!bytesio": base64.b64encode(value.getvalue()).decode()}
        if self._is_looked_into(value, path):
            if not self._compares and (self._start is None or type(self._start.get(path)) is not kind):
                return self._mark_opaque(path, value)
            fields = {name: self._write(item, (*path, f".{name}")) for name, item in fields_of(value)}
            return {"!object": [_name(kind), fields]}
        return self._mark_opaque(path, value)

    def _mark_opaque(self, path: Path, value: Any) -> dict[str, Any]:
        written = None if self._is_inert(value, path) else self._opaque(path, value)
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
        return path[0] not in AROUND or root == "torch" or not is_owned_by_library(kind, self._libraries)

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
        return path[0] in AROUND and name != "builtins" and is_owned_by_library(type(value), self._libraries)

    def _of_tensor(self, value: Tensor, path: Path) -> dict[str, Any]:
        if value.layout != torch.strided or value.is_meta or type(value) not in (Tensor, nn.Parameter, nn.Buffer):
            return self._mark_opaque(path, value)
        if value.is_quantized or value.is_nested:
            return self._mark_opaque(path, value)
        if self._start is None and not value.dim() and not value.dtype.is_complex and not value.requires_grad and value.is_cpu:
            return {"!number": [str(value.dtype).removeprefix("torch."), value.item()]}
        about: dict[str, Any] = {"dtype": str(value.dtype).removeprefix("torch."), "shape": list(value.shape)}
        if not value.is_contiguous() and torch.empty_like(value).stride() == value.stride():  # dense
            about["stride"] = list(value.stride())
        if value.requires_grad and value.is_leaf:
            about["requires_grad"] = True
        if not value.is_cpu:
            about["on_device"] = True
        return {"!tensor": [about, self._tensor(path, value.detach())]}

    def _of_container(self, value: Any, path: Path) -> dict[str, Any] | list[Any]:
        kind = type(value)
        found: dict[str, Any]
        if isinstance(value, dict):
            is_plain = kind is dict and all(type(key) is str and not key.startswith("!") for key in value)
            if is_plain:
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
        found["class"] = _name(kind)
        if CONTAINERS.get(kind.__name__) is not kind:  # of the user's
            self._refuse_unless_there(value, path)
            found["fields"] = {name: self._write(item, (*path, f".{name}")) for name, item in fields_of(value)}
        return found


_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.MethodWrapperType)


def _is_same(one: Any, other: Any) -> bool:
    return (one() if isinstance(one, Weak) else one) is other


def _has_slots(kind: type) -> bool:
    return any("__slots__" in vars(each) for each in kind.__mro__[:-1]) and not kind.__module__.startswith("builtins")


def is_iterator(value: Any) -> bool:
    """Whether it holds a position that nobody can ask it for."""
    return hasattr(type(value), "__next__") and not isinstance(value, io.IOBase)


def _of_generator(value: Any, write: Callable[[Any, Path], Any], path: Path) -> dict[str, Any] | None:
    if isinstance(value, torch.Generator):
        return {"!torch.Generator": [str(value.device), base64.b64encode(value.get_state().numpy().tobytes()).decode()]}
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in BIT_GENERATORS:
        return {"!numpy.Generator": _plain(value.bit_generator.state)}
    if isinstance(value, np.random.BitGenerator) and type(value).__name__ in BIT_GENERATORS:
        return {"!numpy.BitGenerator": _plain(value.state)}
    if isinstance(value, np.random.RandomState):
        return {"!numpy.RandomState": _plain(value.get_state(legacy=False))}
    if type(value) is random.Random:
        version, numbers, gauss = value.getstate()
        return {"!random.Random": [version, list(numbers), gauss]}
    if isinstance(value, itertools.count):
        numbers = re.fullmatch(r"count\((-?\d+)(?:, (-?\d+))?\)", repr(value))
        return None if numbers is None else {"!count": [int(numbers[1]), int(numbers[2] or 1)]}
    return None


def _plain(value: Any) -> Any:
    return Writer().write(value, ("state of a generator",))


def _inline(_path: Path, value: Tensor) -> Any:
    return base64.b64encode(bytes_of(value).numpy().tobytes()).decode()


def _refuse(path: Path, value: Any) -> Any:
    raise NotPlainError(
        f"a checkpoint cannot hold {shown(path)}: {type(value).__name__} is neither a tensor nor plain data (numbers, words, "
        "lists, dictionaries, arrays, random generators)"
    )


def bytes_of(value: Tensor) -> Tensor:
    """A tensor's own, in row-major order, on the host."""
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
    if path[0] == "module":
        first, *rest = path[1:]
        text = first or "the model"
        text = f"{text}.{rest.pop(0)}" if rest else text
    elif path[0] in ("class", "global", "variables of"):
        first, *rest = path[1:]
        text = f"{first}.{rest.pop(0)}" if rest else first
    else:
        text, *rest = path
        text = f"{text}.{rest.pop(0)}" if rest else text
    return text + "".join(each if each.startswith(".") else f"[{each}]" for each in rest)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


# ---------------------------------------------------------------------- and back


class Reader:
    """Makes values of JSON.

    tensor    the bytes of a tensor that is not inline, by what a Writer put there
    find      a parameter, buffer or module by its name
    live      what there is, by path: what has changed in place is changed there, and what cannot be made is found there
    touches   whether anything of that is changed: without, all is made anew, to see whether it can be
    """

    def __init__(
        self,
        tensor: Callable[[Any], Tensor] | None = None,
        find: Callable[[list[str]], Any] | None = None,
        live: Mapping[Path, Any] | None = None,
        device: torch.device | None = None,
        *,
        touches: bool = True,
    ) -> None:
        self._tensor, self._find, self._live = tensor, find, live or {}
        self._device, self._touches = device, touches
        self._made: dict[Path, Any] = {}
        self._root: Path = ()

    def read_alone(self, written: Any, path: Path) -> Any:
        """What was written with nothing beside it."""
        self._root = path
        return self.read(written, path)

    def read(self, written: Any, path: Path) -> Any:
        if written is None or isinstance(written, bool | int | float | str):
            return written
        is_new = False
        if isinstance(written, dict) and len(written) == 1 and "!new" in written:
            is_new, written = True, written["!new"]
        there = self._live.get(path)
        there = there() if isinstance(there, Weak) else there
        value = self._value(written, path, there, there if not is_new and self._touches else None)
        self._made[path] = value
        return value

    def _value(self, written: Any, path: Path, there: Any, home: Any) -> Any:
        """`home` is what is there where it is to be changed."""
        if isinstance(written, list):
            return _filled(home, list, [self.read(item, (*path, str(index))) for index, item in enumerate(written)])
        tag = next((key for key in written if key.startswith("!")), None)
        if tag is None:
            return _filled(home, dict, {key: self.read(item, (*path, key)) for key, item in written.items()})
        found = written[tag]
        if tag == "!same":
            return self._met((*self._root, *map(str, found)))
        if tag == "!ref":
            if self._find is None:
                raise ValueError(f"{shown(path)} is {found}, and nothing is known by name")
            return self._find(found)
        if tag == "!opaque":
            return there
        if tag == "!object":
            name, fields = found
            return self._object(name, fields, path, there)
        if tag in ("!dict", "!list", "!set", "!tuple", "!enum"):
            return self._container(tag, written, path, there, home)
        if tag == "!tensor":
            about, where = found
            return self._read_tensor(about, where, home)
        if tag == "!array":
            kind, shape, where = found
            count = math.prod(shape) * np.dtype(kind).itemsize
            values = np.frombuffer(self._bytes(where)[:count].numpy().tobytes(), np.dtype(kind)).reshape(shape).copy()
            if isinstance(home, np.ndarray) and (home.shape, home.dtype) == (values.shape, values.dtype):
                home[...] = values
                return home
            return values
        if tag in _GENERATORS:
            return _GENERATORS[tag](found, home)
        if tag in _IMMUTABLE:
            return _IMMUTABLE[tag](found)
        if tag == "!frozenset":
            return frozenset(self.read(item, (*path, "")) for item in found)
        if tag == "!slice":
            return slice(*(self.read(item, path) for item in found))
        raise ValueError(f"{tag!r} is not known")

    def _met(self, path: Path) -> Any:
        if path in self._made:
            return self._made[path]
        there = self._live.get(path)
        if there is None:
            raise ValueError(f"{shown(path)} is spoken of, and is not there")
        return there() if isinstance(there, Weak) else there

    def _object(self, name: str, fields: Mapping[str, Any], path: Path, there: Any) -> Any:
        if there is None or _name(type(there)) != name:
            raise ValueError(f"{shown(path)} was a {name}, and here it is {type(there).__name__}")
        self._set_fields(there, fields, path)
        return there

    def _set_fields(self, there: Any, fields: Mapping[str, Any], path: Path) -> None:
        before = dict(fields_of(there))
        for field, item in fields.items():
            if field not in before and hasattr(type(there), field):
                raise ValueError(f"{shown(path)}.{field} would take the place of what its class has")
            value = self.read(item, (*path, f".{field}"))
            if self._touches and before.get(field) is not value:
                _set(there, field, value)
        if self._touches:
            for field in before.keys() - fields.keys():
                vars(there).pop(field, None)

    def _container(self, tag: str, written: Mapping[str, Any], path: Path, there: Any, home: Any) -> Any:
        found, name = written[tag], written.get("class")
        if tag == "!enum":
            name, found = found
        if name is not None and name.rpartition(".")[2] not in CONTAINERS and _name(type(there)) != name:
            raise ValueError(f"{shown(path)} was a {name}, and here it is {type(there).__name__}")
        if tag == "!enum":
            return type(there)[found]
        if tag == "!dict":
            items: Any = {}
            for key, item in found:
                made = self.read(key, (*path, "key"))
                items[made] = self.read(item, (*path, made if type(made) is str else json.dumps(key)))
        elif tag == "!set":
            items = {self.read(item, (*path, "")) for item in found}
        else:
            items = [self.read(item, (*path, str(index))) for index, item in enumerate(found)]
        if tag == "!tuple":
            if name is None:
                return tuple(items)
            return type(there)._make(items) if hasattr(type(there), "_make") else tuple.__new__(type(there), items)
        kind = CONTAINERS.get(str(name).rpartition(".")[2])
        if kind is None:  # of the user's: it is there
            value = _filled(home, next(each for each in (dict, list, set, collections.deque) if isinstance(there, each)), items)
            self._set_fields(there, written.get("fields", {}), path)
            return there if home is not None else value
        if kind is collections.defaultdict and home is None:
            factory = written.get("factory")
            if factory is not None and factory not in FACTORIES:
                raise ValueError(f"{shown(path)} has values made by {factory}")
            return collections.defaultdict(None if factory is None else FACTORIES[factory], items)
        if kind is collections.deque and home is None:
            return collections.deque(items, written.get("most"))
        return _filled(home, kind, items)

    def _bytes(self, where: Any) -> Tensor:
        if isinstance(where, str):
            return torch.frombuffer(bytearray(base64.b64decode(where, validate=True)) or bytearray(1), dtype=torch.uint8)
        if self._tensor is None:
            raise ValueError(f"a tensor at {where}, where none can be")
        return self._tensor(where)

    @torch.no_grad()
    def _read_tensor(self, about: Mapping[str, Any], where: Any, home: Any) -> Tensor:
        dtype, shape = dtype_of(about["dtype"]), [int(each) for each in about["shape"]]
        flat = self._bytes(where)
        count = torch.Size(shape).numel()
        if not isinstance(where, str):
            if flat.dtype != dtype or list(flat.shape) != shape:
                raise ValueError(f"a tensor of {flat.dtype} and {tuple(flat.shape)} where {dtype} and {shape} belong")
            values = flat
        else:
            values = flat[: count * dtype.itemsize].view(dtype).view(shape) if count else torch.empty(shape, dtype=dtype)
        if type(home) in (Tensor, nn.Parameter, nn.Buffer) and home.shape == values.shape and home.dtype == dtype:
            return cast(Tensor, home.copy_(values))
        device = self._device if about.get("on_device") and self._device is not None else torch.device("cpu")
        if "stride" in about:
            if 1 + sum((size - 1) * step for size, step in zip(shape, about["stride"], strict=True)) != count:
                raise ValueError(f"a tensor of {shape} with strides of {about['stride']}")
            made = torch.empty_strided(shape, about["stride"], dtype=dtype, device=device).copy_(values)
        else:
            made = values.to(device, copy=True)
        return made.requires_grad_(bool(about.get("requires_grad")))


def _filled(home: Any, kind: type, items: Any) -> Any:
    """What is there with other contents, or a new one."""
    if not isinstance(home, kind):
        return items if type(items) is kind else kind(items)
    there: Any = home
    if isinstance(there, dict):
        dict.clear(there)
        dict.update(there, items)
    elif isinstance(there, list):
        list.__setitem__(there, slice(None), list(items))
    else:
        there.clear()
        (there.update if isinstance(there, set) else there.extend)(items)
    return there


def _set(there: Any, field: str, value: Any) -> None:
    """Past whatever its class does when a field is set."""
    if hasattr(there, "__dict__") and not isinstance(vars(type(there)).get(field), types.MemberDescriptorType):
        vars(there)[field] = value
    else:
        object.__setattr__(there, field, value)


def dtype_of(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found


def _torch_generator(found: Any, home: Any) -> torch.Generator:
    device, state = found
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"a generator on {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"a generator on {device}, and torch sees no GPU here")
    made = home if isinstance(home, torch.Generator) else torch.Generator(kind)
    made.set_state(torch.frombuffer(bytearray(base64.b64decode(state, validate=True)), dtype=torch.uint8))
    return made


def _numpy_bits(found: Any, home: Any) -> Any:
    state = unplain(found)
    if state["bit_generator"] not in BIT_GENERATORS:
        raise ValueError(f"a generator of {state['bit_generator']}")
    made = home if type(home).__name__ == state["bit_generator"] else getattr(np.random, state["bit_generator"])(0)
    made.state = state
    return made


def _numpy_generator(found: Any, home: Any) -> np.random.Generator:
    bits = _numpy_bits(found, getattr(home, "bit_generator", None))
    return home if isinstance(home, np.random.Generator) and home.bit_generator is bits else np.random.Generator(bits)


def _numpy_state(found: Any, home: Any) -> np.random.RandomState:
    made = home if isinstance(home, np.random.RandomState) else np.random.RandomState(0)
    made.set_state(unplain(found))
    return made


def _python_generator(found: Any, home: Any) -> random.Random:
    made = home if isinstance(home, random.Random) else random.Random(0)
    version, numbers, gauss = found
    made.setstate((version, tuple(numbers), gauss))
    return made


_GENERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "!torch.Generator": _torch_generator,
    "!numpy.Generator": _numpy_generator,
    "!numpy.BitGenerator": _numpy_bits,
    "!numpy.RandomState": _numpy_state,
    "!random.Random": _python_generator,
}
_IMMUTABLE: dict[str, Callable[[Any], Any]] = {
    "!number": lambda found: torch.tensor(found[1], dtype=dtype_of(found[0])),
    "!complex": lambda found: complex(float(found[0]), float(found[1])),
    "!decimal": lambda found: decimal.Decimal(found),
    "!fraction": lambda found: fractions.Fraction(*(int(each) for each in found)),
    "!bytes": lambda found: base64.b64decode(found, validate=True),
    "!bytearray": lambda found: bytearray(base64.b64decode(found, validate=True)),
    "!bytesio": lambda found: io.BytesIO(base64.b64decode(found, validate=True)),
    "!scalar": lambda found: np.frombuffer(base64.b64decode(found[1], validate=True), np.dtype(found[0]))[0],
    "!size": lambda found: torch.Size([int(each) for each in found]),
    "!range": lambda found: range(*(int(each) for each in found)),
    "!dtype": dtype_of,
    "!device": lambda found: torch.device(found),
    "!path": lambda found: pathlib.Path(found),
    "!count": lambda found: itertools.count(int(found[0]), int(found[1])),
}


def plain(value: Any, path: Path) -> Any:
    """JSON of plain data; an error names what is none."""
    return Writer().write(value, path)


def unplain(written: Any, path: Path = ("checkpoint",)) -> Any:
    return Reader().read_alone(written, path)
