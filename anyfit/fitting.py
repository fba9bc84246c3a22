"""What `anyfit fit` does: opens a run folder, trains the built-in demo or a user's script in it, and says how it went."""

from __future__ import annotations

import functools
import json
import logging
import os
import runpy
import shlex
import signal
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console

from .finetune.options import Options as FinetuneOptions
from .running import claim
from .showing import timeline as timelines
from .showing.progress import Bar, Beat, Lines, Watcher, why_off
from .showing.terminal import show_forecast_beside_measured, show_plan
from .values.record import decode, write_atomically
from .values.tokens import padding_share

if TYPE_CHECKING:
    from .finetune.work import Work
    from .reporting import Reports
    from .running.launch import Launch
    from .running.run import Run
    from .running.team import Team
    from .values.job import Job

MUCH_PADDING = 0.02  # of a batch, to be spoken of
CHECK_SCRIPT = "anyfit check FILE.py:FUNCTION, with a function that returns the Job"
RECENT = 20  # steps that make up the speed shown
STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)  # signals by which somebody stops a run
SHUTDOWN_SECONDS = 600  # that ranks have to end a step and save it, once they were told to stop


@dataclass(frozen=True)
class DemoOptions:
    """What the demo was told; kept in the run folder, so that a resumed run is the same run."""

    steps: int
    batch_size: int
    length: int
    precision: str
    seed: int
    save_every: int
    keep: int
    keep_every: int
    deterministic: bool
    device_memory: str | None
    host_memory: str | None
    disk: str | None = None


def run_folder(resume: Path | None, asked_for: Path | None, team: Team | None) -> Path:
    """The folder to go on in, or a new one: the same for all ranks, and used by this launch alone from here on."""
    claimed = functools.partial(new_folder, asked_for) if resume is None else functools.partial(resumed_folder, resume)
    return claimed() if team is None else team.from_first(claimed, "the run folder")


def new_folder(asked_for: Path | None, parent: Path = Path("runs")) -> Path:
    """The folder asked for, which must not hold a run, or a fresh one named by the time."""
    folder = asked_for or parent / time.strftime("%Y%m%d-%H%M%S")
    folder = _claimed(folder, "choose another --folder", is_asked_for=asked_for is not None)
    if (folder / "plan.json").exists():
        claim.release_all()
        raise FileExistsError(f"{folder} holds a run; go on with --resume {folder}, or choose another --folder")
    return folder


def _made(folder: Path) -> Path:
    """A folder of this name, or of the next where another launch has made it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    number = 1
    while True:
        try:
            folder.mkdir()
            return folder
        except FileExistsError:
            number += 1
            folder = folder.with_name(f"{folder.name.partition('.')[0]}.{number}")


def resumed_folder(folder: Path) -> Path:
    return _claimed(folder, "a run that goes on writes there: --resume a copy of it", is_asked_for=True)


def _claimed(folder: Path, way_out: str, *, is_asked_for: bool) -> Path:
    """The folder, made where it is not there, which no other launch uses from here on."""
    try:
        if not is_asked_for:
            folder = _made(folder)
        folder.mkdir(parents=True, exist_ok=True)
        claim.take(folder, lambda line: print(f"anyfit: {line}", file=sys.stderr, flush=True))
    except OSError as error:
        if error.strerror is None:
            raise
        raise OSError(f"cannot write to the run folder {folder}: {error.strerror}; {way_out}") from None
    return folder


def refuse_timeline(file: Path) -> None:
    """Before anything is trained, what would go wrong with the timeline's files."""
    if file.suffix != ".json":
        raise ValueError(f"--timeline {file}: name a .json file; its picture is written beside it, as .svg")
    if not os.access(file.parent, os.W_OK) or not file.parent.is_dir():
        raise OSError(f"--timeline {file}: {file.parent} is no folder that can be written to")


# ---------------------------------------------------------------------- several ranks


def joined(hang_seconds: float | None) -> Team | None:
    """The other ranks, where this process was started as one of several; met here, so that their errors are shown once."""
    from .running.launch import Rank

    if Rank.from_environment().count == 1:
        return None
    from .placing.ranks import HANG_SECONDS
    from .starting import joined as join

    return join(hang_seconds or HANG_SECONDS)


def ranks_asked_for(gpus: int | None, ranks: int | None) -> int:
    """How many processes the command line asks for, besides this one."""
    if gpus is not None and ranks is not None:
        raise ValueError("--gpus is a process for each GPU, --ranks so many processes; leave one of them out")
    if gpus is not None and gpus > 1:
        import torch

        there = torch.cuda.device_count()
        if 0 < there < gpus:
            raise ValueError(f"--gpus {gpus}, and torch sees {there}; --ranks {gpus} has them share what is there")
    return gpus or ranks or 1


