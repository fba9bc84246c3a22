"""Values as files: what is written is read back the same, and nothing that is off by one key is read at all."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from anyfit.values.calibration import Calibration
from anyfit.values.machine import Machine
from anyfit.values.plan import Plan
from anyfit.values.record import Record, nearest, write_atomically
from tests.machines import small_machine

from .strategies import OPEN, RECORDS, places, records

# What files from before do not have:
ADDED = {"machine.device": ("processors", "calibration", "launch_slowdown"), "profile": ("name", "limited", "assumes_host")}
DRAWN = 4  # places of each random document that are spoilt


@given(records)
def test_a_record_is_read_back_the_same_from_its_json(record: Record) -> None:
    assert type(record).from_json(json.loads(json.dumps(record.to_json()))) == record


@given(record=records)
def test_a_record_is_read_back_the_same_from_its_file(record: Record, tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.getbasetemp() / "record.json"
    record.save(file)
    assert type(record).load(file) == record


def spoilt_places(data: st.DataObject, record: Record) -> list[tuple[Any, Any, Any, str]]:
    """(whole document, container, key, path) for some places in fresh copies of a record's JSON."""
    document = record.to_json()
    del document["anyfit"], document["version"]
    count = sum(1 for _ in places(document, record.kind))
    chosen = data.draw(st.lists(st.integers(0, count - 1), min_size=1, max_size=DRAWN, unique=True))
    spoilt = []
    for index in chosen:
        whole = json.loads(json.dumps(record.to_json()))
        body = {key: whole[key] for key in whole if key not in ("anyfit", "version")}
        container, key, path = list(places(body, record.kind))[index]
        spoilt.append((whole, whole if container is body else container, key, path))
    return spoilt


def keys_that_matter(data: st.DataObject, record: Record) -> list[tuple[Any, Any, str, str]]:
    """Those of `spoilt_places` that are keys of an object with fixed keys, and the path of that object."""
    found = []
    for whole, container, key, path in spoilt_places(data, record):
        owner = path.removesuffix(f".{key}")
        if isinstance(container, dict) and owner.rpartition(".")[2] not in OPEN:
            found.append((whole, container, key, owner))
    return found


@given(records, st.data())
def test_a_missing_key_is_an_error_that_names_it_and_where(record: Record, data: st.DataObject) -> None:
    for whole, container, key, owner in keys_that_matter(data, record):
        if key in ADDED.get(owner, ()) or owner == "machine.device.calibration":  # as newer than the file
            continue
        del container[key]
        with pytest.raises(ValueError, match="^" + re.escape(f"{owner}: missing key {key!r}")):
            type(record).from_json(whole)


@given(records, st.data())
def test_a_misspelt_key_is_an_error_that_names_the_nearest(record: Record, data: st.DataObject) -> None:
    for whole, container, key, owner in keys_that_matter(data, record):
        misspelt = key + key[-1]
        container[misspelt] = container.pop(key)
        with pytest.raises(ValueError, match="^" + re.escape(f"{owner}: unknown key {misspelt!r}; did you mean {key!r}?") + "$"):
            type(record).from_json(whole)


@given(records, st.data())
def test_a_value_of_another_type_is_an_error_that_names_its_path(record: Record, data: st.DataObject) -> None:
    others: dict[type, list[Any]] = {
        str: [7, ["seven"]],
        int: [True, "7"],  # null is legal where a limit is optional
        float: [True, "7", float("nan"), float("inf"), 10**400],
        bool: [1, "true"],
        list: ["list", {}],
        dict: ["object", []],
        type(None): [["null"]],
    }
    for whole, container, key, path in spoilt_places(data, record):
        container[key] = data.draw(st.sampled_from(others[type(container[key])]))
        with pytest.raises(ValueError, match="^" + re.escape(path) + r"[:\[]"):
            type(record).from_json(whole)


@pytest.mark.parametrize("kind", RECORDS)
@given(data=st.data())
def test_a_document_of_another_kind_or_version_is_refused(kind: type[Record], data: st.DataObject) -> None:
    record = data.draw(records.filter(lambda record: not isinstance(record, kind)))
    with pytest.raises(ValueError, match=f"not an anyfit {kind.kind} .*{record.kind}"):
        kind.from_json(record.to_json())
    for version in (0, record.version + 1, "1", True, 1.0, None):
        with pytest.raises(ValueError, match=f"version {version!r} .* this anyfit reads version {record.version}"):
            type(record).from_json(record.to_json() | {"version": version})


