"""Plans for llama-8b, llama-70b and gpt3-175b on 1 to 1024 GPUs of three kinds, and beside those of experts: writes
docs/plans.md. Needs no GPU.

python -m benchmarks.plans

What experts did, and what a plan of our own would take instead, is of the table in docs/accuracy.md, which
benchmarks/published.py writes.
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from anyfit import Machine, NoPlan, Plan
from anyfit.asking import Question, Traced, planned
from anyfit.meshing import Axes
from anyfit.planning.meshes import search_meshes
from anyfit.targets import job_for
from anyfit.values.units import show_bytes, show_count, show_seconds

from . import published

PAGE = Path(__file__).parents[1] / "docs" / "plans.md"
GPUS = (1, 8, 64, 512)
# Why each is right, as far as arithmetic on the back of an envelope goes. Sizes are a rank's unless said otherwise.
RIGHT = {
    "llama-8b": {
        1: "16 bytes a parameter are 128 GB, so that masters and moments go to the host, whose updates hide behind 0.9 s of "
        "computing; 2 TB of host memory leave room for a second generation, which lets them begin during backward.",
        8: "Masters, moments and gradients in eight parts take 14 GB, whole weights 16 GB: two passes then keep all activations. "
        "NVLink sums the gradients of both in 0.16 s, almost all of it behind backward; to recompute blocks would take longer.",
        64: "A second pass would mean a second sum through the network cards, so that it is one; sharding the weights too frees "
        "the room that its activations need, and gathering 16 GB twice at 345 GB/s hides behind 0.9 s of computing.",
        512: "As on 64: state is a gigabyte either way. Groups of 128 make it as small as matters, and gather no later than one "
        "group of 512 would.",
    },
    "llama-70b": {
        1: "1.1 TB of state is in the host's memory, weights too. Eight samples a step are enough computing for 141 GB to cross "
        "twice beside it; smaller micro-batches would fetch them again for each.",
        8: "1.1 TB do not fit in eight times 80 GB, so that masters and moments are in the host's memory, an eighth of them for "
        "each rank, and are updated there. The weights stay on the GPUs, an eighth on each, and are put together through NVLink "
        "once forward and once backward: that is what makes one pass of 8 worth it, with every block recomputed.",
        64: "State is 20 GB, and so all on the device; the rest goes to activations. Two passes of 4 recompute less than one "
        "of 8 would; they gather 141 GB twice as often, which still hides behind 6.6 s of computing.",
        512: "State is 3 to 5 GB, which leaves more for activations than on 64, and less to recompute. What is sharded over "
        "16 or less does not fit.",
    },
    "gpt3-175b": {
        1: "2.8 TB of state are more than the host has.",
        8: "2.8 TB of state, and fresh weights and gradients on their way, are more than eight GPUs and one host have.",
        64: "State is 50 GB, slots and stages for chunks of 2 GiB another 30: with most of it on the host, whose updates take a "
        "fraction of 38 s, there is room for passes of 4, with a little less to recompute.",
        512: "State is 6 GB: all on the device. Passes of 1 keep most, and their eight sums a step go through every network card "
        "behind 31 s of computing.",
    },
}


LONG, LONG_OPTIONS = ("llama-8b", 8), {"batch": 1, "seq": 131072}
LONG_TITLE = "## llama-8b on 8, one sample of 131072 tokens"
LONG_RIGHT = (
    "There is one sample, so that the data axis is 1 and all eight share it, cut along its length. What each block exchanges for "
    "attention is small beside the 17 TFLOP of its forward a rank and block; that the rest of the weights is cut too is what "
    "makes room for activations. Embedding and head are divided by words."
)


KINDS = {"h100-node": "H100", "a100-node": "A100", "rtx-4090": "RTX 4090"}
MANY = (1, 8, 64, 1024)


def machine_of(gpus: int, kind: str = "h100-node") -> Machine:
    """In nodes of eight."""
    return Machine.load(kind).with_devices(min(gpus, 8), max(gpus // 8, 1))


def plan_on(model: str, gpus: int, kind: str) -> Plan | NoPlan:
    """The same on another kind of machine, or the bare verdict, without what would help."""
    machine = machine_of(gpus, kind)
    traced = Traced(job_for(model, ranks=gpus), model, Axes())
    try:
        return search_meshes(traced.meshes(machine))
    except NoPlan as verdict:
        return verdict


def kinds_row(model: str, gpus: int, kind: str) -> str:
    found = plan_on(model, gpus, kind)
    if isinstance(found, NoPlan):
        lacks = f"lacks at least {show_bytes(found.shortfall_bytes)} of {'host' if found.tier == 'host' else 'GPU'} memory"
        return f"| {model} | {gpus} | {KINDS[kind]} | does not fit | | | {lacks} |"
    choices = {each.name: each for each in found.decisions}
    axes = " x ".join(f"{length} {name}" for name, length in found.mesh.items() if length > 1) or "alone"
    sharded = choices["ranks"].choice.partition(": ")[2] or choices["ranks"].choice if "ranks" in choices else ""
    where = ", some state on the host" if found.forecast.peak_bytes["host"] else ""
    why = choices["layout"].why if "layout" in choices else choices.get("model state", choices["micro-batch"]).why
    step = f"{show_seconds(found.forecast.step_seconds)}, {show_count(found.forecast.tokens_per_second)} tokens/s"
    held = f"{axes}{f'; {sharded}' if sharded else ''}{where}"
    return f"| {model} | {gpus} | {KINDS[kind]} | {held} | {choices['micro-batch'].choice} | {step} | {why.partition(';')[0]} |"


def kinds_table() -> str:
    rows = [kinds_row(model, gpus, kind) for model in RIGHT for gpus in MANY for kind in KINDS]
    return "\n".join([KINDS_HEAD, *rows, ""])


def experts_table() -> str:
    """By the table of docs/accuracy.md."""
    table = published.PAGE.read_text().partition(published.BEGIN)[2].partition(published.END)[0].strip().splitlines()[2:]
    runs = [dict(zip(published.COLUMNS, line.strip("| ").split(" | "), strict=True)) for line in table]
    columns = ("run", "GPUs", "as its authors had it", "our own plan", "faster")
    rows = [f"| {' | '.join(run[name] for name in columns)} |" for run in runs]
    return "\n".join([EXPERTS_HEAD, *rows, ""])


def plan_of(model: str, gpus: int, **options: int) -> Plan | NoPlan:
    """As `anyfit plan MODEL --machine h100-node --gpus ... --nodes ...` makes it."""
    machine = machine_of(gpus)
    question = Question(model, {"ranks": math.prod(machine.rank_grid()), **options}, lambda name: machine, "h100-node")
    try:
        return planned(question, machine)
    except NoPlan as verdict:
        return verdict


def decisions_of(plan: Plan) -> list[str]:
    return [f"{each.name}: {each.choice}: {each.why}" for each in plan.decisions]


def main() -> None:
    rows, sections = [], []
    for model in RIGHT:
        for gpus in GPUS:
            began = time.process_time()
            found = plan_of(model, gpus)
            took = time.process_time() - began
            rows.append(_row(model, gpus, found, took))
            sections.append(_section(model, gpus, found))
            print(rows[-1], flush=True)
    sections.append(long_section())
    PAGE.write_text("\n".join([HEAD, *rows, "", kinds_table(), experts_table(), *sections]))


def _row(model: str, gpus: int, found: Plan | NoPlan, took: float) -> str:
    if isinstance(found, NoPlan):
        return f"| {model} | {gpus} | does not fit | | | | | {took:.0f} s |"
    forecast, choices = found.forecast, {each.name: each.choice for each in found.decisions}
    cells = [
        choices.get("ranks", "1: -").partition(": ")[2],
        f"{show_bytes(forecast.reserved_bytes)}, {show_bytes(forecast.peak_bytes['host'])}",
        choices["activations"],
        choices["micro-batch"],
        f"{show_seconds(forecast.step_seconds)}, {show_count(forecast.tokens_per_second)} tokens/s",
        f"{took:.0f} s",
    ]
    return f"| {model} | {gpus} | {' | '.join(cells)} |"


def _section(model: str, gpus: int, found: Plan | NoPlan) -> str:
    lines = [str(found)] if isinstance(found, NoPlan) else [*decisions_of(found), *_forecast_of(found)]
    return "\n".join([f"## {model} on {gpus}", "", RIGHT[model][gpus], "", *_folded(lines)])


def long_section() -> str:
    """One sample that no GPU has room for, and all of a node share."""
    found = plan_of(LONG[0], LONG[1], **LONG_OPTIONS)
    assert isinstance(found, Plan)
    lines = [*decisions_of(found), *_forecast_of(found)]
    return "\n".join([LONG_TITLE, "", LONG_RIGHT, "", *_folded(lines)])


def _folded(lines: list[str]) -> list[str]:
    """Out of sight until somebody opens it. Marked, since mkdocs takes what is inside for HTML otherwise."""
    opened = '<details markdown="1"><summary>The decisions and their prices</summary>'
    return [opened, "", "```text", *lines, "```", "", "</details>", ""]


def _forecast_of(plan: Plan) -> list[str]:
    return [f"{name}: {text}" for name, text in plan.rows() if name in ("step", "of which", "device memory", "host memory")]


KINDS_HEAD = """## Three kinds of machine

