"""A plan, or a run, as one HTML file: what is drawn, as JSON, beside the script that draws it (report.js) and its looks.

The file asks nothing of any network. What a plan does not say is left out, with a sentence that says how to get it.
"""

from __future__ import annotations

import json
import math
import shlex
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from html import escape
from importlib import resources
from typing import Any

from anyfit.values.answers import Outcome, Ranked
from anyfit.values.plan import TIERS, Placement, Plan, TierName
from anyfit.values.plan_rows import memory_name, verdict
from anyfit.values.units import show_bytes, show_count, show_seconds

from .progress import against
from .timeline import KINDS, Timeline

LANES = {"compute": "compute", "up": "to GPU", "down": "to host", "link": "ranks", "host": "host", "disk": "disk"}
FIRST_STEPS = 2  # of a run, that are slower than those after them
MOST_POINTS = 2000  # of a curve


@dataclass(frozen=True)
class Recorded:
    """A run, as its folder has it."""

    folder: str
    metrics: Sequence[Mapping[str, Any]]  # a line a step
    again: Sequence[tuple[str, str]] = ()  # what for, and the command


@dataclass(frozen=True)
class Speed:
    """The plan on a device of another size; without a plan, why there is none."""

    limit_bytes: int
    outcome: Outcome


@dataclass(frozen=True)
class Elsewhere:
    """What was planned anew: on devices of other sizes, and on other machines."""

    speeds: Sequence[Speed] = ()
    machines: Sequence[Ranked] = ()
    tokens: int = 0


@dataclass(frozen=True)
class Source:
    """Where the plan came from, for the commands that give what a report lacks."""

    file: str
    job: str = ""  # as `anyfit report` takes it, where that is known
    options: Sequence[str] = field(default_factory=list)  # of the job, to be typed


def html(
    plan: Plan,
    source: Source,
    run: Recorded | None = None,
    timeline: Timeline | None = None,
    elsewhere: Elsewhere | None = None,
) -> str:
    """The whole file."""
    data = json.dumps(drawn(plan, source, run, timeline, elsewhere or Elsewhere()), separators=(",", ":"), allow_nan=False)
    word, comma, rest = verdict(plan).partition("," if plan.fits else ":")
    said = f"{comma}{rest}" if comma else f" on {word.partition(' on ')[2]}"
    figures = "".join(
        f'<div class="figure"><span class="soft small">{escape(name)}</span><b>{escape(value)}</b>{escape(more)}</div>'
        for name, value, more in _figures(plan)
    )
    title = escape(f"anyfit: {plan.title}")
    style, script = (resources.files(__package__).joinpath(name).read_text() for name in ("report.css", "report.js"))
    safe = data.replace("<", "\\u003c")
    return (
        f'<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta name="viewport" content="width=device-width,initial-scale=1">\n<title>{title}</title>\n'
        f'<link rel="icon" href="data:,">\n<style>\n{style}</style>\n</head>\n<body>\n<header>\n'
        f'<div class="top"><h1>{escape(plan.title)}</h1><button id="theme" aria-label="dark or light">Dark</button></div>\n'
        f'<p class="soft">{escape(_on(plan))}</p>\n'
        f'<div class="verdict{"" if plan.fits else " no"}">{"Fits" if plan.fits else "Does not fit"}{escape(said)}'
        f"{escape(_band(plan))}</div>\n"
        f'<div class="figures">{figures}</div>\n<div role="tablist" aria-label="views"></div>\n</header>\n<main></main>\n'
        f'<div id="tip" role="tooltip"></div>\n<script type="application/json" id="data">{safe}</script>\n'
        f"<script>\n{script}</script>\n</body>\n</html>\n"
    )


