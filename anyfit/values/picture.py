"""What a plan's step looks like, to be drawn: the model's blocks, the device's memory over a pass, and who works when."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .plan_names import Activations


@dataclass(frozen=True)
class BlockPart:
    """One block, in the order in which forward comes to them."""

    path: str
    kind: str  # class of the module
    parameters: int
    activations: Activations
    kept_bytes: int  # from forward to backward, as the plan has it
    seconds: float  # of forward and backward of one micro-batch, with what is recomputed


@dataclass(frozen=True)
class MemoryOver:
    """Bytes of the device at the fullest of each stretch of one micro-batch, by kind; the last moment is the update."""

    moments: tuple[str, ...]
    seconds: tuple[float, ...]  # that each stretch takes
    bytes: Mapping[str, tuple[int, ...]]

    @property
    def totals(self) -> list[int]:
        return [sum(column) for column in zip(*self.bytes.values(), strict=True)]

    @property
    def peak_at(self) -> str:
        """
        >>> MemoryOver(("forward a", "backward a"), (1.0, 2.0), {"weights": (4, 4), "work": (1, 3)}).peak_at
        'backward a'
        """
        totals = self.totals
        return self.moments[totals.index(max(totals))]


@dataclass(frozen=True)
class Picture:
    blocks: tuple[BlockPart, ...]
    memory: MemoryOver | None
    lanes: Mapping[str, tuple[tuple[float, float, str, str], ...]]  # by lane: from and to in seconds, what kind of work, of what
    lanes_are_of: str  # a whole step, or a part of it
