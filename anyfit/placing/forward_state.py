"""What a forward reads and may change besides its inputs: noted before it runs, and put back for the time it runs again.

State lies in *cells*: the attributes of a module or of an object it holds, the entries of a dict or list, the values of a tensor,
a generator's position, a variable of a closure, of a class, or of the file that defines it. A walk finds the cells that a block
can reach, once; from then on a note is a shallow copy of each, a few tenths of a microsecond, and is compared by identity.
Where a cell holds something new, the block is walked again. Tensors are copied on write: a note costs no bytes before that, and
one that first changes in the hundredth step can be put back as well.

Iterators have no state that could be read: a block that holds one is not recomputed.
"""

from __future__ import annotations

import collections
import contextlib
import ctypes
import dis
import enum
import functools
import pathlib
import random
import re
import struct
import sys
import types
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes

from .chunks import quietly

MOST_ENTRIES = 4096  # of a container that is copied; of a longer one only what is added is taken away again
MOST_CELLS = 4096  # that a block's walk follows
MOST_ARRAY_BYTES = 2**20  # of a numpy array: a larger one is only compared

INERT = {
    int, float, complex, bool, str, bytes, type(None), type, types.ModuleType, types.BuiltinFunctionType, range, slice,
    torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format, re.Pattern, torch.finfo,
    type(Ellipsis), type(NotImplemented), frozenset,
    np.dtype, property, staticmethod, classmethod, types.GetSetDescriptorType, types.MemberDescriptorType, types.MappingProxyType,
    types.WrapperDescriptorType, types.MethodDescriptorType, types.CodeType, functools.cached_property,
}  # fmt: skip
INERT_BASES = (enum.Enum, pathlib.PurePath, type, BaseException)
INTERNAL = set(vars(nn.Module()))  # attributes that every module has
HOOKS = ("_forward_hooks", "_forward_pre_hooks")
NOT_WALKED = {"torch", "anyfit", "logging", "threading", "_thread", "weakref", "_weakref", "io", "_io", "concurrent", "typing"}
LIBRARIES = {"torch", "numpy", "transformers", "anyfit", "accelerate", "peft", "logging", "threading", "weakref"}


class Cell:
    """A place where state lies, by the name that a message gives it."""

    __slots__ = ("name",)
    name: str

    def read(self) -> Any:
        """A copy that `write` takes."""
        raise NotImplementedError

    def write(self, noted: Any) -> None:
        raise NotImplementedError

    def is_same(self, one: Any, other: Any) -> bool:
        raise NotImplementedError

    def held(self, noted: Any) -> Any:
        """What the copy refers to."""
        return ()


def _same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and list(one) == list(other)


class Attributes(Cell):
    """Of a module or object."""

    __slots__ = ("_of",)

    def __init__(self, of: dict[str, Any], name: str) -> None:
        self._of, self.name = of, name

    def read(self) -> dict[str, Any]:
        return self._of.copy()

    is_same = staticmethod(_same_entries)

    def write(self, noted: dict[str, Any]) -> None:
        of = self._of
        for key in [key for key in of if key not in noted]:
            del of[key]
        for key, value in noted.items():
            if key not in of or of[key] is not value:
                of[key] = value

    def held(self, noted: dict[str, Any]) -> Any:
        return noted.values()


class Entries(Attributes):
    """Of a dict."""

    __slots__ = ()

    def read(self) -> Any:
        return dict(self._of) if len(self._of) <= MOST_ENTRIES else len(self._of)

    def is_same(self, one: Any, other: Any) -> bool:
        return one == other if isinstance(one, int) or isinstance(other, int) else _same_entries(one, other)

    def write(self, noted: Any) -> None:
        kind: Any = collections.OrderedDict if isinstance(self._of, collections.OrderedDict) else dict
        if isinstance(noted, int):
            for key in list(self._of)[noted:]:
                kind.__delitem__(self._of, key)
            return
        kind.clear(self._of)
        for key, value in noted.items():
            kind.__setitem__(self._of, key, value)

    def held(self, noted: Any) -> Any:
        return () if isinstance(noted, int) else noted.values()


