"""The comparison with other systems: its bound, its rows, its picture, and plain PyTorch and FSDP2 on a tiny model."""

from __future__ import annotations

import argparse
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch

from benchmarks import offload, peers, record
from benchmarks.cases import job_of
from benchmarks.offload import EXACT, FREE, Box, Split, bound_seconds, exactly, freely

SVG = "{http://www.w3.org/2000/svg}"
P = 1e9  # parameters
BOX = Box(updates_per_second=2e9, copied_per_second=10e9, host_bytes=2**60)


def row(system: str, job: str = "tiny", seconds: float | None = 1.0, **more: Any) -> dict[str, Any]:
    figures = {"step_seconds": seconds, "step_seconds_all": [seconds], "tokens_per_second": seconds and 256 / seconds}
    sizes = {"reserved_bytes": 2**30, "most_resident_bytes": 2**31, "start_seconds": 3.0, "first_step_seconds": 2.0}
    return peers.empty_row(system, job) | figures | sizes | {"loss_first": 5.0, "loss_last": 4.0, "repeat": 0} | more


# ---------------------------------------------------------------------- the bound


def test_with_room_for_all_states_the_bound_is_the_compute() -> None:
    for schedule in (FREE, EXACT):
        seconds, split = bound_seconds(P, 0.5, 14 * P, schedule, box=BOX)
        assert seconds == pytest.approx(0.5)
        assert split == Split(1.0, 0.0, 0.0)


def test_a_step_takes_as_long_as_its_busiest_resource() -> None:
    assert freely(Split(0.0, 0.0, 1.0), P, 0.1, BOX) == pytest.approx(0.5)  # the host's updates
    assert freely(Split(0.0, 1.0, 0.0), P, 0.1, BOX) == pytest.approx(1.0)  # 10 bytes each way
    assert freely(Split(0.0, 1.0, 0.0, 0.0, 1.0), P, 0.1, BOX) == pytest.approx(1.6)  # 12, and weights come twice
    assert freely(Split(0.0, 0.0, 1.0), P, 0.7, BOX) == pytest.approx(0.7)
    slow = Box(updates_per_second=1e12, copied_per_second=10e9)
    assert freely(Split(0.0, 0.0, 1.0), P, 0.0, slow) == pytest.approx(0.2)  # gradients down, weights up
    assert freely(Split(0.0, 0.0, 1.0, 1.0), P, 0.0, slow) == pytest.approx(0.4)  # weights come twice


def test_exact_clipping_adds_the_updates_to_backward() -> None:
    assert exactly(Split(0.0, 0.0, 1.0), P, 0.8, BOX) == pytest.approx(0.6 + 0.5 * 18 / 26)  # moments are hidden by backward
    assert exactly(Split(0.0, 0.0, 1.0), P, 4.0, BOX) == pytest.approx(4.0)  # hidden by forward
    assert exactly(Split(0.0, 0.0, 1.0), P, 0.1, BOX) == pytest.approx(
        0.2 + 0.5 - 0.2 * 8 / 18
    )  # it waits for gradients, and hides some
    assert exactly(Split(0.0, 0.5, 0.5), P, 0.8, BOX) == pytest.approx(0.6 + 0.6)


def test_host_and_streamed_updates_share_the_work() -> None:
    seconds, split = bound_seconds(P, 0.01, 2 * P, FREE, box=BOX)  # weights fit, no state does
    assert split.resident == 0
    assert seconds == pytest.approx(0.385)  # h P / U = P (2 h + 10 s) / B
    assert split.host == pytest.approx(0.77)


def test_less_memory_is_never_faster_and_exact_is_never_faster_than_free() -> None:
    found = {
        schedule: [bound_seconds(P, 0.3, gib * 0.5e9, schedule, slot_bytes=1e8, box=BOX)[0] for gib in range(4, 30)]
        for schedule in (FREE, EXACT)
    }
    for times in found.values():
        assert times == sorted(times, reverse=True)
    assert all(free <= exact for free, exact in zip(found[FREE], found[EXACT], strict=True))


def test_weights_leave_the_device_when_there_is_no_room_for_them() -> None:
    _, split = bound_seconds(P, 0.3, 1.2 * P, FREE, slot_bytes=0.2 * P, box=BOX)
    assert split.away == pytest.approx(0.5)
    _, beside = bound_seconds(P, 0.3, 1.2 * P, FREE, slot_bytes=0.2 * P, activation_bytes=0.4 * P, box=BOX)
    assert beside.away == pytest.approx(0.7)


def test_a_model_that_no_split_fits_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"no split of 1\.0 B parameters fits"):
        bound_seconds(P, 0.3, 2 * P, FREE, box=Box(host_bytes=int(5 * P)))


@pytest.mark.parametrize("name", peers.JOBS)
def test_every_job_has_a_bound(name: str) -> None:
    found = offload.bounds(peers.JOBS[name], [])
    assert found["free"]["compute_seconds"] <= found["free"]["step_seconds"] <= found["exact"]["step_seconds"]


def test_compute_is_that_of_the_plain_run_with_the_same_batch() -> None:
    rows = [row("plain", "4b batch 8 no cap", 0.4), row("fsdp2", "4b batch 8 no cap", 0.1)]
    assert offload.compute_seconds(peers.JOBS["4b batch 8 cap 24"], rows) == 0.4
    assert offload.compute_seconds(peers.JOBS["4b batch 32 cap 24"], rows) == pytest.approx(32 * 1024 / 17_304)


