"""The modules whose calls a pipeline is cut between, and what stands in for their forwards.

Whoever is given the calls decides what each returns: the dry run notes them, a stage makes its own and returns ghosts for others.
Inside of a call that is made, calls of other modules are the module's own affair.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

Forward = Callable[..., Any]


class Handler(Protocol):
    def __call__(self, path: str, forward: Forward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """What a call of this module returns."""


def callable_modules(model: nn.Module, blocks: Collection[str]) -> dict[str, nn.Module]:
    """By path, the blocks, and the largest modules with parameters that have no block in them."""
    inside = {id(model.get_submodule(path)) for path in blocks}
    found: dict[str, nn.Module] = {}
    seen: set[int] = set()

    def visit(path: str, module: nn.Module) -> None:
        if id(module) in seen or next(module.parameters(), None) is None:
            return
        if id(module) in inside or not any(id(each) in inside for each in module.modules()):
            seen.add(id(module))
            found[path] = module
            return
        for name, child in module.named_children():
            visit(f"{path}.{name}" if path else name, child)

    for path in blocks:  # first, under the names that a plan knows them by
        seen.add(id(module := model.get_submodule(path)))
        found[path] = module
    visit("", model)
    return found


class Calls:
    """Stands before the forwards of some modules; `handler` is told of each call that is not inside of another."""

    def __init__(self, modules: Mapping[str, nn.Module]) -> None:
        self._modules = modules
        self.handler: Handler | None = None  # None: modules run as they are
        self._is_inside = False
        self._before: dict[str, Any] = {}

    def install(self) -> None:
        compilers = sys.modules.get("torch._dynamo")  # slow to import: what is compiled has done it
        for path, module in self._modules.items():
            stand_in = functools.partial(self._called, path, module.forward)
            self._before[path] = vars(module).get("forward")
            vars(module)["forward"] = stand_in if compilers is None else compilers.disable(stand_in)

    def remove(self) -> None:
        for path, before in self._before.items():
            own = vars(self._modules[path])
            if before is None:
                own.pop("forward", None)
            else:
                own["forward"] = before
        self._before.clear()

    def _called(self, path: str, forward: Forward, *args: Any, **kwargs: Any) -> Any:
        if self.handler is None or self._is_inside:
            return forward(*args, **kwargs)
        self._is_inside = True
        try:
            return self.handler(path, forward, args, kwargs)
        finally:
            self._is_inside = False

    @contextmanager
    def handled_by(self, handler: Handler | None) -> Iterator[None]:
        before, self.handler = self.handler, handler
        try:
            yield
        finally:
            self.handler = before
