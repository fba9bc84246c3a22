"""The ranks of a run as one: how they meet, what they tell each other besides tensors, and how they end together.

All of it goes through torch's key-value store, a few bytes at a time, so that it works while collectives do not:

    first/<n>            what rank 0 found out for all: a plan, or the error that it met
    facts/<n>/<rank>     what every rank must have alike
    post/<n>/<rank>      what a thread of a rank has to tell those of the others, and post/<n> what comes of it all
    act/<n>              the n-th thing that the ranks do together: a step, a save, …
    erred/<n>/<rank>     an error ended it on a rank, whose caller may catch it. erred: the last such
    left/<n>/<rank>      a rank has no more to do of its own; how many acts it has taken part in. left/<n>: so it is with all
    at/<rank>            where a rank is, from a thread that beats: its act, and what it waits for
    failed, shown        the first error, and whether a person has seen it

**Who fails, and who only notices.** When a rank ends, the collectives of all others fail, with N tracebacks that say nothing. So
the first to fail says so before it lets go of anything, and shows its error; the others end without a word. One that was killed
says nothing: then the first of those that notice tells which rank is gone. A rank that is stuck in a collective, where no Python
runs, is ended by the thread that beats.

**Acts.** Steps, saves and evaluations are collective: all ranks make the same ones in the same order. Each is entered under its
number before it begins, and a rank that finds another there than its own has found the mistake before anything hangs. A rank
whose data ends first takes part, with nothing of its own, in the acts that it has not begun (`Run.close`). One that catches an
error of its own act goes on only if all others have failed in it too, at the same place: else it would meet them in an act that
they have not ended.
"""

from __future__ import annotations

import atexit
import contextlib
import hashlib
import itertools
import json
import os
import pickle
import re
import socket
import sys
import threading
import time
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from types import TracebackType
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed import distributed_c10d

BEAT_SECONDS = 0.5
POLL_SECONDS = 0.02
WORD_SECONDS = 3.0  # in which a rank that fails has told the others why
GRACE_SECONDS = 5.0  # for a rank to end by itself once another has failed
PATIENCE_SECONDS = 5.0  # before a rank that waits looks after the others
GONE_SECONDS = 12.0  # without a beat
MARGIN_SECONDS = 60.0  # a collective's own limit lies so much behind the one that tells what is waited for
DEVICE_SECONDS = 30.0  # on a GPU, in which a rank that computes is not told from one that waits
QUIET_SECONDS = 1.0  # so that whoever looks for the first process to end finds the one that failed
KEPT_ACTS = 64
QUIET = 117  # the status of a process whose error another one shows

T = TypeVar("T")
_dist: Any = dist
_numbers = itertools.count()


class LostRankError(RuntimeError):
    """Another rank is gone, or does not come."""


@dataclass(frozen=True)
class Position:
    """Where a run is: for people."""

    doing: str  # such as "in the forward of step 12"
    waits: Mapping[str, str]  # by kind of collective, the one that is waited for


