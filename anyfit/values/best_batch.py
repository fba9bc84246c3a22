"""How many samples a step has: a number, or as many as are best on a machine."""

from __future__ import annotations

from dataclasses import dataclass

MOST_SAMPLES = 64  # of a step, where nobody says: more changes how well a model learns


@dataclass(frozen=True)
class BestBatch:
    """The batch at which most tokens a second go through, of the limit and its halves."""

    limit: int = MOST_SAMPLES

    def __str__(self) -> str:
        return f"best:{self.limit}"


def parse_batch(text: str) -> int | BestBatch:
    """
    >>> parse_batch("8"), parse_batch("best"), parse_batch("best:256")
    (8, BestBatch(limit=64), BestBatch(limit=256))
    """
    word, colon, limit = text.strip().partition(":")
    if word == "best" and not colon:
        return BestBatch()
    number = limit if word == "best" else text.strip()
    if not number.removeprefix("-").isdecimal() or not number.isascii():
        raise ValueError("give a whole number, 'best', or 'best:256' for the best of up to 256")
    if int(number) < 1:
        raise ValueError("give 1 or more")
    return BestBatch(int(number)) if word == "best" else int(number)
