"""The trace of one micro-batch: `trace(job, micro_batch) -> Graph`. Nothing is allocated, whatever the model's size."""

from __future__ import annotations

import logging
from collections import Counter

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from anyfit.values.batches import named_tensors
from anyfit.values.graph import Block, Graph, Parameter, Value
from anyfit.values.job import Batch, Job

from .recorder import Recorder
from .stand_in import fake_batch, fake_model
from .update_rule import learn


def trace(job: Job, micro_batch: int) -> Graph:
    """Runs loss and backward of one micro-batch on fake tensors and writes down all they do."""
    random_state = torch.get_rng_state()
    logger = logging.getLogger("torch._subclasses.fake_tensor")  # prints a traceback of its own before it raises
    disabled, logger.disabled = logger.disabled, True
    try:
        with _saying("building the model on fake tensors"):
            mode = FakeTensorMode(allow_non_fake_inputs=True)
            model = fake_model(job, mode)
        return _trace(job, model, mode, micro_batch)
    finally:
        torch.set_rng_state(random_state)
        logger.disabled = disabled


def _trace(job: Job, model: nn.Module, mode: FakeTensorMode, micro_batch: int) -> Graph:
    blocks, block_of = find_blocks(model)
    outside = len(blocks) - 1
    optimizer, group_of = job.build_optimizer(model)
    batch = fake_batch(job, micro_batch, mode)
    recorder = Recorder({id(module): name for name, module in model.named_modules()}, block_of, outside)
    recorder.leave_out(iter([*model.parameters(), *model.buffers()]))
    for _, tensor in named_tensors(batch):
        recorder.count_input(tensor)

    with mode, recorder, recorder.watching(model):
        with _saying(f"running the model on a fake batch of {micro_batch} samples like Job(sample=)"):
            total, weight = job.evaluate(model, batch)
            loss = total if weight is None else total / weight
        backward_starts = len(recorder.ops)
        recorder.phase = "backward"
        with _saying("running backward on fake tensors"):
            loss.backward()
    used = set()
    for parameter in model.parameters():
        if parameter.grad is not None:
            used.add(id(parameter))
            recorder.mark_gradient(parameter.grad)
    if not used:
        raise ValueError("the loss gives no parameter a gradient: is everything frozen or detached?")

    end = len(recorder.ops)
    values = tuple(
        Value(seen.bytes, seen.kind, seen.born, end if seen.dies is None else seen.dies, seen.block)
        for seen in recorder.storages
        if seen.bytes
    )
    module_of = {id(p): block_of_path(model, name, block_of, outside) for name, p in model.named_parameters()}
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    return Graph(
        model=type(model).__name__,
        micro_batch=micro_batch,
        tokens=tokens_in(batch, micro_batch),
        precision=job.precision,
        parameters=tuple(
            Parameter(
                name=name,
                names=tuple(names[id(parameter)]),
                shape=tuple(parameter.shape),
                dtype=str(parameter.dtype).removeprefix("torch."),
                elements=parameter.numel(),
                trainable=parameter.requires_grad,
                used=id(parameter) in used,
                block=module_of[id(parameter)],
                group=group_of.get(id(parameter), -1),
            )
            for name, parameter in model.named_parameters()
        ),
        buffer_bytes=sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()),
        blocks=blocks,
        ops=tuple(recorder.ops),
        backward_starts=backward_starts,
        values=values,
        update=learn(optimizer),
        fingerprint=job.fingerprint(model),
    )


def find_blocks(model: nn.Module) -> tuple[tuple[Block, ...], dict[int, int]]:
    """The blocks a model is a chain of, and by module identity the block each belongs to.

    Blocks are the members of every list or sequence that repeats one class, outermost first; all else is one last block
    with no name.
    """
    blocks: list[Block] = []
    block_of: dict[int, int] = {}

    def visit(module: nn.Module, path: str) -> None:
        children = list(module.named_children())
        classes = Counter(type(child) for _, child in children)
        repeats = isinstance(module, nn.ModuleList | nn.Sequential) and any(n > 1 for n in classes.values())
        for name, child in children:
            child_path = f"{path}.{name}" if path else name
            if repeats and any(True for _ in child.parameters()):
                for inner in child.modules():
                    block_of[id(inner)] = len(blocks)
                blocks.append(Block(child_path, type(child).__name__))
            else:
                visit(child, child_path)

    visit(model, "")
    blocks.append(Block("", type(model).__name__))
    return tuple(blocks), block_of


def block_of_path(model: nn.Module, parameter: str, block_of: dict[int, int], outside: int) -> int:
    owner = model.get_submodule(parameter.rpartition(".")[0])
    return block_of.get(id(owner), outside)


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
