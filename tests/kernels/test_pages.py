"""Host memory of our own: huge pages of it, and what a forked process sees."""

from __future__ import annotations

import gc
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from anyfit.kernels.pages import HUGE_PAGE_BYTES, in_huge_pages, nodes, show_to_children, touch
from anyfit.placing.tiers import HostSlabs

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="Linux says how it maps memory")
SIZE = 8 * HUGE_PAGE_BYTES


def mapping_of(memory: Tensor) -> dict[str, str]:
    """What the kernel says of the mapping that holds these bytes; its head line is `where`."""
    found: dict[str, str] = {}
    for line in Path("/proc/self/smaps").read_text().splitlines():
        name, _, value = line.partition(":")
        if "-" in name.split()[0]:
            start, end = (int(each, 16) for each in name.split()[0].split("-"))
            if found:
                return found
            inside = start <= memory.data_ptr() < end
            found = {"where": line} if inside else {}
        elif found:
            found[name] = value.strip()
    return found


def in_a_child(work: Callable[[], bool]) -> int:
    """How a forked child ends that does this: 0 where it holds."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads that the child does not have
        child = os.fork()
    if not child:
        torch.set_num_threads(1)
        os._exit(0 if work() else 1)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_memory_is_private_and_asks_for_huge_pages() -> None:
    memory = touch(in_huge_pages(SIZE), nodes())
    found = mapping_of(memory)
    assert (
        found["where"].split()[1] == "rw-p"
    )  # what is shared would be in small pages wherever the kernel is not set up otherwise
    assert {"hg", "dc"} <= set(found["VmFlags"].split())
    assert int(memory.count_nonzero()) == 0
    if "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text():
        assert int(found["AnonHugePages"].split()[0]) > 0


def test_memory_goes_back_with_the_last_tensor_that_looks_at_it() -> None:
    memory = in_huge_pages(SIZE)
    part = memory[100:200].view(torch.int16)
    del memory
    gc.collect()
    assert part.fill_(3).sum() == 150
    before = _mapped_kib()
    del part
    assert before - _mapped_kib() >= SIZE // 1024


def _mapped_kib() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE") // 1024


def test_a_forked_child_gives_nothing_back_that_is_the_parents() -> None:
    memory = [touch(in_huge_pages(SIZE), nodes()).fill_(7)]
    address = memory[0].data_ptr()

    def drops() -> bool:
        mine = torch.full((SIZE // 4,), 5.0)  # perhaps at the same addresses, which are free here
        memory.clear()
        gc.collect()
        return bool((mine == 5).all()) and address > 0

    assert in_a_child(drops) == 0
    assert bool((memory[0] == 7).all())


def test_what_a_closed_run_leaves_behind_is_there_in_forked_children() -> None:
    slabs = HostSlabs(torch.device("cpu"))
    left = slabs.zeros(SIZE, torch.uint8, crosses=False).fill_(7)
    slabs.close()
    assert in_a_child(lambda: bool((left == 7).all())) == 0
    other = in_huge_pages(SIZE).fill_(3)
    show_to_children(other)
    assert in_a_child(lambda: bool((other == 3).all())) == 0
