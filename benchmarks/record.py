"""Results as files: the figures with the command, the commit, the machine and the date they belong to."""

from __future__ import annotations

import json
import platform
import subprocess
import sys
import time
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"


def write(name: str, figures: Any) -> Path:
    """`figures` under benchmarks/results/<name>.json, with where they come from."""
    file = RESULTS / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"from": provenance(), "figures": figures}, indent=1) + "\n")
    return file


def provenance() -> dict[str, Any]:
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {
        "command": " ".join(["python", "-m", f"benchmarks.{Path(sys.argv[0]).stem}", *map(_portable, sys.argv[1:])]),
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
        "processor": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "gpu": gpu,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": version("transformers") if find_spec("transformers") else None,
    }


def _portable(argument: str) -> str:
    """Where a folder lay on the machine that measured is nobody's business."""
    return Path(argument).name if Path(argument).is_absolute() else argument


def _commit() -> str:
    """The commit, with a + when the tree has changes that are not in it."""
    root = Path(__file__).parent.parent

    def git(*words: str) -> str:
        return subprocess.run(["git", *words], cwd=root, capture_output=True, text=True, check=False).stdout.strip()

    changed = [line for line in git("status", "--porcelain").splitlines() if "benchmarks/results" not in line]
    return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
