"""Going on from a checkpoint: all of it is compared with the run before anything of the run changes; then tensors are read.

Each rank reads the boxes that overlap what it has, so that any other division of the model can go on from one.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem

from anyfit.placing import Placed
from anyfit.placing.ranks import Ranks
from anyfit.placing.stretches import Runs, Stretch, buffers_of, home_of, spread, weights_of
from anyfit.values.record import nearest

from .boxes import Box, Strip, strips_of
from .checkpoint import EXTRA, PLAN, PROGRESS
from .extra_state import ExtraState
from .files import FORMER_VERSION
from .randomness import Randoms
from .settings import Settings, refuse_insane_scalars, refuse_not_finite
from .storage import Reader
from .stored import WAY_OUT, Opened
from .team import Team
from .unplain import unplain

READ_AT_ONCE = 2**22  # elements
_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError, IndexError, OverflowError)


def load(folder: Path, placed: Placed, settings: Settings, extra: ExtraState, team: Team | None = None) -> dict[str, Any]:
    """Puts a checkpoint's state into the placed model, and random states where as many ranks go on; returns its progress."""
    ranks = placed.ranks
    try:  # each rank reads its share of the checksums, and all hear what one finds
        opened = Opened(folder)
        progress, others, randoms = _compared(opened, placed, settings, extra)
        opened.verify(ranks.index, ranks.count)
        _refuse_not_finite(opened, placed)
    except (OSError, ValueError) as error:
        if team is not None:
            team.hear_of(error)
        raise
    if team is not None:
        team.hear_of(None)
        team.agree({f"checkpoint in {folder}": hashlib.sha256(opened.manifest).hexdigest()})
    placed.residency.drop_all()
    # Nothing has changed up to here.
    extra.make_buffers(others[0]["buffers"], opened.weights, placed.device)
    targets = {each.name: _Target(each) for each in weights_of(placed)}
    buffers = {each.name: torch.empty_like(each.values) for each in buffers_of(placed)}
    targets |= {name: _Target(Stretch(name, opened.tensors[name].shape, 0, flat)) for name, flat in buffers.items()}
    placed.updates.forget_all()
    for name, stored in opened.optimizer.items():
        parameter, _, key = name.rpartition("/")
        if not placed.stages.holds(parameter):
            continue
        home = home_of(placed, parameter, key, stored.shape, stored.dtype)
        if home is not None:
            targets[name] = _Target(home)
    reader, planner = Reader(opened), _Loading()
    with torch.no_grad():
        metadata = reader.read_metadata()
        planner.set_up_planner(dict(targets), metadata)
        reader.set_up_storage_reader(metadata, is_coordinator=ranks.index == 0)
        reader.read_data(planner.create_local_plan(), planner)
        for name, buffer in placed.model.named_buffers():
            buffer.copy_(buffers[name].view(buffer.shape))
        for name, entries in progress["optimizer_scalars"].items():
            if placed.stages.holds(name):
                placed.updates.load_scalars(name, entries)
        spread(placed)
        extra.load(others[_mine(progress, len(others), ranks)], opened.read, placed.device)
    if replicas_of(progress, len(randoms)) == ranks.replicas:
        randoms[_mine(progress, len(randoms), ranks)].restore()
    return progress | {"ranks": len(randoms), "version": opened.version}


def replicas_of(progress: Mapping[str, Any], ranks: int) -> int:
    """How many ranks saw samples of their own, and drew random numbers of their own."""
    return ranks // (int(progress.get("tensor", 1)) * int(progress.get("pipeline", 1)))


def _mine(progress: Mapping[str, Any], ranks: int, here: Ranks) -> int:
    """Which of the ranks that saved this one takes up from: one that saw its samples, if as many go on. Along the pipeline axis,
    the outermost, it is the first."""
    tensor = int(progress.get("tensor", 1))
    if replicas_of(progress, ranks) != here.replicas:
        return here.index % ranks
    return here.replica * tensor + (here.index % here.tensor if here.tensor == tensor else 0)


