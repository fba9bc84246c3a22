"""What a block's activations cost under each choice: bytes that stay for backward, bytes that move, seconds that come on top.

keep        all that forward leaves stays
recompute   what goes into the block stays; its forward runs again
selective   also the results of COSTLY_OPS, whether backward needs them or not; all other forward ops run again. Python looks at
            every call of the block, in forward and again, and that takes its time
offload     what is large enough moves to the host and back; only the rest stays. Of what other blocks save too, and of
            buffers, a copy moves

A value that is kept counts where it is saved, not where it is made: a block's input is its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from anyfit.values.graph import COSTLY_OPS, LEAST_OFFLOAD_BYTES, Graph
from anyfit.values.profile import ChoiceCost, HostRates


def choice_costs(graph: Graph, took: Sequence[float], host: HostRates, look_seconds: float) -> list[Mapping[str, ChoiceCost]]:
    """By block; `took` are the seconds of every op, `look_seconds` the host's to look at one call. What is outside blocks can
    only be kept, and so is what nothing can come between."""
    count = len(graph.blocks)
    kept, costly, large, last = ([0] * count for _ in range(4))
    for value in graph.values:
        maker = graph.ops[value.born]
        if value.kind == "activation" and maker.phase == "forward" and _is_costly(maker.name):
            costly[value.block] += value.bytes
        if graph.kept(value):
            home = graph.home(value)
            kept[home] += value.bytes
            large[home] += value.bytes if value.bytes >= LEAST_OFFLOAD_BYTES else 0
            if value.dies < len(graph.ops) and graph.ops[value.dies].block == value.block:  # not the block's output
                last[value.block] = max(last[value.block], value.born)
    forward, cheap = [0.0] * count, [0.0] * count
    for index, (op, seconds) in enumerate(zip(graph.ops, took, strict=True)):
        if op.phase == "forward" and index <= last[op.block]:
            forward[op.block] += seconds
            cheap[op.block] += (0.0 if _is_costly(op.name) else seconds) + look_seconds * op.calls
    costs: list[Mapping[str, ChoiceCost]] = []
    for index, block in enumerate(graph.blocks):
        choices: dict[str, ChoiceCost] = {"keep": ChoiceCost(kept[index], 0, 0.0)}
        if block.name and not block.is_whole:
            moved = block.offload_bytes
            copies = moved / host.down_bytes_per_second + moved / host.up_bytes_per_second
            choices["recompute"] = ChoiceCost(block.input_bytes, 0, forward[index])
            choices["selective"] = ChoiceCost(block.input_bytes + costly[index], 0, cheap[index])
            choices["offload"] = ChoiceCost(kept[index] - large[index], moved, copies)
        costs.append(choices)
    return costs


def _is_costly(op: str) -> bool:
    return op.partition(".")[0] in COSTLY_OPS
