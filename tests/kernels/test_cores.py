"""Nodes of memory: how they are found, that threads and pages are divided over them, and that no number depends on it.

Most machines have one node, so that these tests invent some: where threads run is read back, where a page lies is not.
"""

from __future__ import annotations

import contextlib
import os
import resource
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from anyfit.kernels import adamw as module
from anyfit.kernels import pages
from anyfit.kernels.adamw import Settings, State, adamw, adamw_in_torch, is_native
from anyfit.kernels.pages import HUGE_PAGE_BYTES, Nodes, in_huge_pages, nodes, parts, touch
from anyfit.kernels.sums import add

HERE = tuple(sorted(os.sched_getaffinity(0)))
FIRST, LAST = HERE[0], HERE[-1]
INVENTED: dict[str, Nodes] = {
    "two": ((FIRST,), (LAST,)),
    "uneven": ((FIRST, LAST), (LAST,)),
    "four": ((FIRST,), (LAST,), (FIRST,), (LAST,)),
}


@pytest.fixture(params=INVENTED)
def invented(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    """Nodes that the kernel works on."""
    assert is_native()
    kernel = module._kernel()
    assert kernel is not None
    kernel.use(INVENTED[request.param])
    yield INVENTED[request.param]
    kernel.use(nodes())


# ---------------------------------------------------------------------- how they are found


def folder_of(path: Path, **lists: str) -> Path:
    for name, processors in lists.items():
        (path / name).mkdir()
        (path / name / "cpulist").write_text(processors + "\n")
    (path / "possible").write_text("0-1\n")
    return path


def test_a_machine_with_two_sockets_has_two_nodes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, node0="0-3,8-11", node1="4-7,12-15")
    assert nodes(folder, range(16)) == ((0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))


def test_only_processors_that_may_be_used_count(tmp_path: Path) -> None:
    folder = folder_of(tmp_path, node0="0-3", node1="4-7", node2="8-11")
    assert nodes(folder, {2, 3, 9}) == ((2, 3), (9,))
    assert nodes(folder, {5, 6}) == ((5, 6),)


def test_memory_without_processors_is_no_node(tmp_path: Path) -> None:
    assert nodes(folder_of(tmp_path, node0="0-1", node1="", node2="2"), range(3)) == ((0, 1), (2,))


def test_nodes_are_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    assert nodes(folder_of(tmp_path, node10="0", node2="1", node0="2"), range(3)) == ((2,), (1,), (0,))


@pytest.mark.parametrize("lists", [{}, {"node0": "0-1"}, {"node0": "0-2", "node1": "2-3"}, {"node0": "all", "node1": "3"}])
def test_where_the_system_does_not_say_there_is_one_node(tmp_path: Path, lists: dict[str, str]) -> None:
    assert nodes(folder_of(tmp_path, **lists), {3, 0, 1, 2}) == ((0, 1, 2, 3),)


def test_this_machines_nodes_have_all_processors_of_this_process() -> None:
    assert sorted(each for node in nodes() for each in node) == list(HERE)


# ---------------------------------------------------------------------- threads


def threads_of_this_process() -> dict[int, frozenset[int]]:
    """The processors that each may run on."""
    found = {}
    for each in Path("/proc/self/task").iterdir():
        with contextlib.suppress(ProcessLookupError):  # a thread of an earlier test may end meanwhile
            found[int(each.name)] = frozenset(os.sched_getaffinity(int(each.name)))
    return found


def states(elements: int) -> tuple[State, Tensor]:
    weights = torch.randn(elements)
    return State(weights, None, torch.zeros(elements), torch.zeros(elements)), torch.randn(elements).bfloat16()


def copy_of(state: State) -> State:
    return State(state.weights.clone(), None, state.m.clone(), state.v.clone())


def assert_same(one: State, other: State) -> None:
    assert all(torch.equal(*pair) for pair in zip(one.tensors, other.tensors, strict=True))


@pytest.mark.skipif(len(HERE) < 2, reason="needs two processors")
@pytest.mark.parametrize(
    ("invented", "threads", "shares"),
    [
        ("two", 2, (1, 1)),
        ("two", 8, (4, 4)),
        ("uneven", 2, (1, 1)),
        ("uneven", 3, (2, 1)),
        ("uneven", 8, (5, 3)),
        ("four", 3, (0, 1, 1, 1)),
        ("four", 8, (2, 2, 2, 2)),
    ],
    indirect=["invented"],
)
def test_threads_are_bound_to_nodes_in_proportion_to_their_cores_and_the_caller_is_not(
    invented: Nodes, threads: int, shares: tuple[int, ...]
) -> None:
    expected = Counter[frozenset[int]]()
    for node, share in zip(invented, shares, strict=True):
        expected[frozenset(node)] += share
    before = threads_of_this_process()
    adamw(*states(200_000), Settings(lr=0.1), 1, threads=threads)
    deadline = time.monotonic() + 10
    while True:
        after = threads_of_this_process()
        new = Counter(processors for each, processors in after.items() if each not in before)
        if new == expected:
            break
        assert time.monotonic() < deadline, new  # one whose work others have done may not have run yet
        time.sleep(0.01)
    assert after[threading.get_native_id()] == before[threading.get_native_id()]
    assert all(before[each] == processors for each, processors in after.items() if each in before)
    add(torch.zeros(200_000), torch.ones(200_000), is_first=False, threads=threads)
    assert not threads_of_this_process().keys() - after.keys()  # the same threads


