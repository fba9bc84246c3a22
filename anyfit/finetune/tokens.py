"""Examples to samples: tokens, and which of them are answers. Only answers are learnt.

A chat goes through the tokenizer's own template. An answer is what the template adds for it to the prompt that asks for it: so a
sample is, token by token, what the model will read and write when it is used. Some templates show earlier turns in another way
than the last (they leave reasoning out): then every answer becomes a sample of its own, with all that goes before it.

An instruction is a chat of one turn where the tokenizer has a template, and else its prompt with the completion after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy
from numpy.typing import NDArray

from .examples import Chat, Examples, Plain, names_of

Ids = NDArray[numpy.int32]
VOCABULARIES = ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model")
Span = tuple[int, int]  # of characters


@dataclass(frozen=True, eq=False)
class Sample:
    ids: Ids
    is_answer: NDArray[numpy.bool_]  # by token; never the first, which nothing predicts

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def learnt(self) -> int:
        """Tokens that count in the loss."""
        return int(self.is_answer.sum())

    @property
    def asked(self) -> int:
        """Tokens before the first answer."""
        return int(self.is_answer.argmax())

    def part(self, start: int, stop: int) -> Sample:
        return _sample(self.ids[start:stop], self.is_answer[start:stop])


def _sample(ids: Sequence[int] | Ids, is_answer: Sequence[bool] | NDArray[numpy.bool_]) -> Sample:
    marks = numpy.array(is_answer, dtype=numpy.bool_)
    marks[:1] = False
    return Sample(numpy.array(ids, dtype=numpy.int32), marks)


@dataclass
class Counted:
    """What became of the examples."""

    examples: int = 0
    split: int = 0  # chats of several samples
    unanswered: int = 0  # examples that have nothing to learn
    shortened: int = 0  # samples that were longer than a row of a batch
    cut_off: int = 0  # samples whose answer is behind what is left of them


def tokenizer_of(folder: Path) -> Any:
    import transformers

    if not any((folder / name).is_file() for name in VOCABULARIES):  # transformers would make one that knows no word
        raise FileNotFoundError(f"{folder} holds no tokenizer: none of {', '.join(VOCABULARIES)}; fetch it with the model")
    try:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(f"{folder} holds no tokenizer that transformers can read (tokenizer.json): {first}") from error
    if not getattr(tokenizer, "is_fast", False):
        raise ValueError(
            f"{folder} has a {type(tokenizer).__name__}, which cannot tell which characters a token is of; a folder with a "
            "tokenizer.json is needed"
        )
    if tokenizer.eos_token_id is None:
        raise ValueError(f"the tokenizer of {folder} has no token for the end: set eos_token in its tokenizer_config.json")
    return tokenizer


def samples_of(examples: Examples, indices: Sequence[int], tokenizer: Any) -> tuple[list[Sample], Counted]:
    """The samples of these examples that have something to learn, as long as they are."""
    found: list[Sample] = []
    counted = Counted(examples=len(indices))
    for index in indices:
        example = examples[index]
        try:
            samples = [each for each in _samples(example, tokenizer) if each.learnt] if example.answers else []
        except ValueError as error:
            raise ValueError(f"{examples.where(index)}: {error}") from None
        counted.split += len(samples) > 1
        counted.unanswered += not samples
        found += samples
    return found, counted


def shortened(samples: Sequence[Sample], length: int, counted: Counted, *, is_text: bool) -> list[Sample]:
    """The same, none longer than `length`: a text is cut in pieces, an answer ends there. Only those with something to learn."""
    pieces: list[Sample] = []
    for sample in samples:
        counted.shortened += not is_text and len(sample) > length
        pieces += [sample.part(start, start + length) for start in range(0, len(sample) if is_text else 1, length)]
    kept = [piece for piece in pieces if piece.learnt]
    counted.cut_off += len(pieces) - len(kept)
    return kept


def _samples(example: Chat | Plain, tokenizer: Any) -> Iterator[Sample]:
    if isinstance(example, Chat):
        yield from _of_chat(example, tokenizer)
    elif example.prompt and tokenizer.chat_template:
        turns = [{"role": "user", "content": example.prompt}, {"role": "assistant", "content": example.completion}]
        yield from _of_chat(Chat(turns), tokenizer)
    else:
        yield _of_plain(example, tokenizer)


def _of_plain(example: Plain, tokenizer: Any) -> Sample:
    text, end = example.prompt + example.completion, tokenizer.eos_token_id
    ids, marks = _tokens(text, [(len(example.prompt), len(text))], tokenizer, special=True)
    if not ids or ids[-1] != end:
        ids.append(end)
        marks.append(True)
    marks[-1] = True
    return _sample(ids, marks)


def _of_chat(chat: Chat, tokenizer: Any) -> Iterator[Sample]:
    if not tokenizer.chat_template:
        raise ValueError(
            "it is a chat, and the tokenizer has no chat template; put the chat_template.jinja of a model that chats into the "
            "folder, or give examples of prompt and completion"
        )
    turns: list[tuple[int, str]] = []  # for each answer, the characters before it, and all up to its end
    for index, message in enumerate(chat.messages):
        if message["role"] == "assistant" and index >= chat.answers_from:
            prompt, through = _shown(chat, index, tokenizer, asks=True), _shown(chat, index + 1, tokenizer)
            if not through.startswith(prompt):
                raise ValueError(
                    "the chat template shows an answer in another way than it asks for it (add_generation_prompt); mend the "
                    "template, or give examples of text"
                )
            unshown = [name for name in names_of(message.get("tool_calls", ())) if name not in through[len(prompt) :]]
            if unshown:
                raise ValueError(_no_tools(f"the call of {unshown[0]}"))
            turns.append((len(prompt), through))
    if not turns:
        return
    _refuse_unshown(chat, tokenizer)
    last = turns[-1][1]
    if all(last.startswith(through) for _, through in turns):
        yield _sample(*_tokens(last, [(start, len(through)) for start, through in turns], tokenizer))
    else:
        for start, through in turns:
            yield _sample(*_tokens(through, [(start, len(through))], tokenizer))


def _refuse_unshown(chat: Chat, tokenizer: Any) -> None:
    """Tools and their answers, where a template leaves them out without a word."""
    others = [each for each in chat.messages if each["role"] != "tool"]
    without = {f"the tool {names_of(chat.tools)[0]}": replace(chat, tools=())} if chat.tools else {}
    if len(others) < len(chat.messages):
        without["what a tool answers"] = replace(chat, messages=others)
    for what, other in without.items():
        if _shown(other, None, tokenizer) == _shown(chat, None, tokenizer):
            raise ValueError(_no_tools(what))


def _no_tools(what: str) -> str:
    return f"the chat template does not show {what}; use a model whose template has tools, or leave them out"


def _shown(chat: Chat, count: int | None, tokenizer: Any, *, asks: bool = False) -> str:
    """So many messages of a chat, or all."""
    from jinja2.exceptions import TemplateError

    messages = [dict(each) for each in chat.messages[:count]]
    try:
        text: str = tokenizer.apply_chat_template(
            messages, tools=list(chat.tools) or None, tokenize=False, add_generation_prompt=asks
        )
    except (TemplateError, TypeError, KeyError) as error:  # the latter where it takes a message for another kind
        raise ValueError(f"the chat template refuses it: {error}") from None
    return text


def _tokens(text: str, answers: Sequence[Span], tokenizer: Any, *, special: bool = False) -> tuple[list[int], list[bool]]:
    """Tokens of a text, and whether each has a character of an answer."""
    encoded = tokenizer(text, add_special_tokens=special, return_offsets_mapping=True)
    marks = [
        any(end > first and start < last for first, last in answers) and end > start for start, end in encoded["offset_mapping"]
    ]
    return list(encoded["input_ids"]), marks
