"""Planning runs the user's code, and leaves nothing behind: the run that follows is the one that plain PyTorch would make."""

from __future__ import annotations

import functools
import itertools
import random
import types
from collections import Counter, deque
from collections.abc import Callable, Iterator
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from anyfit.tracing import trace_all
from anyfit.values.memento import leaving_no_trace

CALLS = 0
SEEN: list[int] = []


class Small(nn.Module):
    made = 0

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, batch: Tensor) -> Tensor:
        return self.second(torch.relu(self.first(batch)))


AGREED = ["mean-of-micro-batches", "batch-norm-of-micro-batches"]  # so that passes of all sizes are traced


def mean_square(model: nn.Module, batch: Tensor) -> Tensor:
    loss: Tensor = model(batch).square().mean()
    return loss


def job_of(model: Any, loss: Callable[[nn.Module, Any], Any] = mean_square, **options: Any) -> anyfit.Job:
    optimizer = options.pop("optimizer", lambda model: torch.optim.SGD(model.parameters(), lr=0.1))
    return anyfit.Job(
        model, loss, optimizer=optimizer, sample=torch.ones(4, 4), batch_size=4, agree=AGREED, **{"precision": "fp32", **options}
    )


def planned(job: anyfit.Job) -> None:
    """As planning does: passes of several sizes, on fakes and for real."""
    from dataclasses import replace

    assert len(trace_all(job, [4, 2], "cpu")) == 2
    assert len(trace_all(replace(job, real_run=True), [4, 2], "cpu")) == 2


def test_random_numbers_of_python_numpy_and_torch_are_those_that_plain_pytorch_draws() -> None:
    def seeded() -> None:
        random.seed(3), np.random.seed(4), torch.manual_seed(5)

    own, of_numpy, of_torch = random.Random(1), np.random.default_rng(2), torch.Generator()

    def draws() -> list[float]:
        generators = float(of_numpy.random()), float(torch.rand([], generator=of_torch)), own.random()
        return [random.random(), float(np.random.rand()), float(torch.rand([])), *generators]

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        noise = random.random() + np.random.rand() + own.random() + of_numpy.random()
        return (model(batch) + torch.rand(batch.shape, generator=of_torch) + noise).square().mean()

    class Noisy(Small):
        def __init__(self) -> None:
            super().__init__()
            self.drop = random.random()

    with leaving_no_trace(job_of(Noisy, loss)):
        seeded()
        expected = draws()
    seeded()
    planned(job_of(Noisy, loss))
    assert draws() == expected


def test_counters_lists_and_caches_wherever_they_are_held_are_as_before() -> None:
    count, log, table = 0, [], {"a": [1]}
    ring, met, tally, array = deque([1, 2], maxlen=2), {1}, Counter("ab"), np.zeros(3)
    numbers, generated = itertools.count(), (index for index in range(10))
    tensor = torch.zeros(3, dtype=torch.long)

    @functools.lru_cache
    def positions(size: int) -> Tensor:
        return torch.arange(size)

    def loss(model: Any, batch: Tensor, seen: list[int] = []) -> Tensor:  # noqa: B006
        nonlocal count
        global CALLS
        CALLS += 1
        count += 1
        SEEN.append(count), log.append(count), seen.append(count), table["a"].append(2), ring.append(3), met.add(4)
        tally["c"] += 1
        array[0] += 1
        loss.calls = getattr(loss, "calls", 0) + 1  # type: ignore[attr-defined]
        table["model"] = model
        next(numbers), next(generated)
        tensor.add_(1)
        return (model(batch) + positions(4)).square().mean()

    model = Small()
    job = job_of(model, loss)
    identities = [log, table["a"], ring, array, tensor]
    planned(job)
    assert (count, CALLS, SEEN, log, ring, met, table) == (0, 0, [], [], deque([1, 2]), {1}, {"a": [1]})
    assert (tally, array.tolist(), tensor.tolist()) == (Counter("ab"), [0, 0, 0], [0, 0, 0])
    assert loss.__defaults__ == ([],)
    assert not hasattr(loss, "calls")
    assert (next(numbers), next(generated), next(generated)) == (0, 0, 1)
    assert positions.cache_info().currsize == 0
    assert all(a is b for a, b in zip(identities, [log, table["a"], ring, array, tensor], strict=True))