def test_on_one_node_nothing_is_bound_and_the_caller_does_its_share() -> None:
    assert is_native()
    kernel = module._kernel()
    assert kernel is not None
    kernel.use((HERE[:1],))
    try:
        before = threads_of_this_process()
        adamw(*states(200_000), Settings(lr=0.1), 1, threads=3)
        after = threads_of_this_process()
    finally:
        kernel.use(nodes())
    assert [after[each] for each in after.keys() - before.keys()] == [frozenset(HERE)] * 2


@pytest.mark.parametrize("elements", [5, 16_384, 65_536, 300_003])
@pytest.mark.usefixtures("invented")
def test_numbers_do_not_depend_on_nodes(elements: int) -> None:
    start, gradient = states(elements)
    settings, ranges = Settings(lr=0.1, weight_decay=0.1), [(1, elements // 2), (elements // 2 + 1, elements)]
    expected, total = copy_of(start), torch.randn(elements)
    adamw_in_torch(expected, gradient, settings, 1, ranges=ranges)
    for threads in (1, 2, 3, 4, 7, 64):
        state, out, sums = copy_of(start), copy_of(start), total.clone()
        adamw(state, gradient, settings, 1, ranges=ranges, threads=threads)
        adamw(start, gradient, settings, 1, ranges=ranges, out=out, threads=threads)
        add(sums, gradient, is_first=False, threads=threads)
        assert_same(state, expected)
        assert_same(out, expected)
        assert torch.equal(sums, total + gradient)


@pytest.mark.usefixtures("invented")
def test_several_callers_at_once_share_the_nodes_threads() -> None:
    settings, given_of = Settings(lr=0.1), [states(100_003) for _ in range(4)]
    expected = [copy_of(state) for state, _ in given_of]
    for twin, (_, gradient) in zip(expected, given_of, strict=True):
        for step in range(1, 6):
            adamw_in_torch(twin, gradient, settings, step)

    def steps(state: State, gradient: Tensor) -> None:
        for step in range(1, 6):
            adamw(state, gradient, settings, step, threads=3)

    callers = [threading.Thread(target=steps, args=pair) for pair in given_of]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(timeout=60)
    for (state, _), twin in zip(given_of, expected, strict=True):
        assert_same(state, twin)


@pytest.mark.skipif(len(HERE) < 2, reason="needs two processors")
def test_a_forked_child_binds_threads_of_its_own(root: Path) -> None:
    code = """
import os, time, torch
from anyfit.kernels import adamw as module
from anyfit.kernels.adamw import Settings, State, adamw
first, *_, last = sorted(os.sched_getaffinity(0))
def go():
    n, before = 100_000, set(os.listdir("/proc/self/task"))
    state = State(torch.ones(n), None, torch.zeros(n), torch.zeros(n))
    adamw(state, torch.ones(n), Settings(lr=0.5), 1, threads=2)
    assert torch.allclose(state.weights, torch.tensor(0.5)), state.weights
    new = set(os.listdir("/proc/self/task")) - before
    deadline = time.monotonic() + 10
    while sorted(map(list, (os.sched_getaffinity(int(each)) for each in new))) != [[first], [last]]:
        assert time.monotonic() < deadline, new
        time.sleep(0.01)
module._kernel().use(((first,), (last,)))
go()
child = os.fork()
if child == 0:
    go()
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    subprocess.run([sys.executable, "-W", "ignore", "-c", code], check=True, cwd=root, timeout=120)


# ---------------------------------------------------------------------- pages


@given(size=st.integers(0, 40 * HUGE_PAGE_BYTES), counts=st.lists(st.integers(1, 9), min_size=1, max_size=5))
def test_every_node_has_its_share_of_the_bytes_to_the_nearest_huge_page(size: int, counts: list[int]) -> None:
    known: Nodes = tuple(tuple(range(100 * node, 100 * node + count)) for node, count in enumerate(counts))
    memory = in_huge_pages(size)[:size]
    found = {processors: (part.data_ptr() - memory.data_ptr(), part.numel()) for processors, part in parts(memory, known)}
    so_far = 0
    for start, length in found.values():
        assert start == so_far
        assert not start or (memory.data_ptr() + start) % HUGE_PAGE_BYTES == 0
        so_far += length
    assert so_far == size
    for processors in known:
        assert abs(found.get(processors, (0, 0))[1] - size * len(processors) / sum(counts)) <= HUGE_PAGE_BYTES


@pytest.mark.skipif(len(HERE) < 2, reason="needs two processors")
def test_pages_are_touched_by_threads_of_their_node(monkeypatch: pytest.MonkeyPatch) -> None:
    memory, seen, populate = in_huge_pages(32 * HUGE_PAGE_BYTES), [], pages._populate

    def watched(part: Tensor) -> None:
        seen.append((part.data_ptr(), part.numel(), os.sched_getaffinity(0)))
        populate(part)

    monkeypatch.setattr(pages, "_populate", watched)
    memory[7], memory[-7] = 7, 77
    touch(memory, ((FIRST,), (LAST,)))
    (start, length, of_first), (_, rest, of_last) = sorted(seen, key=lambda each: each[0])
    assert (start, length + rest) == (memory.data_ptr(), memory.numel())
    assert (of_first, of_last) == ({FIRST}, {LAST})
    assert os.sched_getaffinity(0) == set(HERE)
    assert (memory[7], memory[-7], memory.sum()) == (7, 77, 84)


@pytest.mark.skipif(tuple(map(int, os.uname().release.split(".")[:2])) < (5, 14), reason="needs Linux 5.14")
@pytest.mark.parametrize("known", [(HERE,), ((FIRST,), (LAST,))], ids=["one", "two"])
def test_what_was_touched_is_there(known: Nodes) -> None:
    def faults() -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

    memory = in_huge_pages(16 * HUGE_PAGE_BYTES)
    touch(memory, known)
    before = faults()
    memory[::4096] = 1
    assert faults() - before < 8
