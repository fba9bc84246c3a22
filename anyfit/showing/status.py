"""One line at the bottom of a terminal: what is being done, and for how long. It is gone when the work is."""

from __future__ import annotations

import os
import shutil
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

from anyfit.values.doing import heard_by, is_heard, now

EVERY_SECONDS = 0.5
CLEAR = "\r\x1b[2K"


@contextmanager
def status_line(terminal: TextIO | None = None) -> Iterator[None]:
    """Inside, what is being done is shown, on stderr where that is a terminal; nowhere else, and not beside something that shows
    it already."""
    terminal = (
        sys.__stderr__ if terminal is None else terminal
    )  # not what libraries put in its place, which would keep lines back
    if is_heard() or terminal is None or not terminal.isatty() or not _is_first_rank():
        yield
        return
    line = StatusLine(terminal)
    try:
        with heard_by(line.show):
            yield
    finally:
        line.close()


class StatusLine:
    """Drawn at once when the work changes, and again as the seconds pass."""

    def __init__(self, terminal: TextIO) -> None:
        self._terminal, self._began, self._lock = terminal, time.monotonic(), threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._tick, name="anyfit status", daemon=True)
        self._thread.start()

    def show(self, doing: str | None) -> None:
        with self._lock:
            self._write("" if doing is None else self._text(doing))

    def _tick(self) -> None:
        while not self._over.wait(EVERY_SECONDS):
            if (doing := now()) is not None:
                self.show(doing)

    def _text(self, doing: str) -> str:
        text = f"anyfit: {doing}, {time.monotonic() - self._began:.0f} s"
        return text[: shutil.get_terminal_size().columns - 1]

    def _write(self, text: str) -> None:
        """With the cursor at its beginning: what a program prints meanwhile begins there."""
        self._terminal.write(f"{CLEAR}{text}\r")
        self._terminal.flush()

    def close(self) -> None:
        self._over.set()
        self._thread.join()
        self._write("")


def _is_first_rank() -> bool:
    return all(os.environ.get(name, "0") == "0" for name in ("RANK", "SLURM_PROCID"))
