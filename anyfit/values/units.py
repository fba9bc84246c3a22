"""Quantities as people write and read them. Inside the house they are plain bytes, seconds and counts."""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal

_BYTE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_BYTE_UNITS |= {"kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_COUNT_UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "t": 10**12}


def parse_bytes(text: str | int) -> int:
    """
    >>> parse_bytes("24GiB")
    25769803776
    >>> parse_bytes("1.5 kB")
    1500
    """
    size = _parsed(text, _BYTE_UNITS, "a size; write it like 24GiB, 512MiB or 8000000000")
    if size < 0:
        raise ValueError(f"a size cannot be negative: {text}")
    return size


def parse_count(text: str | int) -> int:
    """
    >>> parse_count("10B")
    10000000000
    """
    return _parsed(text, _COUNT_UNITS, "a count; write it like 500M, 10B or 1T")


def _parsed(text: str | int, units: Mapping[str, int], wanted: str) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text) if isinstance(text, str) else None
    if match is None or match[2].lower() not in units:
        raise ValueError(f"{text!r} is not {wanted}")
    return int(Decimal(match[1]) * units[match[2].lower()])  # a float would make 1000 bytes of 1.001 kB


def show_bytes(size: float) -> str:
    """
    >>> show_bytes(3 * 2**30)
    '3.00 GiB'
    """
    return _shown(size, {"TiB": 2**40, "GiB": 2**30, "MiB": 2**20, "KiB": 2**10}) or f"{size:.0f} B"


def show_seconds(seconds: float) -> str:
    """
    >>> show_seconds(0.0042), show_seconds(75), show_seconds(7300)
    ('4.20 ms', '1 min 15 s', '2 h 2 min')
    """
    if seconds < 1e-3:
        return f"{_three_digits(seconds * 1e6)} µs"
    if seconds < 1:
        return f"{_three_digits(seconds * 1e3)} ms"
    if seconds < 60:
        return f"{_three_digits(seconds)} s"
    if round(seconds) < 3600:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60:,} h {minutes % 60} min"


def show_count(count: float) -> str:
    """
    >>> show_count(3_780_000_000)
    '3.78 B'
    """
    return _shown(count, {"T": 1e12, "B": 1e9, "M": 1e6, "k": 1e3}) or f"{count:.0f}"


def number_of(count: int, thing: str) -> str:
    """
    >>> number_of(1, "row"), number_of(1200, "row")
    ('1 row', '1200 rows')
    """
    return f"{count} {thing}{'s' * (count != 1)}"


def _shown(value: float, units: Mapping[str, float]) -> str:
    fitting = ((name, unit) for name, unit in units.items() if abs(value) >= unit)
    return next((f"{_three_digits(value / unit)} {name}" for name, unit in fitting), "")


def _three_digits(value: float) -> str:
    # the bounds are where rounding makes one digit more
    return f"{value:.0f}" if abs(value) >= 99.95 else f"{value:.1f}" if abs(value) >= 9.995 else f"{value:.2f}"


def show_parameters(count: int, trainable: int | None = None) -> str:
    """
    >>> show_parameters(2_000_000), show_parameters(2_000_000, 50_000)
    ('2.00 M parameters', '2.00 M parameters, 50.0 k trainable and 1.95 M frozen')
    """
    said = f"{show_count(count)} parameters"
    if trainable is None or trainable == count:
        return said
    return f"{said}, {show_count(trainable)} trainable and {show_count(count - trainable)} frozen"
