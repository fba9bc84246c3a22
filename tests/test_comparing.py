"""Machines compared: each row is the plan that its machine gets alone, with the batch that is best on it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anyfit import Machine, Plan
from anyfit.comparing import AS_FAST, batches, best_batch
from anyfit.values.answers import ANSWERS
from anyfit.values.best_batch import BestBatch, parse_batch
from tests.machines import small_machine
from tests.showing.test_report import data
from tests.showing.test_report_in_browser import metrics
from tests.test_cli import Command
from tests.test_cli import anyfit as anyfit  # the fixture

SMALL = ("plan", "demo", "--seq", "32", "--dtype", "bf16")


def numbers(plan: Plan) -> tuple[Any, ...]:
    """All that a plan says, but for what is asked about it besides."""
    decisions = [each for each in plan.decisions if each.name not in (*ANSWERS, "batch")]
    return plan.forecast, plan.batch_size, plan.micro_batch, plan.mesh, plan.stages, plan.chunks, decisions, plan.alternatives


def test_every_row_is_the_plan_of_its_machine_alone(anyfit: Command) -> None:
    names = ("l4", "rtx-4090-x4", "t4")
    asked = (*SMALL, "--compare", ",".join(names), "--tokens", "1B", "--batch", "best:8")
    rows = {row["machine"]: row for row in json.loads(anyfit(*asked, "--json").out)["machines"]}
    assert {name: row["devices"] for name, row in rows.items()} == {"l4": 1, "rtx-4090-x4": 4, "t4": 1}
    for name in ("l4", "rtx-4090-x4"):
        made = Plan.from_json(rows[name]["plan"])
        assert made.batch_size == rows[name]["batch"]
        assert made.ranks == rows[name]["devices"]
        alone = Plan.from_json(json.loads(anyfit(*SMALL, "--machine", name, "--batch", str(made.batch_size), "--json").out))
        assert numbers(made) == numbers(alone)
        best = Plan.from_json(json.loads(anyfit(*SMALL, "--machine", name, "--batch", "best:8", "--json").out))
        assert numbers(best) == numbers(alone)
        assert best.decision("batch") == made.decision("batch")
        assert rows[name]["seconds"] == pytest.approx(1e9 / made.forecast.tokens_per_second)
        assert rows[name]["cost"] == pytest.approx(rows[name]["price"]["usd_per_hour"] * rows[name]["seconds"] / 3600)
    assert "does not compute in bfloat16" in rows["t4"]["refused"]
    shown = " ".join(anyfit(*asked).out.split())
    assert max(shown.index(f" {name} ") for name in names[:2]) < shown.index(" t4 "), "what it cannot be comes last"


def test_a_gpu_without_bfloat16_is_planned_for_in_fp32_alone(anyfit: Command) -> None:
    refused = anyfit(*SMALL, "--machine", "t4")
    assert refused.status == 2
    assert refused.err == "anyfit: t4: a Tesla T4 does not compute in bfloat16; plan for it with --dtype fp32\n"
    planned = Plan.from_json(json.loads(anyfit(*SMALL, "--machine", "t4", "--dtype", "fp32", "--batch", "2", "--json").out))
    assert planned.precision == "fp32"


@pytest.mark.full
def test_all_presets_are_compared_for_llama_each_as_it_is_planned_alone(anyfit: Command) -> None:
    document = json.loads(anyfit("plan", "llama-8b", "--compare", "all", "--tokens", "10B", "--json").out)
    rows = document["machines"]
    assert {row["machine"] for row in rows} == {name for name in Machine.presets() if name != "laptop-cpu"}
    for row in rows:
        if "plan" in row:
            made = Plan.from_json(row["plan"])
            asked = ("plan", "llama-8b", "--machine", row["machine"], "--batch", str(row["batch"]), "--json")
            assert numbers(made) == numbers(Plan.from_json(json.loads(anyfit(*asked).out))), row["machine"]


# ---------------------------------------------------------------------- the best batch


def test_the_best_batch_is_the_smallest_that_is_as_fast() -> None:
    rates = {64: 100.0, 32: 100.0 * (1 - AS_FAST / 2), 16: 90.0, 8: 200.0}
    best, *others = best_batch(rates.__getitem__, 64, 1)
    assert best.batch == 32
    assert [each.batch for each in others] == [64, 16], "8 is not tried: what is under the best once is taken to stay so"


def test_a_smaller_batch_that_is_faster_is_taken() -> None:
    rates = {64: 80.0, 32: 100.0, 16: 60.0}
    assert best_batch(rates.__getitem__, 64, 1)[0].batch == 32


def test_batches_that_do_not_fit_are_passed_by() -> None:
    rates = {64: 0.0, 32: 0.0, 16: 50.0, 8: 30.0}
    assert best_batch(rates.__getitem__, 64, 1)[0].batch == 16


@pytest.mark.parametrize(("limit", "ranks"), [(64, 1), (64, 8), (100, 8), (7, 2), (8, 8)])
def test_batches_are_shared_by_the_ranks_and_within_the_limit(limit: int, ranks: int) -> None:
    sizes = list(batches(limit, ranks))
    assert all(size % ranks == 0 and ranks <= size <= limit for size in sizes)
    assert sizes == sorted(set(sizes), reverse=True)
    assert sizes[-1] == ranks


def test_a_limit_that_so_many_ranks_cannot_share_is_refused() -> None:
    with pytest.raises(ValueError, match="8 ranks share a batch"):
        best_batch(lambda _: 1.0, 4, 8)


@pytest.mark.parametrize(("text", "found"), [("12", 12), ("best", BestBatch(64)), (" best:8 ", BestBatch(8))])
def test_a_batch_is_a_number_or_the_best(text: str, found: int | BestBatch) -> None:
    assert parse_batch(text) == found


@pytest.mark.parametrize("text", ["", "most", "best:", "best:x", "best:0", "1.5", "-2", "٣"])
def test_a_batch_that_is_neither_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"give a whole number|give 1 or more"):
        parse_batch(text)


# ---------------------------------------------------------------------- the command line


def test_machines_are_listed_with_what_they_are_rented_for(anyfit: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    shown = anyfit("machines").out
    for name in Machine.presets():
        assert f" {name} " in shown
    assert "$3.49" in shown
    listed = json.loads(anyfit("machines", "--json").out)
    assert {each["name"] for each in listed} == set(Machine.presets())
    assert next(each for each in listed if each["name"] == "h100")["price"]["date"] == "2026-10-07"


def test_one_machine_shows_every_figure_with_its_source(anyfit: Command) -> None:
    shown = " ".join(anyfit("machines", "l40s").out.split())
    assert "NVIDIA L40S datasheet" in shown
    assert "all_gather node 8" in shown
    assert "$3.00 an hour" in shown


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("machines", "l40"), "no machine file or preset 'l40'; did you mean"),
        (("report", "none.json"), "no plan file at none.json"),
        (("report", "plan.json", "--compare", "l4", "--tokens", "1B"), "--compare is for plans that are made anew"),
        (("report", "plan.json", "--job", "demo", "--compare", "l4"), "cost by machine takes both --compare and --tokens"),
        (("report", "plan.json", "-o", "file/report.html"), "cannot write file/report.html"),
        ((*SMALL, "--batch", "best", "--what-if", "seq=64"), "--batch best is found for one plan; leave --what-if out"),
        (("plan", "jobs.py:job", "--machine", "small.json", "--batch", "best"), "--batch is not for functions"),
    ],
)
def test_what_cannot_be_is_refused_by_name(anyfit: Command, arguments: tuple[str, ...], says: str) -> None:
    done = anyfit(*arguments)
    assert done.status == 2
    assert done.err.startswith(f"anyfit: {says}")


def test_a_plan_becomes_a_page_and_a_trace(anyfit: Command, tmp_path: Path) -> None:
    done = anyfit("report", "plan.json", "--perfetto", "trace.json")
    assert done.status == 0
    assert "report.html: " in done.out
    assert "<title>anyfit: " in (tmp_path / "report.html").read_text()
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]


def test_a_run_becomes_a_page_in_its_folder(anyfit: Command, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (tmp_path / "plan.json").rename(run / "plan.json")
    assert "a plan and no step" in anyfit("report", "run").err
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in metrics(20)))
    (run / "run.json").write_text(json.dumps({"steps": 20, "batch_size": 8, "deterministic": True}))
    assert anyfit("report", "run").status == 0
    page = (run / "report.html").read_text()
    assert "anyfit fit --steps 20 --batch 8 --deterministic --plan run/plan.json" in page
    assert "anyfit fit --resume run" in page


def test_a_report_plans_anew_where_it_knows_the_job(anyfit: Command, tmp_path: Path) -> None:
    job = ("--dtype", "fp32", "--batch", "4", "--seq", "64")
    anyfit("plan", "demo", "--machine", "small.json", *job, "-o", "demo.json")
    asked = ("report", "demo.json", "--job", "demo", "--machine", "small.json", "--seq", "64")
    done = anyfit(*asked, "--compare", "small.json", "--tokens", "1M")
    assert done.status == 0, done.err
    found = data((tmp_path / "report.html").read_text())
    assert len(found["speeds"]) == 8
    whole = next(each for each in found["speeds"] if each["limit"] == small_machine().device_limit_bytes)
    assert whole["rate"] == pytest.approx(Plan.load(tmp_path / "demo.json").forecast.tokens_per_second)
    assert [each["machine"] for each in found["machines"]] == ["small.json"]
    other = anyfit("report", "plan.json", "--job", "demo", "--machine", "small.json")
    assert other.status == 2
