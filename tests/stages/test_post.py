"""Parcels between ranks: over a wire whose sends end only when their receives are posted, and that knows no tags."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch

from anyfit.stages.post import Key, LostError, Parcel, Post, packed

from .wires import Rendezvous, in_threads


@contextmanager
def posts(count: int) -> Iterator[list[Post]]:
    wires = Rendezvous()
    wires.prepare(count)
    yield [Post(rank, count, wires.of(rank)) for rank in range(count)]


TENSORS = [
    torch.arange(6.0).view(2, 3),
    torch.arange(6.0).view(2, 3).t(),
    torch.ones(4, 1).expand(4, 3),
    torch.tensor(3),
    torch.tensor([True, False]),
    torch.empty(0, 5),
    torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    torch.randn(3).bfloat16(),
    None,
]


def test_tensors_of_any_kind_arrive_as_they_were() -> None:
    with posts(2) as (first, second):
        for number in range(2):  # the second time without a header
            key = Key("forward", 0, 1, number)
            first.give(Parcel(key, packed(TENSORS), {"a word": number // 2}), 1)
        for number in range(2):
            found = second.take(Key("forward", 0, 1, number))
            assert found.word == {"a word": 0}
            for mine, theirs in zip(found.tensors, TENSORS, strict=True):
                if theirs is None or mine is None:
                    assert mine is theirs
                else:
                    assert mine.dtype == theirs.dtype
                    assert torch.equal(mine, theirs)
        first.finish()


def test_a_tensor_keeps_the_order_of_its_dimensions() -> None:
    with posts(2) as (first, second):
        image = torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last)
        first.give(Parcel(Key("forward", 0, 1, 0), packed([image])), 1)
        (found,) = second.take(Key("forward", 0, 1, 0)).tensors
        assert found is not None
        assert found.is_contiguous(memory_format=torch.channels_last)


def test_ranks_that_send_to_each_other_at_once_do_not_wait_for_each_other() -> None:
    """Each sends all that it has before it asks for anything, and asks in another order than it was sent."""
    with posts(3) as offices:

        def work(rank: int) -> Callable[[], None]:
            def run() -> None:
                mine, others = offices[rank], [each for each in range(3) if each != rank]
                for number in range(5):
                    for to in others:
                        mine.give(Parcel(Key("forward", rank, to, number), packed([torch.full((1000,), float(rank))])), to)
                for number in reversed(range(5)):
                    for source in others:
                        (found,) = mine.take(Key("forward", source, rank, number)).tensors
                        assert found is not None
                        assert float(found[0]) == source
                mine.finish()

            return run

        assert in_threads([work(rank) for rank in range(3)]) == []


def test_a_rank_that_fails_tells_all_who_wait_for_it_and_they_tell_others() -> None:
    with posts(3) as (first, second, third):

        def forward() -> None:
            with pytest.raises(LostError, match="rank 1 of the pipeline has failed: LostError: rank 2"):
                first.take(Key("backward", 1, 0, 0))

        def between() -> None:
            with pytest.raises(LostError, match="rank 2 of the pipeline has failed: ValueError: a mistake") as caught:
                second.take(Key("backward", 2, 1, 0))
            second.fail(caught.value)

        def fails() -> None:
            third.fail(ValueError("a mistake"))
            with pytest.raises(LostError, match="this rank has failed before: ValueError: a mistake"):
                third.take(Key("forward", 1, 2, 0))

        assert in_threads([forward, between, fails]) == []


def test_a_rank_that_is_gone_is_noticed_by_whoever_waits() -> None:
    wires = Rendezvous()
    post = Post(0, 2, wires.of(0))
    threading.Timer(0.1, wires.broken.set).start()
    with pytest.raises(LostError, match=r"rank 1 of the pipeline is gone \(Connection closed by peer\)"):
        post.take(Key("backward", 1, 0, 0))


def test_what_was_sent_is_let_go_when_the_other_rank_has_it() -> None:
    with posts(2) as (first, second):
        sent = torch.ones(1000)
        held = weakref.ref(sent.untyped_storage())
        first.give(Parcel(Key("forward", 0, 1, 0), packed([sent])), 1)
        del sent
        gc.collect()
        assert held() is not None
        second.take(Key("forward", 0, 1, 0))
        second.give(Parcel(Key("backward", 1, 0, 0), (None,)), 0)
        first.take(Key("backward", 1, 0, 0))
        gc.collect()
        assert held() is None