class Elements(Cell):
    """Of a list, deque, set or array of bytes."""

    __slots__ = ("_of",)

    def __init__(self, of: Any, name: str) -> None:
        self._of, self.name = of, name

    def read(self) -> Any:
        return tuple(self._of) if len(self._of) <= MOST_ENTRIES else len(self._of)

    def is_same(self, one: Any, other: Any) -> bool:
        if isinstance(one, int) or isinstance(other, int):
            return bool(one == other)
        return len(one) == len(other) and all(map(is_, one, other))

    def write(self, noted: Any) -> None:
        of = self._of
        if not isinstance(noted, int):
            of.clear()
            (of.update if isinstance(of, set) else of.extend)(noted)
        elif isinstance(of, list | bytearray):
            del of[noted:]

    def held(self, noted: Any) -> Any:
        return () if isinstance(noted, int) else noted


class Slots(Cell):
    """Of an object that names its attributes in its class."""

    __slots__ = ("_names", "_of")

    def __init__(self, of: Any, names: Sequence[str], name: str) -> None:
        self._of, self._names, self.name = of, names, name

    def read(self) -> dict[str, Any]:
        return {name: getattr(self._of, name) for name in self._names if hasattr(self._of, name)}

    is_same = staticmethod(_same_entries)

    def write(self, noted: dict[str, Any]) -> None:
        for name in self._names:
            if name in noted:
                object.__setattr__(self._of, name, noted[name])
            elif hasattr(self._of, name):
                object.__delattr__(self._of, name)

    def held(self, noted: dict[str, Any]) -> Any:
        return noted.values()


class OfClass(Cell):
    """Variables of a class."""

    __slots__ = ("_names", "_of")

    def __init__(self, of: type, names: Sequence[str], name: str) -> None:
        self._of, self._names, self.name = of, names, name

    def read(self) -> dict[str, Any]:
        own = vars(self._of)
        return {name: own[name] for name in self._names if name in own}

    is_same = staticmethod(_same_entries)

    def write(self, noted: dict[str, Any]) -> None:
        for name, value in noted.items():
            if vars(self._of).get(name) is not value:
                setattr(self._of, name, value)

    def held(self, noted: dict[str, Any]) -> Any:
        return noted.values()


class Globals(Cell):
    """Variables of a file that a function of it names."""

    __slots__ = ("_names", "_of")

    def __init__(self, of: dict[str, Any], names: Sequence[str], name: str) -> None:
        self._of, self._names, self.name = of, names, name

    def read(self) -> dict[str, Any]:
        of = self._of
        return {name: of[name] for name in self._names if name in of}

    is_same = staticmethod(_same_entries)

    def write(self, noted: dict[str, Any]) -> None:
        self._of.update(noted)

    def held(self, noted: dict[str, Any]) -> Any:
        return noted.values()


class Closed(Cell):
    """A variable that a function closes over."""

    __slots__ = ("_of",)

    def __init__(self, of: Any, name: str) -> None:
        self._of, self.name = of, name

    def read(self) -> Any:
        try:
            return (self._of.cell_contents,)
        except ValueError:  # not bound yet
            return ()

    def is_same(self, one: Any, other: Any) -> bool:
        return len(one) == len(other) and all(map(is_, one, other))

    def write(self, noted: Any) -> None:
        if noted:
            self._of.cell_contents = noted[0]

    def held(self, noted: Any) -> Any:
        return noted


class Drawn(Cell):
    """The position of a generator of random numbers."""

    __slots__ = ("read", "write")

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], name: str) -> None:
        self.read, self.write, self.name = read, write, name  # type: ignore[method-assign, assignment]

    def is_same(self, one: Any, other: Any) -> bool:
        return equal(one, other)


class Array(Cell):
    __slots__ = ("_of",)

    def __init__(self, of: Any, name: str) -> None:
        self._of, self.name = of, name

    def read(self) -> Any:
        return self._of.copy() if self._of.nbytes <= MOST_ARRAY_BYTES else zlib.crc32(np.ascontiguousarray(self._of).data)

    def is_same(self, one: Any, other: Any) -> bool:
        return equal(one, other)

    def write(self, noted: Any) -> None:
        if isinstance(noted, int):
            raise RuntimeError(f"{self.name}, a numpy array of {self._of.nbytes} bytes, changes in forward")
        self._of[...] = noted


# ---------------------------------------------------------------------- generators that all share

