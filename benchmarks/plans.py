"""Plans for llama-8b, llama-70b and gpt3-175b on 1 to 512 H100s: writes docs/plans.md. Needs no GPU.

python -m benchmarks.plans
"""

from __future__ import annotations

import math
import time
from pathlib import Path

from anyfit import Machine, NoPlan, Plan
from anyfit.asking import Question, planned
from anyfit.values.units import show_bytes, show_count, show_seconds

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


def machine_of(gpus: int) -> Machine:
    return Machine.load("h100-node").with_devices(min(gpus, 8), max(gpus // 8, 1))


def plan_of(model: str, gpus: int) -> Plan | NoPlan:
    """As `anyfit plan MODEL --machine h100-node --gpus ... --nodes ...` makes it."""
    machine = machine_of(gpus)
    question = Question(model, {"ranks": math.prod(machine.rank_grid())}, lambda name: machine, "h100-node")
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
    PAGE.write_text("\n".join([HEAD, *rows, "", *sections]))


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
    return "\n".join([f"## {model} on {gpus}", "", RIGHT[model][gpus], "", "```text", *lines, "```", ""])


def _forecast_of(plan: Plan) -> list[str]:
    return [f"{name}: {text}" for name, text in plan.rows() if name in ("step", "of which", "device memory", "host memory")]


HEAD = """# Plans for many GPUs

What `anyfit plan MODEL --machine h100-node --gpus G --nodes N` makes of three models on 1 to 512 H100s, in nodes of eight, with 8
samples a GPU and step, of 1024 tokens (2048 of gpt3-175b), in bf16 with AdamW. All figures are forecasts from datasheets: nothing
here has run on as many GPUs. `python -m benchmarks.plans` writes this page, and
[tests/planning/test_plans.py](../tests/planning/test_plans.py) plans some of it anew. [planning.md](planning.md) says how the
choice is made. Memory is one GPU's, and its part of the host's; the last column is what planning took of one core.

| model | GPUs | sharded | device, host | activations | micro-batch | step | planned in |
|---|---|---|---|---|---|---|---|"""


if __name__ == "__main__":
    main()
