"""What holds the user's objects, each with a way to hold others for a while and to put back what it held at first."""

from __future__ import annotations

import contextlib
import itertools
import random
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

LONGEST = 10_000  # entries of a container whose own contents are looked at; a longer one is put back, but not what is in it
MISSING: Any = object()
Change = Callable[[Any], Any]


class Holder:
    """Something with entries that can be replaced."""

    def hold(self, change: Change) -> None:
        """Other objects in place of those it had at first, where `change` gives others."""

    def put_back(self, change: Change) -> None:
        """What it had at first, or what `change` makes of it."""


class Named(Holder):
    """Entries that are got, set and deleted by name; MISSING stands for one that does not exist."""

    def __init__(self, before: Mapping[str, Any], get: Change, set: Any, delete: Any, *forgiven: type[Exception]) -> None:
        self.before, self.get, self.set, self.delete, self.forgiven = before, get, set, delete, forgiven

    def hold(self, change: Change) -> None:
        for name, value in self.before.items():
            if (other := change(value)) is not value:
                self.set(name, other)

    def put_back(self, change: Change) -> None:
        for name, value in self.before.items():
            before = change(value)
            if self.get(name) is not before:
                with contextlib.suppress(*self.forgiven):
                    self.delete(name) if before is MISSING else self.set(name, before)


def names(held: dict[str, Any], wanted: Iterable[str]) -> Named:
    """Some entries of a dict: globals."""

    def get(name: str) -> Any:
        return held.get(name, MISSING)

    return Named({name: get(name) for name in wanted}, get, held.__setitem__, held.__delitem__)


def slots(held: Any, wanted: Iterable[str]) -> Named:
    """Attributes of an object without a dict."""

    def get(name: str) -> Any:
        return getattr(held, name, MISSING)

    before = {name: get(name) for name in wanted}
    return Named(before, get, partial(object.__setattr__, held), partial(object.__delattr__, held), AttributeError)


def cell(held: types.CellType) -> Named:
    def get(name: str) -> Any:
        try:
            return held.cell_contents
        except ValueError:  # empty
            return MISSING

    return Named({"cell_contents": get("")}, get, partial(setattr, held), partial(delattr, held))


class Attributes(Named):
    """Of a class."""

    def __init__(self, held: type) -> None:
        self.held = held
        get, set, delete = (lambda name: vars(held).get(name, MISSING)), partial(setattr, held), partial(delattr, held)
        super().__init__({name: value for name, value in vars(held).items() if not _is_of_python(name)}, get, set, delete)

    def put_back(self, change: Change) -> None:
        for name in [name for name in vars(self.held) if not _is_of_python(name) and name not in self.before]:
            delattr(self.held, name)
        super().put_back(change)


class Dict(Named):
    """All entries of a dict, in their order. They are set past whatever a class of its own makes of that."""

    def __init__(self, held: dict[Any, Any]) -> None:
        self.held = held
        self.kind: Any = OrderedDict if isinstance(held, OrderedDict) else dict
        super().__init__(dict(held), held.get, partial(self.kind.__setitem__, held), held.__delitem__)

    def put_back(self, change: Change) -> None:
        now, before = self.held, {key: change(value) for key, value in self.before.items()}
        if len(now) == len(before) and all(a is b and v is w for (a, v), (b, w) in zip(now.items(), before.items(), strict=True)):
            return
        self.kind.clear(now)
        for key, value in before.items():
            self.set(key, value)


class List(Holder):
    def __init__(self, held: Any) -> None:
        self.held, self.before = held, held[:]

    def hold(self, change: Change) -> None:
        if isinstance(self.held, list) and len(self.held) <= LONGEST:
            for index, value in enumerate(self.before):
                if (other := change(value)) is not value:
                    self.held[index] = other

    def put_back(self, change: Change) -> None:
        is_looked_at = isinstance(self.held, list) and len(self.before) <= LONGEST
        self.held[:] = [change(value) for value in self.before] if is_looked_at else self.before


class Refilled(Holder):
    """A set or a deque."""

    def __init__(self, held: Any) -> None:
        self.held, self.before = held, list(held)

    def put_back(self, change: Change) -> None:
        if len(self.held) != len(self.before) or any(a is not b for a, b in zip(self.held, self.before, strict=True)):
            self.held.clear()
            add = self.held.extend if isinstance(self.held, deque) else self.held.update
            add(map(change, self.before))


class Partial(Holder):
    def __init__(self, held: Any) -> None:
        self.held, self.before = held, (held.func, held.args, dict(held.keywords), held.__dict__ or None)

    def hold(self, change: Change) -> None:
        function, args, keywords, attributes = self.before
        others = {name: change(value) for name, value in keywords.items()}
        self.held.__setstate__((function, tuple(map(change, args)), others, attributes))

    put_back = hold


class Peeked:
    """An iterator that cannot be copied: what it gives is remembered, and given again afterwards."""

    def __init__(self, iterator: Any) -> None:
        self._iterator = iterator
        self._given: list[Any] = []

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        from torch._C import DisableTorchFunction
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), DisableTorchFunction():  # it gives real tensors, not those of a trace
            item = next(self._iterator)
        self._given.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def still(self) -> Any:
        return itertools.chain(self._given, self._iterator) if self._given else self._iterator


def _is_of_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")


def process_settings(torch: Any, numpy: Any) -> Iterator[tuple[Any, Callable[[Any], object]]]:
    """Settings of the process that user code may change, as they are, and what sets them: random numbers, torch's defaults."""
    yield random.getstate(), random.setstate
    if numpy is not None:
        yield numpy.random.get_state(), numpy.random.set_state
    yield torch.get_rng_state(), torch.set_rng_state
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all(), torch.cuda.set_rng_state_all
    yield torch.get_default_dtype(), torch.set_default_dtype
    if _default_device(torch) is None:  # one that was set outside stays; one that is set meanwhile goes
        yield None, lambda _: torch.set_default_device(None) if _default_device(torch) is not None else None
    deterministic = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    yield deterministic, lambda state: torch.use_deterministic_algorithms(state[0], warn_only=state[1])
    yield torch.is_grad_enabled(), torch.set_grad_enabled
    for kind in ("cpu", "cuda"):
        yield torch.is_autocast_enabled(kind), partial(torch.set_autocast_enabled, kind)
        yield torch.get_autocast_dtype(kind), partial(torch.set_autocast_dtype, kind)
    for name in ("benchmark", "deterministic", "allow_tf32", "enabled"):
        yield getattr(torch.backends.cudnn, name), partial(setattr, torch.backends.cudnn, name)


def _default_device(torch: Any) -> Any:
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)
