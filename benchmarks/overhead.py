"""What does `run.step` cost over the same plain PyTorch loop, when everything is resident on one device?

    python -m benchmarks.overhead [--rounds 30] [--record]

Both train the demo's GPT in fp32 with AdamW in two groups, a scheduler and clipping, on the same batches, with the same
micro-batches. Rounds of each are interleaved; the figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor

import anyfit
from anyfit import demo

from . import record


def plain_step(job: anyfit.Job) -> Callable[[Tensor], object]:
    torch.manual_seed(job.seed)
    model = job.build()
    optimizer = job.optimizer(model)
    assert job.scheduler is not None
    assert job.clip_norm is not None
    scheduler, clip_norm = job.scheduler(optimizer), job.clip_norm

    def step(batch: Tensor) -> object:
        loss = job.loss(model, batch)
        assert isinstance(loss, Tensor)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()

    rows = []
    for batch_size, length in ((4, 32), (16, 128), (32, 128)):
        job = demo.job(batch_size=batch_size, length=length, steps=10_000)
        job = anyfit.Job(**{**vars(job), "micro_batch": batch_size})
        batches = [torch.randint(0, 256, (batch_size, length + 1)) for _ in range(4)]
        run = anyfit.start(job)
        steps = {"plain": plain_step(job), "anyfit": run.step}
        seconds: dict[str, list[float]] = {name: [] for name in steps}
        for round_number in range(options.rounds + 3):
            for name, step in steps.items():
                began = time.perf_counter()
                for batch in batches:
                    step(batch)
                if round_number >= 3:  # the first rounds warm up
                    seconds[name].append((time.perf_counter() - began) / len(batches))
        medians = {name: statistics.median(times) for name, times in seconds.items()}
        ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["anyfit"], seconds["plain"], strict=True))
        rows.append({"batch": batch_size, "length": length, **{f"{k}_seconds": v for k, v in medians.items()}, "ratio": ratio})
        print(
            f"batch {batch_size:>3} x {length:>4}: plain {medians['plain'] * 1e3:8.2f} ms, "
            f"anyfit {medians['anyfit'] * 1e3:8.2f} ms, ratio {ratio:.3f}"
        )
    if options.record:
        print(record.write("overhead", rows))


if __name__ == "__main__":
    main()
