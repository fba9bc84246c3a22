"""The key-value store through which ranks talk besides tensors (team.py has its keys), and how a rank waits there for others."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

POLL_SECONDS = 0.02


class LostRankError(RuntimeError):
    """Another rank is gone, or does not come."""


class Store:
    """`raw` is torch's; a thread of its own has a clone of it, since a connection waits for one thing at a time."""

    def __init__(self, raw: Any, index: int, count: int) -> None:
        self.raw, self.index, self.count = raw, index, count
        self.waits = ""  # what this rank waits for here, outside collectives

    def wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        with self.waiting(what):
            while not is_so():
                if self.raw.check(["failed"]):
                    raise LostRankError(f"another rank failed while this one waited for {what}")
                time.sleep(POLL_SECONDS)

    def await_key(self, key: str, what: str) -> bytes:
        self.wait_until(lambda: self.raw.check([key]), what)
        found: bytes = self.raw.get(key)
        return found

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For other ranks, outside of collectives: says so to whoever asks."""
        self.waits = what
        try:
            yield
        finally:
            self.waits = ""


def is_first_to_fail(raw: Any, rank: int, error: str) -> bool:
    """Claims to be the rank whose failure ends all."""
    mine = json.dumps({"rank": rank, "error": error})
    return bool(json.loads(raw.compare_set("failed", "", mine))["rank"] == rank)


def is_first_to_show(raw: Any, rank: int) -> bool:
    """Claims to be the rank that shows the error: a person sees it once."""
    return bool(raw.compare_set("shown", "", str(rank)).decode() == str(rank))


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class Post:
    """What ranks tell each other once, from any thread: each a word, and rank 0 what came of them."""

    store: Any  # a connection of its own: others wait on theirs
    key: str
    index: int
    count: int

    def tell(self, word: str) -> None:
        self.store.set(f"{self.key}/{self.index}", word)

    def all_told(self) -> list[str]:
        keys = [f"{self.key}/{index}" for index in range(self.count)]
        self._wait_for(keys)
        return [self.store.get(key).decode() for key in keys]

    def conclude(self, word: str) -> None:
        self.store.set(self.key, word)

    def conclusion(self) -> str:
        self._wait_for([self.key])
        found: str = self.store.get(self.key).decode()
        return found

    def _wait_for(self, keys: list[str]) -> None:
        while not self.store.check(keys):
            if self.store.check(["failed"]):
                raise LostRankError("another rank failed while this one waited for it to save")
            time.sleep(POLL_SECONDS)
