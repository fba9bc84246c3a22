"""Tables in whatever width there is: columns that have no room are left out, and named, rather than words broken."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

BETWEEN = 3  # cells that a column takes besides its own


@dataclass(frozen=True)
class Column:
    name: str
    cells: tuple[str, ...]
    is_figure: bool = False  # is never wrapped, and stands to the right

    @property
    def natural_width(self) -> int:
        return max(map(cell_len, (self.name, *self.cells)))

    @property
    def least_width(self) -> int:
        """Without a break inside a word."""
        if self.is_figure:
            return self.natural_width
        return max((cell_len(word) for cell in (self.name, *self.cells) for word in cell.split()), default=1)


def table(columns: Sequence[Column], console: Console, *, title: str = "", drop: Sequence[str] = (), bold: bool = False) -> Table:
    """The columns that there is room for: where it is too little, those of `drop` go, in their order. `bold`: the first one."""
    shown, dropped = list(columns), []
    for name in drop:
        if _least_width(shown) <= console.width:
            break
        dropped.append(name)
        shown = [column for column in shown if column.name != name]
    caption = f"a wider terminal also has: {', '.join(dropped)}" if dropped else None
    made = Table(title=Text(title) if title else None, caption=caption)
    for column, width in zip(shown, _widths(shown, console.width), strict=True):
        justify = "right" if column.is_figure else "left"
        made.add_column(Text(column.name), width=width, overflow="fold", justify=justify)  # type: ignore[arg-type]
    for row in zip(*(column.cells for column in shown), strict=True):
        cells = [Text(cell) for cell in row]  # rich would read a string's [brackets] as markup
        if bold:
            cells[0].stylize("bold")
        made.add_row(*cells)
    return made


def side_by_side(labels: Column, first: Column, others: Sequence[Column], console: Console) -> Iterator[Table]:
    """The first beside the others: in one table, or in as many as it takes."""
    waiting = list(others)
    while True:
        shown = [labels, first, *waiting[:1]]
        while len(shown) - 2 < len(waiting) and _least_width([*shown, waiting[len(shown) - 2]]) <= console.width:
            shown.append(waiting[len(shown) - 2])
        waiting = waiting[len(shown) - 2 :]
        yield table(shown, console, bold=True)
        if not waiting:
            return


def _least_width(columns: Sequence[Column]) -> int:
    return 1 + sum(BETWEEN + column.least_width for column in columns)


def _widths(columns: Sequence[Column], width: int) -> list[int]:
    """What each needs at least, and of what is left as much as it can use, the most modest first."""
    found = [column.least_width for column in columns]
    left = width - _least_width(columns)
    wishes = sorted(range(len(columns)), key=lambda index: columns[index].natural_width - found[index])
    for served, index in enumerate(wishes):
        more = min(columns[index].natural_width - found[index], max(left, 0) // (len(wishes) - served))
        found[index] += more
        left -= more
    while left < 0 and max(found) > 1:  # words are longer than there is room: the longest are folded
        widest = found.index(max(found))
        found[widest] -= 1
        left += 1
    return found
