"""Recomputed blocks that read and change state, of every kind a forward can reach: as plain PyTorch, or refused by name."""

from __future__ import annotations

import collections
import copy
import dataclasses
import itertools
import random
import re
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

import anyfit
from anyfit.placing.cells import equal
from anyfit.placing.trial import rehearsing
from tests.models import Experts, byte_batches, next_byte_loss
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, RESIDENT, hand_written, placed_of, started

ROWS, WIDTH, STEPS = 4, 16, 8
CALLS = {"count": 0}
GENERATOR = np.random.default_rng(3)


class Plain(nn.Module):
    """The parts of a block that the others add to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mixed(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x)


class Adapted(Plain):
    """A frozen block with adapters of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.first, self.second = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x) + self.second(self.first(self.norm(x)))


class Spectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up = parametrizations.spectral_norm(self.up)


class OldSpectral(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.utils.spectral_norm(self.up)


class Averaging(Plain):
    """Reads an average that it updates, in place."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x * (1 + self.average))
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * x.mean((0, 1)))
        return x


class Replacing(Plain):
    """The same with a buffer that is another tensor each time."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = self.mixed(x * (1 + self.average))
        self.average = 0.9 * self.average + 0.1 * x.detach().mean((0, 1))
        return x


class Late(Plain):
    """State that changes for the first time in the fourth step."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("large", torch.zeros(64, WIDTH))
        self.kept: list[Tensor] = []

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        x = self.mixed(x + self.large[0])
        if self.calls >= 4:
            with torch.no_grad():
                self.large[0] += 0.1 * x.mean((0, 1))
            self.kept.append(x.detach().mean())
            x = x * (1 + 0.1 * torch.stack(self.kept).mean()) * (1 + 0.1 * random.random()) * (1 + 0.1 * np.random.rand())
        return x


class Codebook(Plain):
    """Vector quantization with a codebook of moving averages."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("codes", torch.randn(32, WIDTH))
        self.register_buffer("counts", torch.ones(32))

    def forward(self, x: Tensor) -> Tensor:
        flat = x.detach().reshape(-1, WIDTH)
        nearest = torch.cdist(flat.float(), self.codes).argmin(-1)
        found = self.codes[nearest].view_as(x)
        chosen = F.one_hot(nearest, 32).float()
        self.counts.mul_(0.9).add_(chosen.sum(0), alpha=0.1)
        self.codes += 0.1 * (chosen.T @ flat.float()) / self.counts[:, None]
        return self.mixed(x + (found.to(x.dtype) - x).detach())


class Counting(Plain):
    """Numbers, lists, dicts, tensors that are no buffers, an object, a class's variable and a global, all read and changed."""

    shared = 0

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.history, self.table = 0, [1.0], {"scale": 1.0}
        self.memory = torch.zeros(WIDTH)
        self.recent: collections.deque[float] = collections.deque([1.0], maxlen=3)
        self.scratch = np.zeros(2)

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        Counting.shared += 1
        CALLS["count"] += 1
        self.history.append(1.0 + 0.01 * self.calls)
        self.recent.append(1 + 0.01 * len(self.history))
        self.scratch += 0.01
        self.table["scale"] = 1 + 0.01 * (CALLS["count"] % 5) + 0.01 * (Counting.shared % 3) + float(self.scratch[0] % 0.1)
        x = x * (self.history[-1] * self.table["scale"] * sum(self.recent) / len(self.recent)) + self.memory.to(x.device)
        self.memory.add_(0.01)
        return self.mixed(x)


class Dropping(Plain):
    """Leaves itself out, and parts of it, by random numbers of every source."""

    def __init__(self) -> None:
        super().__init__()
        self.own, self.numbers = torch.Generator().manual_seed(5), random.Random(7)
        self.old = np.random.RandomState(9)

    def forward(self, x: Tensor) -> Tensor:
        if random.random() < 0.2 or np.random.rand() < 0.2 or self.numbers.random() < 0.2 or self.old.rand() < 0.1:
            return x
        x = F.dropout(x, 0.1) * (1 + 0.1 * np.random.normal()) * (1 + 0.1 * random.gauss(0, 1)) + 0.1 * GENERATOR.random()
        return self.mixed(x) + 0.1 * torch.rand(x.shape, generator=self.own, dtype=x.dtype).to(x.device)


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class Normalising(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(self.batch(x.transpose(1, 2)).transpose(1, 2).to(x.dtype))


class Inside(Plain):
    """In-place ops on what products gave."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.down(self.up(self.norm(x)).mul_(2.0).relu_()).add_(1.0)
        return self.up(x).chunk(2, -1)[0]


@dataclasses.dataclass
class Given:
    hidden: Tensor
    more: dict[str, Any]


class Returning(Plain):
    """Takes and gives more than tensors."""

    def forward(self, given: Any) -> Any:
        seen = [] if isinstance(given, Tensor) else given.more["seen"]
        x = given if isinstance(given, Tensor) else given.hidden
        seen.append(len(seen))
        return Given(self.mixed(x) * (1 + 0.01 * len(seen)), {"seen": seen, "name": "x"})


class Checkpointing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x = checkpoint(self.mixed, x, use_reentrant=False)
        return checkpoint(self.mixed, x, use_reentrant=True)


class Scoped(Plain):
    """Settings of its own, and those of whoever calls it."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            scale = self.norm(x).abs().mean()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = self.up(x)
        return self.mixed(x) + self.down(y.to(x.dtype)) * scale


class Graded(Plain):
    """Takes gradients in forward."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.enable_grad():
            y = x.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.mixed(y).square().sum(), y)
        return self.mixed(x) + 0.01 * slope


class Noisy(Plain):
    """Ends with an op that saves the noise it has not drawn yet."""

    def forward(self, x: Tensor) -> Tensor:
        return F.rrelu(self.mixed(x), training=True)


class Stack(nn.Module):
    """Embedding, blocks of one kind, and a head; `again` runs one block twice."""

    def __init__(self, block: Callable[[], nn.Module], again: bool = False, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, WIDTH)
        self.embed.requires_grad_(False)
        self.blocks = nn.ModuleList(block() for _ in range(blocks))
        self.head = nn.Linear(WIDTH, 256)
        self.again = again

    def forward(self, ids: Tensor) -> Tensor:
        x: Any = self.embed(ids)
        for _ in range(2 if self.again else 1):
            for block in self.blocks:
                x = block(x)
        return self.head(x if isinstance(x, Tensor) else x.hidden)


KINDS: dict[str, Callable[[], nn.Module]] = {
    kind.__name__.lower(): kind
    for kind in (
        Noisy, Adapted, Spectral, OldSpectral, Averaging, Replacing, Late, Codebook, Counting, Dropping, Attending, Normalising,
        Inside, Returning, Checkpointing, Scoped, Graded,
    )
}  # fmt: skip


MORE = ("adapted", "dropping", "averaging")


def job_for(model: Callable[[], nn.Module], **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2), "precision": "fp32"} | options
    return anyfit.Job(model=model, loss=next_byte_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


def seeded() -> None:
    """Random numbers and globals that the job's own seed does not reach."""
    random.seed(11)
    np.random.seed(12)
    CALLS["count"] = Counting.shared = 0
    GENERATOR.bit_generator.state = np.random.default_rng(3).bit_generator.state


def drawn() -> list[float]:
    return [random.random(), float(np.random.rand()), random.gauss(0, 1), float(np.random.normal()), float(torch.rand(()))]


def assert_as_plain(job: anyfit.Job, plan: Any, steps: int = STEPS, batches: Any = None) -> None:
    batches = batches or byte_batches(steps, ROWS)
    seeded()
    with started(job, plan) as run:
        losses = [float(run.step(batch)) for batch in batches]
        weights, mine, globals_after = run.state_dict(), drawn(), (dict(CALLS), Counting.shared)
        assert run.skipped == 0
    seeded()
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)
    assert mine == drawn()
    assert globals_after == (dict(CALLS), Counting.shared)


def recomputed(job: anyfit.Job, choice: Any, placement: Any = AWAY, **options: Any) -> Any:
    options = {"slots": 6, "chunk_bytes": 2048, "activations": {"blocks.0": choice, "blocks.1": choice}} | options
    return hand_written(job, placement, **options)


@pytest.mark.parametrize("choice", ["recompute", pytest.param("selective", marks=pytest.mark.full)])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_recomputed_block_reads_and_leaves_the_state_of_one_forward(kind: str, choice: Any) -> None:
    job = job_for(lambda: Stack(KINDS[kind]))
    assert_as_plain(job, recomputed(job, choice))


@pytest.mark.parametrize("kind", ["counting", "normalising", *(pytest.param(each, marks=pytest.mark.full) for each in MORE)])
def test_blocks_that_are_called_twice_are_recomputed_each_from_its_own_state(kind: str) -> None:
    job = job_for(lambda: Stack(KINDS[kind], again=True))
    assert_as_plain(job, recomputed(job, "recompute"))


class Overwriting(Plain):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5)
        return self.mixed(x)


