"""Folders of safetensors files as `save_pretrained` writes them: what lies where, read strictly. No tensor is read here.

A file is eight bytes (the length of its header), the header (JSON: name, dtype, shape, and where the bytes are), and the bytes.
Several files have an index, `model.safetensors.index.json`, that says which name is in which of them; it is not looked at where
there is a `model.safetensors`, as `from_pretrained` does. None of it is trusted: files are named inside their folder alone, what
a header promises is compared with the file's size before anything is made of it, and nothing is ever unpickled.
"""

from __future__ import annotations

import hashlib
import json
import math
import shlex
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .record import each_key_once, nearest
from .units import show_bytes

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ELEMENT_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1,
    "BOOL": 1, "F8_E4M3": 1, "F8_E5M2": 1, "C64": 8,
}  # fmt: skip
MOST_HEADER_BYTES = 100 * 2**20  # as the library has it
MOST_TENSORS = 2**20
MOST_FILES = 2**16
MOST_DIMS = 16
MOST_NAME = 512  # characters


@dataclass(frozen=True)
class Entry:
    """One tensor of a file."""

    file: Path
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    start: int  # of its bytes, in the file

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * ELEMENT_BYTES[self.dtype]


@dataclass(frozen=True)
class TensorFolder:
    """All tensors of a folder, by name."""

    folder: Path
    entries: Mapping[str, Entry]

    @classmethod
    def open(cls, folder: Path) -> TensorFolder:
        """What the index and all headers say; an error where they contradict each other, or the files."""
        if not folder.is_dir():
            raise FileNotFoundError(f"no folder {folder} with weights")
        index = folder / INDEX
        if (folder / SINGLE).is_file():  # it goes before an index, as in `from_pretrained`
            by_file: Mapping[str, set[str] | None] = {SINGLE: None}
        elif index.is_file():
            by_file = _read_index(index)
        else:
            raise FileNotFoundError(_nothing_in(folder))
        entries: dict[str, Entry] = {}
        for name, promised in by_file.items():
            found = read_header(folder / name)
            if promised is not None and set(found) != promised:
                odd = sorted(set(found) ^ promised)[0]
                where = f"which {index.name} does not say" if odd in found else f"as {index.name} says, and it is not there"
                raise ValueError(f"{folder / name}: it has {odd!r}, {where}")
            entries |= found
        return cls(folder, entries)

    @property
    def digest(self) -> str:
        """Of names, dtypes, shapes and places, not of values."""
        facts = [[name, each.file.name, each.dtype, each.shape, each.start] for name, each in sorted(self.entries.items())]
        return hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]


def holds_weights(folder: Path) -> bool:
    """Whether a folder has weights in it, of any kind: also such as are refused."""
    return folder.is_dir() and any(_weight_files(folder))


def _weight_files(folder: Path) -> list[str]:
    endings = (".safetensors", ".safetensors.index.json", ".bin", ".bin.index.json", ".pt", ".pth", ".ckpt", ".gguf", ".h5")
    return sorted(path.name for path in folder.iterdir() if path.name.endswith(endings) and path.name != "training_args.bin")


def _nothing_in(folder: Path) -> str:
    others = _weight_files(folder)
    if not others:
        return f"{folder} holds no {SINGLE} and no {INDEX}"
    return (
        f"{folder} holds {others[0]}, and neither {SINGLE} nor {INDEX}: only safetensors are read, since loading a pickle runs "
        f"what is in it; where you trust it: {_conversion(folder)}"
    )


def without_pickles(source: str | Path) -> str | Path:
    """A folder of weights, unless they are such as no run starts from."""
    folder = Path(source)
    if not (folder / SINGLE).is_file() and not (folder / INDEX).is_file():
        raise FileNotFoundError(_nothing_in(folder))
    return source


def _conversion(folder: Path) -> str:
    """The command that makes a folder of safetensors of it, with the head that its configuration names."""
    made_by = "AutoModel"
    with suppress(OSError, ValueError, TypeError, LookupError, AttributeError):
        named = json.loads((folder / "config.json").read_bytes())["architectures"][0]
        made_by = named if named.isidentifier() and named.isascii() else made_by
    convert = (
        f"import transformers as t; t.{made_by}.from_pretrained({str(folder)!r}).save_pretrained({f'{folder}-safetensors'!r})"
    )
    return f"python -c {shlex.quote(convert)}"


