"""Forecasts of runs that others published are within their tolerances, and docs/accuracy.md has them as they are today."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from anyfit.profiling import profiled
from anyfit.values.graph import Graph
from benchmarks import megatron, torchtitan
from benchmarks.published import PAGE, PICTURE, RUNS, Held, Run, draw, written
from tests.conftest import FULL

SOME = [run for run in RUNS if run.name in ("GPT 1.7B", "Llama 2 13B")]


@pytest.mark.parametrize("run", RUNS if FULL else SOME, ids=lambda run: f"{run.name} on {run.gpus}")
def test_a_published_run_is_forecast_within_its_tolerance(run: Run) -> None:
    found = Held(run)
    assert found.is_within, f"{found.off:+.1%} of what was published"
    assert f"| {' | '.join(found.forecast_cells)} | " in PAGE.read_text()


@pytest.mark.full
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.name} on {run.gpus}")
def test_our_own_plan_is_no_slower_by_the_same_forecast(run: Run) -> None:
    found = Held(run)
    assert found.gained >= 0
    assert f"| {' | '.join(found.cells)} |" in PAGE.read_text()


def test_the_picture_is_that_of_the_table() -> None:
    assert PICTURE.read_text() == draw(PAGE.read_text())
    assert PICTURE.read_text().count('class="mark"') == len(RUNS) - 1  # not of the run that its cards are taken from


def test_sizes_are_those_that_the_paper_names() -> None:
    for run in megatron.RUNS:
        named = float(run.name.removeprefix("GPT ").removesuffix("B"))
        assert run.shape.parameters / 1e9 == pytest.approx(named, rel=0.03)
        assert run.data * run.tensor * run.pipeline == run.gpus
        assert run.samples % (run.data * run.micro_batch) == 0


@cache
def small() -> Graph:
    run = replace(torchtitan.RUNS[0], gpus=8, length=512, shape="small")
    torchtitan.SHAPES["small"] = torchtitan.SHAPES["llama3-8b"] | {"num_hidden_layers": 2, "vocab_size": 4096}
    (graph,) = torchtitan.graphs_of(run)
    return graph


def test_every_second_product_of_a_block_is_recomputed_and_weights_are_copied_once_more() -> None:
    run, graph = torchtitan.RUNS[0], small()
    machine = run.machine.with_devices(8, 1)
    plain = profiled(run.job, [graph], machine, (8, 1), 8, 0.0)
    as_run = torchtitan.as_it_ran(plain, {graph.micro_batch: graph}, machine)
    before, after = plain.passes[0], as_run.passes[0]
    tokens, width, keys, wide = 512, 4096, 1024, 14336
    for old, new in zip(before.blocks, after.blocks, strict=True):
        if old.name:
            freed = old.choices["selective"].kept_bytes - new.choices["selective"].kept_bytes
            assert freed == 2 * tokens * (keys + width + wide)  # keys, attention's output, the gate's partner
            assert new.choices["selective"].seconds > old.choices["selective"].seconds
            assert new.choices["recompute"] == old.choices["recompute"]
    added = after.played.device_seconds - before.played.device_seconds
    copied = 2 * torchtitan.COPIED_BYTES * plain.parameters / machine.device.memory.peak
    assert added == pytest.approx(copied * machine.device.calibration.curve_slowdown.value)


def test_the_table_is_written_where_the_page_says_and_nothing_else_is() -> None:
    page = PAGE.read_text()
    changed = written(page, "| new |")
    assert "| new |" in changed
    assert len(changed) < len(page)
    assert written(changed, "| new |") == changed
    with pytest.raises(AssertionError, match="no place for the table"):
        written("", "| new |")
