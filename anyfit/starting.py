"""From a job to a run: a plan is found or checked, the model built, placed and rehearsed, and planned anew where it does not do.

Of several ranks rank 0 plans, and the others are told. What all must have alike is compared before the model is built, again when
it is, and once more with its optimizer.
"""

from __future__ import annotations

import functools
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import replace
from datetime import date
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.optim import Optimizer

from .deciding import Deciding, machine_of_first_rank
from .kernels.pages import nodes
from .meshing import Axes
from .placing import Placed, place
from .placing.compiled import no_compiler
from .placing.cutting import Solver
from .placing.mirrors import mirrored_bytes
from .placing.ranks import ALONE, HANG_SECONDS, Ranks
from .placing.stock import LEAST_BYTES, Stock
from .placing.weights import Opened, opened
from .planning import search
from .probing import host
from .probing.cache import cached, compiler_versions, keep_clipped_steps, keep_compiled, keep_correction
from .probing.memory import gpus_before_use
from .profiling import profile_of, traced
from .running import launch as launching
from .running.agreement import facts_of
from .running.checkpoint import latest
from .running.engine import free, refuse_held
from .running.host_memory import HostWatch
from .running.improving import Tuner
from .running.rehearsal import Findings, Rehearsal, hooks_on_gradients
from .running.rescue import Rescue
from .running.run import Run
from .running.team import MARGIN_SECONDS, Team
from .stages.looked import Looked
from .staging import look
from .tracing.blocks import kinds_of
from .values.compiled import BlockFigures
from .values.corrections import ClippedSteps
from .values.demands import StaysInOneStage, StaysOnDevice, StaysUncut, StaysWhole
from .values.disk_folder import DiskFolder
from .values.doing import doing, make_way
from .values.job import Job
from .values.machine import Machine
from .values.plan import Plan
from .values.profile import Profile

GivenPlan: TypeAlias = Plan | str | Path | None


def joined(hang_seconds: float) -> Team | None:
    """The other ranks, where there are any; met when first asked for."""
    if launching.Rank.from_environment().count > 1:
        gpus_before_use()  # means something only before this process touches a GPU, and to find its own it must
    return launching.joined(hang_seconds)


