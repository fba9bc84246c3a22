"""Where state on the disk lies: in a folder that somebody names, or in the one of the usual folders that has the most room.

A file system in memory would take what the disk is to spare, and one behind a network is slow and shared: both are refused,
unless any file system will do.
"""

from __future__ import annotations

import os
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from .folder import cache_folder

MOUNTS = Path("/proc/self/mountinfo")
IN_MEMORY = {"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"}
BEHIND_NETWORK = {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "afs", "ceph", "lustre", "gpfs", "beegfs", "glusterfs", "pvfs2"}
ANYWAY = "or use it all the same: --any-file-system, anyfit.start(any_file_system=True)"


@dataclass(frozen=True)
class DiskFolder:
    """What was asked for."""

    path: Path | None = None  # None: one of the usual
    any_file_system: bool = False

    @classmethod
    def asked(cls, path: str | Path | None, *, any_file_system: bool) -> DiskFolder | None:
        """None where nothing was."""
        found = cls(None if path is None else Path(path), any_file_system)
        return found if found.is_asked else None

    @property
    def is_asked(self) -> bool:
        return self.path is not None or self.any_file_system

    def found(self) -> Path:
        """The folder; raises where it will not do."""
        if self.path is not None:
            why = None if self.any_file_system else why_not(self.path)
            if why is not None:
                raise ValueError(f"{self.path} {why}; name a folder on a disk of this machine, {ANYWAY}")
            return self.path
        usual = list(dict.fromkeys(_usual()))
        fit = [each for each in usual if self.any_file_system or why_not(each) is None]
        if not fit:
            found = "; ".join(f"{each} {why_not(each)}" for each in usual)
            raise ValueError(
                f"no folder for optimizer state on a disk: {found}. Name one: --disk-folder, anyfit.start(disk_folder=)"
            )
        return max(fit, key=free_bytes)


def free_bytes(folder: Path) -> int:
    return shutil.disk_usage(_there(folder)).free


def _usual() -> Iterator[Path]:
    for each in (Path(tempfile.gettempdir()), Path("/var/tmp"), cache_folder(), Path.cwd()):
        if os.access(_there(each), os.W_OK):
            yield each


def _there(folder: Path) -> Path:
    """The folder, or the nearest above it that there is."""
    folder = folder.absolute()
    return next(each for each in (folder, *folder.parents) if each.exists())


def why_not(folder: Path, mounts: Path = MOUNTS) -> str | None:
    """In words that follow the folder's name; None where it is on a disk, or the system does not say."""
    kind = file_system(folder, mounts)
    if kind in IN_MEMORY:
        return f"lies in memory ({kind})"
    if kind in BEHIND_NETWORK or kind.startswith("fuse."):
        return f"lies behind a network, or behind another process ({kind})"
    return None


def file_system(folder: Path, mounts: Path = MOUNTS) -> str:
    """Its kind, as the kernel names it; nothing where the system does not say."""
    try:
        lines = mounts.read_text().splitlines()
    except OSError:
        return ""
    where, found, depth = _there(folder).resolve(), "", -1
    for line in lines:
        left, _, right = line.partition(" - ")
        place = Path(re.sub(r"\\(\d{3})", lambda match: chr(int(match[1], 8)), left.split()[4]))
        if where.is_relative_to(place) and len(place.parts) >= depth:  # of several at one place the last counts
            found, depth = right.split()[0], len(place.parts)
    return found
