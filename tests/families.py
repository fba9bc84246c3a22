"""Small models of several families, as transformers saves them: tied and not, with experts that it fuses, of two halves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers

TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "llama", DECODER),
    "llama, tied": ("LlamaForCausalLM", "llama", {**DECODER, "tie_word_embeddings": True}),
    "gpt2": ("GPT2LMHeadModel", "gpt2", {"n_layer": 2, "n_embd": 32, "n_head": 4, "n_positions": 32, **TOKENS}),
    "mixtral": ("MixtralForCausalLM", "mixtral", {**DECODER, "num_local_experts": 4}),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {**DECODER, **EXPERTS, "num_experts": 4}),
    "bert": ("BertForMaskedLM", "bert", {**SMALL, "max_position_embeddings": 32}),
    "t5": ("T5ForConditionalGeneration", "t5", {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, **TOKENS}),
}


def saved(folder: Path, family: str, dtype: torch.dtype = torch.float32, size: str = "20KB", **options: Any) -> Any:
    """The model, which lies in the folder from now on."""
    made_by, kind, usual = FAMILIES[family]
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(kind, **usual | options)
    model: Any = getattr(transformers, made_by)(config).to(dtype)
    model.save_pretrained(folder, max_shard_size=size)
    return model
