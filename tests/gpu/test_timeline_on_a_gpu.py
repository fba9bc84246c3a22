"""A timeline on a GPU: streams by their events, the host's lane by its clock, all on one axis."""

from __future__ import annotations

import time

import pytest
import torch

from anyfit.placing.timeline import FIRST, LAST
from anyfit.values.plan import Placement
from tests.models import byte_batches
from tests.plans import AWAY, hand_written, started
from tests.running.test_timeline import KINDS, MAY_BE, ROWS, check, job_for, recorded, spans_of

pytestmark = pytest.mark.gpu
CLOCKS = 200.0  # microseconds by which those of host and device may be apart


@pytest.mark.parametrize("placement", KINDS, ids=lambda each: f"{each.route}, weights on the {each.weights}, {each.speculates}")
def test_every_lane_that_worked_is_there_in_its_order(placement: Placement) -> None:
    document, _ = recorded(hand_written(job_for(), placement, chunk_bytes=8192, slots=8), device="cuda")
    check(document, CLOCKS)
    spans = spans_of(document)
    spans.pop("steps")
    assert {name: {span["cat"] for span in of} - MAY_BE for name, of in spans.items()} == KINDS[placement]


def test_recorded_steps_take_as_long_as_the_hosts_clock_says() -> None:
    with started(job_for(), hand_written(job_for(), AWAY, chunk_bytes=8192, slots=8), device="cuda") as run:
        timeline = run.record()
        for step, batch in enumerate(byte_batches(LAST, ROWS), 1):
            if step == FIRST:
                torch.cuda.synchronize()
                began = time.perf_counter()
            run.step(batch)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - began
        about = timeline.document("a test")["metadata"]
    assert about["step_seconds"] * (LAST - FIRST + 1) == pytest.approx(seconds, rel=0.2)
