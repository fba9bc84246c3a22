"""What ranks exchange takes what the machine's figures say, and something between for groups of other sizes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anyfit import Machine
from anyfit.costing.links import Links
from anyfit.values.calibration import Figure
from anyfit.values.machine import Collective
from anyfit.values.profile import Exchange
from tests.machines import small_machine

NODE = Machine.load("h100-node")
CARD = 42.5e9  # bytes/s of one, as the preset's send across the cluster


def known(name: str, across: str, group: int) -> Collective:
    return next(each for each in NODE.collectives if (each.name, each.across, each.group) == (name, across, group))


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_reduce"])
@pytest.mark.parametrize(("across", "group"), [("node", 2), ("node", 4), ("node", 8), ("cluster", 16), ("cluster", 512)])
def test_a_group_of_a_known_size_takes_what_is_known(name: str, across: str, group: int) -> None:
    found, figure = Links(NODE, 8, 64).cost(name, group), known(name, across, group)  # type: ignore[arg-type]
    assert found.latency_seconds == pytest.approx(figure.latency_seconds.value)
    assert found.seconds_per_byte == pytest.approx(1 / figure.bytes_per_second.value, rel=1e-3)
    assert found.seconds(10**9) == pytest.approx(figure.latency_seconds.value + 1e9 / figure.bytes_per_second.value, rel=1e-3)


def test_a_group_of_another_size_takes_something_between_and_larger_ones_more() -> None:
    links = Links(NODE, 8, 128)
    sizes = [16, 32, 64, 128, 256, 512, 1024]
    costs = [links.cost("all_gather", size) for size in sizes]
    assert [each.latency_seconds for each in costs] == sorted(each.latency_seconds for each in costs)
    assert [each.seconds_per_byte for each in costs] == sorted(each.seconds_per_byte for each in costs)
    assert costs[-1].seconds_per_byte < 1.01 * costs[-2].seconds_per_byte
    assert links.cost("all_reduce", 6).seconds_per_byte > links.cost("all_reduce", 4).seconds_per_byte


def test_nodes_with_fewer_devices_have_fewer_cards() -> None:
    few, all_of_it = Links(NODE, 2, 32).cost("all_gather", 64), Links(NODE, 8, 8).cost("all_gather", 64)
    assert few.seconds_per_byte == pytest.approx(31 / 32 / (2 * CARD))
    assert all_of_it.seconds_per_byte < 0.3 * few.seconds_per_byte


def test_a_sum_over_all_is_one_inside_the_group_that_divides_it_and_one_over_those_that_hold_the_same() -> None:
    links = Links(NODE, 8, 8)
    whole, divided, hybrid = (links.reduce(shards).seconds_per_byte for shards in (1, 64, 8))
    assert whole == links.cost("all_reduce", 64).seconds_per_byte
    assert divided == links.cost("reduce_scatter", 64).seconds_per_byte
    across = 2 * 7 / 8 / (8 * CARD)  # every card has an eighth of it, twice
    assert hybrid == pytest.approx(links.cost("reduce_scatter", 8).seconds_per_byte + across, rel=0.02)
    inside = Links(NODE, 8, 1)
    expected = inside.cost("reduce_scatter", 4).seconds_per_byte + inside.cost("all_reduce", 2).seconds_per_byte / 4
    assert inside.reduce(4).seconds_per_byte == pytest.approx(expected)


@pytest.mark.parametrize(
    ("node", "nodes", "degrees"),
    [(1, 1, []), (2, 1, [1, 2]), (8, 1, [1, 2, 4, 8]), (8, 6, [1, 2, 4, 8, 16, 24, 48]), (1, 4, [1, 2, 4])],
)
def test_divisions_are_over_parts_of_a_node_or_over_nodes_on_each_level(node: int, nodes: int, degrees: list[int]) -> None:
    divisions = Links(NODE, node, nodes).divisions()
    assert list(dict.fromkeys(each.shards for each in divisions)) == degrees
    for shards in degrees:
        levels = [(each.gradients, each.weights) for each in divisions if each.shards == shards]
        assert levels == ([(False, False), (True, False), (True, True)] if shards > 1 else [(False, False)])
    assert all(each.ranks == node * nodes for each in divisions)


def test_1024_ranks_have_a_division_of_every_power_of_two() -> None:
    assert {each.shards for each in Links(NODE, 8, 128).divisions()} == {2**power for power in range(11)}


def test_exchanges_share_the_link_to_the_host_across_nodes_and_without_a_faster_one() -> None:
    assert not Links(NODE, 8, 1).divisions()[0].shares_copies
    assert Links(NODE, 8, 2).divisions()[0].shares_copies
    slow = tuple(replace(each, bytes_per_second=Figure(2e10, 0.1, "measured")) for each in NODE.collectives)
    assert Links(replace(NODE, collectives=slow), 8, 1).divisions()[0].shares_copies


def test_links_that_nobody_measured_are_assumed_and_said_to_be() -> None:
    machine = small_machine()
    found, (error, note) = Links(machine, 4, 1).cost("all_gather", 4), Links(machine, 4, 1).error()
    assert found == Exchange(3e-4, 1e-9)
    assert error == 3.0
    assert "1 GB/s inside a node" in note
    assert "small" in note
    assert Links(replace(NODE, collectives=()), 8, 2).error()[1].startswith("1 GB/s between nodes and 10 GB/s inside a node")
    assert Links(NODE, 8, 64).error() == (max(each.bytes_per_second.measurement_error for each in NODE.collectives), "")