def test_a_model_that_was_given_is_untouched() -> None:
    class Stateful(Small):
        calls = 0

        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(4)
            self.register_buffer("steps", torch.zeros(()))
            self.seen: list[int] = []
            self.last: Tensor | None = None
            self.lock = Lock()  # no copy of it can be made

        def forward(self, batch: Tensor) -> Tensor:
            type(self).calls += 1
            self.steps += 1
            self.seen.append(1)
            if self.last is None:
                self.register_forward_hook(lambda *_: None)
            self.last = batch
            self.eval() if len(self.seen) > 1 else self.train()
            self.first.weight.requires_grad_(False)
            return super().forward(self.norm(batch))

    model = Stateful()
    parameters, buffers = list(model.parameters()), {name: buffer.clone() for name, buffer in model.named_buffers()}
    mine = torch.optim.SGD(model.parameters(), lr=0.1)
    model.first.weight.grad = torch.ones_like(model.first.weight)
    planned(job_of(model))
    assert (Stateful.calls, model.seen, model.last, len(model._forward_hooks)) == (0, [], None, 0)
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert all(type(parameter) is nn.Parameter and parameter.requires_grad for parameter in parameters)
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in model.named_buffers())
    assert torch.equal(model.first.weight.grad, torch.ones(8, 4))
    assert mine.param_groups[0]["params"][0] is model.first.weight
    assert all(module.training for module in model.modules())


def test_nothing_is_printed_or_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kept, opened = tmp_path / "kept.txt", (tmp_path / "opened.txt").open("w")
    kept.write_text("before")
    opened.write("one\n")

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        print("the loss runs")
        (tmp_path / "new.txt").write_text("x")
        assert (tmp_path / "new.txt").read_text() == "x"
        with kept.open("a") as file:
            file.write("after")
        opened.write("two\n")
        (tmp_path / "folder").mkdir()
        np.save(tmp_path / "folder" / "array.npy", np.zeros(2))
        torch.save([1], tmp_path / "saved.pt")
        return mean_square(model, batch)

    planned(job_of(Small, loss))
    opened.close()
    assert capsys.readouterr().out == ""
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kept.txt", "opened.txt"]
    assert (kept.read_text(), (tmp_path / "opened.txt").read_text()) == ("before", "one\n")


def test_settings_of_torch_are_as_before() -> None:
    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        torch.set_default_dtype(torch.float64)
        torch.use_deterministic_algorithms(True)
        torch.set_grad_enabled(True)
        return mean_square(model, batch)

    planned(job_of(Small, loss))
    assert torch.get_default_dtype() == torch.float32
    assert not torch.are_deterministic_algorithms_enabled()


def test_all_is_as_before_when_the_users_code_fails() -> None:
    model, log = Small(), []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        log.append(1)
        raise KeyError("labels")

    parameters = list(model.parameters())
    with pytest.raises(KeyError, match="labels"):
        trace_all(job_of(model, loss), [4], "cpu")
    assert log == []
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))


def test_a_tensor_too_large_to_be_copied_that_is_changed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anyfit.values.memento.MOST_BYTES", 64)
    large = torch.zeros(64)

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        large.add_(1)
        return mean_square(model, batch)

    with pytest.raises(ValueError, match=r"changed a tensor of 256 B at .*loss.*, which is too large"):
        trace_all(job_of(Small, loss, real_run=True), [4], "cpu")


# ---------------------------------------------------------------------- models that are no copies of themselves


def by_closure(model: nn.Module) -> None:
    original = model.forward
    model.forward = lambda batch: original(batch) * 2  # type: ignore[method-assign]