_WORDS = struct.Struct("i624I")


def _python_generator() -> Drawn:
    """Python's own. `getstate` makes 625 numbers; the bytes behind it, where they are as expected, are read in a tenth of it."""
    generator: Any = random._inst
    address = id(generator) + object.__basicsize__

    def read() -> Any:
        return ctypes.string_at(address, _WORDS.size), generator.gauss_next

    def write(noted: Any) -> None:
        words, gauss = noted
        index, *key = _WORDS.unpack(words)
        random.setstate((3, (*key, index), gauss))

    try:
        words, gauss = read()
        index, *key = _WORDS.unpack(words)
        if (3, (*key, index), gauss) == random.getstate():
            return Drawn(read, write, "Python's random")
    except Exception:  # another interpreter
        pass
    return Drawn(random.getstate, random.setstate, "Python's random")


class Numpy(Cell):
    """numpy's own. To read it exactly takes 30 microseconds, so of a block that has not drawn from it the bytes behind it are
    read; these lack the second of a pair of normal numbers, which is taken for not there."""

    __slots__ = ("_address", "is_exact")

    def __init__(self) -> None:
        bits: Any = np.random.mtrand._rand._bit_generator
        self.name, self.is_exact = "numpy's random", True
        self._address = bits.ctypes.state_address if type(bits).__name__ == "MT19937" else None

    def glance(self) -> Any:
        return None if self._address is None else ctypes.string_at(self._address, 4 * 625)

    def read(self) -> Any:
        return np.random.get_state(legacy=False) if self.is_exact or self._address is None else self.glance()

    def is_same(self, one: Any, other: Any) -> bool:
        return type(one) is type(other) and equal(one, other)

    def write(self, noted: Any) -> None:
        if isinstance(noted, bytes):
            words = np.frombuffer(noted, dtype=np.uint32)
            noted = {
                "bit_generator": "MT19937",
                "state": {"key": words[:624].copy(), "pos": int(words[624])},
                "has_gauss": 0,
                "gauss": 0.0,
            }
        np.random.set_state(noted)


PYTHON = _python_generator()


def _drawn(generator: torch.Generator, name: str) -> Drawn:
    """Of torch; bytes are compared sooner than tensors."""

    def write(noted: bytes) -> None:
        generator.set_state(torch.frombuffer(bytearray(noted), dtype=torch.uint8))

    return Drawn(lambda: generator.get_state().numpy().tobytes(), write, name)


TORCH = _drawn(torch.default_generator, "torch's random")


@functools.cache
def _device_generator(device: torch.device) -> Drawn | None:
    """The device's own, where it is not the CPU's."""
    module: Any = getattr(torch, device.type, None)
    if device.type in ("cpu", "meta") or not hasattr(module, "default_generators"):
        return None
    index = device.index if device.index is not None else module.current_device()
    return _drawn(module.default_generators[index], f"the random numbers of {device}")


def _generator_cell(value: Any, name: str) -> Cell | None:
    if isinstance(value, torch.Generator):
        return _drawn(value, name)
    if isinstance(value, random.Random):
        return PYTHON if value is random._inst else Drawn(value.getstate, value.setstate, name)
    if isinstance(value, np.random.RandomState):
        return Drawn(lambda: value.get_state(legacy=False), value.set_state, name)
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):

        def write(noted: Any) -> None:
            bits.state = noted

        return Drawn(lambda: bits.state, write, name)
    return None


# ---------------------------------------------------------------------- settings that hold for what runs inside them

FLAGS: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (torch._C._get_flash_sdp_enabled, torch._C._set_sdp_use_flash),
    (torch._C._get_mem_efficient_sdp_enabled, torch._C._set_sdp_use_mem_efficient),
    (torch._C._get_math_sdp_enabled, torch._C._set_sdp_use_math),
    (torch._C._get_cudnn_sdp_enabled, torch._C._set_sdp_use_cudnn),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
]


