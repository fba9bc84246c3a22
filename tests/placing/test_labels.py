"""Labels of lane jobs: what a person reads in a timeline or a message, and what a timeline sorts by."""

from __future__ import annotations

import pytest

from anyfit.placing.lanes import Label, Task


@pytest.mark.parametrize(
    ("label", "text", "kind"),
    [
        (Label(Task.FETCH, 3), "fetch chunk 3", "fetch"),
        (Label(Task.FETCH, 3).awaited, "wait for fetch chunk 3", "fetch"),
        (Label(Task.ADD, 0), "add gradients of chunk 0", "add"),
        (Label(Task.OFFLOAD, name="blocks.1"), "offload blocks.1", "offload"),
        (Label(Task.FORWARD), "forward", "forward"),
    ],
)
def test_a_label_says_what_is_done_and_to_what(label: Label, text: str, kind: str) -> None:
    assert (str(label), label.kind) == (text, kind)
