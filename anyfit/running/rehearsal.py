"""Rehearsal: what a plan does to the model that plain PyTorch does not, tried on a few samples before the first step.

A plan may cut the batch into micro-batches, or among ranks, and recompute blocks in backward. Whether the result stays the same
depends on the user's code, and some of that shows only with numbers. So, with the placed model and a few samples of Job(sample=):

    the loss        L(a + b) is compared with L(a) and L(b), by the rule read off the trace (values/loss_rule.py), random ops held
                    still; once more with labels ignored and masks emptied in b, where the rule divides by those
    the blocks      one of each kind that the plan recomputes is run a second time, as in backward, and compared to the bit
    cut blocks      are captured, each by the call that the model makes of it, or refused
    compiled code   one of each kind that the plan compiles is compiled and run beside eager (placing/compiled_trial.py)

Buffers, attributes and random states are restored. The planner plans without what cannot be done; a given plan is refused, but
for blocks that cannot be compiled: these stay eager.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn

from anyfit.placing import Placed
from anyfit.placing.compiled_figures import figures_of
from anyfit.placing.replayed import NO_ROOM
from anyfit.placing.trial import rehearsing
from anyfit.values.compiled import BlockFigures
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import AGREED_MEAN, MEAN, LossRule
from anyfit.values.memento import leaving_no_trace
from anyfit.values.plan import Plan
from anyfit.values.profile import Profile

from .evaluating import run_forward
from .one_batch import same_batch
from .trial import Samples, Saving, Trial, saving_little

RECOMPUTED = ("recompute", "selective")  # choices for a block's activations
MOST_HOOKED = 2**24  # elements of a parameter whose hooks are tried


@dataclass(frozen=True)
class Findings:
    loss: LossRule
    kept: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be recomputed, and why
    not_selective: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be recomputed in part
    eager: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be compiled
    op_by_op: Mapping[str, str] = field(default_factory=dict)  # blocks that must not be replayed

    def against(self, plan: Plan) -> str | None:
        """Why the plan would change the result; None where it does not."""
        if plan.cuts and not self.loss.may_be_cut:
            return f"the plan cuts the batch, and {self.loss.why}"
        for name, choice in plan.activations.items():
            if choice in RECOMPUTED and name in self.kept:
                return f"the plan recomputes {name}, and {self.kept[name]}"
            if choice == "selective" and name in self.not_selective:
                return f"the plan recomputes {name} in part, and {self.not_selective[name]}"
        return None

    def ways_out(self, plan: Plan) -> str:
        """What to do instead of a given plan."""
        if plan.cuts and not self.loss.may_be_cut:
            return f"use a plan with micro_batch {plan.batch_size}; {self.loss.ways_out}"
        return "use a plan that keeps it, or let anyfit.plan(job) make one"

    def restrict(self, profile: Profile) -> Profile:
        """The profile without what must not be done."""
        profile = profile.ruled(self.loss).keeping(self.kept).staying_eager(self.eager).launched_op_by_op(self.op_by_op)
        return profile.keeping(self.not_selective, ("selective",)) if self.not_selective else profile

    def joined(self, others: list[Findings]) -> Findings:
        """The findings of all ranks: what one must not do, none does."""
        rule = next((each.loss for each in others if not each.loss.may_be_cut), self.loss)
        if len({(each.loss.kind, each.loss.divisor) for each in others}) > 1 and rule.may_be_cut:
            rule = replace(rule, kind="whole", why="the loss is cut by other rules on other ranks")
        kept = {name: why for each in others for name, why in each.kept.items()}
        not_selective = {name: why for each in others for name, why in each.not_selective.items()}
        eager = {name: why for each in others for name, why in each.eager.items()}
        return Findings(rule, kept, not_selective, eager, {name: why for each in others for name, why in each.op_by_op.items()})


class Rehearsal:
    """Of one job: what was found once holds for every plan. `kinds` says by block which are alike."""

    def __init__(self, job: Job, kinds: Mapping[str, str], hooks: Mapping[str, Sequence[Hook]]) -> None:
        self._job, self._kinds, self._hooks = job, kinds, hooks
        self._known = Findings(MEAN)
        self._tried: set[str] = set()  # blocks

    def of(self, plan: Plan, placed: Placed) -> Findings:
        """What can be done with the job's loss, where the plan cuts the batch, and with blocks that it recomputes or compiles.
        Those that cannot be compiled stay eager in this placement."""
        rule = self._known.loss if self._known.loss.proved else plan.loss or MEAN
        if plan.pipeline > 1:
            return self._of_stages(plan, placed, rule)
        modules = dict(placed.model.named_modules())
        choices = {} if plan.rehearsed else plan.activations
        blocks = {name: modules[name] for name, choice in choices.items() if choice in RECOMPUTED and name not in self._tried}
        tries_loss = plan.cuts and not rule.proved
        placed.compiled.stay_eager(self._known.eager)
        placed.replayed.stay_eager(self._known.op_by_op)
        is_to_cut = bool(plan.cut) and not placed.cuts.are_captured
        if not blocks and not tries_loss and not plan.compiled and not plan.replayed and not is_to_cut:
            return replace(self._known, loss=rule)
        kept, not_selective = dict(self._known.kept), dict(self._known.not_selective)
        samples = Samples(self._same_on_axis(placed))
        with leaving_no_trace(self._job, placed.model):
            if is_to_cut:
                _run_forward(self._job, placed, samples.of(plan.micro_batch))
            if plan.compiled or plan.replayed:
                _prepare(self._job, placed, samples.of(plan.micro_batch))
            if blocks:
                kinds = {name: self._kinds.get(name, name) for name in blocks}  # one that is of no chain is a kind of its own
                found = _blocks_to_keep(self._job, placed, blocks, kinds, [samples.few, samples.of(plan.micro_batch)])
                kept |= found[0]
                not_selective |= found[1]
            if tries_loss:
                hooked = next(
                    (name for name, hooks in self._hooks.items() if not all(adds_up(each, placed.device) for each in hooks)), None
                )
                if hooked is not None and rule.may_be_cut:
                    why = f"a hook changes the gradient of {hooked}: that of each micro-batch, and not of the batch"
                    rule = replace(rule, kind="whole", why=why, ways_out=AGREED_MEAN)
                rule = self._tried_rule(rule, placed, samples)
        eager, op_by_op = {**self._known.eager, **placed.compiled.reasons}, {**self._known.op_by_op, **placed.replayed.reasons}
        mine = Findings(rule, kept, not_selective, eager, op_by_op)
        placed.residency.forget()
        placed.residency.give_back()
        self._known = mine.joined(placed.ranks.objects(mine)) if placed.ranks.are_several else mine
        placed.compiled.stay_eager(self._known.eager)
        placed.replayed.stay_eager(self._known.op_by_op)
        self._tried |= set(blocks)
        return self._known

    def _of_stages(self, plan: Plan, placed: Placed, rule: LossRule) -> Findings:
        """Of the blocks that a rank recomputes. The loss is tried with the first batch: no rank has all of the model."""
        known = replace(self._known, loss=rule)
        modules = dict(placed.model.named_modules())
        tried = {name for name, choice in plan.activations.items() if choice in RECOMPUTED and name not in self._tried}
        if not tried:
            return known
        samples = Samples(self._same_on_axis(placed))
        kinds = {name: self._kinds.get(name, name) for name in tried}
        batch, looked = samples.of(plan.micro_batch), placed.stages.looked
        assert looked is not None

        def loss() -> tuple[Tensor, Tensor | None]:
            return self._job.evaluate(placed.model, self._job.prepare(batch, placed.device, placed.lanes.send))

        with leaving_no_trace(self._job, placed.model):
            trial = rehearsing({name: modules[name] for name in kinds}, kinds)
            with placed.stages.trying(trial) as found, placed.residency.watching():
                run_forward(self._job, placed, looked.training, 0, loss)
        placed.stages.pipe.forget()
        placed.gradients.clear()
        placed.residency.forget()
        placed.residency.give_back()
        mine = Findings(rule, {**known.kept, **found}, {**known.not_selective, **found.selective})
        self._known = mine.joined(placed.ranks.objects(mine))
        self._tried |= tried
        return self._known

    def _same_on_axis(self, placed: Placed) -> Job:
        """With the sample that the first of the ranks has which hold the model together."""
        if placed.ranks.together.n == 1:
            return self._job
        sample = same_batch(self._job.sample, placed.ranks.together, placed.device, lambda _line: None)
        return replace(self._job, sample=sample)

    def _tried_rule(self, read: LossRule, placed: Placed, samples: Samples) -> LossRule:
        """Tries the rule, with fewer samples where all of them run out of memory: micro-batches may be of one."""
        try:
            return Trial(self._job, placed, samples).rule(read)
        except torch.OutOfMemoryError:
            if samples.half == 1 or placed.ranks.are_several:  # ranks that divide weights run the same modules
                raise
        return Trial(self._job, placed, Samples(self._job, 1)).rule(read)


def _prepare(job: Job, placed: Placed, batch: Batch) -> None:
    """Has each block compiled or recorded, and tried, at its first call, and tried again where the first loss changes what it can
    reach. A loss that takes gradients itself may want second ones, which compiled code and recordings have not."""
    try:
        with placed.replayed.severing.on():
            _run_forward(job, placed, batch)
            placed.replayed.heed_untried()
            if placed.replayed.are_changed:
                _run_forward(job, placed, batch)
    except torch.OutOfMemoryError:
        if not placed.replayed.blocks:
            raise
        placed.replayed.stay_eager(dict.fromkeys(placed.replayed.blocks, NO_ROOM))
    except Exception as error:
        said = f"the loss does not run with it ({' '.join(str(error).split()):.150})"
        placed.compiled.stay_eager(dict.fromkeys(placed.compiled.blocks, said))
        placed.replayed.stay_eager(dict.fromkeys(placed.replayed.blocks, said))
    finally:
        placed.gradients.clear()


def _run_forward(job: Job, placed: Placed, batch: Batch) -> None:
    with placed.watching():
        job.evaluate(placed.model, job.prepare(batch, placed.device, placed.lanes.send))


def figures_of_blocks(job: Job, placed: Placed, names: Sequence[str], micro_batch: int, versions: str) -> dict[str, BlockFigures]:
    """By block, what compiling it is worth. `versions` are the compiler's."""
    forward = partial(_run_forward, job, placed, Samples(job).of(micro_batch))
    with leaving_no_trace(job, placed.model):
        try:
            return figures_of(job, placed, names, micro_batch, versions, forward)
        finally:
            placed.gradients.clear()
            placed.residency.forget()
            placed.residency.give_back()