class Start:
    """One start of a job. `profile` is known once it was asked for; a plan that was given is not changed."""

    def __init__(
        self,
        job: Job,
        plan: GivenPlan,
        profile: Profile | None,
        axes: Axes,
        hang_seconds: float | None,
        disk: DiskFolder | None = None,
    ) -> None:
        if sum((plan is not None, profile is not None, axes.is_asked)) > 1:
            raise ValueError("anyfit.start takes a plan, a profile to make one from, or mesh= and layout=: one of these")
        if isinstance(job.model, nn.Module):
            refuse_held(job.model)
        self._launch = launching.current()
        self._job = job if self._launch is None or self._launch.compiles else replace(job, compile=False)
        self._waits = hang_seconds or (self._launch and self._launch.hang_seconds) or HANG_SECONDS
        self._team = joined(self._waits)
        self._count = 1 if self._team is None else self._team.count
        self._is_given = plan is not None or (self._launch is not None and self._launch.plan is not None)
        self._given, self._profile, self._axes = plan, profile, _axes_of(axes, self._launch)
        self._chooses_stages = not self._is_given and not self._axes.has_stages
        self._disk = disk or (DiskFolder() if self._launch is None else self._launch.disk)
        self._deciding: Deciding | None = None  # of rank 0, once it plans
        self.placed: Placed | None = None  # known once the job runs

    def run(self, machine: Machine | None, resume: str | Path | None, *, deterministic: bool) -> Run:
        job, team, launch = self._job, self._team, self._launch
        self._prepare(machine, resume)
        deterministic = deterministic or (launch is not None and launch.deterministic)
        if deterministic:
            launching.make_deterministic()
        device = launching.device_for(self._machine, launching.Rank.from_environment())
        with ExitStack() as closing:
            stock = self._stock()
            if stock is not None:
                closing.callback(stock.close)
            with doing("building the model"):
                found = self._built(device)
            ranks = ALONE if team is None else Ranks.of_process_group(self._waits + MARGIN_SECONDS)
            rehearsal = Rehearsal(job, kinds_of(found.model), hooks_on_gradients(found.model))
            with doing("placing the model"):
                self.placed = self._placed(found, device, ranks, stock)
        with doing("rehearsing the plan"):
            self._rehearse_or_close(rehearsal, found)
        placed = self._here
        if team is not None:
            torch.manual_seed(launching.seed_of(job.seed, ranks.replica))
        rescue = None if self._is_given or team is not None or placed.disk is not None else self._rescue(placed)
        watch = HostWatch(host.left_memory_bytes, self._plan.limit_bytes["host"])
        tuner = None if deterministic or rescue is None else self._tuner(device)
        run = Run(job, self._plan, placed, rescue, watch, team, rehearsal, self._keep_clipped(), tuner)
        try:
            if self._resume is not None:
                with doing("loading the checkpoint"):
                    run.resume(self._resume)
            if launch is not None:
                launch.follow(run, self._machine)
        except BaseException:
            run.give_up()  # a model of the user's own may be started again
            raise
        return run

    # ------------------------------------------------------------------ what rank 0 finds out for all

    def _prepare(self, machine: Machine | None, resume: str | Path | None) -> None:
        """The machine, as far as a rank may use it, the plan, and where to go on from."""
        prepared = functools.partial(self._prepared, machine, resume)
        if self._team is None:
            self._machine, self._plan, self._resume = prepared()
            return
        given = _loaded(self._given)
        self._machine, self._plan, self._resume = self._team.from_first(prepared, "the plan")
        self._team.agree(_facts(self._job, given or self._plan, self._resume))

    def _prepared(self, machine: Machine | None, resume: str | Path | None) -> tuple[Machine, Plan, str | Path | None]:
        job, launch, plan = self._job, self._launch, self._given
        if machine is None:
            machine = cached("quick").with_limits(**(launch.limits if launch is not None else {}))
        if self._team is not None:
            machine = machine_of_first_rank(machine, self._team.places)
        self._machine = machine
        if launch is not None:
            plan = plan or launch.plan_for(machine, self._count)
            resume = resume or (launch.newest_checkpoint() if launch.resume else None)
        if resume is not None:
            beside = launch.checkpoints / resume if launch is not None and str(resume) == "latest" else resume
            resume = latest(beside, self._say)
        if self._profile is not None and self._profile.ranks != self._count:
            raise ValueError(
                f"the profile is for {self._profile.ranks} ranks, and {self._count} are there; make it so: "
                f"profile(job, ranks={self._count})"
            )
        places = None if self._team is None else self._team.places
        self._deciding = Deciding(job, machine, places, self._profile, self._axes, launch, self._say)
        if not self._is_given and isinstance(job.model, nn.Module):
            self._deciding.look()
        found = _loaded(plan) or self._deciding.first()
        self._refuse_for_another_job(found)
        return machine, found, resume

    def _refuse_for_another_job(self, plan: Plan) -> None:
        job = self._job
        plan.refuse_for_another_job(job.batch_size, job.precision, "anyfit.plan(job)")
        if job.micro_batch not in (None, plan.micro_batch):
            raise ValueError(f"Job(micro_batch={job.micro_batch}), but the plan's micro_batch is {plan.micro_batch}")
        if job.compile is False and plan.compiled:
            raise ValueError(
                f"Job(compile=False), but the plan compiles {len(plan.compiled)} blocks; use plan.without_compiled()"
            )
        if not job.replay and plan.replayed:
            raise ValueError(f"Job(replay=False), but the plan replays {len(plan.replayed)} blocks; use plan.without_replayed()")
        if plan.ranks != self._count:
            raise ValueError(f"the plan is for {plan.ranks} ranks, and {self._count} are there; plan again, or start as many")

    def _say(self, line: str) -> None:
        make_way()
        if self._launch is not None:
            self._launch.say(line)
        else:
            print(line, file=sys.stderr, flush=True)

    # ------------------------------------------------------------------ the model, placed

    def _built(self, device: torch.device) -> Opened:
        """Builds the model; refuses one that is not the plan's, or differs between ranks."""
        job, is_first = self._job, self._team is None or self._team.index == 0
        torch.manual_seed(job.seed)
        found = opened(job, resumes=self._resume is not None)
        refuse_held(found.model)
        fingerprint = job.fingerprint(found.model)
        if self._team is not None:
            weights = str(found.match and found.match.digest)
            self._team.agree({"model": fingerprint, "device": device.type, "weights": weights})
        if found.match is not None and found.match.is_partial and is_first:
            from rich.console import Console

            from .showing.terminal import show_match

            make_way()
            show_match(found.match, Console(stderr=True))
        from_nothing = getattr(job.model, "from_nothing", None)
        if from_nothing is not None and job.weights is None and self._resume is None and is_first:
            self._say(from_nothing)
        self._plan.refuse_unless_made_for(fingerprint, self._machine.fingerprint)
        return found

    def _stock(self) -> Stock | None:
        """Host memory of the plan, made ready from now on: as much of it as the build leaves of what is planned, and free."""
        model, planned = self._job.model, self._plan.forecast.peak_bytes["host"]
        if self._team is not None or planned < LEAST_BYTES or len(nodes()) > 1:
            return None  # ranks share what is free, and nodes divide each slab by itself
        if isinstance(model, nn.Module):
            built, to_come = sum(each.nbytes for each in model.parameters() if each.is_cpu), 0
        else:
            whole = self._plan.parameters * torch.float32.itemsize
            # A function that makes a model may have its weights twice meanwhile.
            built, to_come = (whole, 2 * whole) if self._job.weights is None else (0, whole)
        spared = max(built, planned + to_come - int(host.left_memory_bytes()))
        return Stock(planned, spared, threads=max(host.cores() - 1, 1))

    def _placed(self, found: Opened, device: torch.device, ranks: Ranks, stock: Stock | None) -> Placed:
        """Placed by the plan, or by another that leaves on the device, unsharded or uncut what the model demands."""
        met = list[type]()
        while True:
            try:
                parts = (self._job, self._plan, found.model, device)
                more: Any = {"elements": found.elements, "agreed": self._agree, "stock": stock, "looked": self._looked}
                return place(*parts, ranks=ranks, solver=solver_for(self._plan, self._machine), disk=self._disk, **more)
            except (StaysOnDevice, StaysWhole, StaysUncut, StaysInOneStage) as demand:
                if self._is_given or type(demand) in met:
                    raise
                met.append(type(demand))
                self._plan_heeding(demand)

    def _keep_clipped(self) -> Callable[[int, int], None] | None:
        """For later plans, which weigh clipped steps by it. A CPU's updates wait for the norm anyway: nothing to learn there."""
        job, plan, machine = self._job, self._plan, self._machine
        is_first = self._team is None or self._team.index == 0
        if job.clip_norm is None or machine.device.kind != "cuda" or not is_first:
            return None
        none = ClippedSteps(plan.model, plan.parameters, plan.precision, float(job.clip_norm))

        def keep(clipped: int, steps: int) -> None:
            keep_clipped_steps(machine, replace(none, steps=steps, clipped=clipped, date=date.today().isoformat()))

        return keep

    def _rescue(self, placed: Placed) -> Rescue:
        assert self._deciding is not None
        return rescue_for(self._job, self._machine, self._deciding.known, self._deciding.chosen_from, placed)

    def _tuner(self, device: torch.device) -> Tuner | None:
        """Of a run that may compile its blocks later; one that is resumed keeps the plan that it had."""
        job, machine, profile = self._job, self._machine, None if self._deciding is None else self._deciding.chosen_from
        if profile is None or job.compile is False or job.max_sample is not None or no_compiler(device) is not None:
            return None

        def keep(found: Mapping[str, BlockFigures]) -> None:
            keep_compiled(machine, {each.key: each for each in found.values()}.values())

        return Tuner(profile, compiler_versions(), keep, search)

    def _agree(self, model: nn.Module, optimizer: Optimizer) -> None:
        """Raises where ranks would train the same weights in different ways."""
        if self._team is not None:
            self._team.agree(facts_of(self._job, model, optimizer))

    def _plan_again(self, make: Callable[[Deciding], Plan]) -> None:
        def planned() -> Plan:
            assert self._deciding is not None
            return make(self._deciding)

        self._plan = planned() if self._team is None else self._team.from_first(planned, "another plan")

    def _plan_heeding(self, demand: StaysOnDevice | StaysWhole | StaysUncut | StaysInOneStage) -> None:
        if isinstance(demand, StaysInOneStage | StaysUncut):
            self._plan_again(lambda deciding: deciding.without_axis(demand))
        elif isinstance(demand, StaysWhole):
            self._plan_again(lambda deciding: deciding.again(lambda profile: profile.unsharded()))
        else:
            stays = demand.reason, demand.mirrored_bytes
            self._plan_again(lambda deciding: deciding.again(lambda profile: profile.staying(*stays)))

    @property
    def _looked(self) -> Looked | None:
        return look(self._job, self._plan, self._team if self._chooses_stages else None)

    @property
    def _here(self) -> Placed:
        assert self.placed is not None
        return self.placed

    def _place_without(self, findings: Findings, found: Opened) -> None:
        """By another plan, without what was found to change the result."""
        self._plan_again(lambda deciding: deciding.again(findings.restrict))
        self._place_again(found)

    def _place_again(self, found: Opened) -> None:
        placed, self.placed = self._here, None  # nobody else may hold it: its memory is needed
        if placed.ranks.are_several or placed.disk is not None or any(each.optimizer == "disk" for each in self._plan.chunks):
            solver = solver_for(self._plan, self._machine)
            self.placed = _placed_from_whole(self._job, self._plan, placed, found, solver, self._looked, self._disk)
            return
        device, model, carried = placed.device, placed.model, placed.lift()
        del placed
        free(device)
        self.placed = place(self._job, self._plan, model, device, carried=carried)

    def _rehearse_or_close(self, rehearsal: Rehearsal, found: Opened) -> None:
        """Where it fails, the model is plain again, and no lane holds memory."""
        try:
            self._rehearse(rehearsal, found)
        except BaseException:
            placed, self.placed = self.placed, None
            if placed is not None:
                placed.close()
            raise

    def _rehearse(self, rehearsal: Rehearsal, found: Opened) -> None:
        """By the plan, or by one without what was found to change the result."""
        if self._plan.loss is None and self._plan.cuts:  # one that was made by hand, or before losses were looked at
            graphs = traced(self._job, self._here.device.type, self._plan.replicas)  # type: ignore[arg-type]
            self._plan = replace(self._plan, loss=graphs[0].loss)
        try:
            findings = rehearsal.of(self._plan, self._here)
        except StaysUncut as demand:
            if self._is_given:
                raise
            self._plan_heeding(demand)
            self._place_again(found)
            findings = rehearsal.of(self._plan, self._here)
        unlike = set(findings.eager) & set(self._plan.compiled) or set(findings.op_by_op) & set(self._plan.replayed)
        if not self._is_given and unlike:  # planned as if they were compiled, or replayed
            self._say_news()
            self._place_without(findings, found)
            findings = rehearsal.of(self._plan, self._here)
        while (against := findings.against(self._plan)) is not None:
            if self._is_given:
                raise ValueError(f"{against}; {findings.ways_out(self._plan)}")
            self._place_without(findings, found)
            findings = rehearsal.of(self._plan, self._here)
        is_rehearsed = self._plan.pipeline == 1  # the loss of a pipeline is tried with the first batch
        self._plan = replace(self._plan, loss=findings.loss if self._plan.cuts else self._plan.loss, rehearsed=is_rehearsed)
        self._plan = self._plan.without_compiled(findings.eager).without_replayed(findings.op_by_op)
        self._say_news()
        if self._disk.is_asked and self._here.disk is None:
            self._say("the plan has nothing on the disk: --disk-folder and disk_folder= are of no use to it")

    def _say_news(self) -> None:
        for line in self._here.news():
            self._say(line)


