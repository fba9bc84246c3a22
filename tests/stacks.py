"""A stack of like blocks between an embedding and a head, for tests of what is done with blocks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from tests.models import byte_batches, next_byte_loss

ROWS, WIDTH, LAYERS = 4, 16, 3
BLOCKS = tuple(f"blocks.{index}" for index in range(LAYERS))


class Stack(nn.Module):
    """`layer` makes a block of its number."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.blocks = nn.ModuleList(layer(index) for index in range(LAYERS))
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x)
        return logits


def stacked_job(model: Any, **options: Any) -> anyfit.Job:
    options = {
        "optimizer": lambda model: torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9),
        "precision": "fp32",
        "loss": next_byte_loss,
    } | options
    return anyfit.Job(model=model, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)
