"""Who uses a run folder: one launch at a time, named in a file of it while it runs.

The file, read and written under a lock, holds the process, its start and its host. Another process refuses the folder, unless the
one in the file started it (a launcher of ranks) or is gone: one of another host is when it no longer touches the file.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

FILE = ".in-use"
TOUCH_SECONDS = 15.0
LOOK_SECONDS = 1.0
GONE_SECONDS = 60.0  # without a touch, for a process that cannot be looked for
_WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS, errno.EINVAL)

_held: dict[Path, int] = {}  # files of this process, with its number: a fork is another
_over = threading.Event()


@dataclass(frozen=True)
class Holder:
    pid: int
    started: float | None
    host: str

    @classmethod
    def this(cls) -> Holder:
        return cls(os.getpid(), _started(os.getpid()), _host())

    @property
    def is_elsewhere(self) -> bool:
        return self.host != _host()

    @property
    def is_gone(self) -> bool:
        """Whether it is known to be gone: another process may have its number."""
        if self.is_elsewhere:
            return False
        started = _started(self.pid)
        return started is None or self.started is None or abs(started - self.started) > 1.0

    @property
    def is_of_this(self) -> bool:
        mine = psutil.Process()
        return not self.is_elsewhere and self.pid in [mine.pid, *(parent.pid for parent in mine.parents())]

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host.partition(' ')[0]}"


def take(folder: Path, say: Callable[[str], None]) -> None:
    """Claims a run folder for this process, or raises where another one uses it."""
    file = folder / FILE
    if not _took(file, folder, say):
        return
    if not _held:
        atexit.register(release_all)
        _over.clear()
        threading.Thread(target=_touch, name="anyfit run folder", daemon=True).start()
    _held[file] = os.getpid()


def _took(file: Path, folder: Path, say: Callable[[str], None]) -> bool:
    """Whether this process took it; False where the process that started it has it."""
    touched = since = 0.0
    while True:
        with _opened(file) as found:
            holder = _read(found)
            if holder is None or holder.is_gone or (since and time.monotonic() - since > GONE_SECONDS):
                if holder is not None:
                    say(f"took {folder} over from {holder}, which is gone")
                os.ftruncate(found, 0)
                os.pwrite(found, json.dumps(asdict(Holder.this())).encode(), 0)
                return True
            if holder.is_of_this:
                return False
            before, touched = touched, os.fstat(found).st_mtime
        if not holder.is_elsewhere or (since and touched != before):
            raise FileExistsError(f"{folder} is in use by {holder}; wait until it ends, or choose another --folder for a new run")
        if not since:
            say(f"{folder} was in use by {holder}: looking for {GONE_SECONDS:.0f} s whether it still is")
            since = time.monotonic()
        time.sleep(LOOK_SECONDS)


def release_all() -> None:
    for file, pid in list(_held.items()):
        if pid != os.getpid():
            continue
        del _held[file]
        with contextlib.suppress(OSError):
            file.unlink()
    if not _held:
        _over.set()
        atexit.unregister(release_all)


def _touch() -> None:
    while not _over.wait(TOUCH_SECONDS):
        for file in list(_held):
            with contextlib.suppress(OSError):
                os.utime(file)


@contextlib.contextmanager
def _opened(file: Path) -> Iterator[int]:
    """The file, locked: no other process reads or writes it meanwhile."""
    while True:
        found = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            try:
                fcntl.flock(found, fcntl.LOCK_EX)
            except OSError as error:
                if error.errno not in _WITHOUT_LOCKS:
                    raise
            if os.fstat(found).st_nlink:  # else who had it has let go of it meanwhile
                yield found
                return
        finally:
            os.close(found)


def _read(found: int) -> Holder | None:
    try:
        told = json.loads(os.pread(found, 4096, 0))
        return Holder(int(told["pid"]), float(told["started"]), str(told["host"]))
    except (ValueError, KeyError, TypeError):
        return None  # just made, or cut short when its process died


def _host() -> str:
    """Where process numbers are unique: a machine, and a container of it."""
    with contextlib.suppress(OSError):
        return f"{socket.gethostname()} {Path('/proc/self/ns/pid').readlink()}"
    return socket.gethostname()


def _started(pid: int) -> float | None:
    try:
        process = psutil.Process(pid)
        return None if process.status() == psutil.STATUS_ZOMBIE else process.create_time()
    except psutil.Error:
        return None
