"""The trace of one micro-batch: `trace(job, micro_batch) -> Graph`. Nothing is allocated, whatever the model's size."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anyfit.values.batches import named_tensors
from anyfit.values.graph import Graph, Parameter, UpdateRule, Value
from anyfit.values.job import Batch, Job

from .blocks import Blocks, find_blocks
from .errors import explained, refuse_elsewhere, refuse_without_parameters
from .gpu_kernels import AsOnGpu
from .recorder import Recorder
from .repeats import NotPeriodic, Repeat, find_repeats, skipping, write_in
from .stand_in import fake_batch, fake_model
from .update_rule import learn

Kind = Literal["cpu", "cuda"]


def trace(job: Job, micro_batch: int, device: Kind = "cpu") -> Graph:
    """Runs loss and backward of one micro-batch on fake tensors and writes down all that a device of this kind would do."""
    return trace_all(job, [micro_batch], device)[0]


def trace_all(job: Job, micro_batches: Sequence[int], device: Kind) -> list[Graph]:
    """A trace for each of several micro-batches, on one fake model."""
    try:
        return _trace_all(job, micro_batches, device, find_repeats)
    except NotPeriodic:
        return _trace_all(job, micro_batches, device, lambda _blocks: [])


def trace_with(job: Job, micro_batch: int, device: Kind, repeats_of: Callable[[Blocks], list[Repeat]]) -> Graph:
    """The trace, with the middle of the given repeats written in and not run."""
    return _trace_all(job, [micro_batch], device, repeats_of)[0]


def _trace_all(job: Job, micro_batches: Sequence[int], device: Kind, repeats_of: Callable[[Blocks], list[Repeat]]) -> list[Graph]:
    refuse_elsewhere(job.sample if job.max_sample is None else job.max_sample)
    random_state = torch.get_rng_state()
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own before it raises
    disabled, logger.disabled = logger.disabled, True
    collects = gc.isenabled()
    gc.disable()  # a collection in the middle would let storages die by chance, and takes longer the larger the model is
    try:
        with _saying("building the model on fake tensors"):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            model = fake_model(job, mode)
        refuse_without_parameters(model)
        stand_in = _StandIn.of(job, model, mode, device)
        repeats = repeats_of(stand_in.blocks)
        return [_trace(stand_in, micro_batch, repeats) for micro_batch in micro_batches]
    except Exception as error:
        in_the_users_terms = explained(error)
        if in_the_users_terms is None:
            raise
        raise in_the_users_terms from error
    finally:
        torch.set_rng_state(random_state)
        logger.disabled = disabled
        if collects:
            gc.enable()


@dataclass(frozen=True)
class _StandIn:
    """A fake model, and all about it that does not depend on the batch."""

    job: Job
    model: nn.Module
    mode: FakeTensorMode
    device: Kind
    blocks: Blocks
    module_names: Mapping[int, str]  # by identity
    parameters: Mapping[str, nn.Parameter]
    facts: tuple[tuple[Parameter, Parameter], ...]  # about them in the same order: without a gradient, and with one
    rule: UpdateRule
    fingerprint: str

    @classmethod
    def of(cls, job: Job, model: nn.Module, mode: FakeTensorMode, device: Kind) -> _StandIn:
        blocks = find_blocks(model)
        optimizer, group_of = job.build_optimizer(model)
        names: dict[int, list[str]] = {}
        for name, parameter in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        modules = dict(model.named_modules())
        block_of = {
            id(parameter): blocks.of_module.get(id(module), blocks.outside)
            for module in modules.values()
            for parameter in module._parameters.values()
        }
        parameters = dict(model.named_parameters())
        facts = tuple(
            Parameter(
                name=name,
                names=tuple(names[id(parameter)]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                elements=parameter.numel(),
                trainable=parameter.requires_grad,
                used=False,
                block=block_of[id(parameter)],
                group=group_of.get(id(parameter), -1),
            )
            for name, parameter in parameters.items()
        )
        return cls(
            job=job,
            model=model,
            mode=mode,
            device=device,
            blocks=blocks,
            module_names={id(module): name for name, module in modules.items()},
            parameters=parameters,
            facts=tuple((fact, replace(fact, used=True)) for fact in facts),
            rule=learn(optimizer, device),
            fingerprint=job.fingerprint(model),
        )


def _trace(stand_in: _StandIn, micro_batch: int, repeats: list[Repeat]) -> Graph:
    job, model, mode, blocks = stand_in.job, stand_in.model, stand_in.mode, stand_in.blocks
    buffers = list(model.buffers())
    batch = fake_batch(job, micro_batch, mode)
    kernels = AsOnGpu if stand_in.device == "cuda" else nullcontext
    recorder = Recorder(stand_in.module_names, blocks.of_module, blocks.outside, kernels)
    recorder.leave_out(iter([*stand_in.parameters.values(), *buffers]))
    for _, tensor in named_tensors(batch):
        recorder.count_input(tensor)
    twin_of = {
        block: repeat.unit(2)[(block - repeat.first) % repeat.period] for repeat in repeats for block in repeat.skipped
    }  # skipped blocks, and the one that is run in their place

    with skipping(blocks.modules, twin_of), mode, recorder, recorder.watching(), kernels():
        with _saying(f"running the model on a fake batch of {micro_batch} samples like Job(sample=)"):
            total, weight = job.evaluate(model, batch)
            loss = total if weight is None else total / weight
        recorder.phase = "backward"
        with _saying("running backward on fake tensors"):
            loss.backward()
    used = set()
    for parameter in stand_in.parameters.values():
        if parameter.grad is not None:
            used.add(id(parameter))
            recorder.mark_gradient(parameter.grad)
            parameter.grad = None  # the next trace starts afresh
    if not used:
        raise ValueError("the loss gives no parameter a gradient: is everything frozen or detached?")
    for block, twin in twin_of.items():
        pairs = zip(blocks.modules[block].parameters(), blocks.modules[twin].parameters(), strict=True)
        used |= {id(mine) for mine, theirs in pairs if id(theirs) in used}

    ops, storages = recorder.ops, recorder.storages
    for repeat in repeats:
        ops, storages = write_in(repeat, [block.name for block in blocks.blocks], ops, storages)
    return Graph(
        model=type(model).__name__,
        micro_batch=micro_batch,
        tokens=tokens_in(batch, micro_batch),
        precision=job.precision,
        parameters=tuple(
            fact[id(parameter) in used] for fact, parameter in zip(stand_in.facts, stand_in.parameters.values(), strict=True)
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in buffers),
        blocks=blocks.blocks,
        ops=tuple(ops),
        backward_starts=next(index for index, op in enumerate(ops) if op.phase == "backward"),
        values=tuple(
            Value(each.bytes, each.kind, each.born, len(ops) if each.dies is None else each.dies, each.block)
            for each in storages
            if each.bytes
        ),
        update=stand_in.rule,
        fingerprint=stand_in.fingerprint,
    )


def tokens_in(batch: Batch, rows: int) -> int:
    """Tokens are the positions of the first integer tensor with a sequence dimension; without one, samples."""
    for _, tensor in named_tensors(batch):
        if tensor.dim() == 2 and not tensor.dtype.is_floating_point:
            return tensor.shape[0] * tensor.shape[1]
    return rows


class _saying:  # noqa: N801  (reads as a clause: with _saying("...") around the user's code)
    """Adds what anyfit was doing to the user's own error, which stays what it is."""

    def __init__(self, doing: str) -> None:
        self.doing = doing

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        if isinstance(error, Exception):
            error.add_note(f"anyfit was {self.doing} to plan the run")
