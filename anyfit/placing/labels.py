"""What the jobs of lanes, and parts of the computation, are called: timelines sort by it, and a waiting rank tells it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum


class Task(Enum):
    """In words that the name of a chunk or a block follows. The member's own name is its kind in a timeline."""

    STEP = "step"
    FORWARD = "forward"
    BACKWARD = "backward"
    NORM = "norm"
    NORMS = "the others' norms"
    WEIGHTS = "the others' weights"
    FETCH = "fetch"
    GATHER = "gather"
    OFFLOAD = "offload"
    RETURN = "return"
    GRADIENTS = "gradients of"
    ADD = "add gradients of"
    REDUCE = "reduce"
    UPDATE = "update"
    SPECULATE = "speculate on"
    COMMIT = "commit"
    FINISH = "finish"
    UPLOAD = "upload"
    LIFT = "lift state of"
    LOWER = "lower state of"
    READ = "read state of"
    WRITE = "write state of"
    ALL_GATHER = "all-gather"  # of fresh weights, once a step; GATHER is for one use of sharded ones
    OTHER = "other work"


@dataclass(frozen=True)
class Label:
    task: Task = Task.OTHER
    chunk: int | None = None
    name: str = ""  # of a block, or the number of a step
    is_wait: bool = False  # of the computation, for such a job

    @property
    def awaited(self) -> Label:
        return replace(self, is_wait=True)

    @property
    def kind(self) -> str:
        return self.task.name.lower()

    def __str__(self) -> str:
        what = self.name if self.chunk is None else f"chunk {self.chunk}"
        return f"{'wait for ' * self.is_wait}{self.task.value} {what}".rstrip()
