"""Whatever else a model, its optimizer or its loss keeps while it trains: a resumed run is plain PyTorch that never stopped."""

from __future__ import annotations

import collections
import enum
import functools
import io
import itertools
import json
import random
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import anyfit
from anyfit.running.plain import plain
from anyfit.running.run import Run
from anyfit.running.unplain import unplain
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import hand_written
from tests.plans import started as placed

ROWS, WIDTH, STEPS, SAVED_AFTER = 4, 6, 6, 3


class Stateful(nn.Module):
    """A layer, and `scale(x)`, which depends on what has been before."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.prepare()

    def prepare(self) -> None: ...

    def scale(self, x: Tensor) -> Any:
        return 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) * self.scale(x.detach())


class Counter(Stateful):
    def prepare(self) -> None:
        self.calls = 0

    def scale(self, x: Tensor) -> Any:
        self.calls += 1
        return 1 / self.calls


class Average(Stateful):
    """Kept as an attribute, and made by the first forward."""

    average: Tensor | None = None

    def scale(self, x: Tensor) -> Any:
        self.average = x.mean(0) if self.average is None else 0.9 * self.average + 0.1 * x.mean(0)
        return 1 + self.average


class InPlace(Stateful):
    """The same tensor under two names, changed in place, and a constant that it once was."""

    def prepare(self) -> None:
        self.zero = self.later = torch.zeros(WIDTH)
        self.sums = torch.zeros(400, WIDTH)
        self.others = {"sums": self.sums, 3: [self.sums]}

    def scale(self, x: Tensor) -> Any:
        self.sums += x.mean(0)
        self.later = self.later + 1
        assert self.others[3][0] is self.sums
        assert not self.zero.any()
        return 1 + self.others["sums"][0] + 0.01 * self.later


class Generators(Stateful):
    """Of all kinds, one of them shared."""

    def prepare(self) -> None:
        self.torchs = torch.Generator().manual_seed(3)
        self.numpys = np.random.default_rng(4)
        self.old = np.random.RandomState(5)
        self.pythons = random.Random(6)
        self.bits = [np.random.Generator(np.random.Philox(7))]
        self.again = {"torch": self.torchs, "count": itertools.count(2)}

    def scale(self, x: Tensor) -> Any:
        drawn = torch.rand((), generator=self.torchs) + torch.rand((), generator=self.again["torch"])
        return (
            drawn
            + self.numpys.random()
            + self.old.rand()
            + self.pythons.gauss(0, 1)
            + self.bits[0].random()
            + next(self.again["count"])
        )


class Global(Stateful):
    """torch's, numpy's and Python's own random numbers."""

    def scale(self, x: Tensor) -> Any:
        return torch.rand(()) + np.random.rand() + np.random.randn() + random.random()


class Annealer:
    def __init__(self) -> None:
        self.temperature, self.history = 1.0, collections.deque(maxlen=3)
        self.by_name: dict[str, list[Any]] = collections.defaultdict(list)

    def step(self, x: Tensor) -> float:
        self.temperature *= 0.9
        self.history.append(float(x.sum()))
        self.by_name["sum"].append(np.float32(x.sum()))
        return self.temperature + sum(self.history) + float(sum(self.by_name["sum"]))


class WithObject(Stateful):
    def prepare(self) -> None:
        self.annealer = Annealer()
        self.namespace = types.SimpleNamespace(n=0)

    def scale(self, x: Tensor) -> Any:
        self.namespace.n += 1
        return self.annealer.step(x) + self.namespace.n


class Phase(enum.Enum):
    WARM = 1
    HOT = 2


class Pair(NamedTuple):
    first: float
    second: Tensor


class Odd(Stateful):
    """An enum, a named tuple, a set, a dtype, numpy's arrays and numbers."""

    def prepare(self) -> None:
        self.phase, self.pair = Phase.WARM, Pair(0.0, torch.zeros(WIDTH))
        self.seen: set[int] = set()
        self.array, self.dtype, self.number = np.zeros((300, 2)), torch.float32, np.float64(0)

    def scale(self, x: Tensor) -> Any:
        self.phase = Phase.HOT if len(self.seen) > 1 else Phase.WARM
        self.pair = Pair(self.pair.first + 1, self.pair.second + x.mean(0))
        self.seen.add(len(self.seen))
        self.array += float(x.mean())
        self.number = self.number + 1
        self.dtype = torch.float64 if len(self.seen) > 2 else torch.float32
        extra = float(self.array.sum()) + self.phase.value + float(self.number)
        return torch.ones((), dtype=self.dtype).float() / 3 + self.pair.second * self.pair.first + extra


