"""The limits that the kernel's control groups set on this process, whatever the machine itself has.

A process sits in a group, groups nest, and the tightest limit on the way to the root is the real one. Version 2 has
one tree (`memory.max`, "max" for none); version 1 a tree for each controller (`memory.limit_in_bytes`, a huge number
for none). In a container the path that /proc names may not exist below the mounted tree, whose root is then the
container's own group: so every level of the path that does exist is read, and the root always.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def memory_limit_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """The tightest memory limit; infinite where there is none."""
    return min(map(_limit_of, _groups("memory", root, membership)), default=math.inf)


def memory_left_bytes(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """What the tightest group has left, whoever in it took the rest; infinite where no limit is. Pages of files do not count
    as taken: the kernel lets them go before it ends a process."""
    left = math.inf
    for folder in _groups("memory", root, membership):
        limit = _limit_of(folder)
        taken = min(_number(folder / name) for name in ("memory.current", "memory.usage_in_bytes"))
        if limit < math.inf and taken < math.inf:
            lines = (line.split() for line in _text(folder / "memory.stat").splitlines())
            stat = {words[0]: float(words[1]) for words in lines if len(words) == 2}
            whole = "total_" if "total_inactive_file" in stat else ""  # version 1: of the groups inside it too
            files = sum(stat.get(f"{whole}{kind}", 0.0) for kind in ("inactive_file", "active_file"))
            left = min(left, limit - taken + min(files, taken))
    return max(left, 0.0)


def cpu_limit(root: Path = ROOT, membership: Path = MEMBERSHIP) -> float:
    """The tightest processor limit in cores; infinite where there is none."""
    limits = [math.inf]
    for folder in _groups("cpu", root, membership):
        quota, _, period = _text(folder / "cpu.max").partition(" ")  # "max 100000", or "200000 100000" for two cores
        if not quota:
            quota, period = _text(folder / "cpu.cfs_quota_us"), _text(folder / "cpu.cfs_period_us")
        if quota.isdigit() and period.isdigit() and int(period) > 0:  # version 1 writes -1 for no limit
            limits.append(int(quota) / int(period))
    return min(limits)


def _groups(controller: str, root: Path, membership: Path) -> Iterator[Path]:
    """The folders of every group that this process is in, for one controller."""
    for line in _text(membership).splitlines():
        _, _, controllers_and_path = line.partition(":")
        controllers, _, path = controllers_and_path.partition(":")
        if not controllers:
            bases = [root, root / "unified"]
        elif controller in controllers.split(","):
            bases = [root / controller, root / controllers]
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", "..")]
        for base in bases:
            for depth in range(len(parts), -1, -1):
                folder = base.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _limit_of(folder: Path) -> float:
    names = ("memory.max", "memory.high", "memory.limit_in_bytes")  # past memory.high a process crawls
    return min(_number(folder / name) for name in names)


def _number(file: Path) -> float:
    text = _text(file)
    return float(text) if text.isdigit() else math.inf


def _text(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""
