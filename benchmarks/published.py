"""How near do forecasts come to runs on many GPUs that others published, configured as their authors did?

    python -m benchmarks.published [--only NAME] [--write]

Prints forecast beside published, and what a plan of our own would take on the same machine by the same forecast; with --write the
table goes into docs/accuracy.md, and docs/published.svg is drawn from it. Needs no GPU. Megatron-LM's rows are of table 1 of
Narayanan and others, "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021); what the paper
does not print, micro-batches and stages a rank, of the scripts that its authors published for that table. torchtitan's are of its
docs/performance.md and benchmarks/llama3_h100_202412_torchtitan.md, with the presets of the time.

A forecast is made of a preset, as any plan's. Nothing is fitted to a row but one figure that no datasheet prints: which share of
a full H100's products torchtitan's cards of 500 W reach, which is taken from the run on 8 of them (`torchtitan.h100_share`).
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import anyfit
from anyfit import Plan
from anyfit.showing.printing import console
from anyfit.values.units import show_bytes

from . import megatron, torchtitan
from .picture import framed

PAGE = Path(__file__).parents[1] / "docs" / "accuracy.md"
PICTURE = PAGE.with_name("published.svg")
BEGIN, END = "<!-- python -m benchmarks.published writes this table -->", "<!-- end of the table -->"
ROOM = "1TiB"  # of a device, for what did run: it is forecast whether or not it would fit with our margins
COLUMNS = ("run", "GPUs", "as its authors had it", "published, a GPU", "forecast", "off", "our own plan", "faster")
Run = megatron.Run | torchtitan.Run
RUNS: tuple[Run, ...] = (*megatron.RUNS, *torchtitan.RUNS)


@dataclass(frozen=True)
class Held:
    """A run beside its forecasts."""

    run: Run

    @cached_property
    def configured(self) -> Plan:
        return self.run.configured(ROOM)

    @cached_property
    def ours(self) -> Plan:
        return anyfit.plan(self.run.job, self.run.machine)

    @property
    def forecast(self) -> float:
        """In the run's unit, a GPU."""
        return self.run.rate(self.configured.forecast.mean_step_seconds)

    @property
    def off(self) -> float:
        """Of what was published."""
        return self.forecast / self.run.published - 1

    @property
    def is_within(self) -> bool:
        return abs(self.off) <= self.run.tolerance

    @property
    def gained(self) -> float:
        """By how much our own plan is faster than theirs, both by their forecasts."""
        return self.configured.forecast.mean_step_seconds / self.ours.forecast.mean_step_seconds - 1

    @property
    def forecast_cells(self) -> tuple[str, ...]:
        """Of its row, without our own plan."""
        run = self.run
        off = "taken for its cards" if run == torchtitan.FITTED else f"{100 * self.off:+.1f} %"
        return run.name, str(run.gpus), run.said, f"{run.published:.0f} {run.unit}", f"{self.forecast:.0f}", off

    @property
    def cells(self) -> tuple[str, ...]:
        return *self.forecast_cells, said(self.ours), f"{100 * self.gained:.0f} %"


def said(plan: Plan) -> str:
    """Its mesh, what is sharded and what is recomputed."""
    axes = " x ".join(f"{length} {name}" for name, length in plan.mesh.items() if length > 1)
    choices = {each.name: each.choice for each in plan.decisions}
    sharded = choices["ranks"].partition(": ")[2] or choices["ranks"]
    return f"{axes}; {sharded}; {choices['micro-batch']}; {choices['activations']}"


def table_of(found: Sequence[Held]) -> str:
    lines = [COLUMNS, ("---",) * len(COLUMNS), *(each.cells for each in found)]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def written(page: str, table: str) -> str:
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin, f"{PAGE.name} has no place for the table"
    assert end, f"{PAGE.name} does not say where the table ends"
    return f"{before}{begin}\n\n{table}\n\n{end}{after}"


# ---------------------------------------------------------------------- the picture

WIDTH, LEFT, TOP, ROW, SIDE, RADIUS = 900, 160, 44, 22, 420, 4.5
MOST = 20  # percent off, at the ends of the axis
LIGHT, DARK = ".mark { fill: #0072b2; } .middle { stroke: #1f2328; }", ".mark { fill: #4aa3df; } .middle { stroke: #e6edf3; }"


def draw(page: str) -> str:
    """The table of the page: a row a run, and how far its forecast is from what was published."""
    table = page.partition(BEGIN)[2].partition(END)[0].strip().splitlines()[2:]
    rows = [dict(zip(COLUMNS, line.strip("| ").split(" | "), strict=True)) for line in table]
    bottom, middle = TOP + ROW * len(rows), LEFT + SIDE / 2
    parts = []
    for tick in range(-MOST, MOST + 1, 10):
        x, style, words = (
            middle + SIDE / 2 * tick / MOST,
            "line" if tick else "line middle",
            f"{tick:+d} %" if tick else "as published",
        )
        parts.append(f'<line class="{style}" x1="{x:.1f}" y1="{TOP - 8}" x2="{x:.1f}" y2="{bottom}"/>')
        parts.append(f'<text class="faint" x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{words}</text>')
    for index, row in enumerate(rows):
        y, name = TOP + ROW * index + 4, f"{row['run']} on {row['GPUs']}"
        parts.append(f'<text class="ink" x="{LEFT - 12}" y="{y + 4}" text-anchor="end">{name}</text>')
        said = f"{row['published, a GPU']}, forecast {row['forecast']}"
        if row["off"].endswith(" %"):
            x = middle + SIDE / 2 * float(row["off"].removesuffix(" %")) / MOST
            parts.append(f'<circle class="mark" cx="{x:.1f}" cy="{y}" r="{RADIUS}"><title>{said}</title></circle>')
        else:
            said += f": {row['off']}"
        parts.append(f'<text class="faint" x="{LEFT + SIDE + 12}" y="{y + 4}">{said}</text>')
    title = "Runs that others published: how much faster, or slower, their forecasts are"
    return framed(title, WIDTH, bottom + 28, parts, LIGHT, DARK)


def main() -> None:
    from rich.table import Table

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="runs whose name has this")
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    if options.only and options.write:
        parser.error("--write writes all rows; leave --only out")
    found, screen, table = [], console(), Table(*COLUMNS)
    for run in RUNS:
        if not options.only or options.only in run.name:
            began = time.perf_counter()
            found.append(Held(run))
            table.add_row(*found[-1].cells)
            took, memory = time.perf_counter() - began, show_bytes(found[-1].configured.forecast.reserved_bytes)
            screen.print(f"{run.name} on {run.gpus}: {found[-1].off:+.1%}, in {memory} each; {took:.0f} s", highlight=False)
    screen.print(table)
    screen.print(f"share of an H100's products that cards of 500 W reach: {torchtitan.h100_share():.3f}", highlight=False)
    if options.write:
        PAGE.write_text(written(PAGE.read_text(), table_of(found)))
        PICTURE.write_text(draw(PAGE.read_text()))


if __name__ == "__main__":
    main()
