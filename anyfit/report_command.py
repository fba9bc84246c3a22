"""`anyfit report`: a plan or a run folder as one HTML file, and its timeline for other viewers."""

from __future__ import annotations

import json
import math
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from .running import lines
from .showing import timeline as timelines
from .showing.report import Elsewhere, Recorded, Source, Speed, html, trace
from .values.answers import Ranked, ranked
from .values.best_batch import BestBatch
from .values.machine import Machine
from .values.plan import Plan
from .values.prices import prices_of
from .values.record import read_json, refuse_unwritable, write_atomically

TIMES = (0.5, 0.625, 0.75, 0.875, 1.0, 1.25, 1.5, 2.0)  # the device's memory, that speeds are planned at


@dataclass
class Report:
    """The options of the command line, by their names there."""

    what: Path
    output: Path | None
    timeline: Path | None
    perfetto: Path | None
    job: str | None
    machine: str | None
    seq: int | None
    optimizer: str | None
    lora: int | None
    compare: str | None
    tokens: str | None

    def run(self) -> None:
        is_run = self.what.is_dir()
        plan = Plan.load(self.what / "plan.json" if is_run else self.what)
        output = self.output or (self.what / "report.html" if is_run else Path("report.html"))
        for file in (output, self.perfetto):
            if file is not None:
                refuse_unwritable(file)
        self._refuse_without_a_job()
        recorded = self._timeline_file(is_run=is_run)
        document = None if recorded is None else read_json(recorded, "timeline")
        if self.perfetto is not None:
            write_atomically(self.perfetto, json.dumps(trace(plan, document)).encode())
            print(f"{self.perfetto}: open it in ui.perfetto.dev")
        elsewhere = None if self.job is None else self._planned_anew(plan, self.job)
        page = html(
            plan,
            Source(str(self.what), self.job or "", tuple(self._job_options())),
            self._run(plan) if is_run else None,
            None if recorded is None else timelines.read(recorded),
            elsewhere,
        )
        write_atomically(output, page.encode())
        print(f"{output}: {len(page.encode()) / 1024:,.0f} KiB, open it in a browser")

    def _refuse_without_a_job(self) -> None:
        """What is planned anew needs the model, which a plan does not hold."""
        named = {"--compare": self.compare, "--machine": self.machine, "--seq": self.seq, "--optimizer": self.optimizer}
        given = [name for name, value in (named | {"--lora": self.lora, "--tokens": self.tokens}).items() if value is not None]
        if self.job is None and given:
            raise ValueError(f"{given[0]} is for plans that are made anew; name the model as well: --job llama-8b")
        if (self.compare is None) != (self.tokens is None):
            lacking = "--tokens 10B" if self.tokens is None else "--compare h100,l40s"
            raise ValueError(f"cost by machine takes both --compare and --tokens; add {lacking}")

    def _timeline_file(self, *, is_run: bool) -> Path | None:
        if self.timeline is not None:
            return self.timeline
        there = self.what / "timeline.json"
        return there if is_run and there.exists() else None

    # ------------------------------------------------------------------ a run

    def _run(self, plan: Plan) -> Recorded:
        metrics = lines.read(self.what / "metrics.jsonl")
        if not metrics:
            raise ValueError(f"{self.what} has a plan and no step; for the plan: anyfit report {self.what / 'plan.json'}")
        return Recorded(str(self.what), metrics, tuple(self._again(plan)))

    def _again(self, plan: Plan) -> Iterator[tuple[str, str]]:
        """Commands that do the run again."""
        told = self.what / "run.json"
        options: Mapping[str, Any] = read_json(told, "options of the run") if told.exists() else {}
        folder, file = shlex.quote(str(self.what)), shlex.quote(str(self.what / "plan.json"))
        ranks = f" --ranks {plan.ranks}" if plan.ranks > 1 else ""
        names = {"batch_size": "batch", "length": "seq", "precision": "dtype", "learning_rate": "lr", "evaluation": "eval"}
        left_out = ("model", "digest", "samples", "report_to", "packing", "deterministic")
        said = {names.get(name, name.replace("_", "-")): value for name, value in options.items() if name not in left_out}
        typed = " ".join(f"--{name} {shlex.quote(str(value))}" for name, value in said.items() if value is not None)
        switches = " --deterministic" * bool(options.get("deterministic"))
        again, plan_of = "The same run, from its first step, with the same plan:", f"{ranks} --plan {file}"
        if options:
            model = f" {shlex.quote(str(options['model']))}" if "model" in options else ""
            yield again, f"anyfit fit{model} {typed}{switches}{plan_of}"
        else:
            yield again, f"anyfit fit{plan_of} SCRIPT"
        yield "On from its last checkpoint:", f"anyfit fit{ranks} --resume {folder}" + ("" if options else " SCRIPT")
        yield "Why the plan is as it is:", f"anyfit why {file}"

    # ------------------------------------------------------------------ planned anew

    def _job_options(self) -> Iterator[str]:
        for name in ("machine", "seq", "optimizer", "lora"):
            if (value := getattr(self, name)) is not None:
                yield f"--{name} {shlex.quote(str(value))}"

    def _planned_anew(self, plan: Plan, target: str) -> Elsewhere:
        from . import asking, comparing
        from .targets import machine_for

        by_name = partial(machine_for, gpus=None, nodes=None, device_memory=None, host_memory=None)
        machine = self._machine(plan)
        own = ":" in target  # then the function decides them
        options = {
            "batch": None if own else plan.batch_size,
            "dtype": None if own else plan.precision,
            "seq": self.seq,
            "optimizer": self.optimizer,
            "lora": self.lora,
        }
        names = [] if self.compare is None else comparing.parse_machines(self.compare)
        count = 0 if self.tokens is None else comparing.parse_tokens(self.tokens)
        question = asking.Question(target, options, by_name, machine.name)
        described = {name: by_name(name) for name in names}
        speeds = comparing.at_sizes(question, machine, plan, [int(times * machine.device_limit_bytes) for times in TIMES])
        found: list[Ranked] = []
        if names:
            best = plan.batch_size if own else BestBatch(max(plan.batch_size, BestBatch().limit))
            outcomes = comparing.compared(question, described, best)
            devices = {name: math.prod(each.rank_grid()) for name, each in described.items()}
            found = ranked(outcomes, devices, count, prices_of(names, {}))
        return Elsewhere([Speed(size, outcome) for size, outcome in speeds.items()], found, count)

    def _machine(self, plan: Plan) -> Machine:
        """That the plan is for, with as many devices."""
        there = self.what / "machine.json"
        if self.machine is None and there.exists():
            return Machine.load(there)
        try:
            machine = Machine.load(self.machine or plan.machine)
        except FileNotFoundError:
            raise ValueError(f"the plan is for {plan.machine!r}, which is no preset; name its file: --machine FILE") from None
        nodes = max(plan.ranks // machine.device.count, 1)
        return machine if machine.device.kind == "cpu" else machine.with_devices(min(plan.ranks, machine.device.count), nodes)
