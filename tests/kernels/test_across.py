"""On a CPU there is nothing to bring anywhere; tests/gpu has the rest."""

from __future__ import annotations

import torch

from anyfit.kernels.across import Sender


def test_a_batch_for_the_cpu_is_not_copied() -> None:
    batch = torch.arange(6)
    assert Sender(torch.device("cpu"))(batch) is batch
