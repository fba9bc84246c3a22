"""Quantities as people write and read them."""

from __future__ import annotations

import doctest
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.values import units
from anyfit.values.units import parse_bytes, parse_count, show_bytes, show_count, show_seconds

BYTES = {"": 1, "B": 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
COUNTS = {"": 1, "k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
SECONDS = {"µs": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600}


def test_the_examples_in_the_docstrings_run() -> None:
    result = doctest.testmod(units)
    assert result.attempted >= 5
    assert result.failed == 0


@given(st.integers(0, 10**6), st.integers(0, 3), st.sampled_from(sorted(BYTES)), st.sampled_from(["", " "]))
def test_a_written_size_is_read_exactly(thousandths: int, digits: int, unit: str, space: str) -> None:
    wanted = thousandths * BYTES[unit] // 10**digits
    text = f"{thousandths // 10**digits}" + (f".{thousandths % 10**digits:0{digits}}" if digits else "")
    assert parse_bytes(f"{text}{space}{unit}") == wanted
    assert parse_bytes(f" {text}{space}{unit.upper()} ") == wanted
    if unit in COUNTS:
        assert parse_count(f"{text}{space}{unit}") == thousandths * COUNTS[unit] // 10**digits


@given(st.integers(0, 2**70))
def test_a_whole_number_is_a_size_and_a_count_to_the_last_digit(number: int) -> None:
    assert parse_bytes(number) == parse_bytes(str(number)) == parse_count(str(number)) == number


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "24 gigs", "1,5 GiB", "1e9", "24GiB 3", "nan", None, 1.5, True])
def test_what_is_no_size_is_an_error_that_shows_how_to_write_one(text: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a size; write it like 24GiB")):
        parse_bytes(text)  # type: ignore[arg-type]


def test_a_negative_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="cannot be negative: -1"):
        parse_bytes(-1)


@pytest.mark.parametrize("text", ["", "B", "ten", "10GiB", "-5M", None, True])
def test_what_is_no_count_is_an_error_that_shows_how_to_write_one(text: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{text!r} is not a count; write it like 500M")):
        parse_count(text)  # type: ignore[arg-type]


def read(shown: str, names: dict[str, float]) -> float:
    """The quantity a shown text stands for, which must have three digits where it has a fraction."""
    total = 0.0
    for number, unit in re.findall(r"([\d.,]+) ?(\S*)", shown):
        if "." in number:
            assert len(number.replace(".", "").lstrip("0")) <= 3, shown
        total += float(number.replace(",", "")) * names[unit]
    return total


@given(st.integers(0, 2**52))
def test_a_shown_size_or_count_is_within_half_a_percent(number: int) -> None:
    assert read(show_bytes(number), BYTES) == pytest.approx(number, rel=0.005)
    assert read(show_count(number), COUNTS) == pytest.approx(number, rel=0.005)


@given(st.floats(1e-6, 1e7))
def test_shown_seconds_are_within_two_percent(seconds: float) -> None:
    assert read(show_seconds(seconds), SECONDS) == pytest.approx(seconds, rel=0.02)


@given(st.floats(0, 1e7), st.floats(0, 1e7))
def test_of_two_times_the_longer_is_never_shown_as_the_shorter(one: float, other: float) -> None:
    short, long = sorted([one, other])
    assert read(show_seconds(short), SECONDS) <= read(show_seconds(long), SECONDS)