class Settings:
    """Of torch, as they were around a forward: backward runs outside of the user's `with`."""

    __slots__ = ("_autocast", "_flags", "_modes")

    def __init__(self, device: torch.device) -> None:
        self._flags = [get() for get, _ in FLAGS]
        self._modes = _get_current_function_mode_stack()
        kinds = ("cpu",) if device.type == "cpu" else ("cpu", device.type)
        self._autocast = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds if kind != "meta"
        ]

    @contextmanager
    def again(self) -> Iterator[None]:
        now = [get() for get, _ in FLAGS]
        changed = [index for index, (old, new) in enumerate(zip(self._flags, now, strict=True)) if old != new]
        with contextlib.ExitStack() as inside:
            for index in changed:
                FLAGS[index][1](self._flags[index])
                inside.callback(FLAGS[index][1], now[index])
            for kind, dtype, enabled in self._autocast:
                if enabled or torch.is_autocast_enabled(kind):
                    inside.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
            around = _get_current_function_mode_stack()
            for mode in self._modes:
                if mode not in around:
                    inside.enter_context(mode)
            yield


# ---------------------------------------------------------------------- the walk


def _is_library(name: str | None) -> bool:
    package = (name or "").partition(".")[0]
    if package in LIBRARIES or package in sys.stdlib_module_names:
        return True
    file = getattr(sys.modules.get(name or ""), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file


@functools.cache
def _names_of(code: types.CodeType) -> tuple[str, ...]:
    """Global variables that a function's code names, that of functions inside it too."""
    names = {each.argval for each in dis.get_instructions(code) if each.opname.endswith("_GLOBAL")}
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            names |= set(_names_of(constant))
    return tuple(sorted(names))


class Walk:
    """The cells that are reachable from some objects."""

    def __init__(self, before: Walk | None = None, most: int = MOST_CELLS) -> None:
        """`before`: what that found is not found again. `most`: cells, after which nothing more is followed."""
        self._most = most
        self.cells: list[Cell] = []
        self.tensors: list[tuple[Tensor, str]] = []
        self.parameters: list[tuple[nn.Parameter, str]] = []
        self.iterators: list[str] = []
        # What is walked is kept alive with its identity, which then stands for one object.
        self._seen: dict[int, Any] = {} if before is None else dict(before._seen)
        self._left: collections.deque[tuple[Any, str]] = collections.deque()
        self._block: nn.Module | None = None if before is None else before._block

    def of_block(self, block: nn.Module, forward: Callable[..., Any], name: str) -> Walk:
        """`forward`: the block's own, which another may stand in for."""
        self._block = block
        self._own(block, name)
        self._left.append((forward, name))
        return self._through()

    def of(self, values: Any, name: str) -> Walk:
        self._left.append((values, name))
        return self._through()

    def _own(self, module: nn.Module, name: str) -> None:
        for path, each in module.named_modules():
            self._module(each, f"{name}.{path}" if path else name)

    def _through(self) -> Walk:
        while self._left and len(self.cells) < self._most:
            self._visit(*self._left.popleft())
        return self

    def _all(self, values: Any, name: str) -> None:
        self._left.extend((value, name) for value in values if type(value) not in INERT)

    def _by_key(self, values: Mapping[Any, Any], name: str, without: Any = ()) -> None:
        self._left.extend(
            (value, f"{name}.{key}") for key, value in values.items() if type(value) not in INERT and key not in without
        )

    def _module(self, module: nn.Module, name: str) -> None:
        if id(module) in self._seen:
            return
        self._seen[id(module)] = module
        own = vars(module)
        self.cells.append(Attributes(own, name))
        for part in ("_buffers", "_parameters", "_modules"):
            if own.get(part):
                self.cells.append(Entries(own[part], name))
        self._by_key(module._buffers, name)
        self._by_key(module._parameters, name)
        for part in HOOKS:
            if own.get(part):
                self._all(own[part].values(), f"{name}'s hook")
        self._by_key(own, name, INTERNAL)
        self._class(type(module))

    def _class(self, of: type) -> None:
        for base in of.__mro__:
            if id(base) in self._seen or _is_library(base.__module__):
                continue
            self._seen[id(base)] = base
            functions = [value for value in vars(base).values() if isinstance(value, types.FunctionType)]
            names = [
                name
                for name, value in vars(base).items()
                if not name.startswith("__") and not isinstance(value, types.FunctionType | property | staticmethod | classmethod)
            ]
            if names:
                self.cells.append(OfClass(base, names, base.__name__))
                self._by_key({name: vars(base)[name] for name in names}, base.__name__)
            self._left.extend((function, base.__name__) for function in functions)

    def _function(self, function: Any, name: str) -> None:
        for closed in function.__closure__ or ():
            if id(closed) in self._seen:
                continue
            self._seen[id(closed)] = closed
            cell = Closed(closed, f"a variable of {function.__qualname__}")
            self.cells.append(cell)
            self._all(cell.read(), name)
        self._all((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()), f"a default of {name}")
        if _is_library(function.__module__):
            return
        names = [each for each in _names_of(function.__code__) if each in function.__globals__]
        states = [each for each in names if not callable(function.__globals__[each]) or _holds_state(function.__globals__[each])]
        kept = [each for each in states if not isinstance(function.__globals__[each], types.ModuleType)]
        if kept:
            self.cells.append(Globals(function.__globals__, kept, f"a global of {function.__module__}"))
            self._by_key({each: function.__globals__[each] for each in kept}, function.__module__)
        self._all((function.__globals__[each] for each in names if each not in kept), name)

    def _visit(self, value: Any, name: str) -> None:
        kind = type(value)
        if kind in INERT or isinstance(value, INERT_BASES) or id(value) in self._seen:
            return
        if isinstance(value, nn.Module):
            self._foreign(value, name)
            return
        self._seen[id(value)] = value
        if isinstance(value, Tensor):
            if isinstance(value, nn.Parameter):
                self.parameters.append((value, name))
            else:
                self.tensors.append((value, name))
        elif isinstance(value, dict):
            self.cells.append(Entries(value, name))
            if len(value) <= MOST_ENTRIES:
                self._by_key(value, name)
            self._object(value, name)
        elif isinstance(value, list | collections.deque | set | bytearray):
            self.cells.append(Elements(value, name))
            if len(value) <= MOST_ENTRIES and kind is not bytearray:
                self._all(value, name)
            self._object(value, name)
        elif isinstance(value, tuple):
            self._all(value, name)
        elif isinstance(value, np.ndarray):
            self.cells.append(Array(value, name))
        elif isinstance(value, functools.partial):
            self._all((value.func, *value.args, *value.keywords.values()), name)
        elif isinstance(value, types.MethodType):
            self._all((value.__self__, value.__func__), name)
        elif isinstance(value, types.FunctionType):
            self._function(value, name)
        elif (generator := _generator_cell(value, name)) is not None:
            self.cells.append(generator)
        elif _is_library_object(kind):
            return
        elif hasattr(kind, "__next__"):
            self.iterators.append(name)
        else:
            self._object(value, name)
            self._class(kind)

    def _foreign(self, module: nn.Module, name: str) -> None:
        """A module that is not part of the block: with what it is made of, unless that is the block too."""
        if self._block is not None and any(each is self._block for each in module.modules()):
            self._module(module, name)
        else:
            self._own(module, name)

    def _object(self, value: Any, name: str) -> None:
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict):
            self.cells.append(Attributes(own, name))
            self._by_key(own, name)
        slots = [
            each
            for base in type(value).__mro__
            for each in _slots_of(base)
            if each not in ("__dict__", "__weakref__") and not _is_library(base.__module__)
        ]
        if slots:
            cell = Slots(value, slots, name)
            self.cells.append(cell)
            self._by_key(cell.read(), name)


