"""A run that goes on long enough compiles its blocks between two steps, where that pays."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit
from anyfit.fitting import Report
from anyfit.placing import compiled
from anyfit.probing import cache
from anyfit.running import improving, rehearsal
from anyfit.running.launch import Launch, launched
from anyfit.running.run import Run
from anyfit.showing.progress import Lines
from anyfit.values.compiled import BlockFigures, BlockTime, PhaseTime
from anyfit.values.plan import Placement
from tests import stacks
from tests.models import byte_batches, byte_job
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, ON_HOST, RESIDENT, hand_written, placed_of, started
from tests.stacks import WIDTH, Stack, stacked_job

pytestmark = [
    pytest.mark.skipif(compiled.no_compiler(torch.device("cpu")) is not None, reason="inductor needs a C++ compiler"),
    pytest.mark.filterwarnings("ignore"),  # of torch's own, when it compiles
    pytest.mark.timeout(300),
]
ROWS, BLOCKS = 4, ("blocks.0", "blocks.1")


class Dropping(nn.Module):
    def __init__(self, index: int) -> None:
        super().__init__()
        self.index, self.up, self.down = index, nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.down(F.gelu(self.up(x))), 0.1, self.training)


@pytest.fixture(autouse=True)
def _as_before(fresh_compiler: None) -> Iterator[None]:
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def machine() -> Iterator[anyfit.Machine]:
    """Of which nothing is known of compiled blocks."""
    machine = anyfit.probe()
    file = cache._compiled_file(machine)
    file.unlink(missing_ok=True)  # what a test of this process may have measured before
    yield machine
    file.unlink(missing_ok=True)


@pytest.fixture
def found_faster(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], list[str]]:
    """Has compiled blocks measured as so many times as fast as eager ones; gives a list of those that were measured."""

    def make(times: float) -> list[str]:
        names: list[str] = []
        measure = rehearsal.figures_of_blocks

        def phase(each: PhaseTime) -> PhaseTime:
            return PhaseTime(0.0, each.device_seconds / times, each.alone_seconds / times)

        def faster(time: BlockTime) -> BlockTime:
            return replace(time, forward=phase(time.forward), backward=phase(time.backward))

        def figures(*args: Any) -> dict[str, BlockFigures]:
            found = measure(*args)
            names.extend(found)
            return {name: (each.eager and replace(each, compiled=faster(each.eager))) or each for name, each in found.items()}

        monkeypatch.setattr(improving, "figures_of_blocks", figures)
        monkeypatch.setattr(improving, "KIND_SECONDS", 0.0)
        return names

    return make


def losses_of(run: Run, batches: list[Any]) -> list[float]:
    return [float(run.step(batch)) for batch in batches]


@pytest.mark.parametrize("memory", [None, "1MiB"])
def test_a_run_compiles_its_blocks_between_two_steps_and_goes_on(
    memory: str | None, machine: anyfit.Machine, found_faster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names, batches = found_faster(100.0), byte_batches(8, ROWS)
    job = byte_job(ROWS, clip_norm=0.5)
    with anyfit.start(job, machine=machine.with_limits(device_memory=memory)) as run:
        losses = losses_of(run, batches[:3])
        assert names == []
        losses += losses_of(run, batches[3:4])
        assert set(names) == set(BLOCKS)
        losses += losses_of(run, batches[4:])
        assert (run.plan.compiled, run.rescues) == (BLOCKS, 0)
        assert run.plan.rehearsed
        weights = run.state_dict()
    said = capsys.readouterr().err
    assert "after step 4: compiling one block of each kind, to see what it is worth" in said
    assert re.search("after step 4: 2 blocks compiled, as .* of trying showed: eager would take .* more a step\n", said)
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-5)
    for name, weight in plain_weights.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-5, atol=1e-6)
    assert [each.kind for each in cache.compiled_of(machine).blocks] == ["Block"]  # for later plans


def test_a_run_goes_on_as_it_is_where_compiled_code_is_not_faster(
    machine: anyfit.Machine, found_faster: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    names, batches = found_faster(0.5), byte_batches(8, ROWS)
    with anyfit.start(byte_job(ROWS), machine=machine) as run:
        losses = losses_of(run, batches)
        assert (run.plan.compiled, set(names)) == ((), set(BLOCKS))
    assert len(names) == len(BLOCKS)  # once
    assert "no block is compiled" in capsys.readouterr().err
    assert losses == train_plainly(byte_job(ROWS), batches)[0]  # to the bit: trying leaves no trace


def test_what_closes_a_run_knows_the_largest_of_its_plans(machine: anyfit.Machine, found_faster: Any) -> None:
    found_faster(100.0)
    with anyfit.start(byte_job(ROWS), machine=machine) as run, Lines(Console(quiet=True), 100) as watcher:
        report, eager = Report(run, watcher, None, None, "anyfit check"), run.plan
        for batch in byte_batches(6, ROWS):
            run.step(batch)
            report.step(run, [])
        assert run.plan.compiled == BLOCKS
        assert report.largest == max(eager, run.plan, key=lambda plan: plan.forecast.peak_bytes["device"])


def test_under_the_command_line_it_is_its_option_that_leaves_compiling_out(
    machine: anyfit.Machine, found_faster: Any, tmp_path: Path
) -> None:
    said: list[str] = []
    names, job, batches = found_faster(0.5), byte_job(ROWS), byte_batches(4, ROWS)
    with launched(Launch(tmp_path / "eager", say=said.append, compiles=False)), anyfit.start(job, machine=machine) as run:
        losses_of(run, batches)
    assert (names, said) == ([], [])
    with launched(Launch(tmp_path / "tried", say=said.append)), anyfit.start(job, machine=machine) as run:
        losses_of(run, batches)
        assert run.plan.compiled == ()
    assert said[0] == "after step 4: compiling one block of each kind, to see what it is worth; --no-compile leaves it out"


def test_what_is_left_of_a_run_decides_or_else_what_was_made(machine: anyfit.Machine, found_faster: Any) -> None:
    names = found_faster(100.0)
    data = [byte_batches(1, 1)[0][0] for _ in range(10 * ROWS)]
    for known, tried_after in ((True, [4]), (False, [6])):
        improving_at: list[int] = []
        with anyfit.start(byte_job(ROWS), machine=machine) as run:
            run._improving._least_steps = 6
            for step, batch in enumerate(run.loader(data) if known else byte_batches(10, ROWS), 1):
                run.step(batch)
                improving_at += [step] * bool(names)
                names.clear()
        assert improving_at == tried_after
        cache._compiled_file(machine).unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("placement", "choice", "is_replayed"),
    [(RESIDENT, "keep", True), (AWAY, "recompute", True), (AWAY, "recompute", False), (ON_HOST, "offload", False)],
)
def test_measuring_blocks_leaves_a_run_as_it_was(placement: Placement, choice: Any, is_replayed: bool) -> None:
    """With dropout in every block, and whatever stands in for its forward."""
    job, batches = stacked_job(lambda: Stack(Dropping), clip_norm=0.3), byte_batches(8, ROWS)
    recorded = stacks.BLOCKS if is_replayed else ()
    plan = hand_written(job, placement, activations=dict.fromkeys(stacks.BLOCKS, choice), replayed=recorded)
    with started(job, plan) as run:
        losses = losses_of(run, batches[:4])
        placed, before = placed_of(run), [vars(each).get("forward") for each in run.model.modules()]
        found = rehearsal.figures_of_blocks(job, placed, stacks.BLOCKS, ROWS, "these")
        assert [vars(each).get("forward") for each in run.model.modules()] == before
        assert {(each.kind, each.micro_batch, each.why_not) for each in found.values()} == {("Dropping", ROWS, "")}
        assert all(each.eager is not None and each.eager.seconds > 0 for each in found.values())
        losses += losses_of(run, batches[4:])
        assert placed.replayed.reasons == {}
        weights = run.state_dict()
    expected, plain = train_plainly(job, batches)
    assert losses == expected
    assert_bit_equal(weights, plain)


@pytest.mark.parametrize("case", ["compile=False", "deterministic", "a plan that was given", "a short run"])
def test_nothing_is_compiled_where_it_is_not_wanted(case: str, machine: anyfit.Machine, found_faster: Any) -> None:
    names = found_faster(100.0)
    job = byte_job(ROWS, compile=False) if case == "compile=False" else byte_job(ROWS)
    given = anyfit.plan(job, machine) if case == "a plan that was given" else None
    with anyfit.start(job, given, machine, deterministic=case == "deterministic") as run:
        if case == "a short run":
            run._improving._least_steps = 100
        losses_of(run, byte_batches(6, ROWS))
        assert (names, run.plan.compiled) == ([], ())
