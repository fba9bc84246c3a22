"""Pretending: a forward on fake tensors as one of two ranks would run it, to learn which tables can be divided by rows.

The model's own code runs with the very functions that a run uses (vocabulary.py), on the first half of each table. Where ranks
would have to put a table, or logits, together for some use, that is noted: such a table is better left whole.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from anyfit.values.cuts import Cut

from .axis import Axis
from .border import FACTS
from .vocabulary import ROWS, InParts, used


@dataclass(frozen=True)
class Apart(Axis):
    """One rank of two that meets nobody."""

    n: int = 2
    noted: list[Cut] = field(default_factory=list)  # of what would be put together

    def all_reduce(self, x: Tensor) -> Tensor:
        return x.clone()

    def stacked(self, x: Tensor) -> Tensor:
        return x.new_empty((self.n, *x.shape))

    def all_gather(self, x: Tensor, held: Cut) -> Tensor:
        self.noted.append(held)
        shape = list(x.shape)
        _, shape[held.dim] = self.counted(shape[held.dim])
        return x.new_empty(shape)


def _half(table: Tensor) -> Tensor:
    return table[: -(-len(table) // 2)]


class TableUses(TorchFunctionMode):
    """How a model uses these parameters, by their names in it."""

    def __init__(self, names: Collection[str]) -> None:
        super().__init__()
        self._axes = {name: Apart() for name in names}
        self._names: dict[int, str] = {}
        self.looked_up: set[str] = set()
        self.heads: set[str] = set()  # of which logits are made

    @property
    def on_parts(self) -> set[str]:
        """Those that are used, and never put together."""
        return {name for name in self.looked_up | self.heads if not self._axes[name].noted}

    @contextmanager
    def watching(self, model: nn.Module) -> Iterator[None]:
        for name, each in model.named_parameters():
            if name in self._axes and each.dim() == 2 and len(each) > 1:
                self._names[id(each)] = name
                self._axes[name] = self._axes[name].over(len(each))  # type: ignore[assignment]
                vars(each)["of_ranks"] = self._loss_of(name, each)
        with self:
            yield

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mine = [self._names[id(each)] for each in pytree.tree_leaves((args, kwargs)) if id(each) in self._names]
        if not mine or func in FACTS:
            return func(*args, **kwargs)
        (self.heads if func is F.linear else self.looked_up).update(mine)
        return used(func, args, kwargs, self._rows_of)

    def _rows_of(self, value: Any) -> InParts | None:
        name = self._names.get(id(value))
        return None if name is None else InParts(_half(value), ROWS, self._axes[name])

    def _loss_of(self, name: str, table: Tensor) -> Callable[[], tuple[Tensor, Axis]]:
        half = _half(table)  # now, as `self` is not yet looking

        def of_ranks() -> tuple[Tensor, Axis]:
            self.heads.add(name)
            return half, self._axes[name]

        return of_ranks
