"""docs/contract.md: the table of outcomes, between its two markers."""

from __future__ import annotations

from pathlib import Path

from .case import COLUMNS, Case, catalogue
from .known_open import KNOWN_OPEN

PAGE = Path(__file__).parents[2] / "docs" / "contract.md"
BEGIN, END = "<!-- outcomes: written by tests/contract/test_contract.py -->", "<!-- end of outcomes -->"


def cell(case: Case, column: str) -> str:
    if column not in case.columns:
        return ""
    if (case.name, column) in KNOWN_OPEN:
        return "**open**"
    return "refused" if case.is_refused(column) else "equal"


def table() -> str:
    cases = catalogue().values()
    lines = []
    for kind in dict.fromkeys(case.kind for case in cases):
        lines += [f"| {kind} | {' | '.join(COLUMNS)} |", f"|---|{'---|' * len(COLUMNS)}"]
        lines += [
            f"| {case.name} | {' | '.join(cell(case, column) for column in COLUMNS)} |" for case in cases if case.kind == kind
        ]
        lines.append("")
    cells = [cell(case, column) for case in cases for column in case.columns]
    in_ample = [cell(case, "ample") for case in cases if "ample" in case.columns]
    counted = (
        f"{len(cases)} jobs, {len(cells)} cells: {cells.count('equal')} equal, {cells.count('refused')} refused, "
        f"{cells.count('**open**')} open. With ample memory {in_ample.count('refused')} of {len(in_ample)} are refused."
    )
    return "\n".join([counted, "", *lines])


def written() -> str:
    """The page as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return f"{before}{BEGIN}\n{table()}{END}{rest.partition(END)[2]}"
