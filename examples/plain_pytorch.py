"""An ordinary PyTorch training loop. `plain.py` beside it is the same with anyfit: compare the two."""

import torch
from torch import nn


def build() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 10))


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return nn.functional.cross_entropy(model(batch["x"]), batch["y"])


torch.manual_seed(0)
centers = torch.randn(10, 64)
labels = torch.randint(0, 10, (100, 32))
batches = [{"x": centers[y] + torch.randn(32, 64), "y": y} for y in labels]

model = build()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step, batch in enumerate(batches):
    loss = loss_of(model, batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if step % 20 == 0 or step == 99:
        print(f"step {step}: loss {loss.item():.3f}")
