"""The learning rate by step: up from nothing in the warm-up, then as the schedule says, to nothing in the end."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anyfit.values.record import nearest

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

SCHEDULES: dict[str, Callable[[float], float]] = {  # share of the way after the warm-up -> share of the learning rate
    "cosine": lambda way: 0.5 * (1 + math.cos(math.pi * way)),
    "linear": lambda way: 1 - way,
    "constant": lambda _: 1.0,
}


@dataclass(frozen=True)
class Schedule:
    name: str
    steps: int
    warmup: int  # steps

    def __post_init__(self) -> None:
        refuse_unknown(self.name)

    def share(self, step: int) -> float:
        """Of the learning rate, in the step after so many."""
        if step < self.warmup:
            return step / self.warmup
        way = (step - self.warmup) / max(self.steps - self.warmup, 1)
        return max(SCHEDULES[self.name](min(way, 1.0)), 0.0)

    def __call__(self, optimizer: Optimizer) -> LRScheduler:
        from torch.optim.lr_scheduler import LambdaLR

        return LambdaLR(optimizer, self.share)


def refuse_unknown(name: str) -> None:
    if name not in SCHEDULES:
        raise ValueError(f"--schedule {name} is not known{nearest(name, SCHEDULES)}")


def part_of(whole: int, text: str, option: str) -> int:
    """A number, or a share such as 5%, of a whole.

    >>> part_of(200, "5%", "--eval"), part_of(200, "30", "--eval")
    (10, 30)
    """
    if re.fullmatch(r"\d+", text):
        return int(text)
    share = re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", text)
    if share is not None and float(share[1]) > 100:
        raise ValueError(f"{option} {text}: there is no more than all of it; give a share such as 5%, or a number such as 100")
    if share is None:
        or_file = ", or a file such as other.jsonl" if option == "--eval" else ""
        raise ValueError(f"{option} {text}: give a share such as 5%, or a number such as 100{or_file}")
    return round(whole * float(share[1]) / 100)
