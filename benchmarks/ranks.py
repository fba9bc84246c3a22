"""What does a step over several ranks take, beside FSDP2 and DDP with the same division of the same model?

    python -m benchmarks.ranks [--ranks 2 4] [--rounds 11] [--steps 2] [--divisions stages] [--record]

Each rank is a process with one thread; they meet over gloo on this machine. All train the demo's GPT in fp32 with AdamW and
clipping on the same batches, everything resident, nothing recomputed:

    whole           every rank has all state, gradients are summed               DDP                               anyfit
    gathered once   all state divided, weights put together once a step          FSDP2, reshard_after_forward=False   all slots
    gathered twice  … for forward and for backward again                         FSDP2, reshard_after_forward=True    few slots
    stages          a pipeline, 1F1B with 4 micro-batches                        PipelineStage, Schedule1F1B          as many

torch's stages cannot hold a weight together, so the head of the model in stages has one of its own. There are stages where the
ranks divide the layers evenly; all of them see the whole batch.

Rounds of each are interleaved; the figure is the median of the rounds' ratios, which stands a machine that has other work too. A
round of anyfit ends when nothing is under way any more, weights that it fetches ahead for its next round included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel

import anyfit
from anyfit import demo
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from anyfit.staging import look
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written

WIDTH, LAYERS, LENGTH, ROWS = 512, 6, 128, 4  # rows a rank
MICRO_BATCHES = 4  # of a pipeline
CHUNK_BYTES = 13 * 2**20  # a block's, as FSDP2 has it
STAGES = "stages"
DIVISIONS = ("whole", "gathered once", "gathered twice", STAGES)
PEERS = {"whole": "DDP", STAGES: "torch's"}  # others: FSDP2
Step = Callable[[Tensor], float]  # from a rank's part of the batch to the loss of all


def job_for(ranks: int) -> anyfit.Job:
    return anyfit.Job(
        model=lambda: demo.GPT(WIDTH, LAYERS, 8, LENGTH),
        loss=demo.loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=torch.zeros(ROWS * ranks, LENGTH + 1, dtype=torch.long),
        batch_size=ROWS * ranks,
        precision="fp32",
        clip_norm=1.0,
    )


# ---------------------------------------------------------------------- the peers


def peer(job: anyfit.Job, wrap: Callable[[Any], nn.Module]) -> Step:
    """A plain loop over a model that a peer has wrapped."""
    torch.manual_seed(job.seed)
    model = wrap(job.build())
    optimizer = job.optimizer(model)
    count = dist.get_world_size()

    def step(part: Tensor) -> float:
        loss: Any = job.loss(model, part)
        loss.backward()
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / count
        dist.all_reduce(mean)  # anyfit's steps tell the loss of all ranks too
        return float(mean)

    return step


def ddp(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model)


def fsdp2(model: Any, *, reshard_after_forward: bool) -> nn.Module:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh, reshard_after_forward=reshard_after_forward)
    fully_shard(model, mesh=mesh, reshard_after_forward=reshard_after_forward)
    return model  # type: ignore[no-any-return]


class Untied(demo.GPT):
    """With a head of its own."""

    def __init__(self) -> None:
        super().__init__(WIDTH, LAYERS, 8, LENGTH)
        self.head.weight = nn.Parameter(self.head.weight.detach().clone())


class Part(nn.Module):
    """What one of so many ranks has of the model."""

    def __init__(self, model: demo.GPT, rank: int, ranks: int) -> None:
        super().__init__()
        own = LAYERS // ranks
        self.enter = nn.ModuleList([model.bytes, model.places] if rank == 0 else [])
        self.blocks = model.blocks[rank * own : (rank + 1) * own]
        self.leave = nn.Sequential(*([model.norm, model.head] if rank == ranks - 1 else []))

    def forward(self, x: Tensor) -> Tensor:
        if self.enter:
            x = self.enter[0](x) + self.enter[1](torch.arange(x.shape[1]))
        for block in self.blocks:  # type: ignore[union-attr]
            x = block(x)
        found: Tensor = self.leave(x)
        return found


def torchs_stages(job: anyfit.Job) -> Step:
    """A plain loop over torch's own stages, which clips by the norm of all."""
    torch.manual_seed(job.seed)
    model: Any = job.build()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    part = Part(model, rank, ranks)
    stage = PipelineStage(part, rank, ranks, torch.device("cpu"))
    schedule = Schedule1F1B(
        stage, MICRO_BATCHES, lambda logits, ids: nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    )
    optimizer = job.optimizer(part)

    def step(batch: Tensor) -> float:
        losses: list[Tensor] = []
        given = (batch[:, :-1],) if rank == 0 else ()
        told: dict[str, Any] = {"target": batch[:, 1:], "losses": losses} if rank == ranks - 1 else {}
        schedule.step(*given, **told)
        if job.clip_norm is not None:
            norm = torch.nn.utils.get_total_norm([each.grad for each in part.parameters() if each.grad is not None])
            squares = norm.square()
            dist.all_reduce(squares)
            torch.nn.utils.clip_grads_with_norm_(part.parameters(), job.clip_norm, squares.sqrt())
        optimizer.step()
        optimizer.zero_grad()
        mean = torch.stack(losses).detach().mean() if losses else torch.zeros(())
        dist.all_reduce(mean)
        return float(mean)

    return step


# ---------------------------------------------------------------------- anyfit


