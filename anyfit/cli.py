"""The command line: one flat verb a job. Torch is imported by the verb that needs it, so `--help` answers at once."""

from __future__ import annotations

import inspect
import json
import math
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NoReturn

import typer
from typer import Argument, Option

from .ending import error_json, in_words, outcome_json
from .options import (
    Agree,
    Batch,
    DeviceMemory,
    Dtype,
    Gpus,
    HostMemory,
    Json,
    MachineName,
    NoCompile,
    Nodes,
    OptimizerName,
    RealRun,
    Seq,
    Target,
    finite,
    size,
)
from .showing.status import status_line
from .values.answers import beside, ranked
from .values.doing import doing
from .values.machine import Machine
from .values.plan import NoPlan, Plan
from .values.precision import PRECISIONS
from .values.record import nearest
from .values.units import parse_bytes, show_bytes

if TYPE_CHECKING:
    from rich.console import Console

    from .asking import Question, Traced
    from .values.profile import Profile

app = typer.Typer(
    name="anyfit",
    help="Any model, fit: says whether it fits, how fast it will be and why, and then trains it that way.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

COLUMNS_IN_A_PIPE = 130  # where no terminal says how wide it is


@app.command()
def profile(
    target: Target = "demo",
    machine: MachineName = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    real_run: RealRun = None,
    agree: Agree = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    depth: Annotated[int | None, Option("--depth", min=1, help="also every module, so many names deep")] = None,
    as_json: Json = False,
) -> None:
    """Parameters, FLOPs, seconds and bytes of every block, without running the model."""
    from . import profile as make_profile
    from .profiling import with_calls
    from .targets import job_for, module_costs

    job = job_for(target, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, real_run=real_run, agree=agree)
    on = _machine(machine, gpus, nodes, device_memory, host_memory)
    if as_json and depth is None:
        return _print_json(make_profile(job, on, ranks=1).to_json())
    from .costing import cost
    from .planning.forecast import forecast
    from .probing.host import free_memory_bytes
    from .showing.terminal import show_modules, show_profile
    from .tracing import trace

    largest = job.micro_batch or job.batch_size  # the tables are of this micro-batch alone
    graph = trace(job, largest, on.device.kind, free_memory_bytes())
    on = with_calls(on, [graph])
    made = cost([graph], on, job.batch_size)
    modules = [] if depth is None else module_costs(job, graph, on, depth)
    if as_json:
        return _print_json({"profile": made.to_json(), "modules": [asdict(module) for module in modules]})
    console = _console()
    if modules:
        show_modules(made, modules, console)
    attention_flops = sum(op.flops for op in graph.ops if op.kind == "attention")
    return show_profile(made, forecast(made, made.passes[0]), attention_flops, console)


@app.command()
def plan(
    target: Target = "demo",
    machine: MachineName = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    real_run: RealRun = None,
    agree: Agree = None,
    no_compile: NoCompile = False,
    gpus: Gpus = None,
    nodes: Nodes = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    what_if: Annotated[
        list[str] | None,
        Option("--what-if", help="also with one change, such as device-memory=40GiB, batch=16 or machine=h200; repeatable"),
    ] = None,
    compare: Annotated[
        str | None, Option("--compare", help="machines to rank, with commas between: rtx-4090,h200,mine.json")
    ] = None,
    tokens: Annotated[str | None, Option("--tokens", help="to train on, such as 10B; for --compare")] = None,
    price: Annotated[str | None, Option("--price", help="an hour's, such as h200=3.5,l4=0.7; for --compare")] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="also write the plan to this file")] = None,
    as_json: Json = False,
) -> None:
    """Does it fit, how fast will it be, and why; what would a change make of it; which machine is best. Needs no GPU."""
    with doing("loading torch"):
        from . import asking
        from .profiling import profile_of

    options: dict[str, Any] = {"batch": batch, "seq": seq, "dtype": dtype, "optimizer": optimizer}
    options |= {"real_run": real_run, "agree": agree, "no_compile": no_compile}
    machine_of = partial(_machine, gpus=gpus, nodes=nodes, device_memory=device_memory, host_memory=host_memory)
    question = asking.Question(target, options, machine_of, machine)
    if compare is not None:
        others = {"--machine": machine, "--what-if": what_if or None, "--output": output}
        given = [name for name, value in others.items() if value is not None]
        if given:
            raise ValueError(f"--compare plans for each machine it names; leave {given[0]} out")
        return _compare(question, compare, tokens, price, as_json=as_json)
    if tokens is not None or price is not None:
        raise ValueError(f"{'--price' if tokens is None else '--tokens'} is for --compare; name the machines: --compare h200,l4")
    changes = asking.parse_changes(what_if or [])
    on = question.machine_for(machine)
    options["ranks"] = math.prod(on.rank_grid())
    traced = question.traced()
    if changes:
        return _what_if(question, traced, traced.profile(on), changes, output, as_json=as_json)
    made = asking.planned(question, traced, profile_of(traced.job, on, on.rank_grid(), for_plan=True))
    if output is not None:
        made.save(output)
    if as_json:
        return _print_json(made.to_json())
    from .showing.terminal import show_plan

    return show_plan(made, _console())