def by_method(model: nn.Module) -> None:
    original = type(model).forward
    model.forward = types.MethodType(lambda self, batch: original(self, batch) * 2, model)  # type: ignore[method-assign]


def by_partial(model: nn.Module) -> None:
    model.forward = functools.partial(type(model).forward, model)  # type: ignore[method-assign]


def by_hook(model: Any) -> None:
    model.first.register_forward_hook(lambda _module, _args, output: output + model.second.bias.sum())


def by_list(model: Any) -> None:
    model.parents = [model]
    model.first.parents = [model]
    model.weights = [model.first.weight, (model.second.weight,)]
    model.forward = lambda batch: torch.relu(batch @ model.weights[0].t()) @ model.weights[1][0].t()


@pytest.mark.parametrize("patch", [by_closure, by_method, by_partial, by_hook, by_list])
def test_a_model_whose_forward_was_patched_is_traced_with_its_own_parameters(patch: Callable[[nn.Module], None]) -> None:
    model = Small()
    patch(model)
    model.things = (index for index in range(3))  # type: ignore[assignment]  # no copy of it can be made
    (graph,) = trace_all(job_of(model, precision="bf16"), [4], "cpu")
    weights = [parameter for parameter in graph.parameters if parameter.name.endswith("weight")]
    assert [parameter.used for parameter in weights] == [True, True]
    assert {parameter.dtype for parameter in weights} == {"bfloat16"}
    with anyfit.start(job_of(model)) as run:
        assert float(run.step(torch.ones(4, 4))) > 0


def test_an_optimizer_over_parameters_that_were_listed_before_is_that_of_the_model() -> None:
    model = Small()
    listed = list(model.parameters())
    job = job_of(model, optimizer=lambda _model: torch.optim.SGD(listed, lr=0.1))
    planned(job)
    with anyfit.start(job) as run:
        run.step(torch.ones(4, 4))


def test_blocks_that_are_patched_differently_are_not_taken_for_alike() -> None:
    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)) for _ in range(12)])
            for block in self.blocks[5:8]:
                block.register_forward_hook(lambda _module, _args, output: F.gelu(output))

        def forward(self, batch: Tensor) -> Tensor:
            for block in self.blocks:
                batch = block(batch)
            return batch

    (graph,) = trace_all(job_of(Chain()), [4], "cpu")
    assert sum(op.name == "gelu.default" for op in graph.ops) == 3


def test_a_lazy_module_is_refused_by_name_and_one_that_has_run_once_trains() -> None:
    model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
    with pytest.raises(ValueError, match=r"0\.weight has no shape yet: LazyLinear makes it .* run the model once on a batch"):
        trace_all(job_of(model), [4], "cpu")

    def made() -> nn.Module:
        model = nn.Sequential(nn.LazyLinear(4), nn.ReLU())
        model(torch.ones(1, 4))
        return model

    planned(job_of(made))


def test_an_iterator_that_feeds_the_loss_begins_at_its_first_item(tmp_path: Path) -> None:
    def batches() -> Iterator[Tensor]:
        for index in range(10):
            yield torch.full((4, 4), float(index))

    fed, wanted = batches(), []

    def loss(model: nn.Module, batch: Tensor) -> Tensor:
        more = next(fed)
        wanted.append(more)
        return (model(batch) + more).square().mean()

    with anyfit.start(job_of(Small, loss, micro_batch=4)) as run:
        for _ in range(3):
            run.step(torch.ones(4, 4))
    assert [float(each.mean()) for each in wanted] == [0.0, 1.0, 2.0]


@pytest.mark.parametrize("real_run", [False, True])
def test_a_size_that_the_model_does_not_run_is_left_out_with_a_note(real_run: bool) -> None:
    job = job_of(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)), real_run=real_run)
    graphs = trace_all(job, [4, 2, 1], "cpu")
    assert [graph.micro_batch for graph in graphs] == [4, 2]
    notes = [note for graph in graphs for note in graph.notes]
    assert any("micro-batches of 1 are left out" in note and "Expected more than 1 value per channel" in note for note in notes)
