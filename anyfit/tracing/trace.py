"""The trace of one micro-batch: `trace(job, micro_batch) -> Graph`. Nothing is allocated, whatever the model's size."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import nullcontext
from typing import Literal

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anyfit.values.batches import named_tensors
from anyfit.values.graph import Graph, Parameter, Value
from anyfit.values.job import Batch, Job

from .blocks import Blocks, find_blocks
from .errors import explained, refuse_elsewhere, refuse_without_parameters
from .gpu_kernels import AsOnGpu
from .recorder import Recorder
from .repeats import NotPeriodic, Repeat, find_repeats, skip, write_in
from .stand_in import fake_batch, fake_model
from .update_rule import learn

Kind = Literal["cpu", "cuda"]


def trace(job: Job, micro_batch: int, device: Kind = "cpu") -> Graph:
    """Runs loss and backward of one micro-batch on fake tensors and writes down all that a device of this kind would do."""
    try:
        return trace_with(job, micro_batch, device, find_repeats)
    except NotPeriodic:
        return trace_with(job, micro_batch, device, lambda _blocks: [])


def trace_with(job: Job, micro_batch: int, device: Kind, repeats_of: Callable[[Blocks], list[Repeat]]) -> Graph:
    """The trace, with the middle of the given repeats written in and not run."""
    refuse_elsewhere(job.sample if job.max_sample is None else job.max_sample)
    random_state = torch.get_rng_state()
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own before it raises
    disabled, logger.disabled = logger.disabled, True
    try:
        with _saying("building the model on fake tensors"):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            model = fake_model(job, mode)
        refuse_without_parameters(model)
        blocks = find_blocks(model)
        return _trace(job, model, mode, micro_batch, device, blocks, repeats_of(blocks))
    except Exception as error:
        in_the_users_terms = explained(error)
        if in_the_users_terms is None:
            raise
        raise in_the_users_terms from error
    finally:
        torch.set_rng_state(random_state)
        logger.disabled = disabled


def _trace(
    job: Job, model: nn.Module, mode: FakeTensorMode, micro_batch: int, device: Kind, blocks: Blocks, repeats: list[Repeat]
) -> Graph:
    optimizer, group_of = job.build_optimizer(model)
    batch = fake_batch(job, micro_batch, mode)
    kernels = AsOnGpu if device == "cuda" else nullcontext
    names = {id(module): name for name, module in model.named_modules()}
    recorder = Recorder(names, blocks.of_module, blocks.outside, kernels)
    recorder.leave_out(iter([*model.parameters(), *model.buffers()]))
    for _, tensor in named_tensors(batch):
        recorder.count_input(tensor)
    twin_of: dict[int, int] = {}  # skipped blocks, by the one that was run in their place
    for repeat in repeats:
        for block in repeat.skipped:
            twin_of[block] = repeat.unit(2)[(block - repeat.first) % repeat.period]
            skip(blocks.modules[block], blocks.modules[twin_of[block]])

    with mode, recorder, recorder.watching(model), kernels():
        with _saying(f"running the model on a fake batch of {micro_batch} samples like Job(sample=)"):
            total, weight = job.evaluate(model, batch)
            loss = total if weight is None else total / weight
        recorder.phase = "backward"
        with _saying("running backward on fake tensors"):
            loss.backward()
    used = {id(parameter) for parameter in model.parameters() if parameter.grad is not None}
    for parameter in model.parameters():
        if parameter.grad is not None:
            recorder.mark_gradient(parameter.grad)
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
        parameters=_parameters(model, blocks, group_of, used),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        blocks=blocks.blocks,
        ops=tuple(ops),
        backward_starts=next(index for index, op in enumerate(ops) if op.phase == "backward"),
        values=tuple(
            Value(each.bytes, each.kind, each.born, len(ops) if each.dies is None else each.dies, each.block)
            for each in storages
            if each.bytes
        ),
        update=learn(optimizer, device),
        fingerprint=job.fingerprint(model),
    )


def _parameters(model: nn.Module, blocks: Blocks, group_of: dict[int, int], used: set[int]) -> tuple[Parameter, ...]:
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    block_of = {
        id(parameter): blocks.of_module.get(id(module), blocks.outside)
        for module in model.modules()
        for parameter in module.parameters(recurse=False)
    }
    return tuple(
        Parameter(
            name=name,
            names=tuple(names[id(parameter)]),
            shape=tuple(parameter.shape),
            dtype=str(parameter.dtype).removeprefix("torch."),
            elements=parameter.numel(),
            trainable=parameter.requires_grad,
            used=id(parameter) in used,
            block=block_of[id(parameter)],
            group=group_of.get(id(parameter), -1),
        )
        for name, parameter in model.named_parameters()
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
