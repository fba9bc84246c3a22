"""Host memory that is handed out piece by piece, to whichever thread asks."""

from __future__ import annotations

import itertools
import sys
from concurrent.futures import ThreadPoolExecutor

import torch

from anyfit.placing.tiers import HostSlabs


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