class Teacher(Stateful):
    """Hidden in a list, so that its weights are nobody's parameters; a running average of the student's."""

    def prepare(self) -> None:
        self.teacher = [nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)]
        self.teacher[0].load_state_dict(self.layer.state_dict())

    def scale(self, x: Tensor) -> Any:
        with torch.no_grad():
            for mine, theirs in zip(self.teacher[0].parameters(), self.layer.parameters(), strict=True):
                mine.lerp_(theirs, 0.1)
            return 1 + self.teacher[1](self.teacher[0](x))


class Buffers(Stateful):
    """Not persistent ones; one that grows, and one that is made, and one that goes."""

    def prepare(self) -> None:
        self.register_buffer("hidden", torch.zeros(WIDTH), persistent=False)
        self.register_buffer("grows", torch.zeros(0, WIDTH))
        self.register_buffer("later", None)
        self.register_buffer("goes", torch.ones(2))
        self.register_buffer("turns", torch.ones(WIDTH, dtype=torch.complex64))

    def scale(self, x: Tensor) -> Any:
        self.hidden += x.mean(0)
        self.grows = torch.cat([self.grows, x[:1]])
        self.later = x[:2].clone() if self.later is None else 0.5 * self.later
        self.goes = None
        self.turns *= 1j
        return self.hidden + self.grows.sum(0) + self.later.sum(0) + self.turns.real


class Extra(Stateful):
    """What a module gives away by itself: numbers, bytes, a tensor."""

    def prepare(self) -> None:
        self.__dict__["_held"] = io.BytesIO(b"\x00")

    def get_extra_state(self) -> Any:
        return {"n": self._held.getvalue()[0], "t": torch.arange(3), ("a", 1): {2, 3}, "buffer": io.BytesIO(b"abc")}

    def set_extra_state(self, state: Any) -> None:
        assert state["buffer"].read() == b"abc"
        assert state["a", 1] == {2, 3}
        self.__dict__["_held"] = io.BytesIO(bytes([state["n"]]))

    def scale(self, x: Tensor) -> Any:
        self.__dict__["_held"] = io.BytesIO(bytes([self._held.getvalue()[0] + 1]))
        return self._held.getvalue()[0]


class OfClass(Stateful):
    """Counted by the class and not by the module."""

    calls = 0

    def prepare(self) -> None:
        type(self).calls = 0

    def scale(self, x: Tensor) -> Any:
        type(self).calls += 1
        return 1 / type(self).calls


class Aliases(Stateful):
    """Names a module and a weight of its own, and later others."""

    def prepare(self) -> None:
        self.other = nn.Linear(WIDTH, WIDTH)
        self.pick = [self.layer, self.layer.weight]

    def scale(self, x: Tensor) -> Any:
        self.pick = [self.other, self.other.weight] if self.pick[0] is self.layer else self.pick
        return self.pick[0](x) + self.pick[1].sum()


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)


def job_for(model: Any, **options: Any) -> anyfit.Job:
    defaults = {"loss": mean_square, "optimizer": sgd, "precision": "fp32"}
    return anyfit.Job(model, sample=batches(1)[0], batch_size=ROWS, **(defaults | options))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def started(job: anyfit.Job, resume: Path | None = None) -> Run:
    np.random.seed(2)
    random.seed(2)
    run = placed(job, hand_written(job))
    if resume is not None:
        run.resume(resume)
    return run


def assert_goes_on_as_if_never_stopped(job_of: Callable[[], anyfit.Job], folder: Path) -> None:
    np.random.seed(2)
    random.seed(2)
    job = job_of()
    losses, expected = train_plainly(job, batches(STEPS))
    assert len(set(losses)) == STEPS
    with started(job_of()) as run:
        for batch in batches(SAVED_AFTER):
            run.step(batch)
        run.save(folder)
    with started(job_of(), folder) as run:
        resumed = [float(run.step(batch)) for batch in batches(STEPS)[SAVED_AFTER:]]
        assert resumed == losses[SAVED_AFTER:]
        assert_bit_equal({name: each for name, each in run.state_dict().items() if isinstance(each, Tensor)}, expected)


