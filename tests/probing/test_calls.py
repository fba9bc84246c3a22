"""Calls are made again as they were: the same shapes, strides and dtypes, with data that no op can choke on."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.costing.times import call_weights
from anyfit.probing import cache, calls
from anyfit.probing.calls import FAILURES, NotReplayable, measure_calls, prepare
from anyfit.tracing import trace
from anyfit.values.call import Call, Other, TensorForm, TheDevice, TorchName
from anyfit.values.machine import Machine
from tests.machines import small_machine
from tests.tracing.test_models import ROWS, job_for

CPU = torch.device("cpu")
HUGGING_FACE = ("gpt2", "bert", "t5", "vit", "convnext", "resnet", "mixtral")
TINY_ELEMENTS = 1024  # positions and the like, which no forecast depends on


def text(op: str, *arguments: Any, **options: Any) -> str:
    return Call(op, arguments, options).text()


def tensor(*shape: int, dtype: str = "float32") -> TensorForm:
    return TensorForm(dtype, shape, torch.empty(shape, device="meta").stride())


class Described(TorchDispatchMode):
    """The calls made, as texts, and the integers they were given."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.integers: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from anyfit.tracing.recorder import _described, _name_of

        options = {name: _described(value) for name, value in (kwargs or {}).items()}
        self.texts.append(Call(_name_of(func), tuple(map(_described, args)), options).text())
        leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        self.integers += [leaf for leaf in leaves if leaf.dtype in (torch.int32, torch.int64) and leaf.dim()]
        return func(*args, **(kwargs or {}))


def made_again(call: str) -> Described:
    with torch.no_grad(), torch.random.fork_rng([]):
        work = prepare(call, CPU)
        with Described() as described:
            work()
    return described


# ---------------------------------------------------------------------- texts


def test_a_call_is_read_back_from_its_text() -> None:
    call = Call(
        "made_up.default",
        (TensorForm("bfloat16", (4, 8), (1, 4)), [tensor(2, 3), None], 1, 1.0, True, "tanh", float("-inf"), TorchName("float32")),
        {"device": TheDevice(), "generator": Other("Generator"), "pin_memory": None},
    )
    again = Call.read(call.text())
    assert again == call
    assert [type(item) for item in again.arguments] == [type(item) for item in call.arguments]
    assert "stride" not in call.text()
    assert call.text().count("[4,8],[1,4]") == 1, "strides are written only where they are not the usual ones"


@pytest.mark.parametrize("name", HUGGING_FACE)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_the_calls_of_real_models_are_made_again_as_they_were(name: str, device: Any) -> None:
    graph = trace(job_for(name, "bf16"), ROWS, device)
    assert len(set(graph.calls)) == len(graph.calls)
    assert {op.call for op in graph.ops} == set(range(len(graph.calls)))
    large = {graph.calls[op.call] for op in graph.ops if op.bytes >= 4 * TINY_ELEMENTS}
    failed = set()
    for call in sorted(large):
        op = json.loads(call)[0]
        assert Call.read(call).text() == call
        try:
            described = made_again(call)
        except FAILURES:
            failed.add(call)
            continue
        if op.partition(".")[0] not in calls.REPLAYS and "attention" not in op:
            assert described.texts == [call]
    assert len(failed) <= 0.1 * len(large), failed


def test_ops_of_like_layers_are_one_call() -> None:
    graph = trace(job_for("gpt2"), ROWS)
    assert len(graph.calls) < len(graph.ops) / 4
    products = [op for op in graph.ops if op.name == "addmm.default" and op.module.endswith("attn.c_attn")]
    assert len(products) == 8
    assert len({op.call for op in products}) == 1


# ---------------------------------------------------------------------- integers


@pytest.mark.parametrize(
    ("call", "bound"),
    [
        (text("embedding.default", tensor(7, 4), tensor(50, dtype="int64")), 7),
        (text("embedding_dense_backward.default", tensor(50, 4), tensor(50, dtype="int64"), 7, -1, False), 7),
        (text("nll_loss_forward.default", tensor(50, 7), tensor(50, dtype="int64"), None, 1, -100), 7),
        (text("index_select.default", tensor(9, 7), 1, tensor(50, dtype="int64")), 7),
        (text("gather.default", tensor(9, 7), -1, tensor(9, 50, dtype="int64")), 7),
        (text("index.Tensor", tensor(9, 7), [None, tensor(50, dtype="int64")]), 7),
        (text("index_put.default", tensor(7, 9), [tensor(50, dtype="int64")], tensor(50, 9), True), 7),
        (text("index_add.default", tensor(7, 9), 0, tensor(50, dtype="int64"), tensor(50, 9)), 7),
    ],
)
def test_indices_lie_within_what_they_index(call: str, bound: int) -> None:
    (drawn,) = made_again(call).integers[:1]
    assert int(drawn.min()) >= 0
    assert int(drawn.max()) == bound - 1