class Editing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            self.up.bias.clamp_(-0.1, 0.1)
        return self.mixed(x)


class Iterating(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.counter = itertools.count()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x) * (1 + 0.1 * next(self.counter))


class Clock(Plain):
    """What it gives depends on what nobody can put back."""

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(x) * (1 + 1e-3 * (time.perf_counter_ns() % 1000))


REFUSED = {
    Overwriting: "it writes into its input in place",
    Editing: "it edits its parameter blocks.0.up.bias in forward",
    Iterating: r"it holds an iterator, which cannot be put back \(blocks.0.counter\)",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_cannot_be_put_back_is_refused_by_name(kind: Any) -> None:
    job = job_for(lambda: Stack(kind))
    with (
        started(job, recomputed(job, "recompute", RESIDENT)) as run,
        pytest.raises(RuntimeError, match=rf"block 'blocks.0' cannot be recomputed: {REFUSED[kind]}.*'keep'"),
    ):
        run.step(byte_batches(1, ROWS)[0])


def test_an_input_that_is_written_after_the_call_is_refused_by_name() -> None:
    class Late(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            x = self.embed(ids) + 0.0
            y = self.blocks[0](x)
            x.add_(1.0)
            return self.head(self.blocks[1](y))

    job = job_for(lambda: Late(lambda: nn.Sequential(nn.Dropout(0.1), nn.Linear(WIDTH, WIDTH))))
    with (
        started(job, recomputed(job, "recompute", RESIDENT)) as run,
        pytest.raises(RuntimeError, match=r"block 'blocks.0' cannot be recomputed: its input was written into in place, after"),
    ):
        run.step(byte_batches(1, ROWS)[0])


def rehearsed(model: nn.Module, kinds: dict[str, str] | None = None) -> Any:
    blocks = {name: model.get_submodule(name) for name in ("blocks.0", "blocks.1")}
    with rehearsing(blocks, kinds or dict.fromkeys(blocks, "block")) as unfit:
        next_byte_loss(model, byte_batches(1, 2)[0])
    return unfit


@pytest.mark.parametrize("kind", [*REFUSED, Clock])
def test_a_rehearsal_finds_blocks_that_cannot_be_recomputed(kind: Any) -> None:
    torch.manual_seed(0)
    unfit = rehearsed(Stack(kind))
    assert unfit.keys() == {"blocks.0", "blocks.1"}
    reason = REFUSED.get(kind, "its output differs when it is run again: by up to")
    assert all(re.match(reason, each) for each in unfit.values())


@pytest.mark.parametrize("kind", sorted(KINDS))
def test_a_rehearsal_passes_all_others_and_leaves_no_trace(kind: str) -> None:
    seeded()
    torch.manual_seed(0)
    model = Stack(KINDS[kind])
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    attributes = [copy.deepcopy({key: value for key, value in vars(block).items() if key[0] != "_"}) for block in model.blocks]
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    unfit = rehearsed(model)
    assert unfit == {}
    assert unfit.selective == {}
    assert_bit_equal(model.state_dict(), before)
    for block, expected in zip(model.blocks, attributes, strict=True):
        found = {key: value for key, value in vars(block).items() if key[0] != "_"}
        for generator in ("own", "numbers", "old"):
            assert (generator in found) == (generator in expected)
            found.pop(generator, None)
            expected.pop(generator, None)
        assert equal(found, expected)
    assert torch.equal(torch.get_rng_state(), state)
    assert random.getstate() == python
    assert equal(np.random.get_state(legacy=False), numpy)


def test_a_rehearsal_fetches_what_is_away() -> None:
    job = job_for(lambda: Stack(Adapted))
    with started(job, recomputed(job, "recompute")) as run, placed_of(run).watching():
        assert rehearsed(run.model) == {}


@pytest.mark.parametrize("kind", [Overwriting, Clock])
def test_the_planner_keeps_blocks_that_cannot_be_recomputed(kind: Any) -> None:
    job = job_for(lambda: Stack(kind, blocks=6), micro_batch=ROWS)
    machine = anyfit.probe()
    limit = int(0.9 * anyfit.plan(job, machine).forecast.peak_bytes["device"])
    with pytest.raises(anyfit.NoPlan, match=r"is not recomputed: (it writes into its input in place|its output differs)"):
        anyfit.start(job, machine=machine.with_limits(device_memory=limit)).close()


def test_a_rehearsal_sees_edits_past_autograd() -> None:
    class Past(Plain):
        def forward(self, x: Tensor) -> Tensor:
            self.up.bias.data.clamp_(-0.01, 0.01)
            return self.mixed(x)

    assert set(rehearsed(Stack(Past)).values()) == {"it edits its parameter blocks.0.up.bias in forward"}


def test_a_rehearsal_sees_state_that_others_change_after_the_call() -> None:
    class Beside(Stack):
        def forward(self, ids: Tensor) -> Tensor:
            for block in self.blocks:
                block.scale[0] = 1.0
            logits = super().forward(ids)
            for block in self.blocks:
                block.scale[0] = 2.0
            return logits

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = [1.0]

        def forward(self, x: Tensor) -> Tensor:
            return self.mixed(x) * self.scale[0]

    job = job_for(lambda: Beside(Scaled))
    assert rehearsed(job.build()) == {}
    assert_as_plain(job, recomputed(job, "recompute"), 3)


def test_a_rehearsal_tries_each_kind_once_and_leaves_calls_without_gradients_alone() -> None:
    calls: list[str] = []

    class Told(Plain):
        def __init__(self, name: str) -> None:
            super().__init__()
            self.told = name

        def forward(self, x: Tensor) -> Tensor:
            calls.append(self.told) if torch.is_grad_enabled() else None
            return self.mixed(x)

    model = Stack(Plain)
    model.blocks = nn.ModuleList(Told(name) for name in "ab")
    with torch.no_grad():
        assert rehearsed(model) == {}
    assert rehearsed(model) == {}
    assert calls == []  # what was run again, and the first calls, leave no trace in what they close over
    with rehearsing({"blocks.0": model.blocks[0]}, {"blocks.0": "x"}) as unfit:
        pass
    assert unfit == {}


def test_experts_are_recomputed_in_part() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mixture = Experts(WIDTH)
            del self.mixture.embed, self.mixture.head
            self.mixture.embed, self.mixture.head = nn.Identity(), nn.Linear(WIDTH, WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            inner = self.mixture
            flat = x.flatten(0, 1)
            share, chosen = inner.router(flat).float().softmax(-1).max(-1)
            out = torch.zeros_like(flat)
            for index, expert in enumerate(inner.experts):
                rows = (chosen == index).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(flat[rows]) * share[rows, None].to(x.dtype))
            return x + inner.head(out).view_as(x)

    job = job_for(lambda: Stack(Block))
    assert_as_plain(job, recomputed(job, "selective", slots=12))
