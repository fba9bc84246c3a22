"""How a process of several ranks ends: the first to fail shows its error, and the others end without a word (team.py).

The thread of `Heartbeat` tells the others where this rank is, and ends it where it waits in vain. It runs while the rank is stuck
in a collective, where no other Python does.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from types import TracebackType

import torch.distributed as dist

from anyfit.stages.post import LostError

from .acts import POLL_SECONDS, Acts, LostRankError, Position, Store, is_first_to_fail, is_first_to_show, ranks_in_words

WORD_SECONDS = 3.0  # in which a rank that fails has told the others why
GRACE_SECONDS = 5.0  # for a rank to end by itself once another has failed
LOST_SECONDS = 1.5  # without a beat, once a collective has failed
QUIET_SECONDS = 1.0  # so that whoever looks for the first process to end finds the one that failed
QUIET = 117  # the status of a process whose error another one shows
BEAT_SECONDS = 0.5
PATIENCE_SECONDS = 5.0  # before a rank that waits looks after the others
GONE_SECONDS = 12.0  # without a beat
DEVICE_SECONDS = 30.0  # on a GPU, in which a rank that computes is not told from one that waits


class Ending:
    """Of this process. `ends_process`: a failure of another rank ends it too. `made_group`: the process group is ours."""

    def __init__(self, store: Store, acts: Acts, *, ends_process: bool, made_group: bool) -> None:
        self._store, self._acts = store, acts
        self._ends_process, self._made_group = ends_process, made_group
        self._is_failing = False
        self.has_heard = False  # of another's failure
        self.is_over = False
        self.stop = threading.Event()  # of the thread that beats
        self._shown_before = sys.excepthook

    def part(self) -> None:
        """At the end of the process. The rank in whose process the store lies waits until the others have done with it."""
        if self.is_over:
            return
        self.is_over = True
        if self._is_failing:
            self.end(1)  # threads may be stuck in collectives, which Python would wait for
        self.stop.set()
        raw = self._store.raw
        with contextlib.suppress(RuntimeError):
            raw.set(f"parted/{self._store.index}", "")
            if not self._store.index:
                keys = [f"parted/{index}" for index in range(self._store.count)]
                _is_soon(lambda: raw.check(keys), GRACE_SECONDS)
        if self._made_group:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def end(self, status: int) -> None:
        """Ends this process now, whatever its threads wait for; rank 0, which may hold the store, once the others have heard."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if not self._ends_process:
            return
        if not self._store.index:
            raw = self._store.raw.clone()
            keys = [f"heard/{index}" for index in range(1, self._store.count)]
            with contextlib.suppress(RuntimeError):
                _is_soon(lambda: raw.check(keys), WORD_SECONDS)
        os._exit(status)

    def claims(self, error: BaseException) -> bool:
        """Whether this rank is the first to fail. The others end once it is claimed."""
        raw, index = self._store.raw, self._store.index
        self._is_failing = True
        if self.has_heard:
            return False
        try:
            if is_of_collective(error) and _is_soon(lambda: raw.check(["failed"]), WORD_SECONDS):
                return bool(json.loads(raw.get("failed"))["rank"] == index)
            return is_first_to_fail(raw, index, f"{type(error).__name__}: {error}")
        except RuntimeError:  # the store is gone with its rank
            return True

    def show(self, error: BaseException, in_words: Callable[[BaseException], tuple[str | None, int]]) -> int:
        """Shows an error that ends this rank, unless another one does; the status to end with. `in_words` has a line in place of
        its traceback, or none, and the status."""
        shown = self._shown_of(error)
        if shown is None:
            time.sleep(QUIET_SECONDS)
            return QUIET
        line, status = (str(shown), 1) if shown is not error else in_words(error)
        if line is None:
            self._shown_before(type(error), error, error.__traceback__)
        else:
            print(f"anyfit: {line}", file=sys.stderr, flush=True)
        return status

    def _shown_of(self, error: BaseException) -> BaseException | None:
        """What this rank shows of it, if anything. The first to fail shows it."""
        raw, index = self._store.raw, self._store.index
        if getattr(error, "anyfit_rank", index) != index or not self.claims(error):
            return None
        shown = error if not is_of_collective(error) else LostRankError(self._of_lost(error))
        with contextlib.suppress(RuntimeError):
            if not is_first_to_show(raw, index):
                return None
        return shown

    def _of_lost(self, error: BaseException) -> str:
        """Of a collective that failed because a rank is gone."""
        position = self._acts.look()
        gone = self._without_beats()
        who = ranks_in_words(gone) if gone else "another rank"
        waited = f" ({'; '.join(position.waits.values())})" if position.waits else ""
        return (
            f"{who} {'are' if len(gone) > 1 else 'is'} gone without a word, as a process is that was killed (for want of host "
            f"memory, or with its machine); rank {self._store.index} was {position.doing}{waited}: {str(error).splitlines()[0]}"
        )

    def _without_beats(self) -> list[int]:
        raw, ranks = self._store.raw, range(self._store.count)
        keys = [f"at/{index}" for index in ranks]
        try:
            before = [raw.get(key) if raw.check([key]) else b"" for key in keys]
            time.sleep(LOST_SECONDS)
            after = [raw.get(key) if raw.check([key]) else b"" for key in keys]
        except RuntimeError:  # the store is gone, with whoever has it: rank 0, where no launcher does
            return [] if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True" or not self._store.index else [0]
        return [index for index in ranks if index != self._store.index and before[index] == after[index]]

    def hook(self, _kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        self.end(self.show(error, lambda _: (None, 1)))


def _is_soon(is_so: Callable[[], bool], seconds: float) -> bool:
    """Whether it becomes so within these seconds."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def is_of_collective(error: BaseException) -> bool:
    """Whether it says only that another rank is gone."""
    while error.__cause__ is not None:
        error = error.__cause__
    of_gloo = isinstance(error, RuntimeError) and re.search(r"gloo|onnection (closed|reset|refused)|Broken pipe", str(error))
    return isinstance(error, dist.DistError | LostRankError | LostError) or bool(of_gloo)


class Heartbeat:
    """Its thread has a connection of its own to the store: others wait on theirs."""

    def __init__(self, store: Store, acts: Acts, ending: Ending, hang_seconds: float) -> None:
        self._store, self._acts, self.ending, self.hang_seconds = store, acts, ending, hang_seconds
        self.index, self._beats = store.index, 0
        self._since: dict[tuple[str, str, int], float] = {}
        self._seen: dict[int, tuple[bytes, float]] = {}  # by rank, its last beat and when it came

    def start(self) -> None:
        self._raw = self._store.raw.clone()
        arguments = (weakref.ref(self), self.ending.stop)
        threading.Thread(target=_beat, args=arguments, name="anyfit ranks", daemon=True).start()

    def beat(self) -> None:
        """Tells where this rank is, and ends it where it waits in vain."""
        position = self._acts.look()
        if self._store.waits:
            position = Position(position.doing, {**position.waits, "": self._store.waits})
        self._beats += 1
        told = {"beat": self._beats, "doing": position.doing, "waits": list(position.waits.values())}
        self._raw.set(f"at/{self.index}", json.dumps(told))
        if self._raw.check(["failed"]):
            self._hear()
            return
        waited = self._waited(position.waits)
        longest = max((seconds for kind, seconds in waited.items() if kind), default=0.0)
        if any(seconds > (DEVICE_SECONDS if kind == "device" else WORD_SECONDS) for kind, seconds in waited.items() if kind):
            self._heed_error_of_another(position)
        if longest > self.hang_seconds:
            self._end_of_hang(position, longest)
        if max(waited.values(), default=0.0) > PATIENCE_SECONDS:
            gone = self._gone()
            if gone:
                has = "have" if len(gone) > 1 else "has"
                self._end_with(
                    f"{ranks_in_words(gone)} {has} given no sign of life for {GONE_SECONDS:.0f} s, and rank {self.index} waits "
                    f"{position.doing}: {'; '.join(position.waits.values())}"
                )

    def _waited(self, waits: Mapping[str, str]) -> dict[str, float]:
        """By kind, how many seconds this rank has waited for the same thing."""
        now = time.monotonic()
        keys = {kind: (kind, label, self._acts.count) for kind, label in waits.items()}
        self._since = {key: self._since.get(key, now) for key in keys.values()}
        if not waits:
            self._seen.clear()
        return {kind: now - self._since[key] for kind, key in keys.items()}

    def _gone(self) -> list[int]:
        """Ranks without a beat for GONE_SECONDS."""
        now, gone, store = time.monotonic(), [], self._raw
        for index in range(self._store.count):
            if index == self.index or store.check([f"parted/{index}"]):
                continue
            beat = store.get(f"at/{index}") if store.check([f"at/{index}"]) else b""
            if index not in self._seen or self._seen[index][0] != beat:
                self._seen[index] = beat, now
            elif now - self._seen[index][1] > GONE_SECONDS:
                gone.append(index)
        return gone

    def _heed_error_of_another(self, position: Position) -> None:
        """A rank that caught its own error does not come to what this rank waits for."""
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
        """Another rank failed: this process ends by itself, or is ended."""
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
