"""Makes what fine-tuning begins with, small enough for any machine and without a download: a Qwen3 of 91 k parameters with random
weights and a tokenizer of bytes, as a Hugging Face folder, and a file of chats. Needs `pip install 'anyfit[finetune]'`.

python examples/tiny_qwen3.py                                                      # tiny-qwen3 and chats.jsonl, here
anyfit fit tiny-qwen3 --data chats.jsonl --eval 5% --lr 5e-3 --batch 4 --seq 64
"""

import json

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
COLOURS = ("red", "blue", "green", "grey", "pink")


def tokenizer(template: str | None = TEMPLATE) -> PreTrainedTokenizerFast:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(letters)}, merges=[]))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = decoders.ByteLevel()
    inner.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|pad|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>", pad_token="<|pad|>")
    made.chat_template = template
    return made


def config() -> Qwen3Config:
    return Qwen3Config(
        vocab_size=259,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=256,
        tie_word_embeddings=True,
        initializer_range=0.125,  # with the usual 0.02, a frozen head could tell no token from another, whatever a LoRA learns
        eos_token_id=257,
        pad_token_id=258,
    )


def chat(index: int) -> dict[str, list[dict[str, str]]]:
    colour = COLOURS[index % 5]
    asked, answered = f"{index % 7} {colour}?", colour.upper()
    return {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": answered}]}


if __name__ == "__main__":
    torch.manual_seed(0)
    Qwen3ForCausalLM(config()).save_pretrained("tiny-qwen3")
    tokenizer().save_pretrained("tiny-qwen3")
    with open("chats.jsonl", "w") as file:  # noqa: PTH123
        file.writelines(f"{json.dumps(chat(index))}\n" for index in range(200))
    print("wrote tiny-qwen3 and chats.jsonl")
