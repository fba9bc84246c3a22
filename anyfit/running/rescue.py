"""Rescue: a run that has run out of memory is planned anew, with what it has shown, and goes on with the step it was in.

A step that ends in an error about device memory has changed nothing that counts. So its graph and gradients are freed, random
states and buffers restored, the state is moved to where a plan with more room wants it, and the step is repeated with the same
micro-batches: the losses are those of a run to which nothing happened. The forecast was too small by at least `needed /
expected`; a margin for the rest of the step is added, twice as large with each rescue. Where nothing fits with it, plans are
tried that need less than the one at hand.
"""

from __future__ import annotations

import ctypes
import datetime
import functools
import operator
import random
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from anyfit.placing.cells import NUMPY_BYTES, generators, numpy_address
from anyfit.placing.forward_state import Note, Places
from anyfit.placing.walk import Walk
from anyfit.values.corrections import Correction
from anyfit.values.no_plan import NoPlan
from anyfit.values.plan import Plan
from anyfit.values.plan_rows import memory_name
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes

from .extra_state import ExtraState
from .rehearsal import Findings
from .shortage import Shortfall

MOST_RESCUES = 24  # of one step: each has a plan that needs less than the last, so that they come to an end by themselves
FIRST_STEP = 0.08  # beyond what was seen to be needed; then twice and four times as much
MOST_STEP = 0.64
LEAST_STEP = 0.02  # where no plan has room for more
MOST_CELLS = 2**20  # of all that a step can reach
SMALL_BYTES = 2**20  # of a buffer


@dataclass(eq=False)
class Rescue:
    """What a run asks for another plan. Only one whose plan the planner made has it: what was planned by hand is not changed."""

    make_profile: Callable[[], Profile]  # of the job, with all micro-batches; called when first needed
    search: Callable[[Profile], Plan]  # the planner
    keep: Callable[[Correction], None]  # takes what was learnt about the forecast, for later plans
    context_bytes: int = 0  # of the device, outside torch's allocator
    beside_bytes: Callable[[int], int] = lambda _host_bytes: 0  # of host memory, counted besides the plan's so many
    planned_from: Profile | None = None  # with the micro-batches alone that the plan was chosen from

    @functools.cached_property
    def profile(self) -> Profile:
        return self.planned_from or self.make_profile()

    def with_less_device(self, plan: Plan, short: Shortfall, rescues: int) -> Plan:
        """A plan with room for what was needed, after so many rescues of the same step; NoPlan where there is none."""
        profile = self.profile
        profile = replace(profile, device_limit_bytes=min(profile.device_limit_bytes, short.there_bytes))
        expected = plan.forecast.reserved_bytes
        tried = [profile]
        if short.needed_bytes > expected * (1 + plan.forecast.reserved_error):  # else others hold what was to be there
            today, needed = datetime.date.today().isoformat(), short.needed_bytes
            steps = (min(FIRST_STEP * 2**rescues, MOST_STEP), LEAST_STEP)
            margins = [needed / expected * (1 + step) - 1 for step in steps]
            tried = [profile.corrected(Correction(profile.model, short.where, needed, expected, each, today)) for each in margins]
        try:
            found = self._first(plan, tried)
        except NoPlan as verdict:
            return self._smaller(plan, profile, short, verdict)
        correction = self.profile.correction
        if correction is not None and correction != profile.correction:
            self.keep(correction)
        return found

    def _smaller(self, plan: Plan, profile: Profile, short: Shortfall, verdict: NoPlan) -> Plan:
        """A plan that needs less than this one by what was missing, whatever the margin; the verdict where there is none."""
        missing = max(short.needed_bytes - short.there_bytes, int(LEAST_STEP * plan.forecast.needed_bytes))
        limit = min(plan.forecast.needed_bytes, short.there_bytes) - missing
        try:
            found = self._first(plan, [replace(profile, device_limit_bytes=limit)])
        except NoPlan:
            raise verdict from None
        self.profile = profile
        return replace(found, limit_bytes={**found.limit_bytes, "device": profile.device_limit_bytes})

    def with_less_host(self, plan: Plan, fewer_bytes: int) -> Plan:
        """A plan with so much less on the host; NoPlan where there is none."""
        held = plan.forecast.peak_bytes["host"]
        if fewer_bytes >= held:
            why = f"the plan has {show_bytes(held)} on the host, and {show_bytes(fewer_bytes)} are to go"
            raise NoPlan(why, fewer_bytes - held)
        kept = held - fewer_bytes
        return self._first(plan, [replace(self.profile, host_limit_bytes=kept + self.beside_bytes(kept))])

    def restricted(self, plan: Plan, findings: Findings) -> Plan:
        return self._first(plan, [findings.restrict(self.profile)])

    def _first(self, plan: Plan, profiles: Sequence[Profile]) -> Plan:
        """The plan for the first of these profiles that has one; with smaller micro-batches than were profiled where none has."""
        try:
            return self._first_of(plan, profiles)
        except NoPlan:
            if self.planned_from is None:
                raise
        self.planned_from, known = None, {each.micro_batch for each in profiles[0].passes}
        more = tuple(each for each in self.make_profile().passes if each.micro_batch not in known)
        return self._first_of(plan, [replace(each, passes=(*each.passes, *more)) for each in profiles])

    def _first_of(self, plan: Plan, profiles: Sequence[Profile]) -> Plan:
        """With the same micro-batch if any has one, since another rounds otherwise and draws other random numbers."""
        why = NoPlan(f"micro-batches of {plan.micro_batch} were not profiled", 0)
        for is_asked_for in (operator.eq, operator.lt):
            for profile in profiles:
                passes = tuple(each for each in profile.passes if is_asked_for(each.micro_batch, plan.micro_batch))
                try:
                    found = self.search(replace(profile, passes=passes)) if passes else None
                except NoPlan as verdict:
                    why = verdict
                    continue
                if found is not None:
                    self.profile = profile
                    return found
        raise why