def holds_restarted_run(folder: Path | None) -> bool:
    """Whether the ranks were started again, after some of them died, to go on with the run in this folder."""
    if folder is None and int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", 0)) > 0:
        raise ValueError("ranks that are restarted go on in the folder of the run: name it with --folder, or --resume")
    is_again = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)) > 0
    return is_again and folder is not None and (folder / "plan.json").exists()


def fit_in_ranks(count: int, restarts: int, folder: Path) -> None:
    """The command line that this process was started with, in so many processes; ends as they end.

    They are told apart by torchrun's variables, and are started again, all of them, when one dies: they then go on from the last
    checkpoint in the folder.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    from .running.ending import QUIET

    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=count,
        run_id=f"{os.getpid()}-{time.time_ns()}",
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        local_addr="localhost",
        max_restarts=restarts,
    )
    config.shutdown_timeout = SHUTDOWN_SECONDS  # torch before 2.13 has none, and 30 s
    os.environ.setdefault("OMP_NUM_THREADS", str(max(len(os.sched_getaffinity(0)) // count, 1)))
    logging.disable(logging.ERROR)  # the launcher's own: what went wrong is shown by the rank that knows
    verb, *arguments = sys.argv[1:]
    where = [] if "--resume" in arguments else ["--folder", str(folder)]
    try:
        elastic_launch(config, sys.executable)("-m", "anyfit", verb, *where, *arguments)
    except SignalException as told:
        _end_like(-told.sigval)
    except ChildFailedError as failed:
        failures = sorted(failed.failures.items(), key=lambda each: each[1].timestamp)
        rank, status = next(((rank, each.exitcode) for rank, each in failures if each.exitcode != QUIET), (0, 1))
        if status < 0 and -status not in STOPS:
            print(f"anyfit: {_of_killed(rank, -status, folder)}", file=sys.stderr, flush=True)
        _end_like(status)


def _of_killed(rank: int, number: int, folder: Path) -> str:
    """What it usually means that a rank was killed by a signal."""
    means = "a fault in native code"
    if number == signal.SIGKILL:
        means = (
            "the kernel ends a process so when the host has no memory left (dmesg tells), and so does a cluster's limit: "
            "--host-memory, or fewer loader workers, needs less"
        )
    again = f"; go on from its last checkpoint with --resume {folder}" if (folder / "checkpoints").is_dir() else ""
    name = next((each.name for each in signal.Signals if each == number), f"signal {number}")
    return f"rank {rank} was ended by {name}: {means}{again}"


def _end_like(status: int) -> None:
    """Ends this process as another did: by its status, by the signal that told it to stop, or with 128 more, as a shell does."""
    sys.stdout.flush()
    claim.release_all()
    if -status in STOPS:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status if status >= 0 else 128 - status)


# ---------------------------------------------------------------------- training


def fit_demo(options: DemoOptions, launch: Launch, log_every: int) -> None:
    from . import demo
    from .running.launch import launched

    if launch.is_first:
        write_atomically(launch.folder / "run.json", json.dumps(asdict(options), indent=1).encode())
    console = Console(quiet=not launch.is_first)
    job = demo.job(
        batch_size=options.batch_size, length=options.length, steps=options.steps, precision=options.precision, seed=options.seed
    )
    with launched(launch):
        with _watcher(console, log_every) as watcher:
            run, report = _started(job, options, "start anew with more --steps", launch, watcher, console)
            dataset = demo.SourceCode(options.length)
            epochs = -(-options.steps * options.batch_size // len(dataset))
            for batch in run.loader(dataset, epochs=epochs):
                if run.steps >= options.steps:
                    break
                run.step(batch)
        finish(run, launch, report if launch.is_first else None, console)
        if run.plan.pipeline == 1:  # else no rank has all of the model
            with run.weights() as model:
                console.print("\nwhat it writes now:\n", style="bold")
                console.print(demo.write(model.eval(), options.length), markup=False, highlight=False)
        run.close()


def fit_folder(work: Work, job: Job, launch: Launch, reports: Reports, log_every: int) -> None:
    """Fine-tunes a Hugging Face folder: evaluates, keeps the best checkpoint, writes samples, and exports that checkpoint."""
    from .finetune.looks import Looks, refuse_leaks
    from .running.launch import launched

    options = work.options
    if launch.is_first:
        write_atomically(launch.folder / "run.json", json.dumps(asdict(options), indent=1).encode())
    console = Console(quiet=not launch.is_first)
    for line in work.summary:
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    with launched(launch):
        with _watcher(console, log_every) as watcher:
            run, report = _started(job, options, _train_further(launch.folder, options), launch, watcher, console)
            refuse_leaks(run, work.training)
            looks = Looks(run, launch, work, watcher.say, reports.text)
            for batch in run.loader(work.training, epochs=options.epochs, collate_fn=work.training.collate):
                run.step(batch)
                if looks.is_due:
                    looks.look()
        finish(run, launch, report if launch.is_first else None, console)
        if options.lora is not None:
            step = run.steps if launch.best is None else launch.best
            merge = f"anyfit export --merge {shlex.quote(str(launch.checkpoints / f'{step:08d}'))} merged"
            said = f"the weights are the adapter alone, for {options.model}; both as one plain model: {merge}"
            console.print(said, markup=False, highlight=False, soft_wrap=True)
        for sample in looks.written:
            shown = f"\nasked   {sample['prompt']!r}\nwrites  {sample['written']!r}\ndata    {sample['data']!r}"
            console.print(shown, markup=False, soft_wrap=True)
        run.close()


def _started(
    job: Job, options: DemoOptions | FinetuneOptions, way_on: str, launch: Launch, watcher: Watcher, console: Console
) -> tuple[Run, Report]:
    """A run that is watched. One that is resumed and has nothing left to do says so, and how to go on."""
    from . import start

    run, steps = start(job), options.steps
    report = Report(run, watcher, steps, launch.timeline, check_of(options))
    launch.say, launch.on_step = watcher.say, report.step
    _show_plan(run, console)
    if launch.resume and steps is not None and run.steps >= steps:
        watcher.say(f"this run is finished, after {run.steps} of {steps} steps; to train more, {way_on}")
    elif launch.resume:
        watcher.say(f"going on from step {run.steps}")
    return run, report


def _show_plan(run: Run, console: Console) -> None:
    show_plan(run.plan, console)
    padding = padding_share(run.job.sample)
    if padding >= MUCH_PADDING:
        note = f"the plan's tokens/s count padding ({padding:.0%} of its batch), those of the run do not"
        console.print(f"note           {note}", markup=False, highlight=False, soft_wrap=True)


def check_of(options: DemoOptions | FinetuneOptions) -> str:
    """The command that times the job of such a run."""
    target, how = "demo", {"--batch": options.batch_size, "--seq": options.length, "--dtype": options.precision}
    if isinstance(options, FinetuneOptions):
        target = shlex.quote(options.model)
        how |= {"--lora": options.lora, "--optimizer": options.optimizer}
    how |= {"--device-memory": options.device_memory, "--host-memory": options.host_memory, "--disk": options.disk}
    return " ".join(["anyfit check", target, *(f"{option} {value}" for option, value in how.items() if value is not None)])


def _train_further(folder: Path, options: FinetuneOptions) -> str:
    fit = options.typed
    if options.lora is None:
        return f"go on from its weights: anyfit fit {folder / 'weights'} {fit}"
    return f"merge its adapter and go on from that: anyfit export --merge {folder} merged && anyfit fit merged {fit}"


def resumed_options(folder: Path) -> DemoOptions | FinetuneOptions:
    """What a run was told: of the demo, or of fine-tuning a folder."""
    file = folder / "run.json"
    if not file.exists():
        run = next((each for each in folder.parents if (each / "run.json").exists()), None)
        raise FileNotFoundError(f"no run to resume in {folder}: it has no run.json" + (f"; --resume {run} has" if run else ""))
    try:
        document = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: not JSON ({error}); start anew with another --folder") from None
    document = {"disk": None, **document} if isinstance(document, dict) else document  # a run may be older than a disk
    kind = FinetuneOptions if isinstance(document, dict) and "data" in document else DemoOptions
    return cast(DemoOptions | FinetuneOptions, decode(kind, document, str(file)))


def fit_script(script: Path, arguments: Sequence[str], launch: Launch, log_every: int) -> None:
    """Runs the user's script as `python script` would, with every `anyfit.start` in it under this launch."""
    from .running.launch import launched

    console = Console(quiet=not launch.is_first)
    before, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(script), *arguments], str(script.parent.resolve())
    try:
        with launched(launch):
            reports: dict[int, Report] = {}
            with _watcher(console, log_every) as watcher:

                def step(run: Run, alarms: list[str]) -> None:
                    if id(run) not in reports:
                        _show_plan(run, console)
                        reports[id(run)] = Report(run, watcher, None, (run.launch or launch).timeline, CHECK_SCRIPT)
                    reports[id(run)].step(run, alarms)

                launch.say, launch.on_step = watcher.say, step
                runpy.run_path(str(script), run_name="__main__")
            for run in launch.runs:
                report = reports.get(id(run))
                if run.launch is not None:  # else it is closed
                    run.await_others()
                    finish(run, run.launch, report, console)
                    run.close()
                elif report is not None and report.recorded is not None:
                    timelines.show(report.recorded, console)
    finally:
        sys.argv, sys.path[:] = before, path


