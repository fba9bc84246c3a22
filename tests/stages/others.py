"""Models that stages were not made for, one by one: of the hub, and as people write them."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from .families import (
    BOTH,
    ENCODER,
    FAMILIES,
    LENGTH,
    QUIET,
    ROWS,
    WORDS,
    Batch,
    Family,
    hugging,
    own_loss,
    padded,
    plain_loss,
    squares,
    text,
    vectors,
)

WIDTH = 16


def block() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


class Chain(nn.Module):
    """Blocks with a way in and a way out; the ways people run them are below."""

    def __init__(self, made: Callable[[], nn.Module] = block) -> None:
        super().__init__()
        self.enter = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(made() for _ in range(6))
        self.leave = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for each in self.blocks:
            x = each(x)
        return self.leave(x)


class SharedInside(Chain):
    """Each block has an attention of its own, and all have one MLP."""

    class Block(nn.Module):
        def __init__(self, mlp: nn.Module) -> None:
            super().__init__()
            self.own, self.mlp = nn.Linear(WIDTH, WIDTH), mlp

        def forward(self, x: Tensor) -> Tensor:
            return x + self.mlp(torch.tanh(self.own(x)))  # type: ignore[no-any-return]

    def __init__(self) -> None:
        mlp = nn.Sequential(nn.Linear(WIDTH, 32), nn.GELU(), nn.Linear(32, WIDTH))
        super().__init__(lambda: SharedInside.Block(mlp))


@dataclass
class Output:
    y: Tensor
    hidden: list[Tensor]


class Checkpointing(Chain):
    """So many blocks at a time."""

    def __init__(self, count: int, *, reentrant: bool = False) -> None:
        super().__init__()
        self.count, self.reentrant = count, reentrant

    def forward(self, x: Tensor) -> Any:
        x = self.enter(x)
        for first in range(0, len(self.blocks), self.count):
            x = checkpoint(nn.Sequential(*self.blocks[first : first + self.count]), x, use_reentrant=self.reentrant)
        return self.leave(x)


class Returning(Chain):
    """An object of its own, and a dict from each block."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> dict[str, Any]:
            y = torch.tanh(self.own(x))
            return {"y": y, "norms": (y.square().mean(-1), None), "name": "tanh"}

    def __init__(self) -> None:
        super().__init__(Returning.Block)

    def forward(self, x: Tensor) -> Output:
        x, hidden = self.enter(x), []
        for each in self.blocks:
            told = each(x)
            x = told["y"] + told["norms"][0][:, None]
            hidden.append(x)
        return Output(self.leave(x), hidden)


class Caching(Chain):
    """Makes a table of places when it is first asked, and keeps the last result for whoever wants to look at it."""

    places: Tensor | None = None
    last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.places is None or self.places.shape != x.shape:
            self.places = torch.linspace(-1, 1, x.shape[-1], dtype=x.dtype).expand(x.shape).contiguous()
        x = self.enter(x)
        for each in self.blocks:
            x = each(x + self.places)
        self.last = x.detach()
        return self.leave(x)  # type: ignore[no-any-return]


class Remembering(Chain):
    """Reads what it has made of the batch before, as recurrent memories do."""

    memory: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for at, each in enumerate(self.blocks):
            if at == 3 and self.memory is not None:
                x = x + 0.1 * self.memory.mean()
            x = each(x)
        self.memory = x.detach()
        return self.leave(x)  # type: ignore[no-any-return]


class Counting(Chain):
    """Fades something in by the forwards that it has made."""

    forwards = 0

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for each in self.blocks:
            x = x + each(x) / (1 + self.forwards)
        self.forwards += 1
        return self.leave(x)  # type: ignore[no-any-return]


class Averaging(Chain):
    """Keeps a running mean of its inputs in a buffer that no block has."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.lerp_(x.mean(0), 0.1)
        return super().forward(x - self.mean)  # type: ignore[no-any-return]


class Dropping(Chain):
    """Stochastic depth, inside of each block, by Python's random numbers or numpy's."""

    class Block(nn.Module):
        def __init__(self, draw: Callable[[], float]) -> None:
            super().__init__()
            self.own, self.draw = nn.Linear(WIDTH, WIDTH), draw

        def forward(self, x: Tensor) -> Tensor:
            return x if self.training and self.draw() < 0.5 else x + torch.tanh(self.own(x))

    def __init__(self, make: Callable[[], Callable[[], float]]) -> None:
        super().__init__(lambda: Dropping.Block(make()))


def numpys() -> float:  # a copy of a model copies numpy's generator with its methods
    return float(np.random.rand())


class Own(random.Random):
    __call__ = random.Random.random


def of_one() -> nn.Module:
    one = Own(3)
    return Dropping(lambda: one)


class Scaling(Chain):
    """Draws outside of its blocks, which are called whatever comes."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for each in self.blocks:
            x = x + each(x) * (random.random() + float(torch.rand([])) + np.random.rand())
        return self.leave(x)  # type: ignore[no-any-return]


