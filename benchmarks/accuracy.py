"""How near did forecasts come to the steps that were measured after them, by family of models?

    python -m benchmarks.accuracy

Reads what benchmarks/planned.py and benchmarks/profiler.py recorded on GPUs, measures nothing, prints a line a family, and draws
docs/accuracy.svg: a point a step, its forecast of then against its measurement. Points that are not filled are of rows that are
excluded, which say why; those with a ring are of jobs that clip at every step.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

from anyfit.values.calibration import Calibration
from anyfit.values.units import show_seconds

from . import record
from .cases import Case
from .picture import framed
from .planned import JOBS

PICTURE = Path(__file__).parents[1] / "docs" / "accuracy.svg"
BAND = Calibration.of("cuda").offload_time_error.value
# By kind of a case: its name, its shape, and its colour in light and in dark. Shapes: language models, encoders, convolutions.
FAMILIES = {
    "gpt2": ("GPT-2", "disc", "#0072b2", "#4aa3df"),
    "llama": ("Llama", "disc", "#d55e00", "#ff8a3d"),
    "qwen3": ("Qwen3", "disc", "#009e73", "#2fd0a3"),
    "gemma3_text": ("Gemma 3", "disc", "#7b3294", "#c58be0"),
    "mixtral": ("Mixtral", "disc", "#a6761d", "#e0b040"),
    "demo": ("plain GPT", "disc", "#59636e", "#b6bec7"),
    "bert": ("BERT", "square", "#0072b2", "#4aa3df"),
    "t5": ("T5", "square", "#d55e00", "#ff8a3d"),
    "vit": ("ViT", "square", "#009e73", "#2fd0a3"),
    "resnet": ("ResNet", "triangle", "#0072b2", "#4aa3df"),
    "convnext": ("ConvNeXt", "triangle", "#d55e00", "#ff8a3d"),
}


@dataclass(frozen=True)
class Point:
    kind: str
    name: str
    measured: float  # seconds a step
    forecast: float
    is_excluded: bool
    clips: bool = False  # at every step

    @property
    def off(self) -> float:
        return self.forecast / self.measured - 1


def points() -> list[Point]:
    """All steps that were forecast and then measured on a GPU."""
    planned = [
        (JOBS[row["job"]].whole_case, f"{row['job']}, {row['plan']}", row, JOBS[row["job"]].clips)
        for recording in record.recordings("planned", "regret")
        for row in recording.rows
    ]
    resident = [
        (case, case.name, row, False)
        for recording in record.recordings("profiler")
        for row in recording.rows
        for case in [Case.from_json(row["case"])]
    ]
    return [
        Point(case.kind, name, row["measured"]["step_seconds"], row["predicted_then"]["step_seconds"], "excluded" in row, clips)
        for case, name, row, clips in planned + resident
    ]


def line_of(kind: str, found: list[Point]) -> str:
    """'GPT-2: 203 steps, median 3.8 %, worst 24 %', off its forecast, of those that count."""
    return _line(FAMILIES[kind][0], [point for point in found if point.kind == kind])


def clipped_line(found: list[Point]) -> str:
    return _line("all clip", [point for point in found if point.clips])


def _line(name: str, found: list[Point]) -> str:
    off = [abs(point.off) for point in found if not point.is_excluded]
    if not off:
        return f"{name}: excluded"
    median, worst = (f"{100 * share:.{int(share < 0.1)}f} %" for share in (statistics.median(off), max(off)))
    return f"{name}: {len(off)} steps, median {median}, worst {worst}"


# ---------------------------------------------------------------------- the picture

WIDTH, LEFT, TOP, SIDE, RADIUS = 900, 62, 40, 520, 3.6
ALL_STEPS = [float(f"{step}e{decade}") for decade in range(-6, 6) for step in (1, 2, 5)]  # seconds, where an axis has a tick
LIGHT = (
    ".mark { fill-opacity: 0.5; stroke-width: 1.2; } .excluded { fill-opacity: 0; } "
    ".ring { fill: none; stroke: #1f2328; stroke-width: 1; } "
    ".band { fill: #1f2328; fill-opacity: 0.08; } .diagonal { stroke: #1f2328; stroke-width: 1.2; }"
)
DARK = ".ring { stroke: #e6edf3; } .band { fill: #e6edf3; fill-opacity: 0.12; } .diagonal { stroke: #e6edf3; }"


@dataclass(frozen=True)
class Axis:
    """Seconds from `low` to `high` on a logarithmic scale, the same from left to right and from bottom to top."""

    low: float
    high: float

    @classmethod
    def over(cls, seconds: list[float]) -> Axis:
        """From the last step before them to the first after them."""
        low = max(step for step in ALL_STEPS if step <= min(seconds))
        return cls(low, min(step for step in ALL_STEPS if step >= max(seconds)))

    def at(self, seconds: float) -> float:
        return SIDE * math.log(seconds / self.low) / math.log(self.high / self.low)

    def x(self, seconds: float) -> float:
        return LEFT + self.at(seconds)

    def y(self, seconds: float) -> float:
        return TOP + SIDE - self.at(seconds)

    @property
    def ticks(self) -> list[float]:
        return [step for step in ALL_STEPS if self.low <= step <= self.high]


def draw(found: list[Point]) -> str:
    """As an SVG document: log by log, with the diagonal, the stated band around it, and a legend by family."""
    axis = Axis.over([seconds for point in found for seconds in (point.measured, point.forecast)])
    kinds = [kind for kind in FAMILIES if any(point.kind == kind for point in found)]
    ordered = sorted(found, key=lambda point: -sum(other.kind == point.kind for other in found))  # the rare ones on top
    parts = [*_grid(axis), *_band(axis), *(_mark(point, axis) for point in ordered), *_rings(found, axis), *_legend(kinds, found)]
    light = " ".join(f".{kind} {{ fill: {FAMILIES[kind][2]}; stroke: {FAMILIES[kind][2]}; }}" for kind in kinds)
    dark = " ".join(f".{kind} {{ fill: {FAMILIES[kind][3]}; stroke: {FAMILIES[kind][3]}; }}" for kind in kinds)
    title = "Seconds a step on a GPU: forecast before it ran, against measured"
    return framed(title, WIDTH, TOP + SIDE + 48, parts, f"{LIGHT} {light}", f"{DARK} {dark}")


def _grid(axis: Axis) -> Iterator[str]:
    low, high = LEFT, LEFT + SIDE
    for tick in axis.ticks:
        x, y, words = axis.x(tick), axis.y(tick), f"{tick:g} s"
        yield f'<line class="line" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + SIDE}"/>'
        yield f'<line class="line" x1="{low}" y1="{y:.1f}" x2="{high}" y2="{y:.1f}"/>'
        yield f'<text class="faint" x="{x:.1f}" y="{TOP + SIDE + 16}" text-anchor="middle">{words}</text>'
        yield f'<text class="faint" x="{low - 6}" y="{y + 4:.1f}" text-anchor="end">{words}</text>'
    middle = TOP + SIDE / 2
    yield f'<text class="ink" x="{low + SIDE / 2:.1f}" y="{TOP + SIDE + 36}" text-anchor="middle">measured</text>'
    turned = f'text-anchor="middle" transform="rotate(-90 16 {middle:.1f})"'
    yield f'<text class="ink" x="16" y="{middle:.1f}" {turned}>forecast</text>'


def _band(axis: Axis) -> Iterator[str]:
    """Where a forecast is off by at most BAND of what is measured; cut off where the axes end."""
    low, high, above, below = axis.low, axis.high, 1 + BAND, 1 - BAND
    corners = [(low, low), (low, low * above), (high / above, high), (high, high), (high, high * below), (low / below, low)]
    path = " ".join(f"{axis.x(x):.1f},{axis.y(y):.1f}" for x, y in corners)
    yield f'<polygon class="band" points="{path}"/>'
    ends = f'x1="{axis.x(low):.1f}" y1="{axis.y(low):.1f}" x2="{axis.x(high):.1f}" y2="{axis.y(high):.1f}"'
    yield f'<line class="diagonal" {ends}/>'


def _mark(point: Point, axis: Axis) -> str:
    said = f"{point.name}: {show_seconds(point.measured)}, forecast {show_seconds(point.forecast)} ({point.off:+.1%})"
    return _shape(point.kind, axis.x(point.measured), axis.y(point.forecast), said, is_excluded=point.is_excluded)


def _rings(found: list[Point], axis: Axis) -> Iterator[str]:
    for point in found:
        if point.clips:
            yield _ring(axis.x(point.measured), axis.y(point.forecast))


def _ring(x: float, y: float) -> str:
    return f'<circle class="ring" cx="{x:.1f}" cy="{y:.1f}" r="{2 * RADIUS:.1f}"/>'


def _shape(kind: str, x: float, y: float, said: str = "", *, is_excluded: bool = False) -> str:
    style = f'class="mark {kind}{" excluded" * is_excluded}"'
    title = f"<title>{escape(said)}</title>" if said else ""
    match FAMILIES[kind][1]:
        case "square":
            corner = f'x="{x - RADIUS:.1f}" y="{y - RADIUS:.1f}" width="{2 * RADIUS}" height="{2 * RADIUS}"'
            return f"<rect {style} {corner}>{title}</rect>"
        case "triangle":
            wide, tall = 1.2 * RADIUS, 1.1 * RADIUS
            corners = [(x - wide, y + tall), (x + wide, y + tall), (x, y - tall)]
            path = " ".join(f"{a:.1f},{b:.1f}" for a, b in corners)
            return f'<polygon {style} points="{path}">{title}</polygon>'
        case _:
            return f'<circle {style} cx="{x:.1f}" cy="{y:.1f}" r="{RADIUS}">{title}</circle>'


def _legend(kinds: list[str], found: list[Point]) -> Iterator[str]:
    x, y = LEFT + SIDE + 24, TOP + 8
    for kind in kinds:
        yield _shape(kind, x, y)
        yield f'<text class="ink" x="{x + 10}" y="{y + 4}">{escape(line_of(kind, found))}</text>'
        y += 20
    y += 8
    yield _ring(x, y)
    yield f'<text class="ink" x="{x + 14}" y="{y + 4}">{escape(clipped_line(found))}</text>'
    y += 14
    left_out = sum(point.is_excluded for point in found)
    lines = (f"not filled: {left_out} excluded, each row says why", f"shaded: within {BAND:.0%}, the band that plans state")
    for index, words in enumerate(lines):
        yield f'<text class="faint" x="{x - 4}" y="{y + 14 + 18 * index}">{words}</text>'


def main() -> None:
    found = points()
    for kind in FAMILIES:
        print(line_of(kind, found))
    print(clipped_line(found))
    PICTURE.write_text(draw(found))


if __name__ == "__main__":
    main()
