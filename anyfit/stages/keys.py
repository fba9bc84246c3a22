"""Random numbers by key, so that any cut of a model draws the same.

A forward begins with a key of (seed, step, data rank, micro-batch). Each call of a module draws from a stream of its own, made of
the key, and leaves the next key behind, whatever it has drawn: a call that is made on another rank does the same. Glue draws from
the key's own stream. The key is the seed that torch's generator was given last, which goes with the generator's state: so a
checkpoint of the user's own around a call, which puts that state back and makes the call again, draws the same once more.
`elsewhere` has Python's and numpy's generators follow, for a model that draws from them: to seed those takes longer.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_cuda: Any = torch.cuda
GENERATOR: torch.Generator = torch.default_generator  # the CPU's


@contextmanager
def drawing(device: torch.device, *key: int, elsewhere: bool = False) -> Iterator[None]:
    """Around a forward; random states are as before afterwards."""
    before, others = GENERATOR.get_state(), (random.getstate(), np.random.get_state()) if elsewhere else None
    of_device = _of(device)
    then = None if of_device is None else of_device.get_state()
    _seed(device, _mixed(0, *key), elsewhere=elsewhere)
    try:
        yield
    finally:
        GENERATOR.set_state(before)
        if others is not None:
            random.setstate(others[0])
            np.random.set_state(others[1])
        if of_device is not None:
            of_device.set_state(then)


@contextmanager
def call_of_its_own(device: torch.device, *, elsewhere: bool = False) -> Iterator[None]:
    """Around a call of a module, made here or not."""
    key = GENERATOR.initial_seed()
    _seed(device, _mixed(key, 1), elsewhere=elsewhere)
    try:
        yield
    finally:
        _seed(device, _mixed(key, 2), elsewhere=elsewhere)


class Draws:
    """Which generators a forward draws from, told as it goes from one call to the next."""

    def __init__(self) -> None:
        self.elsewhere = False  # from Python's or numpy's
        self.by_glue = False
        self._at = self._read()

    def note(self, *, by_glue: bool) -> None:
        """What has run since the last note."""
        before, self._at = self._at, self._read()
        self.elsewhere |= before[1:] != self._at[1:]
        self.by_glue |= by_glue and before != self._at

    @staticmethod
    def _read() -> tuple[Any, ...]:
        numpys: Any = np.random.get_state()
        return GENERATOR.get_state().numpy().tobytes(), random.getstate(), numpys[1].tobytes(), numpys[2]


def is_random(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op draws; attention kernels do where some of it is dropped."""
    if torch.Tag.nondeterministic_seeded not in func.tags:
        return False
    if "attention" not in str(func):
        return True
    named = dict(zip((each.name for each in func._schema.arguments), args, strict=False)) | dict(kwargs)
    return "_backward" not in str(func) and bool(named.get("dropout_p", 0.0))


def _seed(device: torch.device, number: int, *, elsewhere: bool) -> None:
    GENERATOR.manual_seed(number)
    of_device = _of(device)
    if of_device is not None:
        of_device.manual_seed(number)
    if elsewhere:
        random.seed(number)
        np.random.seed(number & 0xFFFFFFFF)


def _of(device: torch.device) -> Any:
    if device.type != "cuda":
        return None
    return _cuda.default_generators[_cuda.current_device() if device.index is None else device.index]


def _mixed(*numbers: int) -> int:
    """
    >>> _mixed(0, 1) == _mixed(0, 1), _mixed(0, 1) == _mixed(1, 0)
    (True, False)
    """
    told = hashlib.blake2b(repr(numbers).encode(), digest_size=8).digest()
    return int.from_bytes(told) >> 1  # 63 bits: a seed is a signed number in places
