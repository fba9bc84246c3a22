"""Headers and indices of safetensors, as they come from anyone: what is not as it should be is refused."""

from __future__ import annotations

import json
import pickle
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from anyfit import Job
from anyfit.values import tensor_files
from anyfit.values.tensor_files import ELEMENT_BYTES, INDEX, SINGLE, TensorFolder, header_of, read_header

TENSORS = {"a.weight": torch.randn(3, 4), "b": torch.arange(5), "none": torch.empty(0, 7), "one": torch.tensor(1.5)}


def file_of(path: Path, header: Any, data: bytes = b"") -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (2,), offsets: Any = (0, 8), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


def test_a_file_of_the_library_is_read_as_the_library_reads_it(tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "file", metadata={"format": "pt"})
    data = (tmp_path / "file").read_bytes()
    found = read_header(tmp_path / "file")
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        each = found[name]
        assert (each.shape, each.bytes) == (tuple(tensor.shape), tensor.nbytes)
        assert data[each.start : each.start + each.bytes] == tensor.numpy().tobytes()


def test_a_header_that_is_written_is_one_that_the_library_reads(tmp_path: Path) -> None:
    names = {torch.float32: "F32", torch.int64: "I64"}
    ordered = sorted(TENSORS.items(), key=lambda item: -item[1].itemsize)
    header = header_of((name, names[each.dtype], tuple(each.shape)) for name, each in ordered)
    (tmp_path / "file").write_bytes(header + b"".join(each.numpy().tobytes() for _, each in ordered))
    loaded = load_file(tmp_path / "file")
    assert loaded.keys() == TENSORS.keys()
    assert all(torch.equal(loaded[name], each) for name, each in TENSORS.items())


ABSURD = {
    "a negative shape": entry(shape=[-2]),
    "a shape of no integers": entry(shape=[2.0]),
    "a shape of truths": entry(shape=[True, 2]),
    "no shape at all": entry(shape=8),
    "an endless shape": entry(shape=[2**60, 2**60]),
    "a product beyond all memory": entry(shape=[2**40, 2**40]),
    "more dims than a tensor has": entry(shape=[1] * 17 + [2]),
    "a shape that does not make these bytes": entry(shape=[3]),
    "an unknown dtype": entry(dtype="F13"),
    "a dtype that is no text": entry(dtype=["F32"]),
    "offsets that run backwards": entry(offsets=[8, 0]),
    "negative offsets": entry(offsets=[-8, 0]),
    "three offsets": entry(offsets=[0, 4, 8]),
    "bytes that are not there": entry(shape=[4], offsets=[0, 16]),
    "bytes that begin later": entry(offsets=[8, 16]),
    "another key": entry() | {"file": "/etc/passwd"},
    "a list": [1, 2],
}


@pytest.mark.parametrize("fields", ABSURD.values(), ids=ABSURD)
def test_an_absurd_tensor_is_refused(tmp_path: Path, fields: Any) -> None:
    read_header(file_of(tmp_path / "good", {"a": entry()}, bytes(8)))
    with pytest.raises(ValueError, match="bad"):
        read_header(file_of(tmp_path / "bad", {"a": fields}, bytes(8)))


def test_tensors_that_overlap_or_leave_holes_are_refused(tmp_path: Path) -> None:
    for second in ([4, 12], [12, 20], [0, 8]):
        header = {"a": entry(), "b": entry(offsets=second)}
        with pytest.raises(ValueError, match="overlap or leave holes"):
            read_header(file_of(tmp_path / "bad", header, bytes(20)))


def test_a_file_that_was_cut_short_or_has_more_is_refused(tmp_path: Path) -> None:
    for size in (7, 9):
        with pytest.raises(ValueError, match="its header speaks of"):
            read_header(file_of(tmp_path / "bad", {"a": entry()}, bytes(size)))


def test_a_header_longer_than_its_file_is_refused_without_being_read(tmp_path: Path) -> None:
    for data in (b"", b"\x01", (2**62).to_bytes(8, "little"), (9).to_bytes(8, "little") + b"{}"):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(ValueError, match="no safetensors file"):
            read_header(tmp_path / "bad")


def test_a_huge_header_is_refused(tmp_path: Path) -> None:
    with (tmp_path / "bad").open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**30 + 8)  # takes no place on the disk
    with pytest.raises(ValueError, match=r"a header of 1\.00 GiB; at most 100 MiB are read"):
        read_header(tmp_path / "bad")


def test_a_huge_index_is_refused(tmp_path: Path) -> None:
    with (tmp_path / INDEX).open("wb") as file:
        file.truncate(2**30)
    with pytest.raises(ValueError, match=r"1\.00 GiB of JSON"):
        TensorFolder.open(tmp_path)


def test_a_huge_count_of_tensors_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MOST_TENSORS", 3)
    header = {str(index): entry([0], [0, 0]) for index in range(4)}
    with pytest.raises(ValueError, match="4 tensors; at most 3 are read"):
        read_header(file_of(tmp_path / "bad", header))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(header, SINGLE)}))
    with pytest.raises(ValueError, match="4 tensors; at most 3 are read"):
        TensorFolder.open(tmp_path)


def test_a_huge_count_of_files_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensor_files, "MOST_FILES", 1)
    for name in ("1.safetensors", "2.safetensors"):
        (tmp_path / name).touch()
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors", "b": "2.safetensors"}}))
    with pytest.raises(ValueError, match="2 files; at most 1 are read"):
        TensorFolder.open(tmp_path)


@pytest.mark.parametrize("name", ["", "\x1b[31mred", "a\nb", "x" * 513], ids=["empty", "escape", "lines", "long"])
def test_a_name_that_would_spoil_a_terminal_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="is no name of a tensor"):
        read_header(file_of(tmp_path / "bad", {name: entry()}, bytes(8)))