The same models with 8 samples a GPU, on GPUs in nodes of eight: H100s and A100s with NVLink, and RTX 4090s behind PCIe, each as
its preset has links and network. The reason is that of the mesh, the best other one with its price; of one GPU, what all on it
would need.

| model | GPUs | of | held | micro-batch | step | why |
|---|---|---|---|---|---|---|"""
EXPERTS_HEAD = """## Beside experts

Runs that others published ([accuracy.md](accuracy.md#runs-that-others-published) has them beside their forecasts), and what the
planner would have done on the same machine with the same job, both by forecast.

| run | GPUs | as its authors had it | our own plan | faster |
|---|---|---|---|---|"""
HEAD = """# Plans for many GPUs

What `anyfit plan MODEL --machine h100-node --gpus G --nodes N` makes of three models on 1 to 512 H100s, in nodes of eight, with 8
samples a GPU and step, of 1024 tokens (2048 of gpt3-175b), in bf16 with AdamW. All figures are forecasts from datasheets: nothing
here has run on as many GPUs. `python -m benchmarks.plans` writes this page, and
[tests/planning/test_plans.py](../tests/planning/test_plans.py) plans some of it anew. [planning.md](planning.md) says how the
choice is made, also between meshes with a tensor axis of 2, 4 and 8 and those without: with 8 samples a GPU none of these needs
one. Memory is one GPU's, and its part of the host's; the last column is what planning took of one core, solving
included, beside other work on the machine.

| model | GPUs | sharded | device, host | activations | micro-batch | step | planned in |
|---|---|---|---|---|---|---|---|"""


if __name__ == "__main__":
    main()
