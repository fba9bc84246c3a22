"""Forced: what a user decides of a plan in the planner's place."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Literal, get_args

from .record import nearest

Schedule = Literal["1f1b", "interleaved"]
Sharded = Literal["none", "optimizer", "gradients", "all"]  # over the data axis: ZeRO's 0 to 3
Activation = Literal["keep", "selective", "recompute"]
CHUNKS = (2, 4)  # stages a rank that are tried where a schedule is interleaved

OF_ALL_BLOCKS = {"keep": "all kept", "selective": "all recomputed but for the costly ops", "recompute": "all recomputed"}


@dataclass(frozen=True)
class Forced:
    """None of a field: whatever is best."""

    schedule: Schedule | None = None  # of a pipeline
    chunks: int | None = None  # stages a rank
    micro_batch: int | None = None
    activations: Activation | None = None  # of all blocks
    shard: Sharded | None = None  # what of the state ranks of the data axis divide among them
    shards: int | None = None  # over how many of them; None: over all

    def __post_init__(self) -> None:
        for name, known in (("schedule", Schedule), ("activations", Activation), ("shard", Sharded)):
            value = getattr(self, name)
            if value is not None and value not in get_args(known):
                raise ValueError(f"{name} {value!r} is not known{nearest(value, get_args(known))}")
        for name in ("chunks", "micro_batch", "shards"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ValueError(f"{name.replace('_', '-')} is {value!r}; give a whole number from 1 up")
        if self.schedule == "1f1b" and self.chunks not in (None, 1):
            raise ValueError(f"schedule 1f1b has one stage a rank, and {self.chunks} chunks are asked for; use interleaved")
        if self.schedule == "interleaved" and self.chunks == 1:
            raise ValueError("schedule interleaved has several stages a rank, and 1 chunk is asked for; use 1f1b, or chunks 2")
        if self.shards is not None and self.shard in (None, "none"):
            raise ValueError(f"shards is {self.shards}, and not said of what: shard optimizer, gradients or all")

    @classmethod
    def parse(
        cls, schedule: str | None, chunks: int | None, micro_batch: int | None, activations: str | None, shard: str | None
    ) -> Forced:
        """As the command line has them.

        >>> Forced.parse(None, None, 1, "recompute", "all=8")
        Forced(schedule=None, chunks=None, micro_batch=1, activations='recompute', shard='all', shards=8)
        """
        what, equals, count = (None, "", "") if shard is None else shard.partition("=")
        if equals and not (count.isascii() and count.isdigit()):
            raise ValueError(f"--shard {shard}: write over how many ranks as in --shard {what}=8")
        shards = int(count) if equals else None
        return cls(schedule, chunks, micro_batch, activations, what, shards)  # type: ignore[arg-type]

    @property
    def is_asked(self) -> bool:
        return self != Forced()

    @property
    def stages_a_rank(self) -> tuple[int, ...]:
        """Those to consider."""
        if self.chunks is not None:
            return (self.chunks,)
        return {None: (1, *CHUNKS), "1f1b": (1,), "interleaved": CHUNKS}[self.schedule]

    @property
    def said(self) -> str:
        """
        >>> Forced(micro_batch=1, activations="recompute", shard="all").said
        'micro-batch 1, activations all recomputed, all state sharded'
        """
        words = {
            "schedule": self.schedule,
            "chunks": f"{self.chunks} stage{'s' * (self.chunks != 1)} a rank",
            "micro_batch": f"micro-batch {self.micro_batch}",
            "activations": f"activations {OF_ALL_BLOCKS.get(str(self.activations))}",
            "shard": _sharded(self.shard),
            "shards": f"over {self.shards} ranks",
        }
        return ", ".join(str(words[each.name]) for each in fields(self) if getattr(self, each.name) is not None)


def _sharded(what: Sharded | None) -> str:
    return {"none": "no state sharded", "gradients": "optimizer and gradients sharded", "all": "all state sharded"}.get(
        str(what), "optimizer sharded"
    )
