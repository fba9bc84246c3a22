"""The settings of a run: of its parameter groups, its scheduler and its job. A checkpoint has them as they were at the start and
as they are, so that one can tell what training has changed from what the user has.

| on resuming | |
|---|---|
| parameter groups | found by the names of their parameters, in whatever order they are |
| a learning rate, betas, weight decay, … other than that run began with | refused: the checkpoint's would silently count |
| how a step is made (`foreach`, `fused`, `capturable`) | as it is given now |
| another optimizer or scheduler, or one of another kind inside it | refused |
| numbers that cannot be: rates that are negative or no numbers, betas of 1 and more, counts under 0 | refused |
| another seed, where batches came from `run.loader` | refused: the order of the data would be another |
| another batch size | goes on at the same sample, or is refused where no batch begins there |
| another precision, clip_norm or loss | goes on with it, and says so |
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyfit.values.job import Job

from .plain import class_name, plain
from .unplain import unplain

HOW_IT_STEPS = ("foreach", "fused", "capturable", "differentiable")  # and not what it computes
COUNTS = ("last_epoch", "_step_count", "step_size", "total_steps", "T_max", "total_iters", "step")
SQUARES = ("exp_avg_sq", "max_exp_avg_sq", "sum", "square_avg", "exp_inf")  # of an optimizer's state: never negative


class Settings:
    def __init__(self, job: Job, model: nn.Module, optimizer: Optimizer, scheduler: LRScheduler | None) -> None:
        self._job, self._model, self._optimizer, self._scheduler = job, model, optimizer, scheduler
        self._groups = self._written_groups()
        self._state = None if scheduler is None else _lenient(scheduler.state_dict())

    def to_json(self) -> dict[str, Any]:
        written = self._written_groups()
        started = [*self._groups, *written[len(self._groups) :]]  # of a group added later, as it is
        groups = [
            {"names": names, "settings": now, "start": start}
            for names, now, start in zip(self._names(), written, started, strict=True)
        ]
        return {
            "optimizer": class_name(type(self._optimizer)),
            "groups": groups,
            "scheduler": None if self._scheduler is None else plain(self._scheduler.state_dict(), ("scheduler",)),
            "scheduler_start": self._state,
            "scheduler_kind": _kinds(self._scheduler),
            "job": self._of_job(),
        }

    def _names(self) -> list[list[str]]:
        names = {id(parameter): name for name, parameter in self._model.named_parameters()}
        return [sorted(names[id(each)] for each in group["params"]) for group in self._optimizer.param_groups]

    def _written_groups(self) -> list[dict[str, Any]]:
        return [
            {key: plain(value, (f"parameter group {index}", key)) for key, value in group.items() if key != "params"}
            for index, group in enumerate(self._optimizer.param_groups)
        ]

    def _of_job(self) -> dict[str, Any]:
        job, loss = self._job, self._job.loss
        named = getattr(loss, "__qualname__", type(loss).__qualname__)
        plain_settings = {key: getattr(job, key) for key in ("batch_size", "precision", "seed", "clip_norm")}
        return {**plain_settings, "loss": f"{getattr(loss, '__module__', '')}.{named}"}

    def check(self, document: Mapping[str, Any]) -> None:
        """Refuses by name what is not of this run, or cannot be of any."""
        kind = document["optimizer"]
        if kind != class_name(type(self._optimizer)):
            raise ValueError(f"it was trained with {_short(kind)}; Job(optimizer=) makes {type(self._optimizer).__name__}")
        scheduler, saved, kinds = self._scheduler, document["scheduler"], document["scheduler_kind"]
        if (scheduler is None) != (saved is None):
            raise ValueError(f"saved {'without' if scheduler else 'with'} a scheduler; Job(scheduler=) differs")
        if scheduler is not None and kinds != _kinds(scheduler):
            raise ValueError(
                f"it was trained with the scheduler {_tree(kinds)}, and Job(scheduler=) makes {_tree(_kinds(scheduler))}; the "
                "state of one means nothing to the other: give the same"
            )
        self._check_groups(document["groups"])
        if scheduler is not None:
            self._check_scheduler(scheduler, document)

    def _check_groups(self, groups: Sequence[Mapping[str, Any]]) -> None:
        matches = self._matched(groups)
        if self._scheduler is not None and matches != sorted(matches):
            raise ValueError(
                f"its parameter groups were in another order (that of {_some(groups[0]['names'])} was first), and a scheduler "
                "keeps its learning rates in their order; give Job(optimizer=) its groups in the same order as before"
            )
        for saved, index in zip(groups, matches, strict=True):
            mine, started, now = self._groups[index], saved["start"], saved["settings"]
            where = "the parameters" if len(groups) == 1 else f"the group of {_some(saved['names'])}"
            for key in sorted({*mine, *started} - {*HOW_IT_STEPS}):
                if key not in mine or key not in started:
                    has, not_ = ("it", "Job(optimizer=)") if key in started else ("Job(optimizer=)", "it")
                    raise ValueError(
                        f"{has} has a setting {key!r} of {where}, and {not_} has not; use the same optimizer as before"
                    )
                if not _alike(mine[key], started[key]):
                    raise ValueError(
                        f"it was begun with {key} = {_words(started[key])} for {where}, and Job(optimizer=) gives "
                        f"{_words(mine[key])}; give what it was begun with, and set another after anyfit.start: "
                        f"run.optimizer.param_groups[{index}][{key!r}] = …"
                    )
            for key, value in now.items():
                if key == "params":
                    raise ValueError("a group of parameters that holds parameters")
                refuse_unless_sane(f"{key} of {where}", key, value, mine.get(key))
            missing = next((key for key in mine if key not in now and key not in HOW_IT_STEPS), None)
            if missing is not None:
                raise ValueError(f"it has no {missing!r} of {where}; take another checkpoint")

    def _matched(self, groups: Sequence[Mapping[str, Any]]) -> list[int]:
        """For every saved group, which group of this run it is."""
        mine = self._names()
        if not all(type(each) is dict and {*each} == {"names", "settings", "start"} for each in groups):
            raise ValueError("its parameter groups are not a checkpoint's; take another checkpoint")
        if len(groups) != len(mine):
            raise ValueError(
                f"it was trained with {type(self._optimizer).__name__} in {len(groups)} parameter groups, and Job(optimizer=) "
                f"makes {len(mine)}"
            )
        found = []
        of = {name: index for index, names in enumerate(mine) for name in names}
        for group in groups:
            names = list(group["names"])
            index = of.get(names[0]) if names else next((i for i, each in enumerate(mine) if not each and i not in found), None)
            if index is None or set(mine[index]) != set(names):
                other = sorted(set(names) ^ set(mine[index] if index is not None else ()))[0]
                raise ValueError(
                    f"it was trained with other parameter groups: {other!r} was in {_where(other, groups)}, and Job(optimizer=) "
                    f"has it in {_where(other, [{'names': each} for each in mine])}; make the groups as before"
                )
            found.append(index)
        return found

    def _check_scheduler(self, scheduler: LRScheduler, document: Mapping[str, Any]) -> None:
        saved, known = document["scheduler"], scheduler.state_dict()
        odd = next((key for key in saved if key not in known and hasattr(scheduler, str(key))), None)
        if odd is not None:  # it would take the place of a method
            raise ValueError(f"{odd!r} is not of a scheduler's state; take another checkpoint")
        assert self._state is not None
        for where, mine, theirs in _different(self._state, document["scheduler_start"], "scheduler"):
            raise ValueError(
                f"it was begun with {where} = {_words(theirs)}, and Job(scheduler=) gives {_words(mine)}; the checkpoint's would "
                "count: give what it was begun with, or change it after anyfit.start on run.scheduler"
            )
        missing = next((key for key in known if key not in saved and not key.startswith("_")), None)
        if missing is not None:
            raise ValueError(f"the state of the scheduler has no {missing!r}; take another checkpoint")
        for key, value in saved.items():
            _refuse_insane_tree(f"{key} of the scheduler", key, value, self._state.get(key))

    def differences(self, document: Mapping[str, Any]) -> list[str]:
        """Differences that are not refused, but reported."""
        before, now = document["job"], self._of_job()
        keys = ("precision", "clip_norm", "loss", "batch_size")
        return [f"it was saved with {key} {before[key]}, and goes on with {now[key]}" for key in keys if before[key] != now[key]]

    def position(self, document: Mapping[str, Any]) -> int:
        """Batches of this job's size that `run.loader` has given; refuses another order, or a place where no batch begins."""
        position, before, job = document["loader_position"], document["job"], self._job
        if not position:
            return 0
        if before["seed"] != job.seed:
            raise ValueError(
                f"it stands at batch {position} of the order of the data that seed {before['seed']} gives, and "
                f"Job(seed={job.seed}) gives another; give seed={before['seed']}"
            )
        samples = position * before["batch_size"]
        if samples % job.batch_size:
            raise ValueError(
                f"it stands after {samples} samples in batches of {before['batch_size']}, where no batch of {job.batch_size} "
                f"begins; give batch_size={before['batch_size']}, or one that divides {samples}"
            )
        return int(samples // job.batch_size)

    def load(self, document: Mapping[str, Any]) -> None:
        if self._scheduler is not None:
            self._scheduler.load_state_dict(unplain(document["scheduler"]))
        groups = self._optimizer.param_groups
        for saved, index in zip(document["groups"], self._matched(document["groups"]), strict=True):
            group = groups[index]
            for key, written in saved["settings"].items():
                if key in HOW_IT_STEPS and key in group:
                    continue
                value = unplain(written)
                if isinstance(group.get(key), Tensor) and isinstance(value, Tensor):
                    group[key].fill_(value) if group[key].dim() == value.dim() else group[key].copy_(value)
                else:
                    group[key] = value


def _short(kind: Any) -> str:
    return str(kind).rpartition(".")[2]


def _kinds(thing: Any) -> Any:
    """A scheduler's class, and those of the schedulers in it."""
    if thing is None:
        return None
    inner = [each for each in vars(thing).values() if isinstance(each, LRScheduler)]
    inner += [
        each for held in vars(thing).values() if isinstance(held, list | tuple) for each in held if isinstance(each, LRScheduler)
    ]
    return [class_name(type(thing)), *map(_kinds, inner)]


def _tree(kinds: Any) -> str:
    name, *inner = kinds
    return _short(name) + (f"({', '.join(map(_tree, inner))})" if inner else "")


def _lenient(state: Mapping[str, Any]) -> Any:
    """As JSON; what cannot be written is met again when it is saved, and named there."""
    found: dict[str, Any] = dict.fromkeys(state)
    for key, value in state.items():
        with suppress(TypeError):
            found[key] = plain(value, ("scheduler", key))
    return found


def _different(mine: Any, theirs: Any, where: str) -> Iterator[tuple[str, Any, Any]]:
    if isinstance(mine, dict) and isinstance(theirs, dict):
        for key in mine:
            if key in theirs:
                yield from _different(mine[key], theirs[key], f"{where}.{key}")
    elif isinstance(mine, list) and isinstance(theirs, list) and len(mine) == len(theirs):
        for index, (one, other) in enumerate(zip(mine, theirs, strict=True)):
            yield from _different(one, other, f"{where}[{index}]")
    elif not _alike(mine, theirs):
        yield where, mine, theirs


def _alike(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one) and math.isnan(other):
        return True
    return bool(one == other)


def _words(value: Any) -> str:
    made = unplain(value)
    return f"{made.item()}" if isinstance(made, Tensor) and made.numel() == 1 else f"{made!r:.60}"


def _some(names: Sequence[str]) -> str:
    return f"{names[0]!r}" if names else "no parameters"


def _where(name: str, groups: Sequence[Mapping[str, Any]]) -> str:
    group = next((each for each in groups if name in each["names"]), None)
    if group is None:
        return "none"
    other = next((each for each in group["names"] if each != name), None)
    return f"that of {other!r}" if other is not None else "one of its own"


def refuse_unless_sane(what: str, key: str, written: Any, mine: Any) -> None:
    """Refuses a setting of another type than here, or a number that no run can have."""
    value, expected = unplain(written), None if mine is None else unplain(mine)
    if isinstance(value, Tensor):
        value = value.item() if value.numel() == 1 else None
    if isinstance(expected, Tensor):
        expected = expected.item() if expected.numel() == 1 else None
    if key not in HOW_IT_STEPS and expected is not None and _sort(value) != _sort(expected):
        raise ValueError(f"{what} is {value!r}, and here it is {expected!r}; take another checkpoint")
    items, others = (value, expected) if isinstance(value, tuple | list) else ((value,), (expected,))
    others = others if isinstance(others, tuple | list) and len(others) == len(items) else (None,) * len(items)
    for item, other in zip(items, others, strict=True):
        if not isinstance(item, int | float) or isinstance(item, bool):
            continue
        fine = not isinstance(other, float) or math.isfinite(other)
        if (not math.isfinite(item) and fine) or (item < 0 and not (isinstance(other, int | float) and other < 0)):
            raise ValueError(f"{what} is {item}, which no run can have; take another checkpoint")
        if key == "betas" and not 0 <= item < 1:
            raise ValueError(f"{what} are {value}, which no run can have; take another checkpoint")


def _sort(value: Any) -> str:
    if isinstance(value, bool):
        return "truth"
    if isinstance(value, int | float):
        return "number"
    return "list" if isinstance(value, list | tuple) else type(value).__name__


def _refuse_insane_tree(what: str, key: str, written: Any, mine: Any) -> None:
    """A scheduler's state: rates and counts of the kind that they are here, finite where these are, and counts not under 0."""
    if isinstance(written, list):
        if isinstance(mine, list) and key in ("base_lrs", "_last_lr") and len(mine) != len(written):
            raise ValueError(f"{what} has {len(written)} numbers, and here it has {len(mine)}; take another checkpoint")
        others = mine if isinstance(mine, list) and len(mine) == len(written) else [None] * len(written)
        for item, other in zip(written, others, strict=True):
            _refuse_insane_tree(what, key, item, other)
    elif isinstance(written, dict):
        for name, item in written.items():
            _refuse_insane_tree(f"{name} in {what}", name, item, mine.get(name) if isinstance(mine, dict) else None)
    else:
        is_rate = key in ("base_lrs", "_last_lr", *COUNTS)
        if mine is not None and not isinstance(mine, dict | list) and written is not None and _sort(written) != _sort(mine):
            raise ValueError(f"{what} is {written!r}, and here it is {mine!r}; take another checkpoint")
        if isinstance(written, float) and not math.isfinite(written) and (not isinstance(mine, float) or math.isfinite(mine)):
            raise ValueError(f"{what} is {written}, which no run can have; take another checkpoint")
        if is_rate and (not isinstance(written, int | float) or written < 0):
            raise ValueError(f"{what} is {written!r}, which no run can have; take another checkpoint")


def refuse_insane_scalars(scalars: Mapping[str, Mapping[str, Any]]) -> None:
    for name, entries in scalars.items():
        for key, value in entries.items():
            number = value.item() if isinstance(value, Tensor) and value.numel() == 1 else value
            if not isinstance(number, int | float) or isinstance(number, bool):
                continue
            if math.isnan(number) or (key == "step" and not 0 <= number < math.inf):
                raise ValueError(f"the optimizer's {key} of {name} is {number}, which no run can have; take another checkpoint")


def refuse_not_finite(name: str, key: str | None, smallest: float, largest: float) -> None:
    """A tensor of the optimizer's, or, without a key, a trained parameter, by its extremes: both NaN where one element is."""
    what = f"the weight {name}" if key is None else f"the optimizer's {key} of {name}"
    if math.isnan(smallest) or math.isnan(largest):
        raise ValueError(f"{what} holds NaN: the run had diverged before it was saved; take an earlier checkpoint")
    if key is None and math.inf in (-smallest, largest):
        raise ValueError(f"{what} is infinite: the run had diverged before it was saved; take an earlier checkpoint")
    if key in SQUARES and smallest < 0:
        raise ValueError(f"{what} is {smallest}, and a mean of squares is not negative; take another checkpoint")
