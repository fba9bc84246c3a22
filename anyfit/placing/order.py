"""The order of use: in which order the last step touched chunks is the forecast for the next."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection

LOOK_AHEAD = 64  # touches in which a step that left the forecast order is looked for again


class Order:
    def __init__(self) -> None:
        self._learnt: list[int] = []  # chunks in the order the last step touched them
        self._positions: dict[int, list[int]] = {}  # in it
        self._seen: list[int] | None = None  # of the step under way; None between steps
        self._cursor = 0

    @property
    def is_under_way(self) -> bool:
        return self._seen is not None

    @property
    def has_seen(self) -> bool:
        return bool(self._seen)

    def begin(self) -> None:
        """A step begins: the last one's order is what to expect."""
        if self._seen:
            self._learnt = self._seen
            self._positions = {}
            for position, index in enumerate(self._learnt):
                self._positions.setdefault(index, []).append(position)
        self._seen, self._cursor = [], 0

    def forget(self) -> None:
        """No step is under way: nothing is learnt."""
        self._seen = None

    def note(self, index: int) -> None:
        if self._seen is None:
            return
        if not self._seen or self._seen[-1] != index:
            self._seen.append(index)
        if self._cursor and self._learnt[self._cursor - 1] == index:
            return
        window = self._learnt[self._cursor : self._cursor + LOOK_AHEAD]
        if index in window:
            self._cursor += window.index(index) + 1

    def next_use(self, index: int) -> float:
        positions = self._positions.get(index)
        if not positions:
            return float("inf")
        place = bisect_left(positions, self._cursor)
        return positions[place] if place < len(positions) else positions[0] + len(self._learnt)

    def coming(self, among: Collection[int], most: int) -> list[int]:
        """The next so many of these chunks."""
        found: dict[int, None] = {}
        for place in range(self._cursor, len(self._learnt)):
            if self._learnt[place] in among:
                found[self._learnt[place]] = None
                if len(found) >= most:
                    break
        return list(found)
