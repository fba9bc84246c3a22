"""Whether a batch may be cut, read off its loss: `read_rule(...) -> LossRule`.

One more forward is run, on a few fake samples, and every op is watched for what makes a loss more than a mean over samples:

    a division by a number computed from the batch        mask.sum(), labels that are not ignored
    a mean over as many elements as the batch's values say     losses[mask].mean()
    statistics of a batch norm

Such a number may be the loss's own divisor, at the head of its graph (`values.loss_rule.divisors`). Then losses of micro-batches
are weighted by it, and add up exactly. Anywhere else the batch is not cut. Numbers are tried before the first step
(running/rehearsal.py): samples that are compared with each other do not show here.
"""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.values import job as job_module
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import AGREED_MEAN, MEAN, LossRule, divisors
from anyfit.values.nests import is_dense, named_tensors

from .around import place_of
from .needs import arguments_of, storage_of, tensors_in, written_by

aten = torch.ops.aten
JOB_FILE = job_module.__file__  # from which the user's loss is called
PRIMES = (7, 11, 13, 17, 19, 23)  # samples of the fake batch: a size that is no multiple of them has no dimension of samples
DIVIDES = {aten.div, aten.true_divide, aten.floor_divide, aten.div_, aten.reciprocal, aten.rsqrt}
COUNTS_LABELS = {aten.nll_loss_forward, aten.nll_loss2d_forward}
BATCH_NORMS = {
    aten.native_batch_norm, aten._native_batch_norm_legit, aten.cudnn_batch_norm, aten.miopen_batch_norm,
    aten._batch_norm_with_update, aten._native_batch_norm_legit_functional,
}  # fmt: skip
SIZED_BY_VALUES = {aten.nonzero, aten.masked_select, aten._unique2, aten.unique_consecutive, aten.unique_dim}
MEANS = {aten.mean, aten.mse_loss, aten.smooth_l1_loss, aten.huber_loss, aten.binary_cross_entropy, aten.soft_margin_loss}
# Inputs at these places say which rows are read: a value that is no row ends the process on a GPU.
INDEX = {
    aten.embedding: (1,), aten.index_select: (2,), aten.gather: (2,), aten.scatter: (2,), aten.scatter_add: (2,),
    aten.index: (1,), aten.index_add: (2,), aten.take: (1,), aten.index_put: (1,), aten._embedding_bag: (1, 2),
    aten.scatter_: (2,), aten.scatter_add_: (2,), aten.index_add_: (2,), aten.index_put_: (1,), aten.one_hot: (0,),
}  # fmt: skip


@dataclass(frozen=True)
class Found:
    """A number computed from the batch that something is divided by."""

    said: str
    entries: frozenset[str]  # of the batch, that it is computed from


def rows_for(job: Job) -> int:
    """Samples of the fake batch to look at: a number that no size of a sample is a multiple of."""
    if job.split is not None:
        return job.batch_size
    sample = job.sample if job.max_sample is None else job.max_sample
    sizes = [size for _, tensor in named_tensors(sample) if is_dense(tensor) for size in tensor.shape[1:]]
    return next((prime for prime in PRIMES if all(size % prime for size in sizes)), PRIMES[0])


def read_rule(job: Job, model: nn.Module, batch: Batch, rows: int) -> LossRule:
    """`batch` are so many samples, fake ones or real, for a model of the same kind."""
    weights = {_storage(each): name for name, each in model.named_parameters()}
    with BatchNumbers(batch, rows, weights) as numbers:
        total, weight = job.evaluate(model, batch)
    if numbers.edited:
        why = f"{numbers.edited} is edited in forward, once for each micro-batch where it would be once for the batch"
        return _agreed(job, model, numbers, LossRule("whole", why, ways_out=AGREED_MEAN))
    if weight is not None:
        return _agreed(job, model, numbers, LossRule("weighted", "the loss returns (sum, weight)"))
    heads = divisors(total)
    at_head = {_storage(each.value) for each in heads if isinstance(each.value, Tensor)}
    elsewhere = [found for storage, found in numbers.divided_by.items() if storage not in at_head]
    own = [numbers.divided_by[_storage(each.value)] for each in heads if _storage(each.value) in numbers.divided_by]
    if not elsewhere and numbers.varying and not any(each.counts == "elements" for each in heads):
        elsewhere = [Found(numbers.varying[0], frozenset())]
    rule = MEAN
    if numbers.scales:
        rule = LossRule("whole", numbers.scales, ways_out=AGREED_MEAN)
    elif elsewhere and own:
        rule = LossRule("divided", elsewhere[0].said)  # perhaps by the same number, twice: numbers will tell
    elif elsewhere:
        rule = LossRule("whole", elsewhere[0].said)
    elif own or numbers.varying:
        rule = LossRule("divided", own[0].said if own else numbers.varying[0])
    return _agreed(job, model, numbers, rule)


def _agreed(job: Job, model: nn.Module, numbers: BatchNumbers, rule: LossRule) -> LossRule:
    if not rule.may_be_cut and "mean-of-micro-batches" in job.agree:
        rule = LossRule("mean", f"agreed by Job(agree=), though {rule.why}", proved=True)
    if numbers.normalises and "batch-norm-of-micro-batches" not in job.agree:
        names = (name for name, each in model.named_modules() if isinstance(each, nn.modules.batchnorm._BatchNorm))
        name = next(names, "a batch norm")
        rule = LossRule(
            "whole",
            f"{name} takes its statistics from the whole batch, and micro-batches have others",
            ways_out="a group, layer or instance norm has no such statistics; to agree to those of micro-batches: "
            "Job(agree=['batch-norm-of-micro-batches'])",
        )
    return replace(
        rule,
        labels={name: value for name, value in numbers.labels.items() if name not in numbers.indices},
        counted=tuple(sorted({name for found in numbers.divided_by.values() for name in found.entries} - numbers.indices)),
    )


