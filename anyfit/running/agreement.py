"""What ranks agree on, or their replicas part.

One exchange at the end of a step has the norm of the gradients, the loss, and what all must know. Optimizer, schedule, loss and
order of the data are compared before the first (`facts_of`). What a script may change later, settings of groups and the place in
the data, is compared in every step as two checksums; only where they differ are the values sent, to name the first one.
"""

from __future__ import annotations

import functools
import hashlib
import marshal
import re
import types
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from anyfit.values.job import Batch, Job
from anyfit.values.mesh import TENSOR

from .disk_health import DiskHealth
from .engine import Engine, Progress
from .evaluating import evaluated, reading
from .host_memory import HostMemory
from .loader import Data
from .plain import class_name
from .saves import Saves
from .team import Peers

_OTHER = object()
_OF_TORCH = ("defaults", "state", "param_groups")  # attributes of every optimizer
# Relative: ranks compute it from the same bits, and kernels that are not deterministic are far below.
SAME_LOSS = {"fp32": 1e-3, "bf16": 0.05}
NOWHERE = -1  # of a rank that takes part with no data of its own


class Agreement:
    def __init__(
        self, engine: Engine, progress: Progress, peers: Peers, saves: Saves, host: HostMemory, disk: DiskHealth, data: Data
    ) -> None:
        self._engine, self._progress, self._peers = engine, progress, peers
        self._saves, self._host, self._disk, self._data = saves, host, disk, data
        self.signal = 0  # that some rank was sent, as all know after the step

    def reach(
        self, loss: Tensor | None, weight: Tensor | None, tokens: Tensor | float, rows: int
    ) -> tuple[Tensor, Tensor, Tensor, float]:
        """The loss of the batch, the norm and the tokens over all ranks, and what gradients still are to be scaled by. Takes this
        rank's sums over `rows` samples. Raises where ranks went different ways."""
        engine, ranks, is_mute = self._engine, self._engine.ranks, self._peers.is_mute
        gradients = engine.placed.gradients
        nothing = torch.zeros((), device=engine.device)
        is_weighted = weight is not None
        if is_mute:
            gradients.count_out()
            loss, weight, tokens = None, None, 0.0
        missing = gradients.missing()
        data = {"kind of loss": "(sum, weight)" if is_weighted else "a mean"} if ranks.is_last_place else {}
        data |= {} if self._data.loader is None else self._data.loader.facts
        known = [
            float(ranks.asked()),
            len(missing),
            0 if is_mute else rows,
            0 if self._progress.launch is None else self._progress.launch.asked,
            self._host.lacking_bytes(),
            self._saves.has_failed,
            number_of_settings(engine.optimizer),
            NOWHERE if is_mute else zlib.crc32(repr(data).encode()),
            is_weighted,
            *self._disk.known(),
        ]
        squares = gradients.finish().squares(engine.device)
        lanes = engine.placed.lanes
        counted = lanes.send(torch.as_tensor(tokens, dtype=torch.float64).reshape(1))
        figures = [squares, *(nothing if each is None else each for each in (weight, loss)), counted]
        figures = [each.detach().to(engine.device, torch.float64).reshape(1) for each in figures]
        rows_of = lanes.reading(ranks.of_all(torch.cat([*figures, lanes.send(torch.tensor(known, dtype=torch.float64))])))()
        squares, weights, losses, counts, asked, missed, samples, signals, lacks, unsaved, settings, places, weighted, *disks = (
            rows_of.unbind(1)
        )
        self.signal = int(signals.max())
        self._host.lacking, self._saves.failed_on_some = lacks.tolist(), bool(unsaved.any())
        self._disk.note(torch.stack(disks, 1).tolist())
        self._refuse_other_weights(asked)
        if len(settings.unique()) > 1:
            self._refuse_different(settings_of(engine.optimizer), list(range(ranks.count)))
        for members in ranks.same_stages:
            known_of = [rank for rank in members if places[rank] != NOWHERE]
            if len(places[known_of].unique()) > 1:
                self._refuse_different(data, known_of)
        if bool(missed.any()):
            there = ranks.objects(sorted({*engine.placed.state.parameters} - set(missing)))
            gradients.count_in(sorted(set().union(*there)))
        self._refuse_other_samples(losses)
        samples, counts = (each.sum() / ranks.together.n for each in (samples, counts))
        # A step without weight is skipped, as on a single rank.
        scale = ranks.scale_of(weights) if bool(weighted.any()) else engine.job.batch_size / float(samples)
        losses = losses.sum() / ranks.tensor
        return (losses * scale).to(torch.float32), (squares.sum().sqrt() * scale).to(torch.float32), counts, scale

    @contextmanager
    def reading(self) -> Iterator[nn.Module]:
        """The model in evaluation mode, without gradients."""
        with reading(self._engine.model) as model, self._peers.telling():
            yield model

    def mean_loss(self, batch: Batch) -> Tensor:
        engine = self._engine
        with self.reading():
            if not engine.ranks.are_several:
                total, weight = engine.evaluate(batch)
                return total if weight is None else total / weight
            mine = torch.stack([self._sum_and_weight(each) for each in self._peers.batches(batch, engine)]).sum(0)
        sums = engine.ranks.of_all(mine if not self._peers.is_mute else torch.zeros_like(mine)).sum(0)
        return (sums[0] / sums[1]).float()

    def _sum_and_weight(self, batch: Batch) -> Tensor:
        total, weight = self._evaluated(batch)
        if weight is None:
            rows = self._engine.job.rows(batch) or 1  # where only the user's `split` knows, batches count alike
            total, weight = total * rows, torch.as_tensor(float(rows))
        return torch.stack([total.double(), weight.to(total.device).double()])

    def _evaluated(self, batch: Batch) -> tuple[Tensor, Tensor | None]:
        """The loss; of a pipeline nothing, and a weight of nothing, but on the last stage."""
        engine = self._engine
        if engine.plan.pipeline == 1:
            return engine.evaluate(batch)
        nothing = torch.zeros((), device=engine.device)
        return evaluated(engine, self._progress.steps, batch) or (nothing, nothing)

    def _refuse_other_weights(self, asked: Tensor) -> None:
        for members in self._engine.ranks.same_stages:
            different = [rank for rank in members if asked[rank] != asked[members[0]]]
            if not different:
                continue
            raise RuntimeError(
                f"rank {different[0]} used other weights in this step than rank {members[0]}, or in another order: with weights "
                "that are sharded over ranks every rank has to call the same modules; use a plan with weight_shards 1"
            )

    def _refuse_other_samples(self, losses: Tensor) -> None:
        """Ranks of a tensor axis compute the same loss, but for rounding, or were given different samples: a loop of the user's
        own may have done so."""
        for members in self._engine.ranks.mesh.groups((TENSOR,)):
            found = losses[list(members)]
            if float(found.max() - found.min()) > SAME_LOSS[self._engine.job.precision] * float(found.abs().max()):
                raise RuntimeError(
                    f"ranks {', '.join(map(str, members))} hold the model together, and have other losses in step "
                    f"{self._progress.steps + 1} ({', '.join(f'{each:.6g}' for each in found.tolist())}): give all ranks of a "
                    "tensor axis the same samples and the same random numbers"
                )

    def _refuse_different(self, facts: Mapping[str, str], who: list[int]) -> None:
        """All ranks know that checksums differ; the values may not, as a list and a tuple of the same numbers."""
        everybody = self._engine.ranks.objects(facts)
        first = everybody[who[0]]
        for rank in who:
            theirs = everybody[rank]
            for name in (*first, *theirs):
                if theirs.get(name) != first.get(name):
                    what, within, where = name.partition(" in group ")
                    raise ValueError(
                        f"rank {rank} has {what} {theirs.get(name, 'none')}{within}{where}, rank {who[0]} has "
                        f"{first.get(name, 'none')}, in step {self._progress.steps + 1}: their weights would part. Do the same "
                        "to the optimizer, the schedule and the loader on every rank"
                    )