def _read_index(index: Path) -> dict[str, set[str]]:
    """By file, the names that are in it."""
    if index.stat().st_size > MOST_HEADER_BYTES:
        raise ValueError(f"{index}: {show_bytes(index.stat().st_size)} of JSON; at most {show_bytes(MOST_HEADER_BYTES)} are read")
    document = _json(index, index.read_bytes())
    mapping = document.get("weight_map")
    if not isinstance(mapping, dict) or not mapping:
        raise ValueError(f"{index}: no 'weight_map' of names to files")
    _refuse_many(index, len(mapping), MOST_TENSORS, "tensors")
    by_file: dict[str, set[str]] = {}
    for name, file in mapping.items():
        _refuse_name(index, name)
        if not isinstance(file, str) or not _is_inside(file):
            raise ValueError(f"{index}: {name!r} lies in {file!r}, which does not name a .safetensors file of this folder")
        if not (index.parent / file).is_file():
            raise FileNotFoundError(f"{index}: {name!r} lies in {file}, which is not there; fetch the folder again")
        by_file.setdefault(file, set()).add(name)
    _refuse_many(index, len(by_file), MOST_FILES, "files")
    return by_file


def _is_inside(file: str) -> bool:
    """Whether it names a file beside the index: no way up, down or to the root, on any system."""
    return file.endswith(".safetensors") and file.isprintable() and not file.startswith(".") and not set(file) & set("/\\:\0")


def read_header(file: Path) -> dict[str, Entry]:
    """The tensors of a safetensors file: together they are all of it, and none overlaps another."""
    size = file.stat().st_size
    with file.open("rb") as opened:
        length = int.from_bytes(opened.read(8), "little")
        if size < 8 or length > size - 8:
            raise ValueError(f"{file}: no safetensors file: its header has {length} bytes, and the file {size}")
        if length > MOST_HEADER_BYTES:
            raise ValueError(f"{file}: a header of {show_bytes(length)}; at most {show_bytes(MOST_HEADER_BYTES)} are read")
        text = opened.read(length)
    document = _json(file, text)
    document.pop("__metadata__", None)
    _refuse_many(file, len(document), MOST_TENSORS, "tensors")
    data = end = 8 + length
    entries = {name: _entry(file, name, fields, data) for name, fields in document.items()}
    for start, bytes, name in sorted((entry.start, entry.bytes, name) for name, entry in entries.items()):
        if start != end:
            where = f"starts at byte {start - data}, where byte {end - data} is next"
            raise ValueError(f"{file}: {name!r} {where}: tensors overlap or leave holes")
        end += bytes
    if end != size:
        raise ValueError(f"{file}: it has {size} bytes, and its header speaks of {end}; fetch it again")
    return entries


def _entry(file: Path, name: str, fields: Any, data: int) -> Entry:
    _refuse_name(file, name)
    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{file}: {name!r} is to have dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ELEMENT_BYTES:
        raise ValueError(f"{file}: {name!r} is of dtype {dtype!r}" + nearest(str(dtype), ELEMENT_BYTES))
    if not _are_counts(shape) or len(shape) > MOST_DIMS:
        raise ValueError(f"{file}: {name!r} has the shape {shape!s:.80}, which no tensor has")
    if not _are_counts(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise ValueError(f"{file}: {name!r} lies at {offsets!s:.80}, which is no stretch of bytes")
    entry = Entry(file, dtype, tuple(shape), data + offsets[0])
    if entry.bytes != offsets[1] - offsets[0]:
        raise ValueError(f"{file}: {name!r} of shape {shape} in {dtype} takes {entry.bytes} bytes, not {offsets[1] - offsets[0]}")
    return entry


def _are_counts(values: Any) -> bool:
    return isinstance(values, list) and all(type(each) is int and 0 <= each < 2**48 for each in values)


def _refuse_name(file: Path, name: str) -> None:
    if not name or len(name) > MOST_NAME or not name.isprintable():
        raise ValueError(f"{file}: {name[:80]!r} is no name of a tensor: at most {MOST_NAME} printable characters")


def _refuse_many(file: Path, count: int, most: int, what: str) -> None:
    if count > most:
        raise ValueError(f"{file}: {count} {what}; at most {most} are read")


def _json(file: Path, text: bytes) -> dict[str, Any]:
    try:
        document = json.loads(text.decode(), object_pairs_hook=each_key_once)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{file}: not JSON ({error})") from None
    if not isinstance(document, dict):
        raise ValueError(f"{file}: expected a JSON object")
    return document


def header_of(tensors: Iterable[tuple[str, str, tuple[int, ...]]]) -> bytes:
    """How a file begins that holds these (name, dtype, shape) one after another, each dtype's elements at a multiple of its size
    where larger ones come first."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, dtype, shape in tensors:
        start, end = end, end + math.prod(shape) * ELEMENT_BYTES[dtype]
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    return header_bytes(header)


def header_bytes(header: Mapping[str, Any]) -> bytes:
    """Its length, and JSON as long as that."""
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
