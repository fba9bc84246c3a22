"""What mkdocs does besides: README.md is the first page, and links to files that are no pages become their paths."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parent.parent
LINK = re.compile(r"(?<!!)\[([^\]]+)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    readme = (ROOT / "README.md").read_text()
    files.append(File.generated(config, "index.md", content=readme.replace("](docs/", "](")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    def shown(found: re.Match[str]) -> str:
        text, target = found[1], found[2]
        if "://" in target or target.startswith("#") or files.get_file_from_path(target.partition("#")[0]) is not None:
            return found[0]
        inside = target.removeprefix("../").partition("#")
        if inside[0] == "README.md":
            return f"[{text}](index.md{inside[1]}{inside[2]})"
        return text if inside[0] in text else f"{text} (`{inside[0]}`)"

    return LINK.sub(shown, markdown)
