"""Cells: places where a forward's state lies, each with a way to read it, to put it back, and to compare two readings: the
attributes of a module or object, the entries of a dict or list, a generator's position, a variable of a closure, class or file.

A reading is a shallow copy, a few tenths of a microsecond. Two are compared by identity; `equal` compares by value.
"""

from __future__ import annotations

import collections
import ctypes
import functools
import random
import struct
import types
import zlib
from collections.abc import Callable, Sequence
from operator import is_
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .chunks import quietly

MOST_ENTRIES = 4096  # of a container that is copied; of a longer one only what is added is taken away again
MOST_ARRAY_BYTES = 2**20  # of a numpy array: a larger one is only compared


class Cell:
    """A place where state lies, by the name that a message gives it."""

    def __init__(self, of: Any, name: str) -> None:
        self._of, self.name = of, name

    def read(self) -> Any:
        """A copy that `write` takes."""
        raise NotImplementedError

    def write(self, noted: Any) -> None:
        raise NotImplementedError

    def is_same(self, one: Any, other: Any) -> bool:
        return equal(one, other)

    def held(self, noted: Any) -> Any:
        """What the copy refers to."""
        return ()


def _same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one.values(), other.values())) and list(one) == list(other)


class Named(Cell):
    """State that has names."""

    def __init__(self, of: Any, name: str, names: Sequence[str] = ()) -> None:
        super().__init__(of, name)
        self._names = names

    is_same = staticmethod(_same_entries)

    def held(self, noted: dict[str, Any]) -> Any:
        return noted.values()


class Attributes(Named):
    """Of a module or object."""

    def read(self) -> dict[str, Any]:
        return dict.copy(self._of)

    def write(self, noted: dict[str, Any]) -> None:
        of = self._of
        for key in [key for key in of if key not in noted]:
            del of[key]
        for key, value in noted.items():
            if key not in of or of[key] is not value:
                of[key] = value


class Entries(Attributes):
    """Of a dict."""

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


class Slots(Named):
    """Of an object that names its attributes in its class."""

    def read(self) -> dict[str, Any]:
        return {name: getattr(self._of, name) for name in self._names if hasattr(self._of, name)}

    def write(self, noted: dict[str, Any]) -> None:
        for name in self._names:
            if name in noted:
                object.__setattr__(self._of, name, noted[name])
            elif hasattr(self._of, name):
                object.__delattr__(self._of, name)


class Globals(Named):
    """Variables of a file that a function of it names."""

    def read(self) -> dict[str, Any]:
        of = self._of
        return {name: of[name] for name in self._names if name in of}

    def write(self, noted: dict[str, Any]) -> None:
        self._of.update(noted)


class OfClass(Globals):
    """Variables of a class."""

    def __init__(self, of: type, name: str, names: Sequence[str]) -> None:
        super().__init__(vars(of), name, names)
        self._class = of

    def write(self, noted: dict[str, Any]) -> None:
        for name, value in noted.items():
            if self._of.get(name) is not value:
                setattr(self._class, name, value)


class Closed(Elements):
    """A variable that a function closes over: one element, or none."""

    def read(self) -> Any:
        try:
            return (self._of.cell_contents,)
        except ValueError:  # not bound yet
            return ()

    def write(self, noted: Any) -> None:
        if noted:
            self._of.cell_contents = noted[0]


class Drawn(Cell):
    """The position of a generator of random numbers."""

    def __init__(self, read: Callable[[], Any], write: Callable[[Any], Any], name: str) -> None:
        self.read, self.write, self.name = read, write, name  # type: ignore[method-assign, assignment]


class Array(Cell):
    def read(self) -> Any:
        return self._of.copy() if self._of.nbytes <= MOST_ARRAY_BYTES else zlib.crc32(np.ascontiguousarray(self._of).data)

    def write(self, noted: Any) -> None:
        if isinstance(noted, int):
            raise RuntimeError(f"{self.name}, a numpy array of {self._of.nbytes} bytes, changes in forward")
        self._of[...] = noted


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


def alike(one: Any, other: Any) -> bool:
    """The same object, or the same plain values in containers of one kind."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(alike, one.values(), other.values()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(alike, one, other))
    return isinstance(one, bool | int | float | str) and bool(one == other)


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


_WORDS = struct.Struct("i624I")


def _python_generator() -> Drawn:
    """Python's own. `getstate` makes 625 numbers; the bytes behind it, where they are as expected, are read in a tenth of it."""
    generator: Any = random._inst
    address = id(generator) + object.__basicsize__

    def read() -> Any:
        return ctypes.string_at(address, _WORDS.size), generator.gauss_next

    def state_of(noted: Any) -> Any:
        words, gauss = noted
        index, *key = _WORDS.unpack(words)
        return 3, (*key, index), gauss

    try:
        if state_of(read()) == random.getstate():
            return Drawn(read, lambda noted: random.setstate(state_of(noted)), "Python's random")
    except Exception:  # another interpreter
        pass
    return Drawn(random.getstate, random.setstate, "Python's random")


NUMPY_BYTES = 4 * 625  # of its generator's memory: 624 words, and how far they are used


def numpy_address() -> int | None:
    """Where numpy's own generator has its state, where that is all in one place: a user may have put another there."""
    bits: Any = np.random.mtrand._rand._bit_generator
    return bits.ctypes.state_address if type(bits).__name__ == "MT19937" else None


class Numpy(Cell):
    """numpy's own. An exact reading takes 30 microseconds, so for a block that has not drawn from it only its bytes are read.
    These lack the second of a pair of normal numbers, which is taken for not there."""

    def __init__(self) -> None:
        self.name, self.is_exact = "numpy's random", True
        self._address = numpy_address()

    def glance(self) -> Any:
        return None if self._address is None else ctypes.string_at(self._address, NUMPY_BYTES)

    def read(self) -> Any:
        return np.random.get_state(legacy=False) if self.is_exact or self._address is None else self.glance()

    def write(self, noted: Any) -> None:
        if isinstance(noted, bytes):
            words = np.frombuffer(noted, dtype=np.uint32)
            state = {"key": words[:624].copy(), "pos": int(words[624])}
            noted = {"bit_generator": "MT19937", "state": state, "has_gauss": 0, "gauss": 0.0}
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


def device_generator_name(device: torch.device) -> str:
    return (_device_generator(device) or TORCH).name


def generator_of(device: torch.device) -> torch.Generator:
    """That random ops on a device draw from."""
    if device.type != "cuda":
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]


def generator_cell(value: Any, name: str) -> Cell | None:
    if isinstance(value, torch.Generator):
        return _drawn(value, name)
    if isinstance(value, random.Random):
        return PYTHON if value is random._inst else Drawn(value.getstate, value.setstate, name)
    if isinstance(value, np.random.RandomState):
        return Drawn(lambda: value.get_state(legacy=False), value.set_state, name)
    bits = value.bit_generator if isinstance(value, np.random.Generator) else value
    if isinstance(bits, np.random.BitGenerator):
        return Drawn(lambda: bits.state, lambda noted: setattr(bits, "state", noted), name)
    return None


def generators(device: torch.device) -> list[Cell]:
    """Those that all share: torch's, Python's, numpy's and the device's."""
    drawn = _device_generator(device)
    return [TORCH, PYTHON, Numpy(), *([] if drawn is None else [drawn])]
