"""Building: once, atomically, and where it cannot be done, one line and plain torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from anyfit.kernels import adamw as module
from anyfit.kernels import native
from anyfit.kernels.adamw import Settings, State, adamw, is_native


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path))
    return tmp_path / "kernels"


@pytest.fixture
def not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_kernels", [])


@pytest.fixture
def answer(tmp_path: Path) -> Path:
    file = tmp_path / "answer.cpp"
    file.write_text('extern "C" int answer() { return 42; }\n')
    return file


def test_what_was_built_is_kept_and_loaded_again(folder: Path, answer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native.library(answer).answer() == 42
    (file,) = folder.iterdir()  # and nothing unfinished
    monkeypatch.setattr(native, "_built", lambda *_: pytest.fail("built again"))
    assert native.library(answer).answer() == 42
    assert file.name.startswith("answer-")


def test_another_source_is_another_library(folder: Path, answer: Path) -> None:
    assert native.library(answer).answer() == 42
    answer.write_text(answer.read_text().replace("42", "43"))
    assert native.library(answer).answer() == 43
    assert len(list(folder.iterdir())) == 2


def test_another_compiler_is_another_library(folder: Path, answer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    native.library(answer)
    monkeypatch.setenv("CXX", "c++ -DANYTHING")
    native.library(answer)
    assert len(list(folder.iterdir())) == 2


def test_a_damaged_library_is_built_again(folder: Path, answer: Path) -> None:
    folder.mkdir()
    name = f"answer-{native._key(answer, native.find_compiler())}.so"
    (folder / name).write_bytes(b"not a library")
    assert native.library(answer).answer() == 42


def test_a_cache_that_cannot_be_written_costs_a_build_and_no_error(
    tmp_path: Path, answer: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path / "file"))
    assert native.library(answer).answer() == 42


def test_processes_that_build_at_once_all_get_a_library(folder: Path, answer: Path, root: Path) -> None:
    code = f"from pathlib import Path; from anyfit.kernels.native import library; print(library(Path({str(answer)!r})).answer())"
    running = [subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, cwd=root) for _ in range(3)]
    assert [process.communicate(timeout=120)[0].strip() for process in running] == ["42"] * 3
    assert len(list(folder.iterdir())) == 1


def test_a_source_that_does_not_compile_says_its_first_error(folder: Path, answer: Path) -> None:
    answer.write_text("int answer() { return nothing; }\n")
    with pytest.raises(native.NotBuilt, match=r"failed: .*nothing"):
        native.library(answer)
    assert list(folder.iterdir()) == []


@pytest.mark.usefixtures("folder", "not_tried")
@pytest.mark.parametrize(
    ("compiler", "said"), [("no-such-compiler", "CXX=no-such-compiler is not there"), ("false", "false failed"), ("", "no C++")]
)
def test_without_a_compiler_one_line_is_said_and_plain_torch_does_it(
    compiler: str, said: str, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", compiler)
    if not compiler:
        monkeypatch.setenv("PATH", "")
    for _ in range(2):
        state = State(torch.ones(5), None, torch.zeros(5), torch.zeros(5))
        adamw(state, torch.ones(5), Settings(lr=0.5), 1)
        assert torch.allclose(state.weights, torch.tensor(0.5))
    assert not is_native()
    (line,) = capfd.readouterr().err.splitlines()
    assert said in line
    assert "plain torch" in line
