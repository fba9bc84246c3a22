"""What tells that a model's forwards are not alike: each rank of a pipeline runs another part of them, and none has it all."""

from __future__ import annotations

import itertools
import random
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType
from typing import Any

import numpy as np
import torch
from torch import nn

from anyfit.values.stages import Flow

PLAIN = (bool, int, float, str, bytes, type(None))
GENERATORS = random.Random, np.random.RandomState, np.random.Generator, torch.Generator
BY_KEY: set[Any] = {random._inst, np.random.mtrand._rand, torch.default_generator}  # keys.py


def refuse_other_calls(one: Flow, other: Flow) -> None:
    pairs = itertools.zip_longest((each.path for each in one.calls), (each.path for each in other.calls))
    for at, (path, instead) in enumerate(pairs):
        if path != instead:
            raise ValueError(
                f"which modules are called depends on chance: call {at} of a forward is of {path or 'no module'!r}, and of "
                f"{instead or 'no module'!r} with other random numbers; a pipeline needs the same ones every time: draw inside "
                "of the block, or train without a pipeline axis"
            )


def refuse_backward_hooks(model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
    """Those that see all of a call's backward: its two ends may lie on two ranks."""
    called = {id(each) for each in modules.values()}
    inside = {id(each) for module in modules.values() for each in module.modules()} - called
    for path, module in model.named_modules():
        if id(module) not in inside and (module._backward_hooks or module._backward_pre_hooks):
            raise ValueError(
                f"{path or 'the model'!r} has a backward hook, and stages may be cut before and after it, so that no rank sees "
                "all of its backward; register it on a module inside of a block or on a tensor, or train without a pipeline axis"
            )


class Checkpoints:
    """The user's own around calls. What one runs it runs again in backward, on the rank whose backward comes to it: if a cut lies
    in between, that rank has not made all of it."""

    def __init__(self) -> None:
        self._calls: dict[FrameType, list[int]] = {}  # that each has inside

    def note(self, call: int) -> None:
        """A call that begins now."""
        frame = sys._getframe()
        while frame.f_back is not None:
            frame = frame.f_back
            if frame.f_code.co_name == "checkpoint" and frame.f_globals.get("__name__") == "torch.utils.checkpoint":
                self._calls.setdefault(frame, []).append(call)

    def refuse_cut(self, paths: Sequence[str], are_blocks: Sequence[bool]) -> None:
        for calls in self._calls.values():
            for call, following in itertools.pairwise(calls):
                if are_blocks[call]:  # stages end with blocks
                    raise ValueError(
                        f"a checkpoint of the model's own runs {paths[call]!r} and {paths[following]!r} again in backward, and "
                        "stages may be cut between them; checkpoint each of them by itself, leave it to anyfit, which recomputes "
                        "where that pays, or train without a pipeline axis"
                    )


class Numbers:
    """Plain attributes of modules that no called one has inside: what those count is their rank's own affair."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        inside = {id(each) for called in modules.values() for each in called.modules()}
        self._outside = {path: each for path, each in model.named_modules() if id(each) not in inside}
        self._last = self._read()

    def _read(self) -> dict[tuple[str, str], Any]:
        attributes = ((path, name, value) for path, each in self._outside.items() for name, value in vars(each).items())
        return {(path, name): value for path, name, value in attributes if type(value) in PLAIN}

    def have_changed(self) -> bool:
        """Since they were last looked at."""
        before, self._last = self._last, self._read()
        return before != self._last

    def refuse_counting(self) -> None:
        for (path, name), value in self._read().items():
            last = self._last.get((path, name))
            if last != value:
                raise ValueError(
                    f"{path or 'the model'!r} changes its attribute {name} in every forward ({last!r}, then {value!r}), outside "
                    "of its blocks: ranks of a pipeline run other parts of a forward, and would have other numbers there; "
                    "change it in between steps, or train without a pipeline axis"
                )


class OwnGenerators:
    """Random generators that a model has as attributes: one that a single called module draws from gives it the same numbers on
    its rank as anywhere."""

    def __init__(self, model: nn.Module, modules: Mapping[str, nn.Module]) -> None:
        owners = {id(each): path for path, called in modules.items() for each in called.modules()}
        self._owners: dict[int, set[str | None]] = {}
        self._found: dict[int, tuple[str, Any, Any]] = {}  # with its name and state
        for path, module in model.named_modules():
            for name, value in _generators(vars(module)):
                self._owners.setdefault(id(value), set()).add(owners.get(id(module)))
                self._found.setdefault(id(value), (f"{path}.{name}" if path else name, value, _state(value)))

    def refuse_shared(self) -> None:
        """Those from which a forward has drawn."""
        for key, (name, generator, before) in self._found.items():
            if (len(self._owners[key]) > 1 or None in self._owners[key]) and _state(generator) != before:
                raise ValueError(
                    f"{name} is a random generator that more than one block draws from, or code outside of blocks: ranks of a "
                    "pipeline would go on from other places in it; draw from torch's own, Python's or numpy's, give each block "
                    "one of its own, or train without a pipeline axis"
                )


def _generators(attributes: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Or methods of one."""
    for name, value in attributes.items():
        held = getattr(value, "__self__", value)
        if isinstance(held, GENERATORS) and held not in BY_KEY:
            yield name, held


def _state(generator: Any) -> Any:
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes()
    return generator.getstate() if isinstance(generator, random.Random) else repr(generator.__getstate__())
