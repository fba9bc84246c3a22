"""Where the command line's answers go: a terminal or a pipe, for people or for programs."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

COLUMNS_IN_A_PIPE = 130  # where no terminal says how wide it is


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    made = Console(stderr=stderr)
    if not made.is_terminal and "COLUMNS" not in os.environ:
        made.width = COLUMNS_IN_A_PIPE
    return made


def print_json(document: Any) -> None:
    print(json.dumps(document, indent=1))
