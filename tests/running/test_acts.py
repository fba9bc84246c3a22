"""Acts that ranks make together: what a person reads of one, and that other ranks read the same one."""

from __future__ import annotations

import pytest

from anyfit.running.acts import Act, Kind


@pytest.mark.parametrize(
    ("act", "text"),
    [
        (Act(Kind.STEP, "5"), "make step 5"),
        (Act(Kind.EVALUATE), "evaluate"),
        (Act(Kind.SAVE, "a folder/save 3"), "save a folder/save 3"),
        (Act(Kind.BEGIN_TO_SAVE, "save"), "begin to save save"),
    ],
)
def test_an_act_is_read_by_people_and_by_other_ranks(act: Act, text: str) -> None:
    assert str(act) == text
    assert Act.from_json(act.to_json()) == act
