"""What others hang on a run: callbacks after its steps, and numbers beside them."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
import torch
from torch import nn

import anyfit
from anyfit.running import lines
from anyfit.running.launch import Launch, launched

BATCH = {"x": torch.ones(4, 2), "y": torch.zeros(4, 1)}


def started() -> anyfit.Run:
    job = anyfit.Job(
        model=lambda: nn.Linear(2, 1),
        loss=lambda model, batch: ((model(batch["x"]) - batch["y"]) ** 2).mean(),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample=BATCH,
        batch_size=4,
        precision="fp32",
    )
    return anyfit.start(job)


@pytest.fixture
def run() -> Iterator[anyfit.Run]:
    with started() as run:
        yield run


def test_a_callback_sees_every_step_once_it_is_done(run: anyfit.Run) -> None:
    seen: list[tuple[int, float]] = []

    @run.on_step
    def note(run: anyfit.Run) -> None:
        seen.append((run.steps, run.metrics.loss))

    losses = [float(run.step(BATCH)) for _ in range(3)]
    assert seen == [(index + 1, loss) for index, loss in enumerate(losses)]


def test_an_error_in_a_callback_leaves_the_step_that_is_done(run: anyfit.Run) -> None:
    def fail(run: anyfit.Run) -> None:
        if run.steps == 1:
            raise KeyError("mine")

    run.on_step(fail)
    with pytest.raises(KeyError, match="mine"):
        run.step(BATCH)
    run.step(BATCH)
    assert run.steps == 2


def test_what_is_logged_goes_to_whoever_asked_with_the_step_it_belongs_to(run: anyfit.Run) -> None:
    heard: list[tuple[int, Mapping[str, float]]] = []
    run.on_log(lambda step, values: heard.append((step, values)))
    run.step(BATCH)
    run.log(accuracy=torch.tensor(0.5), rate=1)
    assert heard == [(1, {"accuracy": 0.5, "rate": 1.0})]


def test_a_model_that_is_read_evaluates_without_gradients_and_trains_as_before_afterwards(run: anyfit.Run) -> None:
    with run.reading() as model:
        assert not model.training
        read = model(BATCH["x"])
        assert not read.requires_grad
    assert run.model.training
    weights = run.state_dict()
    torch.testing.assert_close(read, BATCH["x"] @ weights["weight"].T + weights["bias"])
    run.step(BATCH)


@pytest.mark.parametrize(
    ("log", "says"),
    [
        (lambda run: run.log(loss="low"), r"run.log\(loss=\) takes a number, got str"),
        (lambda run: run.log(loss=torch.zeros(2)), r"run.log\(loss=\) takes a number, got Tensor"),
        (lambda run: run.log(step=3), "every line has its own step; choose another name"),
    ],
)
def test_what_is_no_number_or_has_a_name_that_is_taken_is_refused(
    run: anyfit.Run, log: Callable[[anyfit.Run], None], says: str
) -> None:
    with pytest.raises((TypeError, ValueError), match=says):
        log(run)


def test_a_run_folder_keeps_what_was_logged_and_a_resumed_run_drops_what_it_will_repeat(tmp_path: Path) -> None:
    with launched(Launch(folder=tmp_path, save_every=2)), started() as run:
        for _ in range(3):
            run.step(BATCH)
            run.log(twice=2 * run.steps)
    assert [(each["step"], each["twice"]) for each in lines.read(tmp_path / "logged.jsonl")] == [(1, 2), (2, 4), (3, 6)]
    with (tmp_path / "logged.jsonl").open("a") as file:
        file.write('{"step": 4, "tw')  # as a process that is killed leaves it
    with launched(Launch(folder=tmp_path, resume=True)), started() as run:
        assert run.steps == 2
    assert [json.loads(line)["step"] for line in (tmp_path / "logged.jsonl").read_text().splitlines()] == [1, 2]


def test_the_checkpoint_of_the_best_step_stays(tmp_path: Path) -> None:
    with launched(launch := Launch(folder=tmp_path, save_every=1, keep=1)), started() as run:
        for _ in range(4):
            run.step(BATCH)
            if run.steps == 2:
                launch.best = 2
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["00000002", "00000004"]