@pytest.mark.parametrize("document", [[], "plan", 3, None])
def test_a_document_that_is_no_object_is_refused(document: object) -> None:
    with pytest.raises(ValueError, match=r"^plan: expected a JSON object, got "):
        Plan.from_json(document)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    file = tmp_path / "machine.json"
    small_machine().save(file)
    return file


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_truncated_file_is_refused_by_its_name(saved: Path, share: float) -> None:
    text = saved.read_text().rstrip()
    saved.write_text(text[: int(share * len(text))])
    with pytest.raises(ValueError, match=re.escape(f"{saved}: not JSON (")):
        Machine.load(saved)


@pytest.mark.parametrize("content", [b"\x00\xff\xfe", b"a machine", b"{'anyfit': 'machine'}", b'{"name": %s}' % (b"9" * 5000)])
def test_a_file_that_is_not_json_is_refused_by_its_name(saved: Path, content: bytes) -> None:
    saved.write_bytes(content)
    with pytest.raises(ValueError, match=re.escape(f"{saved}: not JSON (")):
        Machine.load(saved)


def test_a_key_given_twice_is_refused(saved: Path) -> None:
    saved.write_text(saved.read_text().replace('"nodes": 1,', '"nodes": 1, "nodes": 2,'))
    with pytest.raises(ValueError, match="the key 'nodes' is given twice"):
        Machine.load(saved)


def test_a_file_that_is_not_there_or_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=re.escape(f"no plan file at {tmp_path}/plan.json")):
        Plan.load(tmp_path / "plan.json")
    with pytest.raises(OSError, match=re.escape(f"cannot read the plan file {tmp_path}: ")):
        Plan.load(tmp_path)


def test_what_json_cannot_say_is_not_written(saved: Path) -> None:
    before = saved.read_bytes()
    machine = small_machine()
    broken = replace(
        machine, device=replace(machine.device, memory_bytes=replace(machine.device.memory_bytes, value=float("nan")))
    )
    with pytest.raises(ValueError, match="not JSON compliant"):
        broken.save(saved)
    assert saved.read_bytes() == before


def test_the_nearest_word_is_offered_and_all_of_them_when_none_is_near() -> None:
    assert nearest("micro_bach", ["batch_size", "micro_batch"]) == "; did you mean 'micro_batch'?"
    assert nearest("zzz", ["b", "a"]) == "; known: a, b"
    assert nearest("zzz", []) == ""
    assert nearest("zzz", map(str, range(700, 0, -1))).startswith("; known: 700, 699, 698, ")
    assert nearest("zzz", map(str, range(700, 0, -1))).endswith(", 671 and 670 more")


# ---------------------------------------------------------------------- written whole or not at all


def test_a_write_that_fails_half_way_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_bytes(b"the old plan")
    writes_too_much = (
        "import resource, sys; from pathlib import Path; from anyfit.values.record import write_atomically\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, 10_000))\n"
        "write_atomically(Path(sys.argv[1]), b'x' * 20_000)"
    )
    done = subprocess.run([sys.executable, "-c", writes_too_much, str(file)], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"cannot write {file}: File too large" in done.stderr
    assert file.read_bytes() == b"the old plan"
    assert list(tmp_path.iterdir()) == [file]


def test_a_write_into_a_folder_that_is_a_file_names_what_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").write_text("a file")
    with pytest.raises(OSError, match=re.escape(f"cannot write {tmp_path}/folder/plan.json: its folder is a file")):
        write_atomically(tmp_path / "folder" / "plan.json", b"new")
    assert (tmp_path / "folder").read_text() == "a file"


def test_a_write_over_a_folder_leaves_the_folder(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    (tmp_path / "plan.json" / "inside").touch()
    with pytest.raises(OSError, match="cannot write"):
        write_atomically(tmp_path / "plan.json", b"new")
    assert [path.name for path in tmp_path.rglob("*")] == ["plan.json", "inside"]


def test_a_written_file_replaces_the_old_one_makes_its_folder_and_has_the_users_permissions(tmp_path: Path) -> None:
    file = tmp_path / "new" / "folder" / "plan.json"
    before = os.umask(0o027)
    try:
        write_atomically(file, b"old")
        write_atomically(file, b"new")
    finally:
        os.umask(before)
    assert file.read_bytes() == b"new"
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(file.parent.iterdir()) == [file]


def test_a_machine_file_from_before_calibrations_gets_that_of_its_kind() -> None:
    document = small_machine().to_json()
    for key in ADDED["machine.device"]:
        del document["device"][key]
    device = Machine.from_json(document).device
    assert device.calibration == Calibration.of("cpu")
    assert device.processors.source.startswith("assumed")
