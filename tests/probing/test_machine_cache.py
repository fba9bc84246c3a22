"""The machine file: read when it can be, measured again when not, and never an error."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import torch

from anyfit.probing import cache, host
from anyfit.values.corrections import ClippedSteps, Correction, Corrections, Pace
from anyfit.values.machine import Machine
from tests.machines import small_machine


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The efforts of all measurements made; each gives a machine that says which it was."""
    efforts: list[str] = []

    def measure(effort: str, report: object = None) -> Machine:
        efforts.append(effort)
        return dataclasses.replace(small_machine(), comment=f"{effort} {len(efforts)}")

    monkeypatch.setattr(cache, "measure", measure)
    return efforts


def test_a_machine_is_measured_once(folder: Path, measured: list[str]) -> None:
    first = cache.cached("quick")
    assert cache.cached("quick") == first
    assert measured == ["quick"]
    assert [file.parent for file in folder.iterdir()] == [folder]


def test_a_full_measurement_serves_for_a_quick_one_but_not_the_other_way(folder: Path, measured: list[str]) -> None:
    cache.cached("quick")
    full = cache.cached("full")
    assert measured == ["quick", "full"]
    quick_file = cache.machine_file("quick")
    os.utime(quick_file, (0, 0))
    assert cache.cached("quick") == full
    assert measured == ["quick", "full"]


def test_what_was_measured_last_is_used(folder: Path, measured: list[str]) -> None:
    cache.cached("full")
    os.utime(cache.machine_file("full"), (0, 0))
    again = cache.remeasured("quick")
    assert cache.cached("quick") == again


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"\xff\xfe", b"[]", b'{"anyfit": "machine", "version": 0}', b'{"anyfit": "plan", "version": 1}', b"null"],
)
def test_a_corrupt_or_outdated_file_is_measured_again(folder: Path, measured: list[str], content: bytes) -> None:
    cache.cached("quick")
    cache.machine_file("quick").write_bytes(content)
    assert cache.cached("quick").comment == "quick 2"
    assert cache.cached("quick").comment == "quick 2"


def test_a_folder_in_the_files_place_is_no_error(folder: Path, measured: list[str]) -> None:
    cache.machine_file("quick").mkdir(parents=True)
    assert cache.cached("quick").comment == "quick 1"


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, measured: list[str]) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path / "file" / "cache"))
    assert cache.cached("quick").comment == "quick 1"