MODELS = [
    Counter, Average, InPlace, Generators, Global, WithObject, Odd, Teacher, Buffers, Extra, OfClass, Aliases,
]  # fmt: skip


@pytest.mark.parametrize("model", MODELS)
def test_what_a_model_keeps_beside_its_weights_goes_on(model: type[Stateful], tmp_path: Path) -> None:
    assert_goes_on_as_if_never_stopped(lambda: job_for(model), tmp_path / "saved")


class Slowing(torch.optim.SGD):
    """Counts its steps on itself."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05)
        self.steps, self.seen = 0, {"sum": 0.0}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.steps += 1
        self.seen["sum"] += 1.0
        for group in self.param_groups:
            for each in group["params"]:
                if each.grad is not None:
                    each -= 0.05 / (self.steps + self.seen["sum"]) * each.grad


def test_an_optimizer_that_counts_on_itself_goes_on(tmp_path: Path) -> None:
    assert_goes_on_as_if_never_stopped(lambda: job_for(Stateful, optimizer=lambda m: Slowing(m.parameters())), tmp_path / "saved")


def test_what_an_optimizer_keeps_on_itself_goes_on(tmp_path: Path) -> None:
    with started(job_for(Stateful)) as run:
        optimizer: Any = run.optimizer
        optimizer.counted, optimizer.seen = 3, {"sum": torch.ones(2)}
        run.step(batches(1)[0])
        run.save(tmp_path / "saved")
    with started(job_for(Stateful), tmp_path / "saved") as run:
        optimizer = run.optimizer
        assert optimizer.counted == 3
        assert torch.equal(optimizer.seen["sum"], torch.ones(2))


class Weighing:
    def __init__(self) -> None:
        self.mean = 1.0

    def __call__(self, model: nn.Module, x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        self.mean = 0.9 * self.mean + 0.1 * float(loss.detach())
        return loss / self.mean

    def loss(self, model: nn.Module, x: Tensor) -> Tensor:
        return self(model, x)


DRAWN = np.random.default_rng(5)
COUNTED = {"calls": 0}
CALLS = 0


def from_around() -> Callable[[nn.Module, Tensor], Tensor]:
    global CALLS
    held, last, criterion = {"n": 0}, 1.0, nn.BatchNorm1d(WIDTH, affine=False)
    DRAWN.bit_generator.state = np.random.default_rng(5).bit_generator.state
    COUNTED["calls"] = CALLS = 0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        nonlocal last
        global CALLS
        held["n"] += 1
        CALLS += 1
        COUNTED["calls"] += 2
        last *= 0.9
        with torch.no_grad():
            seen = criterion(x)
            seen = (x - criterion.running_mean) * criterion.running_var + seen
        return (
            (model(x).square().mean() + (model(x) * seen).mean()) * last * held["n"] * DRAWN.random() + COUNTED["calls"] + CALLS
        )

    return loss


def in_part(weighing: Weighing, scale: float, model: nn.Module, x: Tensor) -> Tensor:
    return weighing(model, x) * scale


LOSSES: dict[str, Callable[[], Any]] = {
    "an object": Weighing,
    "a method": lambda: Weighing().loss,
    "a part of a function": lambda: functools.partial(in_part, Weighing(), 2.0),
    "variables around it": from_around,
}


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_what_a_loss_keeps_goes_on(loss: Callable[[], Any], tmp_path: Path) -> None:
    assert_goes_on_as_if_never_stopped(lambda: job_for(Stateful, loss=loss()), tmp_path / "saved")


class Lazy(Stateful):
    """An object that is not there at the start."""

    def scale(self, x: Tensor) -> Any:
        if not hasattr(self, "annealer"):
            self.annealer = Annealer()
        return self.annealer.step(x)


class Iterating(Stateful):
    def prepare(self) -> None:
        self.numbers = iter(range(1, 100))

    def scale(self, x: Tensor) -> Any:
        return 1 / next(self.numbers)


class Function(Stateful):
    def prepare(self) -> None:
        self.function: Any = torch.tanh

    def scale(self, x: Tensor) -> Any:
        self.function = torch.exp
        return self.function(x)


@pytest.mark.parametrize(("model", "name"), [(Lazy, "annealer"), (Iterating, "numbers"), (Function, "function")])
def test_what_cannot_be_kept_is_named_when_saved_and_refused_when_resumed(
    model: type[Stateful], name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with started(job_for(model)) as run:
        for batch in batches(2):
            run.step(batch)
            run.save(tmp_path / "saved")
    assert capsys.readouterr().err.count(f"does not hold the model.{name}") == 1
    with started(job_for(model)) as run:
        before = run.state_dict()
        with pytest.raises(ValueError, match=rf"the model\.{name} was a .*make it in __init__"):
            run.resume(tmp_path / "saved")
        assert_bit_equal(run.state_dict(), before)


class Unplain(Stateful):
    def get_extra_state(self) -> Any:
        return {"made": [Annealer()]}


def test_extra_state_that_is_not_plain_is_refused_by_module(tmp_path: Path) -> None:
    job = job_for(lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Unplain()))
    with started(job) as run:
        run.step(batches(1)[0])
        with pytest.raises(TypeError, match=r"1\.get_extra_state\(\)\[made\]\[0\]: Annealer is neither .*Unplain \(1\)"):
            run.save(tmp_path / "saved")
        run.step(batches(1)[0])
    assert not (tmp_path / "saved").exists()


def test_extra_state_of_another_model_is_refused(tmp_path: Path) -> None:
    with started(job_for(Extra)) as run:
        run.save(tmp_path / "saved")
    with started(job_for(Stateful)) as run, pytest.raises(ValueError, match="the model has none extra state"):
        run.resume(tmp_path / "saved")


def test_settings_of_modules_that_did_not_change_are_those_given_now(tmp_path: Path) -> None:
    def model(rate: float) -> nn.Module:
        return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(rate))

    with started(job_for(lambda: model(0.5))) as run:
        run.step(batches(1)[0])
        run.save(tmp_path / "saved")
    with started(job_for(lambda: model(0.25)), tmp_path / "saved") as run:
        assert run.model[1].p == 0.25  # type: ignore[index]


def test_a_run_resumed_twice_has_what_both_parts_of_it_changed(tmp_path: Path) -> None:
    job, losses = job_for(Counter), train_plainly(job_for(Counter), batches(3))[0]
    with started(job) as run:
        assert [float(run.step(batches(3)[0]))] == losses[:1]
        run.save(tmp_path / "1")
    for step in (1, 2):
        with started(job, tmp_path / str(step)) as run:
            assert float(run.step(batches(3)[step])) == losses[step]
            run.save(tmp_path / str(step + 1))
            assert run.model.calls == step + 1


VALUES: list[Any] = [
    {"!tuple": [1], "a": {"!dict": 2}},
    {1: "a", "1": "b", (2, None): [1.5, float("inf")]},
    collections.OrderedDict(b=1, a=2),
    collections.Counter("aab"),
    {"bytes": b"\x00\xff", "c": 1 - 2j, "r": range(3, 9, 2), "s": slice(1, None), "f": frozenset({1, 2})},
    [torch.Size([2, 3]), torch.bfloat16, torch.device("cpu"), np.int16(-3), np.bool_(True), Path("a/b")],
    2**200,
]


@pytest.mark.parametrize("value", VALUES, ids=repr)
def test_plain_data_is_the_same_when_it_comes_back(value: Any) -> None:
    back = unplain(json.loads(json.dumps(plain(value, ("value",)))))
    assert back == value
    assert type(back) is type(value)


@pytest.mark.parametrize(
    "value",
    [
        torch.arange(6.0).view(2, 3).t(),
        torch.zeros(0, 3),
        torch.tensor(3, dtype=torch.int16),
        torch.rand(2, dtype=torch.complex128),
    ],
)
def test_a_tensor_is_the_same_when_it_comes_back(value: Tensor) -> None:
    back = unplain(json.loads(json.dumps(plain([value, value], ("value",)))))
    assert torch.equal(back[0], value)
    assert (back[0].dtype, back[0].stride()) == (value.dtype, value.stride())
