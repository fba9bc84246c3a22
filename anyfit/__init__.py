"""anyfit: any model, fit: into the memory you have, and to your data.

    job = anyfit.Job(model, loss, optimizer, sample, batch_size)    what to train
    run = anyfit.start(job)                                         probe + plan + place
    loss = run.step(batch)                                          forward, backward, clipping, update

Nine public names: the values `Job`, `Machine`, `Plan`, `Run`, `NoPlan` and the verbs `probe`, `profile`, `plan`, `start`.
Each verb is one way through the house; torch is imported when one is called, not before.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from .values.job import Job
from .values.machine import Machine
from .values.plan import NoPlan, Plan
from .values.units import show_bytes

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

    from .placing import Placed
    from .placing.weights import Opened
    from .running.launch import Launch
    from .running.rehearsal import Rehearsal
    from .running.rescue import Rescue
    from .running.run import Run
    from .running.team import Team
    from .values.graph import Graph
    from .values.profile import Profile
    from .values.weights import Match

__version__ = "0.1.0"
__all__ = ["Job", "Machine", "NoPlan", "Plan", "Run", "plan", "probe", "profile", "start"]

CALLS_SECONDS = 8.0  # for timing the ops of a model that is planned for this machine's GPU


def probe(effort: Literal["quick", "full"] = "quick") -> Machine:
    """This machine, measured; a measurement made before on the same hardware and software is taken from the cache."""
    from .probing.cache import cached

    return cached(effort)


def profile(job: Job, machine: Machine | None = None, *, ranks: int | None = None) -> Profile:
    """Seconds and bytes of every block of the job on a machine, this one when none is given, as trained by so many ranks, each on
    a device of its own: by all it has, when no number is given. The model is run, on the CPU, only where its
    forward needs the values of tensors; on this machine's own GPU its ops are, one by one, the first time."""
    machine = machine or probe()
    spread = machine.spread(ranks)
    return ruled(job, profiled(traced(job, machine.device.kind, math.prod(spread)), machine, job.batch_size, spread))


