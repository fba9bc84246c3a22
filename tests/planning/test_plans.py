"""docs/plans.md says what the planner does."""

from __future__ import annotations

import pytest

from anyfit import NoPlan
from benchmarks.plans import GPUS, PAGE, RIGHT, decisions_of, plan_of
from tests.conftest import FULL

SOME = [("llama-8b", 8)]


@pytest.mark.parametrize(("model", "gpus"), [(model, gpus) for model in RIGHT for gpus in GPUS] if FULL else SOME)
def test_a_plan_of_the_page_is_made_so_today(model: str, gpus: int) -> None:
    text = PAGE.read_text()
    assert f"| {model} | {gpus} |" in text
    section = text.partition(f"## {model} on {gpus}\n")[2].partition("\n## ")[0]
    found = plan_of(model, gpus)
    if isinstance(found, NoPlan):
        assert str(found) in section
        return
    assert found.fits
    assert found.ranks == gpus
    for line in decisions_of(found):
        assert line in section
