"""A checkpoint: a folder that is whole or is not there, and that any other division of the model can go on from.

    manifest.json, metadata.json, data-<rank>.safetensors    tensors under their names, as boxes of the whole (files.py):
                                                              parameters, the exact ones where the run has masters; buffers; what
                                                              the optimizer keeps, as "<parameter>/<key>"
    progress.json                                             steps, data position, scheduler, parameter groups, settings, random
                                                              states of every rank (settings.py, randoms.py)
    extra.json                                                by rank, what else has changed since the start (extra_state.py)
    plan.json                                                 the plan it was trained with, for reference

Every rank writes its own part, in parallel; what several have alike, one of them. It is written beside its place, and renamed
last. Reading compares every name and shape with the model and every checksum, before anything of the run changes; then each rank
reads the boxes that overlap what it has. Nothing in it is executed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem

from anyfit.placing import Placed
from anyfit.placing.ranks import Ranks
from anyfit.placing.stretches import (
    BUFFERS,
    Stretch,
    buffers_of,
    copied_to_host,
    home_of,
    moments_of,
    spread,
    weights_of,
)
from anyfit.values.plan import Plan
from anyfit.values.record import nearest

from . import former
from .boxes import Box, boxes_of
from .extra_state import ExtraState
from .files import Content, Entry, remove_left_behind
from .plain import plain, unplain
from .randoms import Randoms
from .saving import Planner, Saved, Saving, copied_ranges, could_not_write
from .settings import Settings, refuse_insane_scalars, refuse_not_finite
from .storage import Reader, Writer, content_of, lie, numbered
from .stored import WAY_OUT, Opened
from .team import Team

PROGRESS, PLAN, EXTRA = "progress.json", "plan.json", "extra.json"
READ_AT_ONCE = 2**22  # elements
OVER_SHARE, OVER_BYTES = 0.25, 2**20  # addresses, and not memory: for a header, and where ranks do not divide evenly


# ---------------------------------------------------------------------- writing


class Layout:
    """Which tensors a run saves, and where each lies in the files: planned by all ranks together, and kept for the next save."""

    def __init__(self) -> None:
        self._shapes: list[tuple[Any, ...]] | None = None
        self.plans: list[SavePlan] = []
        self.metadata = Metadata({})
        self.lying: list[tuple[WriteItem, Entry]] = []  # of this rank

    def is_of(self, tensors: Mapping[str, Saved]) -> bool:
        return self._shapes == _shapes_of(tensors)

    def plan(self, tensors: Mapping[str, Saved], planner: Planner, ranks: Ranks) -> None:
        local = planner.create_local_plan()
        plans, self.metadata = planner.create_global_plan(ranks.objects(local) if ranks.are_several else [local])
        self.plans = numbered(plans)
        self.lying = lie(self.plans[ranks.index].items)
        self._shapes = _shapes_of(tensors)


def _shapes_of(tensors: Mapping[str, Saved]) -> list[tuple[Any, ...]]:
    stretches = ((name, each.stretch) for name, each in tensors.items())
    return [(name, each.shape, each.start, each.elements, each.dtype) for name, each in stretches]


def prepared(
    folder: Path,
    placed: Placed,
    progress: Mapping[str, Any],
    extra: ExtraState,
    plan: Plan,
    team: Team | None,
    layout: Layout,
) -> tuple[Saving, Content]:
    """Everything but the writing, planned by all ranks together; and what this one writes. Moments may still be written to: a
    chunk is to be finished before it is read. `progress` is JSON."""
    folder, ranks = folder.absolute(), placed.ranks
    placed.residency.settle_weights()
    placed.updates.settle()
    beside: dict[str, Saved] = {}

    def keep(tensor: Tensor) -> str:
        name = f"!{ranks.index}/{len(beside)}"
        still = torch.empty(tensor.shape, dtype=tensor.dtype).copy_(tensor).view(-1)
        beside[name] = Saved(Stretch(name, tuple(tensor.shape), 0, still, changes=False))
        return name

    others = extra.save(keep, ranks)
    tensors, moments = _state(placed)
    tensors |= beside
    planner = Planner()
    planner.set_up_planner(tensors, is_coordinator=ranks.index == 0)
    scalars: dict[str, Any] = {}
    for each in placed.updates.chunks:
        scalars |= each.scalars()
    mine = _Exchanged(layout.is_of(tensors), sorted(moments), sorted(beside), scalars, Randoms.now(), others)
    everybody = ranks.objects(mine) if ranks.are_several else [mine]
    if not all(each.knows_layout for each in everybody):
        layout.plan(tensors, planner, ranks)
    writer = Writer(
        folder,
        moments={name for each in everybody for name in each.moments},
        extra={name for each in everybody for name in each.tensors},
    )

    def begin_aside() -> None:
        writer.documents = _documents(progress, plan, everybody)
        writer.aside.refuse_foreign()
        try:
            writer.set_up_storage_writer(is_coordinator=True)
        except OSError as error:
            raise OSError(could_not_write(folder, error)) from error

    if team is None:
        begin_aside()
    else:
        team.from_first(begin_aside, f"word that {folder.name} can be written")
    content = content_of(layout.lying, planner)
    return Saving(writer, content, layout.plans, layout.metadata, team), content


def room_to_save(placed: Placed, layout: Layout) -> tuple[int, list[tuple[int, int]]]:
    """How large this rank's file will be, and which of its bytes a save beside the steps copies. Several ranks know that when
    they plan together; that those which have the same divide it evenly is near enough."""
    placed.settle()
    placed.updates.settle()
    tensors, _ = _state(placed)
    if not placed.ranks.are_several:
        planner = Planner()
        planner.set_up_planner(tensors, is_coordinator=True)
        layout.plan(tensors, planner, placed.ranks)
        content = content_of(layout.lying, planner)
        return content.bytes, copied_ranges(content)
    size = copied = 0.0
    for each in (saved.stretch for saved in tensors.values()):
        shards = 1 if each.chunk == BUFFERS else placed.state.chunks[each.chunk].shards
        part = each.elements * each.dtype.itemsize * shards / placed.ranks.count
        size, copied = size + part, copied + part * each.changes
    return int((1 + OVER_SHARE) * size) + OVER_BYTES, [(0, int(copied))]


@dataclass(frozen=True)
class _Exchanged:
    """What a rank tells the others before they write."""

    knows_layout: bool
    moments: list[str]
    tensors: list[str]  # that are no state of the model or its optimizer
    scalars: dict[str, dict[str, Any]]
    randoms: Randoms
    extra: dict[str, Any]


def _state(placed: Placed) -> tuple[dict[str, Saved], set[str]]:
    """Tensors to be saved by their names; and which are the optimizer's. Buffers are those of rank 0, as they are now."""
    found = {each.name: Saved(each) for each in weights_of(placed)}
    if placed.ranks.index == 0:
        buffers = list(buffers_of(placed))
        for each, still in zip(buffers, copied_to_host([each.values for each in buffers]), strict=True):
            found[each.name] = Saved(Stretch(each.name, each.shape, 0, still, changes=False))
    moments = {each.name: Saved(each) for each in moments_of(placed)}
    twice = next((name for name in moments if name in found), None)
    if twice is not None:
        raise ValueError(f"{twice!r} is a parameter, and the name of what the optimizer keeps of another; rename it")
    return found | moments, set(moments)


