"""The command line: one flat verb a job. Torch is imported by the verb that needs it, so `--help` answers at once."""

from __future__ import annotations

import inspect
import sys
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer
from typer import Argument, Option

from . import __version__, fit_options
from .ending import error_json, in_words
from .fit_options import FitCommand
from .options import (
    ActivationsOfAll,
    Agree,
    Batch,
    Chunks,
    Command,
    DeviceMemory,
    Disk,
    Dtype,
    Gpus,
    HostMemory,
    Json,
    LayoutOption,
    Lora,
    MachineName,
    MeshAxes,
    MicroBatch,
    NoCompile,
    Nodes,
    OptimizerName,
    PlanBatch,
    PlanDeviceMemory,
    PlanHostMemory,
    RealRun,
    ScheduleName,
    Seq,
    Shard,
    Target,
    precision,
    size,
)
from .showing.printing import console, print_json
from .showing.status import status_line
from .values.answers import beside
from .values.doing import doing
from .values.plan import Plan
from .values.record import refuse_unwritable
from .values.units import parse_bytes, show_bytes

app = typer.Typer(
    name="anyfit",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"anyfit {__version__}")
        raise typer.Exit


@app.callback()
def anyfit(
    version: Annotated[
        bool, Option("--version", callback=_show_version, is_eager=True, help="say which version this is, and end")
    ] = False,
) -> None:
    """Any model, fit: says whether it fits, how fast it will be and why, and then trains it that way."""


@app.command(cls=Command)
def profile(
    target: Target = "demo",
    machine: MachineName = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    lora: Lora = None,
    real_run: RealRun = None,
    agree: Agree = None,
    gpus: Gpus = None,
    nodes: Nodes = None,
    device_memory: PlanDeviceMemory = None,
    host_memory: PlanHostMemory = None,
    depth: Annotated[int | None, Option("--depth", min=1, help="also every module, so many names deep")] = None,
    layouts: Annotated[
        bool, Option("--layouts", help="instead, how a tensor axis would cut each distinct block: its ops and what is exchanged")
    ] = False,
    tensor: Annotated[int, Option("--tensor", min=2, help="ranks of that axis; for --layouts")] = 2,
    layout: LayoutOption = None,
    as_json: Json = False,
) -> None:
    """Parameters, FLOPs, seconds and bytes of every block.

    The model is not run.
    """
    from . import profile as make_profile
    from .profiling import with_calls
    from .targets import job_for, machine_for, module_costs, name_of, tell_of_default

    on = machine_for(machine, gpus, nodes, device_memory, host_memory)
    job = job_for(target, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, lora=lora, real_run=real_run, agree=agree)
    tell_of_default(target)
    if layouts:
        from .meshing import show_cut

        return show_cut(job, on, tensor, layout, as_json=as_json)
    if as_json and depth is None:
        return print_json(make_profile(job, on, ranks=1).to_json())
    from .costing import cost
    from .planning.forecast import forecast
    from .probing.host import free_memory_bytes
    from .showing.terminal import show_modules, show_profile
    from .tracing import trace

    largest = job.micro_batch or job.batch_size  # the tables are of this micro-batch alone
    graph = trace(job, largest, on.device.kind, free_memory_bytes())
    on = with_calls(on, [graph])
    made = replace(cost([graph], on, job.batch_size), name=name_of(target))
    modules = [] if depth is None else module_costs(job, graph, on, depth)
    if as_json:
        return print_json({"profile": made.to_json(), "modules": [asdict(module) for module in modules]})
    screen = console()
    if modules:
        show_modules(made, modules, screen)
    attention_flops = sum(op.flops for op in graph.ops if op.kind == "attention")
    return show_profile(made, forecast(made, made.passes[0]), attention_flops, screen)


@app.command(cls=Command)
def plan(
    target: Target = "demo",
    machine: MachineName = None,
    batch: PlanBatch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    lora: Lora = None,
    real_run: RealRun = None,
    agree: Agree = None,
    no_compile: NoCompile = False,
    gpus: Gpus = None,
    nodes: Nodes = None,
    device_memory: PlanDeviceMemory = None,
    host_memory: PlanHostMemory = None,
    disk: Disk = None,
    mesh: MeshAxes = None,
    layout: LayoutOption = None,
    schedule: ScheduleName = None,
    chunks: Chunks = None,
    micro_batch: MicroBatch = None,
    activations: ActivationsOfAll = None,
    shard: Shard = None,
    what_if: Annotated[
        list[str] | None,
        Option("--what-if", help="also with one change, such as device-memory=40GiB, batch=16 or machine=h200; repeatable"),
    ] = None,
    compare: Annotated[
        str | None,
        Option("--compare", help="machines to rank, each with its best batch: rtx-4090,h200,mine.json, or all"),
    ] = None,
    tokens: Annotated[str | None, Option("--tokens", help="to train on, such as 10B; for --compare")] = None,
    price: Annotated[
        str | None, Option("--price", help="an hour's, such as h200=3.5,l4=0.7; for --compare; see anyfit machines")
    ] = None,
    output: Annotated[Path | None, Option("--output", "-o", help="also write the plan to this file")] = None,
    as_json: Json = False,
) -> None:
    """Does it fit, how fast will it be, and why? Needs no GPU.

    Also what a change would make of it (--what-if), and which machine is best (--compare).
    """
    asked = dict(locals())
    with doing("loading torch"):
        from .plan_command import Ask

    Ask(**asked).run()


