"""How ranks talk besides tensors: a key-value store, and the acts that they enter there and do together, in the same order.

team.py has the keys, and says why an act is entered before it begins.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

POLL_SECONDS = 0.02
KEPT_ACTS = 64


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
        """Tells whoever asks what this rank waits for, outside collectives."""
        self.waits = what
        try:
            yield
        finally:
            self.waits = ""


def is_first_to_fail(raw: Any, rank: int, error: str) -> bool:
    """Claims to be the rank whose failure ends the run."""
    mine = json.dumps({"rank": rank, "error": error})
    return bool(json.loads(raw.compare_set("failed", "", mine))["rank"] == rank)


def is_first_to_show(raw: Any, rank: int) -> bool:
    """Claims to be the rank that shows the error: a person sees it once."""
    return bool(raw.compare_set("shown", "", str(rank)).decode() == str(rank))


def ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


@dataclass(frozen=True)
class Post:
    """What ranks tell each other once, from any thread."""

    store: Store  # over a connection of its own: others wait on theirs
    key: str

    def settle(self, word: str, conclude: Callable[[list[str]], str]) -> str:
        """Every rank tells a word; rank 0 concludes from all of them, and all learn what."""
        store = self.store
        store.raw.set(f"{self.key}/{store.index}", word)
        if store.index == 0:
            words = [store.await_key(f"{self.key}/{index}", "it to save").decode() for index in range(store.count)]
            store.raw.set(self.key, conclude(words))
        return store.await_key(self.key, "it to save").decode()


class Kind(Enum):
    STEP = "make step"
    EVALUATE = "evaluate"
    READ_WEIGHTS = "read the weights"
    OPEN_WEIGHTS = "open the weights"
    SAVE = "save"
    BEGIN_TO_SAVE = "begin to save"


@dataclass(frozen=True)
class Act:
    kind: Kind
    which: str = ""  # of a step its number, of a save its folder

    def __str__(self) -> str:
        return f"{self.kind.value} {self.which}".rstrip()

    def to_json(self) -> str:
        return json.dumps([self.kind.name, self.which])

    @classmethod
    def from_json(cls, text: str | bytes) -> Act:
        name, which = json.loads(text)
        return cls(Kind[name], which)


@dataclass(frozen=True)
class Position:
    doing: str  # such as "in the forward of step 12"
    waits: Mapping[str, str]  # by kind of collective, the one that is waited for


class Acts:
    """The acts that this rank has taken part in."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.look: Callable[[], Position] = lambda: Position("before its first step", {})
        self.count = 0
        self._last: Act | None = None
        self.erred: int | None = None  # the number of the act that an error ended here, and not yet on all
        self.forgiven = -1  # the last that ended so on all
        self._leavings = 0
        self._is_leaving = False

    def begin(self, act: Act) -> None:
        """Enters an act before it begins. Raises where another rank has entered another."""
        if self.erred is not None:
            self._go_on_together(self.erred)
        store = self._store
        found = Act.from_json(store.raw.compare_set(f"act/{self.count}", "", act.to_json()))
        if found != act:
            raise RuntimeError(
                f"rank {store.index} is about to {act}, and another rank to {found}: steps, saves, evaluations and whatever else "
                "reads weights are made by all ranks together, in the same order; call them on every rank, not on one alone"
            )
        self.count += 1
        self._last = act
        if not store.index and self.count > KEPT_ACTS:
            store.raw.delete_key(f"act/{self.count - KEPT_ACTS - 1}")

    def end_with(self, error: BaseException, asked: int) -> None:
        """An error ended the act on this rank. `asked` numbers what it had asked of the others in it."""
        act, raw = self.count - 1, self._store.raw
        if self.erred is not None or act < 0:
            return
        self.erred = act
        told = {"act": act, "rank": self._store.index, "what": str(self._last), "asked": asked}
        word = json.dumps({**told, "error": f"{type(error).__name__}: {error}"})
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            raw.set(f"erred/{act}/{self._store.index}", word)
            raw.set("erred", word)

    def _go_on_together(self, act: int) -> None:
        """Returns once all ranks have failed in this act, at the same place."""
        raw = self._store.raw
        keys = [f"erred/{act}/{index}" for index in range(self._store.count)]
        self._store.wait_until(lambda: raw.check(keys), f"the others, which did not fail as it did when about to {self._last}")
        words = [json.loads(raw.get(key)) for key in keys]
        apart = next((word for word in words if word["asked"] != words[0]["asked"]), None)
        if apart is not None:
            raise RuntimeError(
                f"rank 0 failed when about to {self._last} ({words[0]['error']}), and rank {apart['rank']} at another place "
                f"({apart['error']}): what they had begun to exchange no longer meets. Let the error end the run"
            )
        self.erred, self.forgiven = None, act

    def leave(self, take_part: Callable[[Act], None]) -> None:
        """Takes part in what others still do, until no rank has anything of its own to do. What others do may be to leave."""
        is_within, self._is_leaving = self._is_leaving, True
        self._leavings += not is_within
        try:
            self._leave(f"left/{self._leavings}", take_part)
        finally:
            self._is_leaving = is_within

    def _leave(self, key: str, take_part: Callable[[Act], None]) -> None:
        raw = self._store.raw
        keys = [f"{key}/{index}" for index in range(self._store.count)]
        while not raw.check([key]):
            act = f"act/{self.count}"
            raw.set(keys[self._store.index], str(self.count))
            self._store.wait_until(
                lambda: raw.check([key]) or raw.check([act]) or self._is_last(keys),  # noqa: B023
                "the others to end",
            )
            is_begun = raw.check([act])
            if raw.check([key]):  # then what is begun comes after it
                return
            if is_begun:
                take_part(Act.from_json(raw.get(act)))
            else:
                raw.set(key, "")  # all have left: what is begun from here on is begun by all

    def _is_last(self, keys: Sequence[str]) -> bool:
        """Whether all have taken part in as many acts: a rank that lacks one will see it."""
        raw = self._store.raw
        return raw.check(list(keys)) and {int(raw.get(key)) for key in keys} == {self.count}
