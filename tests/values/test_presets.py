"""The machines that come with anyfit, and how a machine is cut and grown by hand."""

from __future__ import annotations

import dataclasses
import datetime
import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from anyfit.values.calibration import Figure
from anyfit.values.machine import Curve, Machine
from anyfit.values.prices import Price, prices_of, typical_prices
from benchmarks import record

GIB = 2**30
SINGLE = (
    *("rtx-3090", "rtx-4090", "rtx-5090", "rtx-a6000", "rtx-pro-6000", "t4", "a10g", "l4", "l40s"),
    *("a100-40", "a100-80", "h100", "h200", "mi300x"),
)
# GPUs by node: those of one host whose presets say more than a count, then those that are like a single one.
NODES = {"a100-node": 8, "h100-node": 8, "b200-node": 8, "gb200-node": 4}
LIKE = {
    "t4-x4": ("t4", 4), "a10g-x4": ("a10g", 4), "l4-x4": ("l4", 4), "l40s-x4": ("l40s", 4), "l40s-x8": ("l40s", 8),
    "rtx-a6000-x2": ("rtx-a6000", 2), "rtx-a6000-x4": ("rtx-a6000", 4), "rtx-4090-x4": ("rtx-4090", 4),
    "h200-node": ("h200", 8), "mi300x-node": ("mi300x", 8),
}  # fmt: skip
MEASURED = ("h200", "h200-node")  # the H200 is as it was measured; all others are from datasheets
DERIVED = tuple(name for name in Machine.presets() if name not in MEASURED)
WITHOUT_BFLOAT16 = ("t4", "t4-x4")
ON_SLOW_NETWORKS = tuple(name for name in (*SINGLE, *LIKE) if name.startswith(("l4", "rtx", "t4", "a10g")))
SOURCE = re.compile(r"measured|measured: \S.*|datasheet: \S.{10,}|(fitted|assumed|by definition|borrowed|not measured)\b.*")


def numbers(value: object) -> Iterator[Figure | Curve]:
    """Every figure and curve of a machine."""
    if isinstance(value, Figure | Curve):
        yield value
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from numbers(getattr(value, field.name))
    elif isinstance(value, dict):
        for item in value.values():
            yield from numbers(item)
    elif isinstance(value, tuple):
        for item in value:
            yield from numbers(item)


def test_the_presets_are_those_that_are_promised() -> None:
    assert set(Machine.presets()) == {*SINGLE, *NODES, *LIKE, "laptop-cpu"}


@pytest.mark.parametrize("name", Machine.presets())
def test_every_preset_loads_and_travels(name: str) -> None:
    machine = Machine.load(name)
    assert machine.name == name
    assert machine.nodes == 1
    assert machine.comment
    assert Machine.from_json(machine.to_json()) == machine


@pytest.mark.parametrize("name", Machine.presets())
def test_every_number_says_where_it_comes_from(name: str) -> None:
    for number in numbers(Machine.load(name)):
        assert SOURCE.fullmatch(number.source), number.source
        assert 0 <= number.measurement_error <= (3 if number.source.startswith("assumed") else 1)
        if number.source.startswith("measured"):
            assert name in MEASURED


@pytest.mark.parametrize("name", DERIVED)
def test_rates_are_sane(name: str) -> None:
    machine = Machine.load(name)
    device, host = machine.device, machine.host
    by_dtype = (device.matmul, device.matmul_unaligned, device.attention, device.attention_backward, device.convolution)
    for curve in [curve for curves in by_dtype for curve in curves.values()]:
        rates = [rate for _, rate in curve.points]
        assert rates == sorted(rates), "larger products run faster"
        seconds = [size / rate for size, rate in curve.points]
        assert seconds == sorted(seconds), "but take longer"
        assert curve.points[0][0] / curve.points[0][1] < 2e-5, "a tiny product costs little more than its launch"
    known = {"float32"} if name in WITHOUT_BFLOAT16 else {"float32", "bfloat16"}
    assert all(set(curves) == known for curves in by_dtype)
    assert name in WITHOUT_BFLOAT16 or device.matmul["bfloat16"].peak > device.matmul["float32"].peak
    assert device.context_bytes.value < 0.1 * device.memory_bytes.value
    assert host.pinnable_bytes.value < host.memory_bytes.value
    assert host.update.points[-1][0] == host.cores
    assert host.update.peak * 28 < host.bytes_per_second.value * 1.01, "an update moves 28 bytes a parameter"
    for threads, rate in host.update.points:
        assert host.update_loaded.at(threads) <= rate
    if machine.copies:
        for alone, both in ((machine.copies.up, machine.copies.up_both), (machine.copies.down, machine.copies.down_both)):
            assert all(both.at(size) < rate for size, rate in alone.points)


