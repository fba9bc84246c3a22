"""A checkpoint: a folder that is whole or is not there, and that any other division of the model can go on from.

    manifest.json, metadata.json, data-<rank>.safetensors    tensors under their names, as boxes of the whole (files.py):
                                                              parameters, the exact ones where the run has masters; buffers; what
                                                              the optimizer keeps, as "<parameter>/<key>"
    progress.json                                             steps, data position, scheduler, parameter groups, random states of
                                                              every rank, and what else is not a tensor
    plan.json                                                 the plan it was trained with, for reference

Every rank writes its own part, in parallel; what several have alike, one of them. It is written beside its place, and renamed
last. Reading compares every name and shape with the model and every checksum, before anything of the run changes; then each rank
reads the boxes that overlap what it has. Nothing in it is executed.
"""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import random
import shutil
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, SavePlan, WriteItem
from torch.optim.lr_scheduler import LRScheduler

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

from .boxes import Box, boxes_of
from .files import MANIFEST, Content, Entry, remove_left_behind
from .saving import Planner, Saved, Saving, copied_ranges, could_not_write
from .storage import Reader, Writer, content_of, lie, numbered
from .stored import Opened
from .team import Team

PROGRESS, PLAN = "progress.json", "plan.json"
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
    folder: Path, placed: Placed, progress: Mapping[str, Any], plan: Plan, team: Team | None, layout: Layout
) -> tuple[Saving, Content]:
    """Everything but the writing, planned by all ranks together; and what this one writes. Moments may still be written to: a
    chunk is to be finished before it is read."""
    folder, ranks = folder.absolute(), placed.ranks
    placed.residency.settle_weights()
    placed.updates.settle()
    tensors, moments = _state(placed)
    planner = Planner()
    planner.set_up_planner(tensors, is_coordinator=ranks.index == 0)
    scalars: dict[str, Any] = {}
    for each in placed.updates.chunks:
        scalars |= each.scalars()
    mine = _Exchanged(layout.is_of(tensors), sorted(moments), scalars, _Randoms.now())
    everybody = ranks.objects(mine) if ranks.are_several else [mine]
    if not all(each.knows_layout for each in everybody):
        layout.plan(tensors, planner, ranks)
    writer = Writer(folder, moments={name for each in everybody for name in each.moments})

    def begin_aside() -> None:
        writer.documents = _documents(placed, progress, plan, everybody)
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
    placed.residency.settle_all()
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
    scalars: dict[str, dict[str, Any]]
    randoms: _Randoms


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


def _documents(placed: Placed, progress: Mapping[str, Any], plan: Plan, everybody: Sequence[_Exchanged]) -> dict[str, str]:
    scalars: dict[str, dict[str, Any]] = {}
    for each in everybody:
        for name, entries in each.scalars.items():
            scalars[name] = {key: _plain(value, f"optimizer state {name}.{key}") for key, value in entries.items()}
    document = {key: _plain(value, key) for key, value in progress.items()}
    document |= {"optimizer": type(placed.updates.optimizer).__name__, "optimizer_scalars": scalars}
    document |= {"random": [each.randoms.to_json() for each in everybody]}
    return {PROGRESS: json.dumps(document), PLAN: json.dumps(plan.to_json())}


def full_state_dict(placed: Placed) -> dict[str, Tensor]:
    """As model.state_dict() would be, tied weights under each name, but with the masters."""
    tensors = placed.state.state_dict()
    tensors |= {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in placed.model.named_buffers()}
    first = {id(parameter): name for name, parameter in placed.model.named_parameters()}
    first |= {id(buffer): name for name, buffer in placed.model.named_buffers()}
    full = {}
    for name, tensor in placed.model.state_dict(keep_vars=True).items():
        if isinstance(tensor, Tensor):
            full[name] = tensors[first[id(tensor)]]
    return full


@dataclass(frozen=True)
class _Randoms:
    """States of the generators of one rank."""

    torch: bytes
    cuda: bytes | None
    python: Any

    @classmethod
    def now(cls) -> _Randoms:
        cuda = torch.cuda.get_rng_state().numpy().tobytes() if torch.cuda.is_available() else None
        return cls(torch.get_rng_state().numpy().tobytes(), cuda, random.getstate())

    def to_json(self) -> dict[str, Any]:
        cuda = None if self.cuda is None else base64.b64encode(self.cuda).decode()
        return {"torch": base64.b64encode(self.torch).decode(), "cuda": cuda, "python": _plain(self.python, "random state")}

    @classmethod
    def from_json(cls, document: Any) -> _Randoms:
        cuda = document["cuda"]
        found = cls(
            base64.b64decode(document["torch"], validate=True),
            None if cuda is None else base64.b64decode(cuda, validate=True),
            _unplain(document["python"]),
        )
        random.Random().setstate(found.python)  # raises where it is none
        torch.Generator().set_state(torch.frombuffer(bytearray(found.torch), dtype=torch.uint8))
        return found

    def restore(self) -> None:
        torch.set_rng_state(torch.frombuffer(bytearray(self.torch), dtype=torch.uint8))
        if self.cuda is not None and torch.cuda.is_available():
            torch.cuda.set_rng_state(torch.frombuffer(bytearray(self.cuda), dtype=torch.uint8))
        random.setstate(self.python)


# ---------------------------------------------------------------------- reading


def load(folder: Path, placed: Placed, *, scheduler: LRScheduler | None, team: Team | None = None) -> dict[str, Any]:
    """Puts a checkpoint's state into the placed model; returns its progress. Random numbers are those of before where as many
    ranks go on as had saved it."""
    ranks = placed.ranks
    opened, progress, randoms = _checked(folder, placed, scheduler, team)
    placed.residency.drop_all()
    # Nothing has changed up to here.
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
    if len(randoms) == ranks.count:
        randoms[ranks.index].restore()
    wanted = ("steps", "skipped", "loader_position", "scheduler", "groups")
    return {key: progress[key] for key in wanted} | {"ranks": len(randoms)}