def said_of_device(step: int, short: Shortfall, before: Plan, after: Plan) -> str:
    needed, there, expected = map(show_bytes, (short.needed_bytes, short.there_bytes, before.forecast.reserved_bytes))
    old, new = (f"{plan.forecast.reserved_error:.0%}" for plan in (before, after))
    memory = memory_name("device", before.device_kind)
    how = f"with a margin of {new} instead of {old}" if new != old else "for less than before"
    if new == old and after.limit_bytes["device"] < before.limit_bytes["device"]:
        how = "for as much as is there"
    return (
        f"after step {step}: {needed} of {memory} were needed {short.where}, of {there}, and {expected} were forecast; "
        f"planned anew {how}, and going on{_in_passes(before, after)}: {_choices(after)}"
    )


def said_of_host(step: int, left_bytes: float, before: Plan, after: Plan) -> str:
    old, new = (show_bytes(plan.forecast.peak_bytes["host"]) for plan in (before, after))
    return (
        f"after step {step}: {show_bytes(left_bytes)} of host memory are left; planned anew with {new} of it instead of {old}, "
        f"and going on{_in_passes(before, after)}: {_choices(after)}"
    )


def _choices(plan: Plan) -> str:
    return "; ".join(decision.choice for decision in plan.decisions if decision.name in ("model state", "activations"))


def _in_passes(before: Plan, after: Plan) -> str:
    if after.micro_batch == before.micro_batch:
        return ""
    return f" in micro-batches of {after.micro_batch} instead of {before.micro_batch}, whose sums round otherwise"


@dataclass(eq=False)
class Kept:
    module: nn.Module
    name: str
    buffer: Tensor
    version: int
    copy: Tensor


