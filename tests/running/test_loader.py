"""The data order: every sample as often as asked, reproducible, resumable."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from anyfit.running.loader import Loader


def rows(loader: Loader) -> list[list[int]]:
    return [batch.tolist() for batch in loader]


@given(
    count=st.integers(1, 40),
    batch_size=st.integers(1, 7),
    epochs=st.integers(1, 3),
    seed=st.integers(0, 5),
    shuffle=st.booleans(),
    stop=st.integers(0, 100),
)
def test_every_sample_comes_once_an_epoch_and_a_resumed_order_is_the_same(
    count: int, batch_size: int, epochs: int, seed: int, shuffle: bool, stop: int
) -> None:
    dataset = torch.arange(count)
    if count * epochs < batch_size:
        with pytest.raises(ValueError, match="do not make one batch"):
            Loader(dataset, batch_size, seed, epochs, shuffle)
        return
    whole = rows(Loader(dataset, batch_size, seed, epochs, shuffle))
    assert len(whole) == count * epochs // batch_size
    flat = [row for batch in whole for row in batch]
    for epoch in range(epochs):
        part = flat[epoch * count : (epoch + 1) * count]
        assert max(Counter(part).values(), default=1) == 1
        assert len(part) == max(min(count, len(flat) - epoch * count), 0)  # only what makes no whole batch is left out
    resumed = Loader(dataset, batch_size, seed, epochs, shuffle)
    resumed.position = min(stop, len(whole))
    assert rows(resumed) == whole[stop:]


def test_epochs_and_seeds_have_orders_of_their_own() -> None:
    dataset = torch.arange(64)
    first, second = (rows(Loader(dataset, 64, seed, 2, shuffle=True)) for seed in (0, 1))
    assert len({tuple(batch) for batch in first + second}) == 4


def test_iterating_again_goes_on() -> None:
    loader = Loader(torch.arange(12), 3, 0, 1, shuffle=False)
    first = next(iter(loader)).tolist()
    assert [first, *rows(loader)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8], [9, 10, 11]]


def test_what_the_loader_decides_itself_is_refused() -> None:
    with pytest.raises(TypeError, match="decides drop_last itself"):
        Loader(torch.arange(12), 3, 0, 1, shuffle=True, drop_last=True)
    with pytest.raises(TypeError, match=r"len\(\) and indexing"):
        Loader(iter([1, 2]), 1, 0, 1, shuffle=True)  # type: ignore[arg-type]


def test_iterating_draws_no_random_number_of_the_models() -> None:
    before = torch.get_rng_state()
    list(Loader(list(range(10)), 2, seed=0, epochs=1, shuffle=True))
    assert torch.equal(torch.get_rng_state(), before)