def _refuse_not_finite(opened: Opened, placed: Placed) -> None:
    """Refuses NaN in trained weights and optimizer state, and infinite weights that were not so here; each rank its share."""
    trained = placed.stages.trained or placed.updates.names
    wanted = [(name, None) for name in opened.weights if name in trained]
    wanted += [(name.rpartition("/")[0], name.rpartition("/")[2]) for name in opened.optimizer]
    for name, key in wanted[placed.ranks.index :: placed.ranks.count]:
        extremes = opened.extremes(name if key is None else f"{name}/{key}")
        here = (each.values for each in weights_of(placed) if each.name == name and key is None)
        if extremes is None or (math.inf in map(abs, extremes) and any(bool(each.isinf().any()) for each in here)):
            continue
        try:
            refuse_not_finite(name, key, *extremes)
        except ValueError as error:
            raise ValueError(f"{opened.folder}: {error}") from None


class _Target:
    """Where a tensor of a checkpoint goes, as torch.distributed.checkpoint sees it: boxes, of a few elements at a time."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.strips: dict[tuple[int, ...], Strip] = {}  # by a box's offsets: where it is in the stretch
        for first in range(0, stretch.elements, READ_AT_ONCE):
            last = min(first + READ_AT_ONCE, stretch.elements)
            for each in strips_of(stretch.shape, stretch.start + first, stretch.start + last, stretch.parted):
                self.strips[each.box.offsets] = each._replace(start=first + each.start)

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        boxes = (each.box for each in self.strips.values())
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box in boxes]

    def write(self, offsets: tuple[int, ...], values: Tensor) -> None:
        strip = self.strips[offsets]
        if strip.run == strip.box.elements:
            self.stretch.write(strip.start, values)
        else:
            self.stretch.write_runs(Runs(*strip[1:]), values)


class _Loading(DefaultLoadPlanner):
    """Sets stretches box by box: a box is put together from what is stored, and written when all of it is there."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self._open: dict[MetadataIndex, tuple[Tensor, int]] = {}  # boxes, and how many of their elements are missing

    def set_up_planner(self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False) -> None:
        self.state_dict = self.original_state_dict = state_dict
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def resolve_tensor(self, read_item: ReadItem) -> Tensor:
        index = read_item.dest_index
        assert self.metadata is not None
        assert index.offset is not None
        if index not in self._open:
            box = self.state_dict[index.fqn].strips[tuple(index.offset)].box
            dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype  # type: ignore[union-attr]
            self._open[index] = torch.empty(box.sizes, dtype=dtype), box.elements
        return self._open[index][0][Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        index = read_item.dest_index
        assert index.offset is not None
        values, missing = self._open[index]
        self._open[index] = values, missing - tensor.numel()
        if missing == tensor.numel():
            self.state_dict[index.fqn].write(tuple(index.offset), values.view(-1))
            del self._open[index]


def _compared(
    opened: Opened, placed: Placed, settings: Settings, extra: ExtraState
) -> tuple[dict[str, Any], list[Any], list[Randoms]]:
    """What it holds besides tensors; raises where it is of another model, optimizer or job."""
    folder, weights = opened.folder, opened.weights
    opened.document(PLAN)  # JSON as well; what it says is for people, and may be of another version
    document, is_former = opened.document(PROGRESS), opened.version == FORMER_VERSION
    if is_former:
        with _reading(folder / PROGRESS):
            document = upgraded(document, settings.to_json())
            others: list[Any] = [NOTHING_ELSE] * len(document["random"])
    else:
        others = opened.document(EXTRA)
    with _reading(folder / EXTRA):
        buffers = others[0]["buffers"]
        shapes = {name: tuple(shape) for name, shape in buffers["changed"].items() if shape is not None}
        made, gone = {name for name, shape in buffers["changed"].items() if shape is None}, {*buffers["gone"]}
    wanted: dict[str, Tensor | nn.Parameter] = dict(placed.model.named_parameters()) | dict(placed.model.named_buffers())
    for name, tensor in wanted.items():
        if name in gone:
            continue
        if name not in weights:
            raise ValueError(f"{folder} is of another model: it has no {name!r}" + nearest(name, list(weights)[:1000]))
        shape = weights[name].shape if isinstance(tensor, nn.Parameter) else shapes.get(name, weights[name].shape)
        here = placed.cuts.shape_of(name, tensor)
        if shape != here:
            raise ValueError(f"{folder} is of another model: {name} is {shape}, here {here}")
    odd = sorted(set(weights) - set(wanted) - made)
    if odd:
        raise ValueError(f"{folder} is of another model: it holds {odd[0]!r}, which this one has not")
    with _reading(folder / PROGRESS):
        scalars = document["optimizer_scalars"] = {
            name: {key: unplain(each) for key, each in entries.items()} for name, entries in document["optimizer_scalars"].items()
        }
        randoms = [Randoms.from_json(each) for each in document["random"]]
        together = document.get("tensor", 1) * document.get("pipeline", 1)
        counts = [document[key] for key in ("steps", "skipped", "loader_position")] + [together]
        order = document["loader_order"]
        if order is not None and not (type(order["samples"]) is int and type(order["shuffle"]) is bool):
            raise ValueError(f"an order of the data {order}")
        if not all(type(each) is int and each >= 0 for each in counts):
            raise ValueError(f"steps and positions {counts}")
        if len(randoms) % max(counts[-1], 1) or not counts[-1]:
            raise ValueError(f"{len(randoms)} ranks, of which {counts[-1]} hold a model together")
        names = {name.rpartition("/")[0] for name in opened.optimizer} | {*scalars}
    with _reading(folder / PROGRESS, compares=True):
        settings.check(document)
    for name in sorted(names):
        if name not in (placed.stages.trained or placed.updates.names):
            raise ValueError(f"{folder} holds optimizer state of {name!r}, which is not trained here")
    with _reading(folder / PROGRESS, compares=True):
        refuse_insane_scalars(scalars)
        settings.position(document)
    if len(others) != len(randoms):
        raise ValueError(f"{folder / EXTRA} is of {len(others)} ranks, and {PROGRESS} of {len(randoms)}; {WAY_OUT}")
    if not is_former:  # which keeps nothing of it
        with _reading(folder / EXTRA, compares=True):
            extra.check(others[_mine(document, len(others), placed.ranks)], opened.read)
    return document, others, randoms


@contextmanager
def _reading(file: Path, *, compares: bool = False) -> Iterator[None]:
    """What goes wrong inside names the file as damaged; where it is compared with the run, a ValueError is the difference."""
    try:
        yield
    except _MALFORMED as error:
        if compares and isinstance(error, ValueError):
            raise ValueError(f"{file.parent}: {error}") from None
        raise ValueError(f"{file} is not a checkpoint's ({error!r}); {WAY_OUT}") from None


# ---------------------------------------------------------------------- checkpoints of version 2, as this version reads its own

# They do not say what a run was begun with, so what is given now is not compared with that.
FORMER_HOLDS = (
    f"it is of version {FORMER_VERSION}, which holds weights, buffers, optimizer, scheduler, data position and random state, and "
    "nothing else: attributes of modules, their get_extra_state and numpy's random state are those of the start"
)
NOTHING_ELSE = {"changed": [], "gone": [], "lost": {}, "modules": {}, "buffers": {"changed": {}, "gone": [], "own": {}}}


def upgraded(document: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, Any]:
    """The progress of a version-2 checkpoint. `now` are the settings of the run at its start."""
    found = {key: _upgraded(value) for key, value in document.items()}
    mine = [*now["groups"], *({"names": [], "start": {}} for _ in found["groups"][len(now["groups"]) :])]
    return {
        **found,
        "optimizer": now["optimizer"] if now["optimizer"].endswith(f".{found['optimizer']}") else found["optimizer"],
        "groups": [
            {"names": each["names"], "settings": saved, "start": each["start"]}
            for each, saved in zip(mine, found["groups"], strict=False)
        ],
        "scheduler_start": now["scheduler_start"],
        "scheduler_kind": now["scheduler_kind"],
        "job": now["job"],
        "loader_order": None,
        "random": [{**each, "numpy": None} for each in found["random"]],
    }


def _upgraded(value: Any) -> Any:
    """Counters had a word of their own."""
    if isinstance(value, list):
        return [_upgraded(item) for item in value]
    if not isinstance(value, dict):
        return value
    if {*value} == {"!counter"}:
        return {"!dict": _upgraded(value["!counter"]), "class": "collections.Counter"}
    return {key: _upgraded(item) for key, item in value.items()}
