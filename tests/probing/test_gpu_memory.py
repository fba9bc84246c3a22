"""What a GPU's figures become, on a GPU made of answers; and the real one where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from anyfit.probing import copies, cuda, memory, probe, update
from anyfit.probing.meters import QUICK

GIB = 2**30
GPU = torch.device("cuda", 0)


@pytest.fixture
def fresh_question() -> Iterator[None]:
    memory.gpus_before_use.cache_clear()
    yield
    memory.gpus_before_use.cache_clear()


@pytest.fixture
def nvidia_smi(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_question: None):
    """A tool of that name that gives the answer it is told to."""

    def answer(text: str, status: int = 0) -> None:
        tool = tmp_path / "nvidia-smi"
        tool.write_text(f"#!/bin/sh\ncat <<'END'\n{text}\nEND\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
        monkeypatch.setattr(memory, "is_in_use", lambda: False)

    return answer


def pretend_gpu(monkeypatch: pytest.MonkeyPatch, free: float) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="abc-1"))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (int(free), 80 * GIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 2 * GIB)


def test_what_others_hold_is_neither_usable_nor_context(monkeypatch: pytest.MonkeyPatch, nvidia_smi) -> None:
    nvidia_smi("GPU-abc-1, 10240, 580.65.06\nGPU-def-2, 0, 580.65.06")
    pretend_gpu(monkeypatch, free=67.5 * GIB)
    usable, context = memory.gpu_figures(GPU)
    assert usable.value == 70 * GIB
    assert "other processes" in usable.source
    assert context.value == 0.5 * GIB


@pytest.mark.parametrize(("text", "status"), [("", 9), ("GPU-abc-1, [N/A], 580", 0), ("no devices were found", 0)])
def test_where_nobody_can_say_it_counts_as_context(monkeypatch: pytest.MonkeyPatch, nvidia_smi, text: str, status: int) -> None:
    nvidia_smi(text, status)
    pretend_gpu(monkeypatch, free=67.5 * GIB)
    usable, context = memory.gpu_figures(GPU)
    assert usable.value - context.value == 69.5 * GIB, "what the allocator may reserve is the same"


def test_what_no_context_takes_is_held_by_others_that_came_since(monkeypatch: pytest.MonkeyPatch, nvidia_smi) -> None:
    nvidia_smi("GPU-abc-1, 10240, 580.65.06")
    pretend_gpu(monkeypatch, free=40 * GIB)
    usable, context = memory.gpu_figures(GPU)
    assert context.value == 2 * GIB
    assert usable.value == 44 * GIB
    assert "other processes" in usable.source


def test_once_this_process_is_on_the_gpu_nothing_is_asked(monkeypatch: pytest.MonkeyPatch, nvidia_smi) -> None:
    nvidia_smi("GPU-abc-1, 10240, 580.65.06")
    monkeypatch.setattr(memory, "is_in_use", lambda: True)
    assert memory.gpus_before_use() == {}


@pytest.mark.gpu
def test_a_probed_gpu_has_copies_and_a_context() -> None:
    machine = probe.measure("quick")
    assert machine.device.kind == "cuda"
    assert 0 < machine.device.context_bytes.value < 4 * GIB
    assert machine.device.matmul["bfloat16"].peak > machine.device.matmul["float32"].peak
    assert machine.copies is not None
    for curve in (machine.copies.up, machine.copies.down, machine.copies.up_both, machine.copies.down_both):
        assert [size for size, _ in curve.points] == list(QUICK.copy_bytes)
        assert curve.points[-1][1] > curve.points[0][1], "large copies are faster"


@pytest.mark.gpu
def test_matmul_libraries_hold_workspaces_however_often_they_are_asked_for() -> None:
    first = memory.workspace_figure(GPU).value
    assert 2**20 <= first < GIB
    assert memory.workspace_figure(GPU).value == first


@pytest.mark.gpu
def test_kernel_time_leaves_the_launch_out() -> None:
    number = torch.ones(1, device=GPU)
    kernel, paced = (min(timer(lambda: number + 1, 50) for _ in range(5)) for timer in (cuda.kernel_seconds, cuda.paced_seconds))
    assert 0 < kernel < paced


@pytest.mark.gpu
def test_pinned_buffers_are_given_back() -> None:
    with cuda.pinned(2**20) as buffer:
        assert buffer.is_pinned()
    assert not buffer.is_pinned()


@pytest.mark.gpu
def test_copies_carry_the_bytes() -> None:
    with copies.directions(GPU, 2**20) as (up, down):
        up.source.fill_(7)
        up.copy(1)
        down.copy(1)
        torch.cuda.synchronize()
        assert bool((up.target == 7).all())
        assert bool((down.target == 1).all())


@pytest.mark.gpu
def test_the_device_load_ends_with_its_context() -> None:
    with update.device_loads(GPU) as load, load():
        assert torch.ones(4).sum() == 4
