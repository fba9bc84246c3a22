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

**Failures.** When a rank ends, the collectives of all others fail, with tracebacks that say nothing. So the first to fail says so
before it lets go of anything, and shows its error; the others end without a word. Of one that was killed, the first to notice
tells which is gone. A rank that is stuck in a collective, where no Python runs, is ended by the thread that beats.

**Acts.** Steps, saves and evaluations are collective: all ranks make the same ones in the same order. Each is entered under its
number before it begins: a rank that finds another act there has found the mistake before anything hangs. A rank whose data ends
first takes part, with nothing of its own, in the acts that it has not begun (`Run.close`). One that catches an error of its own
act goes on only if all others have failed in it too, at the same place: else it would meet them in an act they have not ended.
"""

from __future__ import annotations

import atexit
import hashlib
import itertools
import json
import os
import pickle
import socket
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from anyfit.placing.ranks import HANG_SECONDS, Ranks
from anyfit.values.job import Batch

from .acts import POLL_SECONDS, Act, Acts, Kind, LostRankError, Position, Post, Store, ranks_in_words
from .ending import Ending, Heartbeat
from .engine import Engine, Progress
from .extra_state import ExtraState
from .one_batch import different_batches, same_batch
from .rescue import Before

if TYPE_CHECKING:
    from .run import Run

MARGIN_SECONDS = 60.0  # a collective's own time limit is so much longer than the one that says what is waited for
T = TypeVar("T")
_dist: Any = dist
_numbers = itertools.count()


class Team:
    """All ranks of the process group. `ends_process`: a failure of another rank ends this process too."""

    def __init__(self, hang_seconds: float, *, ends_process: bool, place: str = "", made_group: bool = False) -> None:
        self.index, self.count = dist.get_rank(), dist.get_world_size()
        raw = _dist.PrefixStore(f"anyfit/{next(_numbers)}", distributed_c10d._get_default_store())
        self.store = Store(raw, self.index, self.count)
        self.acts = Acts(self.store)
        self.ending = Ending(self.store, self.acts, ends_process=ends_process, made_group=made_group)
        self.heartbeat = Heartbeat(self.store, self.acts, self.ending, hang_seconds)
        self._asked = itertools.count()  # of `from_first`, `agree` and `post`
        if ends_process:
            self.heartbeat.start()
            sys.excepthook = self.ending.hook
            atexit.register(self.ending.part)
        self.places = self._all("places", place)

    def from_first(self, make: Callable[[], T], what: str) -> T:
        """What rank 0 makes, on every rank; its error, on every rank."""
        key = f"first/{next(self._asked)}"
        if self.index:
            made, value = pickle.loads(self.store.await_key(key, f"{what} from rank 0"))
            if not made:
                value.anyfit_rank = 0  # who shows it
                raise value
            return value  # type: ignore[no-any-return]
        try:
            found = make()
        except Exception as error:
            self.store.raw.set(key, _pickled(error))
            raise
        self.store.raw.set(key, pickle.dumps((True, found)))
        return found

    def agree(self, facts: Mapping[str, str]) -> None:
        """Raises on every rank where facts differ, naming the rank that differs from rank 0."""
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

    def refusals(self, mine: str) -> list[str]:
        """What every rank has against a plan; nothing, where it has nothing."""
        return self._all("refusals", mine)

    def _all(self, what: str, mine: str) -> list[str]:
        key, ranks = f"facts/{next(self._asked)}", range(self.count)
        self.store.raw.set(f"{key}/{self.index}", mine)
        return [self.store.await_key(f"{key}/{index}", f"the {what} of rank {index}").decode() for index in ranks]

    def post(self) -> Post:
        """All ranks ask for the same ones, in the same order."""
        return Post(Store(self.store.raw.clone(), self.index, self.count), f"post/{next(self._asked)}")


def _pickled(error: BaseException) -> bytes:
    """An error for other ranks; its text, where it cannot be pickled."""
    try:
        sent = pickle.dumps((False, error))
        pickle.loads(sent)
    except Exception:
        sent = pickle.dumps((False, RuntimeError(f"{type(error).__name__} on rank 0: {error}")))
    return sent


def join(index: int, count: int, address: tuple[str, int], device: str, hang_seconds: float, seconds: float = 600.0) -> Team:
    """Meets the other ranks, at an address that all know. `device` is "cpu", or a GPU's UUID: ranks that each have their own GPU
    talk through NCCL; on CPUs, and where several share a GPU, through gloo."""
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
    """The part of a store that these processes have to themselves. torchrun's store outlives ranks that are restarted, and holds
    what they wrote before: so each asks under a name that nobody ever had, and rank 0 answers with the part's name."""
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
                raise dist.DistStoreError(f"{ranks_in_words(missing)} did not come")
            for each in missing:  # who asks may be one that is no more: it is asked again
                if store.check([f"anyfit/asks/{each}"]):
                    store.set(f"anyfit/told/{store.get(f'anyfit/asks/{each}').decode()}", f"{part} {count}")
            time.sleep(POLL_SECONDS)
    return _dist.PrefixStore(f"anyfit/{part}", store)


