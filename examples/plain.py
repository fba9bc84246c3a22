"""An ordinary PyTorch training loop with anyfit. `plain_pytorch.py` beside it is the same without: compare the two."""

import torch
from torch import nn

import anyfit


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


torch.manual_seed(0)
centers = torch.randn(10, 64)
labels = torch.randint(0, 10, (100, 32))
batches = [{"x": centers[y] + torch.randn(32, 64), "y": y} for y in labels]

job = anyfit.Job(build, loss_of, lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), batches[0], batch_size=32)
run = anyfit.start(job)
for step, batch in enumerate(batches):
    loss = run.step(batch)
    if step % 20 == 0 or step == 99:
        print(f"step {step}: loss {loss.item():.3f}")
