"""What `anyfit plan` is asked: the plan of a target on a machine, what a change would make of it, which machine is best for it,
and what would fit where it does not.

Traces cost most. They are made once for each kind of device and priced anew for every machine, batch and limit; only another
length, precision or optimizer is traced again. What is offered where nothing fits was planned before; so that this takes a few
seconds, what cannot fit by its least memory is not searched, and the first machines that fit, smallest first, are enough.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from .planning import searched
from .planning.answers import answered, at_limits, change_to, no_plan, shortfall
from .planning.enough import needed_of
from .planning.fastest import Found, fastest, may_fit
from .planning.reasons import explained, settled
from .planning.space import space_of
from .targets import job_for
from .values.answers import Outcome
from .values.graph import Graph
from .values.job import Job
from .values.machine import Limits, Machine
from .values.plan import Change, NoPlan, Plan
from .values.profile import Profile
from .values.record import nearest
from .values.units import parse_bytes, parse_count

# What `--what-if` may change, each with an example.
CHANGES = {
    "device-memory": "40GiB",
    "host-memory": "256GiB",
    "machine": "h200",
    "batch": "16",
    "seq": "2048",
    "dtype": "bf16",
    "optimizer": "sgd",
}
MACHINES_OFFERED = 2
TIMES_SHORTER = (2, 4)


@dataclass
class Traced:
    """A job with its traces, one set for each kind of device, made when they are asked for."""

    job: Job
    _graphs: dict[tuple[str, int], list[Graph]] = field(default_factory=dict)

    def profile(self, machine: Machine, batch_size: int | None = None) -> Profile:
        """On all devices of any machine; of a smaller batch, by the passes there are."""
        from .profiling import profiled, traced

        size, rank_grid = batch_size or self.job.batch_size, machine.rank_grid()
        key = kind, ranks = machine.device.kind, math.prod(rank_grid)
        if key not in self._graphs:
            self._graphs[key] = traced(self.job, kind, ranks)
        graphs = [graph for graph in self._graphs[key] if graph.micro_batch * ranks <= size]
        return profiled(self.job, graphs, machine, rank_grid, size)


@dataclass(frozen=True)
class Question:
    """A target with its options, and the machine it is to be trained on."""

    target: str
    options: Mapping[str, Any]  # of targets.job_for
    machine_for: Callable[[str | None], Machine]  # by name, with the limits that were given
    machine_name: str | None = None

    def traced(self, **changes: Any) -> Traced:
        return Traced(job_for(self.target, **{**self.options, **changes}))


def planned(question: Question, traced: Traced, profile: Profile) -> Plan:
    """The plan with what more memory is worth; or the verdict that nothing fits, with what would."""
    found = searched(profile, answered)
    if found is not None:
        return found
    verdict = no_plan(profile)
    if profile.divisions:
        raise verdict
    machine = question.machine_for(question.machine_name)
    raise verdict.with_changes((*nearest_changes(question, traced, machine, profile, verdict), *verdict.changes))


# ---------------------------------------------------------------------- when nothing fits


def nearest_changes(question: Question, traced: Traced, machine: Machine, profile: Profile, verdict: NoPlan) -> Iterator[Change]:
    """Changes that fit, each planned: a smaller micro-batch or batch, a shorter length, another card."""
    of_function = ":" in question.target
    if traced.job.micro_batch is not None and not traced.job.real_run:
        smaller = Traced(replace(traced.job, micro_batch=None)).profile(machine)
        sizes = [each for each in smaller.passes if each.micro_batch < traced.job.micro_batch]
        tried = (change_to(f"Job(micro_batch={each.micro_batch})", replace(smaller, passes=(each,))) for each in sizes)
        yield from islice((change for change in tried if change is not None), 1)
    fitting: list[Change] = []
    for size in sorted({each.micro_batch for each in profile.passes if each.micro_batch < profile.batch_size}):
        what = f"Job(batch_size={size})" if of_function else f"--batch {size}"
        change = change_to(what, traced.profile(machine, size))
        if change is None:
            break
        fitting.append(change)
    yield from fitting[-1:]
    if not of_function and not traced.job.real_run and _lacks_device_alone(profile, verdict):
        yield from islice(_shorter(question, machine, profile), 1)
    if machine.limits == Limits():  # else it is no card that is too small
        yield from islice(_other_machines(traced, machine, profile), MACHINES_OFFERED)


def _lacks_device_alone(profile: Profile, verdict: NoPlan) -> bool:
    """Whether device memory is all that is missing: shorter samples need less of nothing else."""
    larger = replace(profile, device_limit_bytes=profile.device_limit_bytes + verdict.shortfall_bytes)
    return verdict.tier == "device" and bool(may_fit(larger, space_of(larger)))


def _shorter(question: Question, machine: Machine, profile: Profile) -> Iterator[Change]:
    smallest = profile.passes[-1]
    length = smallest.tokens // smallest.micro_batch
    for times in TIMES_SHORTER:
        if length < times:
            return
        try:
            traced = question.traced(seq=length // times)
        except ValueError:  # no model of text
            return
        change = change_to(f"--seq {length // times}", traced.profile(machine))
        if change is not None:
            yield change


def _other_machines(traced: Traced, machine: Machine, profile: Profile) -> Iterator[Change]:
    """The smallest presets of the same kind that have more of something, and enough of all."""
    space = space_of(profile)
    presets = [(name, Machine.load(name)) for name in Machine.presets()]
    for name, other in sorted(presets, key=lambda pair: (pair[1].device_limit_bytes, pair[1].host_limit_bytes)):
        limits = {"device_limit_bytes": other.device_limit_bytes, "host_limit_bytes": other.host_limit_bytes}
        has_more = any(limit > getattr(profile, tier) for tier, limit in limits.items())
        if other.device.kind != machine.device.kind or other.device.name == machine.device.name or not has_more:
            continue
        like = replace(profile, **limits)  # type: ignore[arg-type]
        if not may_fit(like, space and space.with_limits_of(like)):
            continue
        change = change_to(f"--machine {name}", traced.profile(other))
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
        if key in ("batch", "seq") and not (value.isascii() and value.isdigit() and int(value) > 0):
            raise ValueError(f"--what-if {text}: give a whole number from 1 up")
        if key.endswith("memory") and _parsed(f"--what-if {text}", parse_bytes, value) == 0:
            raise ValueError(f"--what-if {text}: give more than nothing")
        changes[text] = key, value
    return changes


def _parsed(option: str, parse: Callable[[str], int], text: str) -> int:
    try:
        return parse(text)
    except ValueError as error:
        raise ValueError(f"{option}: {error}") from None


def what_ifs(
    question: Question, traced: Traced, profile: Profile, changes: Mapping[str, tuple[str, str]]
) -> tuple[Outcome, dict[str, Outcome]]:
    """The plan as it is, or why there is none; and by change, what it makes of it."""
    fast = fastest(profile)
    found = None if fast is None else settled(fast)
    made = shortfall(profile) if found is None else answered(found)
    return made, {text: what_if(question, traced, profile, found, key, value) for text, (key, value) in changes.items()}


def what_if(question: Question, traced: Traced, profile: Profile, found: Found | None, key: str, value: str) -> Outcome:
    """The same with one thing changed, `found` being the fastest without; memory may be more than the machine has."""
    if key in ("device-memory", "host-memory"):
        name, size = f"{key.removesuffix('-memory')}_limit_bytes", parse_bytes(value)
        if found is not None and found.whole is None and size >= getattr(profile, name):
            return explained(at_limits(found, **{name: size}))
        return outcome(replace(profile, **{name: size}))  # type: ignore[arg-type]
    if key == "machine":
        return outcome(traced.profile(question.machine_for(value)))
    changed = question.traced(**{key: int(value) if key in ("batch", "seq") else value})
    return outcome(changed.profile(question.machine_for(question.machine_name)))


def outcome(profile: Profile) -> Outcome:
    found = fastest(profile)
    return shortfall(profile) if found is None else explained(found)


# ---------------------------------------------------------------------- which machine


def parse_machines(text: str) -> list[str]:
    """
    >>> parse_machines("rtx-4090, h200")
    ['rtx-4090', 'h200']
    """
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise ValueError(f"--compare {text!r}: write machines with commas between, such as rtx-4090,h200")
    twice = [name for name in names if names.count(name) > 1]
    if twice:
        raise ValueError(f"--compare {text}: {twice[0]} is given twice")
    return names


def parse_prices(text: str, machines: list[str]) -> dict[str, float]:
    """
    >>> parse_prices("h200=3.5", ["h200", "l4"])
    {'h200': 3.5}
    """
    prices: dict[str, float] = {}
    for part in text.split(","):
        name, equals, price = (word.strip() for word in part.partition("="))
        if not equals:
            raise ValueError(f"--price {text}: write it like {machines[0]}=2.5, an hour's price, with commas between")
        if name not in machines:
            raise ValueError(f"--price {text}: {name!r} is not compared{nearest(name, machines)}")
        if name in prices:
            raise ValueError(f"--price {text}: {name} is given twice")
        if not price.replace(".", "", 1).isdecimal() or not float(price) > 0:
            raise ValueError(f"--price {text}: {price!r} is no price; write a number above 0, such as 2.5")
        prices[name] = float(price)
    return prices


def parse_tokens(text: str) -> int:
    tokens = _parsed(f"--tokens {text}", parse_count, text)
    if tokens < 1:
        raise ValueError(f"--tokens {text}: give at least one")
    return tokens


def compared(question: Question, machines: list[str]) -> dict[str, Outcome]:
    """By machine, the plan on all its devices or the verdict that none fits."""
    found = {name: question.machine_for(name) for name in machines}  # all names are good before any work is done
    traced = question.traced(ranks=math.lcm(*(math.prod(machine.rank_grid()) for machine in found.values())))
    return {name: outcome(needed_of(traced.profile(machine))) for name, machine in found.items()}
