"""What the documents and examples show works as shown."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from anyfit import cli

ROOT = Path(__file__).parent.parent


def blocks(language: str, document: str = "README.md") -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / document).read_text(), re.DOTALL)


def run(command: list[str], folder: Path) -> str:
    own = {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "COLUMNS": "130"}
    environment = os.environ | own
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


@pytest.mark.parametrize(
    "block",
    [
        block
        for file in ("README.md", "docs/using.md", "docs/trainer.md", "docs/lightning.md")
        for block in blocks("python", file)
    ],
)
def test_every_python_block_of_a_document_runs(block: str, tmp_path: Path) -> None:
    run([sys.executable, "-W", "error", "-c", block], tmp_path)


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[[list[str]], str]:
    """Runs a command line, in this process where it trains nothing: Python needs seconds to begin."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "130")
    monkeypatch.setattr(sys, "path", list(sys.path))

    def output_of(words: list[str]) -> str:
        assert words[0] == "anyfit"
        if words[1] == "fit":
            return run([sys.executable, "-m", *words], tmp_path)
        monkeypatch.setattr(sys, "argv", words)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said, wrong = capsys.readouterr()
        assert ended.value.code in (None, 0), f"{words}: {said}{wrong}"
        return said

    return output_of


@pytest.mark.parametrize("document", ["docs/using.md", "docs/planning.md"])
def test_every_command_of_a_document_runs_in_order(document: str, command: Callable[[list[str]], str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in "".join(blocks("bash", document)).splitlines():
        assert command(line.partition("#")[0].split())


def test_the_plan_that_the_readme_shows_is_the_one_that_is_made(command: Callable[[list[str]], str]) -> None:
    shown = next(block for block in blocks("text") if block.startswith("$ "))
    asked, _, answer = shown.partition("\n")
    said = command(asked.removeprefix("$ ").split())
    assert [line.rstrip() for line in said.splitlines()] == answer.splitlines()


@pytest.mark.parametrize("target", re.findall(r"^make (\S+)", "\n".join(blocks("console")), re.MULTILINE))
def test_every_make_target_of_the_readme_exists(target: str) -> None:
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("example", sorted((ROOT / "examples").glob("*.py")), ids=lambda path: path.name)
def test_every_example_runs_and_learns(example: Path, tmp_path: Path) -> None:
    output = run([sys.executable, str(example)], tmp_path)
    losses = [float(loss) for loss in re.findall(r"loss (\d+\.\d+)", output)]
    if losses:
        assert losses[-1] < losses[0] / 2


def test_the_slurm_example_is_valid_shell() -> None:
    subprocess.run(["bash", "-n", str(ROOT / "examples" / "slurm.sbatch")], check=True)


def test_the_plain_example_differs_from_plain_pytorch_by_at_most_six_lines() -> None:
    plain, ours = (
        [line for line in (ROOT / "examples" / name).read_text().split('"""', 2)[2].splitlines() if line.strip()]
        for name in ("plain_pytorch.py", "plain.py")
    )
    changes = list(difflib.ndiff(plain, ours))
    added, removed = (sum(line.startswith(sign) for line in changes) for sign in "+-")
    assert added <= 6
    assert removed <= 6


def test_links_in_the_documents_lead_somewhere() -> None:
    for document in [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\(([^)#]+)\)", document.read_text()):
            if "://" not in link:
                assert (document.parent / link).exists(), f"{document.name}: {link}"