def test_the_h200_is_the_machine_that_forecasts_are_held_to() -> None:
    machine = Machine.load("h200")
    measured = record.recordings("profiler")[0].machine
    assert machine.device.measured == {}, "the calls of models are measured where they are planned"
    assert measured.device.processors.value == machine.device.processors.value, "which files from before do not say"
    added = {name: getattr(machine.device, name) for name in ("processors", "launch_slowdown", "calibration")}
    device = dataclasses.replace(measured.device, measured={}, **added)
    without_calls = dataclasses.replace(measured, device=device)
    assert dataclasses.replace(machine, name=measured.name, collectives=(), comment=measured.comment) == without_calls


def test_the_h200_agrees_with_the_ceilings_measured_apart_from_the_probe() -> None:
    machine = Machine.load("h200")
    assert machine.device.matmul["bfloat16"].peak == pytest.approx(785e12, rel=0.1)
    assert machine.device.memory.peak == pytest.approx(4.2e12, rel=0.1)
    assert machine.copies is not None
    assert machine.copies.up.at(4 * 2**20) == pytest.approx(52.7e9, rel=0.1)
    assert machine.copies.down.peak == pytest.approx(55e9, rel=0.1)
    assert machine.host.memory_bytes.value == pytest.approx(125 * GIB, rel=0.02)


@pytest.mark.parametrize("name", DERIVED)
def test_what_no_datasheet_prints_is_derived(name: str) -> None:
    device = Machine.load(name).device
    for dtype, products in device.matmul.items():
        lost = 0.18 if device.kind == "cuda" and dtype == "bfloat16" else 1.0
        assert device.matmul_unaligned[dtype].peak == pytest.approx(lost * products.peak, rel=1e-3)
        assert device.convolution[dtype].peak == pytest.approx(0.4 * products.peak, rel=1e-3)
        assert device.attention_backward[dtype].peak == pytest.approx(0.75 * device.attention[dtype].peak, rel=1e-3)
    assert device.operations == {}
    assert device.host_seconds.value == (7e-6 if device.kind == "cuda" else 5e-6)
    assert device.workspace_bytes.value == (65 * 2**20 if device.kind == "cuda" else 0)


@pytest.mark.parametrize("name", [*SINGLE, *NODES, *LIKE])
def test_gpus_have_links_for_more_of_them(name: str) -> None:
    machine = Machine.load(name)
    assert machine.device.count == (NODES | {like: count for like, (_, count) in LIKE.items()}).get(name, 1)
    known = {(each.across, each.group, each.name): each for each in machine.collectives}
    assert len(known) == len(machine.collectives)
    for group, kind in itertools.product((2, 4, 8), ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")):
        assert ("node", group, kind) in known
    for group in (16, 64) if name in ON_SLOW_NETWORKS else (16, 64, 512):
        gather, reduce = known["cluster", group, "all_gather"], known["cluster", group, "all_reduce"]
        assert gather.bytes_per_second.value == pytest.approx(2 * reduce.bytes_per_second.value, rel=1e-3)
        assert gather.bytes_per_second.value <= known["node", 8, "all_gather"].bytes_per_second.value
        assert gather.latency_seconds.value > known["node", 8, "all_gather"].latency_seconds.value
    assert ("node", 2, "send") in known
    assert ("cluster", 2, "send") in known


@pytest.mark.parametrize(("name", "single"), [(name, single) for name, (single, _) in LIKE.items()])
def test_a_node_of_a_single_gpu_has_its_device_and_another_host(name: str, single: str) -> None:
    node, alone = Machine.load(name), Machine.load(single)
    assert dataclasses.replace(node.device, count=1) == alone.device
    assert node.collectives == alone.collectives
    assert node.host.memory_bytes.value > alone.host.memory_bytes.value
    assert node.name == name


@pytest.mark.parametrize("name", [name for name in Machine.presets() if name != "laptop-cpu"])
def test_a_preset_has_a_typical_price_with_its_source_and_date(name: str) -> None:
    price = typical_prices()[name]
    assert len(price.source) > 5
    assert datetime.date(2025, 11, 1) < datetime.date.fromisoformat(price.date) <= datetime.date(2026, 11, 30)
    assert 0.1 < price.usd_per_hour / Machine.load(name).device.count < 15


def test_prices_are_of_presets_alone() -> None:
    assert set(typical_prices()) <= set(Machine.presets())


def test_a_file_of_the_users_own_prices_comes_before_the_typical_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "prices.json"
    monkeypatch.setenv("ANYFIT_PRICES", str(file))
    file.write_text('{"h100": 2, "mine.json": {"usd_per_hour": 0.4, "source": "electricity", "date": "2026-11-01"}}')
    found = prices_of(["h100", "h200", "mine.json", "theirs.json"], {"h200": 3.0})
    assert found == {
        "h100": Price(2.0, "yours", ""),
        "h200": Price(3.0, "--price", ""),
        "mine.json": Price(0.4, "electricity", "2026-11-01"),
    }


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ('{"h10": 2}', "no machine 'h10'; did you mean 'h100'"),
        ('{"h100": 0}', "h100: usd_per_hour is 0.0; write a number above 0"),
        ('{"h100": "2"}', "h100: expected an object, got a string"),
        ('{"h100": {"usd_per_hour": 2}}', "missing key 'source'"),
        ("[2]", "an hour's price of each machine"),
    ],
)
def test_prices_that_cannot_be_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, says: str) -> None:
    file = tmp_path / "prices.json"
    monkeypatch.setenv("ANYFIT_PRICES", str(file))
    file.write_text(text)
    with pytest.raises(ValueError, match=says):
        prices_of(["h100"], {})


