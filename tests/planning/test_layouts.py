"""The layout program finds the best there is, and says what it is."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from anyfit.planning.layouts import Ask, NoLayout, by_price, chained, solve
from anyfit.values.block_layouts import BlockProblem, Carried, LayoutRates, Moved, Step, Way
from anyfit.values.cuts import SUM, WHOLE, Cut, Held
from anyfit.values.profile import Exchange

HELD: list[Held] = [WHOLE, SUM, Cut(0), Cut(1)]
MIB = 2.0**20
EXCHANGES = {"all_gather": (1.0, 0.11), "reduce_scatter": (1.1, 0.12), "all_reduce": (1.2, 0.23), "all_to_all": (0.9, 0.03)}
RATES = LayoutRates(
    {name: Exchange(latency, seconds / MIB) for name, (latency, seconds) in EXCHANGES.items()},  # type: ignore[misc]
    copy_seconds_per_byte=0.011 / MIB,
    copy_seconds=0.01,
)


@st.composite
def problems(draw: st.DrawFn) -> BlockProblem:
    """A few steps, the first ones forward; the last reads what is left and gives nothing."""
    tensors: list[Carried] = []
    steps: list[Step] = []
    count = draw(st.integers(3, 5))
    forward = draw(st.integers(1, count))
    for at in range(count):
        reads = tuple(draw(st.lists(st.integers(0, at - 1), min_size=1, max_size=2))) if at else ()
        is_backward = at >= forward
        sizes = draw(st.integers(1, 20)), draw(st.integers(0, 20)) if not is_backward else 0
        tensors.append(
            Carried(f"t{at}", *(size * MIB for size in sizes), stays=draw(st.integers(0, 5)) == 0, is_backward=is_backward)
        )
        ways = draw(
            st.lists(st.tuples(st.tuples(*[st.sampled_from(HELD)] * len(reads)), st.sampled_from(HELD)), min_size=1, max_size=3)
        )
        costs = [draw(st.integers(0, 30)) / 10 for _ in ways]
        found = tuple(Way(needs, (gives,), cost) for (needs, gives), cost in zip(ways, costs, strict=True))
        steps.append(Step(f"s{at}", reads, (at,), found, is_backward=is_backward))
    border: list[Held] = [WHOLE, Cut(0)]
    steps[0] = replace(steps[0], ways=tuple(Way((), (held,)) for held in border))
    ends = tuple(Way((held, held), ()) for held in border)
    steps.append(Step("end", (count - 1, 0), (), ends, frozenset({1}), is_backward=forward < count))
    return BlockProblem(2, tuple(tensors), tuple(steps), RATES, entry=0, exit=0)


def all_layouts(problem: BlockProblem) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Every choice of ways and of what is kept, with its seconds and its bytes."""
    for ways in itertools.product(*(range(len(step.ways)) for step in problem.steps)):
        held: dict[int, Held] = {}
        for step, way in zip(problem.steps, ways, strict=True):
            held.update(zip(step.gives, step.ways[way].gives, strict=True))
        moves = moves_of(problem, ways, held)
        if moves is None:
            continue
        seconds = sum(step.ways[way].seconds for step, way in zip(problem.steps, ways, strict=True))
        seconds += sum(moves.values())
        kept = sum(problem.kept(tensor, each) for tensor, each in held.items())
        twice = [each for each in moves if each[3] and (*each[:3], False) in moves]
        for saved in itertools.chain.from_iterable(itertools.combinations(twice, count) for count in range(len(twice) + 1)):
            less = sum(moves[each] for each in saved)
            more = 0.0
            for tensor, _, wanted, _ in saved:
                carried = problem.tensors[tensor]
                more += 0.0 if carried.stays else carried.bytes / (2 if isinstance(wanted, Cut) else 1)
            yield ways, seconds - less, kept + more


def moves_of(
    problem: BlockProblem, ways: tuple[int, ...], held: Mapping[int, Held]
) -> dict[tuple[int, Held, Held, bool], float] | None:
    found: dict[tuple[int, Held, Held, bool], float] = {}
    for step, way in zip(problem.steps, ways, strict=True):
        for place, (tensor, wanted) in enumerate(zip(step.reads, step.ways[way].reads, strict=True)):
            if held[tensor] == wanted:
                continue
            seconds = problem.move_seconds(tensor, held[tensor], wanted)
            if seconds is None or place in step.unmoved:
                return None
            found[tensor, held[tensor], wanted, step.is_backward] = seconds
    return found


@given(problems())
def test_the_program_is_as_good_as_brute_force(problem: BlockProblem) -> None:
    best = min((seconds for _, seconds, _ in all_layouts(problem)), default=math.inf)
    if best == math.inf:
        with pytest.raises(NoLayout):
            solve(problem)
    else:
        assert solve(problem).seconds == pytest.approx(best, rel=2e-4, abs=1e-6)


@given(problems(), st.floats(0.0, 1.0))
def test_so_it_is_under_a_limit_of_memory(problem: BlockProblem, tightness: float) -> None:
    layouts = list(all_layouts(problem))
    assume(layouts)
    sizes = sorted(size for _, _, size in layouts)
    limit = sizes[int(tightness * (len(sizes) - 1))] + 1e-3 * MIB
    best = min(seconds for _, seconds, size in layouts if size <= limit)
    found = solve(problem, Ask(limit_bytes=limit))
    assert found.seconds == pytest.approx(best, rel=2e-4, abs=1e-6)
    assert found.kept_bytes <= limit + 1e-2 * MIB