def _on(plan: Plan) -> str:
    axes = " x ".join(f"{length} {name}" for name, length in plan.mesh.items() if length > 1)
    passes = f"batch {plan.batch_size}, in {plan.accumulation} pass{'es' * (plan.accumulation > 1)} of {plan.micro_batch}"
    return f"on {plan.machine}{f', {plan.ranks} ranks: {axes}' if axes else ''}; {passes}"


def _band(plan: Plan) -> str:
    forecast, error = plan.forecast, plan.forecast.step_error
    low, high = (show_seconds(forecast.step_seconds * (1 + way * error)) for way in (-1, 1))
    memory = memory_name("device", plan.device_kind)
    return f" (from {low} to {high}), with {show_bytes(forecast.reserved_bytes)} ± {forecast.reserved_error:.0%} of {memory}"


def _figures(plan: Plan) -> list[tuple[str, str, str]]:
    forecast = plan.forecast
    shares = f"{forecast.compute_share:.0%} of peak compute"
    limit = plan.limit_bytes["device"]
    spare = limit - forecast.needed_bytes
    return [
        ("a step", show_seconds(forecast.step_seconds), f"± {forecast.step_error:.0%}"),
        ("tokens a second", show_count(forecast.tokens_per_second), shares),
        (memory_name("device", plan.device_kind), show_bytes(forecast.reserved_bytes), f"of {show_bytes(limit)}"),
        ("after the margin", show_bytes(abs(spare)), "to spare" if spare >= 0 else "too little"),
    ]


# ---------------------------------------------------------------------- what is drawn


def drawn(plan: Plan, source: Source, run: Recorded | None, timeline: Timeline | None, elsewhere: Elsewhere) -> dict[str, Any]:
    forecast, picture = plan.forecast, plan.picture
    memory = None if picture is None else picture.memory
    found: dict[str, Any] = {
        "device": plan.device_kind,
        "step": forecast.step_seconds,
        "mean": forecast.mean_step_seconds,
        "rate": forecast.tokens_per_second,
        "needed": forecast.needed_bytes,
        "limit": plan.limit_bytes["device"],
        "split": list(forecast.split_seconds.items()),
        "tiers": [_tier(plan, tier) for tier in TIERS if forecast.peak_bytes.get(tier)],
        "decisions": [asdict(each) for each in plan.decisions],
        "alternatives": [_alternative(each.step_seconds, asdict(each)) for each in plan.alternatives],
        "memory": memory and asdict(memory),
        "peak": memory.peak_at if memory else "",
        "lanes": None if picture is None else {name: list(rows) for name, rows in picture.lanes.items()},
        "lanesOf": "" if picture is None else picture.lanes_are_of,
        "laneNames": LANES,
        "kinds": KINDS,
        "blocks": _blocks(plan),
        "chunks": list(Counter(map(_placed, plan.chunks)).items()),
        "lacks": _lacks(source, plan),
        "speeds": [_speed(each) for each in elsewhere.speeds] or None,
        "machines": [_machine(each) for each in elsewhere.machines] or None,
        "tokens": elsewhere.tokens,
        "recorded": timeline and _recorded(timeline),
        "run": run and _run(run, plan),
    }
    return found


def _tier(plan: Plan, tier: TierName) -> dict[str, Any]:
    forecast, is_device = plan.forecast, tier == "device"
    return {
        "name": memory_name(tier, plan.device_kind),
        "bytes": forecast.reserved_bytes if is_device else forecast.peak_bytes[tier],
        "error": forecast.reserved_error if is_device else forecast.peak_error,
        "limit": plan.limit_bytes[tier],
        "assumed": tier == "host" and plan.assumes_host,
    }


def _alternative(seconds: float, found: dict[str, Any]) -> dict[str, Any]:
    return {
        "decision": found["decision"],
        "choice": found["choice"],
        "seconds": seconds if math.isfinite(seconds) else None,
        "bytes": found["device_bytes"],
        "fits": found["fits"],
    }