def _documents(progress: Mapping[str, Any], plan: Plan, everybody: Sequence[_Exchanged]) -> dict[str, str]:
    scalars: dict[str, dict[str, Any]] = {}
    for each in everybody:
        for name, entries in each.scalars.items():
            scalars[name] = {key: plain(value, ("optimizer state", f"{name}.{key}")) for key, value in entries.items()}
    document = {**progress, "optimizer_scalars": scalars, "random": [each.randoms.to_json() for each in everybody]}
    return {
        PROGRESS: json.dumps(document),
        EXTRA: json.dumps([each.extra for each in everybody]),
        PLAN: json.dumps(plan.to_json()),
    }


def full_state_dict(placed: Placed) -> dict[str, Any]:
    """As model.state_dict() would be, tied weights under each name, but with the masters. Extra state of modules is theirs."""
    tensors = placed.state.state_dict()
    tensors |= {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in placed.model.named_buffers()}
    first = {id(parameter): name for name, parameter in placed.model.named_parameters()}
    first |= {id(buffer): name for name, buffer in placed.model.named_buffers()}
    full: dict[str, Any] = {}
    for name, tensor in placed.model.state_dict(keep_vars=True).items():
        full[name] = tensors[first[id(tensor)]] if id(tensor) in first else tensor
    return full