def traced(job: Job, kind: Literal["cpu", "cuda"], ranks: int = 1) -> list[Graph]:
    """The job's passes on a device of this kind, one for every micro-batch worth considering on one of so many ranks."""
    from .probing.host import free_memory_bytes
    from .tracing import trace_all

    if job.batch_size % ranks:
        nearest = -(-job.batch_size // ranks) * ranks
        raise ValueError(f"batch_size is {job.batch_size}; it must be a multiple of the {ranks} ranks, such as {nearest}")
    share = job.batch_size // ranks
    sizes = _micro_batches(job, share)
    return _with_rests_that_run(trace_all(job, sizes, kind, free_memory_bytes()), sizes, share)


def profiled(graphs: Sequence[Graph], machine: Machine, batch_size: int, spread: tuple[int, int] = (1, 1)) -> Profile:
    """What these passes cost on a machine, with what runs on it have shown. `spread`: ranks of each node, and nodes."""
    from .costing import cost
    from .probing.cache import corrections_of

    made = cost(graphs, with_calls(machine, graphs), batch_size, spread)
    known = corrections_of(machine)
    return made.corrected(known.of(made.model)).paced(known.pace_of(made.model, made.parameters, made.precision))


def ruled(job: Job, profile: Profile) -> Profile:
    """The profile without what the job's loss does not allow: a batch that must not be cut, by micro-batches or by ranks."""
    rule = profile.loss
    if rule.may_be_cut:
        return profile
    if profile.ranks > 1:
        raise ValueError(f"{profile.ranks} ranks cut the batch among them, and {rule.why}; {rule.ways_out}")
    if job.micro_batch not in (None, job.batch_size):
        raise ValueError(f"Job(micro_batch={job.micro_batch}) cuts the batch, and {rule.why}; {rule.ways_out}")
    return profile.ruled(rule)


def with_calls(machine: Machine, graphs: Sequence[Graph]) -> Machine:
    """The machine with the seconds of the calls that the graphs make, where it is this one and has a GPU: measured once."""
    from .costing.times import call_weights
    from .probing import cache

    said: list[str] = []

    def say_once(_op: str, _done: float) -> None:
        if not said:
            said.append(f"timing the ops of {graphs[0].model} on {machine.device.name}, once: at most {CALLS_SECONDS:.0f} s")
            print(said[0], file=sys.stderr, flush=True)

    return cache.with_calls(machine, call_weights(graphs, machine.device), CALLS_SECONDS, say_once)


def plan(job: Job, machine: Machine | None = None, *, ranks: int | None = None) -> Plan:
    """The best way to train the job on a machine, with its forecast and reasons; NoPlan when nothing fits. So many ranks train it
    together, each on a device of its own: all the machine has, when no number is given."""
    from .planning import search

    return search(profile(job, machine, ranks=ranks))


def start(
    job: Job,
    plan: Plan | str | Path | None = None,
    machine: Machine | None = None,
    resume: str | Path | None = None,
    *,
    profile: Profile | None = None,
    deterministic: bool = False,
    hang_seconds: float | None = None,
) -> Run:
    """Places the job's model as the plan says, and gives back a Run whose `step` trains it.

    plan            a plan, or a file with one: used as it is, to the end; made anew when not given, and made anew again by a run
                    that runs out of memory
    machine         what to plan for, with its limits; this machine, probed, when not given
    resume          a folder that `run.save` wrote: goes on exactly there, with whatever plan suits this machine; "latest" at its
                    end stands for the newest whole one of a folder of numbered ones, such as checkpoints/latest, and alone, under
                    `anyfit fit`, for the newest of the run's
    profile         what `anyfit.profile` gave, to plan with; made anew when not given
    deterministic   two runs give the same bits, at some cost in speed; ops that cannot are refused
    hang_seconds    of several ranks, one that waits longer than this for the others ends the run, and says for what; ten minutes

    Started by torchrun, by Slurm's srun or by `anyfit fit --gpus`, it is one of several ranks: each calls this, rank 0 plans for
    all, and each trains on its share of every batch.
    """
    import torch

    from .placing import place
    from .placing.ranks import ALONE, HANG_SECONDS, Ranks
    from .placing.weights import opened
    from .probing.host import left_memory_bytes
    from .running import launch as launching
    from .running.gradient_hooks import hooks_on_gradients
    from .running.holding import refuse_held
    from .running.meeting import MARGIN_SECONDS
    from .running.rehearsal import Rehearsal
    from .running.run import Run
    from .running.watch import HostWatch
    from .tracing.blocks import kinds_of
    from .values.demands import StaysOnDevice, StaysWhole

    if plan is not None and profile is not None:
        raise ValueError("anyfit.start takes a plan, or a profile to make one from; leave one of them out")
    if isinstance(job.model, torch.nn.Module):
        refuse_held(job.model)
    launch = launching.current()
    waits = hang_seconds or (launch and launch.hang_seconds) or HANG_SECONDS
    team = joined(waits)
    rank = launching.Rank.from_environment()
    is_given = plan is not None or (launch is not None and launch.plan is not None)
    prepared = functools.partial(_prepared, job, plan, machine, resume, profile, launch, team)
    if team is None:
        machine, plan, resume, profile = prepared()
    else:
        given = _loaded(plan)
        machine, plan, resume, _ = team.from_first(prepared, "the plan")
        team.agree(_facts(job, given or plan, resume))
    if deterministic or (launch is not None and launch.deterministic):
        launching.make_deterministic()
    device = launching.device_for(machine, rank)
    torch.manual_seed(job.seed)
    found = opened(job, resumes=resume is not None)
    model = found.model
    refuse_held(model)
    fingerprint = job.fingerprint(model)
    if team is not None:
        team.agree({"model": fingerprint, "device": device.type, "weights": str(found.match and found.match.digest)})
    if found.match is not None and found.match.is_partial and rank.index == 0:
        _show_weights(found.match)
    from_nothing = getattr(job.model, "from_nothing", None)
    if from_nothing is not None and job.weights is None and resume is None and rank.index == 0:
        (_say if launch is None else launch.say)(from_nothing)
    plan.refuse_unless_made_for(fingerprint, machine.fingerprint)
    ranks = ALONE if team is None else Ranks.of_process_group(waits + MARGIN_SECONDS)
    rehearsal = Rehearsal(job, kinds_of(model), hooks_on_gradients(model))
    placing = functools.partial(place, ranks=ranks, elements=found.elements, agreed=functools.partial(_agreed, job, team))
    while True:
        try:
            placed = placing(job, plan, model, device)
            break
        except (StaysOnDevice, StaysWhole) as demand:
            if is_given:
                raise
            profile = before = profile or _profile_of(job, machine, team)
            if isinstance(demand, StaysWhole):
                profile = before.undivided()
            elif not before.state_stays:
                profile = before.staying(demand.reason, demand.mirrored_bytes)
            if profile == before:
                raise
            plan = _search(profile, team)
    plan, placed, profile = _rehearsed(job, plan, placed, rehearsal, found, is_given, machine, profile, team)
    if team is not None:
        torch.manual_seed(launching.seed_of(job.seed, ranks.index))
    rescue = None if is_given or team is not None else _rescue(job, machine, profile, placed)
    run = Run(job, plan, placed, rescue, HostWatch(left_memory_bytes, plan.limit_bytes["host"]), team, rehearsal)
    try:
        if resume is not None:
            run.resume(resume)
        if launch is not None:
            launch.follow(run, machine)
    except BaseException:
        run.give_up()  # a model of the user's own may be started again
        raise
    return run


def _rehearsed(
    job: Job,
    plan: Plan,
    placed: Placed,
    rehearsal: Rehearsal,
    found: Opened,
    is_given: bool,
    machine: Machine,
    profile: Profile | None,
    team: Team | None,
) -> tuple[Plan, Placed, Profile | None]:
    """The plan, or one without what was found to change the result, with the model placed as it says."""
    count = 1 if team is None else team.count
    if plan.loss is None and plan.cuts:  # one that was made by hand, or before losses were looked at
        plan = replace(plan, loss=traced(job, placed.device.type, count)[0].loss)  # type: ignore[arg-type]
    findings = rehearsal.of(plan, placed)
    while (against := findings.against(plan)) is not None:
        if is_given:
            placed.close()
            raise ValueError(f"{against}; {findings.ways_out(plan)}")
        if profile is None:
            profile = _profile_of(job, machine, team)
        profile = findings.restrict(profile)
        plan = _search(profile, team)
        placed = _placed_again(job, plan, placed, found)
        findings = rehearsal.of(plan, placed)
    return replace(plan, loss=findings.loss if plan.cuts else plan.loss, rehearsed=True), placed, profile


def _profile_of(job: Job, machine: Machine, team: Team | None) -> Profile:
    from .running.several import spread_of

    spread, sharing = ((1, 1), 1) if team is None else spread_of(team.places)
    count = math.prod(spread)
    return ruled(job, profiled(traced(job, machine.device.kind, count), machine, job.batch_size, spread)).slowed(sharing)


def _search(profile: Profile, team: Team | None) -> Plan:
    from .planning import search

    return search(profile) if team is None else team.from_first(lambda: search(profile), "another plan")


def _placed_again(job: Job, plan: Plan, placed: Placed, found: Opened) -> Placed:
    """The same weights as another plan has them; of several ranks, which divide them, from whole ones."""
    import gc

    import torch

    from .placing import place

    device, ranks, model = placed.device, placed.ranks, placed.model
    if not ranks.are_several:
        carried = placed.lift()
        del placed
        gc.collect()  # the engine's parts know each other
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return place(job, plan, model, device, carried=carried)
    whole = {} if job.weights is not None else placed.state.state_dict()
    placed.close()
    for name, parameter in model.named_parameters():
        if name in whole:
            parameter.data = whole[name]
    return place(job, plan, model, device, ranks=ranks, elements=found.elements)


def joined(hang_seconds: float) -> Team | None:
    """The other ranks, where there are any; met when first asked for."""
    from .probing.memory import gpus_before_use
    from .running import launch as launching

    if launching.Rank.from_environment().count > 1:
        gpus_before_use()  # means something only before this process touches a GPU, and to find its own it must
    return launching.joined(hang_seconds)


def _prepared(
    job: Job,
    plan: Plan | str | Path | None,
    machine: Machine | None,
    resume: str | Path | None,
    profile: Profile | None,
    launch: Launch | None,
    team: Team | None,
) -> tuple[Machine, Plan, str | Path | None, Profile | None]:
    """What rank 0 finds out for all: the machine, as far as a rank may use it, the plan, and where to go on from."""
    from torch import nn

    from .running.several import machine_of_rank, ranks_of_node

    is_given = plan is not None or (launch is not None and launch.plan is not None)
    if machine is None:
        machine = probe().with_limits(**(launch.limits if launch is not None else {}))
    if team is not None:
        machine = machine_of_rank(machine, team.places, 0)
    count = 1 if team is None else team.count
    if launch is not None:
        plan = plan or launch.plan_for(machine, count)
        resume = resume or (launch.newest_checkpoint() if launch.resume else None)
    if resume is not None:
        resume = _whole(resume, launch)
    if profile is not None and profile.ranks != count:
        raise ValueError(
            f"the profile is for {profile.ranks} ranks, and {count} are there; make it so: profile(job, ranks={count})"
        )
    if profile is None and (plan is None or (not is_given and isinstance(job.model, nn.Module))):  # of a user's own, unplaced
        profile = _profile_of(job, machine, team)
    found = _loaded(plan)
    if found is None:
        assert profile is not None
        ranks = 1 if team is None else ranks_of_node(team.places, 0)
        kept = sum(each.nbytes for each in job.model.parameters() if each.is_cpu) if isinstance(job.model, nn.Module) else 0
        found, profile = _planned(profile, ranks, kept, _beside_bytes(machine), _say if launch is None else launch.say)
    if found.batch_size != job.batch_size or found.precision != job.precision:
        raise ValueError(
            f"the plan is for batch_size {found.batch_size} in {found.precision}, the job is {job.batch_size} in {job.precision};"
            " plan again with anyfit.plan(job)"
        )
    if job.micro_batch not in (None, found.micro_batch):
        raise ValueError(f"Job(micro_batch={job.micro_batch}), but the plan's micro_batch is {found.micro_batch}")
    if found.ranks != count:
        raise ValueError(f"the plan is for {found.ranks} ranks, and {count} are there; plan again, or start as many")
    return machine, found, resume, profile if team is None else None


def _planned(
    profile: Profile, ranks: int, kept_bytes: int, beside_bytes: Callable[[int], int], say: Callable[[str], None]
) -> tuple[Plan, Profile]:
    """A plan for what the host has, or, where that is not there, for what other programs leave of it to so many ranks. Each has
    `kept_bytes` of weights there already, which go as they are placed."""
    from .planning import search
    from .probing.host import left_memory_bytes, own_memory_bytes

    found = search(profile)
    needed = found.forecast.peak_bytes["host"] + beside_bytes(found.forecast.peak_bytes["host"])
    free = int(left_memory_bytes()) // ranks + min(max(own_memory_bytes() - kept_bytes, 0), beside_bytes(0)) + kept_bytes
    if needed <= free:
        return found, profile
    say(
        f"the plan would take {show_bytes(needed)} of the {show_bytes(profile.host_limit_bytes)} of host memory, "
        f"of which {show_bytes(free)} are free: planning anew"
    )
    profile = replace(profile, host_limit_bytes=free)
    return search(profile), profile


def _beside_bytes(machine: Machine) -> Callable[[int], int]:
    """What a process takes of the host besides so much that its plan does."""
    from .planning.offload import beside_bytes

    return beside_bytes if machine.device.kind == "cuda" else lambda _host_bytes: 0


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _whole(resume: str | Path, launch: Launch | None) -> Path:
    """The checkpoint that is meant."""
    from .running.numbered import latest

    if launch is None:
        return latest(resume, _say)
    return latest(launch.checkpoints / resume if str(resume) == "latest" else resume, launch.say)


def _loaded(plan: Plan | str | Path | None) -> Plan | None:
    return plan if plan is None or isinstance(plan, Plan) else Plan.load(plan)


def _facts(job: Job, plan: Plan, resume: str | Path | None) -> dict[str, str]:
    """What all ranks must have alike before they build the model."""
    import torch

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


def _agreed(job: Job, team: Team | None, model: nn.Module, optimizer: Optimizer) -> None:
    """Raises where ranks would train the same weights in different ways."""
    from .running.alike import facts_of

    if team is not None:
        team.agree(facts_of(job, model, optimizer))


def _show_weights(match: Match) -> None:
    from rich.console import Console

    from .showing.terminal import show_match

    show_match(match, Console(stderr=True))


def _rescue(job: Job, machine: Machine, known: Profile | None, placed: Placed) -> Rescue:
    """What a run may do whose plan the planner made, when memory ends."""
    from .placing.mirrors import mirrored_bytes
    from .planning import search
    from .probing.cache import keep_correction
    from .running.rescue import Rescue

    stays = placed.demands.reason
    mirrored = mirrored_bytes(placed.demands, [each.chunk for each in placed.state.chunks])  # `made` must not hold what is placed

    def made() -> Profile:
        own = known or profile(job, machine, ranks=1)
        return own if stays is None or own.state_stays else own.staying(stays, mirrored)

    return Rescue(
        profile=made,
        search=search,
        keep=lambda correction: keep_correction(machine, correction),
        context_bytes=int(machine.device.context_bytes.value),
        beside_bytes=_beside_bytes(machine),
    )


def _micro_batches(job: Job, most: int) -> list[int]:
    """The sizes worth a trace: the one asked for, or the most there is and its halves down to one sample."""
    if job.micro_batch is not None:
        return [job.micro_batch]
    sizes = [most]
    while sizes[-1] > 1:
        sizes.append(-(-sizes[-1] // 2))
    return sizes


def _with_rests_that_run(graphs: list[Graph], sizes: Sequence[int], share: int) -> list[Graph]:
    """Without the micro-batches whose last one would be of a size that the model does not run, such as one sample for a batch
    norm: nine samples in fours leave one."""
    made = [graph.micro_batch for graph in graphs]
    refused = max((size for size in sizes if size not in made and size < max(made)), default=0)
    return [graph for graph in graphs if not 0 < share % graph.micro_batch <= refused]


def __getattr__(name: str) -> Any:
    if name == "Run":  # the one public name that needs torch
        from .running.run import Run

        return Run
    raise AttributeError(f"module 'anyfit' has no attribute {name!r}")
