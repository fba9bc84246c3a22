"""`anyfit check` on a GPU: planned for a part of its memory, measured, and compared with plain PyTorch."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from anyfit import cli
from anyfit.values.check import Check

pytestmark = pytest.mark.gpu


def test_a_check_measures_what_was_planned_and_agrees_with_plain_pytorch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path))
    asked = ("check", "gpt2-xl", "--batch", "4", "--seq", "512", "--device-memory", "8GiB", "--steps", "5", "--json")
    monkeypatch.setattr(sys, "argv", ["anyfit", *asked])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    said = capsys.readouterr()
    assert not ended.value.code, said.err
    found = Check.from_json(json.loads(said.out))
    assert found.parity is not None
    assert found.parity.agrees
