"""How a run was launched: its place among the ranks, its folder, and what happens when it is told to stop.

`anyfit fit` opens a `Launch` around the demo or the user's script, and `anyfit.start` picks it up; plain `python` and torchrun
have none. After each step it writes metrics, saves when it is time, and, after a signal (Ctrl-C, a cluster's preemption), saves
and ends with that signal's status. Every rank has one: all save, and all end after the same step; rank 0 alone writes the
folder's files and reports. A script's first run has the folder itself, its second `run-2` in it, and so on: --resume finds each
one's checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import os
import re
import shlex
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from anyfit.values.disk_folder import DiskFolder
from anyfit.values.machine import Machine
from anyfit.values.plan import Plan
from anyfit.values.units import show_bytes, show_seconds

from . import claim, lines

if TYPE_CHECKING:
    import torch

    from .run import Run
    from .saves import Saves
    from .saving import Saving
    from .team import Team

SLURM_PORTS = range(20_000, 30_000)  # of which the job's and step's numbers choose one
WINDOW = 50  # steps that make up what is normal
SPIKE = 6.0  # standard deviations above the window's mean that count as a spike …
SPIKE_SHARE = 0.2  # … and at least this share above it, so that a flat curve does not cry wolf


@dataclass(frozen=True)
class Rank:
    """This process among those of the run, from torchrun's or Slurm's environment."""

    index: int
    count: int
    local: int  # on its node

    @classmethod
    def from_environment(cls, environment: Mapping[str, str] = os.environ) -> Rank:
        """Refuses what cannot be, naming the variable: a rank that does not exist would have the others wait for it."""
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")  # torchrun's
        on_node = "LOCAL_WORLD_SIZE"
        if not any(name in environment for name in names):
            if not ("SLURM_PROCID" in environment and "SLURM_STEP_ID" in environment):
                return cls(0, 1, 0)  # alone, or inside an allocation but not started by srun
            names, on_node = ("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"), ""
        given, missing = [name for name in names if name in environment], [name for name in names if name not in environment]
        if missing:
            raise ValueError(
                f"{given[0]}={environment[given[0]]} is set but {missing[0]} is not; set {', '.join(names)}, all of them "
                "or none: torchrun and srun set all"
            )
        ranks = _whole_number(environment, names[1], 1)
        local_ranks = _whole_number(environment, on_node, 1) if on_node in environment else ranks
        return cls(
            _whole_number(environment, names[0], 0, ranks - 1, f"of {names[1]}={ranks}"),
            ranks,
            _whole_number(environment, names[2], 0, local_ranks - 1, f"of {local_ranks} on a node"),
        )


def _whole_number(environment: Mapping[str, str], name: str, least: int, most: int | None = None, of: str = "") -> int:
    text = environment[name].strip()
    number = int(text) if re.fullmatch(r"-?[0-9]+", text) else None
    if number is None or number < least or (most is not None and number > most):
        span = f"from {least} up" if most is None else f"from {least} to {most}" if most > least else str(least)
        raise ValueError(
            f"{name}={environment[name]}: must be a whole number, {' '.join((span, of)).strip()}; unset it, or start with "
            "torchrun, srun or anyfit fit --gpus, which set it"
        )
    return number


def meeting_place(environment: Mapping[str, str] = os.environ) -> tuple[str, int]:
    """Where ranks meet: as torchrun or the user says, or the first node of a Slurm step, at a port that its numbers choose."""
    nodes = environment.get("SLURM_STEP_NODELIST", environment.get("SLURM_JOB_NODELIST"))
    host, port = environment.get("MASTER_ADDR"), environment.get("MASTER_PORT")
    if not host and nodes:
        host = first_node(nodes)
    if not port and "SLURM_JOB_ID" in environment:
        step = {"SLURM_STEP_ID": "0", **environment}
        chosen = 101 * _whole_number(step, "SLURM_JOB_ID", 0) + _whole_number(step, "SLURM_STEP_ID", 0)
        return host or _lacking("MASTER_ADDR"), SLURM_PORTS[chosen % len(SLURM_PORTS)]
    host, given = host or _lacking("MASTER_ADDR"), {"MASTER_PORT": port or _lacking("MASTER_PORT")}
    return host, _whole_number(given, "MASTER_PORT", 1, 65535)


def _lacking(name: str) -> str:
    example = "the name of rank 0's machine" if name == "MASTER_ADDR" else "a free port there, such as 29500"
    raise ValueError(
        f"{name} is not set, and ranks do not know where to meet; set it to {example}, or start with torchrun, srun or "
        "anyfit fit --gpus, which set it"
    )


def first_node(nodes: str) -> str:
    """
    >>> first_node("gpu[03-05,11],login"), first_node("r2n[7,9]s[1-2]"), first_node("alone")
    ('gpu03', 'r2n7s1', 'alone')
    """
    first = re.split(r",(?![^\[]*\])", nodes)[0]
    return re.sub(r"\[(\w+)[^\]]*\]", r"\1", first)


class Alarms:
    """Watches the loss for spikes, NaN and skipped steps, each a line for the log."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._skipped = 0

    def listen(self, step: int, loss: float, skipped: int) -> list[str]:
        lines = []
        if skipped > self._skipped:
            lines.append(f"step {step}: left out, a gradient was not finite ({skipped} left out so far)")
            self._skipped = skipped
        if not math.isfinite(loss):
            return [*lines, f"step {step}: the loss is {loss}"]
        if len(self._losses) >= 10:
            mean, deviation = statistics.fmean(self._losses), statistics.pstdev(self._losses)
            if loss > mean + SPIKE * deviation and loss > mean + SPIKE_SHARE * abs(mean):
                lines.append(f"step {step}: the loss jumped to {loss:.3f} from about {mean:.3f}")
        self._losses.append(loss)
        return lines


