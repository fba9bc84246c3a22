"""What does a step over several ranks take, beside FSDP2 and DDP with the same division of the same model?

    python -m benchmarks.ranks [--ranks 2 4] [--rounds 11] [--record]

Each rank is a process with one thread; they meet over gloo on this machine. All train the demo's GPT in fp32 with AdamW and
clipping on the same batches, everything resident, nothing recomputed:

    whole           every rank has all state, gradients are summed               DDP                               anyfit
    gathered once   all state divided, weights put together once a step          FSDP2, reshard_after_forward=False   all slots
    gathered twice  … for forward and for backward again                         FSDP2, reshard_after_forward=True    few slots

Rounds of each are interleaved; the figure is the median of the rounds' ratios, which stands a machine that has other work too. A
round of anyfit ends when nothing is under way any more, weights that it fetches ahead for its next round included.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import anyfit
from anyfit import demo
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written

WIDTH, LAYERS, LENGTH, ROWS = 512, 6, 128, 4  # rows a rank
STEPS = 2  # a round
CHUNK_BYTES = 13 * 2**20  # a block's, as FSDP2 has it
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


# ---------------------------------------------------------------------- anyfit


def ours(job: anyfit.Job, placement: Placement, *, chunk_bytes: int = CHUNK_BYTES, slots: int = 64, prefetch: int = 2) -> Run:
    ranks = Ranks.of_process_group()
    plan = hand_written(job, placement, chunk_bytes=chunk_bytes, slots=slots, prefetch=prefetch, ranks=ranks.count)
    torch.manual_seed(job.seed)
    return Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks))


def divided(shards: int) -> Placement:
    return Placement(weight_shards=shards, gradient_shards=shards, optimizer_shards=shards)


def come_to_rest(run: Run) -> None:
    residency = run._engine.placed.residency
    residency.settle_all()
    for slot in residency.slots.all:
        if slot.ticket is not None:
            slot.ticket.wait()


# ---------------------------------------------------------------------- a rank


def contenders(ranks: int, closing: ExitStack) -> Iterator[tuple[str, str, Step, Callable[[], None]]]:
    """(division, name, a step, what ends a round)."""
    job = job_for(ranks)

    def of_anyfit(division: str, placement: Placement, **options: int) -> tuple[str, str, Step, Callable[[], None]]:
        run = closing.enter_context(ours(job, placement, **options))
        return division, "anyfit", lambda part: float(run.step(part)), lambda: come_to_rest(run)

    def nothing() -> None:
        return

    yield "whole", "peer", peer(job, ddp), nothing
    yield of_anyfit("whole", Placement())
    yield "gathered once", "peer", peer(job, lambda model: fsdp2(model, reshard_after_forward=False)), nothing
    yield of_anyfit("gathered once", divided(ranks))
    yield "gathered twice", "peer", peer(job, lambda model: fsdp2(model, reshard_after_forward=True)), nothing
    yield of_anyfit("gathered twice", divided(ranks), slots=3, prefetch=2)


def measure(ranks: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """Seconds of a step in each round."""
    generator = torch.Generator().manual_seed(1)
    batches = [torch.randint(0, 256, (ROWS * ranks, LENGTH + 1), generator=generator) for _ in range(STEPS)]
    parts = [batch.chunk(ranks)[dist.get_rank()] for batch in batches]
    found: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as closing:
        there = list(contenders(ranks, closing))
        for number in range(rounds + 2):  # two to warm up
            for division, name, step, end in there:
                dist.barrier()
                began = time.perf_counter()
                for part in parts:
                    step(part)
                end()
                dist.barrier()
                if number >= 2:
                    found.setdefault((division, name), []).append((time.perf_counter() - began) / STEPS)
    return found


def serve(rank: int, ranks: int, rounds: int, store: str, results: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    found = measure(ranks, rounds)
    if rank == 0:
        results.put(found)
    dist.destroy_process_group()


def measured(ranks: int, rounds: int) -> dict[tuple[str, str], list[float]]:
    """In so many processes."""
    with tempfile.TemporaryDirectory() as folder:
        found: dict[tuple[str, str], list[float]] = in_processes(serve, ranks, rounds, str(Path(folder) / "store"))
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
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    rows = []
    for ranks in options.ranks:
        seconds = measured(ranks, options.rounds)
        for division in dict.fromkeys(division for division, _ in seconds):
            mine, theirs = (statistics.median(seconds[division, name]) for name in ("anyfit", "peer"))
            pairs = zip(seconds[division, "anyfit"], seconds[division, "peer"], strict=True)
            ratio = statistics.median(one / other for one, other in pairs)
            name = "DDP" if division == "whole" else "FSDP2"
            print(
                f"{ranks} ranks, {division:<14}: {name:<5} {theirs * 1e3:7.1f} ms, anyfit {mine * 1e3:7.1f} ms, "
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
