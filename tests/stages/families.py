"""Small models of many kinds, in double precision, for pipelines: each with a loss and batches of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

ROWS, LENGTH, WORDS = 8, 12, 50
Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Any]


@dataclass(frozen=True)
class Family:
    model: Callable[[], nn.Module]
    batch: Callable[[], Batch]
    loss: Loss


def own_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch, use_cache=False).loss  # type: ignore[no-any-return]


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


def deep_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Of what every block makes."""
    out = model(**batch, use_cache=False, output_hidden_states=True)
    found: Tensor = out.loss + sum(each.square().mean() for each in out.hidden_states) * 0.01
    return found


def weighted_loss(model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
    logits = model(**{key: each for key, each in batch.items() if key != "labels"}, use_cache=False).logits
    lost = nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return lost, (batch["labels"] != -100).sum()


def squares(model: nn.Module, batch: Batch) -> Tensor:
    found: Tensor = (model(batch["x"]) - batch["y"]).square().mean()
    return found


def text() -> Batch:
    ids = torch.randint(3, WORDS, (ROWS, LENGTH))
    return {"input_ids": ids, "labels": ids.clone()}


def padded() -> Batch:
    batch = text()
    mask = torch.ones_like(batch["input_ids"])
    for row in range(ROWS):
        mask[row, LENGTH - row :] = 0
    return batch | {"attention_mask": mask, "labels": batch["labels"].masked_fill(mask == 0, -100)}


def image(size: int = 16) -> Batch:
    return {"pixel_values": torch.randn(ROWS, 3, size, size), "labels": torch.randint(0, 5, (ROWS,))}


def sound() -> Batch:
    return {"input_features": torch.randn(ROWS, 8, 32), "labels": torch.randint(3, WORDS, (ROWS, LENGTH))}


def vectors() -> Batch:
    return {"x": torch.randn(4 * ROWS, 16), "y": torch.randn(4 * ROWS, 16)}


def pixels() -> Batch:
    return {"x": (image := torch.randn(ROWS, 3, 16, 16)), "y": image}


# ---------------------------------------------------------------------- written by hand


class UNet(nn.Module):
    """Each block on the way up takes what its counterpart on the way down has made."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()

        def block(before: int, after: int) -> nn.Module:
            return nn.Sequential(nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.SiLU())

        self.first = nn.Conv2d(3, width, 3, padding=1)
        self.down = nn.ModuleList([block(width, width) for _ in range(3)])
        self.middle = block(width, width)
        self.up = nn.ModuleList([block(2 * width, width) for _ in range(3)])
        self.last = nn.Conv2d(width, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x, skips = self.first(x), []
        for each in self.down:
            x = each(x)
            skips.append(x)
            x = nn.functional.avg_pool2d(x, 2)
        x = self.middle(x)
        for each in self.up:
            x = nn.functional.interpolate(x, scale_factor=2.0)
            x = each(torch.cat([x, skips.pop()], 1))
        found: Tensor = self.last(x)
        return found


class TiedByHand(nn.Module):
    """A weight that glue reads at both ends, glue that writes in place, a hook, and a scale of its own between blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.scale = nn.Parameter(torch.ones(16))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.1)) for _ in range(5))
        self.blocks[1].register_forward_hook(lambda _block, _given, result: result * result.mean())

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        first = x
        for at, block in enumerate(self.blocks):
            x = x + block(x * self.scale) if at % 2 else block(x)
            x += 0.1 * first
        return x @ self.table.weight.T