@dataclass
class Launch:
    """One `anyfit fit`, or one of the later runs of its script: what the command line said, and what goes on."""

    folder: Path
    resume: bool = False
    save_every: int = 0  # steps; 0 saves at the end only
    keep: int = 2  # checkpoints
    keep_every: int = 0  # and those of every so many steps
    limits: Mapping[str, str | None] = field(default_factory=dict)
    plan: Path | None = None
    mesh: Mapping[str, int] = field(default_factory=dict)  # of the axes that were asked for, their lengths
    layout: str | None = None
    deterministic: bool = False
    timeline: Path | None = None  # a trace file of a few steps
    hang_seconds: float | None = None
    disk: DiskFolder = field(default_factory=DiskFolder)
    steps: int | None = None  # that the run is to make, where that was said
    model: str = ""  # what people call it, where that was said
    ranks: tuple[str, ...] = ()  # the option that started several
    script: tuple[str, ...] = ()  # with its arguments
    compiles: bool = True  # blocks, where the plan says so
    rank: int = 0
    best: int | None = None  # the step whose checkpoint stays, whatever `keep` says
    on_start: Callable[[Run, Path], None] = lambda _run, _folder: None
    on_step: Callable[[Run, list[str]], None] = lambda _run, _alarms: None
    say: Callable[[str], None] = lambda line: print(line, file=sys.stderr, flush=True)

    first: Launch | None = None  # of the script's first run, where this is of a later one
    asked: int = 0  # the signal that came, if any
    runs: list[Run] = field(default_factory=list)  # that have made a step, of all
    _open: list[Run] = field(default_factory=list)  # that are not closed, of all
    _followed: int = 0  # runs so far
    _is_alone: bool = True
    _told: Saving | None = None  # that was spoken of last
    _alarms: Alarms = field(default_factory=Alarms)
    _before: dict[int, Any] = field(default_factory=dict)

    @property
    def whole(self) -> Launch:
        """The launch that gets the signals, and that `--resume` names."""
        return self.first or self

    def for_next_run(self) -> Launch:
        number = self._followed + 1
        if number == 1:
            return self
        timeline = self.timeline and self.timeline.with_stem(f"{self.timeline.stem}-run-{number}")
        return replace(
            self, folder=self.folder / f"run-{number}", timeline=timeline, first=self, best=None, _told=None, _alarms=Alarms()
        )

    def follow(self, run: Run, machine: Machine) -> None:
        """Opens the folder; from here on a signal waits for the end of the step."""
        whole = self.whole
        run.launch, self._is_alone, whole._is_alone = self, not run.ranks.are_several, not run.ranks.are_several
        whole._followed += 1
        whole._open.append(run)
        if self.is_first:
            if self.timeline is not None:
                run.record()
            run.plan.save(self.folder / "plan.json")
            machine.save(self.folder / "machine.json")
            lines.truncate(self.folder, run.steps)
            self.on_start(run, self.folder)
        for number in (signal.SIGINT, signal.SIGTERM):
            if number not in whole._before:
                whole._before[number] = signal.signal(number, whole._ask)

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the files and reports."""
        return self.rank == 0

    def replanned(self, plan: Plan, saves: Saves) -> None:
        """A run that is resumed goes on with the plan that it had last."""
        plan.save(self.folder / "plan.json")
        if self.save_every:
            saves.make_room()

    def unfollow(self, run: Run) -> None:
        whole = self.whole
        whole._open.remove(run)
        if not whole._open:
            whole.end_signals()

    def end_signals(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before.clear()

    def _ask(self, number: int, _frame: FrameType | None) -> None:
        if self.asked and number == signal.SIGINT:
            raise KeyboardInterrupt  # asked twice: do not wait for the step
        self.asked = number
        if self._is_alone:  # else it is said once, by those who will
            self.say(f"{signal.Signals(number).name}: saving after this step")

    def after_step(self, run: Run) -> None:
        if run not in self.runs:
            self.runs.append(run)
            if self.save_every:
                run.make_room_to_save()
        if self.is_first:
            metrics = run.metrics
            alarms = self._alarms.listen(run.steps, metrics.loss, run.skipped)
            self.append("metrics.jsonl", asdict(metrics) | {"time": time.time(), "alarms": alarms}, run.steps)
            self.on_step(run, alarms)
            self._tell_of(run.saving)
        asked = self.whole.asked if self._is_alone else run.signal  # one that all ranks know of
        if asked:
            self._end(run, asked)
        if self.save_every and run.steps % self.save_every == 0:
            self.save(run, wait=False)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Writes down what `run.log` was given."""
        if self.is_first:
            self.append("logged.jsonl", {"step": step, "time": time.time(), **values}, step)

    def append(self, name: str, line: Mapping[str, Any], step: int) -> None:
        """A line of one of the files of `lines.NAMES`."""
        lines.append(self.folder / name, line, step, self.whole.folder)

    def save(self, run: Run, *, wait: bool = True) -> Path:
        path, before = self.checkpoints / f"{run.steps:08d}", run.saving
        if before is not None and before.folder == path.absolute():  # what is there, or on its way, is the same
            if wait:
                run.finish_saving()
        else:
            run.saves.save(path, wait=wait, then=self._remove_older)
        if self.is_first:
            self._tell_of(before)
        return path

    def _remove_older(self) -> None:
        from .checkpoint import remove_older

        remove_older(self.checkpoints, self.keep, self.keep_every, self.best)

    def _tell_of(self, saving: Saving | None) -> None:
        """Reports a regular save, once it is whole."""
        if saving is None or saving is self._told or not saving.is_done or saving.has_failed:
            return
        before, self._told = self._told, saving
        how = "beside the steps" if saving.is_beside else "while training waited"
        if not saving.is_beside and before is None:
            how += ": host memory that the plan may use has no room for a copy of the state (--host-memory)"
        self.say(f"saved {saving.folder}: {show_bytes(saving.bytes)} in {show_seconds(saving.seconds)}, {how}")

    def _end(self, run: Run, number: int) -> None:
        name, whole = signal.Signals(number).name, self.whole
        for each in [run, *(other for other in whole._open if other is not run)]:
            assert each.launch is not None
            if each.is_within_step:  # of a loop of the script's own
                line = f"{name}: step {each.steps + 1} in {each.launch.folder} was under way, and is not saved"
            else:
                path = each.launch.save(each)
                line = f"{name}: saved step {each.steps} in {path}; go on with: {whole.again}"
            if self.is_first:
                each.launch.say(line)
        for each in list(whole._open):
            each.close()
        if run.team is not None:
            run.team.ending.part()
        claim.release_all()
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    @property
    def again(self) -> str:
        """The command that goes on with it as it was started."""
        return shlex.join(("anyfit", "fit", *self.ranks, "--resume", str(self.folder), *self.script))

    @property
    def checkpoints(self) -> Path:
        return self.folder / "checkpoints"

    def newest_checkpoint(self) -> Path | None:
        """Where `--resume` goes on; None is the beginning."""
        from .checkpoint import newest

        return newest(self.checkpoints, self.say)[0]

    def plan_for(self, machine: Machine, ranks: int = 1) -> Plan | None:
        """The plan the command line named, or the one a resumed run had, where the machine and the ranks are still the same."""
        if self.plan is not None:
            return Plan.load(self.plan)
        if self.mesh or self.layout:
            return None
        file = self.folder / "plan.json"
        if not self.resume or not file.exists():
            return None
        plan = Plan.load(file)
        made_for = plan.fingerprint and plan.fingerprint.machine
        if plan.ranks != ranks:
            self.say(f"the run was planned for {plan.ranks} rank{'s' * (plan.ranks > 1)}, and {ranks} go on: planning anew")
            return None
        fits = plan.limit_bytes["device"] == machine.device_limit_bytes and plan.limit_bytes["host"] <= machine.host_limit_bytes
        if made_for == machine.fingerprint and fits:
            return plan
        self.say("the run was planned for another machine or limit: planning anew")
        return None


