"""What machines are rented for, an hour: typical prices that come with anyfit, each with its source and date, and the user's own.

The user's file is ~/.config/anyfit/prices.json, or the one that ANYFIT_PRICES names:

    {"h100": 2.5, "my-box.json": {"usd_per_hour": 0.4, "source": "electricity", "date": "2026-11-01"}}
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from .record import decode, nearest, read_json

VARIABLE = "ANYFIT_PRICES"


@dataclass(frozen=True)
class Price:
    usd_per_hour: float  # of the whole machine
    source: str
    date: str  # on which the source had it

    def __post_init__(self) -> None:
        if not self.usd_per_hour > 0:
            raise ValueError(f"usd_per_hour is {self.usd_per_hour}; write a number above 0, such as 2.5")


def typical_prices() -> dict[str, Price]:
    """Of presets, by name."""
    file = resources.files(__package__).joinpath("prices.json")
    return {name: decode(Price, found, f"prices.json: {name}") for name, found in json.loads(file.read_text()).items()}


def own_prices_file() -> Path:
    named = os.environ.get(VARIABLE)
    if named:
        return Path(named)
    return Path(os.environ.get("XDG_CONFIG_HOME") or Path.home() / ".config") / "anyfit" / "prices.json"


def own_prices() -> dict[str, Price]:
    """The user's; none where there is no file, unless one is named."""
    file = own_prices_file()
    if not file.exists() and VARIABLE not in os.environ:
        return {}
    document = read_json(file, "file of prices")
    if not isinstance(document, Mapping):
        raise ValueError(f'{file}: write it like {{"h100": 2.5}}, an hour\'s price of each machine')
    return {name: _own(found, f"{file}: {name}") for name, found in document.items()}


def _own(found: Any, where: str) -> Price:
    if isinstance(found, bool) or not isinstance(found, int | float):
        price: Price = decode(Price, found, where)
        return price
    try:
        return Price(float(found), "yours", "")
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def prices_of(names: list[str], given: Mapping[str, float]) -> dict[str, Price]:
    """Of these machines: as given, else the user's own, else typical. A name of the user's that nobody knows is refused."""
    typical, own = typical_prices(), own_prices()
    for name in own:
        if name not in typical and not name.endswith(".json"):
            raise ValueError(f"{own_prices_file()}: no machine {name!r}{nearest(name, typical)}")
    now = {name: Price(price, "--price", "") for name, price in given.items()}
    return {name: price for name in names if (price := now.get(name) or own.get(name) or typical.get(name)) is not None}