# ---------------------------------------------------------------------- reading


def load(folder: Path, placed: Placed, settings: Settings, extra: ExtraState, team: Team | None = None) -> dict[str, Any]:
    """Puts a checkpoint's state into the placed model; returns its progress. Random numbers are those of before where as many
    ranks go on as had saved it."""
    ranks = placed.ranks
    opened, progress, others, randoms = _checked(folder, placed, settings, extra, team)
    placed.residency.drop_all()
    # Nothing has changed up to here.
    extra.make_buffers(others[0]["buffers"], opened.weights, placed.device)
    targets = {each.name: _Target(each) for each in weights_of(placed)}
    buffers = {each.name: torch.empty_like(each.values) for each in buffers_of(placed)}
    targets |= {name: _Target(Stretch(name, opened.tensors[name].shape, 0, flat)) for name, flat in buffers.items()}
    placed.updates.forget_all()
    for name, stored in opened.optimizer.items():
        parameter, _, key = name.rpartition("/")
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
            placed.updates.load_scalars(name, entries)
        spread(placed)
        extra.load(others[ranks.index % len(others)], opened.read, placed.device)
    if len(randoms) == ranks.count:
        randoms[ranks.index].restore()
    return progress | {"ranks": len(randoms), "version": opened.version}


def _checked(
    folder: Path, placed: Placed, settings: Settings, extra: ExtraState, team: Team | None
) -> tuple[Opened, dict[str, Any], list[Any], list[Randoms]]:
    """A checkpoint that is whole, and of this model. Of several ranks each reads its share of the checksums, and all hear of
    what one has found."""
    ranks = placed.ranks
    try:
        opened = open(folder)
        found = _compared(opened, placed, settings, extra)
        opened.verify(ranks.index, ranks.count)
        _refuse_not_finite(opened, placed)
        manifest = hashlib.sha256(opened.manifest).hexdigest()
    except (OSError, ValueError) as error:
        if team is not None:
            team.hear_of(error)
        raise
    if team is not None:
        team.hear_of(None)
        team.agree({f"checkpoint in {folder}": manifest})
    return opened, *found


def _refuse_not_finite(opened: Opened, placed: Placed) -> None:
    """Trained weights and what the optimizer keeps of them, each rank its share: no NaN, nothing infinite that was not at the
    start."""
    trained = placed.updates.names
    wanted = [(name, None) for name in opened.weights if name in trained]
    wanted += [(name.rpartition("/")[0], name.rpartition("/")[2]) for name in opened.optimizer]
    for name, key in wanted[placed.ranks.index :: placed.ranks.count]:
        extremes = opened.extremes(name if key is None else f"{name}/{key}")
        if extremes is None or (key is None and math.inf in map(abs, extremes) and _is_infinite_here(placed, name)):
            continue
        try:
            refuse_not_finite(name, key, *extremes)
        except ValueError as error:
            raise ValueError(f"{opened.folder}: {error}") from None


def _is_infinite_here(placed: Placed, name: str) -> bool:
    return any(bool(each.values.isinf().any()) for each in weights_of(placed) if each.name == name)


