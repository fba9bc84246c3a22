"""Do the tests notice when the engine or the planner is wrong?

    python -m benchmarks.mutants choose FILE [--count 50] [--seed 0]
    python -m benchmarks.mutants try FILE [--only N ...] [--part 1/2]

`choose` changes one line of the engine or the planner at random, many times, and writes down line and change. `try` makes each
of the changes in a copy of the package and runs the tests of its room until one fails. A line is found again by its text, in
whatever file it has moved to. Mutants that no test catches, or whose line is gone, are listed at the end.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = {
    "placing": ["tests/placing", "tests/running/test_training.py", "tests/running/test_rescue.py", "tests/dist"],
    "planning": ["tests/planning", "tests/costing"],
    "costing": ["tests/costing", "tests/planning"],
    "running": ["tests/running", "tests/dist"],
}
SHARES = {"placing": 25, "planning": 15, "costing": 5, "running": 5}  # of fifty
RUNNING = ("run.py", "rescue.py", "rehearsal.py", "saving.py", "checkpoint.py")
SWAPS: dict[type[ast.AST], str] = {
    ast.Lt: "<=",
    ast.LtE: "<",
    ast.Gt: ">=",
    ast.GtE: ">",
    ast.Eq: "!=",
    ast.NotEq: "==",
    ast.Is: "is not",
    ast.IsNot: "is",
    ast.In: "not in",
    ast.NotIn: "in",
    ast.Add: "-",
    ast.Sub: "+",
    ast.Mult: "+",
    ast.FloorDiv: "*",
}
NAMES = {"min": "max", "max": "min", "any": "all", "all": "any", "True": "False", "False": "True"}
SECONDS = 900


@dataclass(frozen=True)
class Mutant:
    room: str
    within: str  # class and function
    before: str  # a line, without its indentation
    after: str


def mutants_of(file: Path, room: str) -> Iterator[Mutant]:
    source = file.read_text()
    lines = source.splitlines()
    for within, function in _functions(ast.parse(source), ""):
        for node in ast.walk(function):
            changed = _changed(node, lines)
            if changed is None:
                continue
            number, after = changed
            before = lines[number - 1].strip()
            if source.count(before) == 1 and len(before) > 12:
                yield Mutant(room, within, before, after.strip())


def _functions(tree: ast.AST, within: str) -> Iterator[tuple[str, ast.AST]]:
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.ClassDef):
            yield from _functions(node, f"{within}{node.name}.")
        elif isinstance(node, ast.FunctionDef):
            yield f"{within}{node.name}", node


def _changed(node: ast.AST, lines: list[str]) -> tuple[int, str] | None:
    """The line's number, and what it is to be; of what stands on one line."""
    if isinstance(node, ast.Compare) and len(node.ops) == 1:
        return _swapped(node.left, node.ops[0], node.comparators[0], lines)
    if isinstance(node, ast.BinOp):
        return _swapped(node.left, node.op, node.right, lines)
    if isinstance(node, ast.Name | ast.Constant):
        text = node.id if isinstance(node, ast.Name) else repr(node.value)
        other = NAMES.get(text)
        return None if other is None else _replaced(node, other, lines)
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        inner = ast.get_source_segment("\n".join(lines), node.operand)
        return None if inner is None else _replaced(node, inner, lines)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
        return _replaced(node, "pass", lines)
    return None


def _swapped(left: ast.expr, op: ast.AST, right: ast.expr, lines: list[str]) -> tuple[int, str] | None:
    other = SWAPS.get(type(op))
    if other is None or left.end_lineno != right.lineno:
        return None
    line = lines[right.lineno - 1]
    between = line[left.end_col_offset : right.col_offset]
    sign = between.strip(" ()")
    if not between.isascii() or not sign:
        return None
    return right.lineno, line[: left.end_col_offset] + between.replace(sign, other) + line[right.col_offset :]


def _replaced(node: ast.expr | ast.stmt, text: str, lines: list[str]) -> tuple[int, str] | None:
    if node.lineno != node.end_lineno:
        return None
    line = lines[node.lineno - 1]
    return node.lineno, line[: node.col_offset] + text + line[node.end_col_offset :]


def choose(count: int, seed: int) -> list[Mutant]:
    chosen: list[Mutant] = []
    draw = random.Random(seed)
    for room, share in SHARES.items():
        files = sorted((ROOT / "anyfit" / room).rglob("*.py"))
        if room == "running":
            files = [file for file in files if file.name in RUNNING]
        found = [mutant for file in files for mutant in mutants_of(file, room)]
        by_function: dict[str, list[Mutant]] = {}
        for mutant in found:
            by_function.setdefault(mutant.within, []).append(mutant)
        functions = draw.sample(sorted(by_function), min(round(count * share / 50), len(by_function)))
        chosen += [draw.choice(by_function[function]) for function in functions]
    return chosen


def applied(mutant: Mutant, package: Path) -> bool:
    """Whether its line was found, once, and is changed."""
    holders = [file for file in package.rglob("*.py") if file.read_text().count(mutant.before) == 1]
    if len(holders) > 1:
        name = mutant.within.rpartition(".")[2]
        holders = [file for file in holders if f"def {name}(" in file.read_text()]
    if len(holders) != 1:
        return False
    holders[0].write_text(holders[0].read_text().replace(mutant.before, mutant.after))
    return True


def tried(mutant: Mutant) -> str:
    """Caught, by which test; or not."""
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder)
        for name in ("anyfit", "tests", "benchmarks", "examples", "docs"):
            shutil.copytree(ROOT / name, copy / name, ignore=shutil.ignore_patterns("__pycache__"))
        for file in ("pyproject.toml", "README.md", "CONTRIBUTING.md"):
            shutil.copy(ROOT / file, copy)
        if not applied(mutant, copy / "anyfit"):
            return "gone"
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *TESTS[mutant.room]]
        environment = {**os.environ, "PYTHONPATH": folder}
        try:
            done = subprocess.run(
                command, cwd=copy, env=environment, capture_output=True, text=True, timeout=SECONDS, check=False
            )
        except subprocess.TimeoutExpired:
            return "caught: it does not end"
    if done.returncode == 0:
        return "not caught"
    named = [line.split(" ")[1] for line in done.stdout.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    return f"caught: {named[0] if named else done.stdout.splitlines()[-1]}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("what", choices=["choose", "try"])
    parser.add_argument("file", type=Path)
    parser.add_argument("--count", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, nargs="*")
    parser.add_argument("--part", default="1/1")
    asked = parser.parse_args()
    if asked.what == "choose":
        asked.file.write_text(json.dumps([asdict(each) for each in choose(asked.count, asked.seed)], indent=1) + "\n")
        return
    mutants = [Mutant(**each) for each in json.loads(asked.file.read_text())]
    part, parts = map(int, asked.part.split("/"))
    outcomes: dict[int, str] = {}
    for index, mutant in enumerate(mutants):
        if index % parts != part - 1 or (asked.only and index not in asked.only):
            continue
        outcomes[index] = tried(mutant)
        print(f"{index:3} {mutant.room:8} {mutant.within}: {mutant.before[:60]} -> {outcomes[index]}", flush=True)
    missed = [index for index, outcome in outcomes.items() if not outcome.startswith("caught")]
    print(f"{len(outcomes) - len(missed)} of {len(outcomes)} caught; not caught or gone: {missed}")
    sys.exit(bool(missed))


if __name__ == "__main__":
    main()
