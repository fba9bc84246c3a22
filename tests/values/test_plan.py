"""A plan refuses what contradicts itself, starts only where it was made for, and says why it is as it is."""

from __future__ import annotations

import json
import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from anyfit import NoPlan, Plan
from anyfit.planning import search
from anyfit.values.mesh import AXES
from anyfit.values.no_plan import Change
from anyfit.values.plan import BlockCut, Clipping, Placement, Stage
from anyfit.values.profile import Profile
from anyfit.values.units import show_bytes, show_seconds
from tests.planning.profiles import GIB, small_profile


@pytest.fixture
def plan() -> Plan:
    return search(small_profile())


@pytest.fixture
def smaller() -> Plan:
    """For a machine with less memory: more passes a step."""
    return search(small_profile(device_limit_bytes=int(1.5 * GIB)))


# ---------------------------------------------------------------------- validation


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"micro_batch": 0}, "micro_batch is 0; it must lie between 1 and batch_size (8)"),
        ({"micro_batch": 9}, "micro_batch is 9; it must lie between 1 and batch_size (8)"),
        ({"accumulation": 2}, "accumulation is 2; batch_size 8 in micro-batches of 8 makes 1"),
        ({"micro_batch": 3, "accumulation": 2}, "accumulation is 2; batch_size 8 in micro-batches of 3 makes 3"),
        (
            {"mesh": dict.fromkeys(AXES, 1) | {"sequence": 2}},
            "this version has a data, a tensor and a pipeline axis; every other",
        ),
        ({"mesh": dict.fromkeys(AXES, 1) | {"pipeline": 2}}, "1 stages on 2 ranks of a pipeline: each rank has as many, so 2, 4"),
        ({"stages": (Stage(0, 3, {}, cut={"h.0": BlockCut({})}),)}, "the plan cuts h.0, and its mesh has no tensor axis"),
        ({"mesh": dict.fromkeys(AXES, 1) | {"data": 3}}, "batch_size is 8; it must be a multiple of the 3 ranks"),
        (
            {"mesh": dict.fromkeys(AXES, 1) | {"data": 2}, "accumulation": 2},
            "accumulation is 2; batch_size 8 over 2 ranks in micro-batches of 8 makes 1",
        ),
        ({"chunks": (Placement(optimizer_shards=2),)}, "optimizer_shards is 2; it must divide the 1 ranks"),
        ({"mesh": {"dats": 1}}, "mesh: unknown axis 'dats'; did you mean 'data'?"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0; it must be at least 1"),
        ({"slots": -1}, "slots is -1; it must be at least 0"),
        ({"slots": 0, "chunks": (Placement(weights="host", optimizer="host"),)}, "pass through at least one device slot"),
    ],
)
def test_a_plan_that_contradicts_itself_is_refused(plan: Plan, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        replace(plan, **changes)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"stages": (Stage(0, 0, {}), Stage(1, 1, {}), Stage(2, 2, {}))}, "3 stages on 2 ranks of a pipeline"),
        ({"stages": (Stage(0, 0, {}, replayed=("h.0",)), Stage(1, 1, {}))}, "pipeline axis of 2, and it replays blocks"),
        ({"chunks": (Placement("host", "host", "host", "host", speculates=True),)}, "pipeline axis of 2, and chunks speculate"),
        (
            {"mesh": {"pipeline": 2, "tensor": 2}, "stages": (Stage(0, 0, {}, tables=("wte",)), Stage(1, 1, {}))},
            "pipeline axis of 2, and a tensor axis divides the rows of tables",
        ),
    ],
)
def test_what_stages_of_a_pipeline_do_not_go_with_is_refused_by_name(plan: Plan, changes: dict[str, Any], says: str) -> None:
    whole: dict[str, Any] = {"mesh": {"pipeline": 2}, "stages": (Stage(0, 0, {}), Stage(1, 1, {})), "chunks": (), "slots": 4}
    replace(plan, **whole)
    with pytest.raises(ValueError, match=re.escape(says)):
        replace(plan, **whole | changes)


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"optimizer_shards": 0}, "optimizer_shards is 0; it must be at least 1"),
        ({"weight_shards": 2}, "weight_shards is 2; it is 1, or as optimizer_shards (1)"),
        ({"gradient_shards": 2, "optimizer_shards": 4}, "gradient_shards is 2; it is 1, or as optimizer_shards (4)"),
        ({"weights": "host", "optimizer": "host", "optimizer_shards": 4}, "weight_shards is 1 and optimizer_shards 4"),
        ({"gradients": "host", "optimizer": "host", "optimizer_shards": 4}, "gradient_shards is 1 and optimizer_shards 4"),
    ],
)
def test_shards_that_contradict_each_other_are_refused(fields: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        Placement(**fields)


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_a_forecast_of_no_time_is_refused(plan: Plan, seconds: float) -> None:
    with pytest.raises(ValueError, match=r"step_seconds is .* it must be positive"):
        replace(plan.forecast, step_seconds=seconds)


def test_an_uneven_last_micro_batch_is_legal(plan: Plan) -> None:
    assert replace(plan, micro_batch=3, accumulation=3).accumulation == 3


def test_a_plan_fits_only_when_the_far_end_of_its_error_band_does(plan: Plan) -> None:
    reserved, error = plan.forecast.reserved_bytes, plan.forecast.reserved_error
    needed = int(reserved * (1 + error))
    assert needed > reserved
    assert plan.forecast.needed_bytes == needed
    for limit, fits in ((needed, True), (needed - 1, False), (reserved, False)):
        assert replace(plan, limit_bytes={"device": limit, "host": 0, "disk": 0}).fits == fits


# ---------------------------------------------------------------------- what it was made for


def test_a_plan_refuses_another_model_or_machine_and_says_what_to_type(plan: Plan) -> None:
    plan.refuse_unless_made_for("model-1", "machine-1")
    with pytest.raises(
        ValueError, match=r"another model \(Net, fingerprint model-1; here model-2\).*anyfit.plan\(job\).*unbound"
    ):
        plan.refuse_unless_made_for("model-2", "machine-1")
    with pytest.raises(ValueError, match=r"another machine \(small, fingerprint machine-1; here machine-2\)"):
        plan.refuse_unless_made_for("model-1", "machine-2")


def test_an_unbound_plan_starts_anywhere_and_is_otherwise_the_same(plan: Plan) -> None:
    unbound = plan.unbound()
    unbound.refuse_unless_made_for("model-2", "machine-2")
    assert replace(unbound, fingerprint=plan.fingerprint) == plan
    assert plan.fingerprint is not None


# ---------------------------------------------------------------------- why


def test_a_printed_plan_has_its_decisions_reasons_and_error_bands(plan: Plan) -> None:
    text = str(plan)
    for decision in plan.decisions:
        assert re.search(f"^{decision.name} +{re.escape(f'{decision.choice}: {decision.why}')}$", text, re.MULTILINE)
    assert f"{show_seconds(plan.forecast.step_seconds)} ± 25%" in text
    assert f"{show_bytes(plan.forecast.reserved_bytes)} ± 3% of 8.00 GiB" in text
    assert "Net (2.00 M parameters, 1.90 M trainable and 100 k frozen, AdamW, batch 8 x 100), fp32" in text
    assert "Net (2.00 M parameters, 1.90 M trainable and 100 k frozen), fp32" in str(replace(plan, described=""))
    for name, seconds in plan.forecast.split_seconds.items():
        assert (f"{name} {show_seconds(seconds)}" in text) == (seconds > 0)


def test_a_printed_plan_says_first_whether_it_fits_and_what_it_costs(plan: Plan) -> None:
    step, little = show_seconds(plan.forecast.step_seconds), {"device": 1, "host": 0, "disk": 0}
    moved = replace(plan.stages[0], activations={"a": "offload", "b": "recompute"})
    both = "some activations recomputed and some activations offloaded to the host"
    needed = show_bytes(plan.forecast.needed_bytes)
    for changes, says in (
        ({}, f"yes, all on the device; a step takes {step}"),
        ({"device_kind": "cuda"}, f"yes, all on the GPU; a step takes {step}"),
        ({"device_kind": "cpu"}, f"yes, all in RAM; a step takes {step}"),
        ({"chunks": (Placement(optimizer="host"),)}, f"yes, with part of the model state on the host; a step takes {step}"),
        (
            {"chunks": (Placement(gradients="host", optimizer="disk", update="host"),)},
            f"yes, with part of the optimizer state on the disk; a step takes {step}",
        ),
        ({"stages": (moved,)}, f"yes, with {both}; a step takes {step}"),
        (
            {"mesh": dict.fromkeys(AXES, 1) | {"data": 2}, "micro_batch": 4, "device_kind": "cuda"},
            f"yes on 2 GPUs, all on the GPU; a step takes {step}",
        ),
        ({"limit_bytes": little}, f"no: it needs {needed} of device memory, and 1 B are allowed"),
    ):
        each = replace(plan, **changes)  # type: ignore[arg-type]
        assert each.rows()[0] == ("fits", says)
        assert str(each).startswith("fits ")


def test_host_memory_that_a_preset_assumes_is_called_so_with_the_option_that_changes_it(plan: Plan) -> None:
    forecast = replace(plan.forecast, peak_bytes={"device": 1, "host": 3 * GIB, "disk": 0})
    text = str(replace(plan, forecast=forecast, assumes_host=True))
    assert "host memory    3.00 GiB ± 2% of 16.0 GiB, assumed by the preset (--host-memory changes it)" in text


def test_tiers_that_are_not_used_are_not_printed(plan: Plan) -> None:
    assert "host memory" not in str(plan)
    forecast = replace(plan.forecast, peak_bytes={"device": 1, "host": 3 * GIB, "disk": 0})
    text = str(replace(plan, forecast=forecast))
    assert "host memory    3.00 GiB ± 2% of 16.0 GiB" in text
    assert "\ndisk " not in text
    forecast = replace(plan.forecast, peak_bytes={"device": 1, "host": 0, "disk": 3 * GIB})
    text = str(replace(plan, forecast=forecast, limit_bytes={**plan.limit_bytes, "disk": 4 * GIB}))
    assert re.search(r"\ndisk +3\.00 GiB ± 2% of 4\.00 GiB", text)


def test_an_explanation_weighs_every_alternative(smaller: Plan) -> None:
    rows = smaller.explained(None)
    assert [label for label in rows if not label.startswith(" ")] == ["model state", "micro-batch"]
    assert len(smaller.alternatives) == 3
    for other in smaller.alternatives:
        row = rows[f"  instead, {other.choice}"]
        assert f"{show_seconds(other.step_seconds)} a step" in row
        assert f"({other.step_seconds / smaller.forecast.step_seconds - 1:+.0%})" in row
        assert show_bytes(other.device_bytes) in row
        assert ("does not fit" in row) == (not other.fits)
    assert {other.fits for other in smaller.alternatives} == {True, False}


def test_one_decision_can_be_asked_for_by_name_and_a_misspelt_one_lists_those_there_are(plan: Plan) -> None:
    assert list(plan.explained("model state")) == ["model state"]
    assert plan.decision("micro-batch").choice == "8 in one pass"
    with pytest.raises(ValueError, match="no decision 'micro-bach'; it has: model state, micro-batch"):
        plan.explained("micro-bach")


def test_the_verdict_that_nothing_fits_survives_the_way_from_another_process() -> None:
    changes = (Change("--device-memory 4B", 2.0, "on a larger GPU"), Change("--batch 1", 0.5))
    verdict = pickle.loads(pickle.dumps(NoPlan("it needs 3 B more", 3, "host", changes)))
    assert (verdict.shortfall_bytes, verdict.tier, verdict.changes) == (3, "host", changes)
    assert str(verdict).splitlines() == [
        "it needs 3 B more. It fits with one of these, at this speed or faster:",
        "  --device-memory 4B: 2.00 s a step, on a larger GPU",
        "  --batch 1: 500 ms a step",
    ]
    assert str(NoPlan("it needs 3 B more", 3)) == "it needs 3 B more"


# ---------------------------------------------------------------------- files


def test_a_saved_plan_is_the_same_plan(plan: Plan, tmp_path: Path) -> None:
    for each in (plan, plan.unbound()):
        each.save(tmp_path / "plan.json")
        assert Plan.load(tmp_path / "plan.json") == each


def test_files_from_before_jobs_were_described_are_read(plan: Plan) -> None:
    document = plan.to_json() | {"version": 5}
    for name in ("described", "device_kind", "assumes_host"):
        del document[name]
    assert Plan.from_json(document) == replace(plan, described="")
    profile = small_profile()
    older = {key: value for key, value in profile.to_json().items() if key not in ("name", "limited", "assumes_host")}
    assert Profile.from_json(json.loads(json.dumps(older))) == profile


def rename(document: dict[str, Any], old: str, new: str) -> None:
    document[new] = document.pop(old)


@pytest.mark.parametrize(
    ("edit", "says"),
    [
        (lambda plan: rename(plan, "micro_batch", "micro_bach"), ": unknown key 'micro_bach'; did you mean 'micro_batch'?"),
        (lambda plan: rename(plan["forecast"], "peak_error", "peakerror"), ".forecast: unknown key 'peakerror'; did you mean"),
        (
            lambda plan: rename(plan["limit_bytes"], "device", "devcie"),
            ".limit_bytes: unknown key 'devcie'; did you mean 'device'?",
        ),
        (lambda plan: plan["mesh"].pop("tensor"), ".mesh: missing key 'tensor'"),
        (lambda plan: plan["forecast"]["peak_bytes"].pop("disk"), ".forecast.peak_bytes: missing key 'disk'"),
        (lambda plan: plan.update(micro_batch="2"), ".micro_batch: expected int, got a string '2'"),
        (lambda plan: plan.update(precision="fp31"), ".precision: 'fp31'; did you mean 'fp32'?"),
        (lambda plan: plan.update(micro_batch=4), ": accumulation is 1; batch_size 8 in micro-batches of 4 makes 2"),
        (lambda plan: plan["forecast"].update(step_seconds=0), ".forecast: step_seconds is 0.0; it must be positive"),
    ],
)
def test_a_slip_in_a_hand_edited_plan_is_named(plan: Plan, tmp_path: Path, edit: Callable[[Any], None], says: str) -> None:
    file = tmp_path / "plan.json"
    plan.save(file)
    document = json.loads(file.read_text())
    edit(document)
    file.write_text(json.dumps(document))
    with pytest.raises(ValueError, match="^" + re.escape(f"{file}{says}")):
        Plan.load(file)


@pytest.mark.parametrize(
    ("placement", "says"),
    [
        ({"weights": "disk"}, "weights on the disk: only an optimizer's state"),
        ({"update": "host"}, "needs gradients and optimizer on the host"),
        ({"update": "host", "optimizer": "host"}, "needs gradients and optimizer on the host"),
        ({"weights": "host"}, "needs its weights there too"),
        ({"speculates": True}, "an optimizer on the device does not speculate"),
    ],
)
def test_a_placement_that_cannot_be_honoured_is_refused(placement: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Placement(**placement)


def test_a_placement_knows_its_route() -> None:
    assert Placement().route == "resident"
    assert Placement(optimizer="host").route == "streamed"
    assert Placement(gradients="host", optimizer="host", update="host").route == "host"
    assert Placement(gradients="host", optimizer="disk", update="host").route == "disk"
    assert Placement(optimizer="disk").route == "disk"


def test_a_plan_says_how_many_parameters_are_trained_and_how_many_are_frozen(plan: Plan) -> None:
    adapted = replace(plan, parameters=2_000_000, trainable=50_000, described="")
    assert adapted.frozen == 1_950_000
    assert "2.00 M parameters, 50.0 k trainable and 1.95 M frozen), fp32" in str(adapted)
    assert Plan.from_json(adapted.to_json()) == adapted
    assert "2.00 M parameters), fp32" in str(replace(adapted, trainable=2_000_000))
    with pytest.raises(ValueError, match="trainable is 3000000; it must lie between 0 and parameters"):
        replace(adapted, trainable=3_000_000)


def test_a_plan_from_before_trainable_parameters_were_counted_is_read(plan: Plan) -> None:
    document = plan.to_json()
    del document["trainable"]
    older = Plan.from_json(document | {"version": 5})
    assert older == replace(plan, trainable=None)
    assert older.frozen is None


def test_a_plan_from_before_clipped_steps_were_forecast_is_read(plan: Plan) -> None:
    document = plan.to_json()
    del document["forecast"]["clipping"]
    assert Plan.from_json(document | {"version": 3}) == plan
    with pytest.raises(ValueError, match="forecast"):
        Plan.from_json(document | {"version": 3, "forecast": None})


@pytest.mark.parametrize("changes", [{"step_seconds": 0.0}, {"redone_seconds": -1.0}, {"share": 1.5}])
def test_clipped_steps_that_cannot_be_are_refused(changes: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="seconds must be positive, and the share lie between 0 and 1"):
        Clipping(**{"step_seconds": 1.0, "redone_seconds": 1.0, "share": 0.5} | changes)