def open(folder: str | Path) -> Opened:
    """A checkpoint's tensors: names, dtypes and shapes, each to be read whole or in part when it is wanted. Every file is there
    and as long as it was; `verify` compares their checksums."""
    return Opened(folder)


def check(folder: str | Path) -> Path:
    """The folder (or the one that stood aside when a process died between two renames), all files whole; or an error."""
    opened = open(folder)
    opened.verify()
    return opened.folder


class _Target:
    """Where a tensor of a checkpoint goes, as torch.distributed.checkpoint sees it: boxes, of a few elements at a time."""

    def __init__(self, stretch: Stretch) -> None:
        self.stretch = stretch
        self.starts: dict[tuple[int, ...], tuple[Box, int]] = {}  # by a box's offsets: it, and where it begins in the stretch
        for first in range(0, stretch.elements, READ_AT_ONCE):
            at, last = first, min(first + READ_AT_ONCE, stretch.elements)
            for box in boxes_of(stretch.shape, stretch.start + first, stretch.start + last):
                self.starts[box.offsets] = box, at
                at += box.elements

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(box.offsets), torch.Size(box.sizes)) for box, _ in self.starts.values()]


class _Loading(DefaultLoadPlanner):
    """Sets stretches box by box: each is put together from what is stored, and goes to its place when all of it is there."""

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
            box, _ = self.state_dict[index.fqn].starts[tuple(index.offset)]
            dtype = self.metadata.state_dict_metadata[index.fqn].properties.dtype  # type: ignore[union-attr]
            self._open[index] = torch.empty(box.sizes, dtype=dtype), box.elements
        return self._open[index][0][Box(tuple(read_item.dest_offsets), tuple(read_item.lengths)).slices]

    def commit_tensor(self, read_item: ReadItem, tensor: Tensor) -> None:
        index = read_item.dest_index
        assert index.offset is not None
        values, missing = self._open[index]
        self._open[index] = values, missing - tensor.numel()
        if missing == tensor.numel():
            target = self.state_dict[index.fqn]
            target.stretch.write(target.starts[tuple(index.offset)][1], values.view(-1))
            del self._open[index]


