"""Promises about the house itself: who imports whom, what is public, and what no file may hold."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

import anyfit

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "anyfit"
ROOMS = (
    *("values", "probing", "tracing", "costing", "planning", "placing", "kernels", "running", "showing", "finetune", "layouts"),
    "stages",
)
COMPOSE = (
    *("check_command", "comparing", "machines_command", "report_command"),
    *("__init__", "__main__", "asking", "cli", "cutting", "demo", "ending", "fit_command", "fit_options", "fitting"),
    *("deciding", "forcing", "measuring", "meshing", "options", "pipelining", "plan_command", "profiling", "reporting"),
    "staging",
    "starting",
    "targets",
)
USERS = ("integrations",)  # of the public names alone, as any script is
OFFERED = ("losses",)  # for a user's own code as well, and so without a look at the house
MAY_IMPORT = {room: {"values", room} for room in ROOMS} | {
    "values": {"values", *OFFERED},
    "probing": {"values", "probing", "kernels"},
    "placing": {"values", "placing", "kernels", "layouts", "stages"},
    "running": {"values", "running", "placing", "kernels", "layouts", "stages"},
    "finetune": {"values", "finetune", "running"},
}
WITHOUT_TORCH = ("planning", "showing")
VALUES_MAY_CALL_FOR = {"torch", "transformers", "peft"}  # inside a function, where the user's own objects are at hand


@dataclass(frozen=True)
class Import:
    """One import statement: the module it names, in full, and whether it runs when its file is imported."""

    file: Path
    line: int
    module: str
    at_import: bool

    @property
    def package(self) -> str:
        return self.module.partition(".")[0]

    @property
    def room(self) -> str:
        """Of a module of ours: the room it is in, or its own name where it composes."""
        parts = self.module.split(".")
        return parts[1] if len(parts) > 1 else "__init__"

    def __str__(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line} imports {self.module}"


def imports_of(file: Path) -> list[Import]:
    return list(_imports(ast.parse(file.read_text()), file, at_import=True))


def _imports(node: ast.AST, file: Path, *, at_import: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            for alias in child.names:
                yield Import(file, child.lineno, alias.name, at_import)
        elif isinstance(child, ast.ImportFrom):
            for module in _modules_of(child, file):
                yield Import(file, child.lineno, module, at_import)
        elif isinstance(child, ast.If) and ast.unparse(child.test).endswith("TYPE_CHECKING"):
            for inner in child.body:
                yield from _imports(ast.Module([inner], []), file, at_import=False)
            for inner in child.orelse:
                yield from _imports(ast.Module([inner], []), file, at_import=at_import)
        else:
            inside_function = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            yield from _imports(child, file, at_import=at_import and not inside_function)


def _modules_of(statement: ast.ImportFrom, file: Path) -> list[str]:
    """What `from x import y` imports, in full: each y of ours may be a module."""
    module = statement.module or ""
    if statement.level:
        package = ["anyfit", *file.relative_to(PACKAGE).parts[:-1]]
        base = package[: len(package) - statement.level + 1]
        module = ".".join([*base, module] if module else base)
    if module == "anyfit":
        return [f"anyfit.{alias.name}" for alias in statement.names]
    return [module]


def files_of(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py"))


# ---------------------------------------------------------------------- the rooms


def test_every_file_is_in_a_room_or_composes_them() -> None:
    top = {
        path.stem if path.suffix == ".py" else path.name for path in PACKAGE.iterdir() if not path.name.startswith((".", "__pyc"))
    }
    assert top - {"py.typed"} == {*ROOMS, *COMPOSE, *USERS, *OFFERED}
    assert all(files_of(room) for room in (*ROOMS, *USERS))


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_imports_only_what_it_may(room: str) -> None:
    found = [each for file in files_of(room) for each in imports_of(file)]
    offences = [str(each) for each in found if each.package == "anyfit" and each.room not in MAY_IMPORT[room]]
    assert offences == []


@pytest.mark.parametrize("folder", USERS)
def test_an_integration_uses_the_public_names_alone(folder: str) -> None:
    found = [each for file in files_of(folder) for each in imports_of(file) if each.package == "anyfit"]
    assert {each.module for each in found if each.room != folder} <= {"anyfit", *(f"anyfit.{name}" for name in anyfit.__all__)}
    reached = {
        node.attr
        for file in files_of(folder)
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "anyfit"
    }
    assert reached <= set(anyfit.__all__)
    inside = {each.room for room in (*ROOMS, *OFFERED) for file in files_of(room) for each in imports_of(file)}
    assert folder not in inside


@pytest.mark.parametrize("module", OFFERED)
def test_what_is_offered_for_other_code_imports_nothing_of_ours(module: str) -> None:
    assert [str(each) for each in imports_of(PACKAGE / f"{module}.py") if each.package == "anyfit"] == []


def test_the_rooms_do_not_import_each_other_in_a_ring() -> None:
    graph = {
        room: {each.room for file in files_of(room) for each in imports_of(file) if each.package == "anyfit"} - {room, *OFFERED}
        for room in ROOMS
    }
    order = list(TopologicalSorter(graph).static_order())  # raises CycleError on a ring
    assert order[0] in ("values", "kernels")
    assert set(order) == set(ROOMS)


def test_values_import_the_standard_library_alone() -> None:
    ours = {"anyfit", *sys.stdlib_module_names}
    found = [each for file in files_of("values") for each in imports_of(file)]
    assert [str(each) for each in found if each.at_import and each.package not in ours] == []
    assert [str(each) for each in found if each.package not in ours | VALUES_MAY_CALL_FOR] == []


@pytest.mark.parametrize("room", WITHOUT_TORCH)
def test_a_room_without_torch_has_none_even_inside_a_function(room: str) -> None:
    found = [each for file in files_of(room) for each in imports_of(file)]
    assert [str(each) for each in found if each.package == "torch"] == []


def test_importing_the_package_the_planner_and_the_screens_imports_no_torch() -> None:
    code = (
        "import sys, anyfit, anyfit.cli, anyfit.planning, anyfit.showing.terminal, anyfit.showing.progress, anyfit.values.profile"
    )
    done = subprocess.run(
        [sys.executable, "-c", f"{code}; print('torch' in sys.modules)"], capture_output=True, text=True, check=True, cwd=ROOT
    )
    assert done.stdout.strip() == "False"


def test_there_is_no_utils() -> None:
    assert [path for path in PACKAGE.rglob("*") if re.search("util|helper", path.stem)] == []


def test_the_guards_see_imports_however_they_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "PACKAGE", tmp_path)
    file = tmp_path / "planning" / "sly.py"
    file.parent.mkdir()
    file.write_text(
        "import torch.nn as nn\n"
        "from .search import search\n"
        "from ..tracing import trace\n"
        "from anyfit import running\n"
        "if TYPE_CHECKING:\n    from anyfit.placing.place import place\n"
        "try:\n    import numpy\nexcept ImportError: pass\n"
        "class A:\n    import scipy\n    def f(self):\n        from anyfit.costing import cost\n"
    )
    assert [(each.module, each.at_import) for each in imports_of(file)] == [
        ("torch.nn", True),
        ("anyfit.planning.search", True),
        ("anyfit.tracing", True),
        ("anyfit.running", True),
        ("anyfit.placing.place", False),
        ("numpy", True),
        ("scipy", True),
        ("anyfit.costing", False),
    ]


# ---------------------------------------------------------------------- what is public


def test_the_public_names_are_exactly_nine_and_each_is_there() -> None:
    assert sorted(anyfit.__all__) == ["Job", "Machine", "NoPlan", "Plan", "Run", "plan", "probe", "profile", "start"]
    for name in anyfit.__all__:
        assert callable(getattr(anyfit, name))
    with pytest.raises(AttributeError, match="no attribute 'Rum'"):
        anyfit.Rum  # noqa: B018


# ---------------------------------------------------------------------- what no file may hold


def project_files() -> Iterator[Path]:
    """All text that travels with the project; not what tools and runs leave behind."""
    for path in sorted(ROOT.rglob("*")):
        inside = path.relative_to(ROOT).parts
        left_behind = any((part.startswith(".") and part != ".ci") or part == "__pycache__" for part in inside)
        if path.is_file() and not left_behind and inside[0] not in ("runs", "build", "dist"):
            yield path


def test_no_file_names_a_place_on_somebodys_machine() -> None:
    homes = re.compile(rb"(?<![\w.>}])/(home|Users|root|work)/\w+")
    offences = [
        f"{path.relative_to(ROOT)}: {found[0].decode()}" for path in project_files() if (found := homes.search(path.read_bytes()))
    ]
    assert offences == []


MOST_LINES = {"file": 450, "class": 300, "function": 60}


@pytest.mark.parametrize("file", sorted(PACKAGE.rglob("*.py")), ids=lambda file: str(file.relative_to(PACKAGE)))
def test_no_file_class_or_function_is_too_long_to_be_read_at_once(file: Path) -> None:
    source = file.read_text()
    kinds = {ast.ClassDef: "class", ast.FunctionDef: "function", ast.AsyncFunctionDef: "function"}
    found = [("file", file.name, source.count("\n"))]
    for node in ast.walk(ast.parse(source)):
        kind = kinds.get(type(node))
        if kind is not None:
            assert isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            found.append((kind, node.name, (node.end_lineno or 0) - node.lineno + 1))
    assert [each for each in found if each[2] > MOST_LINES[each[0]]] == []