class BatchNumbers(TorchDispatchMode):
    """Follows what is computed from a batch of so many samples."""

    def __init__(self, batch: Batch, rows: int, weights: Mapping[int, str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.divided_by: dict[int, Found] = {}  # by storage of the number
        self.varying: list[str] = []  # means over as many elements as values say
        self.labels: dict[str, int] = {}  # entries of the batch that are labels, and the value of those that are ignored
        self.indices: set[str] = set()  # entries that say which rows are read
        self.normalises = False  # by statistics of the batch
        self.scales = ""  # gradients, by what is in the batch
        self.edited = ""  # a parameter that forward moves towards another, which may equal it at the start
        self._weights = weights  # names of parameters, by storage
        self._rows = rows
        self._from: dict[int, frozenset[str]] = {}  # by storage, the entries of the batch that it was computed from
        self._varies: set[int] = set()  # storages of a size that depends on values
        self._kept: list[Any] = []  # so that no identity is another's
        for name, tensor in named_tensors(batch):
            if tensor.dim():  # one number belongs to all samples
                self._follow(tensor, frozenset((name,)))

    def _follow(self, tensor: Tensor, entries: frozenset[str]) -> None:
        identity = _storage(tensor)
        self._from[identity] = entries | self._from.get(identity, frozenset())
        self._kept.append(storage_of(tensor) or tensor)

    def _entries(self, nest: Any) -> frozenset[str]:
        return frozenset().union(*(self._from.get(_storage(tensor), ()) for tensor in tensors_in(nest)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        entries = self._entries((args, kwargs))
        packet = func._overloadpacket
        if func._schema.is_mutable and not self.edited:
            names = [self._weights.get(_storage(each)) for each in written_by(func, args, {})]
            read = {self._weights.get(_storage(each)) for each in tensors_in((args, kwargs))} - {None, *names}
            self.edited = next((name for name in names if name and read), "")
        if packet in BATCH_NORMS:
            given = arguments_of(func, args, kwargs)
            is_training = bool(given.get("training", given.get("train", "update" in str(func))))
            self.normalises |= is_training and args[0].shape[0] != 1  # which is an instance norm
        if not entries:
            return result
        inputs, outputs = tensors_in((args, kwargs)), tensors_in(result)
        if packet in DIVIDES:
            self._note_division(args)
        if packet in COUNTS_LABELS:
            self._note_labels(func, args, kwargs, outputs)
        for place in INDEX.get(packet, ()):
            if place < len(args):
                self.indices |= self._entries([each for each in tensors_in(args[place]) if each.dtype != torch.bool])
        if packet is aten.embedding and len(args) > 3 and args[3]:
            self.scales = f"{_place()} scales gradients by how often a row is read in the batch (scale_grad_by_freq)"
        varies = packet in SIZED_BY_VALUES or any(_storage(each) in self._varies for each in inputs)
        if varies and packet in MEANS and all(each.numel() == 1 for each in outputs):
            self.varying.append(f"{_place()} takes a mean over as many elements as the batch's values say")
        elif varies:
            known = args[0] if args and isinstance(args[0], Tensor) and _storage(args[0]) not in self._varies else None
            puts_back = known is not None and any(each.shape == known.shape for each in outputs)
            if packet in SIZED_BY_VALUES or not puts_back:
                self._varies.update(map(_storage, outputs))
        for each in outputs:
            self._follow(each, entries)
        return result

    def _note_division(self, args: Any) -> None:
        number = args[1] if len(args) > 1 else args[0]
        if not isinstance(number, Tensor) or storage_of(number) is None or number.numel() % self._rows == 0:
            return
        entries = self._from.get(_storage(number))
        if entries:
            self.divided_by[_storage(number)] = Found(f"{_place()} divides by a number computed from the batch", entries)

    def _note_labels(self, func: Any, args: Any, kwargs: Mapping[str, Any], outputs: list[Tensor]) -> None:
        given = arguments_of(func, args, kwargs)
        entries = self._from.get(_storage(given["target"]), frozenset())
        if given["reduction"] == 1 and entries:
            self.labels |= {name: int(given["ignore_index"]) for name in entries}
            said = f"{_place()} divides by the number of labels that are not ignored"
            self.divided_by[_storage(outputs[1])] = Found(said, entries)


def _place() -> str:
    """The line of the user's loss or model at which an op was called."""
    stack = traceback.extract_stack()
    ours = max((index for index, frame in enumerate(stack) if frame.filename == JOB_FILE), default=-1)
    return place_of(traceback.StackSummary.from_list(stack[ours + 1 :]), "the loss")


def _storage(tensor: Any) -> int:
    """Identity of its memory; of a sparse or nested tensor, which has none of its own, that of the tensor itself."""
    if not isinstance(tensor, Tensor):
        return 0
    storage = storage_of(tensor)
    return -id(tensor) if storage is None else int(storage._cdata)
