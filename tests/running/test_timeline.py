"""A recorded run is the same run, and what was recorded is what its lanes did."""

from __future__ import annotations

import itertools
import json
import time
from typing import Any

import pytest
import torch

import anyfit
from anyfit.placing import activations
from anyfit.placing.timeline import FIRST, LAST
from anyfit.values.plan import Placement
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal
from tests.plans import AWAY, AWAY_ON_DISK, ON_HOST, RESIDENT, STREAMED, hand_written, placed_of, random_delays, started

ROWS, STEPS = 4, LAST + 2
SPECULATES = Placement(weights="host", gradients="host", optimizer="host", update="host", speculates=True)
PASS = {"forward", "backward", "norm"}
# By placement, what is seen of each lane.
MAY_BE = {"wait", "finish"}  # finish: moments that wait for weights, where the host had time for them
KINDS: dict[Placement, dict[str, set[str]]] = {
    RESIDENT: {"compute": PASS | {"update"}},
    STREAMED: {"compute": PASS, "state uploads": {"lift"}, "updates": {"update"}, "state downloads": {"lower"}},
    ON_HOST: {"compute": PASS, "downloads": {"gradients"}, "host updates": {"update"}, "fresh weights": {"upload"}},
    AWAY: {"compute": PASS, "downloads": {"gradients"}, "host updates": {"update"}, "uploads": {"fetch"}},
    AWAY_ON_DISK: {
        "compute": PASS,
        "downloads": {"gradients"},
        "disk reads": {"read"},
        "host updates": {"update"},
        "disk writes": {"write"},
        "uploads": {"fetch"},
    },
    SPECULATES: {
        "compute": PASS,
        "downloads": {"gradients"},
        "host updates": {"speculate"},
        "fresh weights": {"commit"},
        "uploads": {"fetch"},
    },
}


def job_for() -> anyfit.Job:
    def optimizer(model: Any) -> Any:
        return torch.optim.AdamW(model.parameters(), lr=1e-3)

    sample = byte_batches(1, ROWS)[0]
    return anyfit.Job(model=tiny_gpt, loss=next_byte_loss, optimizer=optimizer, sample=sample, batch_size=ROWS, precision="bf16")


def spans_of(document: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    names = {event["tid"]: event["args"]["name"] for event in document["traceEvents"] if event["name"] == "thread_name"}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in names.values()}
    for event in document["traceEvents"]:
        if event["ph"] == "X":
            found[names[event["tid"]]].append(event)
    return found


def recorded(plan: anyfit.Plan, delay: Any = None, device: str = "cpu") -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    with started(job_for(), plan, delay, device) as run:
        timeline = run.record()
        for batch in byte_batches(STEPS, ROWS):
            run.step(batch)
        return timeline.document("a test"), run.state_dict()


def check(document: dict[str, Any], clocks_differ_by: float = 0.0) -> None:
    """What holds of every timeline; clocks of host and device may differ by so many microseconds."""
    assert json.loads(json.dumps(document)) == document
    about = document["metadata"]
    whole = (about["steps"][1] - about["steps"][0] + 1) * about["step_seconds"] * 1e6
    for name, spans in spans_of(document).items():
        assert spans, name
        for span, after in itertools.pairwise(spans):
            assert span["ts"] + span["dur"] <= after["ts"] + 1e-3, (name, span, after)
        assert all(span["ts"] >= 0 and span["ts"] + span["dur"] <= whole + 1e-3 for span in spans), name
    assert set(about["busy"]) == set(spans_of(document)) - {"steps"}
    assert all(0 <= share <= 1 for share in [*about["busy"].values(), about["still"], *about["waits"].values()])
    assert about["still"] == pytest.approx(1 - about["busy"]["compute"])
    assert sum(about["waits"].values()) <= about["still"] + 1e-9
    _check_order(spans_of(document), clocks_differ_by)


