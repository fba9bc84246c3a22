"""A tiny Qwen3 with a tokenizer of bytes, and data for it: all made here, so that nothing is downloaded."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SPECIAL = ["<|im_start|>", "<|im_end|>", "<|pad|>"]
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Qwen3 does it: reasoning is shown in the last turn alone.
REASONING_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(SPECIAL)
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = template
    return made


def config(**changes: Any) -> Qwen3Config:
    small = {"vocab_size": 259, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "head_dim": 16}
    small |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "tie_word_embeddings": True}
    return Qwen3Config(**(small | {"eos_token_id": 257, "pad_token_id": 258} | changes))


def folder(path: Path, template: str | None = TEMPLATE) -> Path:
    """A Hugging Face folder as one finds it: configuration, weights and tokenizer."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(config()).save_pretrained(path)
    tokenizer(template).save_pretrained(path)
    return path


def chats(count: int) -> list[Mapping[str, Any]]:
    """Short ones, that a tiny model can learn by heart."""
    words = ("red", "blue", "green", "grey", "pink")
    return [
        {
            "messages": [
                {"role": "user", "content": f"{index % 7} {words[index % 5]}?"},
                {"role": "assistant", "content": words[index % 5].upper()},
            ]
        }
        for index in range(count)
    ]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