def _blocks_to_keep(
    job: Job, placed: Placed, blocks: Mapping[str, nn.Module], kinds: Mapping[str, str], batches: Sequence[Batch]
) -> tuple[dict[str, str], dict[str, str]]:
    """Tries the first of these batches that the model runs: it may need all samples of its batch."""

    def found(batch: Batch, saving: Saving) -> tuple[dict[str, str], dict[str, str]]:
        with rehearsing(blocks, kinds) as found, saving():
            job.evaluate(placed.model, job.prepare(batch, placed.device, placed.lanes.send))
        return dict(found), found.selective

    for batch in batches[:-1]:
        with suppress(Exception):
            return saving_little(placed, partial(found, batch))
    return saving_little(placed, partial(found, batches[-1]))


def hooks_on_gradients(model: nn.Module) -> dict[str, list[Hook]]:
    """Those of the user's, by name of the parameter. They see the gradient of each micro-batch, where the batch is cut."""
    found = {}
    for name, parameter in model.named_parameters():
        hooks = [Hook(each, parameter.shape, parameter.dtype) for each in (parameter._backward_hooks or {}).values()]
        if parameter._post_accumulate_grad_hooks:
            hooks.append(Hook(None, parameter.shape, parameter.dtype))
        if hooks:
            found[name] = hooks
    return found