def _blocks(plan: Plan) -> list[dict[str, Any]]:
    """All that the plan knows of: without a picture, those alone of which it says something."""
    parts = {part.path: part for part in plan.picture.blocks} if plan.picture else {}
    stage_of = {
        path: number
        for number, stage in enumerate(plan.stages)
        for path in (*stage.activations, *stage.compiled, *stage.replayed, *stage.cut)
    }
    rows = []
    for path in [*parts, *(path for path in dict.fromkeys(stage_of) if path not in parts)]:
        part, cut = parts.get(path), plan.cut.get(path)
        rows.append(
            {
                "path": path,
                "kind": part.kind if part else "block",
                "stage": stage_of.get(path, 0),
                "activations": plan.activations.get(path, part.activations if part else "keep"),
                "parameters": part.parameters if part else 0,
                "kept_bytes": part.kept_bytes if part else None,
                "seconds": part.seconds if part else 0,
                "compiled": path in plan.compiled,
                "replayed": path in plan.replayed,
                "cut": f"{len(cut.parameters)} parameters over {plan.mesh.get('tensor', 1)} ranks" if cut else "",
            }
        )
    return rows


def _placed(chunk: Placement) -> str:
    """Where a chunk's state is, in words."""
    shards = f", sharded over {chunk.optimizer_shards}" if chunk.optimizer_shards > 1 else ""
    ahead = ", ahead of the norm" if chunk.speculates else ""
    return f"weights on the {chunk.weights}, optimizer on the {chunk.optimizer}, updated on the {chunk.update}{ahead}{shards}"


def _lacks(source: Source, plan: Plan) -> dict[str, str]:
    job = " ".join((source.job or "MODEL", *source.options))
    file = shlex.quote(source.file)
    return {
        "picture": "This plan has no picture of its step: it is of an earlier version, or written by hand."
        if plan.picture is None
        else "",
        "memory": "The ranks of a pipeline hold different things; the overview has what the fullest of them holds."
        if plan.pipeline > 1
        else "This plan has no picture of its memory.",
        "again": f"anyfit plan {job} -o {file}",
        "speeds": f"anyfit report {file} --job {job}",
        "machines": f"anyfit report {file} --job {job} --compare h100,h200,l40s --tokens 10B",
    }


def _speed(each: Speed) -> dict[str, Any]:
    plan = each.outcome
    if not isinstance(plan, Plan):
        return {
            "limit": each.limit_bytes,
            "rate": None,
            "step": None,
            "said": f"does not fit: {show_bytes(plan.shortfall_bytes)} too little",
        }
    forecast = plan.forecast
    state = next((one.choice for one in plan.decisions if one.name == "model state"), "")
    return {"limit": each.limit_bytes, "rate": forecast.tokens_per_second, "step": forecast.step_seconds, "said": state}


def _machine(each: Ranked) -> dict[str, Any]:
    plan = each.outcome if isinstance(each.outcome, Plan) else None
    said = "" if plan is None else next((one.choice for one in plan.decisions if one.name == "model state"), "")
    price = each.price
    return {
        "machine": each.machine,
        "devices": each.devices,
        "seconds": each.seconds,
        "cost": each.cost,
        "batch": plan and plan.batch_size,
        "rate": plan and plan.forecast.tokens_per_second,
        "said": said if plan else str(getattr(each.outcome, "why", each.outcome)).splitlines()[0],
        "price": ""
        if price is None
        else f"${price.usd_per_hour:,.2f} an hour: {', '.join(filter(None, (price.source, price.date)))}",
    }


# ---------------------------------------------------------------------- a run


def _recorded(timeline: Timeline) -> dict[str, Any]:
    lanes = {
        name: [(box.start / 1e3, box.end / 1e3, box.kind, box.label) for box in boxes]
        for name, boxes in timeline.lanes.items()
        if name != "steps"
    }
    steps = len(timeline.lanes.get("steps", ()))
    said = f"{timeline.title}: {steps} step{'s' * (steps > 1)} of {show_seconds(timeline.step_seconds)} on average."
    return {"lanes": lanes, "said": said}


