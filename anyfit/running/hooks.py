"""What others do after a step, numbers that they note beside it, and the model as they may read it: the way in for loggers,
callbacks and reports."""

from __future__ import annotations

import numbers
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from .acts import Kind

if TYPE_CHECKING:
    from torch import nn

    from .run import Run

RESERVED = ("step", "time")  # in each line of logged.jsonl
OnStep = TypeVar("OnStep", bound="Callable[[Run], object]")
OnLog = TypeVar("OnLog", bound="Callable[[int, Mapping[str, float]], object]")


class Hooks:
    """Of a run. Callbacks are called in the order in which they came, on the rank that gave them."""

    def __init__(self) -> None:
        self._on_step: list[Callable[[Run], object]] = []
        self._on_log: list[Callable[[int, Mapping[str, float]], object]] = []

    def on_step(self, callback: OnStep) -> OnStep:
        """Calls `callback(run)` after every step, once it is done: an error in it leaves the state of that step."""
        self._on_step.append(callback)
        return callback

    def on_log(self, callback: OnLog) -> OnLog:
        """Calls `callback(step, values)` with whatever `run.log` is given."""
        self._on_log.append(callback)
        return callback

    def log(self, **values: float) -> None:
        """Notes numbers by name beside the last step: for those who asked with `on_log`, and under `anyfit fit` in the run
        folder's logged.jsonl."""
        run: Any = self
        found = {name: _number(name, value) for name, value in values.items()}
        if run.launch is not None:
            run.launch.note(run.steps, found)
        for callback in self._on_log:
            callback(run.steps, found)

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The model in evaluation mode and without gradients, to generate with or to look into. Nothing is copied, and
        nothing may be edited: `run.weights()` is for that. All ranks do the same with it."""
        run: Any = self
        run._progress.check_open()
        run._peers.begin(Kind.OPEN_WEIGHTS)
        with run._agreement.reading() as model:
            yield model

    def _tell_of_step(self) -> None:
        run: Any = self
        for callback in self._on_step:
            callback(run)


def _number(name: str, value: Any) -> float:
    if name in RESERVED:
        raise ValueError(f"run.log({name}=): every line has its own {name}; choose another name")
    if not isinstance(value, numbers.Real) and getattr(value, "ndim", None) != 0:  # tensors and arrays of one number have none
        raise TypeError(f"run.log({name}=) takes a number, got {type(value).__name__}")
    return float(value)
