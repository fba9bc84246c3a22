"""Files that are written while the user's code is only tried lie aside, and are gone afterwards.

Whatever this thread opens for writing with `open`, through pathlib and numpy too, is a copy in a folder of its own, where it is
read again as well; `torch.save` writes nothing, and folders that were made go. Other threads write as ever. What extension
modules write by themselves is not seen.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import io
import os
import shutil
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

OWN_FILES = ("torch._", "triton", "anyfit.")  # compilers and their caches, and ours


@contextmanager
def writing_aside() -> Iterator[Aside]:
    import torch

    with tempfile.TemporaryDirectory(prefix="anyfit-") as folder:
        aside = Aside(folder, torch.save)
        patches: list[tuple[Any, str, Any]] = [
            (builtins, "open", aside.open),
            (io, "open", aside.open),
            (os, "replace", functools.partial(aside.rename, os.replace)),
            (os, "rename", functools.partial(aside.rename, os.rename)),
            (os, "remove", functools.partial(aside.remove, os.remove)),
            (os, "unlink", functools.partial(aside.remove, os.unlink)),
            (os, "mkdir", aside.mkdir),
            (torch, "save", aside.save),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in patches]
        for owner, name, patch in patches:
            setattr(owner, name, patch)
        try:
            yield aside
        finally:
            for owner, name, original in before:
                setattr(owner, name, original)
            aside.leave()


class Aside:
    def __init__(self, folder: str, save: Any) -> None:
        self._folder, self._thread = os.path.realpath(folder), threading.get_ident()
        self._files: dict[str, str] = {}  # by real path, where it lies meanwhile
        self.read_again: str | None = None  # a file that was written meanwhile
        self._made = 0
        self._folders: list[str] = []  # made meanwhile
        self._open, self._mkdir, self._save = io.open, os.mkdir, save

    def _is_ours(self) -> bool:
        """The user's code in this thread asks, or a library for it: the first outside the standard library says."""
        frame = sys._getframe(2)
        while frame.f_back is not None and _name(frame).partition(".")[0] in sys.stdlib_module_names:
            frame = frame.f_back
        return threading.get_ident() == self._thread and not _name(frame).startswith(OWN_FILES)

    def open(self, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if isinstance(file, int) or not self._is_ours():
            return self._open(file, mode, *args, **kwargs)
        path = os.path.realpath(os.fsdecode(file))
        if path.startswith(("/dev/", self._folder)):
            return self._open(file, mode, *args, **kwargs)
        if set(mode) & set("wax+"):
            return self._open(self._beside(path, mode), mode, *args, **kwargs)
        if path in self._files:
            self.read_again = os.fsdecode(file)
        return self._open(self._files.get(path, file), mode, *args, **kwargs)

    def _beside(self, path: str, mode: str) -> str:
        if path in self._files:
            return self._files[path]
        real = Path(path)
        if "x" in mode and real.exists():
            raise FileExistsError(f"[Errno 17] File exists: {path!r}")
        if not real.parent.is_dir():
            raise FileNotFoundError(f"[Errno 2] No such file or directory: {path!r}")
        place = f"{self._folder}{os.sep}{self._made}"
        self._made += 1
        if real.is_file() and "w" not in mode:
            shutil.copyfile(path, place)
        self._files[path] = place
        return place

    def rename(self, really: Any, source: Any, target: Any, **kwargs: Any) -> None:
        path = os.path.realpath(source)
        if self._is_ours() and path in self._files:
            self._files[os.path.realpath(target)] = self._files.pop(path)
        else:
            really(source, target, **kwargs)

    def remove(self, really: Any, path: Any, **kwargs: Any) -> None:
        if self._is_ours() and not isinstance(path, int) and os.path.realpath(path) in self._files:
            del self._files[os.path.realpath(path)]
        else:
            really(path, **kwargs)

    def mkdir(self, path: Any, *args: Any, **kwargs: Any) -> None:
        self._mkdir(path, *args, **kwargs)
        if self._is_ours():
            self._folders.append(os.fspath(path))

    def save(self, obj: object, f: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() != self._thread:
            self._save(obj, f, *args, **kwargs)

    def leave(self) -> None:
        for folder in reversed(self._folders):
            with contextlib.suppress(OSError):
                Path(folder).rmdir()


def _name(frame: Any) -> str:
    return str(frame.f_globals.get("__name__", ""))
