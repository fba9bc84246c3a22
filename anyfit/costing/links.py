"""What ranks exchange, and what that takes, by the machine's links: for every way to shard a model's state over them.

    shards    every divisor of the ranks of a node, and every number of whole nodes that divides the nodes
    level     the optimizer's state alone is sharded; gradients too; weights too (as ZeRO 1, 2 and 3 do)

A collective takes latency + bytes / rate, as measured or printed for groups of some sizes. Between these sizes, and beyond,
latency grows with the group and seconds a byte with (group - 1) / group, as in a ring. What leaves a node also needs the nodes'
network cards, one a device: they bound it where nodes have fewer devices than those of which the figures speak.

Each replica reduce-scatters first; then replicas all-reduce each shard, over all cards of the nodes at once.

Under a tensor axis, its ranks are neighbours in a node, and those of a data group are as far apart as it is long: in a node of
eight with an axis of four, two of each group. Each of the four groups then has the network cards of its own two devices.
Parameters that are whole on all ranks of the tensor axis are summed over these too.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Literal

from anyfit.values.division import NOTHING, Division, Exchange
from anyfit.values.machine import Machine

Name = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send"]


@dataclass(frozen=True)
class Links:
    """Between ranks on nodes of one kind."""

    machine: Machine
    node: int  # ranks in each
    nodes: int

    @property
    def ranks(self) -> int:
        return self.node * self.nodes

    def divisions(self, tensor: int = 1) -> tuple[Division, ...]:
        """Along the data axis, beside a tensor axis of so many, from least sharded to most; none where there is one rank."""
        found: list[Division] = []
        norm, shares, data = self.cost("all_gather", self.ranks).latency_seconds, self._shares_copies(), self.along_data(tensor)
        for shards in _degrees(data.node, data.nodes) if self.ranks > 1 else ():
            gather, reduce = data.cost("all_gather", shards) if shards > 1 else NOTHING, data.reduce(shards)
            levels = ((False, False), (True, False), (True, True)) if shards > 1 else ((False, False),)
            whole = self._summed_over(tensor, shards, reduce)
            found += [Division(data.ranks, shards, *level, gather, reduce, norm, shares, tensor, whole) for level in levels]
        return tuple(found)

    def along_data(self, tensor: int) -> Links:
        """Between the ranks of one data group."""
        if tensor <= self.node and self.node % tensor == 0:
            return Links(self.machine, self.node // tensor, self.nodes)
        if self.ranks % tensor or tensor % self.node:
            raise ValueError(f"a tensor axis of {tensor} fits neither into nodes of {self.node} nor into whole ones")
        return Links(self.machine, 1, self.ranks // tensor)

    def _summed_over(self, tensor: int, shards: int, reduce: Exchange) -> Exchange:
        """A reduction along the data axis, and of each shard over the tensor axis as well."""
        if tensor == 1:
            return NOTHING
        more = self.cost("all_reduce", tensor)
        return Exchange(reduce.latency_seconds + more.latency_seconds, reduce.seconds_per_byte + more.seconds_per_byte / shards)

    def between(self, name: Name, group: int) -> Exchange:
        """A collective of a tensor axis of so many neighbours, by the bytes of the whole tensor. Of an all-to-all, figures are by
        the bytes that one rank has."""
        if name != "all_to_all":
            return self.cost(name, group)
        is_known = any(each.name == name for each in self.machine.collectives)
        found = self.cost(name if is_known else "all_gather", group)
        return Exchange(found.latency_seconds, found.seconds_per_byte / group)

    def reduce(self, shards: int) -> Exchange:
        """A sum over all ranks, of which each keeps its shard."""
        first = self.cost("reduce_scatter", shards) if shards > 1 else NOTHING
        if shards == self.ranks:  # one rank has nothing to sum
            return first
        if self.nodes == 1:
            same, share = self.cost("all_reduce", self.ranks // shards), shards
        else:  # every card has the bytes of one shard, or its part of several where a node has fewer shards than cards
            same, share = self.cost("all_reduce", self.ranks), max(shards // self.node, 1)
        return Exchange(first.latency_seconds + same.latency_seconds, first.seconds_per_byte + same.seconds_per_byte / share)

    def assumed(self, across: str) -> Exchange:
        """Where no link has been measured."""
        fitted = self.machine.device.calibration
        if across == "node":
            return Exchange(fitted.link_latency_seconds.value, 1 / fitted.link_bytes_per_second.value)
        return Exchange(fitted.network_latency_seconds.value, 1 / fitted.network_bytes_per_second.value)

    def cost(self, name: Name, group: int) -> Exchange:
        """Of a group of neighbours."""
        across = "node" if group <= self.node else "cluster"
        known = sorted(
            (each.group, each.latency_seconds.value, 1 / each.bytes_per_second.value)
            for each in self.machine.collectives
            if (each.name, each.across) == (name, across)
        )
        if not known:
            assumed = self.assumed(across)
            times = 2 if name == "all_reduce" else 1
            return Exchange(times * assumed.latency_seconds, times * assumed.seconds_per_byte)
        latency = _between([(size, seconds) for size, seconds, _ in known], group)
        per_byte = _between([(1 / size, seconds) for size, _, seconds in reversed(known)], 1 / group)
        return Exchange(latency, max(per_byte, self._through_cards(name, group)))

    def _through_cards(self, name: Name, group: int) -> float:
        """Seconds a byte, at least, of a group that fills nodes."""
        sends = [each for each in self.machine.collectives if (each.name, each.across) == ("send", "cluster")]
        if group <= self.node or not sends:
            return 0.0
        nodes, rate = group / self.node, self.node * sends[0].bytes_per_second.value
        return (2 if name == "all_reduce" else 1) * (nodes - 1) / nodes / rate

    def _shares_copies(self) -> bool:
        """Network cards are behind the device's link to its host, and so is a neighbour that is reached no faster than that."""
        copies = self.machine.copies
        if copies is None:
            return False
        inside = self.cost("all_gather", self.node) if self.node > 1 else NOTHING
        return self.nodes > 1 or inside.seconds_per_byte * copies.up.peak >= 0.5

    def error(self) -> tuple[float, str]:
        """Relative, of an exchange's seconds; and what is to be said where it is a guess."""
        wanted = {across for across, count in (("node", self.node), ("cluster", self.nodes)) if count > 1}
        lacking = sorted(wanted - {each.across for each in self.machine.collectives})
        if not lacking:
            used = [each.bytes_per_second.measurement_error for each in self.machine.collectives if each.across in wanted]
            return max(used, default=0.0), ""
        where = {"node": "inside a node", "cluster": "between nodes"}
        rates = [f"{1e-9 / self.assumed(across).seconds_per_byte:.0f} GB/s {where[across]}" for across in lacking]
        note = f"{' and '.join(rates)}, as nobody has measured the links of {self.machine.name}"
        return self.machine.device.calibration.link_error.value, note


def _degrees(node: int, nodes: int) -> list[int]:
    """
    >>> _degrees(8, 4)
    [1, 2, 4, 8, 16, 32]
    """
    inside = [size for size in range(1, node + 1) if node % size == 0]
    return inside + [node * count for count in range(2, nodes + 1) if nodes % count == 0]


def _between(points: list[tuple[float, float]], at: float) -> float:
    """On the straight line through the two points around it, or through the last two on its side."""
    if len(points) == 1:
        return points[0][1]
    pairs = list(itertools.pairwise(points))
    (x0, y0), (x1, y1) = next((pair for pair in pairs if at <= pair[1][0]), pairs[-1])
    return max(y0 + (y1 - y0) * (at - x0) / (x1 - x0), 0.0)
