"""Tables and bars, on a console of fixed width without colour."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from anyfit import Plan
from anyfit.planning import search
from anyfit.planning.forecast import forecast
from anyfit.showing.tables import Column, table
from anyfit.showing.terminal import (
    BAR_CELLS,
    _bar,
    show_beside,
    show_check,
    show_forecast_beside_measured,
    show_machine,
    show_match,
    show_modules,
    show_plan,
    show_profile,
    show_rows,
    shown_progress,
)
from anyfit.values.check import Check, Parity
from anyfit.values.corrections import Correction, Pace
from anyfit.values.machine import Copies
from anyfit.values.plan import Clipping
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes, show_seconds
from anyfit.values.weights import Match
from tests.machines import GIB, constant, figure, small_disk, small_machine
from tests.planning.profiles import block, one_pass, small_profile


@pytest.fixture
def console() -> Console:
    return Console(file=StringIO(), width=130, color_system=None, force_terminal=False)


def shown(console: Console) -> str:
    assert isinstance(console.file, StringIO)
    text = console.file.getvalue()
    assert "\x1b" not in text
    assert all(len(line) <= console.width for line in text.splitlines())
    return text


@pytest.fixture
def plan() -> Plan:
    return search(small_profile())


def bar_of(text: str, label: str) -> str:
    (line,) = [line for line in text.splitlines() if re.match(rf"{label} +[█·]", line)]
    (bar,) = re.findall(r"[█·]+", line)
    return str(bar)


# ---------------------------------------------------------------------- plans


def test_a_shown_plan_has_every_row_of_the_plan(plan: Plan, console: Console) -> None:
    show_plan(plan, console)
    words = " ".join(shown(console).split())
    for label, text in plan.rows():
        assert f"{label} {' '.join(text.split())}" in words


def test_a_memory_bar_is_the_share_of_the_limit(plan: Plan, console: Console) -> None:
    show_plan(plan, console)
    text = shown(console)
    share = plan.forecast.reserved_bytes / plan.limit_bytes["device"]
    bar = bar_of(text, "device")
    assert len(bar) == BAR_CELLS
    assert bar == "█" * round(share * BAR_CELLS) + "·" * (BAR_CELLS - round(share * BAR_CELLS))
    assert f"{share:.0%} of 8.00 GiB" in text
    assert not re.search(r"^(host|disk) +[█·]", text, re.MULTILINE)


def test_a_tier_in_use_has_its_own_bar(plan: Plan, console: Console) -> None:
    forecast = replace(plan.forecast, peak_bytes={"device": 1, "host": 4 * GIB, "disk": 0})
    show_plan(replace(plan, forecast=forecast), console)
    assert bar_of(shown(console), "host").count("█") == BAR_CELLS // 4


def test_the_step_bar_is_full_and_its_parts_are_named(plan: Plan, console: Console) -> None:
    show_plan(plan, console)
    text = shown(console)
    assert bar_of(text, "step") == "█" * BAR_CELLS
    assert re.search(r"compute \d+%, update \d+%", text)


@pytest.mark.parametrize(("width", "cells"), [(60, BAR_CELLS // 2), (80, BAR_CELLS), (200, BAR_CELLS)])
def test_a_narrow_console_wraps_what_is_beside_a_bar_and_leaves_the_bar_whole(plan: Plan, width: int, cells: int) -> None:
    console = Console(file=StringIO(), width=width, color_system=None)
    parts = {"compute": 0.6, "recompute": 0.2, "exposed update": 0.1, "exposed offload": 0.098, "exposed launch": 0.002}
    split = {name: share * plan.forecast.step_seconds for name, share in parts.items()}
    show_plan(replace(plan, forecast=replace(plan.forecast, split_seconds=split)), console)
    assert bar_of(shown(console), "step") == "█" * cells
    assert len(bar_of(shown(console), "device")) == cells
    beside = " ".join(shown(console).split("step    ")[-1].split())
    assert beside == f"{'█' * cells} compute 60%, recompute 20%, exposed update 10%, exposed offload 10%"  # no 0%


@pytest.mark.parametrize("width", [60, 80, 200])
def test_a_narrow_console_wraps_a_plan_and_drops_nothing(plan: Plan, width: int) -> None:
    console = Console(file=StringIO(), width=width, color_system=None)
    show_plan(plan, console)
    letters = "".join(shown(console).split())
    for label, text in plan.rows():
        assert "".join(f"{label}{text}".split()) in letters


@given(st.lists(st.floats(0, 1.5), max_size=5))
def test_the_cells_of_a_bar_add_up_and_each_share_is_within_a_cell(shares: Sequence[float]) -> None:
    bar = _bar([(f"color({index})", share) for index, share in enumerate(shares)], BAR_CELLS)
    assert len(bar.plain) == BAR_CELLS
    assert set(bar.plain) <= {"█", "·"}
    assert abs(bar.plain.count("█") - min(sum(shares), 1.0) * BAR_CELLS) <= 0.5 + 1e-9
    if sum(shares) <= 1:
        cells = {str(span.style): span.end - span.start for span in bar.spans}
        for index, share in enumerate(shares):
            assert abs(cells.get(f"color({index})", 0) - share * BAR_CELLS) <= 1 + 1e-9


# ---------------------------------------------------------------------- profiles


def shown_profile(profile: Profile, console: Console) -> None:
    show_profile(profile, forecast(profile, profile.passes[0]), 6 * 10**9, console)


@pytest.mark.parametrize("width", [130, 80, 70, 60, 50])
def test_a_narrow_table_leaves_columns_out_and_names_them_rather_than_break_words(width: int) -> None:
    console = Console(file=StringIO(), width=width, color_system=None)
    blocks = (*(block(f"model.layers.{index}", kind="AnyDecoderLayer") for index in range(3)), block("", kind="Net"))
    shown_profile(small_profile(passes=(one_pass(8, blocks=blocks),)), console)
    text = shown(console).partition("gradients  ")[0]
    header = next(line for line in text.splitlines() if line.startswith("┃")).split()
    caption = re.search(r"a wider terminal also has: ((?:\w+, )*\w+) parameters ", " ".join(text.split()))
    dropped = caption[1].split(", ") if caption else []
    assert bool(dropped) == (width <= 80)
    names = {"block", "class", "count", "parameters", "FLOPs", "forward", "backward", "kept"}
    assert {name for name in header if name != "┃"} == names - set(dropped)
    assert " model.layers.0 " in text
    assert (" AnyDecoderLayer " in text) == ("class" not in dropped)


def test_plans_that_have_no_room_side_by_side_are_shown_in_several_tables(plan: Plan) -> None:
    console = Console(file=StringIO(), width=60, color_system=None)
    others = {f"machine={name}": replace(plan, machine=name) for name in ("first", "second", "third-of-them")}
    show_beside({"as it is": plan, **others}, console)
    text = shown(console)
    assert text.count("┏") > 1
    assert text.count(" as ") == text.count("┏")
    for name in others:
        assert text.count(f"{name} ") == 1


def test_a_word_that_is_longer_than_all_there_is_is_folded() -> None:
    console = Console(file=StringIO(), width=30, color_system=None)
    console.print(table([Column("name", ("x" * 50, "short")), Column("size", ("1.00 GiB", "2"), is_figure=True)], console))
    assert shown(console).count("x") == 50


def test_equal_neighbours_share_a_row_and_the_rest_have_their_own(console: Console) -> None:
    blocks = (*(block(f"layers.{index}") for index in range(3)), block("layers.3", kept_bytes=0), block("", kind="Net"))
    shown_profile(small_profile(passes=(one_pass(8, blocks=blocks),)), console)
    rows = [re.split(r"\s*│\s*", line.strip("│ ")) for line in shown(console).splitlines() if line.startswith("│")]
    assert [row[:3] for row in rows] == [
        ["layers.0 … 2", "Layer", "3"],
        ["layers.3", "Layer", "1"],
        ["(outside blocks)", "Net", "1"],
    ]
    assert rows[0][3:] == ["3.00 M", "18.0 B", "30.0 ms", "60.0 ms", "30.0 MiB"]


def test_a_profile_ends_with_its_totals_and_their_error_band(console: Console) -> None:
    profile = small_profile()
    shown_profile(profile, console)
    text = shown(console)
    each = profile.passes[0]
    step = forecast(profile, each)
    for figure_shown in (
        "Net, micro-batch 8, fp32, on small",
        "2.00 M, 1.90 M trainable",
        f"{show_bytes(profile.state.resident)}: weights 200 MiB, masters 100 MiB, AdamW 600 MiB, buffers 24.0 MiB",
        f"{show_seconds(each.seconds)} ± 25%",
        f"{each.flops / each.seconds / 1e12:.0%} of peak compute",
        f"{show_bytes(each.peak_bytes)} beyond the model state, at layers.0",
        f"{show_bytes(step.peak_bytes['device'])} allocated, {show_bytes(step.reserved_bytes)} reserved",
        "6.00 B of these FLOPs, counted whole; half of it, 3.00 B,",
    ):
        assert figure_shown in text


def test_a_model_without_attention_is_told_nothing_about_it(console: Console) -> None:
    profile = small_profile()
    show_profile(profile, forecast(profile, profile.passes[0]), 0, console)
    assert "attention" not in shown(console)


def test_blocks_share_a_row_whatever_waits_for_whom(console: Console) -> None:
    blocks = (block("layers.0", seconds_forward=0.010), block("layers.1", seconds_forward=0.012))
    shown_profile(small_profile(passes=(one_pass(8, blocks=blocks),)), console)
    (row,) = [line for line in shown(console).splitlines() if "layers.0 … 1" in line]
    assert "22.0 ms" in row


def rows_of(text: str) -> list[list[str]]:
    """The cells of a table, with the indentation of the first."""
    return [
        [line[2:].split("│")[0].rstrip(), *re.split(r"\s*│\s*", line.strip("│ "))[1:]]
        for line in text.splitlines()
        if "│" in line
    ]


def test_modules_that_are_alike_down_to_their_parts_share_their_rows(console: Console) -> None:
    names = ["", "embed", "layers"]
    for index in range(3):
        names += [f"layers.{index}", f"layers.{index}.first", f"layers.{index}.second", f"layers.{index}.second.part"]
    modules = [block(name, kind=(name.rpartition(".")[2] or "Net").title()) for name in names]
    modules = [replace(each, kind="Layer") if each.kind.isdigit() else each for each in modules]
    modules[-1] = replace(modules[-1], kept_bytes=0)  # the last layer is not like the others, in a part of a part
    show_modules(small_profile(), modules, console)
    assert [(row[0], row[2]) for row in rows_of(shown(console))] == [
        ("(all)", "1"),
        ("  embed", "1"),
        ("  layers", "1"),
        ("    0 … 1", "2"),
        ("      first", "2"),
        ("      second", "2"),
        ("        part", "2"),
        ("    2", "1"),
        ("      first", "1"),
        ("      second", "1"),
        ("        part", "1"),
    ]


def test_like_parts_of_like_modules_add_up(console: Console) -> None:
    names = [
        "",
        "layers",
        *(name for index in range(2) for name in (f"layers.{index}", f"layers.{index}.0", f"layers.{index}.1")),
    ]
    show_modules(small_profile(), [block(name) for name in names], console)
    rows = rows_of(shown(console))
    assert [(row[0], row[2]) for row in rows[-2:]] == [("    0 … 1", "2"), ("      0 … 1", "4")]
    assert rows[-1][3:] == ["4.00 M", "24.0 B", "40.0 ms", "80.0 ms", "40.0 MiB"]


def test_names_with_brackets_are_shown_as_they_are(console: Console) -> None:
    blocks = (block("layers[0]", kind="Layer[bold]"),)
    shown_profile(small_profile(machine="box [/red] :warning:", passes=(one_pass(8, blocks=blocks),)), console)
    text = shown(console)
    for name in ("layers[0]", "Layer[bold]", "box [/red] :warning:"):
        assert name in text


# ---------------------------------------------------------------------- the rest


def test_a_machine_is_shown_with_what_it_has(console: Console) -> None:
    show_machine(small_machine(), console)
    text = shown(console)
    for word in ("a made-up processor", "8.00 GiB", "float32 100 BFLOP/s", "1.00 µs", "2 cores", "100 M parameters/s"):
        assert word in text
    assert "copies" not in text
    assert "disk" not in text


def test_copies_and_disk_are_shown_where_they_are_known(console: Console) -> None:
    copies = Copies(*(constant(rate * GIB) for rate in (50.0, 40.0, 30.0, 20.0)), *(figure(2e10),) * 2, pageable=figure(7e9))
    disk = small_disk(read=3 * GIB, write=2 * GIB, both=2.5 * GIB)
    show_machine(replace(small_machine(), copies=copies, disk=disk), console)
    text = shown(console)
    assert "up 50.0 GiB/s, down 40.0 GiB/s" in text
    assert "read 3.00 GiB/s, write 2.00 GiB/s, both 2.50 GiB/s, 100 GiB free" in text


def test_a_forecast_is_shown_beside_what_was_measured(plan: Plan, console: Console) -> None:
    forecast = plan.forecast
    show_forecast_beside_measured(plan, 2 * forecast.step_seconds, 0.0, forecast.peak_bytes["device"], console)
    text = shown(console)
    assert re.search(rf"step .*{show_seconds(forecast.step_seconds)} .*{show_seconds(2 * forecast.step_seconds)} .*\+100%", text)
    assert re.search(r"device peak .*\+0%", text)


def test_the_peak_of_a_run_that_moved_is_shown_beside_the_largest_of_its_plans(plan: Plan, console: Console) -> None:
    peak = plan.forecast.peak_bytes["device"]
    later = replace(plan, forecast=replace(plan.forecast, peak_bytes=plan.forecast.peak_bytes | {"device": peak // 2}))
    show_forecast_beside_measured(later, 1.0, 0.0, peak, console, plan)
    assert re.search(r"device peak .*\+0%", shown(console))


def test_the_peak_of_a_run_has_the_band_of_the_plans_own_line_or_says_what_else_it_counts(plan: Plan, console: Console) -> None:
    plan = replace(plan, forecast=replace(plan.forecast, reserved_error=0.08, peak_error=0.02), device_kind="cpu")
    assert plan.forecast.reserved_bytes == plan.forecast.peak_bytes["device"]
    size = show_bytes(plan.forecast.reserved_bytes)
    assert f"{size} ± 8% of 8.00 GiB" in dict(plan.rows())["memory"]
    show_forecast_beside_measured(plan, 1.0, 0.0, 1, console)
    assert re.search(f"memory peak .* {size} ± 8%", shown(console))
    more = replace(plan, forecast=replace(plan.forecast, reserved_bytes=2 * plan.forecast.reserved_bytes), device_kind="cuda")
    assert " ± 8% reserved, of 8.00 GiB" in dict(more.rows())["device memory"]
    show_forecast_beside_measured(more, 1.0, 0.0, 1, console)
    assert re.search(f"device peak, allocated .* {size} ± 2%", shown(console))


def test_the_memory_of_a_cpu_is_not_called_a_devices(plan: Plan, console: Console) -> None:
    show_plan(replace(plan, device_kind="cpu"), console)
    show_forecast_beside_measured(replace(plan, device_kind="cpu"), 1.0, 0.0, 1, console)
    show_machine(small_machine(), console)
    text = shown(console)
    assert "device" not in text.replace(plan.decision("model state").choice, "")
    assert bar_of(text, "memory")


def test_what_was_not_measured_is_not_compared(plan: Plan, console: Console) -> None:
    show_forecast_beside_measured(plan, 1.0, 0.0, 0, console)
    assert "not measured" in shown(console)


def test_a_check_shows_each_part_and_tier_that_was_measured_and_what_was_made_of_it(plan: Plan, console: Console) -> None:
    split = {"compute": 0.5, "recompute": 0.1, "update": 0.2, "exposed update": 0.0, "exposed offload": 0.05}
    peaks = {"device": 100 * GIB, "host": 10 * GIB, "disk": 0}
    forecast = replace(plan.forecast, split_seconds=split, step_seconds=0.85, step_error=0.25, peak_bytes=peaks, peak_error=0.08)
    found = Check(
        model="GPT",
        machine="small",
        forecast=forecast,
        step_seconds=1.7,
        clipped_share=0.5,
        split_seconds={"compute": 1.2, "update": 0.2, "exposed update": 0.0, "exposed offload": 0.3},
        peak_bytes={"device": 125 * GIB, "host": 10 * GIB, "disk": 0},
        parity=Parity("3 of 10 blocks and 2 of 8 samples", 2, 1e-7, 2e-6, agrees=True),
        no_parity=None,
        pace=Pace("GPT", 7, "bf16", 1.2, 0.6, "2026-01-01"),
        no_pace=None,
        correction=Correction("GPT", "in a check", 125 * GIB, 100 * GIB, 0.27, "2026-01-01"),
    )
    show_check(found, console)
    text = shown(console)
    for row in (
        r"step .* 850 ms ± 25% .* 1.70 s .* \+100%",
        r"  compute, recompute .* 600 ms .* 1.20 s .* \+100%",
        r"  update .* 200 ms .* 200 ms .* \+0%",
        r"  exposed offload .* 50.0 ms .* 300 ms .* \+500%",
        r"device peak, allocated .* 100 GiB ± 8% .* 125 GiB .* \+25%",
        r"host peak .* 10.0 GiB ± 8% .* 10.0 GiB .* \+0%",
        "plain PyTorch +2 steps of 3 of 10 blocks and 2 of 8 samples: losses off by 1.0e-07, weights by 2.0e-06",
        "pace +measured 2.0x slower than forecast; later plans account for it",
        "margin +27% of the memory; later plans leave it free",
    ):
        assert re.search(row, text), row
    assert "exposed update" not in text
    assert "disk" not in text


def test_a_step_is_beside_the_forecast_for_as_many_clipped_steps(plan: Plan, console: Console) -> None:
    forecast = replace(plan.forecast, step_seconds=0.5, step_error=0.1, clipping=Clipping(0.7, 0.9, 0.5))
    show_forecast_beside_measured(replace(plan, forecast=forecast), 0.6, 0.25, 0, console)
    assert re.search(r"step, 25% clipped .* 550 ms ± 10% .* 600 ms .* \+9%", shown(console))


def test_a_check_says_why_something_was_not_found(plan: Plan, console: Console) -> None:
    peaks = {"device": 1, "host": 0, "disk": 0}
    show_check(Check("GPT", "small", plan.forecast, 1.0, 0.0, {}, peaks, None, "too large", None, "no passes", None), console)
    assert re.search(r"plain PyTorch +not compared: too large\s+pace +not corrected: no passes", shown(console))


def test_rows_are_shown_without_reading_markup(console: Console) -> None:
    show_rows({"micro-batch": "8: [bold]why[/bold]"}, console)
    assert "micro-batch  8: [bold]why[/bold]" in shown(console)


def test_progress_of_a_probe_is_silent_without_a_terminal(console: Console) -> None:
    with shown_progress("probing", console) as report:
        report("products", 0.5)
        report("done", 1.0)
    assert shown(console) == ""


def test_progress_of_a_probe_is_a_bar_on_a_terminal() -> None:
    console = Console(file=StringIO(), width=100, color_system=None, force_terminal=True)
    with shown_progress("probing", console) as report:
        report("products", 0.5)
    assert isinstance(console.file, StringIO)
    assert "probing" in console.file.getvalue()
    assert "products" in console.file.getvalue()


# ---------------------------------------------------------------------- weights


def test_a_match_shows_each_kind_of_name_once_with_its_count(console: Console) -> None:
    layers = tuple(f"model.layers.{index}.mlp.weight" for index in range(32))
    show_match(
        Match("some/folder", layers, ("score.weight",), ("embed.weight",), ("lm_head.weight", "[red]x"), "", True), console
    )
    text = shown(console)
    assert "weights from some/folder: 32 matched, 1 missing, 2 unexpected, 1 left out" in text
    rows = {tuple(line.split()) for line in text.splitlines()[1:]}
    assert ("matched", "32", "model.layers.*.mlp.weight") in rows
    assert ("missing", "1", "score.weight") in rows
    assert ("left", "out", "1", "embed.weight") in rows
    assert ("unexpected", "1", "[red]x") in rows
