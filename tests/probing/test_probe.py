"""The real probe on this machine's CPU, and what its readings become."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import json
import re
from collections.abc import Iterator
from typing import get_args

import pytest
import torch

from anyfit.probing import compute, meters, probe
from anyfit.probing.meters import LEAST_ERROR, QUICK, Ladder, Load, Meter, climb, figure, host_seconds, read_in_rounds
from anyfit.probing.update import host_load, thread_counts
from anyfit.values.machine import DTYPES, OPERATIONS, Beside, Curve, Machine

HEARD: list[tuple[str, float]] = []


@pytest.fixture(scope="module")
def measured() -> Machine:
    HEARD.clear()
    return probe.measure("quick", lambda label, done: HEARD.append((label, done)))


def test_a_probed_machine_travels_as_json(measured: Machine, tmp_path) -> None:
    measured.save(tmp_path / "machine.json")
    assert Machine.load(tmp_path / "machine.json") == measured
    assert Machine.from_json(json.loads(json.dumps(measured.to_json()))) == measured


def test_a_probe_says_what_it_measures_and_how_far_it_is(measured: Machine) -> None:
    fractions = [done for _, done in HEARD]
    assert fractions == sorted(fractions)
    assert fractions[0] == 0.0
    assert HEARD[-1] == ("done", 1.0)
    assert {"float32 products", "CPU update", "host memory"} <= {label for label, _ in HEARD}


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU as the device")
def test_without_a_gpu_the_processor_is_the_device(measured: Machine) -> None:
    assert measured.device.kind == "cpu"
    assert measured.copies is None
    assert measured.collectives == ()
    assert measured.device.memory_bytes == measured.host.memory_bytes
    assert measured.versions["torch"] == str(torch.__version__)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", measured.date)


def test_curves_reach_down_to_launch_bound_sizes(measured: Machine) -> None:
    for dtype in ("float32", "bfloat16"):
        products = measured.device.matmul[dtype].points
        assert products[0][0] <= 1e5
        assert len(products) >= 2
        assert measured.device.attention[dtype].points[0][0] <= 1.1e6
    assert measured.device.memory.points[0][0] <= 4096
    assert measured.device.launch_seconds.value > 0


def test_what_plain_products_and_sums_do_not_tell_is_measured_too(measured: Machine) -> None:
    device = measured.device
    for curves in (device.matmul_unaligned, device.attention_backward, device.convolution):
        assert set(curves) == set(DTYPES)
        assert all(1e7 < curve.peak < 1e16 for curve in curves.values())
    assert set(device.operations) == set(OPERATIONS)
    for name, curve in device.operations.items():
        assert curve.points[0][0] < 2**20, name
        assert 1e7 < curve.peak < 1e14, name


def test_a_dispatcher_call_in_training_costs_more_than_a_launch_but_not_much(measured: Machine) -> None:
    assert measured.device.launch_seconds.value / 2 < measured.device.host_seconds.value < 1e-3


@pytest.mark.skipif(torch.cuda.is_available(), reason="looks at the CPU as the device")
def test_a_cpu_has_no_workspaces(measured: Machine) -> None:
    assert measured.device.workspace_bytes.value == 0


def test_every_figure_is_measured_and_carries_its_error(measured: Machine) -> None:
    device, host = measured.device, measured.host
    by_dtype = (device.matmul, device.matmul_unaligned, device.attention, device.attention_backward, device.convolution)
    named = [curve for curves in (*by_dtype, device.operations) for curve in curves.values()]
    curves = [*named, device.memory, host.update, host.update_loaded]
    for each in [*curves, device.launch_seconds, device.host_seconds, host.bytes_per_second]:
        assert each.source == "measured"
        assert each.measurement_error >= LEAST_ERROR
    assert [threads for threads, _ in host.update.points] == thread_counts(host.cores)


def test_a_probe_leaves_torch_as_it_was() -> None:
    threads, random_state = torch.get_num_threads(), torch.random.get_rng_state()
    probe.measure("quick")
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.random.get_rng_state(), random_state)
    assert torch.is_grad_enabled()


def test_an_unknown_effort_is_refused() -> None:
    with pytest.raises(ValueError, match='write "quick" or "full"'):
        probe.measure("thorough")  # type: ignore[arg-type]


def test_the_measurement_error_is_the_widest_distance_from_the_median() -> None:
    assert figure([8.0, 10.0, 13.0]).value == 10.0
    assert figure([8.0, 10.0, 13.0]).measurement_error == pytest.approx(0.3)
    assert figure([10.0, 10.0, 10.0]).measurement_error == LEAST_ERROR


def test_a_curve_is_as_uncertain_as_its_worst_point() -> None:
    steady, shaky = Meter("steady", float, [10.0, 10.0, 10.0]), Meter("shaky", float, [5.0, 10.0, 11.0])
    curve = Ladder({1.0: steady, 2.0: shaky}).curve()
    assert curve == Curve(((1.0, 10.0), (2.0, 10.0)), 0.5, "measured")


def test_rounds_in_which_others_were_at_work_count_in_the_error_alone() -> None:
    disturbed = Meter("disturbed", float, [0.003, 10.0, 0.005])
    assert Ladder({1.0: disturbed}).curve() == Curve(((1.0, 10.0),), pytest.approx(1.0, abs=1e-3), "measured")  # type: ignore[arg-type]


def test_every_meter_is_read_once_a_round() -> None:
    order: list[str] = []

    def read(name: str) -> float:
        order.append(name)
        return 1.0

    meters = [Meter(name, lambda name=name: read(name)) for name in ("a", "b")]
    read_in_rounds(meters, QUICK, 0.0, lambda label, done: None)
    assert order == ["a", "b"] * 3


def test_a_slow_machine_gets_a_shorter_curve() -> None:
    """By a made-up clock on which a size of 4 takes as long as one run may."""
    built: list[int] = []

    def prepare(size: int) -> tuple[float, object]:
        built.append(size)
        return float(size), lambda: None

    def timer(work, times: int) -> float:
        return built[-1] * QUICK.longest_seconds / 4

    effort = dataclasses.replace(QUICK, stride=1)
    ladder = climb("work", [1, 2, 4, 8, 16], prepare, timer, effort)
    assert list(ladder.rungs) == [1.0, 2.0, 4.0]
    assert built == [1, 2, 4, 8], "what is larger still is not tried"


def test_the_smallest_size_is_measured_however_slow_and_memory_that_runs_out_ends_the_climb() -> None:
    def prepare(size: int) -> tuple[float, object]:
        if size > 1:
            raise torch.OutOfMemoryError
        return float(size), lambda: None

    ladder = climb("work", [1, 2], prepare, lambda work, times: 10.0 * QUICK.longest_seconds, QUICK)
    assert list(ladder.rungs) == [1.0]


def test_a_size_that_would_take_far_too_long_is_not_even_tried() -> None:
    """By a made-up clock, which runs at a constant rate."""
    tried: list[int] = []

    def prepare(size: int) -> tuple[float, object]:
        return float(size), lambda: tried.append(size)

    def timer(work, times: int) -> float:
        work()
        return tried[-1] * QUICK.longest_seconds / 4

    ladder = climb("work", [1, 2, 100], prepare, timer, dataclasses.replace(QUICK, stride=1))
    assert list(ladder.rungs) == [1.0, 2.0]
    assert set(tried) == {1, 2}


def test_a_size_is_that_of_one_call_and_a_rate_that_of_all() -> None:
    """Two calls of size 1 in half a second."""
    effort = dataclasses.replace(QUICK, longest_seconds=1.0)
    ladder = climb("work", [1], lambda size: (1.0, lambda: None), lambda work, times: 0.5, effort, calls=2)
    assert ladder.rungs[1.0].read() == 4.0


def test_what_fails_in_the_load_fails_the_measure() -> None:
    from anyfit.probing.update import _repeating

    def portion() -> None:
        raise RuntimeError("the load broke")

    with pytest.raises(RuntimeError, match="the load broke"), _repeating(portion):
        pass


def test_the_host_load_ends_with_its_context() -> None:
    import threading

    with host_load():
        assert any(thread.name == "anyfit-probe-load" for thread in threading.enumerate())
    assert not any(thread.name == "anyfit-probe-load" for thread in threading.enumerate())


def test_thread_counts_climb_to_all_cores() -> None:
    assert thread_counts(1) == [1]
    assert thread_counts(2) == [1, 2]
    assert thread_counts(6) == [1, 2, 4, 6]
    assert thread_counts(16) == [1, 2, 4, 8, 12, 16]


def test_the_clock_counts_all_runs() -> None:
    runs: list[int] = []
    assert host_seconds(lambda: runs.append(1), 7) > 0
    assert len(runs) == 7


def test_the_clock_breaks_off_when_runs_take_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every look at this clock, a second has passed."""
    runs: list[int] = []
    monkeypatch.setattr(meters.time, "perf_counter", itertools.count().__next__)
    assert host_seconds(lambda: runs.append(1), 80) == 2 / 10
    assert len(runs) == 10


def test_launches_are_read_beside_each_load_and_alone() -> None:
    entered: list[str] = []

    @contextlib.contextmanager
    def load(name: str) -> Iterator[None]:
        entered.append(name)
        yield

    loads: dict[Beside, Load] = {name: functools.partial(load, name) for name in get_args(Beside)}
    meters = compute.launch_slowdown_meters(torch.device("cpu"), QUICK, loads)
    assert list(meters) == ["updates", "copies", "both"]
    for name, meter in meters.items():
        assert meter.read() >= 1.0
        assert entered[-1] == name
    assert len(entered) == 3
