"""The examples of a file of data, each as a chat, or as a prompt with its completion.

| columns | read as |
|---|---|
| `messages` | a chat: a list of messages with `role` and `content`; every message of the assistant is an answer |
| `prompt`, `completion` | an instruction: two strings, or two lists of messages; the completion is the answer |
| `instruction`, `input` (may be missing), `output` | an instruction, its input below it; the output is the answer |
| `text` | plain text, all of which is learnt |

The first of these that a file has is taken; columns that are not read are named in `Examples.unread`. Beside messages there may
be `tools`, a list of JSON schemas, or the same as a string of JSON: what the assistant may call.

JSON is read here, line by line, and parquet by datasets. A library that gives a column of JSON one type guesses it: strings that
look like dates become dates, and one number among strings makes numbers of all that look like some.
"""

from __future__ import annotations

import difflib
import json
import logging
from collections.abc import Iterator, Mapping, Sequence
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
JSON, PARQUET = (".jsonl", ".json"), ".parquet"
INSTALL = "pip install 'anyfit[finetune]'"
UTF, BOM = "utf-8-sig", b"\xef\xbb\xbf"
LEAST_ALIKE = 0.7  # of 1: names of files that one may be meant for the other

Message = Mapping[str, Any]


@dataclass(frozen=True)
class Chat:
    messages: Sequence[Message]
    answers_from: int = 0  # messages of the assistant before this one are read, and not learnt
    tools: Sequence[Mapping[str, Any]] = ()

    @property
    def answers(self) -> bool:
        """Whether anything is answered; an empty answer is none."""
        theirs = (each for each in self.messages[self.answers_from :] if each["role"] == "assistant")
        return any(each.get("content") or each.get("tool_calls") for each in theirs)


@dataclass(frozen=True)
class Plain:
    prompt: str
    completion: str

    @property
    def answers(self) -> bool:
        return bool(self.completion)


@dataclass(frozen=True)
class Examples:
    """A file, one by one; an example that is not of its kind is an error that names it."""

    file: Path
    kind: str  # a key of KINDS
    unread: tuple[str, ...]  # columns
    table: JsonRows | Any  # or of datasets

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
        if isinstance(self.table, JsonRows) and (line := self.table.line(index)) is not None:
            return f"{self.file}, line {line}"
        return f"{self.file}, example {index + 1}"


