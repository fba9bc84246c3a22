"""C++ as a shared library: built when it is first wanted, kept in the cache folder, loaded with ctypes.

A source holds variants for several processors and picks one when it runs, so a cache in a shared home serves every machine of
the same kind. Several processes may build at once: each writes its own file, and the last to put it in place wins.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path

from anyfit.values.folder import cache_folder

# Contraction would fuse what torch does not fuse; the two -fno- flags change no number, and let square roots be vectors.
FLAGS = ("-std=c++17", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fopenmp-simd")
LINKED = ("-fPIC", "-shared", "-pthread")
BUILD_SECONDS = 300


class NotBuilt(Exception):  # noqa: N818  (an answer, not a fault)
    """Why there is no library, in a few words."""


def library(source: Path) -> ctypes.CDLL:
    """The library of a C++ file, from the cache where it is there. NotBuilt where it cannot be had."""
    compiler = find_compiler()
    file = cache_folder() / "kernels" / f"{source.stem}-{_key(source, compiler)}.so"
    if file.exists():
        try:
            return ctypes.CDLL(str(file))
        except OSError:
            pass  # of another C library, or damaged: built again
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _built(source, compiler, file)
    except OSError:  # a cache that cannot be written is not worth a slower update
        with tempfile.TemporaryDirectory() as folder:  # a loaded library needs its file no more
            return _built(source, compiler, Path(folder) / file.name)


def _built(source: Path, compiler: list[str], file: Path) -> ctypes.CDLL:
    handle, name = tempfile.mkstemp(dir=file.parent, prefix=f".{file.stem}-", suffix=".so")
    os.close(handle)
    unfinished = Path(name)
    try:
        _said([*compiler, *FLAGS, *LINKED, str(source), "-o", name])
        try:
            loaded = ctypes.CDLL(name)
        except OSError as error:
            raise NotBuilt(f"what {compiler[0]} built does not load: {error}") from error
        unfinished.replace(file)
        return loaded
    finally:
        unfinished.unlink(missing_ok=True)


def find_compiler() -> list[str]:
    """$CXX, or the first of the usual names."""
    given = shlex.split(os.environ.get("CXX", ""))
    for words in [given] if given else [["g++"], ["c++"], ["clang++"]]:
        if shutil.which(words[0]):
            return words
    raise NotBuilt(f"CXX={given[0]} is not there" if given else "no C++ compiler (g++, c++, clang++, or $CXX)")


def _key(source: Path, compiler: list[str]) -> str:
    """A short name for all that the library depends on."""
    version = _said([*compiler, "--version"])
    parts = [source.read_text(), *compiler, version, *FLAGS, *LINKED, platform.system(), platform.machine(), *platform.libc_ver()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _said(command: list[str]) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=BUILD_SECONDS, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise NotBuilt(f"{command[0]} did not run: {error}") from error
    if done.returncode:
        lines = done.stderr.splitlines() or ["no message"]
        said = next((line for line in lines if "error" in line.lower()), lines[0])
        raise NotBuilt(f"{command[0]} failed: {said.strip()}")
    return done.stdout
