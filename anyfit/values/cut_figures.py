"""CutFigures: what one rank of a tensor axis does of a block that is cut over it, as shares of what one device does of all.

They are found for one length of a sample (`layouts/figures.py`). Shares do not depend on how many samples a pass has, and what
is exchanged grows with them, so one solution serves every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, NamedTuple, Self

from .cuts import Move, share
from .plan import BlockCut
from .record import Record

# How people call a layout, by what it cuts and exchanges; the four that have a name can be asked for.
LayoutName = Literal["data", "megatron", "sequence", "ulysses"]
TITLES: Mapping[str, str] = {
    "data": "data parallel",
    "megatron": "Megatron",
    "sequence": "Megatron with sequence parallelism",
    "ulysses": "Ulysses",
    "mixed": "mixed",
    "whole": "whole",
}


class Moving(NamedTuple):
    """A tensor that is brought from one cut to another."""

    move: Move
    bytes: float  # of all of it, for one sample


class OpRow(NamedTuple):
    """One op of a block as a rank makes it, for people."""

    op: str
    phase: Literal["forward", "backward"]
    exchanges: tuple[str, ...]  # before it, for what it reads
    reads: tuple[str, ...]
    gives: tuple[str, ...]


@dataclass(frozen=True)
class PassShares:
    """Of a block's forward, or of its backward: a rank's share of all."""

    flops: Mapping[str, float] = field(default_factory=dict)  # by kind of op (graph.OpKind)
    bytes: Mapping[str, float] = field(default_factory=dict)  # read and written, likewise
    results: float = 1.0  # of the bytes that ops give
    moves: tuple[Moving, ...] = ()

    def of(self, kind: str) -> tuple[float, float]:
        """Of an op: its FLOPs and its bytes. A kind that the capture did not have is as element-wise ones are."""
        other = "memory" if "memory" in self.bytes else next(iter(self.bytes), kind)
        known = kind if kind in self.bytes else other
        return self.flops.get(known, self.bytes.get(known, 1.0)), self.bytes.get(known, 1.0)


@dataclass(frozen=True)
class CutFigures:
    layout: str  # of TITLES
    cut: BlockCut
    kept_share: float  # of what forward leaves for backward
    forward: PassShares
    backward: PassShares
    entry_bytes: float = 0.0  # of what enters, all of it, for one sample
    exit_bytes: float = 0.0

    def input_share(self, n: int) -> float:
        return 1 / share(self.cut.entry or "whole", n)

    def entered(self) -> Self:
        """As the first of several: what enters is whole, and so is its gradient."""
        return self if self.cut.entry is None else self._with_gather("backward", self.entry_bytes)

    def left(self) -> Self:
        """As the last of several: what leaves is made whole."""
        return self if self.cut.exit is None else self._with_gather("forward", self.exit_bytes)

    def _with_gather(self, phase: Literal["forward", "backward"], size: float) -> Self:
        shares: PassShares = getattr(self, phase)
        moves = (*shares.moves, Moving("all_gather", size))
        return replace(self, **{phase: replace(shares, moves=moves)})  # type: ignore[arg-type]


def layout_of(cut: BlockCut, counts: Mapping[str, int]) -> str:
    """What people call it, by its borders, whether weights are cut, and what is exchanged.

    >>> from anyfit.values.cuts import Cut
    >>> layout_of(BlockCut({}, Cut(1), Cut(1)), {"forward all_to_all": 4, "backward all_to_all": 4})
    'ulysses'
    """
    kinds = {name.split()[1] for name in counts}
    if not cut.parameters and not kinds:
        return "whole" if cut.entry is None else "data" if cut.entry.dim == 0 else "mixed"
    if not cut.parameters:
        return "ulysses" if cut.entry is not None and kinds == {"all_to_all"} else "mixed"
    if "all_to_all" in kinds or "regroup" in kinds:
        return "mixed"
    return "megatron" if cut.entry is None else "sequence"


@dataclass(frozen=True)
class SolvedLayouts(Record):
    """Programs that were solved for a machine, by a hash of all that they depend on; kept beside its probe."""

    kind: ClassVar[str] = "layouts"
    version: ClassVar[int] = 1

    machine: str
    programs: Mapping[str, tuple[CutFigures, ...]]  # of a run of blocks, one each; none where there is no such layout

    def with_all(self, found: Mapping[str, tuple[CutFigures, ...]], most: int) -> Self:
        """The newest so many."""
        programs = {key: each for key, each in self.programs.items() if key not in found} | dict(found)
        return replace(self, programs=dict(list(programs.items())[-most:]))
