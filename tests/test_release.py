"""What is handed out: a wheel and an sdist that hold the package and nothing else, and run where there is no repository."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
import tarfile
import zipfile
from pathlib import Path

import pytest

import anyfit

ROOT = Path(__file__).parent.parent
PACKAGE = sorted(
    str(path.relative_to(ROOT)) for path in (ROOT / "anyfit").rglob("*") if path.is_file() and "__pycache__" not in path.parts
)


def built(kind: str, source: Path, target: Path) -> Path:
    command = [sys.executable, "-m", "hatchling", "build", "--target", kind, "--directory", str(target)]
    subprocess.run(command, cwd=source, check=True, capture_output=True)
    (made,) = target.iterdir()
    return made


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return built("sdist", ROOT, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As package indexes and distributions make it: of the sdist, and not of the repository."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return built("wheel", source, tmp_path_factory.mktemp("wheel"))


def test_the_wheel_has_every_file_of_the_package_and_no_other(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    metadata = [name for name in names if ".dist-info/" in name]
    assert sorted(set(names) - set(metadata)) == PACKAGE
    for needed in ("anyfit/py.typed", "anyfit/kernels/adamw.cpp", "anyfit/values/machines/h200.json"):
        assert needed in names
    assert {"METADATA", "WHEEL", "entry_points.txt", "RECORD", "LICENSE"} == {Path(name).name for name in metadata}


def test_the_wheel_says_its_version_what_it_needs_and_how_its_command_is_called(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    read = {Path(name).name: archive.read(name).decode() for name in archive.namelist() if ".dist-info/" in name}
    assert f"\nVersion: {anyfit.__version__}\n" in read["METADATA"]
    needed = re.findall(r"^Requires-Dist: ([\w-]+)[^;\n]*$", read["METADATA"], re.MULTILINE)
    assert sorted(needed) == ["numpy", "psutil", "rich", "safetensors", "scipy", "torch", "typer"]
    assert "anyfit = anyfit.cli:main" in read["entry_points.txt"]
    assert read["WHEEL"].count("Tag: py3-none-any") == 1  # kernels are compiled where they are first used


def test_the_newest_changes_are_those_of_this_version() -> None:
    (newest, *_) = re.findall(r"^## (\S+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert newest == anyfit.__version__


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The programs of a new environment that has the wheel. What it needs is lent by the environment of the tests."""
    environment = tmp_path_factory.mktemp("environment")
    subprocess.run([sys.executable, "-m", "venv", environment], check=True)
    programs = environment / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", "--no-deps", "--no-index", wheel]
    subprocess.run(install, check=True, capture_output=True)
    (packages,) = environment.glob("lib/python*/site-packages")
    (packages / "lent.pth").write_text(sysconfig.get_path("purelib"))
    return programs


def said(installed: Path, *words: str | Path, folder: Path, compiler: str | None = None) -> str:
    """What a command of that environment prints, with a cache of its own, so that nothing was measured or compiled before."""
    own = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV", "CXX")}
    asked = {} if compiler is None else {"CXX": compiler}
    environment = own | asked | {"ANYFIT_CACHE": str(folder / "cache"), "COLUMNS": "130"}
    command = [str(installed / str(words[0])), *map(str, words[1:])]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout + done.stderr


@pytest.mark.full
def test_the_installed_package_is_not_the_one_of_the_repository(installed: Path, tmp_path: Path) -> None:
    where = said(installed, "python", "-c", "import anyfit; print(anyfit.__file__)", folder=tmp_path)
    assert Path(where.strip()).is_relative_to(installed.parent)
    assert said(installed, "anyfit", "--version", folder=tmp_path) == f"anyfit {anyfit.__version__}\n"


@pytest.mark.full
def test_the_installed_package_plans_trains_the_demo_and_reports_both(installed: Path, tmp_path: Path) -> None:
    plan = said(installed, "anyfit", "plan", "gpt2", "--machine", "rtx-4090", "-o", tmp_path / "plan.json", folder=tmp_path)
    assert plan.startswith("fits")
    assert "model state" in said(installed, "anyfit", "why", "plan.json", folder=tmp_path)
    trained = said(installed, "anyfit", "fit", "--steps", "3", "--folder", "run", folder=tmp_path)
    assert "after 3 steps" in trained
    assert "C++ compiler" not in trained
    for what, page in (("plan.json", "report.html"), ("run", "run/report.html")):
        said(installed, "anyfit", "report", what, folder=tmp_path)
        shown = (tmp_path / page).read_text()
        assert all(part in shown for part in ("<style", "<script", "</html>"))  # all of the page travels with the package
    assert list((tmp_path / "cache").rglob("adamw-*.so"))  # compiled at its first use


@pytest.mark.full
def test_without_a_compiler_the_demo_trains_all_the_same_and_says_what_is_slower(installed: Path, tmp_path: Path) -> None:
    words = ("anyfit", "fit", "--steps", "3", "--folder", "run", "--device-memory", "16MiB")
    trained = said(installed, *words, folder=tmp_path, compiler="no-such-compiler")
    assert "after 3 steps" in trained
    assert trained.count("CXX=no-such-compiler is not there; the CPU update runs in plain torch, several times slower") == 1