def test_compute_that_was_measured_by_itself_comes_first() -> None:
    rows = [row("plain", "4b batch 8 no cap", 0.4), row("compute", "4b batch 8 cap 24 clipping", 0.3)]
    assert offload.compute_seconds(peers.JOBS["4b batch 8 cap 24"], rows) == 0.3


def test_compute_is_measured_from_a_few_layers() -> None:
    found = offload.measure_compute("tiny", 1, 1, "cpu")
    few, more = found["seconds_of_layers"]
    assert found["step_seconds"] == more  # which are all of two
    assert few > 0
    assert found["layers"] == [1, 2]


def test_room_for_a_second_generation_brings_exact_near_free() -> None:
    times = [bound_seconds(P, 0.3, 4 * P, EXACT, box=replace(BOX, host_bytes=int(room * P)))[0] for room in (13, 16, 20, 30)]
    assert all(later < 1.01 * earlier for earlier, later in itertools.pairwise(times))  # in steps
    assert times[-1] < 0.95 * times[0]
    _, split = bound_seconds(P, 0.3, 4 * P, EXACT, box=replace(BOX, host_bytes=int(16 * P)))
    held = 10 * (split.streamed + split.host) + 4 * split.host + 2 * split.away_streamed
    assert held + 10 * (split.early_host + split.early_streamed) <= 16.01


def test_the_parameters_of_a_job_are_those_of_its_model() -> None:
    job = peers.JOBS["tiny"]
    with torch.device("meta"):
        model = job_of(job.case).build()
    assert sum(parameter.numel() for parameter in model.parameters()) == job.parameters
    assert peers.JOBS["4b batch 8 cap 24"].parameters == 3_782_842_368


# ---------------------------------------------------------------------- rows, table, picture


def test_the_median_is_of_the_runs_that_worked() -> None:
    rows = [row("fsdp2", seconds=seconds) for seconds in (1.0, 5.0, 2.0)] + [row("fsdp2", seconds=None, error="out of memory")]
    median = offload.median_of(rows)
    assert median["step_seconds"] == 2.0
    assert median["error"] is None
    assert (median["runs"], median["runs_that_failed"]) == (4, 1)
    assert offload.median_of(rows[-1:])["error"] == "out of memory"


def test_table_and_picture_show_figures_errors_and_bounds() -> None:
    rows = [row("fsdp2", seconds=2.0, parts=2), row("anyfit"), row("deepspeed zero-2", seconds=None, error="out of <memory>")]
    figures = offload.figures_of(rows, {})
    lines = offload.table(figures).splitlines()
    starts = [line.split("  ")[0:2] for line in lines]
    assert starts[1:4] == [["tiny", "anyfit"], ["tiny", "fsdp2"], ["tiny", "deepspeed zero-2"]]
    assert "bound, exact" in lines[5]
    assert lines[2].endswith("batch in 2 parts")
    assert lines[3].endswith("out of <memory>")
    picture = ElementTree.fromstring(offload.draw(figures, {"gpu": None, "processor": "x86_64"}))
    texts = [each.text for each in picture.iter(f"{SVG}text")]
    tiny = "GPT-2, 121 k parameters, batch 4 x 64, every block recomputed"
    assert {tiny, "anyfit", "FSDP2 offload", "out of <memory>"} <= set(texts)
    assert "256 tokens/s, 1.00 s, 1.0 GiB" in texts
    widths = [float(each.attrib["width"]) for each in picture.iter(f"{SVG}rect") if each.attrib["class"] in ("ours", "peer")]
    assert widths[0] == pytest.approx(2 * widths[1], rel=0.05)


# ---------------------------------------------------------------------- the processes


def options(**changes: Any) -> argparse.Namespace:
    common = {"steps": 2, "warmup": 1, "repeats": 1, "device": "cpu", "timeout": 120.0, "record": True, "add": None}
    return argparse.Namespace(**common | changes)


@pytest.mark.full
def test_plain_and_fsdp2_train_the_same_model_in_processes_of_their_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    systems = ["plain fp32 masters", "fsdp2"]
    offload.run_all(options(jobs=["tiny clipping"], systems=["plain"]))
    (first,) = record.recordings("offload")
    figures = offload.run_all(options(jobs=["tiny clipping"], systems=systems, add=first.file))
    (recorded,) = record.recordings("offload")
    assert recorded.rows == figures["rows"]
    rows = {row["system"]: row for row in figures["rows"]}
    assert list(rows) == ["plain", *systems]
    for each in rows.values():
        assert each["error"] is None
        assert len(each["step_seconds_all"]) == 3
        assert each["clipped_share"] == 1.0
        assert each["loss_first"] == pytest.approx(rows["plain"]["loss_first"], rel=1e-4)
        assert each["loss_last"] == pytest.approx(rows["plain fp32 masters"]["loss_last"], rel=1e-3)
        assert each["loss_last"] < each["loss_first"]


def test_a_process_that_takes_too_long_is_stopped() -> None:
    assert offload.run_apart("plain", "tiny", 0, options(timeout=0.5))["error"] == "not done after 0 s"


def test_parts_of_a_batch_give_the_loss_and_norm_of_the_whole() -> None:
    job = peers.JOBS["tiny"]
    (loss, norm), (loss_of_parts, norm_of_parts) = (peers.plain(job, peers.Attempt(parts), "cpu")() for parts in (1, 2))
    assert float(loss_of_parts) == pytest.approx(float(loss), rel=1e-4)
    assert float(norm_of_parts) == pytest.approx(float(norm), rel=0.02)