def _check_order(spans: dict[str, list[dict[str, Any]]], tolerance: float) -> None:
    """A chunk is not updated on the host while its gradients are still on their way."""
    for update in spans.get("host updates", []):
        chunk = update["name"].partition("chunk")[2]
        for copy in spans.get("downloads", []):
            if update["cat"] == "update" and copy["name"] == f"gradients of chunk{chunk}":
                before = copy["ts"] + copy["dur"] <= update["ts"] + tolerance
                after = update["ts"] + update["dur"] <= copy["ts"] + tolerance
                assert before or after, (update, copy)


@pytest.mark.parametrize("placement", KINDS, ids=lambda each: f"{each.route}, weights on the {each.weights}, {each.speculates}")
def test_a_recorded_run_gives_the_same_weights_and_shows_every_lane_that_worked(placement: Placement) -> None:
    job = job_for()
    plan = hand_written(job, placement, chunk_bytes=8192, slots=8)
    with started(job, plan) as run:
        for batch in byte_batches(STEPS, ROWS):
            run.step(batch)
        expected = run.state_dict()
    document, weights = recorded(plan, random_delays(1))
    assert_bit_equal(weights, expected)
    check(document)
    spans = spans_of(document)
    assert [span["name"] for span in spans.pop("steps")] == [f"step {step}" for step in range(FIRST, LAST + 1)]
    assert {name: {span["cat"] for span in of} - MAY_BE for name, of in spans.items()} == KINDS[placement]
    if placement is AWAY:
        with started(job, plan) as run:
            chunks = len(placed_of(run).state.chunks)
        labels = {span["name"] for of in spans.values() for span in of}
        for index in range(chunks):
            assert {f"fetch chunk {index}", f"gradients of chunk {index}", f"update chunk {index}"} <= labels


def test_sums_of_micro_batches_and_moved_activations_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(activations, "LEAST_BYTES", 256)
    plan = hand_written(job_for(), AWAY, chunk_bytes=8192, slots=8, accumulation=2, activations={"blocks.1": "offload"})
    document, _ = recorded(plan)
    check(document)
    spans = spans_of(document)
    assert {span["cat"] for span in spans["host updates"]} - {"finish"} == {"add", "update"}
    assert "offload blocks.1" in {span["name"] for span in spans["downloads"]}
    assert "return blocks.1" in {span["name"] for span in spans["uploads"]}


def test_slow_lanes_are_seen_as_a_computation_that_stands_still() -> None:
    plan = hand_written(job_for(), AWAY, chunk_bytes=8192, slots=4, prefetch=0)
    quick, _ = recorded(plan)
    slow, _ = recorded(plan, lambda: time.sleep(0.003))
    assert slow["metadata"]["still"] > max(quick["metadata"]["still"], 0.5)
    assert set(slow["metadata"]["waits"]) >= {"fetch"}
    assert sum(slow["metadata"]["waits"].values()) > 0.4


def test_a_run_that_ends_early_shows_what_it_has_and_nobody_is_marked_afterwards() -> None:
    plan = hand_written(job_for(), AWAY, chunk_bytes=8192, slots=8)
    with started(job_for(), plan) as run:
        timeline = run.record()
        lanes = placed_of(run).lanes
        for step, batch in enumerate(byte_batches(FIRST, ROWS), 1):
            assert not timeline.has_steps
            run.step(batch)
            assert (lanes.mark is None) == (step < FIRST - 1)
        assert timeline.has_steps
        assert not timeline.is_done
        document = timeline.document("a test")
        check(document)
        assert document["metadata"]["steps"] == [FIRST, FIRST]
        assert {lanes.mark, *(track.mark for track in lanes.tracks)} == {None}


def test_an_error_in_a_recorded_step_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = hand_written(job_for(), ON_HOST, chunk_bytes=8192)
    with started(job_for(), plan) as run:
        timeline = run.record()
        for index, batch in enumerate(byte_batches(LAST, ROWS), 1):
            if index == FIRST + 1:
                with monkeypatch.context() as broken:
                    broken.setattr(run.model, "forward", lambda *_: 1 / 0)
                    with pytest.raises(ArithmeticError):
                        run.step(batch)
            run.step(batch)
        assert timeline.is_done
        check(timeline.document("a test"))
