"""What holds the user's objects, each with a way to hold others for a while and to put back what it held at first."""

from __future__ import annotations

import contextlib
import itertools
import types
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from typing import Any

LONGEST = 10_000  # entries of a container whose own contents are looked at; a longer one is put back, but not what is in it
MISSING: Any = object()


class Holder:
    """Something with entries that can be replaced."""

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        """Other objects in place of those it had at first, where `replaced` gives others."""

    def put_back(self, still: Callable[[Any], Any]) -> None:
        """What it had at first."""


class Dict(Holder):
    def __init__(self, held: dict[Any, Any], names: Iterable[str] | None = None) -> None:
        self.held = held
        # Of all its entries, or of these names.
        self.before = dict(held) if names is None else {name: held.get(name, MISSING) for name in names}
        self.is_part = names is not None

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        for key, value in self.before.items():
            if (other := replaced(value)) is not value:
                self._set(key, other)

    def _set(self, key: Any, value: Any) -> None:
        """Past whatever a class of its own makes of it."""
        kind: Any = OrderedDict if isinstance(self.held, OrderedDict) else dict
        kind.__setitem__(self.held, key, value)

    def put_back(self, still: Callable[[Any], Any]) -> None:
        before = {key: still(value) for key, value in self.before.items()}
        if self.is_part:
            for key, value in before.items():
                if value is MISSING:
                    self.held.pop(key, None)
                elif self.held.get(key, MISSING) is not value:
                    self._set(key, value)
            return
        now = self.held
        if len(now) == len(before) and all(a is b and v is w for (a, v), (b, w) in zip(now.items(), before.items(), strict=True)):
            return
        (OrderedDict if isinstance(now, OrderedDict) else dict).clear(now)
        for key, value in before.items():
            self._set(key, value)


class List(Holder):
    def __init__(self, held: Any) -> None:
        self.held, self.before = held, held[:]

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        if isinstance(self.held, list) and len(self.held) <= LONGEST:
            for index, value in enumerate(self.before):
                if (other := replaced(value)) is not value:
                    self.held[index] = other

    def put_back(self, still: Callable[[Any], Any]) -> None:
        if isinstance(self.held, list) and len(self.before) <= LONGEST:
            self.held[:] = [still(value) for value in self.before]
        else:
            self.held[:] = self.before


class Refilled(Holder):
    """A set or a deque."""

    def __init__(self, held: Any) -> None:
        self.held, self.before = held, list(held)

    def put_back(self, still: Callable[[Any], Any]) -> None:
        if len(self.held) != len(self.before) or any(a is not b for a, b in zip(self.held, self.before, strict=True)):
            self.held.clear()
            add = self.held.extend if isinstance(self.held, deque) else self.held.update
            add(map(still, self.before))


class Cell(Holder):
    def __init__(self, held: types.CellType) -> None:
        self.held, self.before = held, Cell.of(held)

    @staticmethod
    def of(cell: types.CellType) -> Any:
        try:
            return cell.cell_contents
        except ValueError:  # empty
            return MISSING

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        if (other := replaced(self.before)) is not self.before:
            self.held.cell_contents = other

    def put_back(self, still: Callable[[Any], Any]) -> None:
        before = still(self.before)
        if before is MISSING:
            with contextlib.suppress(ValueError):
                del self.held.cell_contents
        elif Cell.of(self.held) is not before:
            self.held.cell_contents = before


class Partial(Holder):
    def __init__(self, held: Any) -> None:
        self.held, self.before = held, (held.func, held.args, dict(held.keywords), held.__dict__ or None)

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        function, args, keywords, attributes = self.before
        others = tuple(map(replaced, args)), {name: replaced(value) for name, value in keywords.items()}
        if any(a is not b for a, b in zip(others[0], args, strict=True)) or any(
            others[1][name] is not keywords[name] for name in keywords
        ):
            self.held.__setstate__((function, *others, attributes))

    def put_back(self, still: Callable[[Any], Any]) -> None:
        function, args, keywords, attributes = self.before
        kept = tuple(map(still, args)), {name: still(value) for name, value in keywords.items()}
        self.held.__setstate__((function, *kept, attributes))


class Slots(Holder):
    """Attributes of an object without a dict."""

    def __init__(self, held: Any, names: tuple[str, ...]) -> None:
        self.held, self.before = held, {name: getattr(held, name, MISSING) for name in names}

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        for name, value in self.before.items():
            if (other := replaced(value)) is not value:
                object.__setattr__(self.held, name, other)

    def put_back(self, still: Callable[[Any], Any]) -> None:
        for name, value in self.before.items():
            before = still(value)
            if getattr(self.held, name, MISSING) is not before:
                with contextlib.suppress(AttributeError):
                    if before is MISSING:
                        object.__delattr__(self.held, name)
                    else:
                        object.__setattr__(self.held, name, before)


class Attributes(Holder):
    """Of a class."""

    def __init__(self, held: type) -> None:
        self.held, self.before = held, {name: value for name, value in vars(held).items() if not _is_of_python(name)}

    def hold(self, replaced: Callable[[Any], Any]) -> None:
        for name, value in self.before.items():
            if (other := replaced(value)) is not value:
                setattr(self.held, name, other)

    def put_back(self, still: Callable[[Any], Any]) -> None:
        for name in [name for name in vars(self.held) if not _is_of_python(name) and name not in self.before]:
            delattr(self.held, name)
        for name, value in self.before.items():
            before = still(value)
            if vars(self.held).get(name, MISSING) is not before:
                setattr(self.held, name, before)


class Peeked:
    """An iterator that cannot be copied: what it gives is remembered, and given again afterwards."""

    def __init__(self, iterator: Any, torch: Any) -> None:
        self._iterator, self._torch = iterator, torch
        self._given: list[Any] = []

    def __iter__(self) -> Any:
        return self

    def __next__(self) -> Any:
        from torch.utils._python_dispatch import _disable_current_modes

        with _disable_current_modes(), self._torch._C.DisableTorchFunction():  # it gives real tensors, not those of a trace
            item = next(self._iterator)
        self._given.append(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self._iterator, name)

    def still(self) -> Any:
        return itertools.chain(self._given, self._iterator) if self._given else self._iterator


def _is_of_python(name: str) -> bool:
    return name.startswith("__") and name.endswith("__")
