"""A checkpoint that is there: its tensors by name, each to be read whole or in part when it is wanted.

Nothing of it is executed: it is JSON and bytes, all checked against each other before a number of it is used.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import re
import stat
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from anyfit.kernels.bytes import crc32
from anyfit.placing.weights import DTYPES

from . import files
from .boxes import Box, tile, whole
from .files import DATA, MANIFEST, METADATA, VERSION, Entry, FileRecord, data_file, header_of, stepped_aside

WAY_OUT = "take another checkpoint"
DOCUMENT = re.compile(r"[a-z]+\.json")
MOST_JSON_BYTES = 2**30
MOST_BOXES = 2**14  # of a tensor: as many as thousands of ranks make
_VERIFIED: set[tuple[Any, ...]] = set()  # by this process


@dataclass(frozen=True)
class StoredBox:
    box: Box
    rank: int  # whose file it is in
    start: int  # after that file's header


@dataclass(frozen=True)
class StoredTensor:
    dtype: torch.dtype
    shape: tuple[int, ...]
    boxes: tuple[StoredBox, ...]


class Opened:
    """A checkpoint that is all there, as far as its files' sizes and metadata say; `verify` reads the rest.

    weights, optimizer    its tensors by name; those of an optimizer are called "<parameter>/<key>"
    extra                 others that ranks kept, called "!<rank>/<number>"
    read(name)            one of them, or a box of it
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = _found(Path(folder))
        self.files = self._manifest()
        for name, record in self.files.items():
            path = self.folder / name
            with opened_here(path) as file:
                size = os.fstat(file.fileno()).st_size
            if size != record.bytes:
                raise ValueError(f"{path} has {size} bytes where {record.bytes} were written; {WAY_OUT}")
        sections = self.document(METADATA)
        try:
            self.weights = {name: _tensor(name, each) for name, each in sections["weights"].items()}
            self.optimizer = {name: _tensor(name, each) for name, each in sections["optimizer"].items()}
            extra = sections["extra"] if self.version == VERSION else {}
            self.extra = {name: _tensor(name, each) for name, each in extra.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{self.folder / METADATA} does not describe a checkpoint ({error}); {WAY_OUT}") from None
        self.tensors = self.weights | self.optimizer | self.extra
        self._maps: dict[int, Tensor] = {}
        self._headers = self._compare_headers()

    def _manifest(self) -> dict[str, FileRecord]:
        file = self.folder / MANIFEST
        self.manifest = _read(file)
        document = _parsed(file, self.manifest)
        try:
            kind, version = document["anyfit"], document["version"]
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is damaged ({error!r}); {WAY_OUT}") from None
        self.version = version
        if kind != "checkpoint" or version not in (files.FORMER_VERSION, VERSION):
            newer = isinstance(version, int) and version > VERSION
            advice = "a newer anyfit wrote it: upgrade, or take an older checkpoint" if newer else "it cannot be read any more"
            raise ValueError(f"{file}: {kind} version {version}, and this anyfit reads checkpoint version {VERSION}; {advice}")
        try:
            self._block_bytes = document["block_bytes"]
            if type(self._block_bytes) is not int or not 0 < self._block_bytes <= MOST_JSON_BYTES:
                raise ValueError(f"blocks of {self._block_bytes} bytes")
            records = {name: FileRecord.from_json(each, self._block_bytes) for name, each in document["files"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"{file} is damaged ({error!r}); {WAY_OUT}") from None
        odd = next((name for name in sorted(records) if not (DATA.fullmatch(name) or DOCUMENT.fullmatch(name))), None)
        if odd is None and METADATA not in records:
            odd = METADATA
        if odd is not None or MANIFEST in records:
            raise ValueError(f"{file}: the list of files is not a checkpoint's ({odd or MANIFEST!r}); {WAY_OUT}")
        return records

    def document(self, name: str) -> Any:
        if name not in self.files:
            raise ValueError(f"{self.folder / MANIFEST} lists no {name}; {WAY_OUT}")
        if self.files[name].bytes > MOST_JSON_BYTES:
            raise ValueError(f"{self.folder / name} has {self.files[name].bytes} bytes, which no checkpoint needs; {WAY_OUT}")
        self._verify([(name, index) for index in range(len(self.files[name].blocks))])
        return _parsed(self.folder / name, _read(self.folder / name))

    def _compare_headers(self) -> dict[int, int]:
        """By rank, where the data begin in its file, whose header has to say the same as the metadata."""
        entries: dict[int, list[Entry]] = {}
        for name, tensor in self.tensors.items():
            for each in tensor.boxes:
                is_whole = each.box == whole(tensor.shape)
                entries.setdefault(each.rank, []).append(Entry(name, tensor.dtype, each.box, is_whole, each.start))
        found = {}
        for rank in sorted({*entries} | {int(name[5:-12]) for name in self.files if DATA.fullmatch(name)}):
            name, mine = data_file(rank), sorted(entries.get(rank, []), key=lambda entry: (entry.start, entry.bytes))
            if name not in self.files:
                raise ValueError(f"{self.folder / METADATA} speaks of {name}, which is not in {MANIFEST}; {WAY_OUT}")
            end = 0
            for entry in mine:
                if entry.start != end:
                    raise ValueError(f"{self.folder / METADATA}: {entry.name} is at byte {entry.start} of {name}; {WAY_OUT}")
                end += entry.bytes
            size = self.files[name].bytes
            with opened_here(self.folder / name) as file:
                length = int.from_bytes(file.read(8), "little")
                header = file.read(length) if length <= min(size - 8, MOST_JSON_BYTES) else b""
            if _parsed(self.folder / name, header) != header_of(mine) or size - 8 - len(header) != end:
                raise ValueError(f"{self.folder / name} does not hold what {METADATA} says; {WAY_OUT}")
            found[rank] = 8 + len(header)
        return found

    def verify(self, index: int = 0, count: int = 1) -> None:
        """Reads the files, or one of so many shares of them, and compares checksums; not twice what nobody has touched since."""
        stats = [(self.folder / name).lstat() for name in (MANIFEST, *sorted(self.files))]
        seen = (str(self.folder.resolve()), *((each.st_ino, each.st_size, each.st_mtime_ns) for each in stats))
        if seen in _VERIFIED:
            return
        blocks = [(name, block) for name in sorted(self.files) for block in range(len(self.files[name].blocks))]
        self._verify(blocks[index::count])
        if count == 1:
            _VERIFIED.add(seen)

    def _verify(self, blocks: Sequence[tuple[str, int]]) -> None:
        def is_whole(block: tuple[str, int]) -> bool:
            name, index = block
            start = index * self._block_bytes
            with opened_here(self.folder / name) as file:
                data = bytearray(min(self._block_bytes, self.files[name].bytes - start))
                done, view = 0, memoryview(data)
                while done < len(data):
                    got = os.preadv(file.fileno(), [view[done:]], start + done)
                    if not got:
                        return False
                    done += got
                return crc32(data) == self.files[name].blocks[index]

        with ThreadPoolExecutor(files.THREADS, "anyfit verifying") as pool:
            for block, fine in zip(blocks, pool.map(is_whole, blocks), strict=True):
                if not fine:
                    pool.shutdown(cancel_futures=True)
                    first = block[1] * self._block_bytes
                    raise ValueError(
                        f"{self.folder / block[0]} is damaged: its checksum does not match, from byte {first} on; {WAY_OUT}"
                    )

    def read(self, name: str, box: Box | None = None) -> Tensor:
        """A tensor of it, whole or in part, in memory of its own."""
        tensor = self.tensors[name]
        box = box or whole(tensor.shape)
        out = torch.empty(box.sizes, dtype=tensor.dtype)
        for stored in tensor.boxes:
            if stored.box.overlaps(box):
                theirs, mine = _common(stored.box, box)
                out[mine].copy_(self.view(tensor, stored)[theirs])
        return out

    def extremes(self, name: str) -> tuple[float, float] | None:
        """The smallest and the largest of a tensor's numbers, both NaN where one is; None where it has none that could be."""
        tensor = self.tensors[name]
        if not tensor.dtype.is_floating_point or not math.prod(tensor.shape):
            return None
        found = [self.view(tensor, each).aminmax() for each in tensor.boxes if each.box.elements]
        if any(bool(low.isnan()) for low, _ in found):
            return math.nan, math.nan
        return min(float(low) for low, _ in found), max(float(high) for _, high in found)

    def view(self, tensor: StoredTensor, stored: StoredBox) -> Tensor:
        """A box as it lies in its file: read when it is used."""
        if stored.rank not in self._maps:
            with opened_here(self.folder / data_file(stored.rank)) as file, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # that it cannot be written to: nobody does
                mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
                self._maps[stored.rank] = torch.frombuffer(mapped, dtype=torch.uint8)
        start = self._headers[stored.rank] + stored.start
        flat = self._maps[stored.rank][start : start + stored.box.elements * tensor.dtype.itemsize]
        return flat.view(tensor.dtype).view(stored.box.sizes)


def _found(folder: Path) -> Path:
    """The folder, or the one that stood aside when a process died between two renames."""
    if not folder.exists() and stepped_aside(folder).exists():
        folder = stepped_aside(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"no checkpoint at {folder}")
    if not (folder / MANIFEST).exists():
        is_of_run = (folder.parent / "checkpoints").is_dir()
        exported = f"; those of the run are in {folder.parent / 'checkpoints'}" if is_of_run else ""
        raise ValueError(f"{folder} is not an anyfit checkpoint: it has no {MANIFEST}{exported}")
    return folder


def opened_here(file: Path) -> BinaryIO:
    """A file of the folder itself: a link could lead anywhere, and a pipe would be waited for."""
    try:
        handle = os.open(file, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ValueError(f"{file} is missing; {WAY_OUT}") from None
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        raise ValueError(f"{file} is a link, which may lead out of the checkpoint; put the file itself there (cp -L)") from None
    if not stat.S_ISREG(os.fstat(handle).st_mode):
        os.close(handle)
        raise ValueError(f"{file} is not a file; {WAY_OUT}")
    return os.fdopen(handle, "rb", buffering=0)


def _read(file: Path) -> bytes:
    with opened_here(file) as content:
        size = os.fstat(content.fileno()).st_size
        if size > MOST_JSON_BYTES:
            raise ValueError(f"{file} has {size} bytes, which no checkpoint needs; {WAY_OUT}")
        return content.read()


def _parsed(file: Path, text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file} is damaged: not JSON ({error}); {WAY_OUT}") from None


def _tensor(name: str, document: Any) -> StoredTensor:
    dtype, shape = DTYPES[document["dtype"]], _numbers(document["shape"])
    if len(document["boxes"]) > MOST_BOXES:
        raise ValueError(f"{name!r} is in {len(document['boxes'])} boxes")
    boxes = [
        StoredBox(Box(_numbers(offsets), _numbers(sizes)), *_numbers([rank, start]))
        for offsets, sizes, rank, start in document["boxes"]
    ]
    if not tile([each.box for each in boxes], shape):
        raise ValueError(f"the boxes of {name!r} do not make up its shape {shape}")
    if math.prod(shape) * dtype.itemsize >= 2**63:
        raise ValueError(f"{name!r} has the shape {shape}")
    return StoredTensor(dtype, shape, tuple(boxes))


def _numbers(given: Any) -> tuple[int, ...]:
    if type(given) is not list or not all(type(each) is int and 0 <= each < 2**63 for each in given) or len(given) > 64:
        raise ValueError(f"{str(given)[:80]} where sizes belong")
    return tuple(given)


def _common(one: Box, other: Box) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
    """Where two boxes overlap, as seen from each."""
    both = []
    for mine, size, theirs, length in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        both.append((max(mine, theirs), min(mine + size, theirs + length)))
    return (
        tuple(slice(start - mine, end - mine) for (start, end), mine in zip(both, one.offsets, strict=True)),
        tuple(slice(start - theirs, end - theirs) for (start, end), theirs in zip(both, other.offsets, strict=True)),
    )