def _slots_of(base: type) -> tuple[str, ...]:
    slots = vars(base).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _holds_state(value: Any) -> bool:
    return not isinstance(value, types.FunctionType | types.BuiltinFunctionType | type)


def _is_library_object(kind: type) -> bool:
    """Objects of torch, of the interpreter and of ours, which forwards do not change."""
    package = kind.__module__.partition(".")[0]
    return package in (
        "torch",
        "anyfit",
        "logging",
        "threading",
        "_thread",
        "weakref",
        "_weakref",
        "io",
        "_io",
        "concurrent",
        "typing",
    )


# ---------------------------------------------------------------------- notes


def version_of(tensor: Tensor) -> int:
    return -1 if tensor.is_inference() else tensor._version


def _copied(tensor: Tensor) -> Tensor:
    """Its values, copied when somebody writes; at once where the memory is not torch's own."""
    try:
        return torch._lazy_clone(tensor.detach())
    except RuntimeError:
        return tensor.detach().clone()


_address: Callable[[Tensor], int] = vars(torch._C)["_data_address"]  # which makes no copy, as `data_ptr` would


def _is_changed(tensor: Tensor, version: int, copy: Tensor) -> bool:
    """By the memory that tensor and copy share until somebody writes, too: batch norm writes without a new version."""
    if version_of(tensor) != version:
        return True
    return tensor.layout != torch.strided or _address(tensor) != _address(copy)


