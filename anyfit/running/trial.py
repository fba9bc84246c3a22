"""A trial of a loss: by which rule losses of micro-batches make that of the batch, found with numbers.

L(a + b) is compared with L(a) and L(b), random ops held still, and once more with labels ignored and masks emptied in b.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.placing import Placed
from anyfit.placing.cells import PYTHON, Numpy
from anyfit.placing.chunks import quietly
from anyfit.placing.forward_state import Note, Places
from anyfit.placing.walk import Walk
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import AGREED_MEAN, LossRule, divisors
from anyfit.values.memento import leaving_no_trace
from anyfit.values.nests import map_tensors, named_tensors

from .shortage import is_about_memory

HALF = 2  # samples of each part
DRAWN = 0.25  # in the place of normal numbers: not 0, which would hide what is added or multiplied
WEIGHTS_SEEN = 1024  # elements of a parameter, about, that are compared
MOST_CELLS = 2**18  # places of state that are looked at
# Relative, of losses: what the order of sums makes of rounding. A loss that is itself bf16 has few digits.
TOLERANCE, OF_FEW_DIGITS = {"fp32": 2e-5, "bf16": 2e-3}, 1.5e-2

Found = TypeVar("Found")
Saving = Callable[[], AbstractContextManager[None]]


class Samples:
    """A few of Job(sample=): all of them, and halves."""

    def __init__(self, job: Job, half: int = HALF) -> None:
        self._job = job
        self._can_be_cut = job.batch_size > 1 and job.uncuttable() is None
        self.half = min(half, job.batch_size // 2)
        self.whole = job.sample
        if self._can_be_cut and job.split is None:
            self.whole = job.with_rows(job.sample, 2 * self.half)
        elif self._can_be_cut:
            rest = job.batch_size - 2 * self.half
            self.whole = job.cut(job.sample, [2 * self.half, rest] if rest else [2 * self.half])[0]

    @property
    def few(self) -> Batch:
        return self.halves(self.whole)[0] if self._can_be_cut else self.whole

    def of(self, rows: int) -> Batch:
        is_whole = rows == self._job.batch_size or not self._can_be_cut or self._job.split is not None
        return self._job.sample if is_whole else self._job.with_rows(self._job.sample, rows)

    def reordered(self) -> list[Batch]:
        """The same samples in other orders, so that the halves differ."""
        if self._job.split is not None or self.half < HALF:
            return []
        return [self._job.reordered(self.whole, order) for order in ((0, 2, 1, 3), (0, 3, 1, 2))]

    def halves(self, batch: Batch) -> list[Batch]:
        return self._job.cut(batch, [self.half, self.half])

    def one_by_one(self) -> list[Batch]:
        return self._job.cut(self.whole, [1] * (2 * self.half))

    def uneven(self, emptied: str, rule: LossRule, *, leaves_one: bool) -> Batch:
        """In one entry nothing counts in the second half, or only the first place of each row. In the others only one row of
        each half counts, so that no two entries go together."""
        names = iter([name for name, _ in named_tensors(self.whole)])

        def change(tensor: Tensor) -> Tensor:
            name = next(names)
            if tensor.dim() == 0 or name not in rule.entries:
                return tensor
            changed, nothing = tensor.clone(), rule.labels.get(name, _least(tensor))
            if name != emptied:
                changed[1 : self.half] = changed[self.half + 1 :] = nothing
            elif leaves_one and tensor.dim() > 1:
                changed[self.half :, 1:] = nothing
            else:
                changed[self.half :] = nothing
            return changed

        return map_tensors(self.whole, change)


def _least(tensor: Tensor) -> float:
    """What counts least: 0 of a mask, and of other entries the least value that there is, which the model takes."""
    is_mask = tensor.dtype == torch.bool or bool(((tensor == 0) | (tensor == 1)).all())
    return 0 if is_mask or not tensor.numel() else tensor.min().item()


@dataclass(frozen=True)
class _Told:
    loss: float
    weight: float | None
    divisors: tuple[float, ...]
    counts: tuple[str, ...] = ()  # what each divisor counts

    def divided(self, index: int) -> tuple[float, float]:
        """(sum, weight) by one of the divisors. Nothing that counts is 0 / 0."""
        weight = self.divisors[index]
        return (self.loss * weight if weight else 0.0), weight


class Still(TorchDispatchMode):
    """Random ops give what is expected of them, the same for every sample, so that two forwards can be compared. Dropout keeps
    everything. A random permutation is a reversal: it is to show that samples are mixed."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return func(*args, **kwargs)
        arguments = func._schema.arguments
        given = {each.name: each.default_value for each in arguments if each.has_default_value()}  # torch leaves these out
        given |= dict(zip((each.name for each in arguments), args, strict=False)) | dict(kwargs)
        name = func._overloadpacket.__name__.rstrip("_")
        if name in ("native_dropout", "_fused_dropout"):
            kept: Any = given.get("input", given.get("self"))
            return kept.clone(), torch.ones_like(kept, dtype=torch.bool if name == "native_dropout" else torch.uint8)
        if given.get("dropout_p"):  # fused attention
            args = tuple(0.0 if each.name == "dropout_p" else arg for each, arg in zip(arguments, args, strict=False))
            return func(*args, **{key: 0.0 if key == "dropout_p" else value for key, value in kwargs.items()})
        made = func(*args, **kwargs)  # for its shape and dtype
        if isinstance(made, Tensor):
            self._settle(made, name, given)
        return made

    @staticmethod
    def _settle(made: Tensor, name: str, given: dict[str, Any]) -> None:
        if name == "randperm":
            made.copy_(torch.arange(made.numel() - 1, -1, -1, device=made.device))
        elif name == "bernoulli":
            chance = given.get("p", given.get("self"))
            made.copy_(torch.as_tensor(chance).expand(made.shape))
        elif name in ("rand", "rand_like"):
            made.fill_(0.5)
        elif name == "uniform":
            made.fill_((given.get("from", 0.0) + given.get("to", 1.0)) / 2)
        elif name in ("randint", "randint_like", "random"):
            low, high = given.get("low", given.get("from", 0)) or 0, given.get("high", given.get("to"))
            made.fill_((low + high) // 2 if high is not None else 1)
        elif name == "normal":
            mean, deviation = given.get("mean", 0.0), given.get("std", 1.0)
            made.copy_(torch.as_tensor(mean + DRAWN * deviation).expand(made.shape))
        elif name == "multinomial":
            made.copy_(torch.arange(made.shape[-1], device=made.device).expand(made.shape))
        elif made.dtype.is_floating_point:
            made.fill_(DRAWN if name.startswith("randn") else 1.0)


class Trial:
    """Compares the loss of samples with the losses of their parts."""

    def __init__(self, job: Job, placed: Placed, samples: Samples) -> None:
        self._job, self._placed, self._samples = job, placed, samples
        self._tolerance = TOLERANCE[job.precision]

    def rule(self, read: LossRule) -> LossRule:
        """The rule by which losses of halves make that of both; that the batch is not cut, where there is none."""
        found = read if not read.may_be_cut else self._tried(read)
        if not found.may_be_cut and "mean-of-micro-batches" in self._job.agree:
            return replace(found, kind="mean", why=f"agreed by Job(agree=), though {found.why}", proved=True)
        return replace(found, proved=True)

    def _tried(self, read: LossRule) -> LossRule:
        try:
            both, *halves = self._told(self._samples.whole)
            changed = self._changed_by_forward()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            return _whole(read, f"the loss does not run on {2 * self._samples.half} samples ({_said(error)})")
        if changed is not None:
            why = f"{changed} changes in forward, once for each micro-batch where it would once for the batch"
            return replace(_whole(read, why), ways_out=AGREED_MEAN)
        if read.kind == "weighted":
            pairs = [(each.loss, each.weight or 0.0) for each in (both, *halves)]
            if self._add_up(pairs[0], pairs[1:]):
                return read
            return _whole(
                read,
                f"the loss returns (sum, weight), and those of two halves ({_shown(*pairs[1:])}) do not add up to that of "
                f"both ({_shown(pairs[0])}): is the first a mean, or are samples compared with each other?",
            )
        if read.kind == "divided":
            return self._divided(read, both, halves)
        try:
            cuts = [[each.loss for each in parts] for parts in (halves, *self._other_cuts())]  # halves may be equal by chance
        except Exception as error:
            return _whole(read, f"the loss does not run on samples in another order, nor one by one ({_said(error)})")
        if all(self._near(both.loss, sum(losses) / len(losses), losses) for losses in cuts):
            return read
        if all(self._near(both.loss, sum(losses), losses) for losses in cuts):
            return replace(read, kind="sum", why="the loss is a sum over samples")
        first, second = (f"{each.loss:.6g}" for each in halves)
        return _whole(
            read,
            f"the loss of {2 * self._samples.half} samples is {both.loss:.6g}, which is neither the mean nor the sum of "
            f"their halves' ({first} and {second}): it compares samples with each other, or counts what differs between them",
        )

    def _other_cuts(self) -> list[list[_Told]]:
        """Halves of the samples in other orders; one by one, where the model asks for an order (as packed sequences do)."""
        try:
            return [self._told(each)[1:] for each in self._samples.reordered()]
        except Exception:  # no user has asked for these batches
            return [[self._loss_of(each) for each in self._samples.one_by_one()]]

    def _changed_by_forward(self) -> str | None:
        part = self._prepared(self._samples.few)

        def changed(saving: Saving) -> str | None:
            with leaving_no_trace(self._job, self._placed.model) as memento, Still(), _batch_norms_still(self._placed.model):
                with saving():
                    self._job.evaluate(self._placed.model, part)
                state = _State(self._job, self._placed)
                with saving():
                    self._job.evaluate(self._placed.model, part)
                return state.change() or memento.files.read_again

        try:
            return saving_little(self._placed, changed)
        finally:
            self._placed.gradients.clear()

    def _divided(self, read: LossRule, both: _Told, halves: list[_Told]) -> LossRule:
        """By the first divisor that adds up, also where one half counts for nothing."""
        adding = [index for index in range(len(both.divisors)) if self._adds_up(index, both, halves)]
        if adding and both.counts == ("labels",):  # one cross-entropy alone: torch itself counts its labels
            return read
        uneven: set[int] = set()  # divisors that were seen to differ between the halves
        for emptied in read.entries:
            ways = (self._finite(self._samples.uneven(emptied, read, leaves_one=one)) for one in (False, True))
            told = next((each for each in ways if each is not None), None)
            if told is not None:
                other, *parts = told
                adding = [index for index in adding if index < len(other.divisors) and self._adds_up(index, other, parts)]
                uneven |= {index for index in adding if len({each.divisors[index] for each in parts}) > 1}
        for index in adding:
            if index in uneven:
                return replace(read, divisor=index)
        return _whole(read, f"{read.why}, which does not add up over micro-batches")

    def _adds_up(self, index: int, both: _Told, halves: list[_Told]) -> bool:
        return self._add_up(both.divided(index), [each.divided(index) for each in halves])

    def _add_up(self, both: tuple[float, float], halves: list[tuple[float, float]]) -> bool:
        sums, weights = zip(*halves, strict=True)
        near = all(self._near(one, sum(parts), (one, *parts)) for one, parts in zip(both, (sums, weights), strict=True))
        return near and all(map(math.isfinite, (*both, *sums, *weights)))

    def _near(self, one: float, other: float, scales: Iterable[float]) -> bool:
        return abs(one - other) <= self._tolerance * max(*map(abs, scales), 1e-12)

    def _finite(self, batch: Batch) -> list[_Told] | None:
        try:
            told = self._told(batch)
        except Exception:  # what the model does with such masks is no matter of ours
            return None
        return told if math.isfinite(told[0].loss) and math.isfinite(told[1].loss) else None

    def _told(self, batch: Batch) -> list[_Told]:
        """The losses of both halves together, and of each."""
        return [self._loss_of(part) for part in (batch, *self._samples.halves(batch))]

    def _loss_of(self, batch: Batch) -> _Told:
        def evaluated(saving: Saving) -> _Told:
            with leaving_no_trace(self._job, self._placed.model), _batch_norms_still(self._placed.model), Still(), saving():
                total, weight = self._job.evaluate(self._placed.model, self._prepared(batch))
            found = [] if weight is not None else divisors(total)
            if total.dtype.itemsize < 4:
                self._tolerance = OF_FEW_DIGITS
            return _Told(
                float(total.detach()),
                None if weight is None else float(weight),
                tuple(float(each.exact) for each in found),
                tuple(each.counts for each in found),
            )

        return saving_little(self._placed, evaluated)

    def _prepared(self, batch: Batch) -> Batch:
        return self._job.prepare(batch, self._placed.device, self._placed.lanes.send)


def _whole(read: LossRule, why: str) -> LossRule:
    """That the batch must not be cut."""
    return replace(read, kind="whole", why=why)


def _said(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.200}"


def _shown(*pairs: tuple[float, float]) -> str:
    return " and ".join(f"{total:.6g}, {weight:.6g}" for total, weight in pairs)


def saving_little(placed: Placed, act: Callable[[Saving], Found]) -> Found:
    """Acts where ops save little: nothing goes backward. A loss that goes backward itself needs what its ops save."""
    try:
        return act(lambda: saved_tensors_hooks(_keep_numbers, _as_it_is))
    except RuntimeError as error:
        if is_about_memory(error):  # to save more would not help
            raise
    return act(placed.watching)


def _keep_numbers(tensor: Tensor) -> Tensor | None:
    """Of what a forward saves, only single numbers and labels: nothing goes backward."""
    return tensor.detach() if tensor.numel() == 1 or not tensor.is_floating_point() else None


def _as_it_is(packed: Any) -> Any:
    if packed is None:
        raise RuntimeError("the loss goes backward by itself")
    return packed


@contextmanager
def _batch_norms_still(model: nn.Module) -> Iterator[None]:
    """Batch norms in evaluation mode: the trace has looked at their statistics."""
    norms = [each for each in model.modules() if isinstance(each, nn.modules.batchnorm._BatchNorm) and each.training]
    for each in norms:
        each.training = False
    try:
        yield
    finally:
        for each in norms:
            each.training = True


class _State:
    """What a forward may change besides torch's random numbers: buffers, attributes, variables of the loss, other generators,
    weights. Noted after one forward and after a second: what the first only makes ready is no change."""

    def __init__(self, job: Job, placed: Placed) -> None:
        self._model, self._device = placed.model, placed.device
        model = Walk(most=MOST_CELLS).of_block(placed.model, placed.model.forward, "the model")
        loss = Walk(model, most=MOST_CELLS).of([job.loss], "the loss")
        numpys = Numpy()
        numpys.is_exact = True
        self._places = Places([PYTHON, numpys], model, loss)
        self._note = Note(self._places, self._places.read(), self._device)
        self._weights = self._some_of_weights()

    def change(self) -> str | None:
        """The first place that is not as it was."""
        with quietly():
            owner = next((name for name, each in self._model.named_parameters() if each.grad is not None), None)
        if owner is not None:
            return f"the gradient of {owner}, by a backward inside the loss,"
        now = self._some_of_weights()
        edited = next((name for name, before in self._weights.items() if not torch.equal(before, now[name])), None)
        return edited or next(iter(self._note.differences(self._note.now())), None)

    @torch.no_grad()
    def _some_of_weights(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self._model.named_parameters():
            if parameter.layout == torch.strided and parameter.numel():
                flat = parameter.detach().reshape(-1)
                found[name] = flat[:: max(flat.numel() // WEIGHTS_SEEN, 1)].clone()
        return found
