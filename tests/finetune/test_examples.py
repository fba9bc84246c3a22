"""Files of data, and what is read from them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import datasets
import pytest

from anyfit.finetune.examples import Chat, Plain, read
from anyfit.finetune.tokens import Sample, samples_of, shortened
from tests.finetune import tiny

CHAT = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]


@pytest.mark.parametrize(
    ("row", "expected"),
    [
        ({"messages": CHAT, "id": 3}, Chat(CHAT)),
        ({"prompt": "2 + 2 =", "completion": " 4"}, Plain("2 + 2 =", " 4")),
        ({"prompt": CHAT[:1], "completion": CHAT[1:]}, Chat(CHAT, answers_from=1)),
        ({"instruction": "Add.", "input": "2, 2", "output": "4"}, Plain("Add.\n\n2, 2", "4")),
        ({"instruction": "Say hi.", "output": "hi"}, Plain("Say hi.", "hi")),
        ({"text": "once"}, Plain("", "once")),
    ],
)
@pytest.mark.parametrize("format", ["jsonl", "parquet"])
def test_a_row_is_read_by_its_columns(row: Any, expected: Any, format: str, tmp_path: Path) -> None:
    file = tmp_path / f"data.{format}"
    if format == "parquet":
        datasets.Dataset.from_list([row]).to_parquet(file)
    else:
        tiny.write(file, [row])
    rows = read(file)
    assert len(rows) == 1
    assert rows[0] == expected
    assert rows.unread == (("id",) if "id" in row else ())


def test_a_field_that_only_some_messages_have_is_not_given_to_the_others(tmp_path: Path) -> None:
    named = [{**CHAT[0], "name": "Ann"}, CHAT[1]]
    rows = read(tiny.write(tmp_path / "data.jsonl", [{"messages": CHAT}, {"messages": named}]))
    assert [rows[0], rows[1]] == [Chat(CHAT), Chat(named)]


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ('{"text": "a"}\n\n{"text": \n', "data.jsonl, line 3: not JSON (column 9: Expecting value); every line is an object"),
        ('{"text": "a"}\n\n{"text": ["a"]}\n', "data.jsonl, line 3: text is a list, not a string"),
        ('["a"]\n["b"]\n', "data.jsonl, line 1: every line is an object"),
        ('[{"text": "a"},\n 3]', "data.jsonl, example 2: it is a number, not an object"),
        ('{"text": "a"}\n["b"]\n', 'line 2: every line is an object, such as {"text": "…"}'),
        ('{"messages"\n{"messages": []}\n', 'an object, such as {"messages": [{"role": "user", "content": "…"}, {"role": "ass'),
        ('{"prompt": "a", "completion": "b"}\nhello\n', 'an object, such as {"prompt": "…", "completion": "…"}'),
        ('{"instruction": "a", "output": "b"}\n3\n', 'an object, such as {"instruction": "…", "output": "…"}'),
        ("", 'data.jsonl is empty; an example is {"messages": ['),
        ("\n \n", "data.jsonl is empty; an example is"),
        (
            '{"question": "a", "answer": "b"}\n',
            "has the columns question, answer, and an example is messages, or prompt and completion, or instruction and output",
        ),
        ('{"message": []}\n', "did you mean 'messages'?"),
        (
            '{"conversations": []}\n',
            "; rename conversations to messages, and in each of these from and value to role and content",
        ),
        ('{"prompt": "a", "response": "b"}\n', "'completion' is missing"),
        ('{"text": "1"}\n{"text": 3}\n', "data.jsonl, line 2: text is a number, not a string; put it in quotes"),
        ('{"instruction": "a", "output": "1"}\n{"instruction": "a", "output": 2}\n', "line 2: output is a number, not a string"),
        ('{"instruction": "a", "input": 0, "output": "1"}\n', "line 1: input is a number, not a string"),
        ('{"prompt": "a", "completion": true}\n', "line 1: completion is a boolean, not a string; put it in quotes"),
        ('{"messages": [{"role": "user", "content": 6.5}]}\n', "line 1: messages[0].content is a number, not a string; put it"),
        ('{"prompt": "a", "completion": "b"}\n{"text": "c"}\n', "line 2: it has no prompt"),
        ('{"prompt": "a", "completion": []}\n', "line 1: prompt and completion are two strings, or two lists of messages"),
        ('{"messages": [{"from": "human", "value": "a"}]}\n', "has no role, such as user or assistant; rename from and value"),
        ('\n{"messages": []}\n', "line 2: messages is to be a list of messages, and is empty"),
        ('{"messages": [{"role": "user", "content": null}]}\n', "line 1: messages[0], of the user, has no content"),
        ('{"messages": [{"role": "system"}]}\n', "line 1: messages[0], of the system, has no content"),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function"}]}\n',
            "tools[0] is to be an object with a function",
        ),
        (
            '{"messages": [{"role": "user", "content": "a"}], "tools": "none"}\n',
            "tools is a string, and no JSON of a list: 'none'",
        ),
        ('{"messages": [{"role": "assistant", "tool_calls": ["f"]}]}\n', "messages[0].tool_calls is to be a list of objects"),
        (
            '{"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "2"}}]}]}\n',
            "messages[0], arguments of f is a string, and no JSON of an object",
        ),
    ],
)
def test_what_cannot_be_read_is_refused_by_its_line_and_nobody_else_speaks(
    content: str, says: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_text(content)

    def read_all() -> list[Any]:
        rows = read(file)
        return [rows[index] for index in range(len(rows))]

    with pytest.raises(ValueError, match=re.escape(says)):
        read_all()
    assert capfd.readouterr() == ("", "")


def test_an_example_of_a_parquet_file_is_named_by_its_number(tmp_path: Path) -> None:
    datasets.Dataset.from_list([{"text": "a"}, {"text": None}]).to_parquet(tmp_path / "data.parquet")
    with pytest.raises(ValueError, match=r"data\.parquet, example 2: it has no text"):
        read(tmp_path / "data.parquet")[1]


def test_other_files_and_missing_ones_are_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file"):
        read(tmp_path / "data.jsonl")
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match=r"data is read from \.jsonl"):
        read(tmp_path / "data.csv")


def test_without_datasets_it_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "data.parquet"
    datasets.Dataset.from_list([{"text": "a"}]).to_parquet(data)
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'anyfit[finetune]'")):
        read(data)
    assert read(tiny.write(tmp_path / "data.jsonl", [{"text": "a"}]))[0] == Plain("", "a")


def test_strings_stay_as_they_are_written_whatever_they_look_like(tmp_path: Path) -> None:
    """And whatever else is in their column."""
    answers = ["2024-01-01T10:00:00Z", "2024-01-01", "000", "10.50", "true", "null", "1e3", " 7 ", "\u00e9\u2028x"]
    chats = [[{"role": "user", "content": each}, {"role": "assistant", "content": each}] for each in answers]
    rows = read(tiny.write(tmp_path / "chats.jsonl", [{"messages": chat, "id": index} for index, chat in enumerate(chats)]))
    assert [rows[index] for index in range(len(rows))] == list(map(Chat, chats))
    for kind in ("lines", "list"):
        found = [{"instruction": each, "input": each, "output": each} for each in answers]
        file = tmp_path / f"{kind}.jsonl"
        file.write_text("\n".join(map(json.dumps, found)) if kind == "lines" else json.dumps(found, indent=1))
        rows = read(file)
        assert [rows[index] for index in range(len(rows))] == [Plain(f"{each}\n\n{each}", each) for each in answers]


def test_a_file_in_another_encoding_is_refused_by_its_line(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_bytes(b'{"text": "cafe"}\n' + '{"text": "caf\u00e9"}\n'.encode("latin-1"))
    with pytest.raises(ValueError, match=r"line 2: not UTF-8 \(byte 0xe9 in column 14\); convert it: iconv -f latin1 -t utf-8"):
        read(tmp_path / "data.jsonl")
    (tmp_path / "marked.jsonl").write_bytes('\ufeff{"text": "caf\u00e9"}\r\n'.encode())
    assert read(tmp_path / "marked.jsonl")[0] == Plain("", "caf\u00e9")


# ---------------------------------------------------------------------- tokens


def encoded(row: Any, tmp_path: Path, *, template: str | None = tiny.TEMPLATE, length: int | None = None) -> list[Sample]:
    rows = read(tiny.write(tmp_path / "data.jsonl", [row]))
    samples, counted = samples_of(rows, range(len(rows)), tiny.tokenizer(template))
    return samples if length is None else shortened(samples, length, counted, is_text=rows.kind == "text")


def told(sample: Sample) -> tuple[str, str]:
    """All of a sample, and what is learnt of it."""
    tokenizer = tiny.tokenizer()
    return tokenizer.decode(sample.ids), tokenizer.decode(sample.ids[sample.is_answer])


TWICE = [*CHAT, {"role": "user", "content": "and?"}, {"role": "assistant", "content": "bye"}, {"role": "user", "content": "ok"}]
ASKED = "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize(
    ("row", "template", "expected"),
    [
        ({"messages": CHAT}, tiny.TEMPLATE, [(f"{ASKED}yo<|im_end|>\n", "yo<|im_end|>\n")]),
        (
            {"messages": TWICE},
            tiny.TEMPLATE,
            [
                (
                    f"{ASKED}yo<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\nbye<|im_end|>\n",
                    "yo<|im_end|>\nbye<|im_end|>\n",
                )
            ],
        ),
        (  # the template shows an earlier answer in another way than the last: each is learnt as it will be written
            {"messages": TWICE},
            tiny.REASONING_TEMPLATE,
            [
                (f"{ASKED}<think></think>yo<|im_end|>\n", "<think></think>yo<|im_end|>\n"),
                (
                    f"{ASKED}yo<|im_end|>\n<|im_start|>user\nand?<|im_end|>\n<|im_start|>assistant\n"
                    "<think></think>bye<|im_end|>\n",
                    "<think></think>bye<|im_end|>\n",
                ),
            ],
        ),
        ({"prompt": TWICE[:3], "completion": TWICE[3:4]}, tiny.TEMPLATE, [(None, "bye<|im_end|>\n")]),
        ({"prompt": "hi", "completion": "yo"}, tiny.TEMPLATE, [(f"{ASKED}yo<|im_end|>\n", "yo<|im_end|>\n")]),
        ({"prompt": "hi", "completion": "yo"}, None, [("hiyo<|im_end|>", "yo<|im_end|>")]),
        ({"instruction": "hi", "output": "yo"}, tiny.TEMPLATE, [(f"{ASKED}yo<|im_end|>\n", "yo<|im_end|>\n")]),
        ({"text": "hé!"}, tiny.TEMPLATE, [("hé!<|im_end|>", None)]),
        ({"messages": CHAT[:1]}, tiny.TEMPLATE, []),
    ],
)
def test_only_answers_are_learnt(row: Any, template: str | None, expected: Any, tmp_path: Path) -> None:
    found = [told(sample) for sample in encoded(row, tmp_path, template=template)]
    assert len(found) == len(expected)
    for (all_of_it, learnt), (whole, answer) in zip(found, expected, strict=True):
        assert whole is None or all_of_it == whole
        assert learnt == (answer if answer is not None else tiny.tokenizer().decode(encoded(row, tmp_path)[0].ids[1:]))


def test_an_empty_answer_is_none_and_is_counted(tmp_path: Path) -> None:
    turns = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": ""}]
    for name, empty, other in (
        ("instructions", {"instruction": "a", "output": ""}, {"instruction": "a", "output": "b"}),
        ("chats", {"messages": turns}, {"messages": CHAT}),
        ("texts", {"text": ""}, {"text": "a"}),
    ):
        rows = read(tiny.write(tmp_path / f"{name}.jsonl", [empty, other]))
        samples, counted = samples_of(rows, range(2), tiny.tokenizer())
        assert (len(samples), counted.unanswered) == (1, 1)


def test_a_long_text_is_cut_in_pieces_and_a_long_answer_ends_early(tmp_path: Path) -> None:
    pieces = encoded({"text": "abcdefghij"}, tmp_path, length=4)
    assert [told(piece)[0] for piece in pieces] == ["abcd", "efgh", "ij<|im_end|>"]
    assert [told(piece)[1] for piece in pieces] == ["bcd", "fgh", "j<|im_end|>"]
    answers = encoded({"prompt": "ask", "completion": "abcdefghij"}, tmp_path, template=None, length=6)
    assert [told(answer) for answer in answers] == [("askabc", "abc")]
    assert encoded({"prompt": "a long question", "completion": "b"}, tmp_path, template=None, length=6) == []


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (None, "line 1: it is a chat, and the tokenizer has no chat template"),
        ("{{ raise_exception('roles must alternate') }}", "line 1: the chat template refuses it: roles must alternate"),
        ("{% if add_generation_prompt %}A:{% else %}B:{% endif %}", "shows an answer in another way than it asks for it"),
    ],
)
def test_a_chat_that_cannot_be_shown_is_refused_by_its_line(template: str | None, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=says):
        encoded({"messages": CHAT}, tmp_path, template=template)


# ---------------------------------------------------------------------- tools

TAKES = {"type": "object", "properties": {"city": {"type": "string"}}}
WEATHER = {"type": "function", "function": {"name": "weather", "parameters": TAKES}}
CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Paris"}}}
CALLED = [
    {"role": "user", "content": "hot?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "name": "weather", "content": "31"},
    {"role": "assistant", "content": "yes"},
]
# Marks itself what the assistant says, so that transformers knows too.
WITH_TOOLS = (
    "{% if tools %}tools {{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.role == 'assistant' %}{% generation %}{{ message.content }}"
    "{% for call in message.tool_calls %}<call>{{ call.function | tojson }}</call>{% endfor %}<|im_end|>\n{% endgeneration %}"
    "{% else %}{{ message.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize("format", ["jsonl", "parquet"])
@pytest.mark.parametrize("is_text", [False, True], ids=["objects", "strings"])
def test_of_chats_with_tools_calls_and_answers_are_learnt_as_transformers_marks_them(
    format: str, is_text: bool, tmp_path: Path
) -> None:
    """Also beside a chat of other tools, whose fields a parquet file gives to all, and where JSON comes as a string."""
    other = {"type": "function", "function": {"name": "now", "arguments": {"zone": "UTC"}}}
    chats = [(CALLED, [WEATHER]), ([CALLED[0], {**CALLED[1], "tool_calls": [other]}], [])]
    rows: list[Any] = [{"messages": messages, "tools": tools} for messages, tools in chats]
    if is_text:
        written = {"name": "weather", "arguments": json.dumps(CALL["function"]["arguments"])}  # type: ignore[index]
        called = [CALLED[0], {**CALLED[1], "tool_calls": [{**CALL, "function": written}]}, *CALLED[2:]]
        rows, chats = [{"messages": called, "tools": json.dumps([WEATHER])}], chats[:1]
    file = tmp_path / f"data.{format}"
    if format == "parquet":
        datasets.Dataset.from_list(rows).to_parquet(file)
    else:
        tiny.write(file, rows)
    tokenizer = tiny.tokenizer(WITH_TOOLS)
    read_back = read(file)
    samples, counted = samples_of(read_back, range(len(rows)), tokenizer)
    assert read_back.unread == ()
    assert counted.unanswered == 0
    for sample, (messages, tools) in zip(samples, chats, strict=True):
        known = tokenizer.apply_chat_template(messages, tools=tools or None, return_dict=True, return_assistant_tokens_mask=True)
        assert sample.ids.tolist() == known["input_ids"]
        assert sample.is_answer.tolist() == list(map(bool, known["assistant_masks"]))


@pytest.mark.parametrize(
    ("name", "learnt"),
    [
        ("qwen2_5", '<tool_call>\n{"name": "weather", "arguments": {"city": "Paris"}}\n</tool_call><|im_end|>\nyes<|im_end|>\n'),
        ("llama3_1", '{"name": "weather", "parameters": {"city": "Paris"}}<|eot_id|>yes<|eot_id|>'),
    ],
)
def test_templates_that_models_come_with_show_calls(name: str, learnt: str, tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text()
    (sample,) = encoded({"messages": CALLED, "tools": [WEATHER]}, tmp_path, template=template)
    assert learnt in told(sample)[1]
    assert "31" not in told(sample)[1]


@pytest.mark.parametrize(
    ("template", "says"),
    [
        (
            WITH_TOOLS.replace("{% if tools %}", "{% if false %}"),
            "line 1: the chat template does not show the tool weather; use a",
        ),
        (
            WITH_TOOLS.replace("in message.tool_calls", "in []"),
            "line 1: the chat template does not show the call of weather; use",
        ),
        (
            WITH_TOOLS.replace("in messages %}", "in messages if message.role != 'tool' %}"),
            "line 1: the chat template does not show what a tool answers; use",
        ),
        (
            WITH_TOOLS.replace("{{ message.content }}{% for", "{{ message.content + 1 }}{% for"),
            "line 1: the chat template refuses",
        ),
    ],
)
def test_what_a_template_cannot_show_of_tools_is_refused_by_name(template: str, says: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(says)):
        encoded({"messages": CALLED, "tools": [WEATHER]}, tmp_path, template=template)


def test_an_instruction_with_tools_is_a_chat(tmp_path: Path) -> None:
    (sample,) = encoded({"prompt": "hi", "completion": "yo", "tools": [WEATHER]}, tmp_path, template=WITH_TOOLS)
    assert told(sample)[0].startswith("tools [")
    assert told(sample)[1] == "yo<|im_end|>\n"