OUTSIDE = [
    "../secret.safetensors", "/etc/secret.safetensors", "inner/secret.safetensors", "..\\secret.safetensors",
    "C:secret.safetensors", ".hidden.safetensors", "model.bin", "", 7, None, "a\0.safetensors",
]  # fmt: skip


@pytest.mark.parametrize("file", OUTSIDE, ids=str)
def test_an_index_that_names_anything_but_a_file_of_its_folder_is_refused(tmp_path: Path, file: Any) -> None:
    folder = tmp_path / "folder"
    (folder / "inner").mkdir(parents=True)
    for there in (tmp_path, folder / "inner"):
        save_file({"a": torch.ones(2)}, there / "secret.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": file}}))
    with pytest.raises(ValueError, match=r"does not name a \.safetensors file of this folder"):
        TensorFolder.open(folder)


BROKEN = {
    "not text": b"\xff\xfe{}",
    "not JSON": b"{'a': 1}",
    "nested without end": b'{"a":' + b"[" * 200_000,
    "a key twice": b'{"a": EMPTY, "a": EMPTY}'.replace(b"EMPTY", json.dumps(entry([0], [0, 0])).encode()),
    "a list": b"[]",
}


@pytest.mark.parametrize("text", BROKEN.values(), ids=BROKEN)
def test_a_header_or_index_that_is_no_plain_object_is_refused(tmp_path: Path, text: bytes) -> None:
    with pytest.raises(ValueError, match="bad"):
        read_header(file_of(tmp_path / "bad", text))
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(ValueError, match=INDEX):
        TensorFolder.open(tmp_path)


def test_an_index_and_its_files_must_agree(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2), "b": torch.ones(2)}, tmp_path / "1.safetensors")

    def index(**where: str) -> None:
        (tmp_path / INDEX).write_text(json.dumps({"weight_map": where}))

    index(a="1.safetensors", b="1.safetensors")
    assert sorted(TensorFolder.open(tmp_path).entries) == ["a", "b"]
    index(a="1.safetensors")
    with pytest.raises(ValueError, match=r"it has 'b', which model\.safetensors\.index\.json does not say"):
        TensorFolder.open(tmp_path)
    index(a="1.safetensors", b="1.safetensors", c="1.safetensors")
    with pytest.raises(ValueError, match=r"'c', as model\.safetensors\.index\.json says, and it is not there"):
        TensorFolder.open(tmp_path)
    index(a="1.safetensors", b="2.safetensors")
    with pytest.raises(FileNotFoundError, match=r"'b' lies in 2\.safetensors, which is not there"):
        TensorFolder.open(tmp_path)


def test_of_a_single_file_and_an_index_the_file_is_taken_as_from_pretrained_does(tmp_path: Path) -> None:
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.ones(3)}, tmp_path / SINGLE)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "1.safetensors"}}))
    assert list(TensorFolder.open(tmp_path).entries) == ["b"]


class Trap:
    """What unpickles it runs it."""

    def __init__(self, sprung: Path) -> None:
        self.sprung = sprung

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return Path.touch, (self.sprung,)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.safetensors", "model.pt"])
def test_a_pickle_is_refused_and_not_run(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / name).write_bytes(pickle.dumps(Trap(tmp_path / "sprung")))
    with pytest.raises((ValueError, FileNotFoundError), match=r"only safetensors are read|no safetensors file"):
        TensorFolder.open(folder)
    assert not (tmp_path / "sprung").exists()
    pickle.loads((folder / name).read_bytes())
    assert (tmp_path / "sprung").exists()


def test_pickled_weights_are_refused_before_a_run_with_the_command_that_converts_them(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_layer=1, n_embd=8, n_head=2, vocab_size=16, n_positions=8)
    model, folder = transformers.GPT2LMHeadModel(config), tmp_path / "a folder"
    model.config.save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps({**config.to_dict(), "architectures": ["GPT2LMHeadModel"]}))
    torch.save({name: tensor.clone() for name, tensor in model.state_dict().items()}, folder / "pytorch_model.bin")
    with pytest.raises(FileNotFoundError, match="only safetensors are read") as refused:
        Job.from_huggingface(folder, batch_size=2, length=8)
    assert Job.from_huggingface(folder, batch_size=2, length=8, weights=None).weights is None
    _, _, command = str(refused.value).partition("where you trust it: ")
    program, option, code = shlex.split(command)
    assert (program, option) == ("python", "-c")
    exec(code)  # in this process: another would take seconds to begin
    converted = TensorFolder.open(tmp_path / "a folder-safetensors")
    assert set(converted.entries) | {"lm_head.weight"} == set(model.state_dict())
    assert Job.from_huggingface(converted.folder, batch_size=2, length=8).weights == converted.folder


def test_a_folder_without_weights_says_what_it_lacks(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"holds no model\.safetensors and no model\.safetensors\.index\.json"):
        TensorFolder.open(tmp_path)
    with pytest.raises(FileNotFoundError, match="no folder"):
        TensorFolder.open(tmp_path / "nothing")


@given(where=st.integers(0, 300), value=st.integers(0, 255))
def test_a_damaged_header_is_refused_or_stays_inside_its_file(
    where: int, value: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    file = tmp_path_factory.mktemp("damaged") / "file"
    save_file(TENSORS, file)
    data = bytearray(file.read_bytes())
    data[where % len(data)] = value
    file.write_bytes(data)
    try:
        found = read_header(file)
    except ValueError:
        return
    for each in found.values():
        assert each.bytes == each.elements * ELEMENT_BYTES[each.dtype]
        assert 8 < each.start <= each.start + each.bytes <= len(data)
