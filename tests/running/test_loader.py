"""The data order: every sample as often as asked, reproducible, resumable."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

from anyfit.placing.ranks import Ranks
from anyfit.running.loader import Loader
from anyfit.values.mesh import Mesh


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


# ---------------------------------------------------------------------- random numbers


SHARED = np.random.default_rng()  # as a script has one beside its dataset


class Augmented(Dataset[Tensor]):
    """Draws from everything that a dataset may draw from."""

    def __init__(self) -> None:
        self.own, self.old, self.torchs = np.random.default_rng(), np.random.RandomState(), torch.Generator()
        self.transforms = [random.Random()]

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        drawn = [random.random(), np.random.rand(), float(torch.rand(1))]
        drawn += [self.own.random(), self.old.rand(), self.transforms[0].random(), SHARED.random()]
        return torch.tensor([index, *drawn, float(torch.rand(1, generator=self.torchs))])


def noisy(samples: list[Tensor]) -> Tensor:
    """As a masking collate_fn draws."""
    return torch.stack(samples) + np.random.rand()


def batches(workers: int, start: int = 0, rank: int = 0, **options: Any) -> list[Tensor]:
    loader = Loader(Augmented(), 4, 0, 1, True, Ranks(rank, 2), num_workers=workers, collate_fn=noisy, **options)
    loader.position = start
    return list(loader)


@pytest.fixture(scope="module")
def drawn() -> list[Tensor]:
    return batches(0)


def test_random_numbers_of_a_batch_are_the_same_with_workers_and_after_a_resume(drawn: list[Tensor]) -> None:
    assert len({tuple(row.tolist()) for batch in drawn for row in batch}) == 12
    assert torch.equal(torch.stack(batches(0, 3)), torch.stack(drawn[3:]))
    assert torch.equal(torch.stack(batches(2)), torch.stack(drawn))
    assert torch.equal(torch.stack(batches(2, 3, persistent_workers=True)), torch.stack(drawn[3:]))


def test_ranks_draw_random_numbers_of_their_own(drawn: list[Tensor]) -> None:
    mine, theirs = (torch.cat(each)[:, 1:] for each in (drawn, batches(0, rank=1)))
    assert not (mine[:, None] == theirs[None]).any()


def begin_worker(worker: int) -> None:
    dataset: Any = get_worker_info().dataset
    dataset.own = np.random.default_rng(worker)


def test_a_worker_begins_as_the_user_wants_with_the_users_own_dataset(drawn: list[Tensor]) -> None:
    assert torch.equal(torch.stack(batches(2, 3, worker_init_fn=begin_worker)), torch.stack(drawn[3:]))


def test_making_batches_leaves_the_models_random_numbers_and_the_datasets_as_they_were() -> None:
    dataset = Augmented()
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), dataset.own.bit_generator.state
    list(Loader(dataset, 4, 0, 1, shuffle=False))
    after = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist(), dataset.own.bit_generator.state
    assert torch.equal(before[0], after[0])
    assert before[1:] == after[1:]


class Stream(IterableDataset[int]):
    def __len__(self) -> int:
        return 8

    def __iter__(self) -> Iterator[int]:
        yield from range(8)


def test_what_cannot_be_gone_on_with_is_refused_by_name() -> None:
    with pytest.raises(TypeError, match=r"got Stream; hand batches of your own loader to run\.step"):
        Loader(Stream(), 2, 0, 1, shuffle=False)  # type: ignore[arg-type]
    for name in ("generator", "batch_sampler", "sampler", "in_order"):
        with pytest.raises(TypeError, match=f"decides {name} itself: "):
            Loader(torch.arange(12), 3, 0, 1, shuffle=True, **{name: None})


def test_ranks_of_one_tensor_axis_get_the_same_share_and_the_same_random_numbers() -> None:
    found = []
    for rank in range(4):
        ranks = Ranks(rank, 4)
        ranks.mesh = Mesh.of({"data": 2, "tensor": 2})
        loader = Loader(torch.arange(8), 4, 0, 1, True, ranks, collate_fn=lambda drawn: (drawn, float(torch.rand(()))))
        found.append([([int(each) for each in drawn], number) for drawn, number in loader])
    assert found[0] == found[1]
    assert found[2] == found[3]
    assert sorted(each for at in (0, 2) for drawn, _ in found[at] for each in drawn) == list(range(8))