def _checked(
    folder: Path, placed: Placed, scheduler: LRScheduler | None, team: Team | None
) -> tuple[Opened, dict[str, Any], list[_Randoms]]:
    """A checkpoint that is whole, and of this model. Of several ranks each reads its share of the checksums, and all hear of
    what one has found."""
    ranks = placed.ranks
    if team is None:
        opened = open(folder)
        found = _compared(opened, placed, scheduler)
        opened.verify()
        return opened, *found
    try:
        opened = open(folder)
        found = _compared(opened, placed, scheduler)
        opened.verify(ranks.index, ranks.count)
        manifest = hashlib.sha256((opened.folder / MANIFEST).read_bytes()).hexdigest()
    except (OSError, ValueError) as error:
        team.hear_of(error)
        raise
    team.hear_of(None)
    team.agree({f"checkpoint in {folder}": manifest})
    return opened, *found


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


def _compared(opened: Opened, placed: Placed, scheduler: LRScheduler | None) -> tuple[dict[str, Any], list[_Randoms]]:
    """What it holds besides tensors, if it is of this model and this optimizer."""
    folder, weights = opened.folder, opened.weights
    wanted: dict[str, Tensor | nn.Parameter] = dict(placed.model.named_parameters()) | dict(placed.model.named_buffers())
    for name, tensor in wanted.items():
        if name not in weights:
            raise ValueError(f"{folder} is of another model: it has no {name!r}" + nearest(name, list(weights)[:1000]))
        if weights[name].shape != tensor.shape:
            raise ValueError(f"{folder} is of another model: {name} is {weights[name].shape}, here {tuple(tensor.shape)}")
    extra = sorted(set(weights) - set(wanted))
    if extra:
        raise ValueError(f"{folder} is of another model: it holds {extra[0]!r}, which this one has not")
    opened.document(PLAN)  # JSON as well; what it says is for people, and may be of another version
    document = opened.document(PROGRESS)
    try:
        progress = {key: _unplain(value) for key, value in document.items() if key != "random"}
        randoms = [_Randoms.from_json(each) for each in document["random"]]
        groups, scalars = progress["groups"], progress["optimizer_scalars"]
        counts = [progress[key] for key in ("steps", "skipped", "loader_position")]
        if not all(type(each) is int and each >= 0 for each in counts):
            raise ValueError(f"steps and positions {counts}")
        if not all(type(each) is dict and "params" not in each for each in groups):
            raise ValueError("groups of parameters")
        names = {name.rpartition("/")[0] for name in opened.optimizer} | {*scalars}
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError, RecursionError) as error:
        raise ValueError(f"{folder / PROGRESS} is not a checkpoint's ({error!r}); take another checkpoint") from None
    optimizer = placed.updates.optimizer
    if progress["optimizer"] != type(optimizer).__name__ or len(groups) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder} was trained with {progress['optimizer']} in {len(groups)} groups; "
            f"Job(optimizer=) makes {type(optimizer).__name__} in {len(optimizer.param_groups)}"
        )
    for name in sorted(names):
        if name not in placed.updates.names:
            raise ValueError(f"{folder} holds optimizer state of {name!r}, which is not trained here")
    if (scheduler is None) != (progress["scheduler"] is None):
        raise ValueError(f"{folder}: saved {'without' if scheduler else 'with'} a scheduler; Job(scheduler=) differs")
    known = {} if scheduler is None else scheduler.state_dict()
    odd = next((key for key in progress["scheduler"] or () if key not in known and hasattr(scheduler, str(key))), None)
    if odd is not None:  # it would take the place of a method
        raise ValueError(f"{folder / PROGRESS}: {odd!r} is not of a scheduler's state; take another checkpoint")
    return progress, randoms


# ---------------------------------------------------------------------- what is not a tensor, as JSON and back


def _plain(value: Any, where: str) -> Any:
    """JSON that remembers tuples, counters and keys that are not strings; an error names what cannot be kept."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1 and value.dim():
        return _plain(value.item(), where)
    if isinstance(value, Tensor) and not value.dim():
        return {"!number": [str(value.dtype).removeprefix("torch."), value.item()]}
    if isinstance(value, list):
        return [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]
    if isinstance(value, tuple):
        return {"!tuple": [_plain(item, f"{where}[{index}]") for index, item in enumerate(value)]}
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and not isinstance(value, Counter):
            return {key: _plain(item, f"{where}.{key}") for key, item in value.items()}
        items = [[_plain(key, where), _plain(item, f"{where}[{key!r}]")] for key, item in value.items()]
        return {"!counter" if isinstance(value, Counter) else "!dict": items}
    raise TypeError(f"a checkpoint cannot hold {where}: {type(value).__name__} is neither a tensor nor plain data")


def _unplain(value: Any) -> Any:
    if isinstance(value, list):
        return [_unplain(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            (tag, items), *_ = value.items()
            if tag == "!number":
                return torch.tensor(items[1], dtype=_dtype(items[0]))
            if tag == "!tuple":
                return tuple(_unplain(item) for item in items)
            if tag in ("!dict", "!counter"):
                pairs = {_unplain(key): _unplain(item) for key, item in items}
                return Counter(pairs) if tag == "!counter" else pairs
        return {key: _unplain(item) for key, item in value.items()}
    return value


def _dtype(name: Any) -> torch.dtype:
    found = getattr(torch, name)
    if not isinstance(found, torch.dtype):
        raise TypeError(f"{name} is no dtype")
    return found