def _axes_of(axes: Axes, launch: launching.Launch | None) -> Axes:
    """Those that the script asks for, or else the command line."""
    typed = Axes() if launch is None else Axes.of(launch.mesh, launch.layout)
    if axes.is_asked and typed.is_asked and axes != typed:
        raise ValueError(
            "anyfit fit is given --mesh or --layout, and the script asks anyfit.start for another mesh (a Trainer does: its "
            "ranks have samples of their own); leave one of them out"
        )
    return typed if typed.is_asked or axes.is_free else axes


def _placed_from_whole(
    job: Job, plan: Plan, placed: Placed, found: Opened, solver: Solver | None, looked: Looked | None, disk: DiskFolder
) -> Placed:
    """The same weights by another plan, over ranks that shard them, or with state on the disk."""
    device, ranks, model = placed.device, placed.ranks, placed.model
    whole = {} if job.weights is not None else placed.state_dict()
    placed.close()
    for name, parameter in model.named_parameters():
        if name in whole:
            parameter.data = whole[name]
    return place(job, plan, model, device, ranks=ranks, elements=found.elements, solver=solver, looked=looked, disk=disk)


def solver_for(plan: Plan, machine: Machine) -> Solver | None:
    """Of block layouts, where the plan cuts blocks, by what the machine takes for an op and a move."""
    if not (plan.cut or plan.tables):
        return None
    from .cutting import rates_on
    from .planning.layouts import LayoutSolver  # scipy, which takes its time

    return LayoutSolver(rates_on(machine, plan.precision, plan.mesh["tensor"]))


