"""Acts: what the ranks of a run do together, in the same order. team.py says why each is entered before it begins."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from .store import Store

KEPT_ACTS = 64


class Kind(Enum):
    """Of an act, in the words that people read."""

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
    """Where a run is: for people."""

    doing: str  # such as "in the forward of step 12"
    waits: Mapping[str, str]  # by kind of collective, the one that is waited for


class Acts:
    """The acts that this rank has taken part in, and where it is in the last."""

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
        """To be said before a collective act. Raises where another rank has begun another."""
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
        """An error has ended the act here. `asked`: a number for what this rank asked of the others in it."""
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
        """Comes back where all ranks have failed in this act, at the same place."""
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
        """Whether all have taken part in as much: those that lack something will see it."""
        raw = self._store.raw
        return raw.check(list(keys)) and {int(raw.get(key)) for key in keys} == {self.count}