class Unused(nn.Module):
    """A stage has no parameters that are trained, and a module is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.ReLU()) for _ in range(6))
        self.never = nn.Linear(16, 3)
        for block in self.blocks[:2]:
            block.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def language(kind: str, **more: Any) -> nn.Module:
    import transformers

    sizes = {"vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    config = getattr(transformers, kind)(**sizes, num_key_value_heads=2, max_position_embeddings=64, **more)
    return transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-any-return]


def hugging(kind: str, config: str, **more: Any) -> nn.Module:
    import transformers

    return getattr(transformers, kind)(getattr(transformers, config)(**more))  # type: ignore[no-any-return]


def recomputing(make: Callable[[], nn.Module]) -> nn.Module:
    model: Any = make()
    model.gradient_checkpointing_enable()
    return model  # type: ignore[no-any-return]


GPT2 = {"vocab_size": WORDS, "n_positions": 64, "n_embd": 32, "n_layer": 4, "n_head": 4}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
ENCODER = {"vocab_size": WORDS, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 64}
QUIET = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
T5 = {
    "vocab_size": WORDS,
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 3,
    "num_decoder_layers": 3,
    "num_heads": 4,
    "dropout_rate": 0.0,
    "decoder_start_token_id": 0,
}
BOTH = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "dropout": 0.0,
}
WHISPER = {
    "vocab_size": WORDS,
    "num_mel_bins": 8,
    "max_source_positions": 16,
    "max_target_positions": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "decoder_start_token_id": 1,
    "begin_suppress_tokens": [],
    "suppress_tokens": [],
}
RESNET = {"embedding_size": 8, "hidden_sizes": [16, 16, 32, 32], "depths": [2, 2, 2, 2], "layer_type": "basic", "num_labels": 5}
VIT = {key: each for key, each in ENCODER.items() if key != "vocab_size"} | {"image_size": 16, "patch_size": 4, "num_labels": 5}
# Whose shapes no data decides.
EXPERTS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "experts_implementation": "batched_mm",
}

gpt2 = partial(hugging, "GPT2LMHeadModel", "GPT2Config", **GPT2)
FAMILIES: dict[str, Family] = {
    "sequential": Family(
        lambda: nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.GELU()) for _ in range(4))), vectors, squares
    ),
    "unet": Family(UNet, pixels, squares),
    "tied by hand": Family(
        TiedByHand,
        lambda: {"ids": torch.randint(0, WORDS, (ROWS, LENGTH))},
        lambda model, batch: nn.functional.cross_entropy(model(batch["ids"]).flatten(0, 1), batch["ids"].flatten()),
    ),
    "unused": Family(Unused, vectors, squares),
    "gpt2": Family(partial(gpt2, **STILL), text, own_loss),
    "gpt2, dropout": Family(gpt2, text, own_loss),
    "gpt2, weighted": Family(partial(gpt2, **STILL), padded, weighted_loss),
    "gpt2, all hidden states": Family(partial(gpt2, **STILL), text, deep_loss),
    "llama": Family(partial(language, "LlamaConfig"), text, own_loss),
    "llama, padded": Family(partial(language, "LlamaConfig"), padded, own_loss),
    "llama, own checkpoints": Family(
        lambda: recomputing(partial(language, "LlamaConfig", attention_dropout=0.1)), text, own_loss
    ),
    "qwen3": Family(partial(language, "Qwen3Config", head_dim=8), text, own_loss),
    "gemma3": Family(partial(language, "Gemma3TextConfig", head_dim=8, sliding_window=4), text, own_loss),
    "mixtral": Family(partial(language, "MixtralConfig", **EXPERTS), text, own_loss),
    "bert": Family(partial(hugging, "BertForMaskedLM", "BertConfig", **ENCODER, **QUIET), text, plain_loss),
    "albert": Family(
        partial(hugging, "AlbertForMaskedLM", "AlbertConfig", **ENCODER, **QUIET, embedding_size=16), text, plain_loss
    ),
    "vit": Family(partial(hugging, "ViTForImageClassification", "ViTConfig", **VIT, **QUIET), image, plain_loss),
    "t5": Family(partial(hugging, "T5ForConditionalGeneration", "T5Config", **T5), text, own_loss),
    "bart": Family(
        partial(hugging, "BartForConditionalGeneration", "BartConfig", vocab_size=WORDS, max_position_embeddings=64, **BOTH),
        text,
        own_loss,
    ),
    "whisper": Family(partial(hugging, "WhisperForConditionalGeneration", "WhisperConfig", **WHISPER, **BOTH), sound, own_loss),
    "resnet": Family(partial(hugging, "ResNetForImageClassification", "ResNetConfig", **RESNET), partial(image, 40), plain_loss),
    "mamba": Family(
        partial(hugging, "MambaForCausalLM", "MambaConfig", vocab_size=WORDS, hidden_size=32, num_hidden_layers=4, state_size=4),
        text,
        own_loss,
    ),
}