# ---------------------------------------------------------------------- facts that all ranks must have alike


def settings_of(optimizer: Optimizer) -> dict[str, str]:
    groups = enumerate(optimizer.param_groups)
    return {f"{name} in group {index}": repr(value) for index, group in groups for name, value in _settings(group)}


def number_of_settings(optimizer: Optimizer) -> int:
    """A checksum of the settings of all groups."""
    number = 0
    for group in optimizer.param_groups:
        try:  # in C, as a step is made more often than a setting is no plain value; version 0 depends on values alone
            told = marshal.dumps([value for name, value in group.items() if name != "params"], 0)
        except ValueError:
            told = repr([value for _, value in _settings(group)]).encode()
        number = zlib.crc32(told, number)
    return number


def _settings(group: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(name, plain) for name, value in group.items() if name != "params" and (plain := _plain(value)) is not _OTHER]


def facts_of(job: Job, model: nn.Module, optimizer: Optimizer) -> dict[str, str]:
    """What all ranks must have alike before they exchange weights."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    facts = {"optimizer": class_name(type(optimizer))}
    facts |= {
        f"group of {names.get(id(parameter), '?')}": str(index)
        for index, group in enumerate(optimizer.param_groups)
        for parameter in group["params"]
    }
    facts |= settings_of(optimizer)
    facts |= {
        f"optimizer.{name}": repr(plain)
        for name, value in vars(optimizer).items()
        if not name.startswith("_") and name not in _OF_TORCH and (plain := _plain(value)) is not _OTHER
    }
    facts["structure of the model"] = _digest(re.sub(r"\b0x[0-9a-f]+", "", repr(model)))  # less the addresses of objects
    facts["code of Job(loss=)"] = code_of(job.loss)
    facts["code of Job(split=)"] = "none" if job.split is None else code_of(job.split)
    facts["options that were agreed to"] = repr(sorted(job.agree))
    return facts


def facts_of_schedule(scheduler: LRScheduler | None) -> dict[str, str]:
    if scheduler is None:
        return {"scheduler": "none"}
    state = {f"scheduler.{name}": repr(_plain(value)) for name, value in sorted(scheduler.state_dict().items())}
    lambdas = getattr(scheduler, "lr_lambdas", [])
    return {"scheduler": class_name(type(scheduler)), **state} | {
        f"code of scheduler.lr_lambdas[{index}]": code_of(each) for index, each in enumerate(lambdas)
    }


def code_of(function: Any) -> str:
    """A digest of a function's code, of the functions it wraps too; not of values, which may well be a rank's own."""
    return _digest(repr(_code(function, 0)))


def _code(function: Any, depth: int) -> object:
    if depth > 8:
        return ""
    if isinstance(function, functools.partial):
        return "partial", _code(function.func, depth + 1)
    if isinstance(function, types.MethodType):
        return _code(function.__func__, depth + 1)
    if isinstance(function, types.FunctionType):
        cells = (cell.cell_contents for cell in function.__closure__ or () if cell != types.CellType())
        return _bytes(function.__code__), [_code(each, depth + 1) for each in cells if callable(each)]
    called = type(function).__call__ if callable(function) else None
    code = _bytes(called.__code__) if isinstance(called, types.FunctionType) else ""
    return class_name(function if isinstance(function, type) else type(function)), code


def _bytes(code: types.CodeType) -> object:
    """What runs, without files and line numbers, which differ between nodes."""
    constants = [
        _bytes(each)
        if isinstance(each, types.CodeType)
        else repr(sorted(map(repr, each)) if isinstance(each, frozenset) else each)
        for each in code.co_consts
    ]
    return code.co_name, code.co_code.hex(), code.co_names, code.co_varnames, constants


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def _plain(value: Any) -> Any:
    """A value that is the same text on every rank, or _OTHER: objects show their addresses."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else _OTHER
    if isinstance(value, list | tuple):
        found: Any = [_plain(each) for each in value]
        return _OTHER if _OTHER in found else found
    if isinstance(value, Mapping):
        return {str(key): plain for key, each in value.items() if (plain := _plain(each)) is not _OTHER}
    if isinstance(value, set | frozenset):
        return sorted(map(str, value))
    return _OTHER
