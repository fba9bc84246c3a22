"""What is being done, on a terminal; nothing elsewhere."""

from __future__ import annotations

import io
import os
import pty
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyfit.showing import status
from anyfit.showing.status import status_line
from anyfit.values.doing import doing, heard_by, is_heard, make_way

ROOT = Path(__file__).parents[2]


@pytest.fixture
def terminal() -> Iterator[tuple[io.TextIOWrapper, int]]:
    """One to write to, and where what was written is read."""
    shown, written = pty.openpty()
    with os.fdopen(written, "w") as file:
        yield file, shown
    os.close(shown)


def lines(shown: bytes) -> list[str]:
    """What stood in the line, one after another, without the seconds."""
    drawn = re.split(r"[\r\n]+(?:\x1b\[2K)?", shown.decode())
    return [re.sub(r", \d+ s$", "", each) for each in drawn]


def test_the_line_says_what_is_done_and_is_gone_afterwards(terminal: tuple[io.TextIOWrapper, int]) -> None:
    file, shown = terminal
    with status_line(file):
        with doing("planning"), doing("tracing"):
            pass
        with doing("building"):
            make_way()
    said = lines(os.read(shown, 4096))
    assert [each for each in said if each] == [f"anyfit: {each}" for each in ("planning", "tracing", "planning", "building")]
    assert said[-1] == ""
    assert not is_heard()


def test_the_seconds_pass_while_something_takes_long(
    terminal: tuple[io.TextIOWrapper, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file, shown = terminal
    monkeypatch.setattr(status, "EVERY_SECONDS", 0.01)
    with status_line(file), doing("building"):
        os.read(shown, 4096)
        make_way()
        time.sleep(0.1)
        assert "anyfit: building" in lines(os.read(shown, 4096))  # again, below what was printed


def test_nothing_is_shown_where_there_is_no_terminal_or_by_other_ranks(
    terminal: tuple[io.TextIOWrapper, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = io.StringIO()
    with status_line(plain), doing("planning"):
        assert not is_heard()
    assert plain.getvalue() == ""
    monkeypatch.setenv("RANK", "1")
    with status_line(terminal[0]), doing("planning"):
        assert not is_heard()


def test_what_shows_it_already_is_the_only_one_that_does(terminal: tuple[io.TextIOWrapper, int]) -> None:
    heard: list[str | None] = []
    with heard_by(heard.append), status_line(terminal[0]), doing("planning"):
        pass
    assert heard == ["planning", None]


def test_an_error_leaves_nothing_under_way() -> None:
    heard: list[str | None] = []
    with pytest.raises(ValueError, match="no"), doing("planning"):
        raise ValueError("no")
    with heard_by(heard.append), doing("building"):
        pass
    assert heard == ["building", None]


@pytest.mark.full
def test_plan_on_a_terminal_shows_what_it_does_and_prints_the_same() -> None:
    shown, written = pty.openpty()
    command = [sys.executable, "-m", "anyfit", "plan", "gpt2-small", "--machine", "h200", "--batch", "1"]
    with_terminal = subprocess.run(command, stdout=subprocess.PIPE, stderr=written, check=True, cwd=ROOT)
    said = lines(os.read(shown, 2**16))
    os.close(written)
    os.close(shown)
    for each in ("loading torch", "making the job", "tracing the model", "looking for the fastest plan"):
        assert f"anyfit: {each}" in said
    quiet = subprocess.run(command, capture_output=True, check=True, cwd=ROOT)
    assert quiet.stdout == with_terminal.stdout
    assert quiet.stderr == b""
