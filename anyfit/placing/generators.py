"""Generators of random numbers as cells: Python's, numpy's, torch's, the device's, and a model's own."""

from __future__ import annotations

import ctypes
import functools
import random
import struct
from typing import Any

import numpy as np
import torch

from .cells import Cell, Drawn, equal

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


def generator_cell(value: Any, name: str) -> Cell | None:
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


def generators(device: torch.device) -> list[Cell]:
    """Those that all share: torch's, Python's, numpy's and the device's."""
    drawn = _device_generator(device)
    return [TORCH, PYTHON, Numpy(), *([] if drawn is None else [drawn])]
