"""Random numbers: the states of a process's generators, and those of one batch, seeded for it alone.

A batch then has the same ones in another process, after a resume, or with another number of loader workers; and the model's own
(dropout) go on as if no batch had been drawn.
"""

from __future__ import annotations

import functools
import hashlib
import random
import sys
import sysconfig
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from .plain import from_base64, in_base64, plain
from .unplain import unplain

MOST_OBJECTS = 10_000  # that are looked through for generators
MOST_ITEMS = 1_000  # of a list or mapping: a longer one is data
_DATA = (str, bytes, int, float, complex, type(None), torch.Tensor, np.ndarray, nn.Module, range)
_LIBRARIES = tuple(sysconfig.get_paths()[name] for name in ("stdlib", "platstdlib", "purelib", "platlib"))


@dataclass(frozen=True)
class Randoms:
    """The states of a process's generators: torch's, the GPU's, Python's and numpy's."""

    torch: bytes
    cuda: bytes | None
    python: Any
    numpy: Any  # None: not kept, as in checkpoints of version 2

    @classmethod
    def now(cls) -> Randoms:
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
        return cls(torch.get_rng_state().numpy().tobytes(), cuda, random.getstate(), np.random.get_state(legacy=False))

    def to_json(self) -> dict[str, Any]:
        return {
            "torch": in_base64(self.torch),
            "cuda": None if self.cuda is None else in_base64(self.cuda),
            "python": plain(self.python, ("random state",)),
            "numpy": plain(self.numpy, ("random state of numpy",)),
        }

    @classmethod
    def from_json(cls, document: Any) -> Randoms:
        cuda = document["cuda"]
        found = cls(
            from_base64(document["torch"]),
            None if cuda is None else from_base64(cuda),
            unplain(document["python"]),
            None if document["numpy"] is None else unplain(document["numpy"]),
        )
        random.Random().setstate(found.python)  # raises where it is none
        if found.numpy is not None:
            np.random.RandomState(0).set_state(found.numpy)
        torch.Generator().set_state(torch.frombuffer(bytearray(found.torch), dtype=torch.uint8))
        return found

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8))
        random.setstate(self.python)
        if self.numpy is not None:
            np.random.set_state(self.numpy)


@contextmanager
def seeded(key: str, own: list[Any]) -> Iterator[None]:
    """Random numbers come from the key inside, and go on outside as they were. `own`: generators besides the global ones."""
    restore = [_saved(generator) for generator in own]
    torch_state, python_state, numpy_state = torch.random.get_rng_state(), random.getstate(), np.random.get_state()
    torch.default_generator.manual_seed(_number(key, "torch", 8))  # not torch.manual_seed: that is of GPUs too
    random.seed(_number(key, "python", 8))
    np.random.seed(_number(key, "numpy", 4))
    for index, generator in enumerate(own):
        _seed(generator, _number(key, f"own {index}", 4))
    try:
        yield
    finally:
        torch.random.set_rng_state(torch_state)
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        for each in restore:
            each()


def _number(key: str, whose: str, size: int) -> int:
    return int.from_bytes(hashlib.sha256(f"{key} {whose}".encode()).digest()[:size]) >> 1


def _saved(generator: Any) -> Callable[[], object]:
    """A function that restores its state."""
    if hasattr(generator, "set_state"):  # torch's, or a RandomState
        return functools.partial(generator.set_state, generator.get_state())
    if isinstance(generator, random.Random):
        return functools.partial(generator.setstate, generator.getstate())
    return functools.partial(setattr, generator.bit_generator, "state", generator.bit_generator.state)


def _seed(generator: Any, number: int) -> None:
    if isinstance(generator, torch.Generator):
        generator.manual_seed(number)
    elif isinstance(generator, random.Random | np.random.RandomState):
        generator.seed(number)
    else:
        generator.bit_generator.state = type(generator.bit_generator)(number).state


# ---------------------------------------------------------------------- generators of a user's own


def own_generators(*roots: object) -> list[Any]:
    """Generators that these objects reach: in attributes, containers, closures, and globals that their functions name."""
    found: list[Any] = []
    seen: dict[int, object] = {}  # keeps them, so that no identity is used twice
    queue = list(roots)
    for each in queue:
        if len(seen) >= MOST_OBJECTS or id(each) in seen or isinstance(each, _DATA):
            continue
        seen[id(each)] = each
        if _is_generator(each):
            found.append(each)
        else:
            queue.extend(_within(each))
    return found


def _is_generator(each: object) -> bool:
    if isinstance(each, torch.Generator):
        return each.device.type == "cpu"
    return isinstance(each, random.Random | np.random.RandomState | np.random.Generator) and not isinstance(
        each, random.SystemRandom
    )


def _within(each: Any) -> Iterator[Any]:
    if isinstance(each, dict | list | tuple):  # not any mapping: one may read its values from a file
        if len(each) <= MOST_ITEMS:
            yield from each.values() if isinstance(each, dict) else each
    elif isinstance(each, types.FunctionType):
        yield from _of_function(each)
    elif isinstance(each, types.MethodType):
        yield from (each.__self__, each.__func__)
    elif isinstance(each, functools.partial):
        yield from (each.func, each.args, each.keywords)
    elif isinstance(each, type):
        if _is_users(each.__module__):
            yield from (base for base in each.__mro__[1:] if _is_users(base.__module__))
            yield from (getattr(value, "__func__", value) for value in vars(each).values() if not isinstance(value, _DATA))
    elif isinstance(each, property):
        yield each.fget
    elif not isinstance(each, types.ModuleType):
        yield from getattr(each, "__dict__", {}).values()
        yield type(each)


def _of_function(function: types.FunctionType) -> Iterator[Any]:
    for cell in function.__closure__ or ():
        if cell != types.CellType():  # one that is not filled yet
            yield cell.cell_contents
    yield from function.__defaults__ or ()
    if not _is_users(function.__module__):
        return
    names = set(names_in(function.__code__))
    for name in sorted(names & function.__globals__.keys()):
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if _is_users(value.__name__):
                yield from (vars(value)[inner] for inner in sorted(names & vars(value).keys()))
        else:
            yield value


def names_in(code: types.CodeType) -> Iterator[str]:
    """Globals and attributes that it names, and those of the functions inside it."""
    yield from code.co_names
    for each in code.co_consts:
        if isinstance(each, types.CodeType):
            yield from names_in(each)


def _is_users(module: str | None) -> bool:
    """Whether a module is the user's, and no library's."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    if file is None:
        return module == "__main__"
    return not file.startswith(_LIBRARIES)