class Team:
    """All ranks of the process group that is there. `ends_process`: a failure of another rank ends this process too."""

    def __init__(self, hang_seconds: float, *, ends_process: bool, place: str = "", made_group: bool = False) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        self.hang_seconds = hang_seconds
        self.look: Callable[[], Position] = lambda: Position("before its first step", {})
        self._store = _dist.PrefixStore(f"anyfit/{next(_numbers)}", distributed_c10d._get_default_store())
        self._asked = itertools.count()  # of `first` and `facts`
        self._acts = 0
        self._act = ""  # the last that was begun
        self._erred: int | None = None  # the number of the act that an error ended here, and not yet on all
        self._forgiven = -1  # the last that ended so on all
        self._leavings = 0
        self._is_leaving = False
        self._waits = ""  # for another rank, outside collectives
        self._is_failing = False
        self._has_heard = False  # of another's failure
        self._is_over = False
        self._made_group = made_group
        self._stop = threading.Event()
        self.places: list[str] = [place]
        self._thread: threading.Thread | None = None
        if ends_process:
            beating = (weakref.ref(self), self._store.clone(), self._stop)
            self._thread = threading.Thread(target=_beat, args=beating, name="anyfit ranks", daemon=True)
            self._thread.start()
            self._shown_before, sys.excepthook = sys.excepthook, self._hook
            atexit.register(self.part)
        self.places = self._all("places", place)

    # ------------------------------------------------------------------ telling each other

    def from_first(self, make: Callable[[], T], what: str) -> T:
        """What rank 0 makes, on every rank; its error, on every rank."""
        key = f"first/{next(self._asked)}"
        if self.index:
            made, value = pickle.loads(self._await(key, f"{what} from rank 0"))
            if not made:
                value.anyfit_rank = 0  # who shows it
                raise value
            return value  # type: ignore[no-any-return]
        try:
            found = make()
        except Exception as error:
            self._store.set(key, _pickled(error))
            raise
        self._store.set(key, pickle.dumps((True, found)))
        return found

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises on every rank, naming one that has a fact otherwise than rank 0."""
        mine = json.dumps(dict(facts))
        if len(set(self._all("facts", hashlib.sha256(mine.encode()).hexdigest()))) == 1:
            return
        everybody = [json.loads(each) for each in self._all("facts", mine)]
        for index, theirs in enumerate(everybody):
            for name in (*everybody[0], *theirs):
                fact = everybody[0].get(name)
                if theirs.get(name) != fact:
                    raise ValueError(
                        f"rank {index} has another {name} than rank 0: {theirs.get(name)} and not {fact}. All ranks start the "
                        "same script, with the same arguments and the same versions of everything"
                    )

    def hear_of(self, error: Exception | None) -> None:
        """Raises where another rank has met an error and this one has not."""
        everybody = self._all("word", "" if error is None else f"{type(error).__name__}: {error}")
        failed = next((index for index, each in enumerate(everybody) if each), None)
        if error is None and failed is not None:
            raised = ValueError(f"rank {failed}: {everybody[failed]}")
            raised.anyfit_rank = failed  # type: ignore[attr-defined]  # who shows it
            raise raised

    def _all(self, what: str, mine: str) -> list[str]:
        """Of every rank, its own."""
        number = next(self._asked)
        self._store.set(f"facts/{number}/{self.index}", mine)
        return [self._await(f"facts/{number}/{index}", f"the {what} of rank {index}").decode() for index in range(self.count)]

    def _await(self, key: str, what: str) -> bytes:
        self._wait_until(lambda: self._store.check([key]), what)
        found: bytes = self._store.get(key)
        return found

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        self._waits = what
        try:
            while not is_so():
                if self._store.check(["failed"]):
                    raise LostRankError(f"another rank failed while this one waited for {what}")
                time.sleep(POLL_SECONDS)
        finally:
            self._waits = ""

    def post(self) -> Post:
        """All ranks ask for the same ones, in the same order."""
        return Post(self._store.clone(), f"post/{next(self._asked)}", self.index, self.count)

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """For other ranks, outside of collectives: says so to whoever asks."""
        self._waits = what
        try:
            yield
        finally:
            self._waits = ""

    # ------------------------------------------------------------------ acts

    def begin(self, act: str) -> None:
        """To be said before a collective act. Raises where another rank has begun another."""
        if self._erred is not None:
            self._go_on_together(self._erred)
        found = self._store.compare_set(f"act/{self._acts}", "", act).decode()
        if found != act:
            raise RuntimeError(
                f"rank {self.index} is about to {act}, and another rank to {found}: steps, saves, evaluations and whatever else "
                "reads weights are made by all ranks together, in the same order; call them on every rank, not on one alone"
            )
        self._acts += 1
        self._act = act
        if not self.index and self._acts > KEPT_ACTS:
            self._store.delete_key(f"act/{self._acts - KEPT_ACTS - 1}")

    def erred(self, error: BaseException, asked: int) -> None:
        """An error has ended the act here. `asked`: a number for what this rank asked of the others in it."""
        act = self._acts - 1
        if self._erred is not None or act < 0:
            return
        self._erred = act
        word = {"act": act, "rank": self.index, "what": self._act, "error": f"{type(error).__name__}: {error}", "asked": asked}
        with contextlib.suppress(RuntimeError):  # of a store that is gone
            self._store.set(f"erred/{act}/{self.index}", json.dumps(word))
            self._store.set("erred", json.dumps(word))

    def _go_on_together(self, act: int) -> None:
        """Comes back where all ranks have failed in this act, at the same place."""
        keys = [f"erred/{act}/{index}" for index in range(self.count)]
        self._wait_until(lambda: self._store.check(keys), f"the others, which did not fail as it did when about to {self._act}")
        words = [json.loads(self._store.get(key)) for key in keys]
        apart = next((word for word in words if word["asked"] != words[0]["asked"]), None)
        if apart is not None:
            raise RuntimeError(
                f"rank 0 failed when about to {self._act} ({words[0]['error']}), and rank {apart['rank']} at another place "
                f"({apart['error']}): what they had begun to exchange no longer meets. Let the error end the run"
            )
        self._erred, self._forgiven = None, act

    def leave(self, take_part: Callable[[str], None]) -> None:
        """Takes part in what others still do, until no rank has anything of its own to do. What others do may be to leave."""
        is_within, self._is_leaving = self._is_leaving, True
        self._leavings += not is_within
        try:
            self._leave(f"left/{self._leavings}", take_part)
        finally:
            self._is_leaving = is_within

    def _leave(self, key: str, take_part: Callable[[str], None]) -> None:
        keys = [f"{key}/{index}" for index in range(self.count)]
        while not self._store.check([key]):
            act = f"act/{self._acts}"
            self._store.set(keys[self.index], str(self._acts))
            self._wait_until(
                lambda: self._store.check([key]) or self._store.check([act]) or self._is_last(keys),  # noqa: B023
                "the others to end",
            )
            is_begun = self._store.check([act])
            if self._store.check([key]):  # then what is begun comes after it
                return
            if is_begun:
                take_part(self._store.get(act).decode())
            else:
                self._store.set(key, "")  # all have left: what is begun from here on is begun by all

    def _is_last(self, keys: Sequence[str]) -> bool:
        """Whether all have taken part in as much: those that lack something will see it."""
        return self._store.check(list(keys)) and {int(self._store.get(key)) for key in keys} == {self._acts}

    # ------------------------------------------------------------------ the end

    def part(self) -> None:
        """At the end of the process. The rank in whose process the store lies waits until the others have done with it."""
        if self._is_over:
            return
        self._is_over = True
        if self._is_failing:
            self.end(1)  # threads may be stuck in collectives, which Python would wait for
        self._stop.set()
        with contextlib.suppress(RuntimeError):
            self._store.set(f"parted/{self.index}", "")
            if not self.index:
                until = time.monotonic() + GRACE_SECONDS
                keys = [f"parted/{index}" for index in range(self.count)]
                while not self._store.check(keys) and time.monotonic() < until:
                    time.sleep(POLL_SECONDS)
        if self._made_group:
            with contextlib.suppress(Exception):
                dist.destroy_process_group()

    def end(self, status: int) -> None:
        """Ends this process now, whatever its threads wait for. Rank 0, in whose process the store may lie, has the others hear
        of the failure before."""
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        if self._thread is None:
            return
        if not self.index:
            store, until = self._store.clone(), time.monotonic() + WORD_SECONDS
            keys = [f"heard/{index}" for index in range(1, self.count)]
            with contextlib.suppress(RuntimeError):
                while not store.check(keys) and time.monotonic() < until:
                    time.sleep(POLL_SECONDS)
        os._exit(status)

    def fails(self, error: BaseException) -> BaseException | None:
        """To be said of an error that ends this rank: what is to be shown of it here, if anything. The first to fail shows it."""
        if getattr(error, "anyfit_rank", self.index) != self.index:
            return None
        if not self.claims(error):
            return None
        shown = error if not is_of_collective(error) else LostRankError(self._of_lost(error))
        with contextlib.suppress(RuntimeError):
            if self._store.compare_set("shown", "", str(self.index)).decode() != str(self.index):
                return None
        return shown

    def claims(self, error: BaseException) -> bool:
        """Whether this rank is the first to fail. All others end from here on."""
        self._is_failing = True
        if self._has_heard:
            return False
        try:
            if is_of_collective(error) and self._hears_of_failure(WORD_SECONDS):
                return bool(json.loads(self._store.get("failed"))["rank"] == self.index)
            text = f"{type(error).__name__}: {error}"
            mine = json.dumps({"rank": self.index, "error": text})
            return bool(json.loads(self._store.compare_set("failed", "", mine))["rank"] == self.index)
        except RuntimeError:  # the store is gone with its rank
            return True

    def _hears_of_failure(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._store.check(["failed"]):
                return True
            time.sleep(POLL_SECONDS)
        return False

    def _of_lost(self, error: BaseException) -> str:
        """Of a collective that failed because nobody is at its other end."""
        position = self.look()
        gone = self._without_beats(self._store, 3 * BEAT_SECONDS)
        who = _ranks_in_words(gone) if gone else "another rank"
        waited = f" ({'; '.join(position.waits.values())})" if position.waits else ""
        return (
            f"{who} {'are' if len(gone) > 1 else 'is'} gone without a word, as a process is that was killed (for want of host "
            f"memory, or with its machine); rank {self.index} was {position.doing}{waited}: {str(error).splitlines()[0]}"
        )

    def _without_beats(self, store: Any, seconds: float) -> list[int]:
        """Ranks that do not beat for so long."""
        keys = [f"at/{index}" for index in range(self.count)]
        try:
            before = [store.get(key) if store.check([key]) else b"" for key in keys]
            time.sleep(seconds)
            after = [store.get(key) if store.check([key]) else b"" for key in keys]
        except RuntimeError:
            return []
        return [index for index in range(self.count) if index != self.index and before[index] == after[index]]

    def show(self, error: BaseException, in_words: Callable[[BaseException], tuple[str | None, int]]) -> int:
        """Shows an error that ends this rank, unless another one does; the status to end with. `in_words` has a line in place of
        its traceback, or none, and the status."""
        shown = self.fails(error)
        if shown is None:
            time.sleep(QUIET_SECONDS)
            return QUIET
        line, status = (str(shown), 1) if shown is not error else in_words(error)
        if line is None:
            self._shown_before(type(error), error, error.__traceback__)
        else:
            print(f"anyfit: {line}", file=sys.stderr, flush=True)
        return status

    def _hook(self, _kind: type[BaseException], error: BaseException, _trace: TracebackType | None) -> None:
        """What Python does with an error that nobody caught."""
        self.end(self.show(error, lambda _: (None, 1)))

    # ------------------------------------------------------------------ the thread that beats

    def beat(self, store: Any, watch: Watch) -> None:
        """Tells where this rank is, and looks whether it should be anywhere at all."""
        position = self.look()
        if self._waits:
            position = Position(position.doing, {**position.waits, "": self._waits})
        watch.beats += 1
        told = {"beat": watch.beats, "doing": position.doing, "waits": list(position.waits.values())}
        store.set(f"at/{self.index}", json.dumps(told))
        if store.check(["failed"]):
            self._hear(store)
            return
        waited = watch.waited(self._acts, position.waits)
        longest = max((seconds for kind, seconds in waited.items() if kind), default=0.0)
        if any(seconds > (DEVICE_SECONDS if kind == "device" else WORD_SECONDS) for kind, seconds in waited.items() if kind):
            self._heed_error_of_another(store, position)
        if longest > self.hang_seconds:
            self._end_of_hang(store, position, longest)
        if max(waited.values(), default=0.0) > PATIENCE_SECONDS:
            gone = watch.gone(store, self.count, self.index)
            if gone:
                who = (
                    f"{_ranks_in_words(gone)} {'have' if len(gone) > 1 else 'has'} given no sign of life for {GONE_SECONDS:.0f} s"
                )
                self._end_with(
                    store, f"{who}, and rank {self.index} waits {position.doing}: {'; '.join(position.waits.values())}"
                )

    def _heed_error_of_another(self, store: Any, position: Position) -> None:
        """One that caught an error of its own does not come to what this rank waits for."""
        if not store.check(["erred"]):
            return
        word = json.loads(store.get("erred"))
        if word["rank"] == self.index or not self._forgiven < word["act"] < self._acts or self._erred == word["act"]:
            return
        self._end_with(
            store,
            f"rank {word['rank']} failed when about to {word['what']}, and went on: {word['error']}. Rank {self.index} waits for "
            f"it {position.doing}: all ranks make a step, or none. Let the error end the run, or catch it on all ranks",
        )

    def _hear(self, store: Any) -> None:
        """Of a failure: this process ends by itself, or is ended."""
        failed = json.loads(store.get("failed"))
        if failed["rank"] == self.index:
            self._stop.set()
            return
        self._has_heard = True
        store.set(f"heard/{self.index}", "")
        if self._stop.wait(GRACE_SECONDS):
            return
        with contextlib.suppress(RuntimeError):
            self._show_for_another(store, failed)
        self.end(QUIET)

    def _show_for_another(self, store: Any, failed: Mapping[str, Any]) -> None:
        if store.compare_set("shown", "", str(self.index)).decode() == str(self.index):  # whoever failed has not said it
            print(f"anyfit: rank {failed['rank']} failed: {failed['error']}", file=sys.stderr, flush=True)

    def _end_of_hang(self, store: Any, position: Position, seconds: float) -> None:
        mine = f"rank {self.index} has waited {seconds:.0f} s, {position.doing}, for: {'; '.join(position.waits.values())}"
        others = []
        for index in range(self.count):
            if index != self.index and store.check([f"at/{index}"]):
                at = json.loads(store.get(f"at/{index}"))
                waits = f", waiting for: {'; '.join(at['waits'])}" if at["waits"] else ""
                others.append((f"{at['doing']}{waits}", index))
        here = f"{position.doing}, waiting for: {'; '.join(position.waits.values())}"
        elsewhere = [f"rank {index} is {where}" for where, index in others if where != here]
        found = ". ".join([mine, *elsewhere[:8]]) if elsewhere else f"{mine}. All other ranks wait for the same"
        self._end_with(store, f"{found}. A rank that may take longer: anyfit.start(hang_seconds=) or --hang-seconds")

    def _end_with(self, store: Any, message: str) -> None:
        mine = json.dumps({"rank": self.index, "error": message})
        if json.loads(store.compare_set("failed", "", mine))["rank"] != self.index:
            return  # another one says it
        store.set("shown", str(self.index))
        print(f"anyfit: {message}", file=sys.stderr, flush=True)
        self.end(1)


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


class Watch:
    """What the beating thread has seen so far."""

    def __init__(self) -> None:
        self.beats = 0
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


def _beat(team: weakref.ref[Team], store: Any, stop: threading.Event) -> None:
    watch = Watch()
    while not stop.wait(BEAT_SECONDS):
        mine = team()
        if mine is None:
            return
        try:
            mine.beat(store, watch)
        except RuntimeError as error:
            if stop.wait(GRACE_SECONDS + WORD_SECONDS) or mine._is_over:
                return
            # The store is gone, with rank 0 or whoever launched the ranks; this one has had time to end by itself.
            print(f"anyfit: rank {mine.index} has lost the others: {str(error).splitlines()[0]}", file=sys.stderr, flush=True)
            mine.end(QUIET)
        del mine


def is_of_collective(error: BaseException) -> bool:
    """Whether it says no more than that another rank is not there."""
    while error.__cause__ is not None:
        error = error.__cause__
    of_gloo = isinstance(error, RuntimeError) and re.search(r"gloo|onnection (closed|reset|refused)|Broken pipe", str(error))
    return isinstance(error, dist.DistError | LostRankError) or bool(of_gloo)


def _pickled(error: BaseException) -> bytes:
    """An error for other ranks; in words, where it cannot travel."""
    try:
        sent = pickle.dumps((False, error))
        pickle.loads(sent)
    except Exception:
        sent = pickle.dumps((False, RuntimeError(f"{type(error).__name__} on rank 0: {error}")))
    return sent


def _ranks_in_words(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"


# ---------------------------------------------------------------------- meeting


def join(index: int, count: int, address: tuple[str, int], device: str, hang_seconds: float, seconds: float = 600.0) -> Team:
    """Meets the other ranks, at an address that all know. `device` names what this one computes on: "cpu", or a GPU by its UUID.

    Ranks that each have a GPU of their own talk through NCCL; on CPUs, and where several share a GPU, through gloo.
    """
    os.environ.update(MASTER_ADDR=address[0], MASTER_PORT=str(address[1]))
    limit = timedelta(seconds=seconds)
    try:
        store, _, _ = next(iter(_dist.rendezvous(f"env://?rank={index}&world_size={count}", timeout=limit)))
    except dist.DistError as error:
        raise LostRankError(
            f"rank {index} of {count} did not meet the others at {address[0]}:{address[1]} within {seconds:.0f} s: {error}"
        ) from None
    place = f"{socket.gethostname()} {device}"
    try:
        store = _fresh(store, index, count, limit)
        store.set(f"place/{index}", place)
        places = [store.get(f"place/{each}").decode() for each in range(count)]
    except dist.DistError as error:
        raise LostRankError(f"rank {index} of {count} waited {seconds:.0f} s for the others: {error}") from None
    has_own_gpus = device != "cpu" and len(set(places)) == count
    dist.init_process_group(
        "nccl" if has_own_gpus else "gloo",
        store=_dist.PrefixStore("group", store),
        rank=index,
        world_size=count,
        timeout=timedelta(seconds=hang_seconds + MARGIN_SECONDS),
    )
    return Team(hang_seconds, ends_process=True, place=place, made_group=True)


def _fresh(store: Any, index: int, count: int, limit: timedelta) -> Any:
    """The part of a store that these processes have to themselves. torchrun's outlives ranks that are started again, and holds
    what they had written before: so each asks under a name that nobody else ever had, and rank 0 tells it the part's."""
    mine = uuid.uuid4().hex
    store.set(f"anyfit/asks/{index}", mine)
    if index:
        store.wait([f"anyfit/told/{mine}"], limit)
        part, _, ranks = store.get(f"anyfit/told/{mine}").decode().partition(" ")
        if int(ranks) != count:
            raise ValueError(f"rank {index} is one of {count} (WORLD_SIZE, or SLURM_NTASKS), and rank 0 of {ranks}: set it alike")
        store.set(f"anyfit/{part}/knows/{index}", "")
    else:
        part, until = mine, time.monotonic() + limit.total_seconds()
        while missing := [each for each in range(1, count) if not store.check([f"anyfit/{part}/knows/{each}"])]:
            if time.monotonic() > until:
                raise dist.DistStoreError(f"{_ranks_in_words(missing)} did not come")
            for each in missing:  # who asks may be one that is no more: it is asked again
                if store.check([f"anyfit/asks/{each}"]):
                    store.set(f"anyfit/told/{store.get(f'anyfit/asks/{each}').decode()}", f"{part} {count}")
            time.sleep(POLL_SECONDS)
    return _dist.PrefixStore(f"anyfit/{part}", store)
