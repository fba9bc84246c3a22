"""The ops whose bandwidth is measured are those that a pass calls, and their bytes are counted alike."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.probing import cuda, operations
from anyfit.probing.compute import host_meter
from anyfit.probing.meters import QUICK
from anyfit.probing.operations import CALLS, Material, touched_bytes
from anyfit.tracing.recorder import _touched_bytes
from anyfit.values.machine import OPERATIONS

CPU = torch.device("cpu")


class Recorded(TorchDispatchMode):
    """Names and bytes of the calls made, as the recorder of a pass would write them down."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs, outputs = (
            [leaf for leaf in pytree.tree_leaves(nest) if isinstance(leaf, torch.Tensor)] for nest in ((args, kwargs), result)
        )
        packet = func._overloadpacket
        self.calls.append((packet.__name__, _touched_bytes(packet, inputs, outputs)))
        return result


def test_there_is_a_call_for_every_known_op() -> None:
    assert tuple(CALLS) == OPERATIONS
    assert all(hasattr(torch.ops.aten, name) for name in OPERATIONS)


@pytest.mark.parametrize("name", OPERATIONS)
@torch.no_grad()
def test_bytes_are_those_that_the_recorder_counts(name: str) -> None:
    with torch.random.fork_rng([]):
        calls = CALLS[name](Material.make(CPU, 2**16))
        with Recorded() as recorded:
            calls.run()
        known = [call for call in recorded.calls if call[0] in OPERATIONS]  # picking a batch norm makes an empty tensor too
        assert known == [(name, touched_bytes(calls))] * calls.count


@torch.no_grad()
def test_the_copy_turns_heads_and_positions_around() -> None:
    given = Material.make(CPU, 2**23)
    (heads_last,) = CALLS["clone"](given).reads
    assert heads_last.shape == (2, 1024, operations.HEADS, operations.WIDTH // operations.HEADS)
    assert not heads_last.is_contiguous()


@torch.no_grad()
def test_little_room_leaves_large_sizes_out() -> None:
    sizes = operations.INPUT_BYTES["cpu"]
    with torch.random.fork_rng([]):
        ladders = operations.operation_ladders(CPU, QUICK.brief, operations.MOST_TENSORS * sizes[0])
    assert {len(ladder.rungs) for ladder in ladders.values()} == {1}


def test_the_host_is_measured_in_training_though_the_probe_keeps_no_gradients() -> None:
    with torch.random.fork_rng([]), torch.no_grad():
        assert 1e-7 < host_meter(CPU, QUICK).read() < 1e-3


class PretendDevice:
    """Stands in for torch.cuda, its events included: a nap of 10 ms outlasts the queueing of any burst."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.naps: list[float] = []
        self.runs = 0
        monkeypatch.setattr(cuda, "_cuda", self)
        monkeypatch.setattr(cuda, "seconds_between", lambda start, end: 6.4)

    def _sleep(self, cycles: int) -> None:
        self.naps.append(cycles / cuda.NAP_CYCLES_PER_SECOND)

    def Event(self, **_: bool) -> PretendDevice:  # noqa: N802
        return self

    def record(self) -> None:
        pass

    def query(self) -> bool:
        return self.naps[-1] < 0.01

    def work(self) -> None:
        self.runs += 1


def test_a_burst_never_fills_the_queue_and_naps_until_all_of_it_is_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendDevice(monkeypatch)
    monkeypatch.setattr(cuda.time, "perf_counter", lambda: 0.0)
    assert cuda.kernel_seconds(device.work, 10_000) == pytest.approx(0.1)
    assert device.naps == pytest.approx([cuda.LEAST_NAP_SECONDS * 3**power for power in range(5)])
    assert device.runs == 1 + 5 * cuda.LONGEST_BURST


def test_work_that_waits_for_the_device_does_not_nap_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    device = PretendDevice(monkeypatch)
    monkeypatch.setattr(device, "query", lambda: True)
    cuda.kernel_seconds(device.work, 1)
    assert device.naps[-1] == pytest.approx(cuda.LONGEST_NAP_SECONDS)