def _unwatched() -> contextlib.AbstractContextManager[Any]:
    """Inside, what counts or keeps the model's ops sees none."""
    return _disable_current_modes() if torch._C._len_torch_dispatch_stack() else contextlib.nullcontext()


class Note:
    """The state of some places as it was when this was made."""

    __slots__ = ("_copies", "_places", "_read", "_requires_grad", "_settings", "_versions", "device")

    def __init__(self, places: Places, read: list[Any], device: torch.device) -> None:
        self._places, self._read, self.device = places, read, device
        self._copies: list[Tensor] = []
        self._versions: list[int] = []
        with quietly():
            if places.tensors:
                with torch.no_grad(), _unwatched():
                    self._copies = [_copied(tensor) for tensor, _ in places.tensors]
                self._versions = [version_of(tensor) for tensor, _ in places.tensors]
            self._requires_grad = [(parameter.requires_grad, version_of(parameter)) for parameter, _ in places.parameters]
        self._settings = Settings(device)

    def edited(self) -> str | None:
        """A parameter that was edited since."""
        with quietly():
            for (parameter, name), (_, version) in zip(self._places.parameters, self._requires_grad, strict=True):
                if version_of(parameter) != version:
                    return name
        return None

    def now(self) -> Note:
        return Note(self._places, self._places.read(), self.device)

    def differences(self, other: Note) -> list[str]:
        """Places that do not hold equal values in two notes."""
        found = []
        for cell, one, two in zip(self._places.cells, self._read, other._read, strict=True):
            if not cell.is_same(one, two) and not equal(one, two):
                keys = _keys_apart(one, two)
                found += [f"{cell.name}.{key}" for key in keys] or [cell.name]
        for (_, name), one, two in zip(self._places.tensors, self._copies, other._copies, strict=True):
            if not equal(one, two):
                found.append(name)
        return list(dict.fromkeys(found))

    def put_back(self) -> None:
        """For good."""
        self._put_back(self._places.read())

    def _put_back(self, now: list[Any]) -> set[int]:
        """Where cells hold something else `now`. Gives the storages whose values were others."""
        changed = set()
        for cell, read, other in zip(self._places.cells, self._read, now, strict=True):
            if not cell.is_same(read, other):
                cell.write(read)
        with torch.no_grad(), quietly():
            if self._copies:
                with _unwatched():
                    for (tensor, _), version, copy in zip(self._places.tensors, self._versions, self._copies, strict=True):
                        if _is_changed(tensor, version, copy):
                            tensor.detach().copy_(copy)
                            changed.add(tensor.untyped_storage()._cdata)
            for (parameter, _), (needed, _) in zip(self._places.parameters, self._requires_grad, strict=True):
                if parameter.requires_grad != needed:
                    parameter.requires_grad_(needed)
        return changed

    @contextmanager
    def again(self) -> Iterator[set[int]]:
        """Inside, everything is as it was then; afterwards as it is now. Gives the storages whose values are put back at the end:
        what is to outlive this of them has to be copied."""
        now = self.now()
        # What else autograd has saved of these tensors is as it was, once their values are.
        tensors = tuple(tensor for tensor, _ in self._places.tensors if not tensor.is_inference())
        with _unsafe_preserve_version_counter(tensors) if tensors else contextlib.nullcontext(), self._settings.again():
            try:
                yield self._put_back(now._read)
            finally:
                now.put_back()


def _keys_apart(one: Any, other: Any) -> list[str]:
    """Of two sets of attributes, those that differ."""
    if not isinstance(one, dict) or not isinstance(other, dict):
        return []
    return [key for key in {**one, **other} if isinstance(key, str) and not equal(one.get(key), other.get(key))]


