"""Parity: a few steps as a plan places them, beside the same steps in plain PyTorch.

Plain PyTorch here is a loop over the same micro-batches with torch's own clipping and the user's optimizer. In bf16 it keeps fp32
masters, and rounds them by the split's own rule. Where it has no room for the model, a few of the repeated blocks are compared,
on few samples, by a plan that makes every choice of the given one, with chunks so small that there are some of each placement.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor, nn

from anyfit.placing import place
from anyfit.values.check import Parity
from anyfit.values.job import Batch, Job
from anyfit.values.layout import lay_out
from anyfit.values.plan import Activations, Placement, Plan, Stage
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes

from .engine import free
from .run import Run
from .shortage import is_about_memory

Item = TypeVar("Item")
Kept = dict[str, tuple[Activations, bool]]  # by block, what becomes of its activations, and whether it is compiled
Weights = dict[str, Tensor]
Kinds = Callable[[nn.Module], Mapping[str, str]]  # by the path of each block of a model, in order, what it is built like

STEPS = 2  # the second starts from what the first left: state of the optimizer, weights on their way, an order learnt
TOLERANCE = {"fp32": 1e-5, "bf16": 1e-2}
PLAIN_BYTES = 8  # a parameter: what plain PyTorch holds besides the state as a run has it, whole masters and fp32 gradients
HOST_BYTES = 24  # a parameter, of two models and four sets of weights
UNITS = ((3, 2), (1, 1))  # of repeated blocks that are left, at least and for every choice; the second where memory is short
MOST_PERIOD = 8  # blocks, of a unit that is repeated
LEAST_CHUNKS, CHUNKS_PER_PLACEMENT = 6, 3
LEAST_SLOTS = 4  # for the weights of one op, which smaller chunks may hold apart
ROWS = 2  # samples of a micro-batch: batch norms refuse a single one


@dataclass(frozen=True, eq=False)
class Case:
    job: Job
    plan: Plan
    model: nn.Module
    batch: Batch
    compared: str
    is_cut: bool


def case_of(job: Job, plan: Plan, profile: Profile, model: nn.Module, kinds: Kinds) -> Case | str:
    """A copy of the model, as it was built, where plain PyTorch has room for it; else of a part of it; or why neither fits."""
    lacking = _lacking(profile, plan)
    if lacking is None:
        model = copy.deepcopy(model)
        return Case(replace(job, model=model), plan, model, job.sample, "the whole model", is_cut=False)
    for units in UNITS:
        try:
            small = _cut(job, plan, model, kinds, units)
        except Exception as error:  # of the user's model or optimizer, which may count on all blocks
            return f"{lacking}, and with fewer blocks it cannot be made: {_said(error)}"
        if small is None:
            return f"{lacking}, and neither its blocks nor its samples can be fewer"
        count = sum(parameter.numel() for parameter in small.model.parameters())
        needed = int((profile.state.resident / profile.parameters + PLAIN_BYTES) * count)
        if needed <= profile.device_limit_bytes:
            return small
        lacking_still = f"{lacking}; with {small.compared} it still takes {show_bytes(needed)}"
    return lacking_still


def _lacking(profile: Profile, plan: Plan) -> str | None:
    """Which memory plain PyTorch lacks for the whole model; None where it fits."""
    large_enough = [each for each in profile.passes if each.micro_batch >= plan.micro_batch]
    each = large_enough[-1] if large_enough else profile.passes[0]
    plain = profile.state.resident + PLAIN_BYTES * profile.parameters + max(each.peak_bytes, each.peak_bytes_accumulating)
    needed = {"device": plain + profile.context_bytes + profile.workspace_bytes, "host": HOST_BYTES * profile.parameters}
    there = {"device": profile.device_limit_bytes, "host": profile.host_limit_bytes}
    for tier, size in needed.items():
        if size > there[tier]:
            return f"plain PyTorch takes {show_bytes(size)} of {tier} memory, and {show_bytes(there[tier])} are allowed"
    return None


# ---------------------------------------------------------------------- a smaller one of the same kind


def _cut(job: Job, plan: Plan, model: nn.Module, kinds: Kinds, units: tuple[int, int]) -> Case | None:
    """The same job with fewer blocks and samples; None where it has no more than are kept."""
    blocks = kinds(model)
    kept = _kept(model, blocks, plan, *units)
    count = len(kept)
    rows = min(plan.micro_batch, ROWS)
    batch_size = rows
    if plan.accumulation > 1:  # with a last micro-batch that is smaller, where the plan has one
        batch_size += 1 if plan.batch_size % plan.micro_batch else rows
    if count == len(blocks) and batch_size >= job.batch_size:
        return None
    with _only(model, blocks, kept) as renamed:
        small = copy.deepcopy(model)
    batch = job.cut(job.sample, [size for size in (batch_size, job.batch_size - batch_size) if size])[0]
    job_of_it = replace(job, model=small, sample=batch, max_sample=None, batch_size=batch_size, micro_batch=None)
    choices = {renamed[path]: choice for path, (choice, _) in kept.items() if choice != "keep"}
    compiled = tuple(renamed[path] for path, (_, is_compiled) in kept.items() if is_compiled)
    chunk_bytes, placements = _placements(job_of_it, plan, small)
    plan_of_it = replace(
        plan,
        batch_size=batch_size,
        micro_batch=rows,
        accumulation=-(-batch_size // rows),
        stages=(Stage(0, count, choices, compiled),),
        chunk_bytes=chunk_bytes,
        chunks=placements,
        slots=plan.slots and max(plan.slots, LEAST_SLOTS),
        fingerprint=None,
    )
    of_blocks = f"{count} of {len(blocks)} blocks" if count < len(blocks) else "all blocks"
    of_samples = f"{batch_size} of {job.batch_size} samples" if batch_size < job.batch_size else "all samples"
    return Case(job_of_it, plan_of_it, small, batch, f"{of_blocks} and {of_samples}", is_cut=True)


def _kept(model: nn.Module, kinds: Mapping[str, str], plan: Plan, least: int, per_choice: int) -> Kept:
    """Of blocks that are repeated in a list a few, with every choice that is made of any of them, in the same order."""
    kept: Kept = {}
    activations, compiled = plan.activations, plan.compiled
    for container, paths in _by_container(kinds).items():
        is_list = isinstance(model.get_submodule(container), nn.ModuleList | nn.Sequential)
        stretches = repeats([kinds[path] for path in paths]) if is_list else [(0, len(paths), 1)]
        for start, period, count in stretches:
            units = [paths[at : at + period] for at in range(start, start + period * count, period)]
            choices = [[(activations.get(path, "keep"), path in compiled) for path in unit] for unit in units]
            distinct = [choice for index, choice in enumerate(choices) if choice not in choices[:index]]
            units = units[: max(least, per_choice * len(distinct))]
            for index, unit in enumerate(units):
                kept |= zip(unit, _spread(distinct, index, len(units)), strict=True)
    return kept


def _by_container(paths: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path in paths:
        found.setdefault(path.rpartition(".")[0], []).append(path)
    return found


def _spread(items: Sequence[Item], index: int, count: int) -> Item:
    """The item for one of `count` places, equal ones side by side."""
    return items[index * len(items) // count]


def repeats(kinds: Sequence[str]) -> Iterator[tuple[int, int, int]]:
    """(start, period, count) of stretches in which a unit of `period` kinds comes `count` times; they cover all.

    >>> list(repeats("abbbb")), list(repeats("xyxyxyz"))
    ([(0, 1, 1), (1, 1, 4)], [(0, 2, 3), (6, 1, 1)])
    """
    at = 0
    while at < len(kinds):
        best = 1, 1
        for period in range(1, MOST_PERIOD + 1):
            count = 1
            while kinds[at + count * period : at + (count + 1) * period] == kinds[at : at + period]:
                if at + (count + 1) * period > len(kinds):
                    break
                count += 1
            if count > 1 and period * count > best[0] * best[1]:
                best = period, count
        yield at, *best
        at += best[0] * best[1]


@contextmanager
def _only(model: nn.Module, blocks: Iterable[str], kept: Iterable[str]) -> Iterator[dict[str, str]]:
    """Inside, the model has only these blocks. Gives their new paths by their old ones."""
    before: list[tuple[nn.Module, dict[str, nn.Module | None]]] = []
    staying = _by_container(kept)
    renamed: dict[str, str] = {}
    try:
        for container, paths in _by_container(blocks).items():
            module, prefix = model.get_submodule(container), f"{container}." if container else ""
            dropped = set(paths) - set(staying[container])
            children = {name: child for name, child in module._modules.items() if prefix + name not in dropped}
            is_numbered = bool(dropped) and all(name.isdecimal() for name in children)
            names = {name: str(index) if is_numbered else name for index, name in enumerate(children)}
            renamed |= {path: prefix + names[path.removeprefix(prefix)] for path in staying[container]}
            before.append((module, module._modules))
            module._modules = {names[name]: child for name, child in children.items()}
        yield renamed
    finally:
        for module, modules in before:
            module._modules = modules


def _placements(job: Job, plan: Plan, model: nn.Module) -> tuple[int, tuple[Placement, ...]]:
    """A chunk size by which there are some chunks of each placement the plan has, and these, in the plan's order."""
    distinct = list(dict.fromkeys(plan.chunks)) or [Placement()]
    wanted = max(LEAST_CHUNKS, CHUNKS_PER_PLACEMENT * len(distinct))
    placeables = job.placeables(model, job.build_optimizer(model)[1])
    chunk_bytes = plan.chunk_bytes
    while (count := len(lay_out(placeables, chunk_bytes))) < min(wanted, len(placeables)) and chunk_bytes > 1:
        chunk_bytes //= 2
    return chunk_bytes, tuple(_spread(distinct, index, count) for index in range(count)) if plan.chunks else ()


