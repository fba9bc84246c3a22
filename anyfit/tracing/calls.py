"""How a model calls its blocks: one forward on fake tensors, with the arguments of each block noted.

`layouts.capture` takes such a call. Blocks that are built alike and are called with tensors of the same form share one: a long
chain of like blocks is run in part, as in a trace (repeats.py), and every block is called, whether it runs or not. A model whose
forward needs values is run for real where a trace of it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from anyfit.values.aside import writing_aside
from anyfit.values.job import Job

from .around import NeedsValues, dense, leaving_no_mark, saying
from .blocks import Blocks, find_blocks
from .needs import tensors_in
from .real_run import real_batch, real_model
from .recorder import NotPeriodic, Recorder
from .repeats import Repeat, find_repeats, skipping, twins_of
from .stand_in import FakeMode, fake_batch, fake_model
from .trace import runs_for_real

Form = tuple[Any, ...]  # of a call: what the block is built like, and dtypes and shapes of the tensors it is given


@dataclass(frozen=True, eq=False)
class BlockCall:
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]


@dataclass
class BlockCalls:
    """Inside the trace that made them: the blocks hold fake tensors."""

    forms: dict[str, Form] = field(default_factory=dict)  # by path of a block, in the order of their calls
    first: dict[Form, BlockCall] = field(default_factory=dict)
    follows: dict[str, str] = field(default_factory=dict)  # by path, the block whose very output enters it first
    again: set[str] = field(default_factory=set)  # blocks that are called more than once


Around = Callable[[nn.Module], AbstractContextManager[None]]


@contextmanager
def block_calls(job: Job, rows: int, around: Around = lambda _model: nullcontext()) -> Iterator[BlockCalls]:
    """The calls of a forward of so many samples, which runs inside of `around`."""
    with ExitStack() as inside:
        try:
            found = inside.enter_context(_calls_on_fakes(job, rows, around))
        except NeedsValues:
            if not runs_for_real(job):
                raise
            found = inside.enter_context(_real_calls(job, rows, around))
        yield found


@contextmanager
def _calls_on_fakes(job: Job, rows: int, around: Around) -> Iterator[BlockCalls]:
    with leaving_no_mark(job) as memento, ExitStack() as inside:
        mode = FakeMode()
        model = inside.enter_context(fake_model(job, mode, memento))
        blocks = find_blocks(model)

        def called(repeats: Sequence[Repeat]) -> BlockCalls:
            names = {id(module): name for name, module in model.named_modules()}
            recorder = Recorder(names, blocks.of_module, blocks.outside, None, None)
            recorder.leave_out(dict(model.named_parameters()).values(), model.buffers())
            batch = fake_batch(job, rows, mode)
            what = f"running the model on a fake batch of {rows} samples like Job(sample=)"
            skipped = skipping(blocks.modules, twins_of(repeats))
            with _noting(blocks) as found, skipped, dense(model), writing_aside(), mode, recorder, saying(what), around(model):
                job.evaluate(model, batch)
            return found

        try:
            found = called(find_repeats(blocks))
        except NotPeriodic:
            found = called([])
        yield found


@contextmanager
def _real_calls(job: Job, rows: int, around: Around) -> Iterator[BlockCalls]:
    with leaving_no_mark(job) as memento, ExitStack() as inside:
        model = inside.enter_context(real_model(job, memento))
        batch = real_batch(job, rows)
        with _noting(find_blocks(model)) as found, dense(model), writing_aside(), around(model):
            job.evaluate(model, batch)
        yield found


@contextmanager
def _noting(blocks: Blocks) -> Iterator[BlockCalls]:
    kinds = [kind for chain in blocks.chains for kind in chain.kinds]
    found, gave = BlockCalls(), dict[int, tuple[str, Any]]()  # by identity of an output, its block; held, so that it stays one

    def called(index: int, block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        path, tensors = blocks.blocks[index].name, tensors_in((args, kwargs))
        if path in found.forms:
            found.again.add(path)
            return
        form = (kinds[index], *((str(each.dtype), tuple(each.shape)) for each in tensors))
        found.forms[path] = form
        found.first.setdefault(form, BlockCall(block, args, kwargs))
        enters = next((each for each in tensors if each.is_floating_point()), None)
        if enters is not None and id(enters) in gave:
            found.follows[path] = gave[id(enters)][0]

    def over(index: int, output: Any) -> None:
        first = next(iter(tensors_in(output)), None)
        if isinstance(first, Tensor):
            gave[id(first)] = blocks.blocks[index].name, first

    with ExitStack() as hooks:
        for index, module in enumerate(blocks.modules):
            before = module.register_forward_pre_hook(
                lambda block, args, kwargs, at=index: called(at, block, args, kwargs), with_kwargs=True
            )
            after = module.register_forward_hook(lambda _block, _args, output, at=index: over(at, output))
            hooks.callback(before.remove)
            hooks.callback(after.remove)
        yield found
