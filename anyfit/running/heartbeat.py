"""The thread of a rank that beats: it tells the others where this rank is, and ends it where it waits in vain (team.py).

It runs while the rank is stuck in a collective, where no Python of its own does.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import weakref
from collections.abc import Mapping
from typing import Any

from .acts import Acts, Position
from .ending import GRACE_SECONDS, QUIET, WORD_SECONDS, Ending
from .store import Store, is_first_to_fail, is_first_to_show, ranks_in_words

BEAT_SECONDS = 0.5
PATIENCE_SECONDS = 5.0  # before a rank that waits looks after the others
GONE_SECONDS = 12.0  # without a beat
DEVICE_SECONDS = 30.0  # on a GPU, in which a rank that computes is not told from one that waits


class Heartbeat:
    """Of this rank. Its thread has a connection of its own to the store: others wait on theirs."""

    def __init__(self, store: Store, acts: Acts, ending: Ending, hang_seconds: float) -> None:
        self._store, self._acts, self.ending, self.hang_seconds = store, acts, ending, hang_seconds
        self.index, self._watch, self._beats = store.index, Watch(), 0

    def start(self) -> None:
        self._raw = self._store.raw.clone()
        arguments = (weakref.ref(self), self.ending.stop)
        threading.Thread(target=_beat, args=arguments, name="anyfit ranks", daemon=True).start()

    def beat(self) -> None:
        """Tells where this rank is, and looks whether it should be anywhere at all."""
        position = self._acts.look()
        if self._store.waits:
            position = Position(position.doing, {**position.waits, "": self._store.waits})
        self._beats += 1
        told = {"beat": self._beats, "doing": position.doing, "waits": list(position.waits.values())}
        self._raw.set(f"at/{self.index}", json.dumps(told))
        if self._raw.check(["failed"]):
            self._hear()
            return
        waited = self._watch.waited(self._acts.count, position.waits)
        longest = max((seconds for kind, seconds in waited.items() if kind), default=0.0)
        if any(seconds > (DEVICE_SECONDS if kind == "device" else WORD_SECONDS) for kind, seconds in waited.items() if kind):
            self._heed_error_of_another(position)
        if longest > self.hang_seconds:
            self._end_of_hang(position, longest)
        if max(waited.values(), default=0.0) > PATIENCE_SECONDS:
            gone = self._watch.gone(self._raw, self._store.count, self.index)
            if gone:
                has = "have" if len(gone) > 1 else "has"
                self._end_with(
                    f"{ranks_in_words(gone)} {has} given no sign of life for {GONE_SECONDS:.0f} s, and rank {self.index} waits "
                    f"{position.doing}: {'; '.join(position.waits.values())}"
                )

    def _heed_error_of_another(self, position: Position) -> None:
        """One that caught an error of its own does not come to what this rank waits for."""
        if not self._raw.check(["erred"]):
            return
        word, acts = json.loads(self._raw.get("erred")), self._acts
        if word["rank"] == self.index or not acts.forgiven < word["act"] < acts.count or acts.erred == word["act"]:
            return
        self._end_with(
            f"rank {word['rank']} failed when about to {word['what']}, and went on: {word['error']}. Rank {self.index} waits for "
            f"it {position.doing}: all ranks make a step, or none. Let the error end the run, or catch it on all ranks"
        )

    def _hear(self) -> None:
        """Of a failure: this process ends by itself, or is ended."""
        failed = json.loads(self._raw.get("failed"))
        if failed["rank"] == self.index:
            self.ending.stop.set()
            return
        self.ending.has_heard = True
        self._raw.set(f"heard/{self.index}", "")
        if self.ending.stop.wait(GRACE_SECONDS):
            return
        with contextlib.suppress(RuntimeError):
            if is_first_to_show(self._raw, self.index):  # whoever failed has not said it
                print(f"anyfit: rank {failed['rank']} failed: {failed['error']}", file=sys.stderr, flush=True)
        self.ending.end(QUIET)

    def _end_of_hang(self, position: Position, seconds: float) -> None:
        mine = f"rank {self.index} has waited {seconds:.0f} s, {position.doing}, for: {'; '.join(position.waits.values())}"
        others = []
        for index in range(self._store.count):
            if index != self.index and self._raw.check([f"at/{index}"]):
                at = json.loads(self._raw.get(f"at/{index}"))
                waits = f", waiting for: {'; '.join(at['waits'])}" if at["waits"] else ""
                others.append((f"{at['doing']}{waits}", index))
        here = f"{position.doing}, waiting for: {'; '.join(position.waits.values())}"
        elsewhere = [f"rank {index} is {where}" for where, index in others if where != here]
        found = ". ".join([mine, *elsewhere[:8]]) if elsewhere else f"{mine}. All other ranks wait for the same"
        self._end_with(f"{found}. A rank that may take longer: anyfit.start(hang_seconds=) or --hang-seconds")

    def _end_with(self, message: str) -> None:
        if not is_first_to_fail(self._raw, self.index, message):
            return  # another one says it
        self._raw.set("shown", str(self.index))
        print(f"anyfit: {message}", file=sys.stderr, flush=True)
        self.ending.end(1)


class Watch:
    """What the beating thread has seen so far."""

    def __init__(self) -> None:
        self._since: dict[tuple[str, str, int], float] = {}
        self._seen: dict[int, tuple[bytes, float]] = {}  # by rank, its last beat and when it came

    def waited(self, acts: int, waits: Mapping[str, str]) -> dict[str, float]:
        """By kind, how long the same has been waited for."""
        now = time.monotonic()
        keys = {kind: (kind, label, acts) for kind, label in waits.items()}
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        if not waits:
            self._seen.clear()
        return {kind: now - self._since[key] for kind, key in keys.items()}

    def gone(self, store: Any, count: int, mine: int) -> list[int]:
        """Ranks that have not been seen to beat for long."""
        now, gone = time.monotonic(), []
        for index in range(count):
            if index == mine or store.check([f"parted/{index}"]):
                continue
            beat = store.get(f"at/{index}") if store.check([f"at/{index}"]) else b""
            if index not in self._seen or self._seen[index][0] != beat:
                self._seen[index] = beat, now
            elif now - self._seen[index][1] > GONE_SECONDS:
                gone.append(index)
        return gone


def _beat(heart: weakref.ref[Heartbeat], stop: threading.Event) -> None:
    while not stop.wait(BEAT_SECONDS):
        mine = heart()
        if mine is None:
            return
        try:
            mine.beat()
        except RuntimeError as error:
            if stop.wait(GRACE_SECONDS + WORD_SECONDS) or mine.ending.is_over:
                return
            # The store is gone, with rank 0 or whoever launched the ranks; this one has had time to end by itself.
            print(f"anyfit: rank {mine.index} has lost the others: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            mine.ending.end(QUIET)
        del mine
