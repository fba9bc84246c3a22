"""The built-in demo: a byte-level GPT that learns Python from the standard library's own source files.

They are on every machine, so nothing is downloaded. It is an ordinary user of the public names, and reads like one.
"""

from __future__ import annotations

import math
import sysconfig
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.optim import AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR

from .values.job import Job

WIDTH, LAYERS, HEADS = 128, 4, 4
LENGTH, BATCH, STEPS = 128, 32, 300
CORPUS_BYTES = 4_000_000


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm_attention = nn.LayerNorm(width)
        self.queries_keys_values = nn.Linear(width, 3 * width)
        self.mix = nn.Linear(width, width)
        self.norm_think = nn.LayerNorm(width)
        self.think = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        packed = self.queries_keys_values(self.norm_attention(x))
        q, k, v = packed.view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(mixed.transpose(1, 2).reshape(batch, length, width))
        thought: Tensor = self.think(self.norm_think(x))
        return x + thought


class GPT(nn.Module):
    """Bytes in, logits of the next byte out. The embedding is also the output layer."""

    def __init__(self, width: int = WIDTH, layers: int = LAYERS, heads: int = HEADS, length: int = LENGTH) -> None:
        super().__init__()
        self.length = length
        self.bytes = nn.Embedding(256, width)
        self.places = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 256, bias=False)
        self.head.weight = self.bytes.weight
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.bytes(ids) + self.places(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


class SourceCode(torch.utils.data.Dataset[Tensor]):
    """Windows of the standard library's source, one byte longer than the model reads: each predicts the next byte."""

    def __init__(self, length: int, limit_bytes: int = CORPUS_BYTES) -> None:
        library = Path(sysconfig.get_paths()["stdlib"])
        text = bytearray()
        for file in sorted(library.rglob("*.py")):
            if {"site-packages", "dist-packages", "test", "tests", "idlelib"} & set(file.parts):
                continue
            text += file.read_bytes()
            if len(text) >= limit_bytes:
                break
        self.text = torch.frombuffer(text[:limit_bytes], dtype=torch.uint8)
        self.length = length

    def __len__(self) -> int:
        return (len(self.text) - 1) // self.length

    def __getitem__(self, index: int) -> Tensor:
        start = index * self.length
        return self.text[start : start + self.length + 1].long()


def job(*, batch_size: int = BATCH, length: int = LENGTH, steps: int = STEPS, precision: str = "fp32", seed: int = 0) -> Job:
    return Job(
        model=lambda: GPT(length=length),
        loss=loss,
        optimizer=optimizer,
        sample=torch.zeros(batch_size, length + 1, dtype=torch.long),
        batch_size=batch_size,
        scheduler=lambda optimizer: LambdaLR(optimizer, Schedule(steps)),
        clip_norm=1.0,
        precision=precision,  # type: ignore[arg-type]  # Job checks it
        seed=seed,
    )


def default_precision() -> str:
    """bf16 where the hardware is made for it."""
    return "bf16" if torch.cuda.is_available() else "fp32"


def loss(model: nn.Module, windows: Tensor) -> Tensor:
    logits = model(windows[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten())


def optimizer(model: nn.Module) -> Optimizer:
    matrices = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    vectors = [parameter for parameter in model.parameters() if parameter.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return AdamW(groups, lr=3e-3, betas=(0.9, 0.95))


class Schedule:
    """A short warm-up, then a cosine down to a tenth."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        warm_up = min(1.0, (step + 1) / min(20, self.steps))
        return warm_up * (0.55 + 0.45 * math.cos(math.pi * min(1.0, step / self.steps)))


@torch.no_grad()
def write(model: nn.Module, length: int, prompt: str = "def ", count: int = 240, seed: int = 0) -> str:
    """A sample of what the model has learnt to write."""
    device = next(model.parameters()).device
    generator = torch.Generator().manual_seed(seed)
    ids = list(prompt.encode())
    for _ in range(count):
        window = torch.tensor([ids[-length:]], device=device)
        likely = torch.softmax(model(window)[0, -1].float().cpu() / 0.7, dim=0)
        ids.append(int(torch.multinomial(likely, 1, generator=generator)))
    return bytes(ids).decode(errors="replace")
