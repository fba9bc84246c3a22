"""How the command line ends with an error: in words where the user can mend it, as JSON where a program asks."""

from __future__ import annotations

import sys
import sysconfig
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

import typer

from .values.answers import Outcome
from .values.no_plan import NoPlan


def end(error: Exception) -> NoReturn:
    """Ends with an error's line and status after the answer was printed, which is the only JSON on stdout."""
    line, status = in_words(error)
    print(f"anyfit: {line}", file=sys.stderr)
    raise typer.Exit(status)


def error_json(error: BaseException) -> dict[str, Any]:
    """For programs: what kind of error, and what it says; where nothing fits, by how much and what would."""
    line, _ = in_words(error)
    found: dict[str, Any] = {"error": type(error).__name__, "message": line or str(error)}
    return found | shortfall_json(error) if isinstance(error, NoPlan) else found


def outcome_json(outcome: Outcome) -> dict[str, Any]:
    return {"no_plan": str(outcome), **shortfall_json(outcome)} if isinstance(outcome, NoPlan) else outcome.to_json()


def shortfall_json(verdict: NoPlan) -> dict[str, Any]:
    changes = [asdict(change) for change in verdict.changes]
    return {"shortfall_bytes": verdict.shortfall_bytes, "tier": verdict.tier, "changes": changes}


def in_words(error: BaseException) -> tuple[str | None, int]:
    """What is said of an error in place of its traceback, if anything, and the status of a process that ends with it."""
    if isinstance(error, NoPlan):
        return str(error), 3
    notes = getattr(error, "__notes__", [])
    if isinstance(error, ValueError | TypeError | OSError | ImportError) and not notes and not _in_user_code(error):
        return str(error), 2
    # Notes are what a run says of the memory that it lacked.
    if isinstance(error, MemoryError | RuntimeError) and _is_about_memory(error) and (notes or not _in_user_code(error)):
        return "\n".join((str(error) or "out of memory", *notes)), 2
    return None, 1


def _is_about_memory(error: BaseException) -> bool:
    if isinstance(error, MemoryError) or "torch" not in sys.modules:
        return isinstance(error, MemoryError)
    from .running.shortage import is_about_memory

    return is_about_memory(error)


def _in_user_code(error: BaseException) -> bool:
    """Whether the error was raised by code that is neither anyfit's nor a library's it calls."""
    here = f"{Path(__file__).parent}/"
    paths = sysconfig.get_paths()
    libraries = ("<", *(paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")))
    for frame, _ in reversed(list(traceback.walk_tb(error.__traceback__))):
        file = frame.f_code.co_filename
        if file.startswith(here):
            return False
        if not file.startswith(libraries):
            return True
    return False
