"""Memory that is made ready before it is asked for: never more than is planned, and the same numbers in it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import anyfit
from anyfit import starting
from anyfit.kernels.pages import HUGE_PAGE_BYTES
from anyfit.placing.stock import Stock
from anyfit.probing import host
from tests.machines import small_machine
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, hand_written

PLANNED = 40 * HUGE_PAGE_BYTES


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(start, 16) <= address < int(end, 16) for start, end in ranges)


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 30
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def stock_threads() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "anyfit stock"]


def test_model_and_touched_memory_together_are_never_more_than_is_planned() -> None:
    before = resident_bytes()
    stock = Stock(PLANNED, 30 * HUGE_PAGE_BYTES + 1, threads=2)
    wait_until(lambda: stock.touched_bytes == 9 * HUGE_PAGE_BYTES)
    time.sleep(0.05)
    assert stock.touched_bytes == 9 * HUGE_PAGE_BYTES
    assert resident_bytes() - before >= 8 * HUGE_PAGE_BYTES
    stock.model_takes(10 * HUGE_PAGE_BYTES)
    wait_until(lambda: stock.touched_bytes == 30 * HUGE_PAGE_BYTES)
    stock.model_takes(0)
    wait_until(lambda: stock.touched_bytes == PLANNED)
    stock.close()
    assert stock_threads() == []


def test_a_model_that_takes_more_than_is_planned_leaves_nothing_to_touch() -> None:
    stock = Stock(PLANNED, 2 * PLANNED, threads=1)
    time.sleep(0.02)
    assert stock.touched_bytes == 0
    slab = stock.take(HUGE_PAGE_BYTES)
    assert slab is not None
    assert not slab.any()
    stock.close()


def test_slabs_are_zero_lie_apart_and_go_back_one_by_one() -> None:
    stock = Stock(PLANNED, 0, threads=2)
    sizes = [4096, 3 * HUGE_PAGE_BYTES, 12288, 30 * HUGE_PAGE_BYTES]
    slabs: list[Any] = [stock.take(size) for size in sizes]
    assert [len(each) for each in slabs] == sizes
    for number, slab in enumerate(slabs):
        assert not slab.any()
        slab.fill_(number + 1)
    assert stock.take(PLANNED) is None
    for number, slab in enumerate(slabs):
        assert bool((slab == number + 1).all())
    first, large, _, last = (each.data_ptr() for each in slabs)
    rest = last + sizes[-1]
    assert is_mapped(rest)
    stock.close()
    assert not is_mapped(rest)  # nobody has taken it
    assert stock.take(4096) is None
    del slab, slabs[1]
    gc.collect()
    assert [is_mapped(each) for each in (first, large, last)] == [True, False, True]
    assert bool((slabs[-1] == 4).all())
    slabs.clear()
    assert not any(is_mapped(each) for each in (first, large, last))


def stocked_job(**options: Any) -> anyfit.Job:
    return anyfit.Job(
        **{
            "model": tiny_gpt,
            "loss": next_byte_loss,
            "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
            "sample": byte_batches(1, 4)[0],
            "batch_size": 4,
            "precision": "bf16",
            "seed": 5,
            **options,
        }
    )


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[Stock]:
    """Stocks that were made, of however small a plan."""
    stocks: list[Stock] = []

    class Watched(Stock):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.given_out = 0
            stocks.append(self)

        def take(self, size: int) -> Any:
            self.given_out += size
            return super().take(size)

    monkeypatch.setattr(starting, "LEAST_BYTES", 1)
    monkeypatch.setattr(starting, "Stock", Watched)
    return stocks


@pytest.mark.parametrize("placement", [AWAY, AWAY_STREAMED, ON_HOST])
@pytest.mark.parametrize("is_built", [False, True])
def test_a_run_from_a_stock_starts_with_the_weights_of_plain_pytorch(made: list[Any], placement: Any, is_built: bool) -> None:
    torch.manual_seed(5)
    plain = tiny_gpt()
    expected = {name: each.clone() for name, each in plain.state_dict().items()}
    job = stocked_job(model=plain if is_built else tiny_gpt)
    plan = hand_written(job, placement, chunk_bytes=2**14)
    plan = replace(plan, forecast=replace(plan.forecast, peak_bytes={"device": 2**24, "host": 2**25, "disk": 0}))
    with anyfit.start(job, plan, small_machine()) as run:
        assert_bit_equal(run.state_dict(), expected)
        assert [stock.given_out > 0 for stock in made] == [True]
        assert stock_threads() == []
        run.step(job.sample)
        assert not torch.equal(run.state_dict()["head.weight"], expected["head.weight"])


def test_a_function_that_cannot_make_the_model_leaves_no_thread_behind(made: list[Any]) -> None:
    seen = []

    def model() -> nn.Module:
        if torch.empty(1).is_meta:  # planned on
            return tiny_gpt()
        seen.append(len(stock_threads()))
        raise RuntimeError("no weights today")

    job = stocked_job(model=tiny_gpt)
    plan = hand_written(job, AWAY, chunk_bytes=2**14)
    plan = replace(plan, forecast=replace(plan.forecast, peak_bytes={"device": 2**24, "host": 2**25, "disk": 0}))
    with pytest.raises(RuntimeError, match="no weights today"):
        anyfit.start(replace(job, model=model), plan, small_machine())
    assert seen == [max(host.cores() - 1, 1)]
    assert stock_threads() == []
    assert len(made) == 1


def test_what_is_not_free_is_left_to_the_function_that_makes_the_model(made: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "left_memory_bytes", lambda: 2.0**20)
    touched = []

    def model() -> nn.Module:
        time.sleep(0.05)
        touched.extend(stock.touched_bytes for stock in made)
        return tiny_gpt()

    job = stocked_job(model=model)
    plan = hand_written(stocked_job(), AWAY, chunk_bytes=2**14)
    plan = replace(plan, forecast=replace(plan.forecast, peak_bytes={"device": 2**24, "host": 2**25, "disk": 0}))
    with anyfit.start(job, plan, small_machine()):
        assert touched == [0]
