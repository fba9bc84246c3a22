"""Where anyfit keeps what it measured and what it built."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """$ANYFIT_CACHE, or ~/.cache/anyfit."""
    given = os.environ.get("ANYFIT_CACHE")
    return Path(given) if given else Path.home() / ".cache" / "anyfit"
