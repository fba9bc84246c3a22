"""Which cores are near which memory.

A machine of several sockets, or a socket that is divided into clusters, has a part of the memory beside each: a *node*. Cores
reach the memory of another node through a link that is slower than all of them together.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from pathlib import Path

FOLDER = Path("/sys/devices/system/node")
Nodes = tuple[tuple[int, ...], ...]  # the processors of each, at least one


def nodes(folder: Path = FOLDER, allowed: Collection[int] | None = None) -> Nodes:
    """The processors that the calling thread may use (or `allowed`), by node; all in one where the system does not say."""
    if allowed is None:
        allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    try:
        found = [[each for each in _numbers(file.read_text()) if each in allowed] for file in files]
    except (OSError, ValueError):
        found = []
    if sorted(each for node in found for each in node) != sorted(allowed):
        return (tuple(sorted(allowed)),)
    return tuple(tuple(node) for node in found if node)


def _numbers(ranges: str) -> list[int]:
    """`0-3,8` as the kernel writes it, or nothing: 0, 1, 2, 3, 8."""
    pairs = [part.partition("-") for part in ranges.strip().split(",") if part]
    return [each for first, _, last in pairs for each in range(int(first), int(last or first) + 1)]
