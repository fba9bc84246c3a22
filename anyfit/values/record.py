"""Frozen dataclasses that travel as strict, versioned JSON.

A `Record` is a document of its own (a plan, a machine): its JSON names its kind and version. Plain dataclasses nest inside.
Reading is driven by the field types and forgives nothing: an unknown, missing or mistyped key is an error that names the
key by its full path and the nearest known one, because a misspelt setting that is silently ignored costs a training run.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import json
import math
import os
import tempfile
import types
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal, Self, Union, get_args, get_origin, get_type_hints

MOST_NAMED, MOST_LONGER = 30, 3


def nearest(word: str, known: Iterable[str]) -> str:
    """`; did you mean 'x'?` when some known word begins so, or is close, else `; known: ...`, the first of many."""
    options = list(known)
    longer = sorted(each for each in options if len(word) > 2 and each.startswith(f"{word}-"))[:MOST_LONGER]
    close = longer or difflib.get_close_matches(word, sorted(options), n=1)
    if close:
        return f"; did you mean {' or '.join(map(repr, close))}?"
    if len(options) > MOST_NAMED:
        return f"; known: {', '.join(options[:MOST_NAMED])} and {len(options) - MOST_NAMED} more"
    return f"; known: {', '.join(sorted(options))}" if options else ""


class Record:
    """A dataclass that is a JSON document: `save`, `load`, `to_json`, `from_json`."""

    kind: ClassVar[str]
    version: ClassVar[int]

    def to_json(self) -> dict[str, Any]:
        return {"anyfit": self.kind, "version": self.version, **encode(self)}

    @classmethod
    def from_json(cls, document: object, *, where: str = "") -> Self:
        where = where or cls.kind
        if not isinstance(document, Mapping):
            raise ValueError(f"{where}: expected a JSON object, got {_name_of(document)}")
        if document.get("anyfit") != cls.kind:
            raise ValueError(f"{where}: not an anyfit {cls.kind} (its 'anyfit' key says {document.get('anyfit')!r})")
        if type(document.get("version")) is not int or document["version"] != cls.version:
            raise ValueError(
                f"{where}: version {document.get('version')!r} of the {cls.kind} format; this anyfit reads version {cls.version}"
            )
        body = {key: value for key, value in document.items() if key not in ("anyfit", "version")}
        value: Self = decode(cls, body, where)
        return value

    def save(self, path: str | os.PathLike[str]) -> None:
        write_atomically(Path(path), (json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n").encode())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        file = Path(path)
        return cls.from_json(read_json(file, f"{cls.kind} file"), where=str(file))


def read_json(file: Path, what: str) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"), object_pairs_hook=each_key_once)
    except FileNotFoundError:
        raise FileNotFoundError(f"no {what} at {file}") from None
    except OSError as error:
        raise OSError(f"cannot read the {what} {file}: {error.strerror}") from None
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error})") from None


def each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of JSON; of a key written twice, the parser would silently drop the first."""
    document = dict(pairs)
    if len(document) < len(pairs):
        twice, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {twice!r} is given twice")
    return document


def refuse_unwritable(path: Path) -> None:
    """Before the work whose result is to be written there. Folders that are missing are made when it is."""
    above = next(folder for folder in path.absolute().parents if folder.exists())
    if not above.is_dir():
        raise OSError(f"cannot write {path}: its folder is a file")
    if path.is_dir():
        raise OSError(f"cannot write {path}: it is a folder")
    if not os.access(above, os.W_OK):
        raise OSError(f"cannot write {path}: {above} cannot be written to")


def write_atomically(path: Path, content: bytes) -> None:
    """Written aside and renamed: a reader sees the old file or the new one, never half of either."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write_and_rename(path, content)
    except OSError as error:
        reason = "its folder is a file" if isinstance(error, FileExistsError) else error.strerror
        raise OSError(f"cannot write {path}: {reason}") from error


def _write_and_rename(path: Path, content: bytes) -> None:
    handle, aside = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        umask = os.umask(0)
        os.umask(umask)
        Path(aside).chmod(0o666 & ~umask)  # mkstemp's 0600 would hide a plan from a colleague
        Path(aside).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(aside).unlink()
        raise


def encode(value: Any) -> Any:
    """A value as JSON's own types."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {key: encode(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [encode(item) for item in value]
    return value


def decode(kind: Any, value: Any, where: str) -> Any:
    """JSON as a value of type `kind`, or a ValueError that names `where`."""
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _decode_dataclass(kind, value, where)
    if isinstance(kind, type) and issubclass(kind, tuple) and hasattr(kind, "_fields"):
        return kind(*decode(tuple[tuple(get_type_hints(kind).values())], value, where))  # type: ignore[misc]
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return value
    if origin in (Union, types.UnionType):
        if value is None and type(None) in arguments:
            return None
        options = [option for option in arguments if option is not type(None)]
        assert len(options) == 1, f"{where}: only optional unions travel as JSON"
        return decode(options[0], value, where)
    if origin is Literal:
        if value not in arguments or isinstance(value, bool):
            raise ValueError(f"{where}: {value!r}" + nearest(str(value), [str(option) for option in arguments]))
        return value
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ValueError(f"{where}: expected a list, got {_name_of(value)}")
        kinds = arguments[:1] * len(value) if len(arguments) == 2 and arguments[1] is Ellipsis else arguments
        if len(value) != len(kinds):
            raise ValueError(f"{where}: expected {len(kinds)} items, got {len(value)}")
        return tuple(decode(kinds[index], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin in (Mapping, dict):
        if not isinstance(value, Mapping):
            raise ValueError(f"{where}: expected an object, got {_name_of(value)}")
        if get_origin(arguments[0]) is Literal:  # a number for every tier: all of them, and no others
            _refuse_other_keys(value, get_args(arguments[0]), where)
        return {key: decode(arguments[1], item, f"{where}.{key}") for key, item in value.items()}
    if kind is float and isinstance(value, int) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):
            value = float(value)
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
        raise ValueError(f"{where}: expected {kind.__name__}, got {_name_of(value)} {value!r}")
    if kind is float and not math.isfinite(value):
        raise ValueError(f"{where}: expected a finite number, got {value!r}")
    return value


def _decode_dataclass(kind: type, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise ValueError(f"{where}: expected an object, got {_name_of(value)}")
    fields = [field.name for field in dataclasses.fields(kind)]
    for former, name in getattr(kind, "former_keys", {}).items():  # files written before a field was renamed
        if former in value and name not in value:
            value = {name if key == former else key: item for key, item in value.items()}
    _refuse_other_keys(value, fields, where)
    hints = get_type_hints(kind)
    arguments = {name: decode(hints[name], value[name], f"{where}.{name}") for name in fields}
    try:
        return kind(**arguments)
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None


def _refuse_other_keys(value: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in value:
        if key not in known:
            raise ValueError(f"{where}: unknown key {key!r}" + nearest(str(key), known))
    for key in known:
        if key not in value:
            raise ValueError(f"{where}: missing key {key!r} (keys given: {', '.join(map(str, value)) or 'none'})")


def _name_of(value: object) -> str:
    return {"NoneType": "null", "dict": "an object", "list": "a list", "str": "a string", "bool": "a boolean"}.get(
        type(value).__name__, type(value).__name__
    )
