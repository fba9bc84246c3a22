"""Goes on with the weights in a Hugging Face folder, and writes such a folder back. Needs `pip install 'anyfit[hf]'`.

python examples/finetune.py FOLDER    # of `save_pretrained`; without one, a small Llama is saved first
"""

import subprocess
import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import anyfit

if len(sys.argv) > 1:
    folder = sys.argv[1]
else:
    folder = "small-llama"
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4)
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="200KB")

job = anyfit.Job.from_huggingface(
    folder,
    batch_size=16,
    length=32,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
)
run = anyfit.start(job)  # each parameter comes straight from its file to where the plan has it

# Every sample counts upwards from somewhere; the labels of a language model are its inputs.
samples = [{"input_ids": (ids := torch.arange(start, start + 32)), "labels": ids} for start in range(96)]
for batch in run.loader(samples, epochs=20):
    loss = run.step(batch)
    if run.steps % 20 == 0:
        print(f"step {run.steps}: loss {float(loss):.3f}")
run.save("checkpoint")

subprocess.run([sys.executable, "-m", "anyfit", "export", "checkpoint", "finetuned"], check=True)
model = AutoModelForCausalLM.from_pretrained("finetuned", dtype=torch.float32)
with torch.no_grad():
    print("after 10, 11, 12 comes", int(model(torch.tensor([[10, 11, 12]])).logits[0, -1].argmax()))