def test_a_named_file_of_prices_that_is_not_there_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANYFIT_PRICES", str(tmp_path / "none.json"))
    with pytest.raises(FileNotFoundError, match=r"none\.json"):
        prices_of(["h100"], {})


def test_more_gpus_and_nodes_leave_the_host_of_one_node() -> None:
    machine = Machine.load("h200")
    grown = machine.with_devices(gpus=8, nodes=2)
    assert (grown.device.count, grown.nodes) == (8, 2)
    assert grown.host == machine.host
    assert machine.with_devices() == machine
    assert grown.with_devices(gpus=1, nodes=1) == machine
    assert grown.with_devices(gpus=4).nodes == 2


@pytest.mark.parametrize("number", [0, -1, True, 2.0, "8"])
@pytest.mark.parametrize("what", ["gpus", "nodes"])
def test_numbers_of_devices_that_make_no_sense_are_refused(what: str, number: object) -> None:
    with pytest.raises(ValueError, match=f"--{what} .*: give a whole number from 1 up"):
        Machine.load("h200").with_devices(**{what: number})  # type: ignore[arg-type]


def test_a_machine_without_gpus_does_not_get_any() -> None:
    with pytest.raises(ValueError, match="has no GPU; name a machine that has"):
        Machine.load("laptop-cpu").with_devices(gpus=2)


def test_more_devices_than_links_are_known_for_are_refused() -> None:
    alone = dataclasses.replace(Machine.load("h200"), collectives=())
    with pytest.raises(ValueError, match="no link between GPUs is known"):
        alone.with_devices(gpus=2)
    with pytest.raises(ValueError, match="no link between nodes is known"):
        alone.with_devices(nodes=2)
    assert alone.with_devices(gpus=1, nodes=1) == alone


def test_limits_cap_what_there_is() -> None:
    machine = Machine.load("h200").with_limits(device_memory="24GiB", host_memory=64 * GIB, disk="10GB")
    assert machine.device_limit_bytes == 24 * GIB
    assert machine.host_limit_bytes == 64 * GIB
    assert machine.disk_limit_bytes == 10**10
    assert machine.with_limits(device_memory="12GiB").limits.host_bytes == 64 * GIB


def test_a_limit_beyond_what_is_there_is_refused() -> None:
    with pytest.raises(ValueError, match="where h200 has 140 GiB of device memory"):
        Machine.load("h200").with_limits(device_memory="200GiB")


def test_a_limit_of_a_disk_that_was_not_measured_says_how_to_measure_it() -> None:
    quick = dataclasses.replace(Machine.load("h200"), disk=None)
    with pytest.raises(ValueError, match="anyfit probe"):
        quick.with_limits(disk="1GiB")


@pytest.mark.parametrize("text", ["24 lightyears", "", "-1GiB"])
def test_a_limit_that_is_no_size_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not a size"):
        Machine.load("h200").with_limits(device_memory=text)


def test_a_misspelt_preset_names_the_nearest() -> None:
    with pytest.raises(FileNotFoundError, match="did you mean 'h100-node'"):
        Machine.load("h100-nodes")


def test_a_curve_is_straight_on_logarithmic_axes_and_constant_outside() -> None:
    curve = Curve(((10.0, 100.0), (1000.0, 400.0)), 0.0, "measured")
    assert curve.at(1) == 100.0
    assert curve.at(100) == pytest.approx(200.0)
    assert curve.at(1e6) == 400.0
    assert math.isclose(curve.peak, 400.0)
