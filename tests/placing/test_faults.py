"""What goes wrong leaves the state of the last completed step, and reaches the user once, whole."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import anyfit
from anyfit.placing.updates import Updates
from anyfit.values.plan import Placement
from tests.conftest import FULL
from tests.models import Tangled, byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, round_half_away, train_plainly
from tests.plans import AWAY, AWAY_ON_DISK, AWAY_STREAMED, DISK_STREAMED, ON_HOST, STREAMED, hand_written, random_delays, started

ROWS = 4
SPECULATES = Placement(weights="host", gradients="host", optimizer="host", update="host", speculates=True)
ROUTES = {
    "streamed": STREAMED, "on host": ON_HOST, "away": AWAY, "away, streamed": AWAY_STREAMED, "speculates": SPECULATES,
    "streamed, speculates": Placement(optimizer="host", speculates=True), "disk": AWAY_ON_DISK,
    "disk, streamed, speculates": replace(DISK_STREAMED, speculates=True),
}  # fmt: skip
if FULL:
    ROUTES |= {"disk, streamed": DISK_STREAMED, "disk, speculates": replace(AWAY_ON_DISK, speculates=True)}


class Failing(torch.optim.AdamW):
    """AdamW that raises at its nth step of a chunk, half-way: when the moments are already written."""

    steps = 0
    fails_at = -1

    def step(self, closure: Any = None) -> Any:
        result = super().step(closure)
        Failing.steps += 1
        if Failing.steps == Failing.fails_at:
            raise ArithmeticError("the update broke")
        return result


def job_for(model: Any = tiny_gpt, **options: Any) -> anyfit.Job:
    options = {"optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3), "precision": "bf16"} | options
    return anyfit.Job(model=model, loss=next_byte_loss, sample=byte_batches(1, ROWS)[0], batch_size=ROWS, **options)


@pytest.mark.parametrize("route", sorted(ROUTES))
@given(at=st.integers(1, 60), clip_norm=st.sampled_from([None, 0.3]), accumulation=st.sampled_from([1, 2]), looks=st.booleans())
def test_an_update_that_fails_is_raised_once_and_the_state_is_that_of_a_completed_step(
    route: str, at: int, clip_norm: float | None, accumulation: int, looks: bool
) -> None:
    Failing.fails_at = -1  # not where it is tried on stand-ins
    job = job_for(optimizer=lambda model: Failing(model.parameters(), lr=1e-3), clip_norm=clip_norm)
    plan = hand_written(job, ROUTES[route], accumulation=accumulation, chunk_bytes=8192, slots=8)
    batches = byte_batches(8, ROWS)
    errors = 0
    with started(job, plan, random_delays(at)) as run:
        Failing.steps, Failing.fails_at = 0, at
        for batch in batches:
            try:
                run.step(batch)
            except ArithmeticError:
                errors += 1
                if looks:  # else the next step is the first to ask for the chunk
                    check_state(run, job, batches, accumulation)
                run.step(batch)
        try:
            weights = run.state_dict()
        except ArithmeticError:  # the last step's own update
            errors += 1
            weights = run.state_dict()
        steps = run.steps
    assert errors <= 1
    assert steps == len(batches)
    Failing.fails_at = -1
    assert_bit_equal(weights, train_plainly(job, batches, accumulation)[1])


def check_state(run: anyfit.Run, job: anyfit.Job, batches: list[Tensor], accumulation: int) -> None:
    done, Failing.fails_at = run.steps, -1
    assert_bit_equal(run.state_dict(), train_plainly(job, batches[:done], accumulation)[1])


@given(
    route=st.sampled_from(sorted(ROUTES)),
    bad=st.integers(0, 7),
    where=st.integers(0, 30),
    clip_norm=st.sampled_from([None, 1e6]),
    accumulation=st.sampled_from([1, 2]),
)
def test_a_non_finite_gradient_in_any_chunk_leaves_the_step_out(
    route: str, bad: int, where: int, clip_norm: float | None, accumulation: int
) -> None:
    job = job_for(Tangled, clip_norm=clip_norm)
    batches = byte_batches(8, ROWS)
    plan = hand_written(job, ROUTES[route], chunk_bytes=1, slots=16, accumulation=accumulation)
    with started(job, plan, random_delays(where)) as run:
        trained = [parameter for name, parameter in run.model.named_parameters() if "unused" not in name and "frozen" not in name]
        poisoned = trained[where % len(trained)]
        for index, batch in enumerate(batches):
            hook = poisoned.register_hook(lambda gradient: gradient * float("nan")) if index == bad else None
            run.step(batch)
            if hook is not None:
                hook.remove()
        assert run.skipped == 1
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, [*batches[:bad], *batches[bad + 1 :]], accumulation)[1])


class Fragile(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gpt = tiny_gpt()
        self.fails = ""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gpt(ids)
        if self.fails == "forward":
            raise KeyError("bad batch")
        if self.fails == "backward":
            x.register_hook(self._fail)
        return x

    def _fail(self, _gradient: Tensor) -> None:
        raise KeyError("bad batch")


@given(
    route=st.sampled_from(sorted(ROUTES)),
    at=st.integers(0, 5),
    where=st.sampled_from(["forward", "backward"]),
    accumulation=st.sampled_from([1, 2]),
)
def test_an_exception_in_the_model_leaves_the_last_completed_step(route: str, at: int, where: str, accumulation: int) -> None:
    job = job_for(Fragile)
    batches = byte_batches(6, ROWS)
    plan = hand_written(job, ROUTES[route], accumulation=accumulation, chunk_bytes=8192, slots=8)
    with started(job, plan, random_delays(at)) as run:
        for index, batch in enumerate(batches):
            if index == at:
                run.model.fails = where
                with pytest.raises(KeyError, match="bad batch"):
                    run.step(batch)
                run.model.fails = ""
            run.step(batch)
        assert run.steps == len(batches)
        weights = run.state_dict()
    assert_bit_equal(weights, train_plainly(job, batches, accumulation)[1])


@pytest.mark.parametrize("route", ["resident", *sorted(ROUTES)])
def test_an_update_that_is_broken_off_is_not_gone_on_from(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some chunks would be a step ahead of others."""
    job = job_for()
    with started(job, hand_written(job, ROUTES.get(route, Placement()), chunk_bytes=8192, slots=8)) as run:
        batches, seen = byte_batches(3, ROWS), []
        run.step(batches[0])

        def interrupt(chunk: int) -> None:
            seen.append(chunk)
            if len(seen) == 3:
                raise KeyboardInterrupt

        monkeypatch.setattr(Updates, "_share", lambda _updates, state, _before: interrupt(state.index))
        with pytest.raises(KeyboardInterrupt):
            run.step(batches[1])
        monkeypatch.undo()
        with pytest.raises(RuntimeError, match="broken off half-way; go on from the last checkpoint"):
            run.step(batches[2])


def test_a_run_that_is_closed_leaves_no_thread_and_a_plain_model() -> None:
    import threading

    before = threading.active_count()
    job = job_for()
    run = started(job, hand_written(job, AWAY, slots=8))
    run.step(byte_batches(1, ROWS)[0])
    weights = {name: round_half_away(tensor) for name, tensor in run.state_dict().items()}
    model = run.model
    run.close()
    run.close()
    assert threading.active_count() == before
    assert {type(parameter) for parameter in model.parameters()} == {nn.Parameter}
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name]), name
    del run
    gc.collect()
    assert next_byte_loss(model, byte_batches(1, ROWS)[0]).isfinite()
