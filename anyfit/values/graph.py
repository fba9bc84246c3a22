"""Graph: what one micro-batch does to the machine, seen on fake tensors: every op, every storage, every parameter.

Time in a graph is counted in ops: `born` and `dies` are indices into `ops`. A storage that dies at i is still there while
op i runs; one that outlives the pass dies at len(ops). Views share a storage, so they cost nothing. Edges are moments too: the
ops that read a storage or a parameter, through whatever views.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar, Literal

from .loss_rule import MEAN, LossRule
from .record import Record

# Ops whose results selective recomputation keeps: products, convolutions and attention. All others are recomputed.
COSTLY_OPS = (
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "convolution",
    "_grouped_mm",
    "_scaled_dot_product_flash_attention",
    "_scaled_dot_product_efficient_attention",
    "_scaled_dot_product_cudnn_attention",
    "_scaled_dot_product_flash_attention_for_cpu",
)
LEAST_OFFLOAD_BYTES = 2**16  # of a saved tensor: what is smaller stays, a copy of its own would cost more than it frees
PAGE_BYTES = 4096  # the host's memory is taken in multiples of these

Phase = Literal["forward", "backward"]
OpKind = Literal["matmul", "convolution", "attention", "memory", "exchange"]  # the last with other ranks of a tensor axis
ValueKind = Literal["activation", "gradient", "input"]


@dataclass(frozen=True)
class Op:
    name: str  # as the dispatcher calls it: "mm.default"
    kind: OpKind  # which rate of the machine bounds it
    phase: Phase
    recomputes: bool  # forward work that runs inside backward
    block: int  # index into Graph.blocks
    module: str  # the innermost module, by its path in the model
    dtype: str
    flops: int
    bytes: int  # read and written
    aligned: bool  # rows of all operands start on 16-byte boundaries
    calls: int  # of the dispatcher that led up to it: the op itself and the views before it
    call: int  # index into Graph.calls


@dataclass(frozen=True)
class Value:
    """One storage that the pass allocates."""

    bytes: int
    kind: ValueKind
    born: int
    dies: int
    block: int
    saved_by: int = -1  # the block that alone saves it for its backward; -1 where none does, or several
    reads: tuple[int, ...] = ()  # ops that read it, ascending
    writes: tuple[int, ...] = ()  # ops that change it in place, ascending; it is born with the one that makes it


@dataclass(frozen=True)
class Parameter:
    name: str
    names: tuple[str, ...]  # all of them, where weights are tied
    shape: tuple[int, ...]
    dtype: str  # as the run holds it
    elements: int
    trainable: bool
    used: bool  # this batch gave it a gradient
    block: int
    group: int  # of the optimizer; -1 outside every group
    adds_up: bool = False  # its gradient: that of a first use, to which those of others are added in place
    reads: tuple[int, ...] = ()  # ops that read it, ascending
    is_cut: bool = False  # over a tensor axis: shape and elements are of one rank's part


@dataclass(frozen=True)
class Block:
    name: str  # path of the module; "" for what belongs to no block
    kind: str  # class of the module
    input_bytes: int = 0  # of floating tensors that one pass hands to it by position: what recomputation starts from
    # Of the storages that one pass through it saves, parameters apart, those that can be offloaded, in whole pages: also
    # buffers, and what other blocks save too.
    offload_bytes: int = 0
    is_whole: bool = False  # compiled or scripted, or part of what is: nothing can come between its ops
    code: str = ""  # a short name for its source, parameters and settings: what figures of its compiled code depend on
    is_cut: bool = False  # over a tensor axis, and so one node of autograd's graph


@dataclass(frozen=True)
class UpdateRule:
    """What the optimizer does to each element, learnt by stepping it once on a small stand-in."""

    name: str
    state_bytes_per_element: tuple[float, ...]  # a parameter group each
    bytes_per_element: float  # read and written by one step
    ops_per_parameter: float
    scratch_bytes_per_element: float  # temporary, of one parameter, or of all where `scratch_is_shared` is False
    scratch_is_shared: bool


def largest_sets(found: Iterable[frozenset[int]]) -> tuple[tuple[int, ...], ...]:
    """Without those that are part of another, in order."""
    kept: list[frozenset[int]] = []
    for each in sorted(set(found), key=len, reverse=True):
        if not any(each <= other for other in kept):
            kept.append(each)
    return tuple(sorted(tuple(sorted(each)) for each in kept))


@dataclass(frozen=True)
class Graph(Record):
    kind: ClassVar[str] = "graph"
    version: ClassVar[int] = 7

    model: str  # class of the model
    micro_batch: int
    tokens: int  # of one micro-batch; samples, where the batch has no token sequence
    batch_bytes: int  # of one micro-batch as the host hands it over
    precision: Literal["bf16", "fp32"]
    parameters: tuple[Parameter, ...]
    buffer_bytes: int
    blocks: tuple[Block, ...]
    ops: tuple[Op, ...]
    calls: tuple[str, ...]  # the distinct ones (values/call.py), in the order in which they first occur
    backward_starts: int  # index of backward's first op
    values: tuple[Value, ...]
    update: UpdateRule
    fingerprint: str  # of the model: names, shapes, dtypes
    notes: tuple[str, ...] = ()  # on how it was traced: by a real run, without some sizes
    # By index, parameters that one op, or one block that is recomputed, or code that holds views of them, needs at once.
    together: tuple[tuple[int, ...], ...] = ()
    state_stays: str = ""  # why no model state may leave the device, if it may not
    loss: LossRule = MEAN  # how losses of micro-batches make that of the batch
    tensor: int = 1  # ranks of a tensor axis, of one of which this is the pass

    @property
    def flops(self) -> int:
        return sum(op.flops for op in self.ops)

    def elements(self, *, trainable: bool = False) -> int:
        """Of all parameters of the model, or of those that are trained, whatever a rank of a tensor axis has of them."""
        counted = (each for each in self.parameters if each.trainable or not trainable)
        return sum(each.elements * (self.tensor if each.is_cut else 1) for each in counted)

    def kept(self, value: Value) -> bool:
        """Forward made it and backward still needs it."""
        return value.born < self.backward_starts <= value.dies and value.kind == "activation"

    def home(self, value: Value) -> int:
        """The block whose choice decides what becomes of a value that is kept: outside all of them it stays."""
        return value.saved_by if value.saved_by >= 0 else self.outside

    @cached_property
    def worked_out(self) -> dict[tuple[object, ...], int]:
        """Figures of it that take long to work out, by what else they depend on."""
        return {}

    @cached_property
    def outside(self) -> int:
        """The index of what belongs to no block."""
        return next(index for index, block in enumerate(self.blocks) if not block.name)

    @cached_property
    def reads(self) -> tuple[tuple[int, ...], ...]:
        """By op, the values that it reads."""
        return self._by_op(value.reads for value in self.values)

    @cached_property
    def writes(self) -> tuple[tuple[int, ...], ...]:
        """By op, the values that it makes or changes in place. Inputs are there before the first op."""
        return self._by_op(value.writes if value.kind == "input" else (value.born, *value.writes) for value in self.values)

    def _by_op(self, moments: Iterable[Iterable[int]]) -> tuple[tuple[int, ...], ...]:
        found: list[list[int]] = [[] for _ in self.ops]
        for index, each in enumerate(moments):
            for moment in each:
                found[moment].append(index)
        return tuple(map(tuple, found))

    def live_bytes(self, gradients: Literal["kept", "consumed"]) -> list[int]:
        """Bytes alive during each op. Gradients of parameters live to the end, or are consumed by the op that made them."""
        change = [0] * (len(self.ops) + 1)
        for value in self.values:
            dies = value.born if value.kind == "gradient" and gradients == "consumed" else value.dies
            change[value.born] += value.bytes
            if dies < len(self.ops):
                change[dies + 1] -= value.bytes
        live, total = [], 0
        for delta in change[: len(self.ops)]:
            total += delta
            live.append(total)
        return live
