"""One rank of the link measure: `python -m anyfit.probing.link_worker '{"rank": 0, …}'`, started by links.py.

A collective is timed on a small and on a large message. The small one is the latency; the rate is what the rest of the large one
adds. Bytes are those of the largest buffer that one rank holds: the gathered output, the input to be scattered, the tensor
reduced, all that one rank sends.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

SMALL_BYTES = 16 * 2**10
SMALL_TIMES = 20
LARGE_TIMES = 4
NAMES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all", "send")
TRIPS = {"send": 2}  # there and back: a sender may be done before anything has arrived, so its own clock says nothing
Exchange = Callable[[], object]

# The first names came with torch 2.13 and made the second ones warn.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Team:
    """The ranks that talk to each other, and the device that this one holds."""

    group: dist.ProcessGroup
    size: int
    rank: int
    device: torch.device


def main(*, folder: str, backend: str, rank: int, ranks: int, rounds: int, large_bytes: int) -> None:
    device = torch.device("cuda", rank) if backend == "nccl" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    else:
        torch.set_num_threads(1)  # several ranks share the cores
    dist.init_process_group(
        backend,
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=ranks,
        timeout=timedelta(seconds=60),
        device_id=device if device.type == "cuda" else None,
    )
    rows = []
    for size in group_sizes(ranks):
        group = dist.new_group(list(range(size)))  # every rank must take part in making it
        if rank < size:
            assert group is not None
            rows += measure(Team(group, size, rank, device), rounds, large_bytes)
        dist.barrier()
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(rows))
    dist.destroy_process_group()


def group_sizes(ranks: int) -> list[int]:
    return sorted({2**power for power in range(1, ranks.bit_length())} | {ranks})


def measure(team: Team, rounds: int, large_bytes: int) -> list[dict[str, object]]:
    names = NAMES if team.size == 2 else NAMES[:-1]  # a send has two ends, whatever the group
    small = {name: prepare(name, team, SMALL_BYTES) for name in names}
    large = {name: prepare(name, team, large_bytes) for name in names}
    latencies: dict[str, list[float]] = {name: [] for name in names}
    rates: dict[str, list[float]] = {name: [] for name in names}
    for exchange in (*small.values(), *large.values()):
        timed(exchange, 2, team)  # connections and buffers are made at first use
    for _ in range(rounds):
        for name in names:
            trips = TRIPS.get(name, 1)
            latency = timed(small[name], SMALL_TIMES, team) / trips
            whole = timed(large[name], LARGE_TIMES, team) / trips
            latencies[name].append(latency)
            rates[name].append((large_bytes - SMALL_BYTES) / max(whole - latency, 0.1 * whole))
    return [
        {"name": name, "group": team.size, "latency_seconds": latencies[name], "bytes_per_second": rates[name]} for name in names
    ]


def prepare(name: str, team: Team, size_bytes: int) -> Exchange:
    elements = size_bytes // 4 // team.size * team.size
    whole, other = (torch.zeros(elements, device=team.device) for _ in range(2))  # zeros: their sums stay finite
    part = torch.zeros(elements // team.size, device=team.device)
    group = team.group

    def there_and_back() -> None:
        if team.rank == 0:
            dist.send(whole, 1, group=group)
            dist.recv(other, 1, group=group)
        else:
            dist.recv(other, 0, group=group)
            dist.send(whole, 0, group=group)

    exchanges: dict[str, Exchange] = {
        "all_gather": lambda: _all_gather(whole, part, group=group),
        "reduce_scatter": lambda: _reduce_scatter(part, whole, group=group),
        "all_reduce": lambda: dist.all_reduce(whole, group=group),
        "all_to_all": lambda: dist.all_to_all_single(other, whole, group=group),
        "send": there_and_back,
    }
    return exchanges[name]


def timed(exchange: Exchange, times: int, team: Team) -> float:
    """Seconds of one exchange, all ranks starting together."""
    dist.barrier(team.group)
    _finish(team.device)
    start = time.perf_counter()
    for _ in range(times):
        exchange()
    _finish(team.device)
    return (time.perf_counter() - start) / times


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
