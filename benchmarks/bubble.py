"""Do the ranks of a pipeline wait as long, hold as much and take the time that their schedule says?

    python -m benchmarks.bubble [--rounds 5] [--record]

The load is synthetic: each stage is one block that sleeps in forward and, twice as long, in backward, and keeps a tensor from the
one to the other. So any number of ranks fits on any machine, and what is measured is the engine: a real run, with its sends over
gloo, its exchange at the step's end and its update. Beside it stands what `values/schedule.py` says, by which plans are made, of
passes that take the seconds that they took by themselves, without what they waited for, and sends that take as long as from the
end of a pass to where another rank, which waits for it, goes on:

    step      seconds from `run.step` to its end                               `play`
    bubble    the share of the ranks' time from the first pass to the last     `play`, less what the passes take
              that is not spent in passes
    held      the most tensors of a stage that wait for its backward at once   `in_flight`

Of passes that take exactly as long as their blocks sleep, where stages are even and the micro-batches make whole rounds, `play`
is the closed formula (m v + p - 1) (f + b); it is held to that here too. Figures are of the round that took least: what else a
machine does makes sleepers wake late.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import anyfit
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from anyfit.stages.post import Key
from anyfit.staging import look
from anyfit.values.schedule import in_flight, play, table

from . import record
from .by_hand import hand_written
from .ranks import in_processes

FORWARD, BACKWARD = 0.06, 0.12  # seconds of a rank for a micro-batch, over all of its stages
KEPT = 2**16  # elements
WIDTH = 8


@dataclass(frozen=True)
class Case:
    ranks: int
    chunks: int  # stages a rank
    micro_batches: int
    slower: tuple[float, ...] = ()  # by stage, how many times as long as the others; none: all alike

    @property
    def stages(self) -> int:
        return self.ranks * self.chunks

    @property
    def seconds(self) -> Seconds:
        """By stage, of forward and backward."""
        slower = self.slower or (1.0,) * self.stages
        return [(each * FORWARD / self.chunks, each * BACKWARD / self.chunks) for each in slower]

    @property
    def name(self) -> str:
        kind = "1F1B" if self.chunks == 1 else f"interleaved, {self.chunks} stages a rank"
        return f"{self.ranks} ranks, {self.micro_batches} micro-batches, {kind}" + (", uneven" if self.slower else "")


CASES = [
    Case(2, 1, 4),
    Case(2, 1, 8),
    Case(4, 1, 8),
    Case(4, 1, 8, (1.0, 1.0, 0.5, 1.5)),
    Case(2, 2, 8),
    Case(4, 2, 8),
]


Seconds = list[tuple[float, float]]  # by stage, of forward and backward


@dataclass(frozen=True)
class Figures:
    step_seconds: float
    bubble: float
    held: tuple[int, ...]  # by stage


def simulated(case: Case, seconds: Seconds, send: float = 0.0) -> Figures:
    forward, backward = zip(*seconds, strict=True)
    plays = table(case.ranks, case.stages, case.micro_batches)
    step = play(plays, forward, backward, send)
    busy = case.micro_batches * (sum(forward) + sum(backward))
    return Figures(step, 1 - busy / (case.ranks * step), in_flight(plays, case.stages))


def closed(case: Case) -> float | None:
    """Seconds by the formula, where there is one."""
    if case.slower or (case.chunks > 1 and case.micro_batches % case.ranks):
        return None
    return (case.micro_batches * case.chunks + case.ranks - 1) * (FORWARD + BACKWARD) / case.chunks


# ---------------------------------------------------------------------- the load


@dataclass
class Held:
    """Tensors of a block that are still there."""

    storages: list[weakref.ref[torch.UntypedStorage]] = field(default_factory=list)
    most: int = 0

    def note(self, tensor: Tensor) -> None:
        self.storages = [each for each in self.storages if each() is not None] + [weakref.ref(tensor.untyped_storage())]
        self.most = max(self.most, len(self.storages))


class Sleeping(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, block: Block) -> Tensor:
        time.sleep(block.seconds[0])
        kept = torch.ones(KEPT)
        block.held.note(kept)
        ctx.save_for_backward(kept)
        ctx.seconds = block.seconds[1]
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        time.sleep(ctx.seconds)
        return gradients[0], None


class Block(nn.Module):
    def __init__(self, seconds: tuple[float, float]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.seconds, self.held = seconds, Held()

    def forward(self, x: Tensor) -> Tensor:
        if x.device.type == "meta" or type(x) is not Tensor:  # it is looked at, on a tensor without numbers
            return x * self.scale
        found: Tensor = Sleeping.apply(x * self.scale, self)  # type: ignore[no-untyped-call]
        return found


class Chain(nn.Module):
    def __init__(self, case: Case) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(each) for each in case.seconds)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def started(case: Case) -> Run:
    rows = case.micro_batches
    job = anyfit.Job(
        model=lambda: Chain(case),
        loss=lambda model, x: model(x).square().mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-3),
        sample=torch.randn(rows, WIDTH),
        batch_size=rows,
        precision="fp32",
        agree=["mean-of-micro-batches"],
    )
    plan = hand_written(
        job,
        ranks=case.ranks,
        pipeline=case.ranks,
        accumulation=case.micro_batches,
        stages=tuple((each, each) for each in range(case.stages)),
    )
    looked = look(job, plan)
    ranks = Ranks.of_process_group()
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks, looked=looked))


@dataclass
class Clock:
    """Of one rank, in one step."""

    passes: dict[tuple[str, int], list[float]] = field(default_factory=dict)  # by kind and stage, without what they wait for
    ends: dict[tuple[str, int, int], float] = field(default_factory=dict)  # by kind, stage and micro-batch
    takes: dict[tuple[str, int, int], tuple[float, float]] = field(default_factory=dict)  # of whose pass, from when to when
    waited: float = 0.0  # in the pass under way
    began: float = math.inf  # the first pass

    @contextmanager
    def watching(self, pipe: Any) -> Iterator[None]:
        def timing(kind: str, function: Any) -> Any:
            def called(stage: int, micro_batch: int, *rest: Any) -> Any:
                self.waited, began = 0.0, time.perf_counter()
                self.began = min(self.began, began)
                found = function(stage, micro_batch, *rest)
                ended = self.ends[kind, stage, micro_batch] = time.perf_counter()
                self.passes.setdefault((kind, stage), []).append(ended - began - self.waited)
                return found

            return called

        def taking(function: Any) -> Any:
            def called(key: Key) -> Any:
                began = time.perf_counter()
                found = function(key)
                ended = time.perf_counter()
                self.takes[key.of, key.source, key.micro_batch] = began, ended
                self.waited += ended - began
                return found

            return called

        passes, post = vars(pipe), vars(pipe._post)
        passes |= {"forward": timing("forward", pipe.forward), "backward": timing("backward", pipe.backward)}
        post["take"] = taking(pipe._post.take)
        try:
            yield
        finally:
            del passes["forward"], passes["backward"], post["take"]


def serve(rank: int, ranks: int, case: Case, rounds: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    told: list[tuple[float, Clock]] = []  # with the seconds of the step
    with started(case) as run:
        batch = torch.ones(case.micro_batches, WIDTH)
        for _ in range(rounds + 1):
            clock = Clock()
            dist.barrier()
            began = time.perf_counter()
            with clock.watching(run._engine.placed.stages.pipe):
                float(run.step(batch))
            told.append((time.perf_counter() - began, clock))
        blocks: Any = run.model.blocks
        mine = {at: blocks[at].held.most for at in range(rank, case.stages, ranks)}
    gathered: list[Any] = [None] * ranks
    dist.all_gather_object(gathered, (told[1:], mine))  # the first warms up
    if rank == 0:
        results.put(gathered)
    dist.destroy_process_group()


def measured(case: Case, rounds: int) -> tuple[Figures, Seconds, float]:
    """With what its passes took by themselves, and a send."""
    with tempfile.TemporaryDirectory() as folder:
        of_ranks = in_processes(serve, case.ranks, case, rounds, str(Path(folder) / "store"))
    held = {at: most for _, mine in of_ranks for at, most in mine.items()}
    all_rounds = list(zip(*(told for told, _ in of_ranks), strict=True))
    best = min(all_rounds, key=lambda each: max(seconds for seconds, _ in each))
    clocks = [clock for _, clock in best]
    passes = {key: seconds for clock in clocks for key, seconds in clock.passes.items()}
    ends = {key: end for clock in clocks for key, end in clock.ends.items()}  # processes of a machine share this clock
    until = max(ends.values()) - min(clock.began for clock in clocks)
    busy = sum(map(sum, passes.values()))
    sends = [ended - ends[key] for clock in clocks for key, (began, ended) in clock.takes.items() if began < ends[key] < ended]
    stages = range(case.stages)
    alone = [(statistics.mean(passes["forward", at]), statistics.mean(passes["backward", at])) for at in stages]
    figures = Figures(max(each for each, _ in best), 1 - busy / (case.ranks * until), tuple(held[at] for at in stages))
    return figures, alone, statistics.mean(sends)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows = []
    for case in CASES:
        found, seconds, send = measured(case, options.rounds)
        said, ideal, formula = simulated(case, seconds, send), simulated(case, case.seconds), closed(case)
        assert formula is None or abs(ideal.step_seconds / formula - 1) < 1e-9
        print(
            f"{case.name:<50}: step {found.step_seconds * 1e3:6.1f} ms, simulated {said.step_seconds * 1e3:6.1f} "
            f"({said.step_seconds / found.step_seconds - 1:+.1%}), of exact sleep {ideal.step_seconds * 1e3:6.1f}; "
            f"bubble {found.bubble:.2%}, {said.bubble:.2%} ({said.bubble / found.bubble - 1:+.1%}); "
            f"held {found.held}, {said.held}; a send {send * 1e3:.1f} ms",
            flush=True,
        )
        figures = {"measured": found, "simulated": said, "of_exact_sleep": ideal}
        rows.append(
            {"case": case.name, **asdict(case), "send_seconds": send, **{name: asdict(each) for name, each in figures.items()}}
        )
    if options.record:
        print(record.write("bubble", rows))


if __name__ == "__main__":
    main()
