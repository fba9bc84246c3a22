"""A machine's curves and limits."""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from anyfit import Machine
from anyfit.values.machine import Curve, Limits
from anyfit.values.units import parse_bytes
from tests.machines import GIB, constant, small_disk, small_machine

from .strategies import curves, positive

CLOSE = 1 + 1e-9


# ---------------------------------------------------------------------- curves


@given(curves(), st.floats(0, 1), st.data())
def test_a_curve_is_a_straight_line_on_logarithmic_axes_between_its_points(
    curve: Curve, share: float, data: st.DataObject
) -> None:
    assume(len(curve.points) > 1)
    (left, rate_left), (right, rate_right) = data.draw(st.sampled_from(list(itertools.pairwise(curve.points))))
    assume(right / left > 1.001)
    size = left ** (1 - share) * right**share
    assert curve.at(size) == pytest.approx(rate_left ** (1 - share) * rate_right**share, rel=1e-6)


@given(curves())
def test_a_curve_meets_its_points(curve: Curve) -> None:
    for size, rate in curve.points:
        assert curve.at(size) == pytest.approx(rate, rel=1e-9)


@given(curves(), st.floats(1, 1e6))
def test_a_curve_is_constant_outside_its_points(curve: Curve, factor: float) -> None:
    assert curve.at(curve.points[0][0] / factor) == curve.points[0][1]
    assert curve.at(curve.points[-1][0] * factor) == pytest.approx(curve.points[-1][1], rel=1e-9)


@given(curves(), positive, positive)
def test_rising_points_make_a_rising_curve(curve: Curve, one: float, other: float) -> None:
    sizes, rates = zip(*curve.points, strict=True)
    rising = replace(curve, points=tuple(zip(sizes, sorted(rates), strict=True)))
    small, large = sorted([one, other])
    assert rising.at(small) <= rising.at(large) * CLOSE


@given(curves(), positive)
def test_a_curve_never_leaves_the_range_of_its_points(curve: Curve, size: float) -> None:
    rates = [rate for _, rate in curve.points]
    assert min(rates) / CLOSE <= curve.at(size) <= max(rates) * CLOSE
    assert curve.peak == max(rates)


