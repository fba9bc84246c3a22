"""The tiny Qwen3, its tokenizer and its chats, as examples/tiny_qwen3.py makes them: nothing is downloaded."""

from __future__ import annotations

import json
import runpy
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

EXAMPLE = Path(__file__).parents[2] / "examples" / "tiny_qwen3.py"
_made = runpy.run_path(str(EXAMPLE), run_name="tiny_qwen3")
TEMPLATE: str = _made["TEMPLATE"]
# As Qwen3 does it: reasoning is shown in the last turn alone.
REASONING_TEMPLATE = TEMPLATE.replace(
    "{{ message.content }}",
    "{% if message.role == 'assistant' and loop.last %}<think></think>{% endif %}{{ message.content }}",
)


def tokenizer(template: str | None = TEMPLATE) -> Any:
    return _made["tokenizer"](template)


def config() -> Any:
    return _made["config"]()


def chats(count: int) -> list[Mapping[str, Any]]:
    return [_made["chat"](index) for index in range(count)]


def write(path: Path, rows: Iterable[Mapping[str, Any]]) -> Path:
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path