class Leaving(Chain):
    """Stochastic depth outside of the blocks: which of them are called depends on chance."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for each in self.blocks:
            if not self.training or random.random() < 0.5:
                x = x + each(x)
        return self.leave(x)  # type: ignore[no-any-return]


class Normed(Chain):
    def __init__(self) -> None:
        super().__init__(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.ReLU()))


class Weaving(Chain):
    """Each of its stages reads all blocks before, in an order of its own, and one of them twice."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = [self.enter(x)]
        for at, each in enumerate(self.blocks):
            hidden.append(each(torch.stack(hidden[::-1]).mean(0) + hidden[at // 2]))
        self_again = self.blocks[-1](hidden[1])
        return self.leave(hidden[-1] * self_again.sigmoid())  # type: ignore[no-any-return]


class Passing(Chain):
    """Recurrent blocks, which hand their state on."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.LSTM(WIDTH, WIDTH, batch_first=True))

    def forward(self, x: Tensor) -> Tensor:
        x, state = self.enter(x)[:, None], None
        for each in self.blocks:
            x, state = each(x, state)
        return self.leave(x[:, 0]) + state[1][0]  # type: ignore[no-any-return, index]


class DroppingBetween(Chain):
    """Dropout outside of its blocks, of what another stage has made before it drops something of the batch."""

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.dropout(self.enter(x), 0.5)
        given = nn.functional.dropout(x, 0.5)
        for each in self.blocks:
            y = each(y + given)
        return self.leave(y)  # type: ignore[no-any-return]


class Turning(Chain):
    """Its blocks make and take complex numbers."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.fft(self.own(x.real if x.is_complex() else x)) * 0.3

    def __init__(self) -> None:
        super().__init__(Turning.Block)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        for each in self.blocks:
            x = each(x)
        return self.leave(x.real + x.imag)  # type: ignore[no-any-return]


class Targeting(Chain):
    """Half of its blocks are a target, run without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        x = target = self.enter(x)
        with torch.no_grad():
            for each in self.blocks[:3]:
                target = each(target)
        for each in self.blocks[3:]:
            x = each(x)
        return self.leave(x) * target.mean() + target  # type: ignore[no-any-return]


class Doubling(Chain):
    """Each block doubles the gradient that it hands back."""

    def __init__(self) -> None:
        super().__init__()
        for each in self.blocks:
            each.register_full_backward_hook(lambda _block, given, _of: tuple(one if one is None else 2 * one for one in given))


def penalised(model: nn.Module, batch: Batch) -> Tensor:
    """With the gradient of its input, where it has one."""
    x = batch["x"].clone().requires_grad_()
    out = model(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True, allow_unused=True)
    return (out - batch["y"]).square().mean() + (0.0 if slope is None else slope.square().mean())


class Packing(Chain):
    """Only the rows that count go through its blocks: how many, the batch says."""

    def forward(self, x: Tensor) -> Tensor:
        counts = x[:, 0] > 0
        x = self.enter(x)
        rows = x[counts]
        for each in self.blocks:
            rows = each(rows)
        return self.leave(x.masked_scatter(counts[:, None], rows))  # type: ignore[no-any-return]


def selected(model: nn.Module, batch: Batch) -> Tensor:
    """Of some of the results."""
    counts = batch["y"][:, 0] > 0
    return (model(batch["x"])[counts] - batch["y"][counts]).square().mean()


def of_output(model: nn.Module, batch: Batch) -> Tensor:
    out: Output = model(batch["x"])
    return (out.y - batch["y"]).square().mean() + 0.01 * sum((each.square().mean() for each in out.hidden), torch.zeros(()))


def contrastive(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, return_loss=True).loss  # type: ignore[no-any-return]


def pairs() -> Batch:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH))
    ids[:, -1] = 2  # where a text ends
    return {"input_ids": ids, "pixel_values": torch.randn(ROWS, 3, 16, 16)}


def waves() -> Batch:
    return {"input_values": torch.randn(ROWS, 400), "labels": torch.randint(3, WORDS, (ROWS, 4))}


def deberta() -> nn.Module:
    attention = {"relative_attention": True, "pos_att_type": ["p2c", "c2p"], "position_buckets": 8, "type_vocab_size": 0}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its file is compiled in a way that torch wants nobody to use any more
        return hugging("DebertaV2ForMaskedLM", "DebertaV2Config", **ENCODER, **QUIET, **attention)


def clip() -> nn.Module:
    import transformers

    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "projection_dim": 16}
    ends = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
    text_config = {**sizes, **ends, "vocab_size": WORDS, "max_position_embeddings": 64}
    return transformers.CLIPModel(
        transformers.CLIPConfig(
            text_config=text_config, vision_config={**sizes, "image_size": 16, "patch_size": 4}, projection_dim=16
        )
    )


SIZES = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
SPEECH = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64,
    "conv_dim": (16, 16), "conv_stride": (5, 2), "conv_kernel": (10, 3), "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4, "mask_time_prob": 0.2, "mask_time_length": 2, "pad_token_id": 0,
}  # fmt: skip
OPT = {
    "vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "ffn_dim": 64,
    "word_embed_proj_dim": 32, "max_position_embeddings": 64, "dropout": 0.1,
}  # fmt: skip

EQUAL: dict[str, Family] = {
    "checkpoints": Family(partial(Checkpointing, 1), vectors, squares),
    "falcon": Family(partial(hugging, "FalconForCausalLM", "FalconConfig", **SIZES, alibi=True), text, own_loss),
    "opt": Family(partial(hugging, "OPTForCausalLM", "OPTConfig", **OPT), padded, own_loss),
    "gpt neox": Family(
        partial(hugging, "GPTNeoXForCausalLM", "GPTNeoXConfig", **SIZES, intermediate_size=64, hidden_dropout=0.1), text, own_loss
    ),
    "deberta": Family(deberta, padded, plain_loss),
    "pegasus": Family(
        partial(hugging, "PegasusForConditionalGeneration", "PegasusConfig", **BOTH, vocab_size=WORDS),
        text,
        own_loss,
    ),
    "wav2vec 2": Family(
        partial(hugging, "Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, layerdrop=0.0), waves, plain_loss
    ),
    "clip": Family(clip, pairs, contrastive),
    "an mlp in all blocks": Family(SharedInside, vectors, squares),
    "blocks that return dicts": Family(Returning, vectors, of_output),
    "a cache": Family(Caching, vectors, squares),
    "python's chance": Family(lambda: Dropping(lambda: random.random), vectors, squares),
    "numpy's chance": Family(lambda: Dropping(lambda: numpys), vectors, squares),
    "chance of each block's own": Family(lambda: Dropping(lambda: Own(3)), vectors, squares),
    "chance outside": Family(Scaling, vectors, squares),
    "batch norms": Family(Normed, vectors, squares),
    "rows that a mask selects": Family(Packing, vectors, selected),
    "woven": Family(Weaving, vectors, squares),
    "states handed on": Family(Passing, vectors, squares),
    "dropout outside": Family(DroppingBetween, vectors, squares),
    "complex numbers": Family(Turning, vectors, squares),
    "a target without gradients": Family(Targeting, vectors, squares),
}  # fmt: skip
QUICK = tuple(name for name in EQUAL if name not in ("falcon", "opt", "gpt neox", "deberta", "pegasus", "wav2vec 2", "clip"))

REFUSED: dict[str, tuple[Family, str]] = {
    "a memory": (Family(Remembering, vectors, squares), "what 'blocks.5' has made in one forward is read by"),
    "a counter": (Family(Counting, vectors, squares), "'the model' changes its attribute forwards in every forward"),
    "a running mean": (Family(Averaging, vectors, squares), "buffer mean is written outside of the model's blocks"),
    "one generator for all": (Family(of_one, vectors, squares), "draw is a random generator that more than one block draws from"),
    "chance that calls": (Family(Leaving, vectors, squares), "which modules are called depends on chance"),
    "hooks on backward": (Family(Doubling, vectors, squares), "'blocks.0' has a backward hook"),
    "a checkpoint around two": (
        Family(partial(Checkpointing, 2), vectors, squares),
        "a checkpoint of the model's own runs 'blocks.0' and 'blocks.1' again",
    ),
    "a reentrant checkpoint": (
        Family(partial(Checkpointing, 1, reentrant=True), vectors, squares),
        "'blocks.0' is called inside of an autograd function",
    ),
    "a gradient penalty": (Family(Chain, vectors, penalised), "goes backward by itself"),
    "layers that are dropped": (
        Family(partial(hugging, "Wav2Vec2ForCTC", "Wav2Vec2Config", **SPEECH, layerdrop=0.5), waves, plain_loss),
        "which modules are called depends on chance",
    ),
}


def family_of(name: str) -> Family:
    return FAMILIES.get(name) or EQUAL.get(name) or REFUSED[name][0]