def _run(run: Recorded, plan: Plan) -> dict[str, Any]:
    every = -(-len(run.metrics) // MOST_POINTS) or 1
    kept = [line for at, line in enumerate(run.metrics) if at % every == 0 or at == len(run.metrics) - 1 or line.get("alarms")]

    def column(name: str) -> list[float | None]:
        return [_finite(line.get(name)) for line in kept]

    return {
        "folder": run.folder,
        "steps": [line["step"] for line in kept],
        "loss": column("loss"),
        "norm": column("gradient_norm"),
        "rate": column("tokens_per_second"),
        "forecastRate": plan.forecast.tokens_per_second,
        "beside": _beside(run.metrics, plan),
        "events": _events(run.metrics),
        "again": list(run.again),
    }


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _events(metrics: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Alarms, and steps at which memory ended and the run was planned anew."""
    found, rescues = [], 0
    for line in metrics:
        found += [{"step": line["step"], "said": str(alarm)} for alarm in line.get("alarms", ())]
        now = line.get("rescues", 0)
        if now > rescues:
            found.append({"step": line["step"], "said": f"memory ended, and the run was planned anew ({now} so far)"})
        rescues = max(rescues, now)
    return found


def _beside(metrics: Sequence[Mapping[str, Any]], plan: Plan) -> list[dict[str, str]]:
    if not metrics:
        return []
    forecast, last = plan.forecast, metrics[-1]
    later = metrics[FIRST_STEPS:] or metrics
    clipped = float(last.get("clipped_share", 0.0))
    rows = []

    def row(name: str, predicted: float, error: float | None, measured: float, show: Any) -> None:
        band = "" if error is None else f" ± {error:.0%}"
        off = against(measured, predicted) if predicted and measured else ""
        rows.append({"name": name, "forecast": f"{show(predicted)}{band}", "measured": show(measured), "against": off})

    took = statistics.median(float(line["seconds"]) for line in later)
    row("median step", forecast.seconds_with(clipped), forecast.step_error, took, show_seconds)
    rate = statistics.median(float(line["tokens_per_second"]) for line in later)
    row("tokens/s", forecast.tokens_per_second, forecast.step_error, rate, show_count)
    for tier in TIERS:
        measured = last.get("peak_bytes", {}).get(tier, 0)
        if forecast.peak_bytes[tier] or measured:
            name = f"{memory_name(tier, plan.device_kind)}, of tensors"
            row(name, forecast.peak_bytes[tier], forecast.peak_error, measured, show_bytes)
    return rows


# ---------------------------------------------------------------------- for other viewers


def trace(plan: Plan, recorded: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """What the planner plays, as a trace for ui.perfetto.dev; beside a recorded one, where there is one."""
    if plan.picture is None:
        raise ValueError("this plan has no picture of its step: it is of an earlier version, or written by hand; plan it again")
    process = 0 if recorded is None else 1
    events: list[dict[str, Any]] = [] if recorded is None else list(recorded["traceEvents"])
    events.append({"ph": "M", "pid": process, "name": "process_name", "args": {"name": f"{plan.title}, as planned"}})
    for number, (lane, rows) in enumerate(plan.picture.lanes.items()):
        events.append({"ph": "M", "pid": process, "tid": number, "name": "thread_name", "args": {"name": LANES.get(lane, lane)}})
        events.append({"ph": "M", "pid": process, "tid": number, "name": "thread_sort_index", "args": {"sort_index": number}})
        for start, end, kind, label in rows:
            span = {"ph": "X", "pid": process, "tid": number, "name": label or kind, "cat": kind}
            events.append(span | {"ts": round(start * 1e6, 1), "dur": round((end - start) * 1e6, 1)})
    return {"traceEvents": events, "displayTimeUnit": "ms"}
