"""What the host takes for one dispatcher call in training: autograd, the allocator and Python have their share.

Small models are bound by it. It is read on a few transformer blocks, forward and backward, with tensors so tiny that
their arithmetic costs nothing; calls are counted below autograd, views included, as the recorder of a pass counts them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from .meters import Effort, Meter, pace_timer_of, rate_meter

BLOCKS, HEADS, WIDTH, LENGTH = 4, 2, 32, 8


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into_heads, self.out_of_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.into_heads(self.before_attention(hidden)).split(width, dim=2)
        )
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out_of_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.add(hidden, self.mlp(self.before_mlp(hidden)))


class CallCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


def host_meter(device: torch.device, effort: Effort) -> Meter:
    """Seconds of one dispatcher call. Building the blocks draws random numbers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device, dtype)
    hidden = torch.ones(1, LENGTH, WIDTH, device=device, dtype=dtype)

    def step() -> None:
        with torch.enable_grad():
            model(hidden).sum().backward()
        model.zero_grad()

    step()  # counted warm: the first step may do more
    with CallCounter() as counter:
        step()
    rate, _ = rate_meter("training on the host", step, float(counter.calls), pace_timer_of(device), effort)
    return Meter(rate.label, lambda: 1.0 / rate.read())