class Report:
    """Turns a run's metrics into beats for a watcher, and keeps what the closing lines need."""

    def __init__(self, run: Run, watcher: Watcher, steps: int | None, timeline: Path | None, check: str) -> None:
        self.run, self._watcher, self._steps, self._timeline, self._check = run, watcher, steps, timeline, check
        self.recorded: timelines.Timeline | None = None
        self.seconds: deque[float] = deque(maxlen=1000)
        self.largest = run.plan  # of those that the run had: its peak may be from before it moved
        self._said_why = False

    def step(self, run: Run, alarms: list[str]) -> None:
        metrics = run.metrics
        self.seconds.append(metrics.seconds)
        self.largest = max(self.largest, run.plan, key=lambda plan: plan.forecast.peak_bytes["device"])
        recent = statistics.median(list(self.seconds)[-RECENT:])
        for line in alarms:
            self._watcher.say(f"alarm: {line}")
        beat = Beat(
            step=run.steps,
            steps=self._steps if self._steps is not None else run.planned_steps,
            loss=metrics.loss,
            seconds=recent,
            tokens_per_second=metrics.tokens_per_second * metrics.seconds / recent,
            compute_share=metrics.compute_share * metrics.seconds / recent,
            peak_bytes=metrics.peak_bytes["device"],
            clipped_share=metrics.clipped_share,
            saved=None if run.saving is None or run.saving.is_done else run.saving.share,
        )
        self._watcher.beat(beat, run.plan)
        if len(self.seconds) >= RECENT:
            self.say_why(recent, self._watcher.say)
        if run.timeline is not None and run.timeline.is_done and self.recorded is None:
            self.write_timeline()  # as soon as it is there: nobody may wait for the end

    def say_why(self, seconds: float, say: Callable[[str], None]) -> None:
        """Once, where steps on a CPU are far from their forecast: GPUs are rarely shared, and held to it."""
        plan, metrics = self.run.plan, self.run.metrics
        off = functools.partial(why_off, seconds, metrics.clipped_share, plan.forecast, self._check)
        why = off() if self.run.device.type == "cpu" else None
        if why is not None and not self._said_why:
            say(why)
            self._said_why = True

    def write_timeline(self) -> None:
        recorder, file = self.run.timeline, self._timeline
        if file is None or recorder is None or self.recorded is not None:
            return
        if not recorder.has_steps:
            self._watcher.say(f"no timeline: it is of step {recorder.first} and later, and the run made {len(self.seconds)}")
            return
        document = recorder.document(f"{self.run.plan.model} on {self.run.plan.machine}")
        write_atomically(file, json.dumps(document).encode())
        self.recorded = timelines.read(file)
        write_atomically(file.with_suffix(".svg"), timelines.draw(self.recorded).encode())


