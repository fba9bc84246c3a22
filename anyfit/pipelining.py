"""Meshes with a pipeline axis: as it is asked for, or all that are worth a look.

The pipeline is the outermost axis: the ranks of a stage are neighbours, in a grid of nodes of their own, with the data and tensor
axes of any mesh on them. So each of these meshes is one without stages, on fewer ranks, whose calls are divided.

What a model calls is known by a dry run of all of it, which is made when a search first wants one of these meshes. A run in
stages draws random numbers by key, and no other run does: so a model that draws any has stages only where they are asked for.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache

from .costing.links import Links
from .planning.meshes import MeshChoice, bound_of
from .stages.dry_run import Dry
from .staging import called_blocks, dry_of
from .values.called import Pipeline
from .values.division import Exchange
from .values.graph import Graph
from .values.job import Job
from .values.machine import Machine
from .values.profile import Profile


class Look:
    """At a model's calls: made once, when it is first asked for; so is its refusal."""

    def __init__(self, job: Job, graph: Graph) -> None:
        self.job, self.graph = job, graph
        self._made: Dry | None = None
        self._refusal = ""

    def dry(self) -> Dry:
        """ValueError where the model cannot be cut into stages."""
        if self._refusal:
            raise ValueError(self._refusal)
        if self._made is None:
            try:
                self._made = dry_of(self.job, self.graph)
            except Exception as error:  # whatever the user's code does on tensors without numbers
                self._refusal = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
                raise ValueError(self._refusal) from error
        return self._made


def staged(choice: MeshChoice, stages: int, machine: Machine, rank_grid: tuple[int, int], look: Look) -> MeshChoice:
    """A mesh of the ranks of one stage, with so many stages; neighbours of stages are as far apart as that has ranks."""

    @cache
    def pipeline() -> Pipeline:
        sends = tuple(_through_host(each, machine) for each in sends_of(machine, rank_grid, stages))
        dry, graph = look.dry(), look.graph
        called = called_blocks(dry.flow, graph, choice.tensor, choice.cut, choice.tables)
        sent = max(each.input_bytes for each in graph.blocks) / graph.micro_batch
        against = f"random numbers ({dry.draws}) would be drawn by key" if dry.draws else ""
        return Pipeline(stages, called, sent, sends, against=against)

    return replace(choice, bound=choice.bound / stages, stages=stages, pipeline=pipeline)


def sends_of(machine: Machine, rank_grid: tuple[int, int], stages: int) -> tuple[Exchange, ...]:
    """By place, from one of its ranks to one of the next place."""
    links, (node, nodes) = Links(machine, *rank_grid), rank_grid
    own = node * nodes // stages
    inside, across = links.cost("send", 2), links.cost("send", links.ranks)
    at = [place * own // node for place in range(stages)]
    return tuple(inside if at[place] == at[(place + 1) % stages] else across for place in range(stages))


def _through_host(send: Exchange, machine: Machine) -> Exchange:
    """As the engine sends: with copies to the host and from it."""
    copies = machine.copies
    if copies is None:
        return send
    return Exchange(send.latency_seconds, send.seconds_per_byte + 1 / copies.down_both.peak + 1 / copies.up_both.peak)


def considered(
    wholes: Sequence[MeshChoice], look: Look, base: Profile, machine: Machine, rank_grid: tuple[int, int]
) -> Iterator[MeshChoice]:
    """Every number of stages that the ranks of each of these meshes can be: of them, those of a stage are fewer."""
    node, nodes = rank_grid
    ranks = node * nodes
    for stages in (each for each in range(2, min(ranks, _blocks(look.graph)) + 1) if ranks % each == 0):
        for whole in wholes:
            data = ranks // (stages * whole.tensor)
            is_even = data * stages * whole.tensor == ranks and fits(node, ranks // stages, whole.tensor)
            if is_even and base.batch_size % data == 0:
                yield _with_fewer(whole, stages, data, base, machine, rank_grid, look)


def _with_fewer(
    whole: MeshChoice, stages: int, data: int, base: Profile, machine: Machine, rank_grid: tuple[int, int], look: Look
) -> MeshChoice:
    """The same with stages, on as many ranks: what a rank computes of a micro-batch is what it was."""
    own = Links(machine, *stage_grid(rank_grid[0], rank_grid[0] * rank_grid[1] // stages))

    @cache
    def make() -> Profile:
        return replace(whole.make(), divisions=own.divisions(whole.tensor))

    made = staged(replace(whole, data=data, make=make), stages, machine, rank_grid, look)
    # nothing is replayed in stages, so that launches take what they do
    least = whole.pass_seconds if whole.tensor > 1 else [each.seconds for each in base.passes]
    return replace(made, bound=bound_of(base, data, least, stages, blocks=_blocks(look.graph)))


def _blocks(graph: Graph) -> int:
    return sum(bool(each.name) for each in graph.blocks)


def fits(node: int, ranks: int, tensor: int) -> bool:
    """Whether a stage's ranks fill nodes, or nodes have whole stages, and a tensor axis lies in one or in whole ones."""
    stage_node, _ = stage_grid(node, ranks)
    return (node % ranks == 0 or ranks % node == 0) and (stage_node % tensor == 0 or tensor % stage_node == 0)


def stage_grid(node: int, ranks: int) -> tuple[int, int]:
    return min(node, ranks), max(ranks // node, 1)