def _loaded(plan: Plan | str | Path | None) -> Plan | None:
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def _facts(job: Job, plan: Plan, resume: str | Path | None) -> dict[str, str]:
    from . import __version__

    digest = hashlib.sha256(json.dumps(plan.to_json(), sort_keys=True).encode()).hexdigest()[:16]
    return {
        "version of anyfit": __version__,
        "version of torch": str(torch.__version__),
        "version of Python": sys.version.partition(" ")[0],
        "plan": digest,
        "batch_size": str(job.batch_size),
        "precision": job.precision,
        "seed": str(job.seed),
        "clip_norm": str(job.clip_norm),
        "checkpoint": str(resume),
    }


def rescue_for(job: Job, machine: Machine, known: Profile | None, planned_from: Profile | None, placed: Placed) -> Rescue:
    """What a run with a plan of the planner's does when memory runs out. `known` is of all micro-batches, where they were traced,
    and `planned_from` of those that the plan was chosen from."""
    stays = placed.demands.reason
    mirrored = mirrored_bytes(placed.demands, [each.chunk for each in placed.state.chunks])  # `made` must not hold what is placed

    def staying(own: Profile) -> Profile:
        return own if stays is None or own.state_stays else own.staying(stays, mirrored)

    def made() -> Profile:
        return staying(known or profile_of(job, machine, machine.rank_grid(1)))

    return Rescue(
        make_profile=made,
        search=search,
        keep=lambda correction: keep_correction(machine, correction),
        context_bytes=int(machine.device.context_bytes.value),
        beside_bytes=machine.device.calibration.beside_bytes,
        planned_from=None if known is not None or planned_from is None else staying(planned_from),
    )