# ---------------------------------------------------------------------- both, and how far apart


def compare(case: Case, device: torch.device) -> Parity | str:
    """How far apart they are; or why that cannot be known.

    Of a gradient that is nothing but rounding, such as that of the bias of an attention's keys, Adam makes a whole step. Two runs
    of plain PyTorch whose weights differ by rounding are then far apart as well: such tensors say nothing.
    """
    before = {name: parameter.detach().float().cpu().clone() for name, parameter in case.model.named_parameters()}
    plan, sizes = case.plan, case.plan.micro_batches
    try:
        plain_losses, plain = _plain_steps(case.job, copy.deepcopy(case.model), sizes, case.batch, device)
        free(device)
        again_losses, again = _plain_steps(case.job, _nudged(copy.deepcopy(case.model)), sizes, case.batch, device)
    except Exception as error:
        if isinstance(error, MemoryError) or is_about_memory(error):
            return "plain PyTorch ran out of memory"
        if case.is_cut:
            return f"with {case.compared} plain PyTorch cannot run it: {_said(error)}"
        raise
    free(device)
    tolerance = TOLERANCE[case.job.precision]
    own = _differences(before, again, plain)
    steady = [name for name, difference in own.items() if difference <= tolerance / 2]
    if not steady or _largest(again_losses, plain_losses) > tolerance / 2:
        return "plain PyTorch itself takes other steps each time, from the same weights and random numbers"
    torch.manual_seed(case.job.seed)
    with Run(case.job, plan, place(case.job, plan, case.model, device)) as run:
        try:
            losses = [float(run.step(case.batch)) for _ in range(STEPS)]
        except (MemoryError, RuntimeError) as error:
            if not case.is_cut or not is_about_memory(error):
                raise
            return f"with {case.compared} the plan ran out of memory: {error}"
        mine = run.state_dict()
    loss_difference, differences = _largest(losses, plain_losses), _differences(before, mine, plain)
    weight_difference = max(differences[name] for name in steady)
    agrees = max(loss_difference, weight_difference) <= tolerance
    return Parity(case.compared, STEPS, loss_difference, weight_difference, agrees)


