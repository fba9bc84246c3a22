"""A folder of checkpoints, each named by its step: which is the newest whole one, and which are removed."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable
from pathlib import Path

from .checkpoint import check
from .files import remove_left_behind


def newest(parent: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in a folder of them, and why newer ones were passed over."""
    skipped: list[str] = []
    for name in _numbered(parent):
        try:
            check(parent / name)
            return parent / name, skipped
        except (ValueError, OSError) as error:
            skipped.append(str(error))
    return None, skipped


def latest(folder: str | Path, say: Callable[[str], None]) -> Path:
    """The folder itself; where its last part is "latest", the newest whole checkpoint beside it."""
    folder = Path(folder)
    if folder.name != "latest" or folder.exists():
        return folder
    found, skipped = newest(folder.parent)
    for reason in skipped:
        say(f"passed over a checkpoint: {reason}")
    if found is None:
        raise FileNotFoundError(f"no whole checkpoint in {folder.parent.absolute()}" + "".join(f"; {why}" for why in skipped))
    say(f"going on from {found}")
    return found


def _numbered(parent: Path) -> list[str]:
    """Names of the checkpoints in a folder, the newest first; also of one that has stepped aside."""
    names = {path.name.removeprefix(".").removesuffix(".old") for path in parent.iterdir()} if parent.is_dir() else set()
    return sorted((name for name in names if name.isdecimal()), key=int, reverse=True)


def remove_older(parent: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the `keep` newest checkpoints and those of every so many steps, and what killed processes left behind."""
    remove_left_behind(parent)
    for name in _numbered(parent)[keep:]:
        if not keep_every or int(name) % keep_every:
            gone = parent / f".{name}.old.writing"  # which is no checkpoint any more, should this end half-way
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(OSError):
                (parent / name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
