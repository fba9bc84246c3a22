"""The wire between the ranks of a pipeline: point to point in a process group of their own, through the host's memory.

gloo documents no sends of CUDA tensors, so parcels are packed on the host whatever the stages compute on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch import Tensor


@dataclass(frozen=True)
class GroupWire:
    members: Sequence[int]  # ranks of the run, by place in the pipeline
    group: Any  # gloo's

    def send(self, tensor: Tensor, to: int) -> Callable[[], object]:
        work: Any = dist.isend(tensor, self.members[to], group=self.group)
        return work.wait  # type: ignore[no-any-return]

    def receive(self, into: Tensor, source: int) -> None:
        dist.recv(into, self.members[source], group=self.group)
