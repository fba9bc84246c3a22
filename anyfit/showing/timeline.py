"""A recorded timeline for people: a table of how busy each lane was, and a picture (SVG) of what it did when.

The picture needs nothing but a browser: a row a lane, a box a span, coloured by kind, an axis in milliseconds. Boxes too narrow
to be told apart are drawn as one; pointing at a box says what it is.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from rich.console import Console
from rich.table import Table

from anyfit.values.record import read_json
from anyfit.values.units import show_seconds

WIDTH, LEFT, RIGHT, TOP = 1200, 112, 16, 58
ROW, BOX = 40, 28
LETTER = 6.2  # width of one in a box
NARROW = 2.0  # pixels: with a box of less its neighbour of the same kind may be joined
TICKS = 12

# By kind: its colour, and what it is. Told apart by lightness as well.
KINDS = {
    "forward": ("#0072b2", "forward"),
    "backward": ("#d55e00", "backward"),
    "norm": ("#7f7f7f", "gradient norm"),
    "update": ("#cc79a7", "update"),
    "finish": ("#edc9dd", "its moments, when all weights are updated"),
    "wait": ("#c9ccd1", "compute waits for a lane"),
    "fetch": ("#009e73", "weights of a chunk to a slot"),
    "lift": ("#1b5e20", "a chunk's state to the device for its update"),
    "lower": ("#a5d6a7", "and back to the host"),
    "upload": ("#7fd1b9", "updated weights back to the device"),
    "gradients": ("#e69f00", "gradients of a chunk to the host"),
    "add": ("#b38600", "micro-batches' gradients added up"),
    "weights": ("#c9a14a", "weights of the ranks' sums exchanged"),
    "speculate": ("#8064a2", "update before the norm is known"),
    "commit": ("#c5b0d5", "that update taken over"),
    "offload": ("#8c564b", "activations to the host"),
    "return": ("#c49c94", "activations back"),
    "gather": ("#17a2b8", "shards of weights from other ranks"),
    "reduce": ("#bcbd22", "gradients summed over ranks"),
    "other": ("#5b6770", "other"),
}


@dataclass(frozen=True)
class Box:
    label: str
    kind: str
    start: float  # milliseconds, as `end`
    end: float


@dataclass(frozen=True)
class Timeline:
    """What a trace file says."""

    title: str
    lanes: Mapping[str, Sequence[Box]]  # steps first
    step_seconds: float
    busy: Mapping[str, float]  # by lane, as a share of the time
    still: float  # of the computation
    waits: Mapping[str, float]  # of that: by what was waited for


def read(path: str | Path) -> Timeline:
    """A file that `anyfit fit --timeline` wrote."""
    document = read_json(Path(path), "timeline")
    about = document.get("metadata") if isinstance(document, dict) else None
    if not isinstance(about, dict) or about.get("anyfit") != "timeline":
        raise ValueError(f"{path}: not a timeline of anyfit; write one with anyfit fit --timeline {path}")
    return parse(document)


def parse(document: Mapping[str, Any]) -> Timeline:
    names: dict[int, str] = {}
    lanes: dict[str, list[Box]] = {}
    for event in document["traceEvents"]:
        if event["ph"] == "M" and event["name"] == "thread_name":
            names[event["tid"]] = event["args"]["name"]
            lanes[names[event["tid"]]] = []
        elif event["ph"] == "X":
            start, end = event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3
            lanes[names[event["tid"]]].append(Box(event["name"], event["cat"], start, end))
    about = document["metadata"]
    return Timeline(about["title"], lanes, about["step_seconds"], about["busy"], about["still"], about["waits"])


def show(timeline: Timeline, console: Console) -> None:
    """The share of the time that each lane was busy, and why the computation stood still."""
    table = Table("lane", "busy", "jobs")
    for name, share in timeline.busy.items():
        table.add_row(name, f"{share:.0%}", str(sum(box.kind != "wait" for box in timeline.lanes[name])))
    console.print(table)
    console.print(f"{_stood_still(timeline)}, in steps of {show_seconds(timeline.step_seconds)}", highlight=False)


def _stood_still(timeline: Timeline) -> str:
    waits = sorted(timeline.waits.items(), key=lambda item: -item[1])
    shown = [f"{share:.0%} waiting for {kind}" for kind, share in waits if share >= 0.005]
    return f"compute stood still {timeline.still:.0%} of the time" + (f" ({', '.join(shown)})" if shown else "")


def draw(timeline: Timeline) -> str:
    """The timeline as an SVG document."""
    steps = timeline.lanes["steps"]
    end = max(box.end for box in steps)
    scale = (WIDTH - LEFT - RIGHT) / end
    lanes = {name: boxes for name, boxes in timeline.lanes.items() if name != "steps"}
    bottom = TOP + ROW * len(lanes)
    legend = list(_legend(lanes, bottom + 44))
    height = bottom + 44 + 20 * (1 + max((line for line, _ in legend), default=0))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(timeline.title)}</title>",
        f"<style>{_style()}</style>",
        '<defs><pattern id="hatch" width="6" height="6" patternUnits="userSpaceOnUse" patternTransform="rotate(45)">'
        '<rect width="6" height="6" class="wait"/><rect width="2" height="6" fill="#8b9097"/></pattern></defs>',
        f'<rect class="paper" width="{WIDTH}" height="{height}"/>',
        f'<text class="ink big" x="8" y="20">{escape(timeline.title)}</text>',
        f'<text class="ink" x="{WIDTH - RIGHT}" y="20" text-anchor="end">{escape(_stood_still(timeline))}</text>',
    ]
    for index, step in enumerate(steps):
        x, width = LEFT + step.start * scale, (step.end - step.start) * scale
        shade = ' class="shade"' if index % 2 == 0 else ' fill="none"'
        parts.append(f'<rect{shade} x="{x:.1f}" y="34" width="{width:.1f}" height="{bottom - 34}"/>')
        parts.append(f'<text class="ink" x="{x + 4:.1f}" y="48">{escape(step.label)}</text>')
    parts += _axis(end, scale, bottom)
    for row, (name, boxes) in enumerate(lanes.items()):
        y = TOP + row * ROW
        parts.append(f'<text class="ink" x="8" y="{y + 16}">{escape(name)}</text>')
        parts.append(f'<text class="faint" x="8" y="{y + 30}">{timeline.busy.get(name, 0):.0%} busy</text>')
        for group in _groups(boxes, scale):
            parts.append(_box(group, y + (ROW - BOX) / 2, scale))
    parts += [text for _, text in legend]
    return "\n".join([*parts, "</svg>", ""])


def _style() -> str:
    # wait is also what other viewers show where they have no patterns
    kinds = " ".join(f".{kind} {{ fill: {colour}; }}" for kind, (colour, _) in KINDS.items())
    return (
        "text { font: 11px ui-sans-serif, system-ui, sans-serif; } .big { font-size: 13px; font-weight: 600; } "
        ".paper { fill: #ffffff; } .shade { fill: #f1f3f5; } .ink { fill: #1f2328; } .faint { fill: #59636e; } "
        ".line { stroke: #d1d9e0; } .on-dark { fill: #ffffff; } .on-light { fill: #111111; } "
        f"{kinds} "
        "@media (prefers-color-scheme: dark) { .paper { fill: #0d1117; } .shade { fill: #161b22; } .ink { fill: #e6edf3; } "
        ".faint { fill: #9198a1; } .line { stroke: #30363d; } }"
    )


def _axis(end: float, scale: float, bottom: int) -> Iterator[str]:
    rough = end / TICKS
    unit = 10.0 ** math.floor(math.log10(rough))
    tick = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= rough)
    for at in itertools.takewhile(lambda at: at <= end, (index * tick for index in itertools.count())):
        x = LEFT + at * scale
        yield f'<line class="line" x1="{x:.1f}" y1="{TOP - 4}" x2="{x:.1f}" y2="{bottom + 4}"/>'
        yield f'<text class="faint" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{at:g} ms</text>'


def _groups(boxes: Sequence[Box], scale: float) -> Iterator[list[Box]]:
    """Neighbours of a kind that the eye could not tell apart, together."""
    group: list[Box] = []
    for box in boxes:
        if group:
            close = (box.start - group[-1].end) * scale < NARROW / 2
            narrow = min(box.end - box.start, group[-1].end - group[-1].start) * scale < NARROW
            if not (close and narrow and box.kind == group[-1].kind):
                yield group
                group = []
        group.append(box)
    if group:
        yield group


def _box(group: Sequence[Box], y: float, scale: float) -> str:
    first, last = group[0], group[-1]
    x, width = LEFT + first.start * scale, max((last.end - first.start) * scale, 0.3)
    kind = first.kind if first.kind in KINDS else "other"
    said = first.label if len(group) == 1 else f"{first.kind}, {len(group)} times"
    fill = ' fill="url(#hatch)"' if kind == "wait" else f' class="{kind}"'
    drawn = (
        f'<rect{fill} x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{BOX}" rx="{min(2, width / 3):.1f}">'
        f"<title>{escape(said)}: {show_seconds((last.end - first.start) / 1e3)}</title></rect>"
    )
    written = _fitting(said, first.label.rpartition(" ")[2], width)
    if not written or kind == "wait":
        return drawn
    ink = "on-light" if _lightness(KINDS[kind][0]) > 0.5 else "on-dark"
    middle = f'x="{x + width / 2:.1f}" y="{y + BOX / 2 + 4:g}"'
    return f'{drawn}<text class="{ink}" {middle} text-anchor="middle" pointer-events="none">{escape(written)}</text>'


def _fitting(said: str, short: str, width: float) -> str:
    """As much of it as the box has room for: all, the chunk's number, or nothing."""
    texts = (said, short if short.isdigit() else "")
    return next((text for text in texts if len(text) * LETTER + 4 <= width), "")


def _lightness(colour: str) -> float:
    red, green, blue = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    return 0.3 * red + 0.59 * green + 0.11 * blue


def _legend(lanes: Mapping[str, Sequence[Box]], y: int) -> Iterator[tuple[int, str]]:
    """(its line, the drawing) of each kind in the picture."""
    drawn = {box.kind if box.kind in KINDS else "other" for boxes in lanes.values() for box in boxes}
    x, line = LEFT, 0
    for kind, (_, meaning) in KINDS.items():
        if kind not in drawn:
            continue
        width = 26 + int(len(meaning) * LETTER)
        if x + width > WIDTH:
            x, line = LEFT, line + 1
        fill = 'fill="url(#hatch)"' if kind == "wait" else f'class="{kind}"'
        top = y + 20 * line
        swatch = f'<rect {fill} x="{x}" y="{top - 10}" width="12" height="12" rx="2"/>'
        yield line, f'{swatch}<text class="ink" x="{x + 17}" y="{top}">{escape(meaning)}</text>'
        x += width
