"""Host memory that is handed out piece by piece, to whichever thread asks."""

from __future__ import annotations

import itertools
import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from anyfit.kernels import pages
from anyfit.placing import tiers
from anyfit.placing.tiers import LEAST_DIVIDED_BYTES, HostSlabs


def test_what_several_threads_take_at_once_is_nobody_elses() -> None:
    slabs, before = HostSlabs(torch.device("cpu")), sys.getswitchinterval()
    sizes = [64 + each % 32 for each in range(4000)]
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            taken = list(pool.map(lambda size: slabs.zeros(size, torch.float32, crosses=False), sizes))
    finally:
        sys.setswitchinterval(before)
    places = sorted((each.data_ptr(), each.data_ptr() + each.nbytes) for each in taken)
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places))
    assert slabs.bytes >= sum(each.nbytes for each in taken)


def test_on_several_nodes_each_array_of_some_size_is_divided_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    first, last = min(os.sched_getaffinity(0)), max(os.sched_getaffinity(0))
    touched: list[tuple[int, int]] = []
    monkeypatch.setattr(tiers, "nodes", lambda: ((first,), (last,)))
    monkeypatch.setattr(pages, "_populate", lambda part: touched.append((part.data_ptr(), part.numel())))
    slabs = HostSlabs(torch.device("cuda"))  # of which nothing is asked for what does not cross
    large = [slabs.zeros(LEAST_DIVIDED_BYTES * times // 4, torch.float32, crosses=False) for times in (1, 3)]
    small = [slabs.zeros(LEAST_DIVIDED_BYTES // 8, torch.float32, crosses=False) for _ in range(2)]
    slabs.close()
    for array in large:
        own = [size for start, size in touched if array.data_ptr() <= start < array.data_ptr() + array.nbytes]
        assert len(own) == 2
        assert sum(own) == array.nbytes
        assert abs(own[0] - own[1]) <= 2 * pages.HUGE_PAGE_BYTES
    assert small[1].data_ptr() == small[0].data_ptr() + small[0].nbytes
    assert len(touched) == 2 * (len(large) + 1)