def newest(parent: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in a folder of them, and why newer ones were passed over."""
    skipped: list[str] = []
    for name in _numbered(parent):
        try:
            check(parent / name)
            return parent / name, skipped
        except (ValueError, OSError) as error:
            skipped.append(str(error))
    return None, skipped


def latest(folder: str | Path, say: Callable[[str], None]) -> Path:
    """The folder itself; where its last part is "latest", the newest whole checkpoint beside it."""
    folder = Path(folder)
    if folder.name != "latest" or folder.exists():
        return folder
    found, skipped = newest(folder.parent)
    for reason in skipped:
        say(f"passed over a checkpoint: {reason}")
    if found is None:
        raise FileNotFoundError(f"no whole checkpoint in {folder.parent.absolute()}" + "".join(f"; {why}" for why in skipped))
    say(f"going on from {found}")
    return found


def _numbered(parent: Path) -> list[str]:
    """Names of the checkpoints in a folder, the newest first; also of one that has stepped aside."""
    names = {path.name.removeprefix(".").removesuffix(".old") for path in parent.iterdir()} if parent.is_dir() else set()
    return sorted((name for name in names if name.isdecimal()), key=int, reverse=True)


def remove_older(parent: Path, keep: int, keep_every: int = 0) -> None:
    """Removes all but the `keep` newest checkpoints and those of every so many steps, and what killed processes left behind."""
    remove_left_behind(parent)
    for name in _numbered(parent)[keep:]:
        if not keep_every or int(name) % keep_every:
            gone = parent / f".{name}.old.writing"  # which is no checkpoint any more, should this end half-way
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(OSError):
                (parent / name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)


def _compared(
    opened: Opened, placed: Placed, settings: Settings, extra: ExtraState
) -> tuple[dict[str, Any], list[Any], list[Randoms]]:
    """What it holds besides tensors, if it is of this model, this optimizer and this job."""
    folder, weights = opened.folder, opened.weights
    opened.document(PLAN)  # JSON as well; what it says is for people, and may be of another version
    document, is_former = opened.document(PROGRESS), opened.version == former.VERSION
    if is_former:
        try:
            document = former.upgraded(document, settings.to_json())
            others = [former.nothing_else() for _ in document["random"]]
        except _MALFORMED as error:
            raise ValueError(f"{folder / PROGRESS} is not a checkpoint's ({error!r}); {WAY_OUT}") from None
    else:
        others = opened.document(EXTRA)
    try:
        buffers = others[0]["buffers"]
        shapes = {name: tuple(shape) for name, shape in buffers["changed"].items() if shape is not None}
        made, gone = {name for name, shape in buffers["changed"].items() if shape is None}, {*buffers["gone"]}
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise ValueError(f"{folder / EXTRA} is not a checkpoint's ({error!r}); {WAY_OUT}") from None
    wanted: dict[str, Tensor | nn.Parameter] = dict(placed.model.named_parameters()) | dict(placed.model.named_buffers())
    for name, tensor in wanted.items():
        if name in gone:
            continue
        if name not in weights:
            raise ValueError(f"{folder} is of another model: it has no {name!r}" + nearest(name, list(weights)[:1000]))
        shape = weights[name].shape if isinstance(tensor, nn.Parameter) else shapes.get(name, weights[name].shape)
        if shape != tensor.shape:
            raise ValueError(f"{folder} is of another model: {name} is {shape}, here {tuple(tensor.shape)}")
    odd = sorted(set(weights) - set(wanted) - made)
    if odd:
        raise ValueError(f"{folder} is of another model: it holds {odd[0]!r}, which this one has not")
    try:
        scalars = document["optimizer_scalars"] = {
            name: {key: unplain(each) for key, each in entries.items()} for name, entries in document["optimizer_scalars"].items()
        }
        randoms = [Randoms.from_json(each) for each in document["random"]]
        counts = [document[key] for key in ("steps", "skipped", "loader_position")]
        order = document["loader_order"]
        if order is not None and not (type(order["samples"]) is int and type(order["shuffle"]) is bool):
            raise ValueError(f"an order of the data {order}")
        if not all(type(each) is int and each >= 0 for each in counts):
            raise ValueError(f"steps and positions {counts}")
        names = {name.rpartition("/")[0] for name in opened.optimizer} | {*scalars}
    except _MALFORMED as error:
        raise ValueError(f"{folder / PROGRESS} is not a checkpoint's ({error!r}); {WAY_OUT}") from None
    _named(folder, PROGRESS, lambda: settings.check(document))
    for name in sorted(names):
        if name not in placed.updates.names:
            raise ValueError(f"{folder} holds optimizer state of {name!r}, which is not trained here")
    _named(folder, PROGRESS, lambda: refuse_insane_scalars(scalars))
    _named(folder, PROGRESS, lambda: settings.position(document))
    if len(others) != len(randoms):
        raise ValueError(f"{folder / EXTRA} is of {len(others)} ranks, and {PROGRESS} of {len(randoms)}; {WAY_OUT}")
    if not is_former:  # which keeps nothing of it
        _named(folder, EXTRA, lambda: extra.check(others[placed.ranks.index % len(others)], opened.read))
    return document, others, randoms


_MALFORMED = (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError, IndexError, OverflowError)


def _named(folder: Path, file: str, check: Callable[[], object]) -> None:
    """An error with the checkpoint it is of; one that is not about its contents tells that the file is damaged."""
    try:
        check()
    except ValueError as error:
        raise ValueError(f"{folder}: {error}") from None
    except _MALFORMED as error:
        raise ValueError(f"{folder / file} is not a checkpoint's ({error!r}); {WAY_OUT}") from None