class JsonRows:
    """Of a file with an object a line, or with one list of objects. Lines stay on the disk."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._lines: list[tuple[int, int]] = []  # their numbers, and where they begin
        self._listed = self._list()
        columns: dict[str, None] = {}
        for row in self._scanned() if self._listed is None else self._listed:
            columns |= dict.fromkeys(row)
        self.column_names = list(columns)

    def __len__(self) -> int:
        return len(self._lines if self._listed is None else self._listed)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """With None for what it has not."""
        if self._listed is None:
            with self.file.open("rb") as lines:
                lines.seek(self._lines[index][1])
                row = json.loads(lines.readline().decode(UTF))
        else:
            row = self._listed[index]
        return {name: row.get(name) for name in self.column_names}

    def line(self, index: int) -> int | None:
        return self._lines[index][0] if self._listed is None else None

    def _list(self) -> list[Mapping[str, Any]] | None:
        """Of a file that is one; None where each line is a document."""
        with self.file.open("rb") as lines:
            first = next((line.strip() for line in lines if line.strip()), b"").removeprefix(BOM)
        if not first.startswith(b"["):
            return None
        try:
            found: Any = json.loads(self.file.read_bytes().decode(UTF))
        except ValueError:  # lines that are lists, or not JSON: they are looked at one by one
            return None
        for index, row in enumerate(found, 1):
            if not isinstance(row, dict):
                said = f"it is a {_kind_of(row)}, not an object such as {SHOWN['messages']}"
                raise ValueError(f"{self.file}, example {index}: {said}")
        return found  # type: ignore[no-any-return]

    def _scanned(self) -> Iterator[Mapping[str, Any]]:
        begins = 0
        with self.file.open("rb") as lines:
            for number, line in enumerate(lines, 1):
                if line.strip():
                    self._lines.append((number, begins))
                    yield self._parsed(number, line)
                begins += len(line)

    def _parsed(self, number: int, line: bytes) -> Mapping[str, Any]:
        where = f"{self.file}, line {number}"
        try:
            row = json.loads(line.decode(UTF).rstrip())
        except UnicodeDecodeError as error:
            raise ValueError(f"{where}: {_not_utf8(self.file, error)}") from error
        except ValueError as error:
            what = f"column {error.colno}: {error.msg}" if isinstance(error, json.JSONDecodeError) else str(error)
            raise ValueError(
                f"{where}: not JSON ({what}); every line is an object, such as {_line_of_its_kind(self.file)}"
            ) from error
        if not isinstance(row, dict):
            raise ValueError(f"{where}: every line is an object, such as {_line_of_its_kind(self.file)}")
        return row


def _not_utf8(file: Path, error: UnicodeDecodeError) -> str:
    byte = error.object[error.start]
    return f"not UTF-8 (byte 0x{byte:02x} in column {error.start + 1}); convert it: iconv -f latin1 -t utf-8 {file} > new.jsonl"


def read(file: Path) -> Examples:
    """Opens a file of data; its examples stay on the disk."""
    if file.is_dir():
        raise ValueError(f"{file} is a folder; data is one file, .jsonl or .parquet")
    if not file.is_file():
        there = {each.stem: each.name for each in file.parent.glob("*") if each.suffix in (*JSON, PARQUET)}
        near = difflib.get_close_matches(file.stem, there, n=1, cutoff=LEAST_ALIKE)
        raise FileNotFoundError(f"no file {file}" + (f"; did you mean {there[near[0]]!r}?" if near else ""))
    if file.suffix not in (*JSON, PARQUET):
        raise ValueError(f"{file}: data is read from .jsonl, a JSON object a line, or from .parquet")
    if file.stat().st_size == 0:
        raise ValueError(f"{file} is empty; an example is {SHOWN['messages']}")
    table = _parquet(file) if file.suffix == PARQUET else JsonRows(file)
    if not len(table):
        raise ValueError(f"{file} is empty; an example is {SHOWN['messages']}")
    kind, unread = _kind(file, table.column_names)
    return Examples(file, kind, unread, table)


def _parquet(file: Path) -> Any:
    try:
        import datasets
    except ImportError:
        raise ImportError(f"parquet is read with datasets: {INSTALL}") from None
    datasets.disable_progress_bars()
    log = logging.getLogger("datasets")
    before = log.level
    log.setLevel(logging.CRITICAL)
    try:
        return datasets.load_dataset("parquet", data_files=str(file), split="train")
    except Exception as error:  # of whichever library reads that format
        said = str(error.__cause__ or error).strip().partition("\n")[0]
        raise ValueError(f"{file} cannot be read: {said}") from error
    finally:
        log.setLevel(before)


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


def _line_of_its_kind(file: Path) -> str:
    """A line like the first of the file that can be read."""
    for line in file.read_bytes().splitlines():
        try:
            document = json.loads(line)
        except ValueError:
            continue
        kind = next((kind for kind in KINDS if isinstance(document, dict) and kind in document), None)
        if kind is not None:
            return SHOWN[kind]
    return SHOWN["messages"]


def _kind_of(value: Any) -> str:
    kinds: dict[type, str] = {str: "string", list: "list", dict: "object", int: "number", float: "number", bool: "boolean"}
    return kinds.get(type(value), type(value).__name__)


def _no_string(name: str, value: Any) -> ValueError:
    quotes = "; put it in quotes" if isinstance(value, int | float) else ""
    return ValueError(f"{name} is a {_kind_of(value)}, not a string{quotes}")


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
    for name in ("prompt", "completion"):
        if not isinstance(row[name], str | list):
            raise _no_string(name, row[name])
    if isinstance(prompt, str) or isinstance(completion, str):
        raise ValueError("prompt and completion are two strings, or two lists of messages")
    asked, answered = _messages(prompt, "prompt"), _messages(completion, "completion")
    return Chat([*asked, *answered], answers_from=len(asked), tools=tools)


def _of_instruction(row: Mapping[str, Any]) -> Plain:
    instruction, output = _text(row, "instruction"), _text(row, "output")
    given = "" if row.get("input") is None else row["input"]
    if not isinstance(given, str):
        raise _no_string("input", given)
    return Plain(f"{instruction}\n\n{given}" if given else instruction, output)


def _of_text(row: Mapping[str, Any]) -> Plain:
    return Plain("", _text(row, "text"))


_READ = {"messages": _of_messages, "prompt": _of_prompt, "instruction": _of_instruction, "text": _of_text}


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row[name]
    if value is None:
        raise ValueError(f"it has no {name}, and a file holds one kind of example")
    if not isinstance(value, str):
        raise _no_string(name, value)
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
        if not isinstance(message.get("content"), str | list | None):
            raise _no_string(f"{name}[{index}].content", message["content"])
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
