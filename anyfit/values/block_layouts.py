"""BlockProblem and BlockLayout: how one block may be cut over the ranks of an axis, and how it is.

A problem is a block's graph without its ops: steps that read and give tensors, each in some ways. Inputs are steps that read
nothing; what leaves the block is read by steps that give nothing. `planning/layouts.py` chooses one way for each step.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from .cuts import FREE, WHOLE, Held, Move, move, share
from .profile import Exchange


class Way(NamedTuple):
    """One way to make a step: how each tensor is read, how each is given then, the seconds of a rank, and what ranks exchange
    while they make it, which is in the seconds."""

    reads: tuple[Held, ...]
    gives: tuple[Held, ...]
    seconds: float = 0.0
    exchanges: tuple[Move, ...] = ()


@dataclass(frozen=True)
class Carried:
    """A tensor on its way from the step that gives it to those that read it."""

    name: str
    bytes: float  # of all of it
    kept_bytes: float = 0.0  # from forward to backward, or for good, were it whole
    stays: bool = False  # a weight, or a view of one: ranks do not exchange it, which is what sharding does
    is_backward: bool = False


@dataclass(frozen=True)
class Step:
    name: str
    reads: tuple[int, ...]
    gives: tuple[int, ...]
    ways: tuple[Way, ...]
    unmoved: frozenset[int] = frozenset()  # places among the reads that are read only as they are given
    is_backward: bool = False


@dataclass(frozen=True)
class OpRates:
    """What one device does in a second, and what the state of a parameter takes."""

    flops_per_second: float
    bytes_per_second: float
    state_bytes_per_weight_byte: float = 8.0  # bf16 weights with fp32 masters and AdamW: 16 bytes of 2
    exposed: float = 0.3  # of a gradient's reduction that backward does not hide


@dataclass(frozen=True)
class LayoutRates:
    """Seconds of what ranks exchange, by the bytes of the whole tensor, and of copies on a device."""

    exchanges: Mapping[Move, Exchange]
    copy_seconds_per_byte: float
    copy_seconds: float = 1e-7

    def seconds(self, kind: Move, size: float, n: int) -> float:
        """
        >>> rates = LayoutRates({"all_gather": Exchange(1e-5, 1e-9)}, 1e-12)
        >>> rates.seconds("all_gather", 1e6, 4)
        0.001011
        """
        copied = self.copy_seconds + size * self.copy_seconds_per_byte / (n if kind in ("slice", "all_to_all") else 1)
        if kind in FREE:
            return copied
        if kind == "regroup":  # gathered, and cut anew
            kind = "all_gather"
        exchange = self.exchanges[kind]
        return exchange.latency_seconds + size * exchange.seconds_per_byte + (copied - self.copy_seconds)


# Where nobody knows the machine.
USUAL_OPS = OpRates(1e14, 1e12)
_TIMES: dict[Move, float] = {"all_gather": 1.0, "reduce_scatter": 1.0, "all_reduce": 2.0, "all_to_all": 1.0}
USUAL_RATES = LayoutRates({kind: Exchange(1e-5, times * 1e-11) for kind, times in _TIMES.items()}, 1e-12)


@dataclass(frozen=True)
class BlockProblem:
    n: int  # ranks along the axis
    tensors: tuple[Carried, ...]
    steps: tuple[Step, ...]
    rates: LayoutRates
    entry: int = -1  # the tensor that comes from the block before
    exit: int = -1  # the tensor whose way of being held is that of what goes to the next one

    def move_seconds(self, tensor: int, held: Held, wanted: Held) -> float | None:
        """None where it cannot, or must not, be brought there."""
        if held == wanted:
            return 0.0
        kind, carried = move(held, wanted), self.tensors[tensor]
        if kind is None or (carried.stays and kind not in FREE):
            return None
        return self.rates.seconds(kind, carried.bytes, self.n)

    def kept(self, tensor: int, held: Held) -> float:
        return self.tensors[tensor].kept_bytes / share(held, self.n)

    def repeated(self) -> BlockProblem:
        """The same block again and again: what leaves it is held as what enters."""
        entry, leaving = self.borders(self.entry), self.borders(self.exit)
        ways = tuple(Way((held, held), ()) for held in entry if held in leaving)
        tie = Step("border", (self.entry, self.exit), (), ways, frozenset({0, 1}))
        return replace(self, steps=(*self.steps, tie))

    def borders(self, tensor: int) -> list[Held]:
        """In which ways an input of the block can come; whole, where there is none."""
        if tensor < 0:
            return [WHOLE]
        return [way.gives[0] for step in self.steps if step.gives == (tensor,) and not step.reads for way in step.ways]


class Moved(NamedTuple):
    """A tensor, made as one and brought to another, once for all readers of one pass."""

    tensor: int
    held: Held
    wanted: Held
    in_backward: bool
    is_kept: bool = False  # from forward, for backward too


@dataclass(frozen=True)
class BlockLayout:
    ways: tuple[int, ...]  # by step
    moves: tuple[Moved, ...]
    seconds: float
    kept_bytes: float
    gap: float = 0.0  # to the best that there can be, as a share
    counts: Mapping[str, int] = field(default_factory=dict)  # of exchanges: "forward all_reduce"

    def held(self, problem: BlockProblem, tensor: int) -> Held:
        """How a tensor is given; whole, where there is none."""
        if tensor < 0:
            return WHOLE
        for step, way in zip(problem.steps, self.ways, strict=True):
            if tensor in step.gives:
                return step.ways[way].gives[step.gives.index(tensor)]
        raise KeyError(tensor)


def counts(problem: BlockProblem, ways: Sequence[int], moves: Sequence[Moved]) -> dict[str, int]:
    """Exchanges of each pass, by kind: between steps, and inside of them."""
    made = [(each.in_backward, move(each.held, each.wanted)) for each in moves]
    for step, way in zip(problem.steps, ways, strict=True):
        made += [(step.is_backward, kind) for kind in step.ways[way].exchanges]
    named = [f"{'backward' if in_backward else 'forward'} {kind}" for in_backward, kind in made if kind not in FREE]
    return dict(sorted(Counter(named).items()))
