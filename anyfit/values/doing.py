"""What is being done at the moment, for whoever shows it: a terminal's line, a bar, a stopwatch. Most of the time nobody does."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

Listener = Callable[[str | None], None]  # is told what begins, or goes on; None when there is nothing, or something else is shown

_under_way: list[str] = []  # one inside the other
_listeners: list[Listener] = []  # of which the last hears it


@contextmanager
def doing(what: str) -> Iterator[None]:
    """Around something that may take a while.

    >>> with heard_by(print), doing("planning"), doing("tracing"):
    ...     pass
    planning
    tracing
    planning
    None
    """
    _under_way.append(what)
    _tell()
    try:
        yield
    finally:
        _under_way.pop()
        _tell()


@contextmanager
def heard_by(listener: Listener) -> Iterator[None]:
    """Inside, this one hears what is being done, and no other."""
    _listeners.append(listener)
    if _under_way:
        _tell()
    try:
        yield
    finally:
        _listeners.remove(listener)


def unheard() -> None:
    """From here on, of a process that was forked: whoever listens is in another."""
    _listeners.clear()


def is_heard() -> bool:
    return bool(_listeners)


def now() -> str | None:
    """The innermost of what is under way."""
    return _under_way[-1] if _under_way else None


def make_way() -> None:
    """A line is about to be printed: what shows the work under way gives it the place."""
    if _listeners:
        _listeners[-1](None)


def _tell() -> None:
    if _listeners:
        _listeners[-1](now())
