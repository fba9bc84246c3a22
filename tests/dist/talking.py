"""Models that take and give words, for tests of tables: each uses its embedding and its head in another way."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from anyfit.losses import sliced_cross_entropy
from anyfit.values import huggingface_loss

ROWS, LENGTH, HIDDEN, VOCABULARY = 12, 10, 24, 48
ODD = 47  # words, which no axis divides


def words(length: int = LENGTH, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(vocabulary, (ROWS, length), generator=generator)
    targets = ids.roll(-1, 1).clone()
    targets[::2, length // 2 :] = -100
    targets[1] = -100
    return {"ids": ids, "targets": targets}


class Talking(nn.Module):
    """Embedding, one block, and a head."""

    def __init__(self, *, tied: bool = True, bias: bool = False, padding: int | None = None, words: int = VOCABULARY) -> None:
        super().__init__()
        self.words = nn.Embedding(words, HIDDEN, padding_idx=padding)
        self.block = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 48), nn.GELU(), nn.Linear(48, HIDDEN))
        self.head = nn.Linear(HIDDEN, words, bias=bias)
        if tied:
            self.head.weight = self.words.weight

    def hidden(self, ids: Tensor) -> Tensor:
        x: Tensor = self.words(ids)
        return x + self.block(x)

    def forward(self, ids: Tensor) -> Tensor:
        logits: Tensor = self.head(self.hidden(ids))
        return logits


def usual(model: Any, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["ids"])
    return F.cross_entropy(logits.view(-1, logits.size(-1)).float(), batch["targets"].view(-1))


def biased(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As BART does: a number for each word is added to the logits; here one that learns, and one that does not."""
    logits = model(batch["ids"]) + torch.linspace(-1, 1, model.words.num_embeddings)[None]
    logits = model.head.bias + logits
    return F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())


def shifted(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """As older models do, with a cap, and a word that does not count."""
    logits = (model(batch["ids"]) / 3.0).tanh() * 3.0
    logits, targets = logits[..., :-1, :].contiguous(), batch["targets"][:, 1:].clamp(min=5)
    loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=5, reduction="none")
    return loss.sum() / (targets != 5).sum()


def sliced(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return sliced_cross_entropy(
        model.hidden(batch["ids"]), model.head.weight, batch["targets"], bias=model.head.bias, slice_rows=7, softcap=2.0
    )


def unusual(model: Any, batch: dict[str, Tensor]) -> Tensor:
    """What no rank can do on its rows: a product by hand, smoothing, norms, a table without gradient, other reads of logits."""
    hidden, table = model.hidden(batch["ids"]), model.words.weight
    count = model.words.num_embeddings
    assert table.shape == (count, HIDDEN)
    assert (len(table), table.numel(), table.size(0)) == (count, count * HIDDEN, count)
    by_hand, logits = hidden @ table.T, model.head(hidden)
    aside = F.linear(hidden, table.detach()).square().mean() + table.norm() + logits.softmax(-1).square().mean()
    smooth = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten(), label_smoothing=0.1)
    mixed = F.cross_entropy(by_hand.flatten(0, 1), batch["targets"].flatten()) + logits[:, 0].logsumexp(-1).mean()
    loss: Tensor = smooth + mixed + 0.01 * aside + F.embedding(batch["ids"], table, padding_idx=-3).sum() * 1e-3
    return loss


def _talking(**options: Any) -> Callable[[], tuple[nn.Module, list[str], dict[str, Tensor]]]:
    def make() -> tuple[nn.Module, list[str], dict[str, Tensor]]:
        torch.manual_seed(0)
        return Talking(**options), [], words(vocabulary=options.get("words", VOCABULARY))

    return make


def _hub(kind: str, **options: Any) -> Callable[[], tuple[nn.Module, list[str], dict[str, Tensor]]]:
    def make() -> tuple[nn.Module, list[str], dict[str, Tensor]]:
        import transformers

        torch.manual_seed(0)
        small = {
            "vocab_size": VOCABULARY, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 2,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0,
        }  # fmt: skip
        config = transformers.AutoConfig.for_model(kind, **{**small, **options})
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        batch = words(vocabulary=config.vocab_size)
        return model, [], {"input_ids": batch["ids"], "labels": batch["targets"]}

    return make


def _own(model: Any, batch: dict[str, Tensor]) -> Any:
    return model(**batch, use_cache=False).loss


TALKING: dict[str, Callable[[], tuple[nn.Module, list[str], dict[str, Tensor]]]] = {
    "tied words": _talking(),
    "padded words": _talking(tied=False, bias=True, padding=7),
    "shifted words": _talking(tied=False, bias=True),
    "sliced words": _talking(bias=True),
    "unusual words": _talking(),
    "llama's words": _hub("llama"),
    "gemma's words": _hub("gemma2", final_logit_softcapping=3.0),
    "gemma's own loss": _hub("gemma2", final_logit_softcapping=3.0),
    "biased words": _talking(tied=False, bias=True, words=ODD),
    "odd words": _talking(tied=False, bias=True, padding=7, words=ODD),
    "odd shifted words": _talking(words=ODD),
    "odd sliced words": _talking(bias=True, words=ODD),
    "odd unusual words": _talking(words=ODD),
    "gemma's odd words": _hub("gemma2", final_logit_softcapping=3.0, vocab_size=ODD),
}
LOSSES_OF_WORDS: dict[str, Callable[[nn.Module, Any], Any]] = {
    "tied words": usual,
    "padded words": usual,
    "shifted words": shifted,
    "sliced words": sliced,
    "unusual words": unusual,
    "llama's words": huggingface_loss.loss,
    "gemma's words": huggingface_loss.loss,
    "gemma's own loss": _own,
    "biased words": biased,
    "odd words": usual,
    "odd shifted words": shifted,
    "odd sliced words": sliced,
    "odd unusual words": unusual,
    "gemma's odd words": huggingface_loss.loss,
}
TABLES: dict[str, tuple[str, ...]] = {
    "tied": ("transformer.wte.weight",),
    "tied words": ("words.weight",),
    "padded words": ("words.weight", "head.weight"),
    "shifted words": ("words.weight", "head.weight"),
    "sliced words": ("words.weight",),
    "unusual words": ("words.weight",),
    "llama's words": ("model.embed_tokens.weight", "lm_head.weight"),
    "gemma's words": ("model.embed_tokens.weight",),
    "gemma's own loss": ("model.embed_tokens.weight",),
    "biased words": ("words.weight", "head.weight"),
    "odd words": ("words.weight", "head.weight"),
    "odd shifted words": ("words.weight",),
    "odd sliced words": ("words.weight",),
    "odd unusual words": ("words.weight",),
    "gemma's odd words": ("model.embed_tokens.weight",),
}
