"""Which machine is best for a job: each planned for as `anyfit plan` would, with the batch that is best on it.

The best batch is looked for among the limit and its halves: as long as the next half gives as many tokens a second, within
AS_FAST, it is taken instead, because fewer samples a step train better. Every step of a larger batch does more work for one
update, so that the smaller ones after that give less.

The job is traced once for each kind of device. Machines are shared out over processes, one for each core, which have the traces
from the process that they were forked from. Where the loss does not allow that the batch is cut, the usual batch is taken.
"""

from __future__ import annotations

import gc
import itertools
import math
import multiprocessing
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace

from .asking import Question, Traced, parsed
from .planning import searched
from .planning.answers import shortfall
from .planning.enough import Seen, as_traced
from .planning.meshes import best_of, nearest_to_fit, searched_meshes, tried_meshes
from .planning.reasons import explained
from .values import doing as doings
from .values.answers import Outcome, Refused
from .values.best_batch import BestBatch
from .values.doing import doing
from .values.machine import Machine
from .values.plan import Decision, Plan
from .values.profile import Profile
from .values.record import nearest
from .values.units import parse_count, show_count

AS_FAST = 0.01  # of the tokens a second
QUICK = 1  # start of a search: enough to tell batches apart


@dataclass(frozen=True)
class Tried:
    """A batch, and the tokens a second that its fastest plan gives; 0 where nothing fits."""

    batch: int
    tokens_per_second: float


def best_batch(rate: Callable[[int], float], limit: int, ranks: int) -> tuple[Tried, ...]:
    """The best first, then the others that were tried.

    >>> best_batch(lambda batch: batch / (batch + 1), 64, 1)[0].batch
    32
    >>> best_batch(lambda batch: 1.0, 64, 8)[0].batch
    8
    """
    sizes = list(batches(limit, ranks))
    if not sizes:
        raise ValueError(f"--batch best:{limit}: {ranks} ranks share a batch, so that it has {ranks} samples or more")
    tried: list[Tried] = []
    for size in sizes:
        tried.append(Tried(size, rate(size)))
        if len(tried) > 1 and 0 < tried[-1].tokens_per_second < (1 - AS_FAST) * max(each.tokens_per_second for each in tried):
            break
    most = max(each.tokens_per_second for each in tried)
    best = [each for each in tried if each.tokens_per_second >= (1 - AS_FAST) * most][-1]
    return best, *(each for each in tried if each is not best)


def batches(limit: int, ranks: int) -> Iterator[int]:
    """The limit and its halves, each a multiple of the ranks, largest first."""
    size = limit // ranks
    while size:
        yield size * ranks
        size //= 2


def chosen_batch(question: Question, machine: Machine, best: BestBatch) -> tuple[Tried, ...]:
    """For the machine at hand."""
    traced = question.traced(batch=_divided(best.limit, machine), ranks=math.prod(machine.rank_grid()))
    traced.trace_all(machine.device.kind)
    loss = traced.graphs(machine)[0].loss
    if not loss.may_be_cut:
        raise ValueError(f"--batch best: each batch would be another job, as it is not cut: {loss.why}; give a number")
    return _best_batch(Bench(traced), machine, best.limit)[0]


def with_batch(plan: Plan, tried: Sequence[Tried], limit: int) -> Plan:
    """Says why it has this batch."""
    best, *others = tried
    rates = [
        f"{each.batch} gives {show_count(each.tokens_per_second)} ({each.tokens_per_second / best.tokens_per_second - 1:+.0%})"
        if each.tokens_per_second
        else f"{each.batch} does not fit"
        for each in others
    ]
    why = "; ".join((f"the best of up to {limit}, with {show_count(best.tokens_per_second)} tokens/s", *rates))
    return replace(plan, decisions=(Decision("batch", str(best.batch), why), *plan.decisions))


# ---------------------------------------------------------------------- what was typed


def parse_machines(text: str) -> list[str]:
    """
    >>> parse_machines("rtx-4090, h200")
    ['rtx-4090', 'h200']
    """
    if text.strip() == "all":
        return [name for name in Machine.presets() if Machine.load(name).device.kind == "cuda"]
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
    tokens = parsed(f"--tokens {text}", parse_count, text)
    if tokens < 1:
        raise ValueError(f"--tokens {text}: give at least one")
    return tokens


# ---------------------------------------------------------------------- one machine


@dataclass
class Bench:
    """A job with all its traces, from which any machine and batch is planned for."""

    traced: Traced

    def profile(self, machine: Machine, batch: int) -> Profile:
        """With all micro-batches, without a tensor axis where that can be."""
        return self._with(batch).profile(machine)

    def planned(self, machine: Machine, batch: int, seen: Seen | None = None) -> Outcome:
        """As `anyfit plan` plans for it, with as many micro-batches as it would have traced; without what more memory would be
        worth. `seen`: what was searched of it before."""
        traced = self._with(batch)
        graphs = traced.graphs(machine)
        if not graphs[0].loss.may_be_cut:
            made = searched_meshes(traced.meshes(machine), explained, asked=traced.axes.is_asked)
            return shortfall(nearest_to_fit(traced.meshes(machine))) if made is None else made
        stages = traced.looks_for_stages(machine)
        profile, found = as_traced(traced.profile(machine), for_stages=stages, seen=seen)
        plain = None if found is None else searched(profile, explained, found=found)
        meshes = traced.meshes_of(machine, graphs[: len(profile.passes)])
        tried = tried_meshes(meshes, explained, asked=traced.axes.is_asked, plain=plain)
        made = best_of(tried, explained, asked=traced.axes.is_asked)
        return shortfall(nearest_to_fit(meshes)) if made is None else made

    def _with(self, batch: int) -> Traced:
        return self.traced.with_batch(batch)


