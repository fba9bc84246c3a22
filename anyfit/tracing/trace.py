"""The trace of one micro-batch: `trace(job, micro_batch) -> Graph`. Nothing is allocated, whatever the model's size.

Where a forward needs the values of tensors, the pass is a real one, on the CPU: of a small model by itself, of a larger one with
`Job(real_run=True)`. It runs every layer, because values may make like layers run differently.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any, Literal

from torch import Tensor, nn

from anyfit.values.aside import writing_aside
from anyfit.values.demands import sparse_layers
from anyfit.values.graph import Graph, Parameter, UpdateRule, Value
from anyfit.values.job import Batch, Job
from anyfit.values.loss_rule import LossRule
from anyfit.values.memento import Memento
from anyfit.values.nests import is_dense, named_tensors
from anyfit.values.tokens import tokens_by_shape
from anyfit.values.units import show_bytes, show_seconds

from .around import NeedsValues, TooDear, dense, leaving_no_mark, saying
from .blocks import Blocks, find_blocks
from .gpu_kernels import AsOnGpu, GpuRecorder
from .loss_rule import read_rule, rows_for
from .needs import is_whole
from .real_run import LentKernels, bytes_of, real_batch, real_model, refuse_unless_it_can_run
from .recorder import NotPeriodic, Recorder, Storage
from .repeats import ParameterReads, Repeat, find_repeats, skipping, twins_of, write_in
from .stand_in import FakeMode, fake_batch, fake_model, sized_model
from .update_rule import learn

Kind = Literal["cpu", "cuda"]
AreEnough = Callable[[Sequence[Graph]], bool]
SMALL = 100_000_000  # parameters
PATIENCE_SECONDS = 60.0  # a real run that would take longer is left out, where a smaller one was made


def trace(job: Job, micro_batch: int, device: Kind = "cpu", free_bytes: float = math.inf) -> Graph:
    """Runs loss and backward of one micro-batch and writes down all that a device of this kind would do."""
    return trace_all(job, [micro_batch], device, free_bytes)[0]


def trace_all(
    job: Job, micro_batches: Sequence[int], device: Kind, free_bytes: float = math.inf, are_enough: AreEnough | None = None
) -> list[Graph]:
    """A trace for each of several micro-batches, on one fake model; or by real runs within `free_bytes`, where the job asks.
    `are_enough` is given those made so far, the first ones first: no more are made where it says so."""
    if job.real_run or not all(is_dense(tensor) for _, tensor in named_tensors(job.sample)):  # no fakes are sparse or nested
        return _run_all(job, micro_batches, device, free_bytes)
    try:
        try:
            return trace_fake(job, micro_batches, device, find_repeats, are_enough)
        except NotPeriodic:
            return trace_fake(job, micro_batches, device, lambda _blocks: [], are_enough)
    except NeedsValues:
        if not runs_for_real(job):
            raise
    return _run_all(job, micro_batches, device, free_bytes)


def runs_for_real(job: Job) -> bool:
    """Where a forward needs values: if the job asks for it, or takes so little that nobody has to be asked, seconds a sample."""
    if job.real_run is not None:
        return job.real_run
    with leaving_no_mark(job):
        return sum(parameter.numel() for parameter in sized_model(job).parameters()) <= SMALL


def trace_fake(
    job: Job,
    micro_batches: Sequence[int],
    device: Kind,
    repeats_of: Callable[[Blocks], list[Repeat]],
    are_enough: AreEnough | None = None,
) -> list[Graph]:
    """On fake tensors, with the middle of the given repeats written in and not run."""
    with leaving_no_mark(job) as memento, ExitStack() as inside:
        with saying("building the model on fake tensors"):
            mode = FakeMode()
            model = inside.enter_context(fake_model(job, mode, memento))
        stand_in = _StandIn(job, model, device, mode, lambda rows: fake_batch(job, rows, mode))
        repeats = repeats_of(stand_in.blocks)
        rule = _rule(stand_in, repeats)
        made: list[Graph] = []
        for micro_batch in micro_batches if rule.may_be_cut else [max(micro_batches)]:
            try:
                made.append(replace(_trace(stand_in, micro_batch, repeats), loss=rule))
            except NotPeriodic:
                raise
            except Exception as error:
                if not made:  # the largest has to run
                    _say_what_was_cut(job, micro_batch, error)
                    raise
                made[-1] = _noted(made[-1], _left_out(micro_batch, error))
            if are_enough is not None and are_enough(made):
                break
        return made


def _say_what_was_cut(job: Job, micro_batch: int, error: Exception) -> None:
    if micro_batch < job.batch_size:
        error.add_note(
            f"the model was given {micro_batch} of the batch's {job.batch_size} samples: tensors are cut along dim 0, "
            "lists by their entries. Job(split=) cuts batches otherwise"
        )


def _left_out(micro_batch: int, error: Exception) -> str:
    """Of a size that the model does not run, such as one sample for a batch norm: no plan needs it."""
    said = f"{type(error).__name__}: {error}".splitlines()[0]
    return f"micro-batches of {micro_batch} are left out, the model does not run them ({said})"


def _noted(graph: Graph, *notes: str) -> Graph:
    return replace(graph, notes=(*graph.notes, *notes))


def _run_all(job: Job, micro_batches: Sequence[int], device: Kind, free_bytes: float) -> list[Graph]:
    """A real run of each size, the smallest first, as far as memory and patience reach; which were left out is noted."""
    with leaving_no_mark(job) as memento, ExitStack() as inside:
        with saying("building the model on the meta device"):
            sized = sized_model(job)
        refuse_unless_it_can_run(job, sized, free_bytes)
        with saying("building the model for a real run"):
            model = inside.enter_context(real_model(job, memento))
        mode: AbstractContextManager[Any] = nullcontext()
        if device == "cuda":
            mode = LentKernels()  # type: ignore[no-untyped-call]
        room_bytes = free_bytes - bytes_of(model)
        stand_in = _StandIn(job, model, device, mode, lambda rows: real_batch(job, rows), room_bytes)
        rule = _rule(stand_in, [])
        sizes = sorted(set(micro_batches)) if rule.may_be_cut else [max(micro_batches)]
        made: list[Graph] = []
        failed: list[str] = []
        seconds = 0.0  # of the last
        for micro_batch in sizes:
            started = time.monotonic()
            try:
                if made:
                    _foresee(made[-1], seconds, micro_batch, room_bytes)
                graph = _trace(stand_in, micro_batch, [])
            except TooDear as price:
                if not made:
                    raise
                left_out = f"micro-batches from {micro_batch} on are left out: a real run of {micro_batch} takes {price}"
                made[-1] = _noted(made[-1], left_out)
                break
            except Exception as error:
                if micro_batch == sizes[-1]:
                    _say_what_was_cut(job, micro_batch, error)
                    raise
                failed.append(_left_out(micro_batch, error))
                continue
            made.append(_noted(graph, "on the CPU, with the values of Job(sample=)"))
            seconds = time.monotonic() - started
        made[-1] = _noted(made[-1], *failed)
        by_size = {graph.micro_batch: replace(graph, loss=rule) for graph in made}
        return [by_size[micro_batch] for micro_batch in micro_batches if micro_batch in by_size]


def _foresee(last: Graph, seconds: float, micro_batch: int, room_bytes: float) -> None:
    """Refuses a real run that would take more than there is, or than anyone waits for, by what a smaller one took."""
    times = micro_batch / last.micro_batch
    needed = times * max(last.live_bytes("kept"))
    if needed > room_bytes:
        raise TooDear(f"about {show_bytes(needed)} of memory, and {show_bytes(room_bytes)} are free")
    if times * seconds > PATIENCE_SECONDS:
        raise TooDear(f"about {show_seconds(times * seconds)}; Job(micro_batch={micro_batch}) makes it all the same")


def update_of(job: Job, device: Kind) -> UpdateRule:
    """What the job's optimizer does, as its graphs have it: for a job of which another optimizer was traced."""
    with leaving_no_mark(job):
        optimizer, _ = job.build_optimizer(sized_model(job))
        return learn(optimizer, device)