def test_other_hardware_or_torch_is_another_file(folder: Path, measured: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    here = cache.machine_file("quick")
    monkeypatch.setattr(torch, "__version__", "99.0")
    newer_torch = cache.machine_file("quick")
    monkeypatch.setattr(host, "cores", lambda: 4096)
    assert len({here, newer_torch, cache.machine_file("quick")}) == 3


def test_without_a_setting_the_cache_is_in_the_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANYFIT_CACHE", raising=False)
    assert cache.cache_folder() == Path.home() / ".cache" / "anyfit"


# ---------------------------------------------------------------------- what runs have shown


def correction(model: str = "GPT", error: float = 0.1) -> Correction:
    return Correction(model, "in blocks.1", needed_bytes=108, expected_bytes=100, error=error, date="2026-01-01")


def test_what_a_run_has_shown_of_a_model_is_there_for_its_next_plan_and_no_other(folder: Path) -> None:
    machine = small_machine()
    assert cache.corrections_of(machine).models == ()
    cache.keep_correction(machine, correction())
    cache.keep_correction(machine, correction("ResNet"))
    cache.keep_correction(machine, correction(error=0.3))
    known = cache.corrections_of(machine)
    assert known.of("GPT") == correction(error=0.3)
    assert known.of("ResNet") == correction("ResNet")
    assert known.of("BERT") is None
    cache.keep_correction(machine, correction(error=0.2))
    assert cache.corrections_of(machine).of("GPT") == correction(error=0.3)  # a margin only ever grows
    assert cache.corrections_of(small_machine(cores=99)).models == ()
    assert cache.corrections_of(machine.with_limits("1GiB")) == known  # another limit is not another machine


def test_a_machine_that_is_measured_anew_is_planned_for_as_if_nothing_had_been_shown(folder: Path, measured: list[str]) -> None:
    machine = cache.cached()
    cache.keep_correction(machine, correction())
    cache.keep_pace(machine, pace())
    known = cache.corrections_of(cache.cached())
    assert known.of("GPT") is not None
    assert known.pace_of("GPT", 7, "fp32") is not None
    known = cache.corrections_of(cache.remeasured())
    assert known.of("GPT") is None
    assert known.pace_of("GPT", 7, "fp32") is None


def pace(parameters: int = 7, measured_seconds: float = 3.0) -> Pace:
    return Pace("GPT", parameters, "fp32", measured_seconds, forecast_seconds=2.0, date="2026-01-01")


def test_a_pace_is_that_of_one_model_of_one_size_and_the_last_that_was_measured(folder: Path) -> None:
    machine = small_machine()
    cache.keep_correction(machine, correction())
    for each in (pace(), pace(parameters=8), pace(measured_seconds=1.0)):
        cache.keep_pace(machine, each)
    known = cache.corrections_of(machine)
    assert known.pace_of("GPT", 7, "fp32") == pace(measured_seconds=1.0)
    assert known.pace_of("GPT", 8, "fp32") == pace(parameters=8)
    assert known.pace_of("GPT", 7, "bf16") is None
    assert known.of("GPT") == correction()
    assert pace().scale == 1.5
    with pytest.raises(ValueError, match=r"a pace of 0.0 s beside 2.0 s; both must be positive"):
        pace(measured_seconds=0.0)


def test_a_file_of_corrections_that_cannot_be_read_is_none(folder: Path) -> None:
    machine = small_machine()
    cache.keep_correction(machine, correction())
    (file,) = folder.iterdir()
    file.write_text(file.read_text().replace('"error": 0.1', '"error": -0.1'))
    assert cache.corrections_of(machine).models == ()
    cache.keep_correction(machine, correction())
    assert cache.corrections_of(machine).models == (correction(),)


def test_clipped_steps_of_one_job_add_up_over_its_runs(folder: Path) -> None:
    machine = small_machine()
    assert cache.corrections_of(machine).clipped_steps_of("GPT", 7, "bf16", 1.0).share == 0.5, "nothing was seen"
    first = ClippedSteps("GPT", 7, "bf16", 1.0, steps=10, clipped=9, date="2026-01-01")
    for each in (first, dataclasses.replace(first, clip_norm=5.0, clipped=0), dataclasses.replace(first, date="2026-01-02")):
        cache.keep_clipped_steps(machine, each)
    known = cache.corrections_of(machine)
    assert known.clipped_steps_of("GPT", 7, "bf16", 1.0) == ClippedSteps("GPT", 7, "bf16", 1.0, 20, 18, "2026-01-02")
    assert known.clipped_steps_of("GPT", 7, "bf16", 1.0).share == pytest.approx((18 + 50) / 120)
    assert known.clipped_steps_of("GPT", 7, "bf16", 5.0).clipped == 0
    assert known.clipped_steps_of("GPT", 8, "bf16", 1.0).steps == 0
    assert "GPT: 18 of 20 steps clipped (2026-01-02)" in cache.forget_corrections()
    with pytest.raises(ValueError, match="3 clipped steps of 2"):
        ClippedSteps("GPT", 7, "bf16", 1.0, steps=2, clipped=3)


def test_corrections_from_before_clipped_steps_were_counted_are_read() -> None:
    now = Corrections("m", paces=(pace(),))
    document = now.to_json()
    del document["clipped"]
    assert Corrections.from_json(document | {"version": 2}) == now