def ours(job: anyfit.Job, placement: Placement, *, chunk_bytes: int = CHUNK_BYTES, slots: int = 64, prefetch: int = 2) -> Run:
    ranks = Ranks.of_process_group()
    plan = hand_written(job, placement, chunk_bytes=chunk_bytes, slots=slots, prefetch=prefetch, ranks=ranks.count)
    torch.manual_seed(job.seed)
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks))


def our_stages(job: anyfit.Job) -> Run:
    ranks = Ranks.of_process_group()
    own = LAYERS // ranks.count
    stages = tuple((rank * own, (rank + 1) * own - 1) for rank in range(ranks.count))
    options: Any = {"ranks": ranks.count, "pipeline": ranks.count, "stages": stages, "accumulation": MICRO_BATCHES}
    plan = hand_written(job, Placement(), chunk_bytes=CHUNK_BYTES, slots=64, **options)
    looked = look(job, plan)
    torch.manual_seed(job.seed)
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks, looked=looked))


def divided(shards: int) -> Placement:
    return Placement(weight_shards=shards, gradient_shards=shards, optimizer_shards=shards)


def come_to_rest(run: Run) -> None:
    residency = run._engine.placed.residency
    residency.settle_all()
    for slot in residency.slots.all:
        if slot.ticket is not None:
            slot.ticket.wait()


# ---------------------------------------------------------------------- a rank


def contenders(ranks: int, divisions: Sequence[str], closing: ExitStack) -> Iterator[tuple[str, str, Step, Callable[[], None]]]:
    """(division, name, a step, what ends a round)."""
    job = job_for(ranks)
    untied = replace(job, model=Untied)
    pairs: dict[str, tuple[Callable[[], Step], Callable[[], Run]]] = {
        "whole": (lambda: peer(job, ddp), lambda: ours(job, Placement())),
        "gathered once": (
            lambda: peer(job, lambda model: fsdp2(model, reshard_after_forward=False)),
            lambda: ours(job, divided(ranks)),
        ),
        "gathered twice": (
            lambda: peer(job, lambda model: fsdp2(model, reshard_after_forward=True)),
            lambda: ours(job, divided(ranks), slots=3, prefetch=2),
        ),
        STAGES: (lambda: torchs_stages(untied), lambda: our_stages(untied)),
    }

    def of_anyfit(run: Run) -> tuple[Step, Callable[[], None]]:
        return lambda part: float(run.step(part)), lambda: come_to_rest(run)

    for division in divisions:
        make_theirs, make_ours = pairs[division]
        yield division, "peer", make_theirs(), lambda: None
        yield division, "anyfit", *of_anyfit(closing.enter_context(make_ours()))


def measure(ranks: int, rounds: int, steps: int, divisions: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step in each round."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 256, (ROWS * ranks, LENGTH + 1), generator=generator) for _ in range(steps)]
    parts = [batch.chunk(ranks)[dist.get_rank()] for batch in batches]
    given = {STAGES: batches}
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as closing:
        there = list(contenders(ranks, divisions, closing))
        for number in range(rounds + 2):  # two to warm up
            for division, name, step, end in there:
                dist.barrier()
                began = time.perf_counter()
                for part in given.get(division, parts):
                    step(part)
                end()
                dist.barrier()
                if number >= 2:
                    found.setdefault((division, name), []).append((time.perf_counter() - began) / steps)
    return found


def serve(rank: int, ranks: int, rounds: int, steps: int, divisions: Sequence[str], store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = measure(ranks, rounds, steps, divisions)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def measured(ranks: int, rounds: int, steps: int, divisions: Sequence[str]) -> dict[tuple[str, str], list[float]]:
    """In so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[tuple[str, str], list[float]] = in_processes(
            serve, ranks, rounds, steps, divisions, str(Path(folder) / "store")
        )
    return found


def in_processes(work: Callable[..., None], ranks: int, *arguments: Any) -> Any:
    """What one of so many processes puts into a queue, each at work with its rank, their number, these and the queue."""
    context = get_context("spawn")
    results = context.Queue()
    processes = [context.Process(target=work, args=(rank, ranks, *arguments, results)) for rank in range(ranks)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    if any(process.exitcode for process in processes):
        raise RuntimeError(f"ranks ended with {[process.exitcode for process in processes]}")
    return results.get()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--steps", type=int, default=2, help="a round")
    parser.add_argument("--divisions", nargs="+", choices=DIVISIONS, default=DIVISIONS)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    rows = []
    for ranks in options.ranks:
        divisions = [each for each in options.divisions if each != STAGES or LAYERS % ranks == 0]
        seconds = measured(ranks, options.rounds, options.steps, divisions)
        for division in divisions:
            mine, theirs = (statistics.median(seconds[division, name]) for name in ("anyfit", "peer"))
            pairs = zip(seconds[division, "anyfit"], seconds[division, "peer"], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
            name = PEERS.get(division, "FSDP2")
            print(
                f"{ranks} ranks, {division:<14}: {name:<7} {theirs * 1e3:7.1f} ms, anyfit {mine * 1e3:7.1f} ms, "
                f"ratio {ratio:.3f}",
                flush=True,
            )
            rows.append(
                {
                    "ranks": ranks,
                    "division": division,
                    "peer": name,
                    "peer_seconds": theirs,
                    "anyfit_seconds": mine,
                    "ratio": ratio,
                }
            )
    if options.record:
        print(record.write("ranks", rows))


if __name__ == "__main__":
    main()
