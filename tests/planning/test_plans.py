"""docs/plans.md says what the planner does."""

from __future__ import annotations

import pytest

from anyfit import NoPlan
from benchmarks.plans import GPUS, KINDS, MANY, PAGE, RIGHT, decisions_of, experts_table, kinds_row, plan_of
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
    _, opened, folded = section.partition("<details ")
    assert opened  # what is long is out of sight
    for line in decisions_of(found):
        assert line in folded


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("gpus", MANY)
@pytest.mark.parametrize("model", RIGHT)
def test_a_row_of_another_kind_of_machine_is_planned_so_today(model: str, gpus: int, kind: str) -> None:
    assert kinds_row(model, gpus, kind) in PAGE.read_text()


def test_the_page_has_what_experts_did_as_the_page_on_accuracy_has_it() -> None:
    assert experts_table() in PAGE.read_text()
