"""Division: how ranks could shard a model's state along the data axis, and what they would exchange."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Exchange:
    """What ranks do together with one buffer."""

    latency_seconds: float
    seconds_per_byte: float  # of the whole, which all of them make or sum

    def seconds(self, size: float) -> float:
        return self.latency_seconds + self.seconds_per_byte * size


NOTHING = Exchange(0.0, 0.0)


@dataclass(frozen=True)
class Division:
    """`shards` neighbouring ranks hold one replica of the optimizer's state, sharded (as ZeRO-1 does); the next so many hold the
    next replica. Where a tensor axis cuts the model, these are neighbours along the data axis, and each has `tensor` ranks beside
    it that see the same samples."""

    ranks: int  # along the data axis
    shards: int
    gradients: bool  # of every micro-batch are reduced, and add up sharded; else they add up whole, and the last reduces them
    weights: bool  # are sharded too, and all-gathered for each use
    gather: Exchange  # over the ranks of a replica
    reduce: Exchange  # over the ranks of a replica, and then over replicas
    norm_seconds: float  # to exchange a few numbers among all
    shares_copies: bool  # exchanges go through the link between a device and its host
    tensor: int = 1
    reduce_whole: Exchange = NOTHING  # the same with the tensor axis, for parameters that are whole on all its ranks

    @property
    def is_alone(self) -> bool:
        return self.ranks == self.tensor == 1

    def reduction(self, *, is_cut: bool) -> Exchange:
        """Of a chunk's gradients."""
        return self.reduce if is_cut or self.tensor == 1 else self.reduce_whole


ALONE = Division(1, 1, False, False, NOTHING, NOTHING, 0.0, False)  # one device