class Places:
    """Where state lies that is noted together."""

    __slots__ = ("_shared", "cells", "parameters", "tensors")

    def __init__(self, shared: Sequence[Cell], *walks: Walk) -> None:
        self._shared = len(shared)  # generators, which hold no other state
        self.cells = [*shared, *(cell for walk in walks for cell in walk.cells)]
        self.tensors = [each for walk in walks for each in walk.tensors]
        self.parameters = [each for walk in walks for each in walk.parameters]

    def read(self) -> list[Any]:
        return [cell.read() for cell in self.cells]

    def holds_new(self, before: list[Any], now: list[Any]) -> bool:
        """Whether something was put into a cell that is a place for state itself."""
        return any(
            not cell.is_same(one, two) and any(type(value) not in INERT for value in cell.held(two))
            for cell, one, two in zip(self.cells[self._shared :], before[self._shared :], now[self._shared :], strict=True)
        )


def generators(device: torch.device) -> list[Cell]:
    """Those that all share: torch's, Python's, numpy's and the device's."""
    drawn = _device_generator(device)
    return [TORCH, PYTHON, Numpy(), *([] if drawn is None else [drawn])]


class ForwardState:
    """Of one block, on one device."""

    def __init__(self, block: nn.Module, name: str, device: torch.device, forward: Callable[..., Any] | None = None) -> None:
        """`forward`: the block's own, where another stands in for it."""
        self._block, self._forward, self._name, self._device = block, forward or block.forward, name, device
        self._shared = generators(device)
        self._numpy = next(each for each in self._shared if isinstance(each, Numpy))
        self._walk: Walk | None = None
        self._places = Places(self._shared)
        self._read: list[Any] = []

    def note(self, arguments: Sequence[Any] = ()) -> Note:
        """Of what the block can reach now, also through these arguments."""
        read = self._places.read()
        if self._walk is None or self._places.holds_new(self._read, read):
            self._walk = Walk().of_block(self._block, self._forward, self._name)
            self._places = Places(self._shared, self._walk)
            read = self._places.read()
        self._read = read
        if not arguments:
            return Note(self._places, read, self._device)
        places = Places(self._shared, self._walk, Walk(self._walk).of(list(arguments), f"an argument of {self._name}"))
        return Note(places, places.read(), self._device)

    @property
    def iterators(self) -> list[str]:
        return [] if self._walk is None else self._walk.iterators

    def glance(self) -> Any:
        """Of numpy's generator, whose exact state is noted from the first time on that the block draws from it."""
        return self._numpy.glance()

    def ran(self, glance: Any) -> None:
        """The forward is over."""
        self._numpy.is_exact = glance != self._numpy.glance() or glance is None


# ---------------------------------------------------------------------- values


def equal(one: Any, other: Any) -> bool:
    """By value, to the bit; not-a-number equals itself."""
    if one is other:
        return True
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return isinstance(one, Tensor) and isinstance(other, Tensor) and _equal_tensors(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return bool(one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes())
    if isinstance(one, dict):
        return len(one) == len(other) and all(key in other and equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple | collections.deque):
        return len(one) == len(other) and all(map(equal, one, other))
    if isinstance(one, float):
        return one == other or (one != one and other != other)
    if isinstance(one, nn.Module | types.FunctionType | types.MethodType | functools.partial):
        return bool(one == other)
    own = getattr(one, "__dict__", None)
    try:
        return equal(own, vars(other)) if isinstance(own, dict) and own else bool(one == other)
    except Exception:  # an object that cannot be compared, or that holds itself: the tensors that come of it are compared
        return True


def _equal_tensors(one: Tensor, other: Tensor) -> bool:
    if one.dtype != other.dtype or one.shape != other.shape or one.layout != other.layout or one.device != other.device:
        return False
    with torch.no_grad(), quietly():
        one, other = one.detach(), other.detach()
        if one.dtype == torch.uint8 and one.is_cpu and one.dim() == 1:  # a generator's state
            return one.numpy().tobytes() == other.numpy().tobytes()
        if one.layout != torch.strided:
            return torch.equal(one.to_dense(), other.to_dense())
        if torch.equal(one, other):
            return True
        if not (one.is_floating_point() or one.is_complex()):
            return False
        return bool(torch.equal(one.isnan(), other.isnan()) and torch.equal(one.nan_to_num(), other.nan_to_num()))
