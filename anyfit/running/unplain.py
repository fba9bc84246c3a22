"""Plain data read from its JSON (plain.py has the format): as new objects, or restored in place."""

from __future__ import annotations

import collections
import io
import itertools
import json
import math
import random
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from . import plain as writing
from .plain import IMMUTABLE, Path, class_name, dtype_of, fields_of, from_base64, shown, there_at


@dataclass(eq=False)
class Reader:
    """Makes values of JSON."""

    tensor: Callable[[str], Tensor] | None = None  # the bytes of a tensor that is not inline, by what a Writer put there
    find: Callable[[list[str]], Any] | None = None  # a parameter, buffer or module by its name
    live: Mapping[Path, Any] = field(default_factory=dict)  # by path, what is restored in place, or is found since none is made
    device: torch.device | None = None
    touches: bool = True  # whether `live` is changed; without, all objects are new, to see whether they can be made
    _made: dict[Path, Any] = field(default_factory=dict)
    _root: Path = ()

    def read_alone(self, written: Any, path: Path) -> Any:
        """What was written with nothing beside it."""
        self._root = path
        return self.read(written, path)

    def read(self, written: Any, path: Path) -> Any:
        if written is None or isinstance(written, bool | int | float | str):
            return written
        is_new = isinstance(written, dict) and len(written) == 1 and "!new" in written
        written = written["!new"] if is_new else written
        there = there_at(self.live, path)
        value = self._value(written, path, there, there if not is_new and self.touches else None)
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
            if self.find is None:
                raise ValueError(f"{shown(path)} is {found}, and nothing is known by name")
            return self.find(found)
        if tag == "!opaque":
            return there
        if tag == "!object":
            name, fields = found
            _refuse_other_class(there, name, path)
            self._set_fields(there, fields, path)
            return there
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
        if tag in _READ:
            return _READ[tag](found)
        if tag == "!frozenset":
            return frozenset(self.read(item, (*path, "")) for item in found)
        if tag == "!slice":
            return slice(*(self.read(item, path) for item in found))
        raise ValueError(f"{tag!r} is not known")

    def _met(self, path: Path) -> Any:
        if path in self._made:
            return self._made[path]
        if self.live.get(path) is None:
            raise ValueError(f"{shown(path)} is spoken of, and is not there")
        return there_at(self.live, path)

    def _set_fields(self, there: Any, fields: Mapping[str, Any], path: Path) -> None:
        before = dict(fields_of(there))
        for name, item in fields.items():
            if name not in before and hasattr(type(there), name):
                raise ValueError(f"{shown(path)}.{name} would take the place of what its class has")
            value = self.read(item, (*path, f".{name}"))
            if not self.touches or before.get(name) is value:
                continue
            if hasattr(there, "__dict__") and not isinstance(vars(type(there)).get(name), types.MemberDescriptorType):
                vars(there)[name] = value  # without calling its class's __setattr__
            else:
                object.__setattr__(there, name, value)
        if self.touches:
            for name in before.keys() - fields.keys():
                vars(there).pop(name, None)

    def _container(self, tag: str, written: Mapping[str, Any], path: Path, there: Any, home: Any) -> Any:
        found, name = written[tag], written.get("class")
        if tag == "!enum":
            name, found = found
        if name is not None and name.rpartition(".")[2] not in writing.CONTAINERS:
            _refuse_other_class(there, name, path)
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
        kind = writing.CONTAINERS.get(str(name).rpartition(".")[2])
        if kind is None:  # of the user's: it is there
            value = _filled(home, next(each for each in (dict, list, set, collections.deque) if isinstance(there, each)), items)
            self._set_fields(there, written.get("fields", {}), path)
            return there if home is not None else value
        if kind is collections.defaultdict and home is None:
            factory = written.get("factory")
            if factory is not None and factory not in writing.FACTORIES:
                raise ValueError(f"{shown(path)} has values made by {factory}")
            return collections.defaultdict(None if factory is None else writing.FACTORIES[factory], items)
        if kind is collections.deque and home is None:
            return collections.deque(items, written.get("most"))
        return _filled(home, kind, items)

    def _bytes(self, where: Any) -> Tensor:
        if isinstance(where, str):
            return torch.frombuffer(bytearray(from_base64(where)) or bytearray(1), dtype=torch.uint8)
        if self.tensor is None:
            raise ValueError(f"a tensor at {where}, where none can be")
        return self.tensor(where["at"])

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
        device = self.device if about.get("on_device") and self.device is not None else torch.device("cpu")
        if "stride" in about:
            if 1 + sum((size - 1) * step for size, step in zip(shape, about["stride"], strict=True)) != count:
                raise ValueError(f"a tensor of {shape} with strides of {about['stride']}")
            made = torch.empty_strided(shape, about["stride"], dtype=dtype, device=device).copy_(values)
        else:
            made = values.to(device, copy=True)
        return made.requires_grad_(bool(about.get("requires_grad")))


def _refuse_other_class(there: Any, name: str, path: Path) -> None:
    if class_name(type(there)) != name:
        raise ValueError(f"{shown(path)} was a {name}, and here it is {type(there).__name__}")


def _filled(home: Any, kind: type, items: Any) -> Any:
    """`home` with these contents, or a new one of the kind."""
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


def _torch_generator(found: Any, home: Any) -> torch.Generator:
    device, state = found
    kind = str(device).partition(":")[0]
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"a generator on {device}")
    if kind == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"a generator on {device}, and torch sees no GPU here")
    made = home if isinstance(home, torch.Generator) else torch.Generator(kind)
    made.set_state(torch.frombuffer(bytearray(from_base64(state)), dtype=torch.uint8))
    return made


def _numpy_bits(found: Any, home: Any) -> Any:
    state = unplain(found)
    if state["bit_generator"] not in writing.BIT_GENERATORS:
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
_READ: dict[str, Callable[[Any], Any]] = {tag: read for tag, (_kind, _write, read) in IMMUTABLE.items()} | {
    "!number": lambda found: torch.tensor(found[1], dtype=dtype_of(found[0])),
    "!scalar": lambda found: np.frombuffer(from_base64(found[1]), np.dtype(found[0]))[0],
    "!size": lambda found: torch.Size([int(each) for each in found]),
    "!bytearray": lambda found: bytearray(from_base64(found)),
    "!bytesio": lambda found: io.BytesIO(from_base64(found)),
    "!count": lambda found: itertools.count(int(found[0]), int(found[1])),
}


def unplain(written: Any, path: Path = ("checkpoint",)) -> Any:
    return Reader().read_alone(written, path)
