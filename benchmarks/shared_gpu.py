"""Do two ranks train a model, divided among them and offloaded, as one does alone?

    python -m benchmarks.shared_gpu [--model 1b] [--ranks 2] [--steps 5] [--record]

A GPT-2 of 1.1 billion parameters in fp32 with AdamW and clipping. One process trains it with everything on the device, each batch
in two passes. Then two ranks, which share the one GPU and meet over gloo, train it on the same batches, half of each: weights,
gradients and the optimizer's state divided between them, and all of it on the host. Losses of every step and the weights after
the last are compared. It is about numbers: collectives of ranks that share a GPU go through the host, and say nothing of speed.

    --model tiny    on a CPU, to see it run
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import anyfit
from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from anyfit.values.plan import Placement

from . import record
from .by_hand import hand_written
from .cases import gpt2
from .peers import MODELS, NO_DROPOUT, VOCABULARY
from .profiler import quickly_built
from .ranks import in_processes

CONFIGURATIONS = {"1b": gpt2(36, 1536, 24, vocab_size=VOCABULARY, n_positions=512, **NO_DROPOUT), "tiny": MODELS["tiny"]}
CHUNK_BYTES = {"1b": 128 * 2**20, "tiny": 2**15}
ROWS, LR = 4, 1e-4
Row = dict[str, Any]


def job_for(model: str) -> anyfit.Job:
    from transformers import AutoConfig

    configuration = CONFIGURATIONS[model]
    job = anyfit.Job.from_huggingface(
        AutoConfig.for_model("gpt2", **configuration),
        batch_size=ROWS,
        length=configuration["n_positions"],
        precision="fp32",
        clip_norm=1.0,
        optimizer=lambda built: torch.optim.AdamW(built.parameters(), lr=LR),
    )
    return quickly_built(job)


def plan_for(job: anyfit.Job, model: str, ranks: int, passes: int) -> anyfit.Plan:
    placement = Placement()
    if ranks > 1:
        placement = Placement("host", "host", "host", "host", weight_shards=ranks, gradient_shards=ranks, optimizer_shards=ranks)
    blocks = {f"transformer.h.{index}": "recompute" for index in range(CONFIGURATIONS[model]["n_layer"])}
    options: Any = {
        "chunk_bytes": CHUNK_BYTES[model],
        "slots": 6,
        "prefetch": 2,
        "activations": blocks,
        "ranks": ranks,
        "accumulation": passes,
    }
    return hand_written(job, placement, **options, device_bytes=2**36, host_bytes=2**36)


def train(rank: int, count: int, model: str, steps: int, passes: int, folder: str, results: Any) -> None:
    """A rank, which goes through its part of a batch in so many passes. The only one keeps its weights in the folder; the first
    of several compares its own with them."""
    torch.set_num_threads(4 if torch.cuda.is_available() else 1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    if count > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=count)
    job = job_for(model)
    plan, ranks = plan_for(job, model, count, passes), Ranks.of_process_group() if count > 1 else Ranks()
    torch.manual_seed(job.seed)
    with Run(job, plan, place(job, plan, job.build(), device, ranks=ranks)) as run:
        generator = torch.Generator().manual_seed(1)
        losses, seconds = [], []
        for _ in range(steps):
            ids = torch.randint(
                0, CONFIGURATIONS[model]["vocab_size"], (ROWS, job.sample["input_ids"].shape[1]), generator=generator
            )
            mine = ids.chunk(count)[rank]
            begun = time.perf_counter()
            losses.append(float(run.step({"input_ids": mine, "labels": mine})))
            seconds.append(time.perf_counter() - begun)
            if rank == 0:
                print(f"  {count} at work: step {len(losses)}, {seconds[-1]:.2f} s, loss {losses[-1]:.6f}", flush=True)
        held = {"device": run._engine.placed.device_bytes, "host": run._engine.placed.host_bytes}
        weights = run.state_dict()
    row: Row = {"losses": losses, "step_seconds": statistics.median(seconds[1:]), "held_bytes": held}
    if count == 1:
        save_file({name: tensor.clone().contiguous() for name, tensor in weights.items()}, f"{folder}/alone.safetensors")
    elif rank == 0:
        row["apart"] = apart(weights, load_file(f"{folder}/alone.safetensors"))
    if rank == 0:
        results.put(row)
    if count > 1:
        dist.barrier()
        dist.destroy_process_group()


def apart(mine: dict[str, torch.Tensor], alone: dict[str, torch.Tensor]) -> dict[str, float]:
    """How far the weights are from each other: of each tensor, normwise. Biases of keys have no gradient but rounding's."""
    assert mine.keys() == alone.keys()
    return {
        name: float((mine[name] - weights).double().norm() / weights.double().norm().clamp_min(1e-12))
        for name, weights in alone.items()
        if not name.endswith("c_attn.bias")
    }


def compared(model: str, ranks: int, steps: int) -> Row:
    with tempfile.TemporaryDirectory() as folder:
        alone = in_processes(train, 1, model, steps, ranks, folder)
        together = in_processes(train, ranks, model, steps, 1, folder)
    distances = together.pop("apart")
    worst = max(distances, key=lambda name: distances[name])
    pairs = zip(alone["losses"], together["losses"], strict=True)
    return {
        "model": model,
        "ranks": ranks,
        "alone": alone,
        "together": together,
        "losses_apart": max(abs(mine / other - 1) for mine, other in pairs),
        "weights_apart": distances[worst],
        "worst": worst,
        "tensors": len(distances),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(CONFIGURATIONS), default="1b")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    found = compared(options.model, options.ranks, options.steps)
    for name in ("alone", "together"):
        row = found[name]
        held = ", ".join(f"{size / 2**30:.2f} GiB on the {tier}" for tier, size in row["held_bytes"].items())
        print(f"{name:9} {row['step_seconds']:7.3f} s a step, {held} a rank, losses {[round(loss, 6) for loss in row['losses']]}")
    print(f"losses apart by {found['losses_apart']:.2e}, weights by {found['weights_apart']:.2e} at most ({found['worst']})")
    if options.record:
        print(record.write("shared-gpu", found))


if __name__ == "__main__":
    main()