class Peers:
    """The other ranks of a run: what this one tells them, and how it takes part in what they still do."""

    def __init__(self, team: Team | None, ranks: Ranks) -> None:
        if team is None and ranks.are_several:
            team = Team(HANG_SECONDS, ends_process=False)
        self.team, self._ranks = team, ranks
        self.is_mute = False  # takes part in a step of the others, with nothing of its own
        self._has_told = False  # that ranks that hold the model with it were given other batches

    def begin(self, kind: Kind, which: object = "") -> None:
        if self.team is not None:
            self.team.acts.begin(Act(kind, str(which)))

    def one_batch(self, batch: Batch, engine: Engine, progress: Progress, wanted: int) -> Batch:
        """What all ranks that hold the model together see, of `wanted` samples."""

        def say(line: str) -> None:
            if not self._has_told:
                self._has_told = True
                progress.say(line)

        together = self._ranks.together
        rows = engine.job.rows(batch, wanted // together.n)
        return same_batch(batch, together, engine.device, say, rows=rows, wanted=wanted, is_mute=self.is_mute)

    def batches(self, batch: Batch, engine: Engine) -> list[Batch]:
        """All that the ranks which hold the model with this one were given, each once."""
        return different_batches(batch, self._ranks.together, engine.device, is_mute=self.is_mute)

    @contextmanager
    def telling(self) -> Iterator[None]:
        """Tells the others of an error on this rank, which they would wait for in vain."""
        try:
            yield
        except BaseException as error:
            if self.team is not None:
                self.team.acts.end_with(error, self._ranks.asked())
            raise

    def take_part(self, act: Act, run: Run, engine: Engine, extra: ExtraState) -> None:
        """Takes part in an act that the others have begun, with no data of its own."""
        job, model = engine.job, engine.model
        before = Before(model, job.loss, engine.device, extra)
        before.note_all()
        share = job.sample if job.split is not None else job.with_rows(job.sample, engine.plan.share)
        zeros = [parameter.register_hook(torch.zeros_like) for parameter in model.parameters() if parameter.requires_grad]
        self.is_mute = True
        try:
            match act.kind:
                case Kind.STEP:
                    run.step(share)
                case Kind.EVALUATE:
                    run.evaluate(share)
                case Kind.READ_WEIGHTS:
                    run.state_dict()
                case Kind.SAVE | Kind.BEGIN_TO_SAVE:
                    run.save(act.which, wait=act.kind is Kind.SAVE)
                case Kind.OPEN_WEIGHTS:
                    raise RuntimeError(f"another rank is about to {act}, and this one has left: all ranks do that together")
        finally:
            self.is_mute = False
            for hook in zeros:
                hook.remove()
            before.restore()


def position_of(engine: Engine | None, progress: Progress) -> Position:
    """Where a run is; chunks that it waits for with the names of their parameters."""
    if engine is None or progress.is_closed:
        return Position("at its end", {})
    chunks = engine.placed.state.chunks
    waits = {}
    for kind, label in dict(engine.ranks.doing).items():
        waits[str(kind)] = str(label)
        if label.chunk is not None and label.chunk < len(chunks):
            names = [slot.name for slot in chunks[label.chunk].chunk.slots]
            waits[str(kind)] += f" ({names[0]})" if len(names) == 1 else f" ({names[0]} to {names[-1]})"
    if engine.plan.pipeline > 1 and engine.placed.stages.pipe.waits:
        waits["pipeline"] = engine.placed.stages.pipe.waits
    if not waits and engine.device.type == "cuda" and progress.doing.phase.is_within_step:
        waits["device"] = "the GPU, which has been given collectives"  # they are not waited for where they are given
    return Position(str(progress.doing), waits)


def close_at_exit(run: Run) -> None:
    """At the end of a process of several ranks. One that ends without run.close() may still be needed by the others."""
    assert run.team is not None
    try:
        run.close()
    except Exception as error:  # Python would show it on every rank
        run.team.ending.end(run.team.ending.show(error, lambda _: (None, 1)))
