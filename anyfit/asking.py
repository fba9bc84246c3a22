"""What `anyfit plan` is asked: the plan of a target on a machine, what a change would make of it, which machine is best for it,
and what would fit where it does not.

Traces cost most. They are made once for each kind of device and priced anew for every machine, batch and limit; only another
length or precision, and adapters, are traced again. What is offered where nothing fits was planned before; so that this takes a
few seconds, what cannot fit by its least memory is not searched, and the largest micro-batch that fits is enough, and the first
machines that do, smallest first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from typing import Any

from .meshing import WITHOUT, Axes, Kind, Looks, Meshes
from .planning.answers import answered, as_options, at_limits, change_to, named, no_plan, shortfall
from .planning.enough import Enough
from .planning.fastest import Found, fastest, may_fit, most_sharded, quickly
from .planning.meshes import MeshChoice, best_of, nearest_to_fit, offers_of, tried_meshes
from .planning.reasons import explained, settled
from .planning.space import space_of
from .profiling import CALLS_SECONDS, micro_batches, priced, staged, traced
from .targets import job_for, machine_as_asked, name_of, optimizer_class, tell_of_default, with_optimizer
from .values.answers import Outcome
from .values.graph import Graph
from .values.job import Job
from .values.machine import Machine
from .values.no_plan import Change, NoPlan
from .values.plan import Plan
from .values.precision import PRECISIONS
from .values.profile import Profile
from .values.record import nearest
from .values.units import parse_bytes, show_bytes

# What `--what-if` may change, each with an example.
CHANGES = {
    "device-memory": "40GiB",
    "host-memory": "256GiB",
    "disk": "60GiB",
    "machine": "h200",
    "batch": "16",
    "seq": "2048",
    "dtype": "bf16",
    "optimizer": "sgd",
    "lora": "16",
}
TIER_OF = {"device-memory": "device", "host-memory": "host", "disk": "disk"}
COUNTS = ("batch", "seq", "lora")  # of these
TIMES_SHORTER = (2, 4)
SMALLER_OPTIMIZERS = ("adafactor", "sgd")
MACHINES_OFFERED, LORA_RANK = 2, 16
NODE_GPUS = (2, 4, 8)
TIMES_NODES = (2, 4)


@dataclass
class Traced:
    """A job with its traces, one set for each kind of device, made when they are asked for."""

    job: Job
    name: str = ""  # for people
    axes: Axes = WITHOUT
    _graphs: dict[tuple[Kind, int], list[Graph]] = field(default_factory=dict)
    _known: dict[tuple[str, tuple[int, int], int], Meshes] = field(default_factory=dict)
    _looks: Looks = field(default_factory=Looks)

    def profile(self, machine: Machine, batch_size: int | None = None) -> Profile:
        """On all devices of any machine, without a tensor axis where that can be; of a smaller batch, by the passes there are."""
        return self._priced(self._traced(machine), machine, batch_size)

    def meshes(self, machine: Machine) -> list[MeshChoice]:
        """With the micro-batches alone that the best plan may have."""
        if self.axes.has_stages:
            return staged(self.job, machine, machine.rank_grid(), self.axes, self.name)
        enough = Enough(for_stages=self._meshes(machine).may_have_stages)
        graphs = self._traced(machine, enough)
        if self._meshes(machine).changed_by(graphs[0].loss):
            graphs = self._traced(machine, enough)
        meshes = self.meshes_of(machine, graphs)
        return [replace(each, found=enough.fastest_of(each.make())) if each.is_plain else each for each in meshes]

    def looks_for_stages(self, machine: Machine) -> bool:
        return self._meshes(machine).may_have_stages

    def meshes_of(self, machine: Machine, graphs: Sequence[Graph]) -> list[MeshChoice]:
        """With the micro-batches of these graphs."""
        return self._meshes(machine).choices(graphs, self._base(graphs, machine, self.job.batch_size), machine)

    def graphs(self, machine: Machine) -> list[Graph]:
        """Of all micro-batches on one rank of the machine."""
        return self._traced(machine)

    def trace_all(self, kind: Kind) -> None:
        """Of all micro-batches on one device, of which `with_batch` has those of its ranks."""
        self._graphs[kind, 1] = traced(self.job, kind)

    def with_batch(self, batch: int) -> Traced:
        """The same of another batch, with the graphs that are there."""
        return Traced(replace(self.job, batch_size=batch), self.name, self.axes, self._graphs, _looks=self._looks)

    def _meshes(self, machine: Machine, batch_size: int | None = None) -> Meshes:
        key = machine.name, machine.rank_grid(), batch_size or self.job.batch_size
        if key not in self._known:
            self._known[key] = Meshes(self.job, machine.rank_grid(), self.axes, batch_size, looks=self._looks)
        return self._known[key]

    def profile_that_fits(self, machine: Machine) -> Profile:
        """With the micro-batches, the largest first, down to one of which something fits."""
        return self._priced(self._traced(machine, lambda profile: quickly(profile) is not None), machine)

    def updated_by(self, optimizer: str) -> Traced:
        """The same with another optimizer: in its traces, the update alone is another."""
        from .tracing import update_of

        job = with_optimizer(self.job, optimizer)
        graphs: dict[tuple[Kind, int], list[Graph]] = {}
        for (kind, ranks), known in self._graphs.items():
            rule = update_of(job, kind)
            grouped = (tuple(replace(one, group=0 if one.trainable else -1) for one in each.parameters) for each in known)
            pairs = zip(known, grouped, strict=True)
            graphs[kind, ranks] = [replace(each, update=rule, parameters=parameters) for each, parameters in pairs]
        return Traced(job, self.name, self.axes, graphs)

    def _traced(self, machine: Machine, enough: Callable[[Profile], bool] | None = None) -> list[Graph]:
        key = kind, ranks = machine.device.kind, self._meshes(machine).data_ranks
        known = self._known_graphs(kind, ranks)
        if known is not None:
            return known
        stopped = False

        def stop(graphs: Sequence[Graph]) -> bool:
            nonlocal stopped
            stopped = enough is not None and graphs[0].loss.may_be_cut and enough(self._priced(graphs, machine))
            return stopped

        made = traced(self.job, kind, ranks, stop)
        if not stopped:
            self._graphs[key] = made  # all of them
        return made

    def _known_graphs(self, kind: Kind, ranks: int) -> list[Graph] | None:
        """Where they are there: the pass of a micro-batch is the same on any number of ranks, and in any batch."""
        share = -(-self.job.batch_size // ranks)
        sizes = micro_batches(self.job, share)
        for (of, _), graphs in self._graphs.items():
            by_size = {graph.micro_batch: graph for graph in graphs}
            if of == kind and set(sizes) <= set(by_size):
                return [by_size[size] for size in sizes]
        return self._graphs.get((kind, ranks))

    def _priced(self, graphs: Sequence[Graph], machine: Machine, batch_size: int | None = None) -> Profile:
        size, meshes = batch_size or self.job.batch_size, self._meshes(machine, batch_size)
        graphs = [graph for graph in graphs if graph.micro_batch * meshes.data_ranks <= size]
        return meshes.least(graphs, self._base(graphs, machine, size), machine)

    def _base(self, graphs: Sequence[Graph], machine: Machine, batch_size: int) -> Profile:
        return replace(priced(self.job, graphs, machine, machine.rank_grid(), batch_size, CALLS_SECONDS), name=self.name)


@dataclass(frozen=True)
class Question:
    """A target with its options, and the machine it is to be trained on."""

    target: str
    options: Mapping[str, Any]  # of targets.job_for
    machine_for: Callable[[str | None], Machine]  # by name, with the limits that were given
    machine_name: str | None = None  # None: the machine that is here
    # By name, with so many GPUs and nodes, and the same limits; without a word.
    machine_as_asked: Callable[[str | None, int | None, int | None], Machine] = field(
        default_factory=lambda: partial(machine_as_asked, device_memory=None, host_memory=None, disk=None)
    )
    gpus: int | None = None  # in each node, where somebody asked for so many
    nodes: int | None = None
    axes: Axes = field(default_factory=Axes)

    def traced_first(self, **more: Any) -> Traced:
        """What the others are compared with. Of a kind of model that may be meant as a folder, it says so."""
        made = self.traced(**more)
        tell_of_default(self.target)
        return made

    def traced(self, **changes: Any) -> Traced:
        return Traced(job_for(self.target, **{**self.options, **changes}), name_of(self.target), self.axes)


def planned(question: Question, machine: Machine) -> Plan:
    """The plan with what more memory is worth; or the verdict that nothing fits, with what would."""
    traced = question.traced_first()
    meshes = traced.meshes(machine)
    tried = tried_meshes(meshes, answered, asked=question.axes.is_asked)
    found = best_of(tried, answered, asked=question.axes.is_asked)
    if found is not None:
        return found
    profile = nearest_to_fit(meshes)
    verdict = no_plan(profile, partial(_flags, machine, question.machine_name))
    nearest = nearest_changes(question, traced, machine, profile, verdict)
    raise verdict.with_changes((*offers_of(tried), *verdict.changes, *nearest))


# ---------------------------------------------------------------------- when nothing fits


def _flags(machine: Machine, name: str | None, limits: Mapping[str, str], seconds: float) -> Change | None:
    """Sizes by tier as options to type. A machine that is only described may be planned for with more; of the one that is here,
    what more would do can be asked, of one tier at a time."""
    lacking = machine.lacks(limits)
    more = lacking if name is None else []
    asked = [f"--what-if {named(tier)}={limits[tier]}" for tier in more]
    rest = as_options({tier: size for tier, size in limits.items() if tier not in more})
    if len(more) > 1:
        return None
    note = " and ".join(_larger(machine, tier, limits[tier]) for tier in lacking)
    return Change(" ".join(filter(None, (rest, *asked))), seconds, note)


def _larger(machine: Machine, tier: str, size: str) -> str:
    """What has to be bought or rented for so much memory."""
    shown = show_bytes(parse_bytes(size))
    if tier == "device" and machine.device.kind == "cuda":
        return f"on a larger GPU, of {shown} ({machine.name} has {show_bytes(machine.device_limit_bytes)})"
    there = f"the preset assumes {show_bytes(machine.host_limit_bytes)}" if machine.assumes_host else "more than there is"
    return f"with {shown} of RAM ({there})"


def nearest_changes(question: Question, traced: Traced, machine: Machine, profile: Profile, verdict: NoPlan) -> Iterator[Change]:
    """Changes that fit, each planned: a smaller batch, a shorter length, another optimizer, adapters alone, more GPUs, another
    card."""
    of_function, ranks = ":" in question.target, profile.ranks
    if traced.job.micro_batch is not None and not traced.job.real_run:
        smaller = Traced(replace(traced.job, micro_batch=None)).profile(machine)
        sizes = [each for each in smaller.passes if each.micro_batch < traced.job.micro_batch]
        tried = (change_to(f"Job(micro_batch={each.micro_batch})", replace(smaller, passes=(each,))) for each in sizes)
        yield from islice((change for change in tried if change is not None), 1)
    fitting: list[Change] = []
    for size in sorted({ranks * each.micro_batch for each in profile.passes if ranks * each.micro_batch < profile.batch_size}):
        what = f"Job(batch_size={size})" if of_function else f"--batch {size}"
        change = change_to(what, traced.profile(machine, size))
        if change is None:
            break
        fitting.append(change)
    yield from fitting[-1:]
    if not of_function and not traced.job.real_run:
        yield from islice(_shorter(question, machine, profile, verdict), 1)
        yield from _other_optimizers(traced, machine, profile)
        yield from _adapted(question, machine)
    yield from islice(_more_gpus(question, machine, profile), 1)
    if machine.limits.device_bytes is None:  # else it is no card that is too small
        yield from islice(_other_machines(question, traced, machine, profile), MACHINES_OFFERED)


def _shorter(question: Question, machine: Machine, profile: Profile, verdict: NoPlan) -> Iterator[Change]:
    length = profile.passes[-1].tokens // profile.passes[-1].micro_batch
    if verdict.tier == "host" and not _holds_state(machine, profile):
        return  # shorter samples need less of activations alone
    larger = replace(most_sharded(profile), device_limit_bytes=profile.device_limit_bytes + verdict.shortfall_bytes)
    if verdict.tier == "device" and not may_fit(larger, space_of(larger)):
        return  # nor is that all that is missing
    for times in TIMES_SHORTER:
        if length < times:
            return
        try:
            traced = question.traced(seq=length // times)
        except ValueError:  # no model of text
            return
        yield from _fitting(f"--seq {length // times}", traced.profile_that_fits(machine))


def _holds_state(machine: Machine, profile: Profile) -> bool:
    """Whether the devices and hosts of a machine together have room for the state of the job, which the profile is of."""
    state, (node, nodes) = profile.state, machine.rank_grid()
    there = node * machine.device_limit_bytes + min(node * machine.host_limit_bytes, int(machine.host.memory_bytes.value))
    return state.parameters + state.masters + state.optimizer <= nodes * there


def _other_optimizers(traced: Traced, machine: Machine, profile: Profile) -> Iterator[Change]:
    """Those that keep less for each parameter."""
    for name in SMALLER_OPTIMIZERS:
        other = traced.updated_by(name).profile(machine)
        if other.state.optimizer < profile.state.optimizer:
            yield from _fitting(f"--optimizer {name}", other)


def _adapted(question: Question, machine: Machine) -> Iterator[Change]:
    """Of a model that is trained whole, adapters alone."""
    if question.options.get("lora") is not None:
        return
    try:
        adapted = question.traced(lora=LORA_RANK).profile_that_fits(machine)
    except (ImportError, ValueError):  # no PEFT here, or no model that it knows
        return
    yield from _fitting(f"--lora {LORA_RANK}", adapted)


def _more_gpus(question: Question, machine: Machine, profile: Profile) -> Iterator[Change]:
    """Twice as many and more in each node; of a cluster, more nodes. A batch that nobody gave grows with them."""
    if machine.device.kind != "cuda":
        return
    count, nodes = machine.device.count, machine.nodes
    counts: list[tuple[str, int | None, int | None]]
    counts = [(f"--gpus {gpus}", gpus, question.nodes) for gpus in NODE_GPUS if gpus > count]
    if nodes > 1 or not counts:
        counts += [(f"--nodes {nodes * times}", question.gpus, nodes * times) for times in TIMES_NODES]
    for what, gpus, more in counts:
        try:
            larger = question.machine_as_asked(question.machine_name, gpus, more)
            if not _holds_state(larger, profile):
                continue
            fitting = question.traced(ranks=math.prod(larger.rank_grid())).profile_that_fits(larger)
        except ValueError:  # of links that nobody knows, or a batch that so many ranks cannot share
            continue
        yield from _fitting(what, fitting)


def _other_machines(question: Question, traced: Traced, machine: Machine, profile: Profile) -> Iterator[Change]:
    """The smallest presets of the same kind that have more of something, and enough of all, with the limit that was given: first
    those with as many GPUs."""
    own, grid = most_sharded(profile), machine.rank_grid()
    space = space_of(own)
    weight = PRECISIONS[profile.precision].weight
    for name, other in sorted(_presets(question, machine), key=lambda pair: _size(pair[1], grid)):
        if not other.device.computes_in(weight):
            continue
        host = min(other.host_limit_bytes, int(other.host.memory_bytes.value) // other.rank_grid()[0])
        like = replace(own, device_limit_bytes=other.device_limit_bytes, host_limit_bytes=host)
        if other.rank_grid() == grid:
            has_more = like.device_limit_bytes > own.device_limit_bytes or host > own.host_limit_bytes
            if has_more and other.device.name != machine.device.name and may_fit(like, space and space.with_limits_of(like)):
                yield from _fitting(f"--machine {name}", traced.profile(other))
        elif math.prod(other.rank_grid()) > math.prod(grid) and _holds_state(other, profile):
            try:
                larger = question.traced(ranks=math.prod(other.rank_grid()))
                yield from _fitting(f"--machine {name}", larger.profile_that_fits(other))
            except ValueError:  # a batch that so many ranks cannot share
                continue


def _presets(question: Question, machine: Machine) -> Iterator[tuple[str, Machine]]:
    """Of the same kind, with as many GPUs and nodes as were asked for."""
    for name in Machine.presets():
        try:
            other = question.machine_as_asked(name, question.gpus, question.nodes)
        except ValueError:  # it has no links for so many
            continue
        if other.device.kind == machine.device.kind:
            yield name, other


def _size(machine: Machine, grid: tuple[int, int]) -> tuple[bool, int, int, int]:
    ranks = machine.rank_grid()
    return ranks != grid, math.prod(ranks), machine.device_limit_bytes, machine.host_limit_bytes


def _fitting(what: str, profile: Profile) -> Iterator[Change]:
    change = change_to(what, profile)
    if change is not None:
        yield change


# ---------------------------------------------------------------------- what if


def parse_changes(given: list[str]) -> dict[str, tuple[str, str]]:
    """
    >>> parse_changes(["device-memory=40GiB", "batch=16"])
    {'device-memory=40GiB': ('device-memory', '40GiB'), 'batch=16': ('batch', '16')}
    """
    changes: dict[str, tuple[str, str]] = {}
    for text in given:
        key, equals, value = (part.strip() for part in text.partition("="))
        if key not in CHANGES:
            raise ValueError(f"--what-if {text}: unknown key {key!r}{nearest(key, CHANGES)}")
        if not equals or not value:
            raise ValueError(f"--what-if {text}: write it like {key}={CHANGES[key]}")
        if text in changes:
            raise ValueError(f"--what-if {text} is given twice")
        if key in COUNTS and not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ValueError(f"--what-if {text}: give a whole number from 1 up")
        if key in TIER_OF and parsed(f"--what-if {text}", parse_bytes, value) == 0:
            raise ValueError(f"--what-if {text}: give more than nothing")
        changes[text] = key, value
    return changes


def refuse_changes(question: Question, changes: Mapping[str, tuple[str, str]]) -> None:
    """Those that could not be made, before any of them is planned."""
    for text, (key, value) in changes.items():
        if key == "machine":
            question.machine_for(value)
        elif key not in TIER_OF and ":" in question.target:
            raise ValueError(
                f"--what-if {text}: --{key} is not for functions; {question.target} decides it in the Job it returns"
            )
        elif key == "dtype" and value not in PRECISIONS:
            raise ValueError(f"--what-if {text}: {' or '.join(PRECISIONS)} today")
        elif key == "optimizer":
            optimizer_class(value)


def parsed(option: str, parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def what_ifs(
    question: Question, traced: Traced, profile: Profile, changes: Mapping[str, tuple[str, str]]
) -> tuple[Outcome, dict[str, Outcome]]:
    """The plan as it is, or why there is none; and by change, what it makes of it."""
    found = None if (fast := fastest(profile)) is None else settled(fast)
    made = shortfall(profile) if found is None else answered(found)
    return made, {text: what_if(question, traced, profile, found, key, value) for text, (key, value) in changes.items()}


def what_if(question: Question, traced: Traced, profile: Profile, found: Found | None, key: str, value: str) -> Outcome:
    """The same with one thing changed, `found` being the fastest without; memory may be more than the machine has."""
    if key in TIER_OF:
        name, size = f"{TIER_OF[key]}_limit_bytes", parse_bytes(value)
        if key == "disk" and profile.disk is None:
            raise ValueError(f"--what-if disk={value}: no disk is known of {profile.machine!r}; measure it with: anyfit probe")
        limits = {name: size, "assumes_host": profile.assumes_host and key != "host-memory"}
        if found is not None and found.whole is None and size >= getattr(profile, name):
            return explained(at_limits(found, **limits))
        return outcome(replace(profile, **limits))  # type: ignore[arg-type]
    if key == "machine":
        return outcome(traced.profile(question.machine_for(value)))
    changed = question.traced(**{key: int(value) if key in COUNTS else value})
    return outcome(changed.profile(question.machine_for(question.machine_name)))


def outcome(profile: Profile) -> Outcome:
    return shortfall(profile) if (found := fastest(profile)) is None else explained(found)