@pytest.mark.parametrize(
    ("points", "complaint"),
    [
        ((), "needs points with ascending sizes"),
        (((2.0, 1.0), (1.0, 1.0)), "needs points with ascending sizes"),
        (((1.0, 1.0), (1.0, 2.0)), "needs points with ascending sizes"),
        (((0.0, 1.0),), "are positive"),
        (((1.0, 0.0),), "are positive"),
    ],
)
def test_points_that_make_no_curve_are_refused(points: tuple[tuple[float, float], ...], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        Curve(points, 0.0, "measured")


# ---------------------------------------------------------------------- devices


@pytest.mark.parametrize("name", ["matmul", "matmul_unaligned", "attention", "attention_backward", "convolution"])
def test_a_misspelt_dtype_is_refused_and_the_nearest_named(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name}: unknown dtype 'bfloat17'; did you mean 'bfloat16'"):
        replace(small_machine().device, **{name: {"bfloat17": constant(1.0)}})


def test_a_misspelt_op_is_refused_and_the_nearest_named() -> None:
    document = small_machine().to_json()
    document["device"]["operations"] = {"native_layernorm": document["device"]["memory"]}
    with pytest.raises(ValueError, match=r"machine\.device: operations: unknown op .* did you mean 'native_layer_norm'"):
        Machine.from_json(document)


def test_a_device_without_products_is_refused() -> None:
    with pytest.raises(ValueError, match="matmul: needs the curve of a dtype"):
        replace(small_machine().device, matmul={})


# ---------------------------------------------------------------------- limits


@pytest.fixture
def machine() -> Machine:
    return replace(small_machine(device_bytes=8 * GIB), disk=small_disk())


def test_without_limits_all_there_is_may_be_used(machine: Machine) -> None:
    assert machine.device_limit_bytes == machine.host_limit_bytes == 8 * GIB
    assert machine.disk_limit_bytes == 100 * GIB
    assert small_machine().disk_limit_bytes == 0


def test_each_limit_caps_its_own_tier(machine: Machine) -> None:
    limited = machine.with_limits(device_memory="1.5GiB", host_memory=3 * GIB, disk="64 GB")
    assert limited.device_limit_bytes == 3 * GIB // 2
    assert limited.host_limit_bytes == 3 * GIB
    assert limited.disk_limit_bytes == 64 * 10**9
    assert machine.limits == Limits()


def test_a_limit_not_given_stays_as_it_was(machine: Machine) -> None:
    limited = machine.with_limits(device_memory="2GiB").with_limits(host_memory="1GiB")
    assert limited.limits == Limits(device_bytes=2 * GIB, host_bytes=GIB)
    assert limited.with_limits() == limited


@pytest.mark.parametrize("limit", ["8.1GiB", 8 * GIB + 1])
def test_a_limit_beyond_what_is_there_is_an_error_that_says_how_to_plan_for_it(machine: Machine, limit: str | int) -> None:
    for name in ("device_memory", "host_memory"):
        with pytest.raises(ValueError, match=r"a limit of .* where small has 8.00 GiB of (device|host) memory; ") as error:
            machine.with_limits(**{name: limit})
        typed = re.search(r"machine\.as_if\(.*?\)", str(error.value))
        assert typed is not None
        larger = eval(typed[0], {"machine": machine})
        assert getattr(larger, name.replace("_memory", "_limit_bytes")) == parse_bytes(limit)
    assert machine.with_limits(device_memory="8GiB").device_limit_bytes == 8 * GIB


@pytest.mark.parametrize("limit", [0, "0", "0GiB"])
def test_a_limit_of_nothing_is_refused(machine: Machine, limit: str | int) -> None:
    with pytest.raises(ValueError, match=f"host_memory {limit}: give more than nothing"):
        machine.with_limits(host_memory=limit)


def test_a_machine_may_be_planned_for_as_if_it_had_more_and_says_so(machine: Machine) -> None:
    larger = machine.as_if(device_memory="12GiB", host_memory="128GiB", disk="1TiB")
    assert (larger.device_limit_bytes, larger.host_limit_bytes, larger.disk_limit_bytes) == (12 * GIB, 128 * GIB, 1024 * GIB)
    assert larger.beyond(machine) == [
        "small is described with 8.00 GiB of device memory; planning for 12.0 GiB as you asked",
        "small is described with 8.00 GiB of host memory; planning for 128 GiB as you asked",
        "small is described with 100 GiB of disk; planning for 1.00 TiB as you asked",
    ]
    assert machine.lacks({"host": "9GiB", "disk": "100GiB"}) == ["host"]
    assert small_machine().lacks({"disk": "1GiB"}) == ["disk"]
    smaller = machine.as_if(device_memory="1GiB", host_memory="2GiB")
    assert smaller == machine.with_limits("1GiB", "2GiB")
    assert smaller.beyond(machine) == []
    assert machine.as_if() == machine


def test_host_memory_as_if_is_for_each_process_of_a_node() -> None:
    node = Machine.load("h100-node")
    larger = node.as_if(host_memory="295GiB")
    assert larger.host.memory_bytes.value == 8 * 295 * GIB
    assert larger.host_limit_bytes == 295 * GIB
    (said,) = larger.beyond(node)
    assert said == "h100-node is described with 251 GiB of host memory for each of 8 processes; planning for 295 GiB as you asked"


def test_a_limit_on_a_disk_nobody_measured_says_how_to_measure_it() -> None:
    with pytest.raises(ValueError, match="measure it with: anyfit probe"):
        small_machine().with_limits(disk="1GiB")


@pytest.mark.parametrize("limit", ["lots", "-1GiB", 2.5])
def test_a_limit_that_is_no_size_is_an_error_that_shows_how_to_write_one(machine: Machine, limit: object) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{limit!r} is not a size")):
        machine.with_limits(device_memory=limit)  # type: ignore[arg-type]


def test_a_limit_in_a_file_that_is_more_than_there_is_does_not_make_more(machine: Machine) -> None:
    assert replace(machine, limits=Limits(device_bytes=99 * GIB)).device_limit_bytes == 8 * GIB


def test_a_fingerprint_is_of_the_parts_and_not_of_their_speed_or_limits(machine: Machine) -> None:
    slower = replace(machine, device=replace(machine.device, memory=constant(1.0)), date="2030-01-01", comment="hot day")
    assert slower.with_limits(device_memory="1GiB").fingerprint == machine.fingerprint
    others = [small_machine(device_bytes=16 * GIB), small_machine(cores=64), replace(machine, nodes=2)]
    assert len({machine.fingerprint, *(other.fingerprint for other in others)}) == 4


# ---------------------------------------------------------------------- files written before


def test_a_file_that_calls_the_measurement_error_spread_is_read(machine: Machine) -> None:
    document = json.loads(json.dumps(machine.to_json()).replace('"measurement_error"', '"spread"'))
    assert Machine.from_json(document) == machine


def test_a_figure_with_both_names_of_its_error_is_refused(machine: Machine) -> None:
    document = json.loads(json.dumps(machine.to_json()))
    document["host"]["memory_bytes"]["spread"] = 0.1
    with pytest.raises(ValueError, match=r"host\.memory_bytes: unknown key 'spread'"):
        Machine.from_json(document)


def test_a_file_from_before_reads_and_writes_were_measured_together_has_them_take_turns() -> None:
    machine = replace(small_machine(), disk=small_disk(read=3e9, write=1.5e9))
    document = machine.to_json()
    for key in ("both", "endurance_bytes"):
        del document["disk"][key]
    disk = Machine.from_json(document).disk
    assert disk is not None
    assert disk.both.peak == pytest.approx(2e9)  # a byte each way takes 1/3 and 2/3 ns
    assert disk.both.source.startswith("assumed")
    assert disk.endurance_bytes.source.startswith("assumed")
    assert Machine.from_json(machine.to_json()) == machine
