"""The rows of a file of data, each as a chat, or as a prompt with its completion.

| columns | read as |
|---|---|
| `messages` | a chat: a list of messages with `role` and `content`; every message of the assistant is an answer |
| `prompt`, `completion` | an instruction: two strings, or two lists of messages; the completion is the answer |
| `instruction`, `input` (may be missing), `output` | an instruction, its input below it; the output is the answer |
| `text` | plain text, all of which is learnt |

The first of these that a file has is taken; columns that are not read are named in `Rows.unread`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from anyfit.values.record import nearest

KINDS = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
BESIDE = {"instruction": ("input",)}  # columns that a kind reads where they are there
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
INSTALL = "pip install 'anyfit[finetune]'"

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Message]
    answers_from: int = 0  # messages of the assistant before this one are read, and not learnt


@dataclass(frozen=True)
class Plain:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Rows:
    """A file, row by row; a row that is not of its kind is an error that names it."""

    file: Path
    kind: str  # a key of KINDS
    unread: tuple[str, ...]  # columns
    table: Any  # of datasets

    def __len__(self) -> int:
        return len(self.table)

    def __getitem__(self, index: int) -> Chat | Plain:
        row = self.table[index]
        try:
            return _READ[self.kind](row)
        except ValueError as error:
            raise ValueError(f"{self.where(index)}: {error}") from None

    def where(self, index: int) -> str:
        return f"{self.file}, row {index + 1}"


def read(file: Path) -> Rows:
    """Opens a file of data; its rows stay on the disk, in the cache of datasets."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"fine-tuning reads data with datasets: {INSTALL}") from None
    if not file.is_file():
        raise FileNotFoundError(f"no file {file}")
    reader = READERS.get(file.suffix)
    if reader is None:
        raise ValueError(f"{file}: data is read from .jsonl, a JSON object a line, or from .parquet")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty")
    datasets.disable_progress_bars()
    try:
        table = datasets.load_dataset(reader, data_files=str(file), split="train")
    except Exception as error:  # of whichever library reads that format
        raise ValueError(_unreadable(file, error)) from error
    kind, unread = _kind(file, table.column_names)
    return Rows(file, kind, unread, table)


def _kind(file: Path, columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    for kind, needed in KINDS.items():
        if set(needed) <= set(columns):
            if "tools" in columns and kind == "messages":
                raise ValueError(f"{file}: its chats offer tools, which are not supported yet; leave the column tools out")
            read = (*needed, *BESIDE.get(kind, ()))
            return kind, tuple(column for column in columns if column not in read)
    known = "; ".join(" and ".join(needed) for needed in KINDS.values())
    half = next(
        (missing for kind, needed in KINDS.items() if kind in columns for missing in needed if missing not in columns), None
    )
    hint = f"; {half!r} is missing" if half is not None else ""
    hint = hint or next((found for kind in KINDS for name in columns if "?" in (found := nearest(name, [kind]))), "")
    raise ValueError(f"{file} has the columns {', '.join(columns)}, and rows are read by one of these: {known}{hint}")


def _unreadable(file: Path, error: Exception) -> str:
    if READERS[file.suffix] == "json":
        with file.open(encoding="utf-8", errors="replace") as lines:
            for number, line in enumerate(lines, 1):
                try:
                    is_object = not line.strip() or isinstance(json.loads(line), dict)
                except ValueError as broken:
                    return f'{file}, line {number}: not JSON ({broken}); every line is an object, such as {{"text": "…"}}'
                if not is_object:
                    return f'{file}, line {number}: every line is an object, such as {{"text": "…"}}'
    return f"{file} cannot be read: {str(error.__cause__ or error).strip().partition(chr(10))[0]}"


# ---------------------------------------------------------------------- by kind


def _of_messages(row: Mapping[str, Any]) -> Chat:
    return Chat(_messages(row["messages"], "messages"))


def _of_prompt(row: Mapping[str, Any]) -> Chat | Plain:
    prompt, completion = row["prompt"], row["completion"]
    for name in ("prompt", "completion"):
        if row[name] is None:
            raise ValueError(f"it has no {name}")
    if isinstance(prompt, str) and isinstance(completion, str):
        return Plain(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are two strings, or two lists of messages")
    asked, answered = _messages(prompt, "prompt"), _messages(completion, "completion")
    return Chat([*asked, *answered], answers_from=len(asked))


def _of_instruction(row: Mapping[str, Any]) -> Plain:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise ValueError(f"input is a {type(given).__name__}, not a string")
    return Plain(f"{instruction}\n\n{given}" if given else instruction, output)


def _of_text(row: Mapping[str, Any]) -> Plain:
    return Plain("", _text(row, "text"))


_READ = {"messages": _of_messages, "prompt": _of_prompt, "instruction": _of_instruction, "text": _of_text}


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"it has no {name}" if value is None else f"{name} is a {type(value).__name__}, not a string")
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is to be a list of messages, and is {'empty' if value == [] else type(value).__name__}")
    found: list[Message] = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ValueError(f"{name}[{index}] is a {type(message).__name__}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{index}] has no role, such as user or assistant" + _sharegpt(message))
        # Where one row of a file has a field, the others may come with an empty one.
        found.append({key: item for key, item in message.items() if item is not None})
    return found


def _sharegpt(message: Mapping[str, Any]) -> str:
    return "; rename from and value to role and content" if "from" in message and "value" in message else ""
