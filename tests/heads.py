"""Hugging Face models of every kind of head, each with a padded batch that a cut must not change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor

ROWS, LENGTH, WORDS, LABELS = 6, 8, 50, 5
TOKENS = {"vocab_size": WORDS, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
DECODER = {
    **SMALL,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "max_position_embeddings": 32,
    "tie_word_embeddings": False,
    **TOKENS,
}
BERT = {**SMALL, **NO_DROPOUT, "max_position_embeddings": 32, "vocab_size": WORDS, "pad_token_id": 0}
T5 = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0, "decoder_start_token_id": 0}
BART = {
    "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 32, "decoder_ffn_dim": 32, "dropout": 0.0, "max_position_embeddings": 32, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
WHISPER = BART | {"num_mel_bins": 4, "max_source_positions": 8, "max_target_positions": 16}
VIT = {**SMALL, **NO_DROPOUT, "image_size": 8, "patch_size": 4, "num_labels": LABELS}
EXPERTS = {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}
Draw = Callable[[torch.Generator], dict[str, Tensor]]
Head = tuple[str, str, dict[str, Any], Draw]


def words(generator: torch.Generator) -> dict[str, Tensor]:
    """Padded on the right, each sample to its own length."""
    tokens = torch.randint(3, WORDS, (ROWS, LENGTH), generator=generator)
    mask = torch.arange(LENGTH) < torch.randint(3, LENGTH + 1, (ROWS, 1), generator=generator)
    return {"input_ids": tokens.where(mask, 0), "attention_mask": mask.long()}


def with_tokens(batch: dict[str, Tensor], generator: torch.Generator, most: int = WORDS) -> dict[str, Tensor]:
    """A label a token, none for padding, few for some samples and none at all for the second and third."""
    labels = torch.randint(most, (ROWS, LENGTH), generator=generator)
    kept = torch.rand(ROWS, LENGTH, generator=generator) < torch.tensor([0.9, 0.0, 0.0, 0.3, 0.6, 1.0])[:, None]
    if "attention_mask" in batch:
        kept &= batch["attention_mask"].bool()
    return batch | {"labels": labels.where(kept, -100)}


def language(generator: torch.Generator) -> dict[str, Tensor]:
    return with_tokens(words(generator), generator)


def tagged(generator: torch.Generator) -> dict[str, Tensor]:
    return with_tokens(words(generator), generator, LABELS)


def spoken(generator: torch.Generator) -> dict[str, Tensor]:
    return with_tokens({"input_features": torch.randn(ROWS, 4, 16, generator=generator)}, generator)


def classed(generator: torch.Generator) -> dict[str, Tensor]:
    return words(generator) | {"labels": torch.tensor([0, -100, 3, 1, -100, 4])}


def measured(generator: torch.Generator) -> dict[str, Tensor]:
    return words(generator) | {"labels": torch.randn(ROWS, generator=generator)}


def several(generator: torch.Generator) -> dict[str, Tensor]:
    return words(generator) | {"labels": torch.randint(2, (ROWS, LABELS), generator=generator).float()}


def seen(generator: torch.Generator) -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 8, 8, generator=generator), "labels": torch.tensor([0, 2, -100, 1, 1, 4])}


def answered(generator: torch.Generator) -> dict[str, Tensor]:
    """The first answer begins in what was cut off, and the fourth ends there."""
    return words(generator) | {
        "start_positions": torch.tensor([LENGTH, 1, 0, 2, 1, 0]), "end_positions": torch.tensor([2, 2, 1, LENGTH + 3, 1, 2]),
    }  # fmt: skip


HEADS: dict[str, Head] = {
    "causal, sliced": ("LlamaForCausalLM", "llama", DECODER, language),
    "causal, in one": ("CohereForCausalLM", "cohere", {**DECODER, "use_qk_norm": False}, language),
    "causal, capped": ("Gemma2ForCausalLM", "gemma2", {**DECODER, "final_logit_softcapping": 2.0}, language),
    "experts": ("MixtralForCausalLM", "mixtral", EXPERTS, language),
    "masked": ("BertForMaskedLM", "bert", BERT, language),
    "masked, by its function": ("ModernBertForMaskedLM", "modernbert", {**DECODER, "attn_implementation": "eager"}, language),
    "sequence to sequence": ("T5ForConditionalGeneration", "t5", {**T5, **TOKENS}, language),
    "sequence to sequence, shifted": ("BartForConditionalGeneration", "bart", {**BART, **TOKENS}, language),
    "speech": ("WhisperForConditionalGeneration", "whisper", {**WHISPER, **TOKENS}, spoken),
    "tokens": ("BertForTokenClassification", "bert", {**BERT, "num_labels": LABELS}, tagged),
    "tokens, by its function": (
        "LlamaForTokenClassification",
        "llama",
        {**DECODER, "num_labels": LABELS, "classifier_dropout": 0.0},
        tagged,
    ),
    "text": ("BertForSequenceClassification", "bert", {**BERT, "num_labels": LABELS}, classed),
    "text, by its function": ("LlamaForSequenceClassification", "llama", {**DECODER, "num_labels": LABELS}, classed),
    "regression": ("BertForSequenceClassification", "bert", {**BERT, "num_labels": 1}, measured),
    "many labels": ("BertForSequenceClassification", "bert", {**BERT, "num_labels": LABELS}, several),
    "images": ("ViTForImageClassification", "vit", VIT, seen),
}
WHOLE: dict[str, Head] = {
    "answers": ("BertForQuestionAnswering", "bert", BERT, answered),
    "answers, by its function": ("LlamaForQuestionAnswering", "llama", DECODER, answered),
    "experts, with their routers": ("MixtralForCausalLM", "mixtral", {**EXPERTS, "output_router_logits": True}, language),
}


def model_of(head: Head) -> Any:
    made_by, kind, options, _ = head
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **options)
    config.use_cache = False
    return getattr(transformers, made_by)(config).train()


def batch_of(head: Head, seed: int = 1) -> dict[str, Tensor]:
    return head[-1](torch.Generator().manual_seed(seed))
