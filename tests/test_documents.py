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


@pytest.mark.parametrize(
    "document",
    ["docs/using.md", *(pytest.param(f"docs/{name}.md", marks=pytest.mark.full) for name in ("planning", "out-of-memory"))],
)
def test_every_command_of_a_document_runs_in_order(document: str, command: Callable[[list[str]], str], tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for line in "".join(blocks("bash", document)).splitlines():
        assert command(line.partition("#")[0].split())


def test_the_plan_that_the_readme_shows_is_the_one_that_is_made(command: Callable[[list[str]], str]) -> None:
    shown = next(block for block in blocks("text") if block.startswith("$ "))
    asked, _, answer = shown.partition("\n")
    lines = [line.rstrip() for line in command(asked.removeprefix("$ ").split()).splitlines()]
    said, *pieces = "\n".join(["", *lines, ""]), *answer.split("…\n")  # lines between these are left out
    for piece in pieces:
        _, found, said = said.partition(f"\n{piece}")
        assert found, piece
        said = f"\n{said}"


def test_every_line_that_a_plan_may_have_is_explained() -> None:
    sources = [path.read_text() for path in (ROOT / "anyfit").rglob("*.py")]
    decided = {name for source in sources for name in re.findall(r"\bDecision\(\s*\"([^\"]+)\"", source)}
    table = (ROOT / "docs" / "planning.md").read_text().partition("## How to read a plan")[2].partition("\n## ")[0]
    explained = {name for row in re.findall(r"^\| (.*?) \|", table, re.MULTILINE) for name in row.split(", ")}
    plan = next(block for block in blocks("text") if block.startswith("$ "))
    shown = {name.strip() for name in re.findall(r"^(\w[\w ]*?)  ", plan, re.MULTILINE)}
    assert len(decided) > 15
    assert decided | shown <= explained


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


def anchors_of(document: Path) -> set[str]:
    """What a link may name of a page: each heading in small letters, without punctuation, with dashes between its words."""
    text = re.sub(r"```.*?```", "", document.read_text(), flags=re.DOTALL)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")], ids=lambda path: path.name)
def test_links_in_a_document_lead_to_a_file_and_to_a_heading_of_it(document: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", document.read_text()):
        if "://" not in link:
            page, _, heading = link.partition("#")
            target = (document.parent / page) if page else document
            assert target.exists(), link
            assert not heading or heading in anchors_of(target), link


def test_every_page_is_in_the_site() -> None:
    named = re.findall(r"^ +- ([\w-]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.MULTILINE)
    assert sorted(named) == sorted(["index.md", *(path.name for path in (ROOT / "docs").glob("*.md"))])


@pytest.mark.full
def test_the_documents_make_a_site_in_which_every_link_leads_to_a_page(tmp_path: Path) -> None:
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(ROOT / "mkdocs.yml")]
    run([*build, "--site-dir", str(tmp_path)], ROOT)
    pages = {path.name for path in tmp_path.glob("*.html")}
    assert pages == {"404.html", "index.html", *(f"{path.stem}.html" for path in (ROOT / "docs").glob("*.md"))}
    for page in pages:
        shown = (tmp_path / page).read_text()
        assert not re.findall(r'href="[^":]*\.(?:md|py|json)[#"]', shown), page
        assert not re.findall(r"<(?:script|link|img)[^>]*(?:src|href)=.https?:", shown), page  # nothing is fetched from elsewhere