def _what_if(
    question: Question,
    traced: Traced,
    profile: Profile,
    changes: dict[str, tuple[str, str]],
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    from . import asking
    from .showing.terminal import show_beside, show_plan

    made, others = asking.what_ifs(question, traced, profile, changes)
    if output is not None and not isinstance(made, NoPlan):
        made.save(output)
    if as_json:
        _print_json({"plan": outcome_json(made), "what_if": {text: outcome_json(other) for text, other in others.items()}})
    else:
        console = _console()
        if not isinstance(made, NoPlan):
            show_plan(made, console)
            console.print()
        show_beside({"as it is": made, **others}, console)
    if isinstance(made, NoPlan):
        _end(made)


def _compare(question: Question, machines: str, tokens: str | None, price: str | None, *, as_json: bool) -> None:
    from . import asking
    from .showing.terminal import show_ranking

    if tokens is None:
        raise ValueError("--compare ranks machines by the time to train on so many tokens; say how many: --tokens 10B")
    names, count = asking.parse_machines(machines), asking.parse_tokens(tokens)
    prices = {} if price is None else asking.parse_prices(price, names)
    found = ranked(asking.compared(question, names), count, prices)
    if as_json:
        return _print_json({"tokens": count, "machines": [each.to_json() for each in found]})
    return show_ranking(found, count, _console())


@app.command()
def why(
    plan: Annotated[Path, Argument(help="a plan file")],
    other: Annotated[str | None, Argument(help="one of its decisions, or a second plan file to compare with")] = None,
    as_json: Json = False,
) -> None:
    """Explains the decisions of a plan, one of them, or the difference between two plans."""
    from .showing.terminal import show_beside, show_rows

    first = Plan.load(plan)
    if other is not None and (Path(other).exists() or other.endswith(".json")):
        plans = {str(plan): first, f"{other} (again)" if other == str(plan) else other: Plan.load(other)}
        return _print_json(beside(plans)) if as_json else show_beside(plans, _console())
    rows = first.explained(other)
    if as_json:
        return _print_json(rows)
    return show_rows(rows, _console())


@app.command()
def probe(
    full: Annotated[bool, Option("--full", help="more sizes and repeats, and the disk")] = False,
    output: Annotated[Path | None, Option("--output", "-o", help="also write the machine to this file")] = None,
    forget: Annotated[
        bool, Option("--forget", help="only drop the margins and paces that runs and checks left for later plans")
    ] = False,
    job: Annotated[
        str | None, Option("--job", help="only compile and time the blocks of this target, for later plans: see anyfit plan")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures this machine anew: compute, memory, copies, disk. Later plans use what it found."""
    from .probing.cache import forget_corrections, remeasured
    from .showing.terminal import show_machine, show_rows, shown_progress

    if forget:
        dropped = forget_corrections()
        if as_json:
            return _print_json({"dropped": dropped})
        for line in dropped or ["nothing: no run has left a margin"]:
            _console().print(f"dropped {line}", markup=False, highlight=False)
        return None
    if job is not None:
        from .measuring import told_of_blocks

        figures, rows = told_of_blocks(job)
        return _print_json(figures) if as_json else show_rows(rows, _console())
    with shown_progress("probing", _console(stderr=True)) as report:
        machine = remeasured("full" if full else "quick", report)
    if output is not None:
        machine.save(output)
    if as_json:
        return _print_json(machine.to_json())
    return show_machine(machine, _console())


@app.command()
def check(
    target: Target = "demo",
    plan: Annotated[Path | None, Option("--plan", help="a plan file; made anew when not given")] = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    real_run: RealRun = None,
    agree: Agree = None,
    steps: Annotated[int, Option("--steps", min=3, help="real steps to time")] = 8,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    as_json: Json = False,
) -> None:
    """A few real steps: predicted beside measured, and beside plain PyTorch. Later plans use what was measured."""
    from . import profile as make_profile
    from .planning import search
    from .probing.cache import keep_correction, keep_pace
    from .running.check import check as run_check
    from .targets import job_for
    from .tracing.blocks import kinds_of

    job = job_for(target, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, real_run=real_run, agree=agree)
    given = None if plan is None else Plan.load(plan)
    machine = _machine(None, None, None, device_memory, host_memory)
    made_of = make_profile(job, machine, ranks=1)
    found = run_check(job, given or search(made_of), made_of, machine, steps, kinds_of)
    if found.pace is not None:
        keep_pace(machine, found.pace)
    if found.correction is not None:
        keep_correction(machine, found.correction)
    if as_json:
        _print_json(found.to_json())
    else:
        from .showing.terminal import show_check

        show_check(found, _console())
    if found.parity is not None and not found.parity.agrees:
        _end(ValueError("the steps differ from plain PyTorch's by more than rounding explains"))


@app.command(context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def fit(
    script: Annotated[Path | None, Argument(help="your training script; the built-in demo when not given")] = None,
    arguments: Annotated[list[str] | None, Argument(help="the script's own arguments")] = None,
    folder: Annotated[Path | None, Option("--folder", help="the run folder; runs/<time> when not given")] = None,
    resume: Annotated[Path | None, Option("--resume", help="go on exactly where the run in this folder stopped")] = None,
    steps: Annotated[int | None, Option("--steps", min=1, help="steps in all (demo)")] = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    seed: Annotated[int | None, Option("--seed", min=0, help="of weights and data order (demo)")] = None,
    plan: Annotated[Path | None, Option("--plan", help="a plan file; made anew when not given")] = None,
    save_every: Annotated[int | None, Option("--save-every", min=0, help="steps between checkpoints; 0: at the end")] = None,
    keep: Annotated[int | None, Option("--keep", min=1, help="checkpoints that stay, the newest ones; 2")] = None,
    keep_every: Annotated[
        int | None, Option("--keep-every", min=0, help="and those whose step is a multiple of this stay as well")
    ] = None,
    log_every: Annotated[int, Option("--log-every", min=1, help="steps between lines, without a terminal")] = 10,
    deterministic: Annotated[bool, Option("--deterministic", help="two runs give the same bits")] = False,
    no_compile: NoCompile = False,
    timeline: Annotated[
        Path | None, Option("--timeline", help="write what each lane did in a few steps to this .json, and draw it beside")
    ] = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    gpus: Annotated[
        int | None, Option("--gpus", min=1, help="on so many GPUs of this machine, a process each; without GPUs, on its CPU")
    ] = None,
    ranks: Annotated[
        int | None, Option("--ranks", min=1, help="in so many processes, whatever GPUs there are: they may share one")
    ] = None,
    restarts: Annotated[
        int | None, Option("--restarts", min=0, help="times that ranks which die are started again, from the last checkpoint")
    ] = None,
    hang_seconds: Annotated[
        float | None,
        Option("--hang-seconds", min=1, callback=finite, help="a rank that waits longer for the others gives up; 600"),
    ] = None,
) -> None:
    """Trains: the built-in demo (a byte-level GPT that learns Python's own source), or your script.

    Options before the script's name are anyfit's, those after it its own. With --gpus N it is started N times, and each of them
    trains on its share of every batch; torchrun and srun may start it so as well: torchrun --nproc-per-node 4 -m anyfit fit …
    """
    asked = dict(locals())
    from .fit_command import Fit

    Fit(**asked).run()


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(help="a checkpoint, or a run folder: then its newest whole one")],
    output: Annotated[Path, Argument(help="the folder to write")],
    shard_size: Annotated[str, Option("--shard-size", callback=size, help="of a file of it, at most")] = "5GB",
    dtype: Annotated[str | None, Option("--dtype", help="bf16 or fp32; what the run has when not given")] = None,
) -> None:
    """Writes a checkpoint's weights as a folder of safetensors, which transformers loads."""
    from .running.checkpoint import newest
    from .running.export import export as write

    if dtype is not None and dtype not in PRECISIONS:
        raise ValueError(f"--dtype {dtype} is not known" + nearest(dtype, PRECISIONS))
    if output.suffix == ".safetensors":
        raise ValueError(f"{output} is to be a folder, with the safetensors in it; try {output.with_suffix('')}")

    if (checkpoint / "checkpoints").is_dir():
        found, passed_over = newest(checkpoint / "checkpoints")
        if found is None:
            raise FileNotFoundError(f"{checkpoint} holds no whole checkpoint" + "".join(f"; {why}" for why in passed_over))
        checkpoint = found
    done = write(checkpoint, output, parse_bytes(shard_size), dtype)  # type: ignore[arg-type]
    files = f"{done.files} file{'s' * (done.files > 1)}"
    typer.echo(f"{done.tensors} tensors of {checkpoint}, {show_bytes(done.bytes)} in {files}, in {output}")
    if done.beside:
        typer.echo(f"also {', '.join(done.beside)}")


def main() -> None:
    """Runs the command line; what the user can mend is one line and status 2, anything else keeps its traceback. With --json the
    error is an object on stdout as well."""
    try:
        with status_line():
            app()
    except SystemExit as ended:
        refused: Any = ended.__context__  # of an option: the line has been shown
        if ended.code and _wants_json() and hasattr(refused, "format_message"):
            _print_json({"error": type(refused).__name__, "message": refused.format_message()})
        raise
    except Exception as error:
        if _wants_json():
            _print_json(error_json(error))
        team = None
        if "anyfit.running.launch" in sys.modules:  # else there is no other rank
            from .running.launch import team as met

            team = met()
        if team is None:
            line, status = in_words(error)
            if line is None:
                raise
            print(f"anyfit: {line}", file=sys.stderr)
        else:
            status = team.ending.show(error, in_words)
            team.ending.end(status)
        sys.exit(status)


def _wants_json() -> bool:
    """Whether the verb has an option --json, and was given it."""
    verbs = {each.callback.__name__: each.callback for each in app.registered_commands if each.callback is not None}
    verb, *given = *sys.argv[1:], "--"
    return verb in verbs and "as_json" in inspect.signature(verbs[verb]).parameters and "--json" in given[: given.index("--")]


def _end(error: Exception) -> NoReturn:
    """Ends with an error's line and status after the answer was printed, which is the only JSON on stdout."""
    line, status = in_words(error)
    print(f"anyfit: {line}", file=sys.stderr)
    raise typer.Exit(status)


def _machine(
    name: str | None, gpus: int | None, nodes: int | None, device_memory: str | None, host_memory: str | None
) -> Machine:
    from . import probe

    machine = probe() if name is None else Machine.load(name)
    return machine.with_devices(gpus, nodes).with_limits(device_memory=device_memory, host_memory=host_memory)


def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    console = Console(stderr=stderr)
    if not console.is_terminal and "COLUMNS" not in os.environ:
        console.width = COLUMNS_IN_A_PIPE
    return console


def _print_json(document: Any) -> None:
    typer.echo(json.dumps(document, indent=1))
