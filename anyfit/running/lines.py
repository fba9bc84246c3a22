"""Files of a run folder that grow by a line a step, or every few, and that a resumed run cuts back to its checkpoint."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

NAMES = ("metrics.jsonl", "logged.jsonl", "samples.jsonl")  # every line of them names its step


def append(file: Path, line: Mapping[str, Any], step: int, run_folder: Path) -> None:
    assert file.name in NAMES, file
    try:
        with file.open("a") as lines:
            lines.write(f"{json.dumps(line)}\n")
    except OSError as error:
        raise OSError(
            f"cannot write {file} after step {step}: {error.strerror}; when it can be written to, go on with: "
            f"anyfit fit --resume {run_folder}"
        ) from None


def truncate(folder: Path, steps: int) -> None:
    """Drops what was written after the checkpoint: those steps are repeated."""
    for file in (folder / name for name in NAMES):
        if file.exists():
            kept = [line for line in read(file) if line["step"] <= steps]
            aside = file.with_suffix(".writing")
            aside.write_text("".join(f"{json.dumps(line)}\n" for line in kept))
            aside.replace(file)


def read(file: Path) -> list[dict[str, Any]]:
    """The lines of such a file, up to one that was cut short when the process died; none where it is not there."""
    found: list[dict[str, Any]] = []
    for line in file.read_text().splitlines() if file.exists() else ():
        try:
            document = json.loads(line)
            int(document["step"])
        except (ValueError, KeyError, TypeError):
            break
        found.append(document)
    return found
