"""`anyfit plan` as it was asked for: a plan, a plan beside what changes make of it, or machines ranked."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from . import asking, comparing, forcing
from .ending import end, outcome_json
from .meshing import Axes
from .showing.printing import console, print_json
from .showing.terminal import show_beside, show_plan, show_ranking
from .targets import machine_as_asked, machine_for
from .values.answers import ranked
from .values.best_batch import BestBatch, parse_batch
from .values.forced import Forced
from .values.no_plan import NoPlan
from .values.prices import prices_of
from .values.record import refuse_unwritable


@dataclass
class Ask:
    """The options of the command line, by their names there."""

    target: str
    machine: str | None
    batch: str | None
    seq: int | None
    dtype: str | None
    optimizer: str | None
    lora: int | None
    real_run: bool | None
    agree: list[str] | None
    no_compile: bool
    gpus: int | None
    nodes: int | None
    device_memory: str | None
    host_memory: str | None
    disk: str | None
    mesh: str | None
    layout: str | None
    schedule: str | None
    chunks: int | None
    micro_batch: int | None
    activations: str | None
    shard: str | None
    what_if: list[str] | None
    compare: str | None
    tokens: str | None
    price: str | None
    output: Path | None
    as_json: bool

    def run(self) -> None:
        names = ("batch", "seq", "dtype", "optimizer", "lora", "real_run", "agree", "no_compile")
        self._options: dict[str, Any] = {name: getattr(self, name) for name in names}
        self._batch = None if self.batch is None else parse_batch(self.batch)
        self._options["batch"] = None if isinstance(self._batch, BestBatch) else self._batch
        limits = {"device_memory": self.device_memory, "host_memory": self.host_memory, "disk": self.disk}
        by_name = cache(partial(machine_for, gpus=self.gpus, nodes=self.nodes, **limits))  # says once what is not as described
        as_asked = partial(machine_as_asked, device_memory=self.device_memory, host_memory=self.host_memory, disk=self.disk)
        axes = Axes.parse(self.mesh, self.layout)
        self._question = asking.Question(self.target, self._options, by_name, self.machine, as_asked, self.gpus, self.nodes, axes)
        self._forced = Forced.parse(self.schedule, self.chunks, self.micro_batch, self.activations, self.shard)
        forcing.refuse(self._forced, axes)
        others = [name for name, value in (("--compare", self.compare), ("--what-if", self.what_if)) if value]
        if isinstance(self._batch, BestBatch) and self.compare is None:
            unbest = [*others, *(name for name in ("--mesh", "--micro-batch") if getattr(self, name[2:].replace("-", "_")))]
            if unbest:
                raise ValueError(f"--batch best is found for one plan; leave {unbest[0]} out, or give a number")
        if axes.has_stages and others:
            raise ValueError(f"--mesh {self.mesh}: plans with a pipeline are made one at a time; leave {others[0]} out")
        if self._forced.is_asked and others:
            raise ValueError(f"{self._forced.said}: forced plans are made one at a time; leave {others[0]} out")
        if self.compare is not None:
            return self._compare(self.compare)
        if self.tokens is not None or self.price is not None:
            option = "--price" if self.tokens is None else "--tokens"
            raise ValueError(f"{option} is for --compare; name the machines: --compare h200,l4")
        changes = asking.parse_changes(self.what_if or [])
        if self.output is not None:
            refuse_unwritable(self.output)
        return self._what_if(changes) if changes else self._plan()

    def _plan(self) -> None:
        machine = self._question.machine_for(self.machine)
        self._options["ranks"] = math.prod(machine.rank_grid())
        tried: tuple[comparing.Tried, ...] = ()
        if isinstance(self._batch, BestBatch):
            tried = comparing.chosen_batch(self._question, machine, self._batch)
            self._options["batch"] = tried[0].batch
        try:
            made = forcing.planned(self._question, machine, self._forced)
            made = comparing.with_batch(made, tried, self._batch.limit) if isinstance(self._batch, BestBatch) else made
        except NoPlan:
            self._say_unwritten()
            raise
        if self.output is not None:
            made.save(self.output)
        return print_json(made.to_json()) if self.as_json else show_plan(made, console())

    def _what_if(self, changes: dict[str, tuple[str, str]]) -> None:
        question, machine = self._question, self._question.machine_for(self.machine)
        self._options["ranks"] = math.prod(machine.rank_grid())
        asking.refuse_changes(question, changes)
        traced = question.traced_first()
        made, others = asking.what_ifs(question, traced, traced.profile(machine), changes)
        if self.output is not None and not isinstance(made, NoPlan):
            made.save(self.output)
        if self.as_json:
            print_json({"plan": outcome_json(made), "what_if": {text: outcome_json(other) for text, other in others.items()}})
        else:
            screen = console()
            if not isinstance(made, NoPlan):
                show_plan(made, screen)
                screen.print()
            show_beside({"as it is": made, **others}, screen)
        if isinstance(made, NoPlan):
            self._say_unwritten()
            end(made)

    def _say_unwritten(self) -> None:
        if self.output is not None:
            print(f"nothing is written to {self.output}: there is no plan", file=sys.stderr)

    def _compare(self, machines: str) -> None:
        others = {"--machine": self.machine, "--what-if": self.what_if or None, "--output": self.output}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"--compare plans for each machine it names; leave {given[0]} out")
        if self.tokens is None:
            raise ValueError("--compare ranks machines by the time to train on so many tokens; say how many: --tokens 10B")
        names, count = comparing.parse_machines(machines), comparing.parse_tokens(self.tokens)
        prices = prices_of(names, {} if self.price is None else comparing.parse_prices(self.price, names))
        described = {name: self._question.machine_for(name) for name in names}  # all are good before any work is done
        batch = BestBatch() if self._batch is None and ":" not in self.target else self._batch
        outcomes = comparing.compared(self._question, described, batch)
        devices = {name: math.prod(machine.rank_grid()) for name, machine in described.items()}
        found = ranked(outcomes, devices, count, prices)
        if self.as_json:
            return print_json({"tokens": count, "machines": [each.to_json() for each in found]})
        return show_ranking(found, count, console())
