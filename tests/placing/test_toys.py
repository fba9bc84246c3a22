"""One more route, one more tier and one more precision, as CONTRIBUTING.md says: each of them trains as plain PyTorch does."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.placing import activations
from anyfit.placing.lanes import Label, Task, Ticket
from anyfit.placing.optimizer_state import OptimizerState
from anyfit.placing.place import place
from anyfit.placing.tiers import After, Ranges, Scratch, Tier
from anyfit.placing.updates import updates
from anyfit.placing.updates.route import Context
from anyfit.placing.updates.stepper import Inputs
from anyfit.values.precision import PRECISIONS, Precision
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, hand_written, started

ROWS = 4
RATE = 0.1


def job_for(**options: Any) -> anyfit.Job:
    return anyfit.Job(
        **{
            "model": tiny_gpt,
            "loss": next_byte_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "sample": byte_batches(1, ROWS)[0],
            "batch_size": ROWS,
            "clip_norm": 0.5,
            **options,
        }
    )


def assert_trains_as_plain_pytorch(job: anyfit.Job, plan: anyfit.Plan) -> None:
    batches = byte_batches(8, ROWS)
    with started(job, plan) as run:
        for batch in batches:
            run.step(batch)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches)[1])


class OneByOne:
    """A route: the host updates one chunk after the other, by torch's own optimizer, and never before the norm is known."""

    updated = 0

    def __init__(self, context: Context) -> None:
        self._context, self._scratch = context, Scratch(torch.device("cpu"))

    @property
    def device_bytes(self) -> int:
        return 0

    def furnish(self, chunk: OptimizerState) -> None:
        """It takes its scratch in the first step."""

    def update(self, chunk: OptimizerState, inputs: Inputs) -> Ticket:
        def work() -> None:
            masters = chunk.state.masters(chunk.state.on_host)
            step = self._context.stepper.in_scratch
            exact, made = step(chunk, inputs, inputs.gradients, masters, chunk.moments, self._scratch)
            chunk.keep(made)
            masters.write(exact)
            OneByOne.updated += 1

        chunk.update.last = self._context.lanes.host.run(work, (inputs.arrived,), Label(Task.UPDATE, chunk.state.index))
        return chunk.update.last

    speculate = update

    def lift_ahead(self, chunk: OptimizerState) -> None:
        """It is there."""


def test_one_more_route(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(updates, "OnHost", OneByOne)
    job = job_for()
    assert_trains_as_plain_pytorch(job, hand_written(job, AWAY, slots=4))
    assert OneByOne.updated >= 8


@dataclass(frozen=True)
class FileRange:
    """Bytes that have no address."""

    file: int
    start: int
    size: int


class FileTier(Tier):
    """A tier: what lies in it is read and written by calls to the system."""

    moved = 0

    def __init__(self, lanes: Any, file: int) -> None:
        super().__init__(lanes)
        self._file, self._end = file, 0

    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool = True) -> Any:
        home = FileRange(self._file, self._end, elements * dtype.itemsize)
        self._end += home.size
        return home

    def read(self, home: Any, into: Tensor, after: After, label: Label) -> Ticket:
        def copy() -> None:
            there = home()
            into.copy_(torch.frombuffer(bytearray(os.pread(there.file, there.size, there.start)), dtype=into.dtype))

        return self._lanes.up.run(copy, after, label)

    def write(
        self, home: Any, source: Tensor, after: After, label: Label, ranges: Ranges | None = None, *, is_held: bool = False
    ) -> Ticket:
        def copy() -> None:
            FileTier.moved += os.pwrite(home.file, source.numpy().tobytes(), home.start)

        assert ranges is None
        return self._lanes.down.run(copy, after, label)


def test_one_more_tier(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 256)
    job = job_for()
    with tempfile.TemporaryFile(dir=Path.cwd()) as file:

        def in_a_file(model: Any, choices: Any, lanes: Any, _host: Tier, *others: Any) -> activations.Activations:
            return activations.Activations(model, choices, lanes, FileTier(lanes, file.fileno()), *others)

        monkeypatch.setattr(sys.modules[place.__module__], "Activations", in_a_file)
        plan = hand_written(job, AWAY, slots=8, activations={"blocks.0": "offload", "blocks.1": "offload"})
        assert_trains_as_plain_pytorch(job, plan)
    assert FileTier.moved > 2**16


def descending(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=RATE)


def test_one_more_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """fp16 alone: the step is taken in fp32, and rounded."""
    monkeypatch.setitem(PRECISIONS, "fp16", Precision("float16", None, "float16", "float32"))
    job, batches = job_for(precision="fp16", optimizer=descending, clip_norm=None), byte_batches(8, ROWS)
    with started(job, hand_written(job, AWAY, slots=4)) as run:
        for batch in batches:
            run.step(batch)
        weights = run.state_dict()
    torch.manual_seed(job.seed)
    plain = tiny_gpt().half()
    for batch in batches:
        gradients = torch.autograd.grad(next_byte_loss(plain, batch), list(plain.parameters()))
        for parameter, gradient in zip(plain.parameters(), gradients, strict=True):
            parameter.data = parameter.data.float().add_(gradient.float(), alpha=-RATE).half()
    assert_bit_equal({name: weights[name] for name, _ in plain.named_parameters()}, dict(plain.named_parameters()))
