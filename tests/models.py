"""Small models that between them hold what makes training hard: ties, frozen and unused weights, running statistics, branches."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyfit import Job
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


class Scaled(Tangled):
    """With a parameter that is one number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))

    def forward(self, ids: Tensor) -> Tensor:
        return self.scale * super().forward(ids)


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


def byte_job(rows: int, length: int = 17, **options: Any) -> Job:
    """Of the tiny GPT, in fp32 by SGD."""
    return Job(
        model=tiny_gpt,
        loss=next_byte_loss,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.05),
        sample=byte_batches(1, rows, length)[0],
        batch_size=rows,
        precision="fp32",
        **options,
    )


def image_batches(count: int, rows: int, seed: int = 1) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "images": torch.randn(rows, 3, 8, 8, generator=generator),
            "labels": torch.randint(0, 10, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


class Experts(nn.Module):
    """A mixture: each token goes to the expert its router likes best, so that some experts see none of a batch."""

    def __init__(self, width: int = 16, experts: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.router = nn.Linear(width, experts)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(width, 32), nn.GELU(), nn.Linear(32, width)) for _ in range(experts))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        shares = self.router(x).float().softmax(-1)
        share, chosen = shares.max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * share[rows, None].to(x.dtype))
        return self.head(x + out).view(*ids.shape, -1)


class Branching(nn.Module):
    """Goes one of two ways, by the batch, and one of them twice; reads a weight through a view that it keeps for a while."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.left, self.right, self.after = (nn.Linear(width, width) for _ in range(3))
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        kept = self.head.weight[:, :1].expand(-1, 2)
        x = self.embed(ids)
        odd = bool(int(ids[0, 0]) % 2)
        x = x + F.gelu(self.left(F.gelu(self.left(x))) if odd else self.right(x))
        return self.head(self.after(x)) + kept.sum(1)


class EncoderDecoder(nn.Module):
    """torch's own transformer, whose attention reads weights of modules it does not call."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.both = nn.Transformer(width, 2, 1, 1, 32, dropout=0.1, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        return self.head(self.both(x, x))


class Normalised(nn.Module):
    """Parametrized weights, dropout, and running statistics inside blocks that may be recomputed."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.utils.parametrizations.weight_norm(nn.Linear(width, width)), nn.BatchNorm1d(width), nn.GELU(), nn.Dropout(0.1)
            )
            for _ in range(2)
        )
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids).flatten(0, 1)
        for block in self.blocks:
            x = x + block(x).to(x.dtype)
        return self.head(x).view(*ids.shape, -1)


def tiny_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(vocab_size=VOCABULARY, num_key_value_heads=2, **sizes)

    class Logits(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.llama = LlamaForCausalLM(config)

        def forward(self, ids: Tensor) -> Tensor:
            logits: Tensor = self.llama(input_ids=ids, use_cache=False).logits
            return logits

    return Logits()


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, inner: int) -> None:
        super().__init__()
        self.heads, self.shared = heads, shared
        self.before, self.between = nn.RMSNorm(width), nn.RMSNorm(width)
        head = width // heads
        self.query, self.out = (nn.Linear(width, width, bias=False) for _ in range(2))
        self.key, self.value = (nn.Linear(width, shared * head, bias=False) for _ in range(2))
        self.gate, self.up = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down = nn.Linear(inner, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.before(x))
        y = self.between(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))

    def attend(self, x: Tensor) -> Tensor:
        """By products, whose memory is the same on any device; what comes later is seen too, as it changes no size."""
        rows, length, width = x.shape
        query = self.query(x).view(rows, length, self.heads, -1).transpose(1, 2)
        key, value = (
            of(x).view(rows, length, self.shared, -1).transpose(1, 2).repeat_interleave(self.heads // self.shared, 1)
            for of in (self.key, self.value)
        )
        shares = (query @ key.transpose(2, 3)).softmax(-1)
        return self.out((shares @ value).transpose(1, 2).reshape(rows, length, width))


class PlainLlama(nn.Module):
    """Llama by its shapes, in plain PyTorch."""

    def __init__(self, layers: int, width: int, heads: int, shared: int, inner: int, vocabulary: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, shared, inner) for _ in range(layers))
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