def _said(error: BaseException) -> str:
    first_line = str(error).partition("\n")[0]
    return f"{type(error).__name__}: {first_line}"


@torch.no_grad()
def _nudged(model: nn.Module) -> nn.Module:
    """The model with every weight moved by one epsilon. fp16 and bf16 stay: their epsilon is large."""
    for parameter in model.parameters():
        if parameter.is_floating_point() and parameter.element_size() >= 4 and parameter.layout == torch.strided:
            parameter.mul_(1 + torch.finfo(parameter.dtype).eps)
    return model


def _plain_steps(job: Job, model: nn.Module, sizes: list[int], batch: Batch, device: torch.device) -> tuple[list[float], Weights]:
    model.to(device)
    dtypes = job.dtypes(model)
    optimizer, _ = job.build_optimizer(model)
    scheduler = None if job.scheduler is None else job.scheduler(optimizer)
    exact = {name: parameter.data for name, parameter in model.named_parameters() if dtypes[name] != parameter.dtype}
    torch.manual_seed(job.seed)
    losses = []
    for _ in range(STEPS):
        for name, parameter in model.named_parameters():
            parameter.data = _round(exact[name]) if name in exact else parameter.data
        loss, gradients = _plain_gradients(job, model, sizes, batch, device)
        for name, parameter in model.named_parameters():
            parameter.data = exact.get(name, parameter.data)
            parameter.grad = gradients.get(name)
        if job.clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        model.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss)
    return losses, {name: parameter.detach().cpu() for name, parameter in model.named_parameters()}


def _plain_gradients(job: Job, model: nn.Module, sizes: list[int], batch: Batch, device: torch.device) -> tuple[float, Weights]:
    sums: dict[str, Tensor] = {}
    total, weight_sum = torch.zeros((), device=device), torch.zeros((), device=device)
    for part, rows in zip(job.cut(batch, sizes), sizes, strict=True):
        value, weight = job.evaluate(model, job.prepare(part, device))
        if weight is not None and len(sizes) == 1:  # as a run does: gradients that are only rounding round alike
            value, weight = value / weight, None
        scaled = value * (rows / job.batch_size) if weight is None else value
        scaled.backward()
        total += scaled.detach().float()
        weight_sum += 0 if weight is None else weight
        for name, parameter in model.named_parameters():
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                sums[name] = sums[name] + gradient if name in sums else gradient
                parameter.grad = None
    divisor = weight_sum if weight_sum > 0 else torch.ones((), device=device)
    return float(total / divisor), {name: gradient / divisor for name, gradient in sums.items()}


def _round(exact: Tensor) -> Tensor:
    """fp32 to bf16, ties away from zero, as the split rounds."""
    bits = exact.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


def _largest(losses: Sequence[float], plain: Sequence[float]) -> float:
    """The largest relative difference."""
    return max(abs(mine - expected) / max(abs(expected), 1e-12) for mine, expected in zip(losses, plain, strict=True))


def _differences(before: Weights, mine: Weights, plain: Weights) -> dict[str, float]:
    """By tensor, how far two updates of the same weights are apart, against the weight or the update, whichever is larger."""
    found = {}
    for name, expected in plain.items():
        scale = max(float(expected.float().norm()), float((expected.float() - before[name]).norm()), 1e-12)
        found[name] = float((mine[name].float() - expected.float()).norm()) / scale
    return found
