"""A host that falls behind is helped: chunks of its are updated on the device, with the same bits."""

from __future__ import annotations

import random
import re
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing.lanes import SPARED, Lane, Ticket, Track
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, ON_HOST, STREAMED, chunk_count, hand_written, started

ROWS, STEPS, CHUNK_BYTES = 4, 8, 4096


def slow_host(seed: int) -> Callable[[], None]:
    generator = random.Random(seed)

    def delay() -> None:
        if threading.current_thread().name == "anyfit host updates":
            time.sleep(0.002)
        elif generator.random() < 0.3:
            time.sleep(generator.random() * 0.0005)

    return delay


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("placement", [ON_HOST, AWAY])
@pytest.mark.parametrize(("clip_norm", "accumulation"), [(None, 1), (0.3, 1), (0.3, 2)])
def test_a_slow_host_is_helped_and_the_weights_are_those_of_plain_pytorch(
    precision: Any, speculates: bool, placement: Any, clip_norm: float | None, accumulation: int
) -> None:
    job = anyfit.Job(
        model=tiny_gpt,
        loss=next_byte_loss,
        sample=byte_batches(1, ROWS)[0],
        batch_size=ROWS,
        micro_batch=ROWS // accumulation,
        precision=precision,
        clip_norm=clip_norm,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    count = chunk_count(job, CHUNK_BYTES)
    placements = [replace(placement, speculates=speculates)] * (count - 1) + [STREAMED]
    plan = hand_written(job, *placements, chunk_bytes=CHUNK_BYTES, slots=8, accumulation=accumulation)
    batches = byte_batches(STEPS, ROWS)
    with started(job, plan, slow_host(accumulation)) as run:
        timeline = run.record()
        losses = [float(run.step(batch)) for batch in batches]
        mine = run.state_dict()
        events = timeline.document("a test")["traceEvents"]
    lifted = {int(found[1]) for event in events if (found := re.match(r"lift state of chunk (\d+)", event["name"]))}
    assert lifted - {count - 1}, "nothing of the host's was streamed"
    plain_losses, plain = train_plainly(job, batches, accumulation)
    assert losses == pytest.approx(plain_losses, abs=1e-6)
    assert_bit_equal(mine, plain)


def test_the_most_urgent_jobs_are_left_to_the_lane_itself() -> None:
    held, done = Ticket(), list[str]()
    host = Lane(None, Track("host", None), depth=1)
    helper = Lane(None, Track("first", None), Track("second", None), depth=2, helps=host)
    blocking = host.run(held.wait, label="blocks")  # the host is at work on it
    time.sleep(0.05)
    count = SPARED + 3
    for order in reversed(range(count)):  # given with the least urgent first
        host.run(
            lambda order=order: done.append(f"host {order}"),
            order=order,
            instead=[(lambda: None, "up"), (lambda order=order: done.append(f"helper {order}"), "down")],
        )
    deadline = time.monotonic() + 10
    while len(done) < count - SPARED and time.monotonic() < deadline:
        time.sleep(0.001)
    time.sleep(0.05)
    assert sorted(done) == [f"helper {order}" for order in range(SPARED, count)]
    held.resolve()
    blocking.wait()
    host.close()
    helper.close()
    assert done[count - SPARED :] == [f"host {order}" for order in range(SPARED)]


def test_a_job_that_only_its_own_lane_can_do_stays_there() -> None:
    held, done = Ticket(), list[int]()
    host = Lane(None, Track("host", None), depth=1)
    helper = Lane(None, Track("first", None), depth=2, helps=host)
    host.run(held.wait, label="blocks")
    tickets = [host.run(lambda order=order: done.append(order), order=order) for order in (4, 2, 3, 0, 1)]
    own = helper.run(lambda: None)
    own.wait()
    time.sleep(0.05)
    assert done == []
    held.resolve()
    for ticket in tickets:
        ticket.wait()
    assert done == sorted(done)
    host.close()
    helper.close()
