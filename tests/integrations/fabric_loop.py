"""A training loop as Fabric's documentation teaches it: only its strategy is another. As a script, of two ranks:

torchrun --nproc-per-node 2 -m tests.integrations.fabric_loop FILE
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from lightning_fabric import Fabric
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader

from anyfit.integrations.lightning import AnyfitStrategy
from tests.machines import small_machine
from tests.models import byte_batches, next_byte_loss, tiny_gpt

ROWS, STEPS, CLIP = 8, 4, 0.5


def strategy_of(*, ranks: int = 1, accumulate: int = 1, **options: Any) -> AnyfitStrategy:
    sample = byte_batches(1, ROWS // ranks // accumulate)[0]
    usual = {"backwards": accumulate, "clip_norm": CLIP, "machine": small_machine()}
    return AnyfitStrategy(next_byte_loss, sample, ROWS, **usual | options)


def trained(
    strategy: Any, *, ranks: int = 1, accumulate: int = 1, clips: bool = True
) -> tuple[list[float], list[float], Any, Any]:
    """Losses, norms and learning rates a step; and the weights."""
    fabric = Fabric(accelerator="cpu", devices=ranks, strategy=strategy)
    fabric.launch()
    torch.manual_seed(0)
    model: Any = tiny_gpt()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    model, optimizer = fabric.setup(model, optimizer)
    data: Any = DataLoader(torch.cat(byte_batches(STEPS, ROWS)), ROWS // ranks // accumulate)  # type: ignore[arg-type]
    losses, norms, rates = [], [], []
    for number, part in enumerate(fabric.setup_dataloaders(data), 1):
        is_last = number % accumulate == 0
        with fabric.no_backward_sync(model, enabled=not is_last):
            loss = cross_entropy(model(part[:, :-1]).flatten(0, 1), part[:, 1:].flatten()) / accumulate
            fabric.backward(loss)
        losses.append(float(loss.detach()))
        if is_last:
            if clips:
                norms.append(float(fabric.clip_gradients(model, optimizer, max_norm=CLIP)))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            rates.append(scheduler.get_last_lr())
    weights: dict[str, Tensor] = fabric.strategy.get_module_state_dict(model._forward_module)
    return losses, norms, rates, {name: each.clone() for name, each in weights.items()}


if __name__ == "__main__":
    mine = strategy_of(ranks=2, accumulate=2)
    found = trained(mine, ranks=2, accumulate=2)
    mine.run.close()
    plain = trained("ddp", ranks=2, accumulate=2)
    torch.save({"mine": found, "plain": plain}, f"{sys.argv[1]}.{torch.distributed.get_rank()}")