@given(problems(), st.floats(0.0, 0.5))
def test_so_it_is_where_memory_has_a_price(problem: BlockProblem, dear: float) -> None:
    price = dear / MIB
    best = min((seconds + price * size for _, seconds, size in all_layouts(problem)), default=math.inf)
    assume(best < math.inf)
    found = solve(problem, Ask(price=price))
    assert found.seconds + price * found.kept_bytes == pytest.approx(best, rel=2e-4, abs=1e-6)


@given(problems())
def test_the_moves_are_those_that_the_ways_need(problem: BlockProblem) -> None:
    assume(any(True for _ in all_layouts(problem)))
    found = solve(problem)
    held = {tensor: found.held(problem, tensor) for tensor in range(len(problem.tensors))}
    needed = moves_of(problem, found.ways, held)
    assert needed is not None
    made = {(each.tensor, each.held, each.wanted, each.in_backward) for each in found.moves}
    assert made <= set(needed)
    assert {each[:3] for each in needed} == {each[:3] for each in made}
    paid = sum(needed[each] for each in made)
    ways = sum(step.ways[way].seconds for step, way in zip(problem.steps, found.ways, strict=True))
    assert ways + paid == pytest.approx(found.seconds, rel=1e-3, abs=1e-6)


def chain_of(*seconds: Mapping[Held, float]) -> list[BlockProblem]:
    """Blocks of one step that leaves its input as it came, and a border that may be moved."""
    found = []
    for costs in seconds:
        ways = tuple(Way((held,), (held,), cost) for held, cost in costs.items())
        borders = tuple(Way((), (held,)) for held in (WHOLE, Cut(0), Cut(1)))
        ends = tuple(Way((held, held), ()) for held in (WHOLE, Cut(0), Cut(1)))
        steps = (
            Step("entry", (), (0,), borders),
            Step("tangent", (), (1,), borders),
            Step("op", (0,), (2,), ways),
            Step("end", (2, 1), (), ends, frozenset({1})),
        )
        found.append(
            BlockProblem(
                2, (Carried("x", 10 * MIB), Carried("t", 10 * MIB), Carried("y", 10 * MIB)), steps, RATES, entry=0, exit=1
            )
        )
    return found


def test_blocks_meet_at_borders_that_are_held_alike() -> None:
    blocks = chain_of({Cut(0): 1.0, WHOLE: 9.0}, {Cut(0): 1.5, Cut(1): 1.4}, {Cut(1): 1.0, Cut(0): 1.2})
    layouts = chained(blocks)
    assert [layout.held(block, 1) for layout, block in zip(layouts, blocks, strict=True)][:2] == [Cut(0), Cut(0)]
    assert sum(layout.seconds for layout in layouts) == pytest.approx(1.0 + 1.5 + 1.2)


def test_a_border_is_moved_where_that_is_worth_it() -> None:
    blocks = chain_of({Cut(0): 1.0, Cut(1): 50.0}, {Cut(1): 1.0, Cut(0): 50.0})
    layouts = chained(blocks)
    assert sum(layout.seconds for layout in layouts) == pytest.approx(2.0 + RATES.seconds("all_to_all", 10 * MIB, 2))
    assert sum(layout.counts.get("forward all_to_all", 0) for layout in layouts) == 1


def test_a_limit_that_no_layout_keeps_is_refused_with_the_least_there_is() -> None:
    (block,) = chain_of({WHOLE: 1.0, Cut(0): 2.0})
    heavy = replace(block, tensors=(*block.tensors[:2], Carried("y", 10.0, kept_bytes=2.0**31)))
    with pytest.raises(NoLayout, match=r"within 0.500 GiB a block: the least is 1.000 GiB"):
        solve(heavy, Ask(limit_bytes=2.0**29))
    assert solve(heavy, Ask(limit_bytes=2.0**30)).held(heavy, 2) == Cut(0)


def test_a_price_finds_a_layout_within_the_limit_too() -> None:
    (block,) = chain_of({WHOLE: 1.0, Cut(0): 2.0})
    heavy = replace(block, tensors=(*block.tensors[:2], Carried("y", 10.0, kept_bytes=2.0**31)))
    assert by_price(heavy, Ask(limit_bytes=2.0**30)).held(heavy, 2) == Cut(0)
    with pytest.raises(NoLayout, match=r"within 0.500 GiB"):
        by_price(heavy, Ask(limit_bytes=2.0**29))


def test_a_kept_move_is_made_in_forward_alone() -> None:
    """Gathered for forward, and read whole in backward too: kept while memory is free, gathered twice where it is not."""
    tensors = (Carried("x", 10 * MIB), Carried("y", MIB), Carried("z", MIB, is_backward=True))
    steps = (
        Step("entry", (), (0,), (Way((), (Cut(0),)),)),
        Step("forward", (0,), (1,), (Way((WHOLE,), (WHOLE,)),)),
        Step("backward", (0, 1), (2,), (Way((WHOLE, WHOLE), (WHOLE,)),), is_backward=True),
    )
    problem = BlockProblem(2, tensors, steps, RATES)
    free, dear = solve(problem), solve(problem, Ask(limit_bytes=MIB))
    assert free.moves == (Moved(0, Cut(0), WHOLE, in_backward=False, is_kept=True),)
    assert dear.counts == {"forward all_gather": 1, "backward all_gather": 1}