class _StandIn:
    """A fake model, or a real one, and all about it that does not depend on the batch."""

    def __init__(
        self,
        job: Job,
        model: nn.Module,
        device: Kind,
        mode: AbstractContextManager[Any],  # in which it runs
        batch_of: Callable[[int], Batch],  # makes a batch of so many samples
        room_bytes: float | None = None,  # for what a pass holds; None: it holds nothing
    ) -> None:
        if next(model.parameters(), None) is None:
            raise ValueError(f"{type(model).__name__} has no parameters: there is nothing to train, and nothing to plan")
        self.job, self.model, self.device = job, model, device
        self.mode, self.batch_of, self.room_bytes = mode, batch_of, room_bytes
        self.blocks = find_blocks(model)
        optimizer, group_of = job.build_optimizer(model)
        self.module_names = {id(module): name for name, module in model.named_modules()}
        self.parameters = dict(model.named_parameters())
        self.facts = list(self._facts(group_of))  # about parameters in the same order, as if none had a gradient
        self.rule = learn(optimizer, device, sparse=bool(sparse_layers(model)))
        self.fingerprint = job.fingerprint(model)
        self.memento = Memento(job, model)  # of the model before its first pass

    def _facts(self, group_of: Mapping[int, int]) -> Iterator[Parameter]:
        names: dict[int, list[str]] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(id(parameter), []).append(name)
        block_of = {
            id(parameter): self.blocks.of_module.get(id(module), self.blocks.outside)
            for module in self.model.modules()
            for parameter in module._parameters.values()
        }
        for name, parameter in self.parameters.items():
            yield Parameter(
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


def _rule(stand_in: _StandIn, repeats: list[Repeat]) -> LossRule:
    """How losses of micro-batches make that of the batch, as far as a forward shows."""
    job = stand_in.job
    if job.batch_size == 1:
        return LossRule("mean", "one sample", proved=True)
    uncuttable = job.uncuttable()
    if uncuttable is not None:
        why, _, way_out = uncuttable.partition("; ")
        return LossRule("whole", why, ways_out=way_out, proved=True)
    failed: Exception | None = None
    for rows in (rows_for(job), job.batch_size):
        recorder = Recorder(stand_in.module_names, stand_in.blocks.of_module, stand_in.blocks.outside, None, stand_in.room_bytes)
        recorder.leave_out(stand_in.parameters.values(), stand_in.model.buffers())
        try:
            batch = stand_in.batch_of(rows)
            with skipping(stand_in.blocks.modules, twins_of(repeats)), writing_aside(), stand_in.mode, recorder:
                return read_rule(job, stand_in.model, batch, rows)
        except Exception as error:  # the model may not take as many samples as that
            failed = failed or error
    said = " ".join(str(failed).split())
    return LossRule("whole", f"the loss could not be looked at ({type(failed).__name__}: {said:.200})")


def _trace(stand_in: _StandIn, micro_batch: int, repeats: list[Repeat]) -> Graph:
    job, model, blocks = stand_in.job, stand_in.model, stand_in.blocks
    buffers = list(model.buffers())
    mirrored = [parameter for parameter in stand_in.parameters.values() if not parameter.is_contiguous()]  # placing/mirrors.py
    batch = stand_in.batch_of(micro_batch)
    kernels = AsOnGpu if stand_in.device == "cuda" else None
    recorder_of = GpuRecorder if stand_in.device == "cuda" else Recorder
    recorder = recorder_of(stand_in.module_names, blocks.of_module, blocks.outside, kernels, stand_in.room_bytes)
    recorder.leave_out(stand_in.parameters.values(), buffers)
    for _, tensor in named_tensors(batch):
        recorder.count_input(tensor)
    skipped = skipping(blocks.modules, twins_of(repeats), recorder.skipped)
    with skipped, dense(model), writing_aside(), stand_in.mode, recorder, recorder.watching():
        what = "fake" if stand_in.room_bytes is None else "real"
        doing = f"running the model on a {what} batch of {micro_batch} samples like Job(sample=)"
        with saying(doing), recorder.needs, kernels() if kernels else nullcontext():
            total, weight = job.evaluate(model, batch)
            if any(parameter.grad is not None for parameter in stand_in.parameters.values()):
                recorder.needs.stay = "the loss goes backward by itself, and reads gradients that would have left"
            loss = total if weight is None else total / weight
        with saying(f"running backward on {what} tensors"), recorder.backward():
            loss.backward()
    graph = _written(stand_in, recorder, batch, micro_batch, repeats, [*buffers, *mirrored])
    stand_in.memento.put_back()  # the next pass starts as this one did
    return graph


def _written(
    stand_in: _StandIn, recorder: Recorder, batch: Batch, micro_batch: int, repeats: list[Repeat], held: Sequence[Tensor]
) -> Graph:
    """The graph of what was recorded, with the middle of the repeats written in; `held` is on the device besides parameters."""
    job, model, blocks, twin_of = stand_in.job, stand_in.model, stand_in.blocks, twins_of(repeats)
    used = _gradients_of(stand_in, recorder, twin_of)
    at = {id(parameter): index for index, parameter in enumerate(stand_in.parameters.values())}
    twins = [{at[id(theirs)]: at[id(mine)] for mine, theirs in _pairs(blocks, block, twin)} for block, twin in twin_of.items()]
    sums = recorder.settle() if isinstance(recorder, GpuRecorder) else set()
    ops, storages, input_bytes, offload_bytes = recorder.ops, recorder.storages, recorder.input_bytes, recorder.offload_bytes
    reads = [
        ParameterReads(fact.block, recorder.reads_of(parameter))
        for fact, parameter in zip(stand_in.facts, stand_in.parameters.values(), strict=True)
    ]
    for theirs, mine in (pair for pairs in twins for pair in pairs.items()):
        reads[mine].twin = reads[theirs]
    for repeat in repeats:
        ops, storages = write_in(repeat, [block.name for block in blocks.blocks], ops, storages, reads)
    inside = {id(part) for module in model.modules() if is_whole(module) for part in module.modules()}
    whole = {index for index, module in enumerate(blocks.modules) if recorder.needs.transformed or id(module) in inside}
    return Graph(
        model=type(model).__name__,
        micro_batch=micro_batch,
        tokens=tokens_by_shape(batch, micro_batch),
        batch_bytes=_host_bytes(job, batch),
        precision=job.precision,
        parameters=tuple(
            replace(fact, used=identity in used, adds_up=used.get(identity) in sums, reads=tuple(ops_of.reads))
            for fact, identity, ops_of in zip(stand_in.facts, map(id, stand_in.parameters.values()), reads, strict=True)
        ),
        buffer_bytes=sum(each.numel() * each.element_size() for each in held),
        blocks=tuple(
            replace(block, input_bytes=input_bytes.get(run, 0), offload_bytes=offload_bytes.get(run, 0), is_whole=index in whole)
            for index, block in enumerate(blocks.blocks)
            for run in [twin_of.get(index, index)]  # itself, or the one that was run in its place
        ),
        ops=tuple(ops),
        calls=tuple(recorder.calls),
        backward_starts=next(index for index, op in enumerate(ops) if op.phase == "backward"),
        values=tuple(_value(each, len(ops)) for each in storages if each.bytes),
        update=stand_in.rule,
        fingerprint=stand_in.fingerprint,
        state_stays=recorder.needs.stay,
        together=recorder.needs.together([fact.block for fact in stand_in.facts], twins),
    )


def _gradients_of(stand_in: _StandIn, recorder: Recorder, twin_of: Mapping[int, int]) -> dict[int, int]:
    """By identity of a parameter, that of the record of its gradient."""
    used: dict[int, int] = {}
    for parameter in stand_in.parameters.values():
        if parameter.grad is not None:
            used[id(parameter)] = id(recorder.mark_gradient(parameter.grad))
            parameter.grad = None  # the next trace starts afresh
    if not used:
        raise ValueError("the loss gives no parameter a gradient: is everything frozen or detached?")
    for block, twin in twin_of.items():
        pairs = _pairs(stand_in.blocks, block, twin)
        used |= {id(mine): used[id(theirs)] for mine, theirs in pairs if id(theirs) in used}
    return used


def _pairs(blocks: Blocks, block: int, twin: int) -> Iterator[tuple[nn.Parameter, nn.Parameter]]:
    """The parameters of one block, each with its like in another."""
    return zip(blocks.modules[block].parameters(), blocks.modules[twin].parameters(), strict=True)


def _value(each: Storage, end: int) -> Value:
    """Gradients outlive the pass, though the trace has let go of them."""
    dies = end if each.dies is None or each.kind == "gradient" else each.dies
    return Value(each.bytes, each.kind, each.born, dies, each.block, each.saved_by, tuple(each.reads), tuple(each.writes))


def _host_bytes(job: Job, batch: Batch) -> int:
    """Bytes of a batch before it is cast: it goes to the device as the user made it."""
    given = dict(named_tensors(job.sample if job.max_sample is None else job.max_sample))
    return sum(tensor.numel() * given.get(name, tensor).element_size() for name, tensor in named_tensors(batch))
