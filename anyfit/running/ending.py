"""How a process of several ranks ends: the first to fail shows its error, and the others end without a word (team.py)."""

from __future__ import annotations

import contextlib
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType

import torch.distributed as dist

from .acts import Acts
from .store import POLL_SECONDS, LostRankError, Store, is_first_to_fail, is_first_to_show, ranks_in_words

WORD_SECONDS = 3.0  # in which a rank that fails has told the others why
GRACE_SECONDS = 5.0  # for a rank to end by itself once another has failed
LOST_SECONDS = 1.5  # without a beat, once a collective has failed
QUIET_SECONDS = 1.0  # so that whoever looks for the first process to end finds the one that failed
QUIET = 117  # the status of a process whose error another one shows


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
        """Ends this process now, whatever its threads wait for. Rank 0, in whose process the store may lie, has the others hear
        of the failure before."""
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
        """Whether this rank is the first to fail. All others end from here on."""
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
        """What is to be shown of it here, if anything. The first to fail shows it."""
        raw, index = self._store.raw, self._store.index
        if getattr(error, "anyfit_rank", index) != index or not self.claims(error):
            return None
        shown = error if not is_of_collective(error) else LostRankError(self._of_lost(error))
        with contextlib.suppress(RuntimeError):
            if not is_first_to_show(raw, index):
                return None
        return shown

    def _of_lost(self, error: BaseException) -> str:
        """Of a collective that failed because nobody is at its other end."""
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
        except RuntimeError:
            return []
        return [index for index in ranks if index != self._store.index and before[index] == after[index]]

    def hook(self, _kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        """What Python does with an error that nobody caught."""
        self.end(self.show(error, lambda _: (None, 1)))


def _is_soon(is_so: Callable[[], bool], seconds: float) -> bool:
    """Waits so long for it at most; whether it is so."""
    until = time.monotonic() + seconds
    while not is_so():
        if time.monotonic() >= until:
            return False
        time.sleep(POLL_SECONDS)
    return True


def is_of_collective(error: BaseException) -> bool:
    """Whether it says no more than that another rank is not there."""
    while error.__cause__ is not None:
        error = error.__cause__
    of_gloo = isinstance(error, RuntimeError) and re.search(r"gloo|onnection (closed|reset|refused)|Broken pipe", str(error))
    return isinstance(error, dist.DistError | LostRankError) or bool(of_gloo)
