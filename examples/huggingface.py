"""A small Llama, from nothing but its configuration, learns to count. Needs `pip install 'anyfit[hf]'`."""

import torch
from transformers import LlamaConfig

import anyfit

config = LlamaConfig(
    vocab_size=128,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
job = anyfit.Job.from_huggingface(
    config,
    batch_size=16,
    length=32,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
    clip_norm=1.0,
)
run = anyfit.start(job)
print(run.plan)

# Every sample counts upwards from somewhere; the labels of a language model are its inputs.
samples = [{"input_ids": (ids := torch.arange(start, start + 32)), "labels": ids} for start in range(96)]
for batch in run.loader(samples, epochs=20):
    loss = run.step(batch)
    if run.steps % 20 == 0:
        print(f"step {run.steps}: loss {float(loss):.3f}")