class Buffers:
    """Random numbers and buffers as they were before a step: a few microseconds, and one copy of all small buffers together."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._device = device
        self._modules = [module for module in model.modules() if module._buffers]
        self._kept: dict[tuple[int, str], Kept] = {}
        self._random: tuple[Any, ...] = ()
        self._numpy_memory, self._numpy_state = b"", dict[str, Any]()

    def note(self) -> None:
        """Large buffers that have not changed since the last note are not copied again. Small ones are: torch does not count what
        batch norms write into their statistics."""
        cuda = torch.cuda.get_rng_state(self._device) if self._device.type == "cuda" else None
        self._random = torch.get_rng_state(), cuda, random.getstate(), self._read_numpy()
        copies: dict[torch.dtype, list[Kept]] = {}
        for module in self._modules:
            for name, buffer in module._buffers.items():
                kept = self._kept.get((id(module), name))
                if buffer is None:
                    continue
                if kept is None or kept.buffer is not buffer:
                    is_large = buffer.nbytes > SMALL_BYTES and kept is None  # most of these never change
                    copy = buffer.detach().to("cpu", copy=True) if is_large else buffer.detach().clone()
                    self._kept[id(module), name] = Kept(module, name, buffer, buffer._version, copy)
                elif buffer.nbytes <= SMALL_BYTES or kept.version != buffer._version:
                    kept.version = buffer._version
                    copies.setdefault(buffer.dtype, []).append(kept)
        for group in copies.values():
            with torch.no_grad():
                torch._foreach_copy_([kept.copy for kept in group], [kept.buffer for kept in group])

    def _read_numpy(self) -> dict[str, Any]:
        """Reading the state of numpy's global generator takes longer than all else that is noted. So it is read only where its
        memory has changed, or where it holds a normal number that was drawn and not used."""
        address = numpy_address()
        memory = b"" if address is None else ctypes.string_at(address, NUMPY_BYTES)
        if not memory or memory != self._numpy_memory or self._numpy_state["has_gauss"]:
            self._numpy_memory, self._numpy_state = memory, np.random.get_state(legacy=False)
        return self._numpy_state

    @torch.no_grad()
    def restore(self) -> None:
        host, cuda, python, numpy = self._random
        torch.set_rng_state(host)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda, self._device)
        random.setstate(python)
        np.random.set_state(numpy)
        for kept in self._kept.values():
            kept.module._buffers[kept.name] = kept.buffer
            if kept.buffer.nbytes <= SMALL_BYTES or kept.version != kept.buffer._version:
                kept.buffer.copy_(kept.copy)
                kept.version = kept.buffer._version


class Before:
    """What a step reads and changes besides the state of the model, as it was before, to be restored where the step is repeated:
    random states, buffers, attributes of modules and of what they hold, variables of the loss.

    To note all of it takes a microsecond for each thing that holds state. So all is noted where memory is likely to run out, in
    the first steps of a batch of new sizes; in others random states and buffers are. Where such a step runs out of memory and the
    model has been seen to keep more, it is not repeated.
    """

    def __init__(self, model: nn.Module, loss: Callable[..., Any], device: torch.device, extra: ExtraState | None = None) -> None:
        self._model, self._loss, self._device, self._extra = model, loss, device, extra
        self._buffers, self._shared = Buffers(model, device), generators(device)
        self._places, self._read = Places(self._shared), list[Any]()
        self._note: Note | None = None
        self._iterators: list[str] = []

    def note(self) -> None:
        self._buffers.note()
        self._note = None

    def note_all(self) -> None:
        read = self._places.read()
        if not self._read or self._places.holds_new(self._read, read):
            model = Walk(most=MOST_CELLS).of_block(self._model, self._model.forward, "the model")
            loss = Walk(model, most=MOST_CELLS).of([self._loss], "the loss")
            self._places = Places(self._shared, model, loss)
            self._iterators = [*model.iterators, *loss.iterators]
            read = self._places.read()
        self._read, self._note = read, Note(self._places, read, self._device)

    def restore(self) -> None:
        if self._note is not None:
            self._note.put_back()
        else:
            self._buffers.restore()

    def forget(self) -> None:
        """While a note is kept, what is written to is held twice."""
        self._note = None

    def let_go(self) -> None:
        """Frees the noted modules: what replaces their forward holds the placement."""
        self._places, self._read, self._note = Places(self._shared), [], None

    def lost(self) -> str | None:
        """What `restore` could not restore."""
        if self._iterators:
            return f"{self._iterators[0]} is an iterator, which does not go back"
        changed = None if self._note is not None or self._extra is None else next(self._extra.changed(), None)
        return None if changed is None else f"{changed} changes in training, and was not noted before this step"


def let_go(error: BaseException | None) -> None:
    """Frees what the frames of an error and of its causes hold: a step's graph and activations."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        for frame, _line in traceback.walk_tb(error.__traceback__):
            # Who looked at its names has left a copy of them in the frame, up to Python 3.12. Looking again brings it up to date.
            _ = frame.f_locals
        error = error.__cause__ or error.__context__
