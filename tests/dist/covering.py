"""Pairwise covering: few rows in which every two choices of different factors meet at least once."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any


def pairwise(factors: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Row by row, each begun with a pair that has not met yet and filled with what meets most that has not, and is rare so
    far. No chance is in it."""
    names = list(factors)
    places = [range(len(factors[name])) for name in names]
    apart = {
        frozenset(((a, x), (b, y)))
        for a, b in itertools.combinations(range(len(names)), 2)
        for x, y in itertools.product(places[a], places[b])
    }
    rows: list[dict[str, Any]] = []
    used = [[0] * len(each) for each in places]
    while apart:
        row = dict(min(sorted(pair) for pair in apart))
        for factor in sorted(set(range(len(names))) - set(row), key=lambda factor: -len(places[factor])):
            meets = [sum(frozenset(((factor, x), other)) in apart for other in row.items()) for x in places[factor]]
            row[factor] = max(places[factor], key=lambda x, at=factor, meets=meets: (meets[x], -used[at][x]))
        for factor, x in row.items():
            used[factor][x] += 1
        apart -= {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
        rows.append({name: factors[name][row[factor]] for factor, name in enumerate(names)})
    return rows