def device_for(machine: Machine, rank: Rank) -> torch.device:
    """The device this rank computes on, held to the machine's limit."""
    import torch

    if machine.device.kind == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise RuntimeError(f"the plan is for {machine.device.name}, and torch sees no GPU here")
    device = torch.device("cuda", gpu_of(rank))
    torch.cuda.set_device(device)
    if machine.limits.device_bytes is not None:
        total = torch.cuda.get_device_properties(device).total_memory
        allowed = max(machine.limits.device_bytes - int(machine.device.context_bytes.value), 0)
        # What is cached would be used again, whatever is allowed. Workspaces of cuBLAS, small and never given back, keep large
        # pieces of memory, which they once came from.
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(min(1.0, allowed / total), device)
    return device


def gpu_of(rank: Rank) -> int:
    """The index of its GPU among those it sees: Slurm may show every task its own alone."""
    import torch

    return rank.local % torch.cuda.device_count()


def seed_of(seed: int, rank: int, steps: int = 0) -> int:
    """Of the random numbers that a rank draws once the model is built: its own, and after so many steps others."""
    return int.from_bytes(hashlib.sha256(f"{seed} {rank} {steps}".encode()).digest()[:7])


def joined(hang_seconds: float) -> Team | None:
    """The ranks that this process is one of, met when first asked for; None where it is alone."""
    import torch
    import torch.distributed as dist

    from .team import Team, join

    global _team
    if _team is None and dist.is_initialized() and dist.get_world_size() > 1:
        _team = Team(hang_seconds, ends_process=True)
    rank = Rank.from_environment()
    if _team is None and not dist.is_initialized() and rank.count > 1:
        device = "cpu"
        if torch.cuda.is_available():
            torch.cuda.set_device(gpu_of(rank))
            device = str(torch.cuda.get_device_properties(gpu_of(rank)).uuid)
        _team = join(rank.index, rank.count, meeting_place(), device, hang_seconds)
    if _team is not None:
        _team.heartbeat.hang_seconds = hang_seconds
    return _team


def team() -> Team | None:
    return _team


def make_deterministic() -> None:
    """Bit-equal reruns: deterministic kernels, and cuBLAS workspaces that do not depend on timing."""
    import torch

    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.backends.cudnn.benchmark = False


_current: Launch | None = None
_team: Team | None = None


def current() -> Launch | None:
    """The launch of the run that is about to start."""
    return _current and _current.for_next_run()


@contextmanager
def launched(launch: Launch) -> Iterator[Launch]:
    global _current
    assert _current is None, "one launch a process"
    _current = launch
    try:
        yield launch
    finally:
        _current = None
        launch.end_signals()
        claim.release_all()
