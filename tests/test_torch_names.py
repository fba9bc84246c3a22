"""Every name of torch that the package uses is there in the oldest torch that it asks for.

    python -m tests.test_torch_names FILE

lists the names that this torch has. Run it with the oldest torch after using a name that is not in the recorded list.
"""

from __future__ import annotations

import ast
import importlib
import json
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

PACKAGE = Path(__file__).parent.parent / "anyfit"
RECORDED = Path(__file__).parent / "golden" / "torch-names.json"
MISSING = object()


def names_used() -> set[str]:
    """Dotted names: what is imported from torch, and the attributes read from that."""
    return {name for file in PACKAGE.rglob("*.py") for name in _names(ast.parse(file.read_text()))}


def _names(tree: ast.AST) -> Iterator[str]:
    known: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if _is_of_torch(alias.name):
                    yield alias.name
                    known[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_of_torch(node.module or ""):
            for alias in node.names:
                known[alias.asname or alias.name] = f"{node.module}.{alias.name}"
                yield f"{node.module}.{alias.name}"
    for node in ast.walk(tree):
        path: list[str] = []
        while isinstance(node, ast.Attribute):
            path, node = [node.attr, *path], node.value
        if path and isinstance(node, ast.Name) and node.id in known:
            yield ".".join([known[node.id], *path])


def _is_of_torch(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


def has(name: str) -> bool:
    first, *path = name.split(".")
    found: Any = importlib.import_module(first)
    warnings.simplefilter("ignore")  # of torch's own, when the compiler is imported
    for at, part in enumerate(path, 1):
        try:
            found = getattr(found, part, MISSING)
            if found is MISSING:
                found = importlib.import_module(".".join([first, *path[:at]]))
        except ImportError:
            return False
    return True


def test_the_oldest_torch_has_every_name_that_the_package_uses() -> None:
    recorded = json.loads(RECORDED.read_text())
    here = {name for name in names_used() if has(name)}
    assert len(here) > 100
    assert sorted(here - set(recorded["names"])) == [], f"torch {recorded['torch']} does not have them, or has not been asked"


def test_a_name_that_no_torch_has_is_told_apart() -> None:
    assert has("torch._subclasses.fake_tensor.FakeTensor")
    assert not has("torch._subclasses.fake_tensor.NoSuchTensor")
    assert not has("torch.no_such_module.Name")


if __name__ == "__main__":
    document = {"torch": str(torch.__version__), "names": sorted(name for name in names_used() if has(name))}
    Path(sys.argv[1]).write_text(json.dumps(document, indent=1) + "\n")
