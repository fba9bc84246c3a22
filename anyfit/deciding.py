"""Deciding: the plans of a start, the first one and those that follow as placing and rehearsing find what must not be done.

One device has one profile. Several ranks have one for each mesh they can make (meshing.py). What is found later is a change of a
profile: it holds for all of them, and the search runs again. Of several ranks rank 0 alone does this.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from torch import nn

from .meshing import Axes
from .planning import search
from .planning.answers import as_arguments, as_change
from .planning.meshes import MeshChoice, search_meshes
from .probing import host
from .profiling import meshes_of, profile_of
from .running.launch import Launch
from .values.demands import StaysInOneStage, StaysUncut
from .values.job import Job
from .values.machine import Machine
from .values.no_plan import Change
from .values.plan import Plan
from .values.profile import Profile
from .values.units import show_bytes

Changing = Callable[[Profile], Profile]


class Deciding:
    """The plans of one start. `places` has every rank's node and device; None of a process alone."""

    def __init__(
        self,
        job: Job,
        machine: Machine,
        places: Sequence[str] | None,
        given: Profile | None,
        axes: Axes,
        launch: Launch | None,
        say: Callable[[str], None],
    ) -> None:
        self._job, self._machine, self._places, self._axes = job, machine, places, axes
        self._launch, self._say = launch, say
        if places is None and axes.is_asked:
            refuse = axes.stage_grid if axes.has_stages else axes.lengths  # what one process cannot be
            refuse((1, 1), job.batch_size)
        self._steps = None if launch is None else launch.steps
        self._all = None if given is None else [MeshChoice.of(given)]  # with every micro-batch
        self._is_given = given is not None
        self._changes: list[Changing] = []
        self.chosen_from: Profile | None = None  # the last plan, where one device has one profile

    @property
    def known(self) -> Profile | None:
        """With every micro-batch, where these were traced, and all changes."""
        return None if self._all is None else self._changed(self._all[0]).make()

    def look(self) -> None:
        """At the model, as long as it is not placed: one of the user's own is changed by that."""
        if self._all is None:
            self._all = self._meshes(for_plan=False)

    def first(self) -> Plan:
        """For the host memory of the machine, or, where that is not free, for what other programs leave to each rank. The weights
        of the user's model count as free: they go as they are placed."""
        model = self._job.model
        ranks = 1 if self._places is None else ranks_on_first_node(self._places)
        kept = sum(each.nbytes for each in model.parameters() if each.is_cpu) if isinstance(model, nn.Module) else 0
        beside = self._machine.device.calibration.beside_bytes
        found = self._searched(self._all or self._meshes(for_plan=True))
        needed = found.forecast.peak_bytes["host"] + beside(found.forecast.peak_bytes["host"])
        free = int(host.left_memory_bytes()) // ranks + min(max(host.own_memory_bytes() - kept, 0), beside(0)) + kept
        if needed <= free:
            return found
        self._say(
            f"the plan would take {show_bytes(needed)} of the {show_bytes(found.limit_bytes['host'])} of host memory, "
            f"of which {show_bytes(free)} are free: planning anew"
        )
        return self.again(lambda profile: replace(profile, host_limit_bytes=free))

    def again(self, change: Changing) -> Plan:
        """With another change, and all those before."""
        self._changes.append(change)
        self.look()
        assert self._all is not None
        return self._searched(self._all)

    def without_axis(self, why: StaysUncut | StaysInOneStage) -> Plan:
        """As the model cannot be cut along it, for this reason: raised where ranks can train it in no other way."""
        self.look()
        assert self._all is not None
        axis = "tensor" if isinstance(why, StaysUncut) else "pipeline"
        self._all = [each for each in self._all if (each.tensor if axis == "tensor" else each.stages) == 1]
        if not self._all:
            raise why
        self._say(f"planning without a {axis} axis: {why}")
        return self._searched(self._all)

    # ------------------------------------------------------------------ profiles

    def _searched(self, meshes: Sequence[MeshChoice]) -> Plan:
        changed = [self._changed(each) for each in meshes]
        if self._places is not None and not self._is_given:
            return search_meshes(changed, self._steps, self._typed, asked=self._axes.is_asked)
        self.chosen_from = changed[0].make()
        return search(self.chosen_from, self._steps, self._typed)

    def _changed(self, mesh: MeshChoice) -> MeshChoice:
        for change in self._changes:
            mesh = mesh.changed(change)
        return mesh

    def _meshes(self, *, for_plan: bool) -> list[MeshChoice]:
        """`for_plan`: with the micro-batches alone that the best plan may have."""
        name = "" if self._launch is None else self._launch.model
        if self._places is None:
            own = profile_of(self._job, self._machine, (1, 1), for_plan=for_plan)
            return [MeshChoice.of(replace(own, name=name))]
        rank_grid, sharing = rank_grid_of(self._places)
        found = meshes_of(self._job, self._machine, rank_grid, self._axes, for_plan=for_plan)
        return [each.changed(lambda profile: replace(profile.slowed(sharing), name=name)) for each in found]

    def _typed(self, limits: Mapping[str, str], seconds: float) -> Change | None:
        """Memory that would be enough, as whoever starts this would ask for it; None where this machine has less."""
        if self._machine.lacks(limits):
            return None
        if self._launch is not None:
            return as_change(limits, seconds)
        return Change(f"machine.with_limits({as_arguments(limits)})", seconds)


def machine_of_first_rank(machine: Machine, places: Sequence[str]) -> Machine:
    """What rank 0 may take of the machine. `places` has every rank's node and device. Limits that were given stay."""
    limits, on_node, on_device = machine.limits, ranks_on_first_node(places), places.count(places[0])
    return machine.with_limits(
        device_memory=machine.device_limit_bytes // on_device if limits.device_bytes is None and on_device > 1 else None,
        host_memory=machine.host_limit_bytes // on_node if limits.host_bytes is None and on_node > 1 else None,
    )


def ranks_on_first_node(places: Sequence[str]) -> int:
    nodes = [place.partition(" ")[0] for place in places]
    return nodes.count(nodes[0])


def rank_grid_of(places: Sequence[str]) -> tuple[tuple[int, int], int]:
    """(ranks per node, nodes), and how many ranks share a device. Where nodes have different numbers of ranks, or ranks of a node
    do not follow each other, each counts as a node of its own."""
    nodes = [place.partition(" ")[0] for place in places]
    ranks_of = Counter(nodes)
    is_even = len(set(ranks_of.values())) == 1 and sum(a != b for a, b in itertools.pairwise(nodes)) == len(ranks_of) - 1
    rank_grid = (len(places) // len(ranks_of), len(ranks_of)) if is_even else (1, len(places))
    return rank_grid, max(Counter(places).values())
