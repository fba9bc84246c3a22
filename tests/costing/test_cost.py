"""What a step costs: model state counted by hand, and seconds that no op can beat."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from anyfit import Job
from anyfit.costing import cost
from anyfit.costing.times import (
    WHOLE_BYTES_PER_ELEMENT,
    call_weights,
    curve_seconds,
    device_seconds,
    pass_seconds,
)
from anyfit.demo import GPT
from anyfit.tracing import trace
from anyfit.values.calibration import Calibration
from anyfit.values.graph import Graph, Op
from anyfit.values.machine import Copies, Curve, Device, Machine
from anyfit.values.profile import Profile, StateBytes
from tests.machines import constant, figure, small_machine
from tests.models import Convolutional, Tangled, byte_batches, image_batches, image_loss, next_byte_loss

# Tangled is 16 wide. Each parameter starts on a boundary of 128 elements.
EMBED, MATRIX, VECTOR = 256 * 16, 16 * 16, 16
PADDED_VECTOR = 128
MATRICES = EMBED + 2 * MATRIX  # group 0: the embedding (which is the head too), twice.weight, unused.weight
VECTORS = 4 * PADDED_VECTOR  # group 1: twice.bias, unused.bias, norm.weight, norm.bias
FROZEN = MATRIX + PADDED_VECTOR
USED = EMBED + MATRIX + 3 * VECTOR  # what gets a gradient: all that is neither frozen nor unused
BUFFER = 4 * 16

CPU, CUDA = Calibration.of("cpu"), Calibration.of("cuda")
GPU: dict[str, Any] = {"kind": "cuda", "calibration": CUDA}


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() > 1]
    vectors = [parameter for parameter in trained if parameter.dim() <= 1]
    return torch.optim.AdamW([{"params": matrices}, {"params": vectors, "weight_decay": 0.0}], lr=1e-3)


def tangled_job(**changes: Any) -> Job:
    job = Job(Tangled, next_byte_loss, two_groups, byte_batches(1, 4)[0], 4, precision="fp32")
    return replace(job, **changes)


def profile_of(job: Job) -> Profile:
    return cost([trace(job, job.batch_size)], small_machine(), job.batch_size)


# ---------------------------------------------------------------------- bytes of state


def test_fp32_state_is_what_a_count_by_hand_says() -> None:
    assert profile_of(tangled_job()).state == StateBytes(
        parameters=4 * (MATRICES + VECTORS + FROZEN),
        masters=0,
        optimizer=8 * (MATRICES + VECTORS),
        buffers=BUFFER,
        scratch=0,
        gradients=4 * USED,
        accumulators=4 * USED,
    )


def test_bf16_state_has_low_halves_and_room_for_the_masters_and_gradients_of_one_chunk() -> None:
    assert profile_of(tangled_job(precision="bf16")).state == StateBytes(
        parameters=2 * (MATRICES + VECTORS + FROZEN),
        masters=2 * (MATRICES + VECTORS),
        optimizer=8 * (MATRICES + VECTORS),
        buffers=BUFFER,
        scratch=8 * MATRICES,
        gradients=2 * USED,
        accumulators=4 * (MATRICES + VECTORS),
    )


def test_a_tied_weight_is_counted_once_and_a_frozen_one_is_not_trainable() -> None:
    profile = profile_of(tangled_job())
    assert profile.parameters == EMBED + 3 * (MATRIX + VECTOR) + 2 * VECTOR
    assert profile.trainable == profile.parameters - (MATRIX + VECTOR)


def test_frozen_parameters_in_a_group_have_no_optimizer_state() -> None:
    job = tangled_job(optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3))
    state = profile_of(job).state
    assert state.optimizer == 8 * (MATRICES + VECTORS)
    assert state.gradients == 4 * USED


def test_parameters_outside_every_group_get_gradients_but_no_state() -> None:
    state = profile_of(
        tangled_job(optimizer=lambda model: torch.optim.AdamW([model.embed.weight], lr=1e-3), precision="bf16")
    ).state
    assert state.optimizer == 8 * EMBED
    assert state.masters == 2 * EMBED
    assert state.gradients == 2 * USED


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_element"),
    [
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1), 0),
        (lambda model: torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9), 4),
        (lambda model: torch.optim.AdamW(model.parameters(), amsgrad=True), 12),
    ],
)
def test_optimizer_state_is_that_of_the_users_optimizer(optimizer: Any, bytes_per_element: int) -> None:
    assert profile_of(tangled_job(optimizer=optimizer)).state.optimizer == bytes_per_element * (MATRICES + VECTORS)


def test_each_group_has_the_state_its_own_options_make() -> None:
    def mixed(model: nn.Module) -> torch.optim.Optimizer:
        rest = [parameter for name, parameter in model.named_parameters() if name != "embed.weight"]
        return torch.optim.SGD([{"params": [model.embed.weight], "momentum": 0.9}, {"params": rest}], lr=0.1)

    assert profile_of(tangled_job(optimizer=mixed)).state.optimizer == 4 * EMBED


def test_batch_norms_stay_fp32_beside_a_bf16_model() -> None:
    job = Job(Convolutional, image_loss, lambda model: torch.optim.AdamW(model.parameters()), image_batches(1, 2)[0], 2)
    state = profile_of(job).state
    norms, others = 4 * PADDED_VECTOR, 0
    for name, parameter in Convolutional().named_parameters():
        if not re.match(r"layers\.\d\.1\.", name):
            others += -(-parameter.numel() // PADDED_VECTOR) * PADDED_VECTOR
    assert state.parameters == 4 * norms + 2 * others
    assert state.masters == 2 * others
    assert state.buffers == 2 * (8 + 8) * 4 + 2 * 8  # running mean and variance, and a counter, of two norms


# ---------------------------------------------------------------------- passes


@pytest.fixture(scope="module")
def graph() -> Graph:
    return trace(tangled_job(), 4)


def test_a_pass_is_the_sum_of_its_ops(graph: Graph) -> None:
    machine = small_machine()
    (each,) = cost([graph], machine, 4).passes
    assert each.flops == graph.flops
    assert each.seconds == pytest.approx(sum(pass_seconds(graph, machine)))
    assert sum(block.kept_bytes for block in each.blocks) == sum(value.bytes for value in graph.values if graph.kept(value))
    assert sum(block.parameters for block in each.blocks) == sum(parameter.elements for parameter in graph.parameters)
    assert each.peak_bytes == max(graph.live_bytes("kept"))
    assert each.peak_bytes_accumulating <= each.peak_bytes


def test_products_are_counted_as_two_flops_a_multiplication(graph: Graph) -> None:
    rows = 4 * 16
    forward = 2 * rows * (16 * 16 * 3 + 16 * 256)  # frozen, twice called twice, and the head
    (each,) = cost([graph], small_machine(), 4).passes
    assert sum(block.flops_forward for block in each.blocks) == forward
    assert sum(block.flops_backward for block in each.blocks) == 2 * forward - 2 * rows * 16 * 16  # none for a frozen weight


def test_passes_are_listed_from_the_largest_micro_batch_down(graph: Graph) -> None:
    graphs = [trace(tangled_job(), 1), graph, trace(tangled_job(), 2)]
    profile = cost(graphs, small_machine(), 4)
    assert [each.micro_batch for each in profile.passes] == [4, 2, 1]
    assert [each.tokens for each in profile.passes] == [4 * 17, 2 * 17, 17]


def test_a_profile_carries_the_machines_limits_and_both_fingerprints(graph: Graph) -> None:
    machine = small_machine().with_limits(device_memory="1GiB", host_memory="2GiB")
    profile = cost([graph], machine, 4)
    assert (profile.device_limit_bytes, profile.host_limit_bytes, profile.disk_limit_bytes) == (2**30, 2**31, 0)
    assert (profile.model_fingerprint, profile.machine_fingerprint) == (graph.fingerprint, machine.fingerprint)
    assert Profile.from_json(profile.to_json()) == profile


def test_a_slower_machine_takes_longer(graph: Graph) -> None:
    fast, slow = (cost([graph], small_machine(flops_per_second=rate), 4) for rate in (1e12, 1e8))
    assert fast.passes[0].seconds < slow.passes[0].seconds
    assert fast.state == slow.state


# ---------------------------------------------------------------------- seconds of an op


amounts = st.integers(0, 10**15)
kinds = st.sampled_from(["matmul", "convolution", "attention", "memory"])
RISING = Curve(((1e6, 1e9), (1e9, 1e12)), 0.0, "measured")


def an_op(kind: str, flops: int, touched: int, dtype: str = "float32", *, aligned: bool = True, calls: int = 1) -> Op:
    return Op("op", kind, "forward", False, 0, "", dtype, flops, touched, aligned, calls, call=0)  # type: ignore[arg-type]


def device_with(**changes: Any) -> Device:
    return replace(small_machine().device, **changes)


@given(kinds, amounts, amounts, st.booleans())
def test_an_op_takes_as_long_as_the_slower_of_compute_and_memory(kind: str, flops: int, touched: int, aligned: bool) -> None:
    rates = {"matmul": 1e12, "matmul_unaligned": 2e11, "attention": 1e11, "convolution": 5e10}
    device = device_with(**{name: {"float32": constant(rate)} for name, rate in rates.items()}, memory=constant(1e10))
    name = {"memory": "matmul"}.get(kind, kind) if aligned or kind in ("attention", "convolution") else "matmul_unaligned"
    wanted = CPU.curve_slowdown.value * max(touched / 1e10, flops / rates[name])
    assert curve_seconds(an_op(kind, flops, touched, aligned=aligned), device) == pytest.approx(wanted)


@given(kinds, amounts, amounts, amounts, amounts)
def test_more_work_never_takes_less_time(kind: str, flops: int, touched: int, more_flops: int, more_touched: int) -> None:
    device = device_with(matmul={"float32": RISING}, attention={"float32": RISING}, convolution={"float32": RISING})
    less = curve_seconds(an_op(kind, flops, touched), device)
    assert curve_seconds(an_op(kind, flops + more_flops, touched + more_touched), device) >= less * (1 - 1e-9)


def test_an_op_is_costed_at_the_rate_of_its_own_size_and_dtype() -> None:
    device = device_with(matmul={"float32": RISING}, memory=constant(1e15))
    assert curve_seconds(an_op("matmul", 10**6, 0), device) == pytest.approx(CPU.curve_slowdown.value * 1e-3)
    assert curve_seconds(an_op("matmul", 10**9, 0), device) == pytest.approx(CPU.curve_slowdown.value * 1e-3)
    device = device_with(matmul={"float32": constant(1e9), "bfloat16": constant(4e9)}, memory=constant(1e15))
    assert curve_seconds(an_op("matmul", 10**9, 0, "bfloat16"), device) == pytest.approx(CPU.curve_slowdown.value * 0.25)


def test_an_op_with_a_curve_of_its_own_is_costed_by_it() -> None:
    device = device_with(operations={"gelu": constant(1e9)}, memory=constant(1e10))
    slowdown = CPU.curve_slowdown.value
    assert curve_seconds(replace(an_op("memory", 0, 10**9), name="gelu.default"), device) == pytest.approx(slowdown)
    assert curve_seconds(replace(an_op("memory", 0, 10**9), name="relu.default"), device) == pytest.approx(slowdown * 0.1)


def chain(graph: Graph, count: int, seconds: float, calls: int) -> Graph:
    """A graph of `count` ops that each keep the device busy for `seconds`."""
    return replace(graph, ops=(an_op("memory", 0, int(seconds * 1e10), calls=calls),) * count)


def test_a_gpu_is_bound_by_the_host_or_by_itself_and_a_cpu_by_both(graph: Graph) -> None:
    device = device_with(**GPU, memory=constant(1e10), host_seconds=figure(1e-5), launch_seconds=figure(0))
    gpu = replace(small_machine(), device=device)
    large, small = chain(graph, 100, 1e-3, calls=2), chain(graph, 100, 1e-6, calls=2)
    launching = 100 * 2 * 1e-5
    assert sum(pass_seconds(large, gpu)) == pytest.approx(CUDA.curve_slowdown.value * 0.1, rel=1e-3)
    assert sum(pass_seconds(small, gpu)) == pytest.approx(CUDA.host_call_factor.value * launching, rel=1e-2)
    cpu = replace(gpu, device=replace(device, kind="cpu", calibration=CPU))
    assert sum(pass_seconds(large, cpu)) == pytest.approx(CPU.curve_slowdown.value * 0.1 + CPU.host_call_factor.value * launching)


# ---------------------------------------------------------------------- calls that were measured


def with_calls(graph: Graph, seconds: float, share: float = 1.0, **changes: Any) -> Machine:
    """A machine that has measured the heaviest calls of a graph, as much as makes up the share of its seconds."""
    machine = small_machine()
    weights = call_weights([graph], machine.device)
    calls, covered = [], 0.0
    for call in sorted(weights, key=lambda each: -weights[each]):
        if covered < share:
            calls.append(call)
            covered += weights[call]
    return replace(machine, device=replace(machine.device, measured=dict.fromkeys(calls, seconds), **changes))


def test_an_op_takes_what_its_call_was_measured_to_take(graph: Graph) -> None:
    machine = with_calls(graph, 0.5)
    for op in graph.ops:
        assert device_seconds(op, graph.calls[op.call], machine.device) == CPU.call_slowdown.value * 0.5
        assert device_seconds(op, "another call", machine.device) == curve_seconds(op, machine.device)
    device_only = replace(machine, device=replace(machine.device, host_seconds=figure(0)))
    (each,) = cost([graph], device_only, 4).passes
    assert each.seconds == pytest.approx(CPU.call_slowdown.value * 0.5 * len(graph.ops))


def test_the_weights_of_calls_are_shares_of_each_pass(graph: Graph) -> None:
    device = small_machine().device
    weights = call_weights([graph, trace(tangled_job(), 2)], device)
    assert sum(weights.values()) == pytest.approx(2.0)
    assert set(graph.calls) <= set(weights)


def test_the_error_band_is_the_narrow_one_only_where_nearly_all_was_measured(graph: Graph) -> None:
    gpu = {**GPU, "host_seconds": figure(0)}

    def band(share: float) -> float:
        return cost([graph], with_calls(graph, 1e-3, share, **gpu), 4).time_error

    assert band(1.0) == CUDA.measured_time_error.value
    assert band(0.5) == CUDA.time_error.value
    waiting = with_calls(graph, 1e-9, 1.0, **GPU, host_seconds=figure(1e-3))
    assert cost([graph], waiting, 4).time_error == CUDA.rough_time_error.value, "of a GPU that waits for its host"


def test_a_gpu_waits_for_its_batch_as_the_host_holds_it() -> None:
    job = Job(Convolutional, image_loss, lambda model: torch.optim.AdamW(model.parameters()), image_batches(1, 2)[0], 2)
    traced = trace(job, 2)
    assert job.precision == "bf16"
    assert traced.batch_bytes == 2 * (3 * 8 * 8 * 4 + 8)
    device = device_with(**GPU, memory=constant(1e10), host_seconds=figure(1e-5), launch_seconds=figure(0))
    alone = replace(small_machine(), device=device)
    waiting = replace(alone, copies=Copies(*(constant(1e10),) * 4, *(figure(1e10),) * 2, pageable=figure(1e6)))
    batch = traced.batch_bytes / 1e6
    assert sum(pass_seconds(traced, waiting)) - sum(pass_seconds(traced, alone)) == pytest.approx(batch)
    large, small = chain(traced, 100, 1e-3, calls=2), chain(traced, 100, 1e-6, calls=2)
    for passes in (1, 2, 3, 7):  # a device with much to do is at one pass while the host is at the batch of the next
        assert passes * sum(pass_seconds(large, waiting, passes)) == pytest.approx(
            passes * CUDA.curve_slowdown.value * 0.1 + batch, rel=1e-3
        )
        launched = CUDA.host_call_factor.value * 100 * 2 * 1e-5
        assert passes * sum(pass_seconds(small, waiting, passes)) == pytest.approx(passes * (launched + batch), rel=1e-2)


def test_gradients_that_are_added_up_over_passes_cost_the_host(graph: Graph) -> None:
    device = device_with(**GPU, memory=constant(1e10), host_seconds=figure(1e-5), launch_seconds=figure(0))
    gpu = replace(small_machine(), device=device)
    backward = replace(an_op("memory", 0, 10_000, calls=2), phase="backward")
    waiting = replace(graph, ops=(backward,) * 100)
    added = CUDA.host_call_factor.value * CUDA.accumulation_calls.value * len(graph.parameters) * 1e-5
    assert sum(pass_seconds(waiting, gpu, 2)) - sum(pass_seconds(waiting, gpu)) == pytest.approx(added, rel=1e-2)


def test_an_update_touches_every_trained_parameter(graph: Graph) -> None:
    machine = small_machine()
    free_host = replace(machine, device=replace(machine.device, host_seconds=figure(0)))
    for precision, own in (("fp32", WHOLE_BYTES_PER_ELEMENT), ("bf16", CPU.split_update_bytes.value)):
        traced = trace(tangled_job(precision=precision), 4)
        wanted = (traced.update.bytes_per_element + own) * (MATRICES + VECTORS) / 1e10
        assert cost([traced], free_host, 4).update.seconds == pytest.approx(wanted)
        assert cost([traced], machine, 4).update.seconds >= wanted


def test_model_state_is_laid_out_in_chunks_of_about_half_and_twice_the_usual_size_too() -> None:
    profile = profile_of(
        tangled_job(
            model=lambda: GPT(width=64, layers=16, heads=4, length=32),
            optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        )
    )
    usual = profile.offload_chunk_bytes
    finer, coarser = profile.other_layouts
    assert 0.3 * usual <= finer.chunk_bytes <= 0.8 * usual
    assert 1.5 * usual <= coarser.chunk_bytes <= 3 * usual
    assert len(finer.chunks) > len(profile.chunks) > len(coarser.chunks)
    for layout in profile.other_layouts:
        assert layout.chunks == profile.laid_out(layout).chunks
        for name in ("weights_bytes", "gradient_bytes", "optimizer_bytes"):
            in_all = sum(getattr(chunk, name) for chunk in layout.chunks)
            assert in_all == pytest.approx(sum(getattr(chunk, name) for chunk in profile.chunks), rel=0.02)  # but for padding
    assert Profile.from_json(profile.to_json()) == profile


def test_a_size_that_makes_the_same_chunks_is_not_considered() -> None:
    profile = profile_of(tangled_job())
    layouts = [profile.chunks, *(layout.chunks for layout in profile.other_layouts)]
    assert len(set(layouts)) == len(layouts)
