"""The loss of a batch in evaluation mode."""

from __future__ import annotations

import torch
from torch import Tensor

from anyfit.values.job import Batch

from .engine import Engine
from .peers import Peers


def mean_loss(engine: Engine, peers: Peers, batch: Batch) -> Tensor:
    """The mean over a batch of any size; over several ranks, over all of their batches together."""
    modes = [(module, module.training) for module in engine.model.modules()]
    engine.model.eval()
    try:
        with peers.telling():
            total, weight = engine.evaluate(batch)
    finally:
        for module, training in modes:
            module.training = training
    if not engine.ranks.are_several:
        return total if weight is None else total / weight
    if weight is None:
        rows = engine.job.rows(batch) or 1  # where only the user's `split` knows, batches count alike
        total, weight = total * rows, torch.as_tensor(float(rows))
    mine = torch.stack([total.double(), weight.to(total.device).double()])
    sums = engine.ranks.of_all(mine if not peers.is_mute else torch.zeros_like(mine)).sum(0)
    return (sums[0] / sums[1]).to(total.dtype)