def _best_batch(bench: Bench, machine: Machine, limit: int) -> tuple[tuple[Tried, ...], Seen]:
    """With what was searched of the best."""
    seen: dict[int, Seen] = {}
    near: int | None = None  # the micro-batch that was best of the batch before: this one's is not far

    def rate(batch: int) -> float:
        nonlocal near
        profile = bench.profile(machine, batch)
        known = seen[batch] = Seen.of(profile)
        if near is not None:
            close = tuple(each for each in profile.passes if near / 2 <= each.micro_batch <= 2 * near)
            profile = replace(profile, passes=close or profile.passes)
        found = known.fastest(profile, QUICK) if profile.divisions else as_traced(profile, QUICK, seen=known)[1]
        near = near if found is None else found.micro_batch
        return 0.0 if found is None else found.chosen.tokens_per_second * profile.ranks

    tried = best_batch(rate, limit, math.prod(machine.rank_grid()))
    return tried, seen[tried[0].batch]


def _row(bench: Bench, machine: Machine, batch: int | BestBatch | None) -> Outcome | Refused:
    try:
        if not isinstance(batch, BestBatch):
            return bench.planned(machine, bench.traced.job.batch_size if batch is None else batch)
        tried, seen = _best_batch(bench, machine, batch.limit)
        made = bench.planned(machine, tried[0].batch, seen)
    except ValueError as error:  # the job cannot be there: such as bf16 on a GPU that has none
        return Refused(str(error))
    return with_batch(made, tried, batch.limit) if isinstance(made, Plan) else made


def _divided(limit: int, machine: Machine) -> int:
    ranks = math.prod(machine.rank_grid())
    return max(limit // ranks, 1) * ranks


# ---------------------------------------------------------------------- all of them


Work = tuple[Bench, Machine, int | BestBatch | None]


def compared(question: Question, machines: Mapping[str, Machine], batch: int | BestBatch | None) -> dict[str, Outcome | Refused]:
    """By machine, the plan on all its devices, or why there is none."""
    ranks = {name: math.prod(machine.rank_grid()) for name, machine in machines.items()}
    if isinstance(batch, BestBatch):
        traced = question.traced_first(batch=batch.limit)
    elif batch is None:
        traced = question.traced_first(ranks=math.lcm(*ranks.values()))
    else:
        traced = question.traced_first(batch=batch)
    bench = Bench(traced)
    for kind in {machine.device.kind for machine in machines.values()}:
        traced.trace_all(kind)
    if isinstance(batch, BestBatch) and not all(traced.graphs(each)[0].loss.may_be_cut for each in machines.values()):
        return compared(question, machines, None)  # each batch would be another job
    # Those with less memory have more to choose from, and take longest.
    tightest = sorted(machines, key=lambda name: ranks[name] * machines[name].device_limit_bytes)
    found = dict(_shared_out([(name, (bench, machines[name], batch)) for name in tightest]))
    return {name: found[name] for name in machines}


def at_sizes(question: Question, machine: Machine, plan: Plan, sizes: Sequence[int]) -> dict[int, Outcome]:
    """By bytes of the device, what the job of a plan comes to."""
    traced = question.traced(ranks=plan.ranks)
    if traced.job.batch_size != plan.batch_size:
        raise ValueError(
            f"the plan is for a batch of {plan.batch_size}, and {question.target} has one of {traced.job.batch_size}"
        )
    bench = Bench(traced)
    made_for = bench.profile(machine, plan.batch_size).model_fingerprint
    if plan.fingerprint is not None and plan.fingerprint.model != made_for:
        raise ValueError(
            f"the plan is for another model than {question.target}: {plan.title}; name that model, or leave --job out"
        )
    rows: list[tuple[str, Work]] = [(str(size), (bench, machine.as_if(device_memory=size), plan.batch_size)) for size in sizes]
    found = dict(_shared_out(rows))
    return {size: outcome for size in sizes if not isinstance(outcome := found[str(size)], Refused)}


_work: dict[str, Work] = {}  # of the processes that are forked


def _shared_out(rows: list[tuple[str, Work]]) -> Iterator[tuple[str, Outcome | Refused]]:
    count = min(len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1, len(rows))
    if count < 2 or not _may_fork():
        yield from ((name, _row(*work)) for name, work in rows)
        return
    _work.update(rows)
    done = itertools.count(1)
    try:
        with ProcessPoolExecutor(count, multiprocessing.get_context("fork"), _begin) as pool:
            futures: dict[Future[Outcome | Refused], str] = {pool.submit(_row_of, name): name for name, _ in rows}
            for future in as_completed(futures):
                with doing(f"planning for {len(rows)} machines, {next(done)} done"):
                    yield futures[future], future.result()
    finally:
        _work.clear()


def _may_fork() -> bool:
    """Not where there is a GPU: a process that was forked from one that has used it cannot, to time a model's ops on it."""
    import torch

    return "fork" in multiprocessing.get_all_start_methods() and not torch.cuda.is_available()


def _begin() -> None:
    """In a process of its own: what shows the work is the first one's, and one thread is its share of the cores. The traces are
    there for good, so that nobody has to look through them for what is not needed any more."""
    import torch

    gc.freeze()
    doings.unheard()
    torch.set_num_threads(1)


def _row_of(name: str) -> Outcome | Refused:
    return _row(*_work[name])
