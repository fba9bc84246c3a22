"""What one of several ranks may take of the machine it is on, and how all of them are spread over nodes."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence

from anyfit.values.machine import Machine


def machine_of_rank(machine: Machine, places: Sequence[str], rank: int) -> Machine:
    """What one rank may take of the machine. `places` has every rank's node and device. Limits that were given stay."""
    on_node = ranks_of_node(places, rank)
    on_device = sum(place == places[rank] for place in places)
    limits = machine.limits
    return machine.with_limits(
        device_memory=machine.device_limit_bytes // on_device if limits.device_bytes is None and on_device > 1 else None,
        host_memory=machine.host_limit_bytes // on_node if limits.host_bytes is None and on_node > 1 else None,
    )


def ranks_of_node(places: Sequence[str], rank: int) -> int:
    """How many ranks are on this one's node."""
    node = places[rank].partition(" ")[0]
    return sum(place.partition(" ")[0] == node for place in places)


def spread_of(places: Sequence[str]) -> tuple[tuple[int, int], int]:
    """The ranks of each node and the nodes, and how many ranks share a device. Ranks that are not spread evenly, or do not follow
    each other on their node, are as far apart as if each had a node of its own."""
    nodes = [place.partition(" ")[0] for place in places]
    ranks_of = Counter(nodes)
    is_even = len(set(ranks_of.values())) == 1 and sum(a != b for a, b in itertools.pairwise(nodes)) == len(ranks_of) - 1
    spread = (len(places) // len(ranks_of), len(ranks_of)) if is_even else (1, len(places))
    return spread, max(Counter(places).values())