@app.command()
def why(
    plan: Annotated[Path, Argument(help="a plan file")],
    other: Annotated[str | None, Argument(help="one of its decisions, or a second plan file to compare with")] = None,
    as_json: Json = False,
) -> None:
    """Explains a plan, one of its decisions, or what differs in two."""
    from .showing.terminal import show_beside, show_rows

    first = Plan.load(plan)
    if other is not None and (Path(other).exists() or other.endswith(".json")):
        plans = {str(plan): first, f"{other} (again)" if other == str(plan) else other: Plan.load(other)}
        return print_json(beside(plans)) if as_json else show_beside(plans, console())
    rows = first.explained(other)
    if as_json:
        return print_json(rows)
    return show_rows(rows, console())


@app.command()
def machines(
    name: Annotated[str | None, Argument(help="one of them: then all its figures, with their sources")] = None,
    as_json: Json = False,
) -> None:
    """The machines that can be planned for without having them.

    With their memory, speed and links from datasheets, and what renting them takes: typical prices, dated, or your own from
    ~/.config/anyfit/prices.json.
    """
    from .machines_command import show

    show(name, as_json=as_json)


@app.command()
def probe(
    full: Annotated[bool, Option("--full", help="more sizes and repeats")] = False,
    output: Annotated[Path | None, Option("--output", "-o", help="also write the machine to this file")] = None,
    forget: Annotated[
        bool, Option("--forget", help="only drop the margins and paces that runs and checks left for later plans")
    ] = False,
    job: Annotated[
        str | None, Option("--job", help="only compile and time the blocks of this target, for later plans: see anyfit plan")
    ] = None,
    as_json: Json = False,
) -> None:
    """Measures this machine anew: compute, memory, copies, disk. Later plans use what it found.

    To the disk it writes at most 4 GiB, in a file without a name.
    """
    from .probing.cache import forget_corrections, remeasured
    from .showing.terminal import show_machine, show_rows, shown_progress

    if output is not None and (forget or job is not None):
        raise ValueError(f"{'--forget' if forget else '--job'} measures no machine that could be written; leave --output out")
    if output is not None:
        refuse_unwritable(output)
    if forget:
        dropped = forget_corrections()
        if as_json:
            return print_json({"dropped": dropped})
        for line in dropped or ["nothing: no run has left a margin"]:
            console().print(f"dropped {line}", markup=False, highlight=False)
        return None
    if job is not None:
        from .measuring import told_of_blocks

        figures, rows = told_of_blocks(job)
        return print_json(figures) if as_json else show_rows(rows, console())
    with shown_progress("probing", console(stderr=True)) as report:
        machine = remeasured("full" if full else "quick", report)
    if output is not None:
        machine.save(output)
    if as_json:
        return print_json(machine.to_json())
    return show_machine(machine, console())


@app.command(cls=Command)
def check(
    target: Target = "demo",
    plan: Annotated[Path | None, Option("--plan", help="a plan file; made anew when not given")] = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    lora: Lora = None,
    real_run: RealRun = None,
    agree: Agree = None,
    steps: Annotated[int, Option("--steps", min=3, help="real steps to time")] = 8,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    as_json: Json = False,
) -> None:
    """A few real steps: the forecast beside what is measured.

    Their losses are compared with plain PyTorch's. Later plans use what was measured.
    """
    asked = dict(locals())
    from .check_command import check as run_check

    run_check(**asked)


