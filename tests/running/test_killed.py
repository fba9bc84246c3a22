"""SIGKILL at any moment around and during saving: there is always a whole checkpoint, and nothing is left behind."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

from anyfit.running import checkpoint
from tests.conftest import FULL

from .killed import KEEP, KEEP_EVERY

KILLS = 30 if FULL else 4


def start(folder: Path, root: Path, most: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.running.killed", str(folder), str(most)]
    return subprocess.Popen(command, cwd=root, stdout=subprocess.PIPE, text=True)


def killed(folder: Path, root: Path, seed: int) -> list[tuple[str, int]]:
    """A process that saves until it is killed, at a random moment after a random number of saves; what it said until then."""
    generator = random.Random(seed)
    said, saves = [], generator.randrange(1, 8)
    with start(folder, root, 10_000) as process:
        assert process.stdout is not None
        for line in process.stdout:
            said.append(line)
            saves -= line.startswith("saving")
            if not saves:
                break
        if seed % 2:
            stop_while_it_writes(process, folder, generator)
        else:
            time.sleep(generator.random() * 0.15)
        process.send_signal(signal.SIGKILL)
        said += process.stdout.readlines()
    assert process.returncode == -signal.SIGKILL, said
    return [(line.split()[0], int(line.split()[1])) for line in said]


def stop_while_it_writes(process: subprocess.Popen[str], folder: Path, generator: random.Random) -> None:
    """Stop the process at a random moment of a save. A moment that misses lets it go on to the next save."""
    while process.poll() is None:
        while process.poll() is None and not any(folder.glob(".*.writing")):
            pass
        time.sleep(generator.random() * 0.01)
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)
        if any(folder.glob(".*.writing")):
            return
        process.send_signal(signal.SIGCONT)


def test_a_process_killed_at_any_moment_leaves_a_whole_checkpoint_and_loses_none(tmp_path: Path, root: Path) -> None:
    folder, saved, was_interrupted = tmp_path / "checkpoints", set[int](), 0
    for seed in range(KILLS):
        before, _ = checkpoint.newest(folder)
        said = killed(folder, root, seed)
        assert said[0] == ("resumed", 0 if before is None else int(before.name))
        saved |= {step for what, step in said if what == "saved"}
        was_interrupted += any(folder.glob(".*"))
        found, skipped = checkpoint.newest(folder)
        assert skipped == []
        if saved:
            assert found is not None
            assert int(found.name) >= max(saved)
            newest = sorted({*saved, int(found.name)})[-KEEP:]
            kept = {step for step in saved if step % KEEP_EVERY == 0 or step in newest}
            for step in kept:
                checkpoint.check(folder / f"{step:08d}")
            saved = kept | {int(found.name)}
    process = start(folder, root, 1)
    said = process.communicate(timeout=120)[0]
    assert process.returncode == 0, said
    assert all(path.name.isdecimal() for path in folder.iterdir())
    assert was_interrupted >= KILLS // 2  # else this was no test of being killed while saving
