"""The examples of a file of data, each as a chat, or as a prompt with its completion.

| columns | read as |
|---|---|
| `messages` | a chat: a list of messages with `role` and `content`; every message of the assistant is an answer |
| `prompt`, `completion` | an instruction: two strings, or two lists of messages; the completion is the answer |
| `instruction`, `input` (may be missing), `output` | an instruction, its input below it; the output is the answer |
| `text` | plain text, all of which is learnt |

The first of these that a file has is taken; columns that are not read are named in `Examples.unread`. Beside messages there may
be `tools`, a list of JSON schemas, or the same as a string of JSON: what the assistant may call.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from anyfit.values.record import nearest

KINDS = {
    "messages": ("messages",),
    "prompt": ("prompt", "completion"),
    "instruction": ("instruction", "output"),
    "text": ("text",),
}
SHOWN = {
    "messages": '{"messages": [{"role": "user", "content": "…"}, {"role": "assistant", "content": "…"}]}',
    "prompt": '{"prompt": "…", "completion": "…"}',
    "instruction": '{"instruction": "…", "output": "…"}',
    "text": '{"text": "…"}',
}  # a line of each kind
BESIDE = {
    "messages": ("tools",),
    "prompt": ("tools",),
    "instruction": ("input",),
}  # columns that a kind reads where they are there
READERS = {".jsonl": "json", ".json": "json", ".parquet": "parquet"}
INSTALL = "pip install 'anyfit[finetune]'"
LEAST_ALIKE = 0.7  # of 1: names of files that one may be meant for the other

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Message]
    answers_from: int = 0  # messages of the assistant before this one are read, and not learnt
    tools: Sequence[Mapping[str, Any]] = ()


@dataclass(frozen=True)
class Plain:
    prompt: str
    completion: str


@dataclass(frozen=True)
class Examples:
    """A file, one by one; an example that is not of its kind is an error that names it."""

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
        """Its line, where it has one."""
        if self.file.suffix == ".jsonl":
            lines = (number for number, line in _lines(self.file) if line.strip())
            number = next(islice(lines, index, None), None)
            if number is not None:
                return f"{self.file}, line {number}"
        return f"{self.file}, example {index + 1}"


def read(file: Path) -> Examples:
    """Opens a file of data; its examples stay on the disk, in the cache of datasets."""
    try:
        import datasets
    except ImportError:
        raise ImportError(f"fine-tuning reads data with datasets: {INSTALL}") from None
    if file.is_dir():
        raise ValueError(f"{file} is a folder; data is one file, .jsonl or .parquet")
    if not file.is_file():
        there = {each.stem: each.name for each in file.parent.glob("*") if each.suffix in READERS}
        near = difflib.get_close_matches(file.stem, there, n=1, cutoff=LEAST_ALIKE)
        raise FileNotFoundError(f"no file {file}" + (f"; did you mean {there[near[0]]!r}?" if near else ""))
    reader = READERS.get(file.suffix)
    if reader is None:
        raise ValueError(f"{file}: data is read from .jsonl, a JSON object a line, or from .parquet")
    if file.stat().st_size == 0 or (reader == "json" and not any(line.strip() for _, line in _lines(file))):
        raise ValueError(f"{file} is empty; an example is {SHOWN['messages']}")
    datasets.disable_progress_bars()
    log = logging.getLogger("datasets")
    before = log.level
    log.setLevel(logging.CRITICAL)  # it would tell of a broken line first, by another number
    try:
        table = datasets.load_dataset(reader, data_files=str(file), split="train")
    except Exception as error:  # of whichever library reads that format
        raise ValueError(_unreadable(file, error)) from error
    finally:
        log.setLevel(before)
    kind, unread = _kind(file, table.column_names)
    return Examples(file, kind, unread, table)


def _kind(file: Path, columns: Sequence[str]) -> tuple[str, tuple[str, ...]]:
    for kind, needed in KINDS.items():
        if set(needed) <= set(columns):
            read = (*needed, *BESIDE.get(kind, ()))
            return kind, tuple(column for column in columns if column not in read)
    known = ", or ".join(" and ".join(needed) for needed in KINDS.values())
    half = next(
        (missing for kind, needed in KINDS.items() if kind in columns for missing in needed if missing not in columns), None
    )
    hint = f"; {half!r} is missing" if half is not None else ""
    if "conversations" in columns:
        hint = "; rename conversations to messages, and in each of these from and value to role and content"
    hint = hint or next((found for kind in KINDS for name in columns if "?" in (found := nearest(name, [kind]))), "")
    raise ValueError(f"{file} has the columns {', '.join(columns)}, and an example is {known}{hint}")


def _lines(file: Path) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8", errors="replace") as lines:
        yield from enumerate(lines, 1)


def _unreadable(file: Path, error: Exception) -> str:
    kinds: dict[str, tuple[str, int]] = {}  # of a column, and the line that it was first seen in
    for number, line in _lines(file) if READERS[file.suffix] == "json" else ():
        where = f"{file}, line {number}"
        try:
            document = json.loads(line.rstrip()) if line.strip() else {}
        except ValueError as broken:
            what = f"column {broken.colno}: {broken.msg}" if isinstance(broken, json.JSONDecodeError) else str(broken)
            return f"{where}: not JSON ({what}); every line is an object, such as {_line_of_its_kind(file)}"
        if not isinstance(document, dict):
            return f"{where}: every line is an object, such as {_line_of_its_kind(file)}"
        for name, value in document.items():
            kind, first = kinds.setdefault(name, (_kind_of(value), number)) if value is not None else ("null", number)
            if value is not None and _kind_of(value) != kind:
                return f"{where}: {name} is a {_kind_of(value)}, and in line {first} it is a {kind}"
    return f"{file} cannot be read: {str(error.__cause__ or error).strip().partition(chr(10))[0]}"


def _line_of_its_kind(file: Path) -> str:
    """A line like the first of the file that can be read."""
    for _, line in _lines(file):
        try:
            document = json.loads(line)
        except ValueError:
            continue
        kind = next((kind for kind in KINDS if isinstance(document, dict) and kind in document), None)
        if kind is not None:
            return SHOWN[kind]
    return SHOWN["messages"]


def _kind_of(value: Any) -> str:
    kinds: dict[type, str] = {str: "string", list: "list", dict: "object"}
    return kinds.get(type(value), "number")


# ---------------------------------------------------------------------- by kind


def _of_messages(row: Mapping[str, Any]) -> Chat:
    return Chat(_messages(row["messages"], "messages"), tools=_tools(row))


def _of_prompt(row: Mapping[str, Any]) -> Chat | Plain:
    prompt, completion, tools = row["prompt"], row["completion"], _tools(row)
    for name in ("prompt", "completion"):
        if row[name] is None:
            raise ValueError(f"it has no {name}")
    if isinstance(prompt, str) and isinstance(completion, str):
        turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
        return Chat(turns, tools=tools) if tools else Plain(prompt, completion)
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are two strings, or two lists of messages")
    asked, answered = _messages(prompt, "prompt"), _messages(completion, "completion")
    return Chat([*asked, *answered], answers_from=len(asked), tools=tools)


def _of_instruction(row: Mapping[str, Any]) -> Plain:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = row.get("input") or ""
    if not isinstance(given, str):
        raise ValueError(f"input is a {_kind_of(given)}, not a string")
    return Plain(f"{instruction}\n\n{given}" if given else instruction, output)


def _of_text(row: Mapping[str, Any]) -> Plain:
    return Plain("", _text(row, "text"))


_READ = {"messages": _of_messages, "prompt": _of_prompt, "instruction": _of_instruction, "text": _of_text}


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if not isinstance(value, str):
        raise ValueError(f"it has no {name}" if value is None else f"{name} is a {_kind_of(value)}, not a string")
    return value


def _messages(value: Any, name: str) -> list[Message]:
    if value is None:
        raise ValueError(f"it has no {name}, which other examples of the file have")
    if not isinstance(value, list) or not value:
        raise ValueError(f"{name} is to be a list of messages, and is {'empty' if value == [] else type(value).__name__}")
    found: list[Message] = []
    for index, message in enumerate(value):
        if not isinstance(message, Mapping):
            raise ValueError(f"{name}[{index}] is a {type(message).__name__}, not an object with role and content")
        if not isinstance(message.get("role"), str):
            raise ValueError(f"{name}[{index}] has no role, such as user or assistant" + _sharegpt(message))
        if message.get("content") is None and not message.get("tool_calls"):
            raise ValueError(f"{name}[{index}], of the {message['role']}, has no content")
        found.append(_with_arguments(_without_empty(message), f"{name}[{index}]"))
    return found


def _without_empty(value: Any) -> Any:
    """Where one example of a file has a field, the others may come with an empty one."""
    if isinstance(value, Mapping):
        return {key: _without_empty(item) for key, item in value.items() if item is not None}
    return [_without_empty(item) for item in value] if isinstance(value, list) else value


def _with_arguments(message: dict[str, Any], where: str) -> Message:
    """Templates show the arguments of a call as JSON: where they come as a string of it, that would be shown in quotes."""
    calls = message.get("tool_calls") or []
    if not isinstance(calls, list) or not all(isinstance(call, dict) and isinstance(_function(call), dict) for call in calls):
        raise ValueError(f"{where}.tool_calls is to be a list of objects, each with a function of a name and arguments")
    for call in calls:
        function = _function(call)
        if isinstance(function.get("arguments"), str):
            function["arguments"] = _parsed(function["arguments"], dict, f"{where}, arguments of {function.get('name')}")
    return message


def _function(called: Mapping[str, Any]) -> Any:
    """Of a tool, or of a call: with its name, and what it takes or is given."""
    return called.get("function", called)


def _tools(row: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    value = row.get("tools") or []
    found: Any = _without_empty(_parsed(value, list, "tools") if isinstance(value, str) else value)
    for index, tool in enumerate(found):
        if not isinstance(tool, Mapping) or not isinstance(_function(tool), Mapping) or not _function(tool).get("name"):
            raise ValueError(f"tools[{index}] is to be an object with a function, which has a name and parameters")
    return tuple(found)


def _parsed(text: str, kind: type, name: str) -> Any:
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    if not isinstance(document, kind):
        raise ValueError(f"{name} is a string, and no JSON of {'a list' if kind is list else 'an object'}: {text[:40]!r}")
    return document


def names_of(called: Sequence[Mapping[str, Any]]) -> list[str]:
    """Of tools, or of calls."""
    return [str(_function(each).get("name", "")) for each in called]


def _sharegpt(message: Mapping[str, Any]) -> str:
    return "; rename from and value to role and content" if "from" in message and "value" in message else ""
