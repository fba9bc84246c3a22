"""Small models that between them hold what makes training hard: ties, frozen and unused weights, running statistics, branches."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyfit.demo import GPT

VOCABULARY = 256


class Tangled(nn.Module):
    """Tied embedding and head, a frozen layer, a weight no batch uses, a buffer, a layer called twice."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.twice = nn.Linear(width, width)
        self.unused = nn.Linear(width, width)
        self.norm = nn.LayerNorm(width)
        self.register_buffer("shift", torch.full((width,), 0.1))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.frozen(self.embed(ids))
        x = x + self.shift.to(x.dtype)
        x = x + self.twice(F.gelu(self.twice(x)))
        return self.head(self.norm(x))


class Convolutional(nn.Module):
    """Running statistics and floating inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.layers = nn.Sequential(
            *(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU()) for _ in range(2))
        )
        self.head = nn.Linear(8, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.layers(self.stem(images)).mean((2, 3)))


def tiny_gpt() -> GPT:
    return GPT(width=32, layers=2, heads=2, length=16)


def next_byte_loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits = model(ids[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())


def padded_loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
    """Sum and weight; bytes of value 0 are padding."""
    logits, wanted = model(ids[:, :-1]), ids[:, 1:].flatten()
    total = F.cross_entropy(logits.flatten(0, 1).float(), wanted, ignore_index=0, reduction="sum")
    return total, (wanted != 0).sum()


def image_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["images"]).float(), batch["labels"])


def byte_batches(count: int, rows: int, length: int = 17, seed: int = 1) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCABULARY, (rows, length), generator=generator) for _ in range(count)]


def image_batches(count: int, rows: int, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "images": torch.randn(rows, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 10, (rows,), generator=generator),
        }
        for _ in range(count)
    ]
