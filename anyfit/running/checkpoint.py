"""A checkpoint: a folder that is whole or is not there.

    manifest.json           sizes and SHA-256 of all other files, written last
    weights.safetensors     every parameter under its name, fp32 masters where the run has them, and the buffers
    optimizer.safetensors   the optimizer's tensors as "<parameter>/<key>"
    random.safetensors      states of torch's generators, of every rank
    progress.json           steps, data position, scheduler, parameter groups, what else is not a tensor
    plan.json               the plan it was trained with, for reference

It is written beside its place, tensor by tensor, so that saving takes little memory; synced, and renamed last. Reading checks
every size and digest, and every name and shape against the model, before anything of the run changes. Nothing in it is executed:
safetensors and JSON only.

Of several ranks all take part: what they divide is put together chunk by chunk, and rank 0 writes. Whole tensors are in it, so
that any number of ranks can go on from it; as many as wrote it go on with the same random numbers.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import os
import random
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from anyfit.placing import Placed
from anyfit.placing.chunks import ChunkState
from anyfit.values.layout import Slot
from anyfit.values.plan import Plan
from anyfit.values.record import nearest

from .team import Team

VERSION = 1
MANIFEST = "manifest.json"
FILES = ("weights.safetensors", "optimizer.safetensors", "random.safetensors", "progress.json", "plan.json")


# ---------------------------------------------------------------------- writing


def save(folder: Path, placed: Placed, progress: Mapping[str, Any], plan: Plan, team: Team | None = None) -> None:
    folder = folder.absolute()
    placed.residency.settle_all()
    state = placed.updates.state_dict()
    ranks = placed.ranks
    randoms = ranks.objects(_random_states()) if ranks.are_several else [_random_states()]
    weights = dict(_model_tensors(placed))
    reading = _Reading(weights)
    if team is None:
        _write_aside(folder, placed, reading, state, randoms, progress, plan)
        return
    if ranks.index:
        reading.finish()
    team.from_first(
        lambda: _write_aside(folder, placed, reading, state, randoms, progress, plan), f"word that {folder.name} is written"
    )


def _write_aside(
    folder: Path,
    placed: Placed,
    reading: _Reading,
    state: Mapping[str, Mapping[str, Any]],
    randoms: Sequence[Randoms],
    progress: Mapping[str, Any],
    plan: Plan,
) -> None:
    aside = folder.with_name(f".{folder.name}.writing")
    try:
        if folder.exists() and not (folder / MANIFEST).exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise FileExistsError(f"{folder} exists and is not a checkpoint; choose another folder, or remove it")
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            shutil.rmtree(aside, ignore_errors=True)  # left by a process that was killed
            aside.mkdir()
            _write(aside, placed, reading, state, randoms, progress, plan)
            _rename_over(aside, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(aside, ignore_errors=True)
            kept = f"; the checkpoint that was there is untouched in {folder}" if (folder / MANIFEST).exists() else ""
            raise OSError(f"could not write a checkpoint to {folder}: {error}{kept}") from error
        except BaseException:
            shutil.rmtree(aside, ignore_errors=True)
            raise
    finally:
        reading.finish()  # other ranks read along, whatever becomes of it here


def _write(
    aside: Path,
    placed: Placed,
    reading: _Reading,
    state: Mapping[str, Mapping[str, Any]],
    randoms: Sequence[Randoms],
    progress: Mapping[str, Any],
    plan: Plan,
) -> None:
    tensors: dict[str, Tensor] = {}  # where they lie
    scalars: dict[str, dict[str, Any]] = {}
    for name, entries in state.items():
        for key, value in entries.items():
            if isinstance(value, Tensor):
                tensors[f"{name}/{key}"] = value
            else:
                scalars.setdefault(name, {})[key] = _plain(value, f"optimizer state {name}.{key}")
    _write_tensors(aside / "weights.safetensors", reading)
    _write_tensors(aside / "optimizer.safetensors", _Reading({name: _as_it_is(tensor) for name, tensor in tensors.items()}))
    drawn = {f"{kind}{rank or ''}": _as_it_is(each) for rank, found in enumerate(randoms) for kind, each in found.torch.items()}
    _write_tensors(aside / "random.safetensors", _Reading(drawn))
    document = {key: _plain(value, key) for key, value in progress.items()}
    document |= {"optimizer_scalars": scalars, "python_random": _plain(randoms[0].python, "python_random")}
    document |= {"optimizer": type(placed.updates.optimizer).__name__}
    if len(randoms) > 1:
        document |= {"ranks": len(randoms), "python_randoms": [_plain(each.python, "python_random") for each in randoms]}
    (aside / "progress.json").write_text(json.dumps(document))
    (aside / "plan.json").write_text(json.dumps(plan.to_json()))
    files = {name: {"bytes": (aside / name).stat().st_size, "sha256": _digest(aside / name)} for name in FILES}
    (aside / MANIFEST).write_text(json.dumps({"anyfit": "checkpoint", "version": VERSION, "files": files}, indent=1))
    for name in (*FILES, MANIFEST):
        _sync(aside / name)
    _sync(aside)


def _rename_over(aside: Path, folder: Path) -> None:
    """A folder cannot replace another in one move: the old one steps aside first, and `load` looks for it there."""
    old = _stepped_aside(folder)
    if folder.exists():
        shutil.rmtree(old, ignore_errors=True)
        folder.rename(old)
    aside.rename(folder)
    _sync(folder.parent)
    shutil.rmtree(old, ignore_errors=True)


def _stepped_aside(folder: Path) -> Path:
    return folder.with_name(f".{folder.name}.old")


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@dataclass(frozen=True)
class Stored:
    """A tensor of a file, read when its turn has come."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    read: Callable[[], Tensor]


DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16", torch.int64: "I64",
    torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8", torch.bool: "BOOL",
}  # fmt: skip


def _as_it_is(tensor: Tensor) -> Stored:
    return Stored(tensor.dtype, tuple(tensor.shape), lambda: tensor.detach().cpu())


class _Reading:
    """Tensors of a file, read one after another in the order in which they lie there: the same on all ranks."""

    def __init__(self, tensors: Mapping[str, Stored]) -> None:
        # Each starts at a multiple of its elements' size; those of a chunk lie together.
        self.ordered = sorted(tensors.items(), key=lambda item: -item[1].dtype.itemsize)
        self._left = iter(self.ordered)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        for name, stored in self._left:
            yield name, stored.read()

    def finish(self) -> None:
        """Reads what is left: other ranks may be reading it too."""
        for _ in self:
            pass


def _write_tensors(file: Path, reading: _Reading) -> None:
    """A safetensors file: its header's length, the header, and the bytes. The library's own writer wants all of them at once."""
    header: dict[str, Any] = {}
    end = 0
    for name, stored in reading.ordered:
        if stored.dtype not in DTYPES:
            raise TypeError(f"a checkpoint cannot hold {name}: {stored.dtype}")
        start, end = end, end + stored.dtype.itemsize * math.prod(stored.shape)
        header[name] = {"dtype": DTYPES[stored.dtype], "shape": list(stored.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little"))
        out.write(text)
        for name, tensor in reading:
            flat = tensor.contiguous().reshape(-1)
            start, end = header[name]["data_offsets"]
            assert flat.nbytes == end - start, name
            out.write(flat.view(torch.uint8).numpy().data)


def _model_tensors(placed: Placed) -> Iterator[tuple[str, Stored]]:
    for state in placed.state.chunks:
        read = state.read if state.shards == 1 else _together(state)
        for slot in state.chunk.slots:
            dtype = torch.float32 if state.is_split else state.dtype
            yield slot.name, Stored(dtype, slot.shape, functools.partial(read, slot))
    for name, buffer in placed.model.named_buffers():
        yield name, _as_it_is(buffer)


def _together(state: ChunkState) -> Callable[[Slot], Tensor]:
    """Reads the parameters of a chunk that ranks divide, the whole chunk with the first of them."""
    found: dict[str, Tensor] = {}

    def read(slot: Slot) -> Tensor:
        if slot.name not in found:
            found.update(state.read_all())
        return found.pop(slot.name)

    return read


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
class Randoms:
    """States of the generators of one rank."""

    torch: dict[str, Tensor]
    python: Any


def _random_states() -> Randoms:
    states = {"torch": torch.get_rng_state()}
    if torch.cuda.is_available():
        states["cuda"] = torch.cuda.get_rng_state()
    return Randoms(states, random.getstate())


# ---------------------------------------------------------------------- reading


def load(folder: Path, placed: Placed, team: Team | None = None) -> dict[str, Any]:
    """Puts a checkpoint's state into the placed model; returns its progress. Random numbers are those of before where as many
    ranks go on as had saved it."""
    folder, ranks = check(folder), placed.ranks
    if team is not None:
        team.agree({f"checkpoint in {folder}": _digest(folder / MANIFEST)})
    progress = _progress(folder)
    weights = load_file(folder / "weights.safetensors")
    moments = load_file(folder / "optimizer.safetensors")
    randoms = load_file(folder / "random.safetensors")
    plan = Plan.load(folder / "plan.json")
    _compare(folder, placed, weights, progress)
    optimizer_state = _gather(folder, placed, moments, progress["optimizer_scalars"])

    placed.residency.drop_all()
    placed.state.load(weights)  # nothing changed up to here
    with torch.no_grad():
        for name, buffer in placed.model.named_buffers():
            buffer.copy_(weights[name])
    placed.updates.load(optimizer_state)
    saved_by = progress.get("ranks", 1)
    if saved_by == ranks.count:
        mine = ranks.index or ""
        torch.set_rng_state(randoms[f"torch{mine}"])
        if f"cuda{mine}" in randoms and torch.cuda.is_available():
            torch.cuda.set_rng_state(randoms[f"cuda{mine}"])
        python = progress["python_randoms"][ranks.index] if ranks.are_several else progress["python_random"]
        random.setstate(_unplain(python))
    unpacked = {key: _unplain(progress[key]) for key in ("steps", "skipped", "loader_position", "scheduler", "groups")}
    return unpacked | {"plan": plan, "ranks": saved_by}


def check(folder: Path) -> Path:
    """The folder (or the one that stood aside when a process died between two renames), all files whole; or an error."""
    folder = Path(folder)
    if not folder.exists() and _stepped_aside(folder).exists():
        folder = _stepped_aside(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at {folder}")
    manifest = folder / MANIFEST
    if not manifest.exists():
        raise ValueError(f"{folder} is not an anyfit checkpoint: it has no {MANIFEST}")
    try:
        document = json.loads(manifest.read_text())
        kind, version, files = document["anyfit"], document["version"], dict(document["files"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{manifest} is damaged ({error}); take an older checkpoint") from None
    if kind != "checkpoint" or version != VERSION:
        raise ValueError(f"{manifest}: {kind} version {version}; this anyfit reads checkpoint version {VERSION}")
    if sorted(files) != sorted(FILES):
        odd = sorted(set(files) ^ set(FILES))[0]
        raise ValueError(f"{manifest}: the list of files is not a checkpoint's ({odd!r})")
    for name in FILES:
        path = folder / name
        if not path.is_file():
            raise ValueError(f"{path} is missing; take an older checkpoint")
        size = path.stat().st_size
        if size != files[name]["bytes"]:
            raise ValueError(f"{path} has {size} bytes where {files[name]['bytes']} were written; take an older checkpoint")
        if _digest(path) != files[name]["sha256"]:
            raise ValueError(f"{path} is damaged: its checksum does not match; take an older checkpoint")
    return folder


def newest(parent: Path) -> tuple[Path | None, list[str]]:
    """The newest whole checkpoint in a folder of them, and why newer ones were passed over."""
    skipped: list[str] = []
    names = {path.name.removeprefix(".").removesuffix(".old") for path in parent.iterdir()} if parent.is_dir() else set()
    for name in sorted((name for name in names if name.isdigit()), key=int, reverse=True):
        try:
            check(parent / name)
            return parent / name, skipped
        except (ValueError, OSError) as error:
            skipped.append(str(error))
    return None, skipped


def remove_older(parent: Path, keep: int) -> None:
    """Removes all but the `keep` newest checkpoints, and what killed processes left behind."""
    numbered = sorted((path for path in parent.iterdir() if path.name.isdigit()), key=lambda path: int(path.name))
    for path in numbered[:-keep]:
        shutil.rmtree(path, ignore_errors=True)
    for path in parent.glob(".*.writing"):
        shutil.rmtree(path, ignore_errors=True)


def _progress(folder: Path) -> dict[str, Any]:
    document: dict[str, Any] = json.loads((folder / "progress.json").read_text())
    return document


def _compare(folder: Path, placed: Placed, weights: Mapping[str, Tensor], progress: Mapping[str, Any]) -> None:
    wanted: dict[str, Tensor | nn.Parameter] = dict(placed.model.named_parameters()) | dict(placed.model.named_buffers())
    for name, tensor in wanted.items():
        if name not in weights:
            raise ValueError(f"{folder} is of another model: it has no {name!r}" + nearest(name, list(weights)[:1000]))
        if weights[name].shape != tensor.shape:
            raise ValueError(f"{folder} is of another model: {name} is {tuple(weights[name].shape)}, here {tuple(tensor.shape)}")
    extra = sorted(set(weights) - set(wanted))
    if extra:
        raise ValueError(f"{folder} is of another model: it holds {extra[0]!r}, which this one has not")
    optimizer = placed.updates.optimizer
    if progress["optimizer"] != type(optimizer).__name__ or len(progress["groups"]) != len(optimizer.param_groups):
        raise ValueError(
            f"{folder} was trained with {progress['optimizer']} in {len(progress['groups'])} groups; "
            f"Job(optimizer=) makes {type(optimizer).__name__} in {len(optimizer.param_groups)}"
        )


def _gather(
    folder: Path, placed: Placed, tensors: Mapping[str, Tensor], scalars: Mapping[str, Mapping[str, Any]]
) -> dict[str, dict[str, Any]]:
    state: dict[str, dict[str, Any]] = {name: {k: _unplain(v) for k, v in entries.items()} for name, entries in scalars.items()}
    for path, tensor in tensors.items():
        name, _, key = path.rpartition("/")
        state.setdefault(name, {})[key] = tensor
    for name in state:
        if name not in placed.updates.names:
            raise ValueError(f"{folder} holds optimizer state of {name!r}, which is not trained here")
    return state


# ---------------------------------------------------------------------- what is not a tensor, as JSON and back


def _plain(value: Any, where: str) -> Any:
    """JSON that remembers tuples, counters and keys that are not strings; an error names what cannot be kept."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Tensor) and value.numel() == 1:
        return _plain(value.item(), where)
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
            if tag == "!tuple":
                return tuple(_unplain(item) for item in items)
            if tag in ("!dict", "!counter"):
                pairs = {_unplain(key): _unplain(item) for key, item in items}
                return Counter(pairs) if tag == "!counter" else pairs
        return {key: _unplain(item) for key, item in value.items()}
    return value
