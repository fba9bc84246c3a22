"""`anyfit machines`: what can be planned for without having it, and what it is rented for."""

from __future__ import annotations

from .showing.printing import console, print_json
from .showing.terminal import show_figures, show_presets
from .values.machine import Machine
from .values.prices import own_prices_file, prices_of
from .values.record import encode


def show(name: str | None, *, as_json: bool) -> None:
    """All presets, or all figures of one."""
    found = {each: Machine.load(each) for each in (Machine.presets() if name is None else (name,))}
    prices = prices_of(list(found), {})
    if as_json:
        priced = {each: None if each not in prices else encode(prices[each]) for each in found}
        return print_json([{"price": priced[each], **machine.to_json()} for each, machine in found.items()])
    if name is not None:
        return show_figures(found[name], prices.get(name), console())
    return show_presets(found, prices, str(own_prices_file()), console())