def finish(run: Run, launch: Launch, report: Report | None, console: Console) -> None:
    """The last checkpoint, the weights as a folder of safetensors, and the forecast beside what was measured."""
    from .running.export import export

    saved = launch.save(run)
    if report is None:  # of a rank that only takes part
        return
    weights, best = launch.folder / "weights", launch.best
    export(saved if best is None else launch.checkpoints / f"{best:08d}", weights, replaces=True)
    of_best = "" if best is None else f" of step {best}, the best by evaluation"
    console.print(f"\ncheckpoint {saved}, weights {weights}{of_best}", markup=False, highlight=False, soft_wrap=True)
    if report.seconds:
        seconds = statistics.median(list(report.seconds)[3:] or report.seconds)  # the first steps were watched for memory
        metrics = run.metrics
        peak = metrics.peak_bytes["device"]
        show_forecast_beside_measured(run.plan, seconds, metrics.clipped_share, peak, console, report.largest)
        report.say_why(seconds, lambda line: console.print(line, markup=False, highlight=False, soft_wrap=True))
        console.print(f"loss {metrics.loss:.3f} after {run.steps} steps", highlight=False)
    if launch.timeline is not None:
        report.write_timeline()
    if report.recorded is not None:
        console.print(f"\ntimeline {launch.timeline}, open it in ui.perfetto.dev; its picture is beside it", highlight=False)
        timelines.show(report.recorded, console)


def _watcher(console: Console, log_every: int) -> Watcher:
    return Bar(console) if console.is_terminal and not console.quiet else Lines(console, log_every)
