"""What compiling a block changes, measured on one machine, eager beside it: kept until code, shapes or versions change."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Self

from . import nests
from .record import Record

if TYPE_CHECKING:
    from torch import nn

    from .job import Job

PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True)
class PhaseTime:
    """Of forward, or of backward. On a CPU device nothing is launched."""

    launch_seconds: float  # of the host
    device_seconds: float  # of the device, where it never waits for the host
    alone_seconds: float  # from the host's first to the device's last


@dataclass(frozen=True)
class BlockTime:
    """One call of a block, forward and backward."""

    forward: PhaseTime
    backward: PhaseTime
    saved_bytes: int  # for backward, parameters apart
    forward_peak_bytes: int  # beyond what was there before
    backward_peak_bytes: int  # likewise, what forward saved included

    @property
    def seconds(self) -> float:
        return self.forward.alone_seconds + self.backward.alone_seconds


@dataclass(frozen=True)
class BlockFigures:
    key: str  # of all that they depend on
    kind: str  # class of the block
    micro_batch: int
    eager: BlockTime | None  # None where it cannot be compiled
    compiled: BlockTime | None
    compile_seconds: float
    why_not: str = ""
    date: str = ""

    @property
    def speedup(self) -> float:
        return self.eager.seconds / self.compiled.seconds if self.eager and self.compiled else 1.0


@dataclass(frozen=True)
class CompiledFigures(Record):
    """All that is known of one machine."""

    kind: ClassVar[str] = "compiled"
    version: ClassVar[int] = 1

    machine: str  # fingerprint
    blocks: tuple[BlockFigures, ...] = ()

    def of(self, key: str) -> BlockFigures | None:
        return next((each for each in self.blocks if each.key == key), None)

    def with_all(self, found: Iterable[BlockFigures]) -> Self:
        """With these in place of what was known of the same blocks."""
        new = {each.key: each for each in found}
        return replace(self, blocks=(*(each for each in self.blocks if each.key not in new), *new.values()))


MARKS = {"_is_hf_initialized"}  # left by whoever drew the weights, and not there where none were drawn


def code_of(block: nn.Module) -> str:
    """A short name for what a block is: the source of its classes, its parameters and its settings, but for a layer's number."""
    parts: list[Any] = []
    for path, module in block.named_modules():
        parts.append([path, type(module).__module__, type(module).__qualname__, _source(type(module))])  # type: ignore[arg-type]  # all classes are hashable
        own = vars(module)
        for kind in ("_parameters", "_buffers"):
            held = own.get(kind, {})  # a traced or scripted module keeps its own elsewhere, and is not compiled
            parts += [[kind, key, None if each is None else [list(each.shape), each.requires_grad]] for key, each in held.items()]
        plain = {key: value for key, value in sorted(own.items()) if isinstance(value, PLAIN) and key not in MARKS}
        parts += [[key, "its number" if _counts(key, value) else value] for key, value in plain.items()]
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:16]


def _counts(key: str, value: Any) -> bool:
    """Whether it only says which of its siblings a block is."""
    return type(value) is int and ("idx" in key or "index" in key or key in ("layer", "layer_number", "layer_id"))


@functools.lru_cache(maxsize=1024)  # to parse a file takes milliseconds, for every module of a model
def _source(kind: type) -> str:
    try:
        return hashlib.sha256(inspect.getsource(kind).encode()).hexdigest()[:16]
    except (OSError, TypeError):
        return ""


def key_of(job: Job, code: str, micro_batch: int, versions: str) -> str:
    """Of the figures of a block: its code, the job's shapes, dtypes and numerics, and the versions of what compiles it."""
    shapes = [[name, list(tensor.shape[1:]), str(tensor.dtype)] for name, tensor in nests.named_tensors(job.sample)]
    facts = [code, job.precision, str(job.compile), micro_batch, shapes, versions]
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