@dataclass(frozen=True)
class Hook:
    function: Callable[[Tensor], Tensor | None] | None  # None: one that is given the parameter, and may do anything
    shape: torch.Size
    dtype: torch.dtype


@torch.no_grad()
def adds_up(hook: Hook, device: torch.device) -> bool:
    """Whether what it makes of two gradients adds up to what it makes of their sum, as with a factor or a mask: for small ones
    and large ones, and without hiding that one is not finite."""
    function = hook.function
    if function is None or not hook.dtype.is_floating_point or not 0 < hook.shape.numel() <= MOST_HOOKED:
        return False

    def made(gradient: Tensor) -> Tensor:
        given = gradient.to(device, copy=True)  # it may change it in place
        result = function(given)
        return (given if result is None else result).cpu()

    generator = torch.Generator().manual_seed(0)
    tolerance = 1e-5 if hook.dtype.itemsize >= 4 else 3e-2
    try:
        for size in (1e-4, 1.0, 1e4):
            one, other = (size * torch.randn(hook.shape, generator=generator, dtype=hook.dtype) for _ in range(2))
            if not (made(one) + made(other) - made(one + other)).abs().max() <= tolerance * size:
                return False
        passes = made(torch.ones(hook.shape, dtype=hook.dtype)) != 0
        return bool(made(torch.full(hook.shape, math.nan, dtype=hook.dtype))[passes].isnan().all())
    except Exception:  # it asks for more than a gradient of this shape
        return False