@app.command()
def report(
    what: Annotated[Path, Argument(help="a plan file, or the folder of a run")],
    output: Annotated[Path | None, Option("--output", "-o", help="the HTML file; report.html when not given")] = None,
    timeline: Annotated[Path | None, Option("--timeline", help="that anyfit fit --timeline wrote, to be shown too")] = None,
    perfetto: Annotated[Path | None, Option("--perfetto", help="also write the step's timeline for ui.perfetto.dev")] = None,
    job: Annotated[str | None, Option("--job", help="the model, as anyfit plan takes it, to plan it elsewhere")] = None,
    machine: MachineName = None,
    seq: Seq = None,
    optimizer: OptimizerName = None,
    lora: Lora = None,
    compare: Annotated[str | None, Option("--compare", help="machines whose cost is shown: h100,l40s, or all")] = None,
    tokens: Annotated[str | None, Option("--tokens", help="to train on, such as 10B; for --compare")] = None,
) -> None:
    """A plan or a run as one HTML file, to look at in a browser.

    Memory over a step, who works when, blocks by choice, what else was weighed; of a run its curves beside the forecast. The file
    asks nothing of a network. What takes planning anew is there with --job.
    """
    asked = dict(locals())
    from .report_command import Report

    Report(**asked).run()


@app.command(cls=FitCommand, context_settings={"allow_interspersed_args": False, "ignore_unknown_options": False})
def fit(
    script: fit_options.What = None,
    arguments: fit_options.Arguments = None,
    data: fit_options.Data = None,
    evaluation: fit_options.Evaluation = None,
    eval_every: fit_options.EvalEvery = None,
    epochs: fit_options.Epochs = None,
    lr: fit_options.LearningRate = None,
    schedule: fit_options.ScheduleName = None,
    warmup: fit_options.Warmup = None,
    packing: fit_options.Packing = None,
    samples: fit_options.Samples = None,
    lora: fit_options.Lora = None,
    report_to: fit_options.ReportTo = None,
    folder: fit_options.Folder = None,
    resume: fit_options.Resume = None,
    steps: fit_options.Steps = None,
    batch: Batch = None,
    seq: Seq = None,
    dtype: Dtype = None,
    optimizer: OptimizerName = None,
    seed: fit_options.Seed = None,
    plan: fit_options.PlanFile = None,
    save_every: fit_options.SaveEvery = None,
    keep: fit_options.Keep = None,
    keep_every: fit_options.KeepEvery = None,
    log_every: fit_options.LogEvery = 10,
    deterministic: fit_options.Deterministic = False,
    no_compile: NoCompile = False,
    timeline: fit_options.Timeline = None,
    device_memory: DeviceMemory = None,
    host_memory: HostMemory = None,
    disk: Disk = None,
    mesh: MeshAxes = None,
    layout: LayoutOption = None,
    gpus: fit_options.FitGpus = None,
    ranks: fit_options.Ranks = None,
    restarts: fit_options.Restarts = None,
    hang_seconds: fit_options.HangSeconds = None,
    disk_folder: fit_options.DiskFolder = None,
    any_file_system: fit_options.AnyFileSystem = False,
) -> None:
    """Trains a Hugging Face folder, your script, or the built-in demo.

    The demo is a byte-level GPT that learns Python's own source code.

    Options before a script's name are anyfit's, those after it its own. A folder is fine-tuned on --data, without a script:
    anyfit fit FOLDER --data data.jsonl --eval 5%. With --gpus N it is started N times, and each of them trains on its share of
    every batch; torchrun and srun may start it so as well: torchrun --nproc-per-node 4 -m anyfit fit …
    """
    asked = dict(locals())
    from .fit_command import Fit

    Fit(**asked).run()


@app.command()
def export(
    checkpoint: Annotated[Path, Argument(help="a checkpoint, or a run folder: then its newest whole one")],
    output: Annotated[Path, Argument(help="the folder to write")],
    shard_size: Annotated[str, Option("--shard-size", callback=size, help="of a file of it, at most")] = "5GB",
    dtype: Annotated[
        str | None, Option("--dtype", callback=precision, help="bf16 or fp32; what the run has when not given")
    ] = None,
    merge: Annotated[bool, Option("--merge", help="adapters into the weights of their layers: a plain model")] = False,
) -> None:
    """Writes a checkpoint's weights as a folder for transformers.

    They are safetensors. Of an adapted model it is the adapter, which PEFT loads, or with --merge a plain model.
    """
    from .running.checkpoint import newest
    from .running.export import export as write
    from .running.export import export_merged

    if output.suffix == ".safetensors":
        raise ValueError(f"{output} is to be a folder, with the safetensors in it; try {output.with_suffix('')}")

    if (checkpoint / "checkpoints").is_dir():
        found, passed_over = newest(checkpoint / "checkpoints")
        if found is None:
            raise FileNotFoundError(f"{checkpoint} holds no whole checkpoint" + "".join(f"; {why}" for why in passed_over))
        checkpoint = found
    done = (export_merged if merge else write)(checkpoint, output, parse_bytes(shard_size), dtype)  # type: ignore[arg-type]
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
            print_json({"error": type(refused).__name__, "message": refused.format_message()})
        raise
    except Exception as error:
        if _wants_json():
            print_json(error_json(error))
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
