"""Results as files: the figures with the command, the commit, the machine and the date they belong to.

    benchmarks/results/<question>/<date>-<machine>-<commit>.json    {"from", "machine", "held_to", "figures"}
    benchmarks/results/machines/<date>-<machine>-<commit>.json      a machine as it was probed, for forecasts

The question is what a benchmark asks. A second run of a day from the same commit ends in -2. A results file names its machine's
file, as seen from itself. What is special about a recording is written into it by hand, with the reason, and no test knows it:

- a row that no forecast is held to has "excluded", a sentence; where its step waits for "launches", "waits_for" says so;
- a row that may keep more memory than others has "fragmentation_allowed" and its "reason";
- "held_to" has how near forecasts have to come to this recording, where that is not as usual;
- "then" has what the engine did otherwise: {"staging": "alike"}, where all staging buffers had the size of the largest chunk.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from anyfit.values.machine import Machine

RESULTS = Path(__file__).parent / "results"
MACHINES = "machines"
VENDORS = ("nvidia", "geforce", "amd", "instinct")  # words that a short name of a GPU does without


@dataclass(frozen=True)
class Recording:
    """One results file."""

    file: Path

    @property
    def name(self) -> str:
        return f"{self.file.parent.name}/{self.file.stem}"

    @cached_property
    def document(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.file.read_text())
        return found

    @property
    def about(self) -> dict[str, Any]:
        """Command, commit, date and computer."""
        found: dict[str, Any] = self.document["from"]
        return found

    @property
    def figures(self) -> Any:
        return self.document["figures"]

    @property
    def rows(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = self.figures if isinstance(self.figures, list) else self.figures["rows"]
        return found

    @property
    def held_to(self) -> dict[str, Any]:
        found: dict[str, Any] = self.document.get("held_to", {})
        return found

    @property
    def then(self) -> dict[str, str]:
        """What the engine did otherwise."""
        found: dict[str, str] = self.document.get("then", {})
        return found

    def machine_file(self, key: str = "machine") -> Path:
        return self.file.parent / self.document[key]

    @cached_property
    def machine(self) -> Machine:
        """As it was probed before the rows were measured."""
        return Machine.load(self.machine_file())


def recordings(*questions: str) -> list[Recording]:
    """All that is recorded of these questions, the oldest of each first. One that nothing is recorded of is an error: a test that
    reads nothing would pass."""
    found = {question: sorted((RESULTS / question).glob("*.json"), key=lambda file: file.stem) for question in questions}
    for question, files in found.items():
        if not files:
            raise FileNotFoundError(f"nothing is recorded under {RESULTS.name}/{question}")
    return [Recording(file) for files in found.values() for file in files]


def write(question: str, figures: Any, machine: Machine | None = None) -> Path:
    """The figures with where they come from. A process that writes several times writes the same file."""
    document: dict[str, Any] = {"from": provenance()}
    if machine is not None:
        described = _own_file(RESULTS / MACHINES)
        machine.save(described)
        document["machine"] = f"../{MACHINES}/{described.name}"
    file = _own_file(RESULTS / question)
    file.write_text(json.dumps(document | {"figures": figures}, indent=1) + "\n")
    return file


def provenance() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_portable, sys.argv[1:])]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers") if find_spec("transformers") else None,
    }


def stem_of(about: Mapping[str, Any]) -> str:
    """'2026-11-16-h200-b1d785c'. The + of a commit with changes is only inside the file."""
    gpu = "-".join(word for word in (about["gpu"] or "").lower().split() if word not in VENDORS)
    return f"{about['date']}-{gpu or 'cpu-{cores}-cores'.format(**about)}-{about['commit'].rstrip('+')}"


@cache
def _own_file(folder: Path) -> Path:
    """A name in the folder that is this process's from now on."""
    folder.mkdir(parents=True, exist_ok=True)
    stem, number = stem_of(provenance()), 1
    file = folder / f"{stem}.json"
    while file.exists():
        number += 1
        file = folder / f"{stem}-{number}.json"
    return file


def _portable(argument: str) -> str:
    """Where a folder lay on the machine that measured is nobody's business."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _commit() -> str:
    """The commit, with a + when the tree has changes that are not in it."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results" not in line]
    return (git("rev-parse", "--short", "HEAD") or "unknown") + ("+" if changed else "")
