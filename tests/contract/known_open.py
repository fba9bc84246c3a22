"""Cells that do not hold yet: by case and column, what happens instead. Each is a strict xfail: one that is mended says so."""

from __future__ import annotations

KNOWN_OPEN: dict[tuple[str, str], str] = {}

# Of these, those that end the process: they are not run.
ENDS_THE_PROCESS: set[tuple[str, str]] = set()
