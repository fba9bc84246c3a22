"""A function that returns a Job is all the command line needs: anyfit plan examples/jobs.py:classifier"""

import torch
from torch import nn

import anyfit


def classifier() -> anyfit.Job:
    return anyfit.Job(
        model=lambda: nn.Sequential(*(nn.Sequential(nn.Linear(512, 512), nn.ReLU()) for _ in range(8)), nn.Linear(512, 10)),
        loss=lambda model, batch: nn.functional.cross_entropy(model(batch["x"]), batch["y"]),
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample={"x": torch.randn(64, 512), "y": torch.zeros(64, dtype=torch.long)},
        batch_size=64,
        precision="fp32",
    )
