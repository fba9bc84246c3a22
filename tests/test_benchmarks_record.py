"""Results files: where they lie, what they say of themselves, and that a new run finds its own place."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest

from benchmarks import record
from benchmarks.record import Recording
from tests.machines import small_machine

FILES = sorted(file for file in record.RESULTS.rglob("*") if file.is_file())
RECORDINGS = [Recording(file) for file in FILES if file.parent.name != record.MACHINES]
NAMES = [each.name for each in RECORDINGS]


def test_all_results_are_recordings_or_machines() -> None:
    assert all(file.parent.parent == record.RESULTS and file.suffix == ".json" for file in FILES)


@pytest.mark.parametrize("recording", RECORDINGS, ids=NAMES)
def test_a_file_s_name_is_its_date_machine_and_commit(recording: Recording) -> None:
    assert re.fullmatch(re.escape(record.stem_of(recording.about)) + r"(-\d+)?", recording.file.stem)
    assert set(record.provenance()) <= set(recording.about)


@pytest.mark.parametrize("recording", RECORDINGS, ids=NAMES)
def test_a_recorded_command_is_of_a_script_that_exists(recording: Recording) -> None:
    modules = re.findall(r"benchmarks\.(\w+)", recording.about["command"])
    assert modules
    assert all((record.RESULTS.parent / f"{module}.py").exists() for module in modules)


def test_every_machine_that_was_recorded_belongs_to_a_recording() -> None:
    named = {
        each.machine_file(key).resolve() for each in RECORDINGS for key in ("machine", "machine_again") if key in each.document
    }
    assert named == {file for file in FILES if file.parent.name == record.MACHINES}


@pytest.mark.parametrize("recording", record.recordings("planned", "regret", "profiler", "forecast"), ids=lambda each: each.name)
def test_what_is_special_about_a_row_has_a_reason(recording: Recording) -> None:
    for row in recording.rows:
        why = [row[key] for key in ("excluded", "rough", "calls_missing") if key in row]
        why += [row["reason"]] if "fragmentation_allowed" in row else []
        why += [row["only_with"]["reason"]] if "only_with" in row else []
        assert all(len(words.split()) >= 5 for words in why), row


def test_a_question_without_a_file_is_an_error() -> None:
    with pytest.raises(FileNotFoundError, match="nothing is recorded under results/unasked"):
        record.recordings("planned", "unasked")


def test_a_run_writes_one_file_and_another_of_the_same_day_and_commit_a_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(record, "RESULTS", tmp_path)
    monkeypatch.setattr(sys, "argv", ["benchmarks/forecast.py", "--record", str(tmp_path)])
    for _ in range(2):
        first = record.write("forecast", {"rows": [1]}, small_machine())
    assert first.stem == record.stem_of(record.provenance())
    record._own_file.cache_clear()
    second = record.write("forecast", {"rows": [2]}, small_machine())
    assert second.stem == f"{first.stem}-2"
    assert [each.file for each in record.recordings("forecast")] == [first, second]
    assert [each.rows for each in record.recordings("forecast")] == [[1], [2]]
    assert [each.machine_file().resolve().stem for each in record.recordings("forecast")] == [first.stem, second.stem]
    assert Recording(first).machine == small_machine()
    assert Recording(first).about["command"] == f"python -m benchmarks.forecast --record {tmp_path.name}"
    assert list(json.loads(first.read_text())) == ["from", "machine", "figures"]


@pytest.mark.parametrize(
    ("gpu", "stem"),
    [
        ("NVIDIA H200", "2026-11-15-h200-b1d785c"),
        ("NVIDIA GeForce RTX 4090", "2026-11-15-rtx-4090-b1d785c"),
        (None, "2026-11-15-cpu-8-cores-b1d785c"),
    ],
)
def test_a_machine_has_a_short_name(gpu: str | None, stem: str) -> None:
    assert record.stem_of({"date": "2026-11-15", "gpu": gpu, "cores": 8, "commit": "b1d785c+"}) == stem


def test_every_result_that_is_named_somewhere_is_there() -> None:
    root = record.RESULTS.parent.parent
    texts = [
        *root.glob("*.md"),
        *(file for folder in ("docs", "anyfit", "benchmarks", "tests") for file in (root / folder).rglob("*")),
    ]
    named = {
        path
        for file in texts
        if file.suffix in (".md", ".py", ".json") and record.RESULTS not in file.parents
        for path in re.findall(r"benchmarks/results/[\w/.-]*\w", file.read_text())
    }
    assert len(named) >= 10
    assert [path for path in sorted(named) if not (root / path).exists()] == []
