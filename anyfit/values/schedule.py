"""Schedules: which rank of a pipeline does what of which stage with which micro-batch, in which order.

A table has the actions of every rank, one after the other; what a rank waits for follows from the stages. Stage s is on rank
s % ranks. With a stage a rank it is 1F1B: a rank goes as far ahead as there are stages after its own, and then takes turns, so
that stage s of p holds at most p - s micro-batches. With more stages a rank it is interleaved 1F1B: micro-batches go through in
rounds of about as many as there are ranks, each round through all stages of a rank before the next; that makes the bubble as
many times smaller, and each rank holds more of them.

Where all stages take f + b, a micro-batch costs a rank v (f + b) over its v stages, and the first waits for p - 1 others: a step
of m micro-batches takes (m v + p - 1) (f + b).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias

Pass: TypeAlias = Literal["forward", "backward"]


class Action(NamedTuple):
    rank: int
    of: Pass
    stage: int
    micro_batch: int


Table: TypeAlias = tuple[tuple[Action, ...], ...]  # by rank
Over: TypeAlias = dict[tuple[Pass, int, int], float]  # by pass, stage and micro-batch, when it is through


def rank_of(stage: int, ranks: int) -> int:
    return stage % ranks


def table(ranks: int, stages: int, micro_batches: int) -> Table:
    """1F1B, interleaved where a rank has several stages.

    >>> for each in table(2, 2, 3):
    ...     print(*(f"{action.of[0]}{action.micro_batch}" for action in each))
    f0 f1 b0 f2 b1 b2
    f0 b0 f1 b1 f2 b2
    """
    refuse(ranks, stages, micro_batches)
    return tuple(tuple(_of_rank(rank, ranks, stages // ranks, micro_batches)) for rank in range(ranks))


def forward_only(ranks: int, stages: int, micro_batches: int) -> Table:
    """As an evaluation goes through."""
    return tuple(
        tuple(
            Action(rank, "forward", stage, micro_batch)
            for micro_batch in range(micro_batches)
            for stage in range(rank, stages, ranks)
        )
        for rank in range(ranks)
    )


def refuse(ranks: int, stages: int, micro_batches: int) -> None:
    """Raises where there is no such table."""
    if stages < ranks or stages % ranks:
        raise ValueError(f"{stages} stages on {ranks} ranks of a pipeline: each rank has as many, so {ranks}, {2 * ranks}, …")
    rounds = max(1, micro_batches // ranks)
    if stages > ranks and micro_batches % rounds:
        fewer = micro_batches // ranks * ranks
        raise ValueError(
            f"{micro_batches} micro-batches of {stages} stages on {ranks} ranks do not make {rounds} rounds of equal length; "
            f"accumulation {fewer} does, or {fewer + ranks}"
        )


def _of_rank(rank: int, ranks: int, chunks: int, micro_batches: int) -> list[Action]:
    """`chunks` stages a rank."""
    count = chunks * micro_batches
    if chunks == 1:
        in_round, ahead = micro_batches, ranks - 1 - rank
    else:
        in_round = micro_batches // max(1, micro_batches // ranks)
        ahead = (chunks - 1) * in_round + 2 * (ranks - 1 - rank)
    ahead = min(ahead, count)
    seen: Counter[tuple[Pass, int]] = Counter()

    def action(of: Pass, number: int) -> Action:
        chunk = number // in_round % chunks
        stage = (chunk if of == "forward" else chunks - 1 - chunk) * ranks + rank
        seen[of, stage] += 1
        return Action(rank, of, stage, seen[of, stage] - 1)

    found = [action("forward", number) for number in range(ahead)]
    for number in range(count):
        if number + ahead < count:
            found.append(action("forward", number + ahead))
        found.append(action("backward", number))
    return found


def in_flight(table: Table, stages: int) -> tuple[int, ...]:
    """By stage, the most micro-batches that are through its forward and not through its backward."""
    most = [0] * stages
    for actions in table:
        now = Counter[int]()
        for each in actions:
            now[each.stage] += 1 if each.of == "forward" else -1
            most[each.stage] = max(most[each.stage], now[each.stage])
    return tuple(most)


def play(table: Table, forward: Sequence[float], backward: Sequence[float], send: float | Sequence[float] = 0.0) -> float:
    """Seconds until the last rank is through, each stage's passes taking so long: what a stage gives reaches its neighbour, where
    that is another rank, `send` seconds later; by rank, where links differ, from it to the next. Raises where ranks wait for each
    other for ever."""
    return max(ends(table, forward, backward, send))


class Span(NamedTuple):
    """An action, from and to by the clock."""

    action: Action
    begins: float
    ends: float


def ends(
    table: Table, forward: Sequence[float], backward: Sequence[float], send: float | Sequence[float] = 0.0
) -> tuple[float, ...]:
    """By rank, when it is through."""
    return tuple(spans[-1].ends if spans else 0.0 for spans in played(table, forward, backward, send))


def played(
    table: Table, forward: Sequence[float], backward: Sequence[float], send: float | Sequence[float] = 0.0
) -> tuple[tuple[Span, ...], ...]:
    """By rank, when it does what."""
    stages, ranks = len(forward), len(table)
    sends = [send] * ranks if isinstance(send, float | int) else send
    over: Over = {}
    spans: list[list[Span]] = [[] for _ in table]
    left = sum(map(len, table))
    while left:
        before = left
        for actions, mine in zip(table, spans, strict=True):
            while len(mine) < len(actions):
                action = actions[len(mine)]
                _, of, stage, micro_batch = action
                arrives = _arrives(over, of, stage, micro_batch, stages, ranks, sends)
                if arrives is None:
                    break
                begins = max(mine[-1].ends if mine else 0.0, arrives)
                over[of, stage, micro_batch] = begins + (forward if of == "forward" else backward)[stage]
                mine.append(Span(action, begins, over[of, stage, micro_batch]))
                left -= 1
        if left == before:
            waits = next(actions[len(mine)] for actions, mine in zip(table, spans, strict=True) if len(mine) < len(actions))
            raise ValueError(f"no rank can go on: rank {waits.rank} waits to make {waits}")
    return tuple(map(tuple, spans))


def _arrives(
    over: Over,
    of: Pass,
    stage: int,
    micro_batch: int,
    stages: int,
    ranks: int,
    sends: Sequence[float],
) -> float | None:
    """When all is there that an action needs; None where that is not known yet."""
    if of == "forward" and stage == 0:
        return 0.0
    is_turn = of == "backward" and stage == stages - 1
    comes_from = stage if is_turn else stage - 1 if of == "forward" else stage + 1
    made = over.get(("forward" if is_turn else of, comes_from, micro_batch))
    if made is None or is_turn or ranks == 1:
        return made
    return made + sends[rank_of(min(stage, comes_from), ranks)]
