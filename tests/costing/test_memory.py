"""A step as torch's allocator sees it: what is taken and given, in order."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

import anyfit
from anyfit.costing import memory
from anyfit.tracing import trace
from anyfit.values.graph import Graph

ROWS, WIDTH = 64, 512
MIB = 2**20


class Dropping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.inner(x))


def graph_of(model: Any) -> Graph:
    job = anyfit.Job(
        model=model,
        loss=lambda model, batch: model(batch).float().sum(),
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        sample=torch.zeros(ROWS, WIDTH),
        batch_size=ROWS,
        precision="bf16",
    )
    return trace(job, ROWS, "cuda")


@dataclass
class Written:
    """An allocator that writes down what it is asked."""

    events: list[tuple[str, int]] = field(default_factory=list)

    def take(self, size: int) -> int:
        self.events.append(("take", size))
        return size

    def give(self, *sizes: int) -> None:
        self.events += [("give", size) for size in sizes]


def played(graph: Graph, library_bytes: int = 0, *, consumed: bool = False) -> tuple[list[tuple[str, int]], list[int]]:
    allocator: Any = Written()
    left: Any = memory._play_pass(allocator, graph, anyfit.Machine.load("h200").device, library_bytes, consumed=consumed)
    return allocator.events, left


def test_gradients_stay_for_the_update_and_all_else_is_given_back() -> None:
    graph = graph_of(Dropping)
    events, left = played(graph)
    assert sorted(left) == sorted(2 * parameter.elements for parameter in graph.parameters)
    balance = sum(size if what == "take" else -size for what, size in events)
    assert balance == sum(left)


def test_gradients_that_add_up_elsewhere_are_given_back_as_they_come() -> None:
    events, left = played(graph_of(Dropping), consumed=True)
    assert left == []
    assert sum(size if what == "take" else -size for what, size in events) == 0


def test_a_batch_that_is_cast_waits_on_the_device_in_both_forms() -> None:
    events, _ = played(graph_of(Dropping))
    host_bytes = 4 * ROWS * WIDTH
    assert events[:3] == [("take", host_bytes // 2), ("take", host_bytes), ("give", host_bytes)]


def test_dropout_takes_its_mask_before_its_result() -> None:
    events, _ = played(graph_of(Dropping))
    mask = events.index(("take", ROWS * WIDTH))
    assert events[mask + 1] == ("take", 2 * ROWS * WIDTH)


def test_the_first_product_of_each_thread_takes_a_workspace_for_good() -> None:
    before, _ = played(graph_of(Dropping))
    after, _ = played(graph_of(Dropping), 65 * MIB)
    more = [event for event in after if event[1] >= MIB]
    assert more == [("take", 32 * MIB), ("take", MIB), ("take", 32 * MIB)]
    assert [event for event in after if event[1] < MIB] == before


def test_one_group_with_more_moments_is_not_updated_in_one_pass() -> None:
    device, rule = anyfit.Machine.load("h200").device, graph_of(Dropping).update
    assert rule.state_bytes_per_element == (8,)
    assert memory.is_in_one_pass(rule, device)
    assert not memory.is_in_one_pass(replace(rule, state_bytes_per_element=(8, 12)), device)  # amsgrad
    assert not memory.is_in_one_pass(rule, anyfit.Machine.load("laptop-cpu").device)


def test_scratch_for_masters_and_gradients_is_as_large_as_the_largest_chunk() -> None:
    """Where torch updates: here with more moments than a kernel knows."""
    device, graph = anyfit.Machine.load("h200").device, graph_of(Dropping)
    chunks = memory.chunks_of(graph, 1024)
    assert len({chunk.elements for chunk in chunks}) > 1
    by_torch = replace(graph, update=replace(graph.update, state_bytes_per_element=(12,)))
    assert memory.state_bytes(by_torch, chunks, device).scratch == 8 * max(chunk.elements for chunk in chunks)  # both in fp32
    assert memory.state_bytes(graph, chunks, device).scratch == max(chunk.bytes for chunk in chunks)  # gradients alone
