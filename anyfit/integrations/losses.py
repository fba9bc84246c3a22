"""A Trainer's own `compute_loss` and `create_optimizer` as those of a job.

A plan is made by running them, on fake tensors, on a few samples, on rank 0 alone; and a step may be repeated. What a loss tells
loggers on the way (TRL's appends an accuracy to a list) must not count then, and must not wait for other ranks. So around a call
that trains nothing, the plain data of the Trainer is put back, and gathering is left out. The run does not see the Trainer, which
keeps its own state in its own checkpoints: it is held by a weak reference.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional
from torch.optim import Optimizer
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from .windows import IGNORED, Piece, Shares, Window

GATHERS = ("gather", "gather_for_metrics", "reduce")  # of an accelerator
MEANS_OVER_LABELS = (torch.ops.aten.nll_loss_forward, torch.ops.aten.nll_loss2d_forward)  # each cross-entropy ends in one
MEAN = 1  # as torch numbers reductions
PLAIN = (bool, int, float, str, type(None))
MOST_PLAIN = 1000  # entries of a nest of lists and dicts that are copied
TAKEN_FOR_NUMBERS: Mapping[Any, Any] = {
    Tensor.item: 1, Tensor.tolist: 1, Tensor.__bool__: True, Tensor.__int__: 1, Tensor.__float__: 1.0, Tensor.__index__: 1,
}  # fmt: skip


class TrainerLoss:
    """`Job(loss=)`: what the Trainer would go backward from, and its weight (windows.py)."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def __call__(self, model: nn.Module, window: Window) -> tuple[Tensor, float]:
        trainer: Any = self._trainer()
        with contextlib.nullcontext() if trainer.is_stepping else _leaving_no_trace(trainer):
            losses = [_loss_of(trainer, model, piece) for piece in window]
        return sum(losses[1:], losses[0]), sum(piece.weight for piece in window)


def _loss_of(trainer: Any, model: nn.Module, piece: Piece) -> Tensor:
    inputs: Any = piece.inputs
    inputs = type(inputs)(dict(inputs))  # compute_loss may take entries out
    with contextlib.ExitStack() as stack:
        stack.enter_context(trainer.compute_loss_context_manager())
        if any(isinstance(each, FakeTensor) for each in inputs.values()):
            stack.enter_context(_numbers_of(model))
        means = None if piece.shares is None else stack.enter_context(Means(piece.items))
        loss: Tensor = trainer.compute_loss(model, inputs, num_items_in_batch=piece.items)
    if piece.shares is not None and means is not None and not means.divides_by_items:
        share = means.share(piece, piece.shares)
        # A mean over no labels is no number, and its gradients are 0: it stays connected to the weights.
        loss = loss * share if share else loss.nan_to_num() * 0
    if (not trainer.model_accepts_loss_kwargs or piece.items is None) and trainer.compute_loss_func is None:
        loss = loss / piece.batches
    return loss


class TrainerOptimizer:
    """`Job(optimizer=)`: what `create_optimizer` makes. It is for the run, and not for the Trainer to step."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = weakref.ref(trainer)

    def __call__(self, model: nn.Module) -> Optimizer:
        trainer: Any = self._trainer()
        before, trainer.optimizer = trainer.optimizer, None
        try:
            takes_model = "model" in inspect.signature(trainer.create_optimizer).parameters
            made: Optimizer = trainer.create_optimizer(model) if takes_model else trainer.create_optimizer()
            return made
        finally:
            trainer.optimizer = before


class Means(TorchDispatchMode):
    """Sees what the loss of a piece is a mean over. By ops: whoever recomputes a block looks at its arguments, and reads none."""

    def __init__(self, items: Tensor | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._items, self.divides_by_items = items, False
        self._targets: list[Tensor | None] = []  # of means over labels; None for one that weighs them

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        packet = func._overloadpacket
        is_read = self._items is not None and any(each is self._items for each in args)
        self.divides_by_items |= is_read and packet is not torch.ops.aten.detach
        if packet in MEANS_OVER_LABELS:
            _, target, weight, reduction, ignored = args
            if reduction == MEAN:
                self._targets.append(target if weight is None and ignored == IGNORED else None)
        return func(*args, **(kwargs or {}))

    def share(self, piece: Piece, shares: Shares) -> float:
        """Of a piece in its batch's loss: by the labels that a cross-entropy was given, or by rows where there is none."""
        labels = piece.inputs.get("shift_labels", piece.inputs.get("labels"))
        if not self._targets or not isinstance(labels, Tensor) or isinstance(labels, FakeTensor):
            return shares.rows
        targets = [None if each is None else each.flatten() for each in self._targets]
        after = functional.pad(labels, (0, 1), value=IGNORED)[..., 1:]
        for share, forms in ((shares.labels, (labels,)), (shares.next_labels, (labels[..., 1:], after))):
            flat = [form.flatten() for form in forms]
            if all(each is not None and any(torch.equal(each, form) for form in flat) for each in targets):
                return share
        raise ValueError(
            "a batch does not fit and its loss is a mean over other labels than the batch's own, so that pieces of it do not add "
            "up; divide a sum by num_items_in_batch in compute_loss, or give a smaller per_device_train_batch_size"
        )


# ---------------------------------------------------------------------- calls that train nothing


@contextlib.contextmanager
def _leaving_no_trace(trainer: Any) -> Iterator[None]:
    put_back = plain_data(trainer)
    for name in GATHERS:
        setattr(trainer.accelerator, name, _as_it_is)  # hides the method
    try:
        yield
    finally:
        for name in GATHERS:
            vars(trainer.accelerator).pop(name, None)
        put_back()


def _as_it_is(value: Any, *_: Any, **__: Any) -> Any:
    return value


def plain_data(trainer: Any) -> Callable[[], None]:
    """Notes numbers, text, and small lists and dicts of such that a Trainer holds; what it returns puts them back."""
    noted = {name: (value, copy.deepcopy(value)) for name, value in vars(trainer).items() if _is_plain(value, [MOST_PLAIN])}

    def put_back() -> None:
        for name, (value, before) in noted.items():
            if isinstance(value, dict):
                value.clear()
                value.update(copy.deepcopy(before))
            elif isinstance(value, list):
                value[:] = copy.deepcopy(before)
            setattr(trainer, name, value)

    return put_back


def _is_plain(value: Any, left: list[int]) -> bool:
    left[0] -= 1
    if left[0] < 0 or not isinstance(value, dict | list | tuple):
        return left[0] >= 0 and isinstance(value, PLAIN)
    return all(_is_plain(each, left) for each in (value.values() if isinstance(value, dict) else value))


@contextlib.contextmanager
def _numbers_of(model: nn.Module) -> Iterator[None]:
    """Fake tensors have no numbers. A loss that asks for one outside of the model, for a metric, gets a 1; inside of it, anyfit
    has to know that the model needs one."""
    with Numbers() as mode:
        handles = [
            model.register_forward_pre_hook(mode.enter_model),
            model.register_forward_hook(mode.leave_model, always_call=True),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


class Numbers(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self._in_model = 0

    def enter_model(self, *_: Any) -> None:
        self._in_model += 1

    def leave_model(self, *_: Any) -> None:
        self._in_model -= 1

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not self._in_model and func in TAKEN_FOR_NUMBERS and isinstance(args[0], FakeTensor):
            return TAKEN_FOR_NUMBERS[func]
        return func(*args, **(kwargs or {}))
