"""A checkpoint: a folder that is whole or is not there, and that the model can go on from however it is sharded then.

    manifest.json, metadata.json, data-<rank>.safetensors    tensors under their names, as boxes of the whole (files.py):
                                                              parameters, the fp32 masters where the run has them; buffers;
                                                              optimizer state, as "<parameter>/<key>"
    progress.json                                             steps, data position, scheduler, parameter groups, settings, random
                                                              states of every rank (settings.py, randomness.py)
    extra.json                                                by rank, what else has changed since the start (extra_state.py)
    plan.json                                                 the plan it was trained with, for reference

Every rank writes its own part; of replicas one does. It is written beside its place, and renamed last. Loading (loading.py)
compares every name, shape and checksum before anything of the run changes; then each rank reads the boxes that overlap its shard.
"""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, WriteItem

from anyfit.placing import Placed
from anyfit.placing.ranks import Ranks
from anyfit.placing.stretches import BUFFERS, Stretch, buffers_of, copied_to_host, moments_of, weights_of
from anyfit.values.plan import Plan

from .extra_state import ExtraState
from .files import Content, Entry, remove_left_behind
from .plain import plain
from .randomness import Randoms
from .saved import Planner, Saved
from .saving import Saving, copied_ranges, could_not_write
from .storage import Writer, content_of, lie, numbered
from .stored import Opened
from .team import Team

PROGRESS, PLAN, EXTRA = "progress.json", "plan.json", "extra.json"
open = Opened
OVER_SHARE, OVER_BYTES = 0.25, 2**20  # addresses, and not memory: for a header, and where ranks share unevenly


class Layout:
    """Which tensors a run saves, and where each lies in the files: planned by all ranks together, and kept for the next save."""

    def __init__(self) -> None:
        self.shapes: list[tuple[Any, ...]] | None = None
        self.plans: list[SavePlan] = []
        self.metadata = Metadata({})
        self.lying: list[tuple[WriteItem, Entry]] = []  # of this rank
        self.bytes = 0  # of all ranks' files

    def plan(self, tensors: Mapping[str, Saved], planner: Planner, ranks: Ranks) -> None:
        local = planner.create_local_plan()
        plans, self.metadata = planner.create_global_plan(ranks.objects(local) if ranks.are_several else [local])
        self.plans = numbered(plans)
        each = [lie(plan.items) for plan in self.plans]
        self.lying, self.bytes = each[ranks.index], sum(entry.bytes for lying in each for _, entry in lying)
        self.shapes = _shapes_of(tensors)


def _shapes_of(tensors: Mapping[str, Saved]) -> list[tuple[Any, ...]]:
    stretches = ((name, each.stretch) for name, each in tensors.items())
    return [(name, each.shape, each.start, each.elements, each.dtype) for name, each in stretches]


def prepared(
    folder: Path, placed: Placed, progress: Mapping[str, Any], extra: ExtraState, plan: Plan, team: Team | None, layout: Layout
) -> tuple[Saving, Content]:
    """A save, planned by all ranks together, and what this one writes; a chunk's update is to be finished before it is read."""
    folder, ranks = folder.absolute(), placed.ranks
    placed.residency.settle_weights()
    placed.updates.settle()
    placed.stages.share_buffers(placed.model)
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
    scalars = {name: entries for each in placed.updates.chunks for name, entries in each.scalars().items()}
    mine = _Exchanged(layout.shapes == _shapes_of(tensors), sorted(moments), sorted(beside), scalars, Randoms.now(), others)
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
            writer.aside.refuse_without_room(layout.bytes)
        except OSError as error:
            raise OSError(could_not_write(folder, error)) from error

    if team is None:
        begin_aside()
    else:
        team.from_first(begin_aside, f"word that {folder.name} can be written")
    content = content_of(layout.lying, planner)
    return Saving(writer, content, layout.plans, layout.metadata, team), content


def room_to_save(placed: Placed, layout: Layout) -> tuple[int, list[tuple[int, int]]]:
    """How large this rank's file will be, and which of its bytes a save beside the steps copies. Over several ranks an estimate:
    that replicas share the writing evenly."""
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
        share = 1 / placed.ranks.count if each.chunk == BUFFERS else placed.state.chunks[each.chunk].sharding.norm_share
        part = each.elements * each.dtype.itemsize * share
        size, copied = size + part, copied + each.elements * each.copied_bytes * share
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
    extra = [each.extra for each in everybody]
    return {PROGRESS: json.dumps(document), EXTRA: json.dumps(extra), PLAN: json.dumps(plan.to_json())}


def full_state_dict(placed: Placed) -> dict[str, Any]:
    """As model.state_dict() would be, tied weights under each name, but with the masters. Extra state of modules is theirs."""
    placed.stages.share_buffers(placed.model)
    tensors = placed.state_dict()
    tensors |= {name: buffer.detach().to("cpu", copy=True).contiguous() for name, buffer in placed.model.named_buffers()}
    first = {id(each): name for name, each in (*placed.model.named_parameters(), *placed.model.named_buffers())}
    found = placed.model.state_dict(keep_vars=True).items()
    return {name: tensors[first[id(each)]] if id(each) in first else each for name, each in found}


def check(folder: str | Path) -> Path:
    """The folder (or the one that stood aside when a process died between two renames), all files whole; or an error."""
    opened = Opened(folder)
    opened.verify()
    return opened.folder


# ---------------------------------------------------------------------- a folder of them, each named by its step


def newest(parent: Path, say: Callable[[str], None] = lambda _line: None) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in a folder of them, and why newer ones were passed over."""
    skipped: list[str] = []
    for name in _numbered(parent):
        try:
            check(parent / name)
            return parent / name, skipped
        except (ValueError, OSError) as error:
            skipped.append(str(error))
            say(f"passed over a checkpoint: {error}")
    return None, skipped


def latest(folder: str | Path, say: Callable[[str], None]) -> Path:
    """The folder itself; where its last part is "latest", the newest whole checkpoint beside it."""
    folder = Path(folder)
    if folder.name != "latest" or folder.exists():
        return folder
    found, skipped = newest(folder.parent, say)
    if found is None:
        raise FileNotFoundError(f"no whole checkpoint in {folder.parent.absolute()}" + "".join(f"; {why}" for why in skipped))
    say(f"going on from {found}")
    return found


def _numbered(parent: Path) -> list[str]:
    """Names of the checkpoints in a folder, the newest first; also of one that was renamed aside."""
    names = {path.name.removeprefix(".").removesuffix(".old") for path in parent.iterdir()} if parent.is_dir() else set()
    return sorted((name for name in names if name.isdecimal()), key=int, reverse=True)


def remove_older(parent: Path, keep: int, keep_every: int = 0, best: int | None = None) -> None:
    """Removes all but the `keep` newest checkpoints, those of every so many steps and that of the best step, and what killed
    processes left behind."""
    remove_left_behind(parent)
    for name in _numbered(parent)[keep:]:
        if int(name) != best and (not keep_every or int(name) % keep_every):
            gone = parent / f".{name}.old.writing"  # which is no checkpoint any more, should this end half-way
            shutil.rmtree(gone, ignore_errors=True)
            with contextlib.suppress(OSError):
                (parent / name).rename(gone)
            shutil.rmtree(gone, ignore_errors=True)