def test_the_groups_of_a_grouped_product_are_alike_and_use_all_rows() -> None:
    offsets = tensor(4, dtype="int32")
    products = [
        ((tensor(64, 16, dtype="bfloat16"), tensor(4, 16, 32, dtype="bfloat16")), 64),
        ((tensor(16, 64, dtype="bfloat16"), tensor(64, 32, dtype="bfloat16")), 64),
    ]
    for (left, right), along in products:
        (ends,) = made_again(text("_grouped_mm.default", left, right, offsets)).integers[:1]
        assert ends.tolist() == [along // 4, along // 2, 3 * along // 4, along]


@pytest.mark.parametrize(
    "call",
    [
        text("take.default", tensor(9, 7), tensor(50, dtype="int64")),  # integers, and nothing is known of them
        text("max_unpool2d.default", tensor(1, 1, 4, 4), tensor(1, 1, 4, 4, dtype="int64"), [8, 8]),
        text("index.Tensor", tensor(9, 7), [tensor(9, 7, dtype="bool")]),  # a mask
        text("multinomial.default", tensor(9, 7), 2),
        text("bernoulli.Tensor", tensor(9, 7), tensor(9, 7)),
        text("_assert_async.default", tensor(dtype="bool")),
        text("normal_.default", tensor(9, 7), 0.0, 1.0, generator=Other("Generator")),
        text("somebodys.own.default", tensor(9, 7)),
    ],
)
def test_what_could_end_a_gpus_process_or_is_not_known_is_refused(call: str) -> None:
    with pytest.raises(NotReplayable):
        prepare(call, CPU)
    assert measure_calls(CPU, {call: 1.0}, {}, 1.0) == {}


# ---------------------------------------------------------------------- measuring


PRODUCT = text("mm.default", tensor(128, 128), tensor(128, 128))
SUM = text("add.Tensor", tensor(64, 64), tensor(64, 64))


def test_the_heaviest_are_measured_first_and_what_is_known_or_weighs_nothing_is_not() -> None:
    order: list[str] = []
    light = text("add.Tensor", tensor(2), tensor(2))
    impossible = text("mm.default", tensor(3, 4), tensor(3, 4))
    weights = {SUM: 0.2, light: 1e-4, PRODUCT: 0.5, impossible: 0.3}
    state = torch.get_rng_state()
    found = measure_calls(CPU, weights, {}, 10.0, lambda op, _done: order.append(op))
    assert order == ["mm.default", "mm.default", "add.Tensor"]
    assert set(found) == {PRODUCT, SUM}
    assert all(1e-7 < seconds < 1 for seconds in found.values())
    assert found[PRODUCT] == float(f"{found[PRODUCT]:.4g}")
    assert torch.equal(torch.get_rng_state(), state)
    assert torch.is_grad_enabled()
    assert set(measure_calls(CPU, weights, {PRODUCT: 1.0}, 10.0)) == {SUM}


def test_a_spent_budget_ends_it() -> None:
    assert measure_calls(CPU, {PRODUCT: 0.5, SUM: 0.5}, {}, -1.0) == {}


def test_a_models_heavy_calls_are_measured() -> None:
    graph, device = trace(job_for("tiny_gpt"), ROWS), small_machine().device
    weights = call_weights([graph], device)
    found = measure_calls(CPU, weights, {}, 60.0)
    assert sum(weights[call] for call in found) > 0.98


# ---------------------------------------------------------------------- what is kept


@pytest.fixture
def gpu_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A computer with a GPU whose machine file is there; calls take a second each, but those of `sub`, which fail."""
    monkeypatch.setenv("ANYFIT_CACHE", str(tmp_path))
    machine = small_machine()
    machine = dataclasses.replace(machine, device=dataclasses.replace(machine.device, kind="cuda"))
    machine.save(cache.machine_file("quick"))

    def measure(_device: object, weights: Any, known: Any, _budget: float, _report: object) -> dict[str, float]:
        return {call: 1.0 for call in weights if call not in known and not call.startswith("sub")}

    monkeypatch.setattr(cache, "measure_calls", measure)
    return machine


def test_calls_are_kept_in_the_machine_file_and_measured_once(gpu_here: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    limited = gpu_here.with_limits(device_memory="1GiB")
    timed = cache.with_calls(limited, {"mm": 0.9, "sub": 0.1}, 1.0)
    assert timed.device.measured == {"mm": 1.0}
    assert timed.limits == limited.limits
    assert cache.cached("quick").device.measured == {"mm": 1.0}
    assert cache.cached("quick").limits == gpu_here.limits
    monkeypatch.setattr(cache, "measure_calls", lambda *_arguments: {})
    assert cache.with_calls(gpu_here, {"mm": 1.0}, 1.0).device.measured == {"mm": 1.0}


def test_a_machine_that_is_not_at_hand_is_left_as_it_is(gpu_here: Machine) -> None:
    faster = dataclasses.replace(gpu_here.device, launch_seconds=gpu_here.device.host_seconds, name="another")
    for machine in (dataclasses.replace(gpu_here, device=faster), Machine.load("h200"), small_machine()):
        assert cache.with_calls(machine, {"mm": 1.0}, 1.0) == machine
