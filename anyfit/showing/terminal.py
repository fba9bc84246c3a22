"""Plans, profiles and checks as tables. With a terminal they have colour and bars; in a pipe they are plain text."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn
from rich.table import Table
from rich.text import Text

from anyfit.values.answers import Outcome, Ranked, beside
from anyfit.values.calibration import Figure
from anyfit.values.check import Check
from anyfit.values.cut_figures import OpRow
from anyfit.values.machine import Machine, named_figures
from anyfit.values.no_plan import NoPlan
from anyfit.values.plan import TIERS, DeviceKind, Forecast, Plan, TierName
from anyfit.values.plan_rows import memory_name
from anyfit.values.prices import Price
from anyfit.values.profile import BlockCost, Profile
from anyfit.values.units import show_bytes, show_count, show_seconds
from anyfit.values.weights import Match

from .progress import against
from .tables import Column, side_by_side, table

BAR_CELLS = 40
NARROW = 80  # columns of a terminal, under which bars are half as long
LEAST_SHARE = 0.005  # of a step, to be named beside its bar
# One colour a meaning, told apart by lightness as well: readable without colour vision.
PARTS = {"compute": "blue", "recompute": "cyan", "update": "magenta", "communication": "yellow", "offload": "red"}


def show_plan(plan: Plan, console: Console) -> None:
    """The decision and why, then each tier's memory against its limit, then the step by what it is spent on."""
    show_rows(plan.rows(), console)
    forecast = plan.forecast
    bars = Table.grid(padding=(0, 2))
    bars.add_column(no_wrap=True)
    bars.add_column(no_wrap=True)  # on a narrow terminal what is said beside it wraps
    cells = BAR_CELLS if console.width >= NARROW else BAR_CELLS // 2
    for tier in TIERS:
        used = forecast.reserved_bytes if tier == "device" else forecast.peak_bytes[tier]
        limit = plan.limit_bytes[tier]
        if used and limit:
            share = used / limit
            bar = _bar([("green" if share < 0.9 else "yellow", share)], cells)
            label = tier if plan.device_kind != "cpu" or tier != "device" else "memory"
            bars.add_row(Text(label), bar, Text(f"{share:.0%} of {show_bytes(limit)}"))
    parts = {name: seconds / forecast.step_seconds for name, seconds in forecast.split_seconds.items() if seconds > 0}
    shares = [(PARTS.get(name, "white"), share) for name, share in parts.items()]
    legend = ", ".join(f"{name} {share:.0%}" for name, share in parts.items() if share >= LEAST_SHARE)
    bars.add_row(Text("step"), _bar(shares, cells), Text(legend))
    console.print(bars)


def _bar(shares: Sequence[tuple[str, float]], count: int) -> Text:
    """Coloured shares of a whole, the rest dotted."""
    bar, filled, end = Text(), 0, 0.0
    for colour, share in shares:
        end += share
        cells = max(round(min(end, 1.0) * count) - filled, 0)
        bar.append("█" * cells, style=colour)
        filled += cells
    bar.append("·" * (count - filled), style="dim")
    return bar


def show_profile(profile: Profile, forecast: Forecast, attention_flops: int, console: Console) -> None:
    """A row a block at the largest micro-batch, equal neighbours together; then the totals. `forecast` is of a step of that
    micro-batch; `attention_flops`, of a pass, count the masked half of causal attention too."""
    each, costs = profile.passes[0], Costs(profile, "block")
    for group in _runs(each.blocks, key=_looks):
        last = "" if len(group) == 1 else f" … {group[-1].name.rpartition('.')[2]}"
        costs.add(f"{group[0].name or '(outside blocks)'}{last}", group)
    costs.show(console)
    state = profile.state
    rows = {
        "parameters": f"{show_count(profile.parameters)}, {show_count(profile.trainable)} trainable",
        "model state": f"{show_bytes(state.resident)}: weights {show_bytes(state.parameters)}, masters "
        f"{show_bytes(state.masters)}, {profile.optimizer} {show_bytes(state.optimizer)}, buffers {show_bytes(state.buffers)}",
        "gradients": show_bytes(state.gradients),
        "a pass": f"{show_seconds(each.seconds)} ± {profile.time_error:.0%}, {show_count(each.flops)} FLOPs, "
        f"{each.flops / each.seconds / profile.peak_flops_per_second:.0%} of peak compute",
    }
    if attention_flops:
        rows["attention"] = (
            f"{show_count(attention_flops)} of these FLOPs, counted whole; half of it, {show_count(attention_flops / 2)}, "
            "is needed where a causal mask hides the rest"
        )
    rows |= {
        "peak of a pass": f"{show_bytes(each.peak_bytes)} beyond the model state, at {each.peak_at}",
        "peak of a step": f"{show_bytes(forecast.peak_bytes['device'])} allocated, "
        f"{show_bytes(forecast.reserved_bytes)} reserved, with what the allocator and the runtime add",
        "update": show_seconds(profile.update.seconds),
    }
    if chosen := _largest_blocks(each.blocks):
        rows["activations"] = _choices(chosen)
    if profile.notes:
        rows["trace"] = f"{profile.traced}: {'; '.join(profile.notes)}"
    show_rows(rows, console)


def _largest_blocks(blocks: Sequence[BlockCost]) -> list[BlockCost]:
    """The blocks of the kind that keeps most, which may do otherwise."""
    by_kind: dict[str, list[BlockCost]] = {}
    for block in blocks:
        if len(block.choices) > 1:
            by_kind.setdefault(block.kind, []).append(block)
    return max(by_kind.values(), key=lambda group: sum(block.kept_bytes for block in group), default=[])


def _choices(blocks: Sequence[BlockCost]) -> str:
    parts = []
    for choice in blocks[0].choices:
        costs = [block.choices[choice] for block in blocks]
        part = f"{choice} {show_bytes(sum(cost.kept_bytes for cost in costs))}"
        seconds = sum(cost.seconds for cost in costs)
        parts.append(part + (f" and {show_seconds(seconds)}" if seconds else ""))
    return f"{len(blocks)} x {blocks[0].kind}: {', '.join(parts)}"


def show_modules(profile: Profile, modules: Sequence[BlockCost], console: Console) -> None:
    """A row a module with all that is in it, parents first; neighbours that are alike, down to their parts, share their rows."""
    parts: dict[str, list[BlockCost]] = {}
    for module in modules[1:]:
        parts.setdefault(module.name.rpartition(".")[0], []).append(module)
    costs = Costs(profile, "module")

    def looks(group: Sequence[BlockCost]) -> tuple[Any, ...]:
        first = group[0]
        return (*_looks(first), *(looks([part]) for part in parts.get(first.name, [])))

    def add(group: Sequence[BlockCost], indent: int) -> None:
        own, last = (module.name.rpartition(".")[2] for module in (group[0], group[-1]))
        name = own or "(all)"
        costs.add("  " * indent + (name if own == last else f"{name} … {last}"), group)
        # the first parts of all that share the row, then their second ones, and so on
        columns = zip(*(parts.get(module.name, []) for module in group), strict=True)
        for alike in _runs(columns, key=looks):
            add([module for column in zip(*alike, strict=True) for module in column], indent + 1)

    add(modules[:1], 0)
    costs.show(console)


def show_layouts(path: str, rows: Sequence[OpRow], n: int, console: Console) -> None:
    """A row an op: what is exchanged for it, and how a rank holds what it reads and gives."""
    columns = [
        Column("op", tuple(row.op for row in rows)),
        Column("pass", tuple(row.phase for row in rows)),
        Column("exchanged first", tuple("; ".join(row.exchanges) for row in rows)),
        Column("reads", tuple(", ".join(row.reads) for row in rows)),
        Column("gives", tuple(", ".join(row.gives) for row in rows)),
    ]
    console.print(table(columns, console, title=f"{path} on one of {n} ranks", drop=("pass",)))


class Costs:
    """A row a group of blocks or modules that are alike."""

    FIGURES = ("count", "parameters", "FLOPs", "forward", "backward", "kept")

    def __init__(self, profile: Profile, first: str) -> None:
        each = profile.passes[0]
        self._title = (
            f"{profile.name or profile.model}, micro-batch {each.micro_batch}, {profile.precision}, on {profile.machine}"
        )
        self._names = (first, "class", *self.FIGURES)
        self._rows: list[tuple[str, ...]] = []

    def add(self, name: str, group: Sequence[BlockCost]) -> None:
        self._rows.append(
            (
                name,
                group[0].kind,
                str(len(group)),
                show_count(sum(each.parameters for each in group)),
                show_count(sum(each.flops_forward + each.flops_backward for each in group)),
                show_seconds(sum(each.seconds_forward for each in group)),
                show_seconds(sum(each.seconds_backward for each in group)),
                show_bytes(sum(each.kept_bytes for each in group)),
            )
        )

    def show(self, console: Console) -> None:
        pairs = zip(self._names, zip(*self._rows, strict=True), strict=True)
        columns = [Column(name, cells, is_figure=name in self.FIGURES) for name, cells in pairs]
        console.print(table(columns, console, title=self._title, drop=("class", "FLOPs", "count", "parameters")))


def _looks(cost: BlockCost) -> tuple[Any, ...]:
    """What blocks of one row have in common. Not the seconds: a launch that one hides may hold up the other."""
    return (cost.kind, cost.parameters, cost.flops_forward, cost.flops_backward, cost.kept_bytes)


def _runs(items: Iterable[Any], key: Callable[[Any], object]) -> list[list[Any]]:
    """Neighbours of which the key says the same, together."""
    return [list(run) for _, run in itertools.groupby(items, key)]


def show_rows(rows: Mapping[str, str] | Sequence[tuple[str, str]], console: Console) -> None:
    table = Table.grid(padding=(0, 2))
    for label, text in rows.items() if isinstance(rows, Mapping) else rows:
        table.add_row(Text(label, style="bold"), Text(text))
    console.print(table)


def show_beside(outcomes: Mapping[str, Outcome], console: Console) -> None:
    """A column each: the forecasts, and what differs."""
    rows = beside(outcomes)
    first, *others = (Column(name, cells) for name, cells in zip(outcomes, zip(*rows.values(), strict=True), strict=True))
    for made in side_by_side(Column("", tuple(rows)), first, others, console):
        console.print(made)


def show_ranking(ranked: Sequence[Ranked], tokens: int, console: Console) -> None:
    """A row a machine, fastest first; where prices are known, also which is cheapest."""
    priced = sorted(each.cost for each in ranked if each.cost is not None)
    rows: list[tuple[str, ...]] = []
    for each in ranked:
        outcome, gpus = each.outcome, str(each.devices)
        if not isinstance(outcome, Plan):
            lacking = (
                f"does not fit: {show_bytes(outcome.shortfall_bytes)} of {outcome.tier} memory too little"
                if (isinstance(outcome, NoPlan))
                else outcome.why
            )
            rows.append((each.machine, gpus, "-", "-", "-", "-", "-", lacking))
            continue
        assert each.seconds is not None
        cost = "-"
        if each.cost is not None:
            cost = show_money(each.cost) + (", the least" if each.cost == priced[0] and len(priced) > 1 else "")
        step = f"{show_seconds(outcome.forecast.step_seconds)} ± {outcome.forecast.step_error:.0%}"
        rate, state = show_count(outcome.forecast.tokens_per_second), outcome.decision("model state").choice
        rows.append((each.machine, gpus, show_duration(each.seconds), cost, str(outcome.batch_size), step, rate, state))
    names = ("machine", "devices", "time", "cost", "batch", "a step", "tokens/s", "model state")
    columns = [Column(name, cells) for name, cells in zip(names, zip(*rows, strict=True), strict=True)]
    if not priced:
        del columns[names.index("cost")]
    title = f"{show_count(tokens)} tokens, on all devices of each machine"
    console.print(table(columns, console, title=title, drop=("model state", "a step", "tokens/s")))
    if any(each.cost is not None and each.price and each.price.date for each in ranked):
        console.print("prices are typical ones, dated, for renting; anyfit machines has them with their sources", style="dim")


def show_money(amount: float) -> str:
    """
    >>> show_money(0.256), show_money(12345.6)
    ('$0.26', '$12,346')
    """
    return f"${amount:,.2f}" if amount < 100 else f"${amount:,.0f}"


def show_presets(machines: Mapping[str, Machine], prices: Mapping[str, Price], own_file: str, console: Console) -> None:
    """A row a machine, smallest first: what it is, and what it is rented for."""
    rows: list[tuple[str, ...]] = []
    for name, machine in sorted(machines.items(), key=lambda pair: _size(pair[1])):
        device, price = machine.device, prices.get(name)
        best = device.matmul.get("bfloat16") or device.matmul["float32"]
        dtype = "" if "bfloat16" in device.matmul else " (fp32)"
        rows.append(
            (
                name,
                f"{device.count} x {device.name}" if device.count > 1 else device.name,
                show_bytes(device.memory_bytes.value),
                f"{best.peak / 1e12:,.0f} TFLOP/s{dtype}",
                f"{show_bytes(device.memory.peak)}/s",
                show_bytes(machine.host.memory_bytes.value),
                "-" if price is None else f"${price.usd_per_hour:,.2f}",
                "" if price is None else ", ".join(filter(None, (price.source, price.date))),
            )
        )
    names = ("machine", "GPUs", "memory", "products", "at", "host", "an hour", "price from")
    columns = [Column(name, cells) for name, cells in zip(names, zip(*rows, strict=True), strict=True)]
    console.print(table(columns, console, drop=("price from", "at", "GPUs")))
    console.print(
        f"Figures of one GPU, sustained. Prices are typical, of the whole machine; your own in {own_file} come before them.",
        style="dim",
        highlight=False,
    )


def _size(machine: Machine) -> tuple[bool, int, float, str]:
    device = machine.device
    return device.kind == "cuda", device.count, device.memory_bytes.value, machine.name


def show_figures(machine: Machine, price: Price | None, console: Console) -> None:
    """Every figure and curve of a machine, with its source."""
    rows = [("", machine.comment)]
    if price is not None:
        rows.append(("rented", f"${price.usd_per_hour:,.2f} an hour ({', '.join(filter(None, (price.source, price.date)))})"))
    seen: dict[tuple[str, str], str] = {}
    for path, figure in named_figures(machine):
        value = f"{figure.value:,.6g}" if isinstance(figure, Figure) else f"up to {show_count(figure.peak)}"
        seen.setdefault((path, figure.source), f"{value} ± {figure.measurement_error:.0%}")
    rows += [(path, f"{value} · {source}") for (path, source), value in seen.items()]
    show_rows(rows, console)


def show_duration(seconds: float) -> str:
    """
    >>> show_duration(5400), show_duration(30 * 86400)
    ('1 h 30 min', '30.0 days')
    """
    return f"{seconds / 86400:,.1f} days" if seconds >= 2 * 86400 else show_seconds(seconds)


def show_machine(machine: Machine, console: Console) -> None:
    device, host = machine.device, machine.host
    rows = {
        "machine": f"{machine.name}: {machine.nodes} x {device.count} {device.name}, measured {machine.date}",
        memory_name("device", device.kind): f"{show_bytes(device.memory_bytes.value)}, at {show_bytes(device.memory.peak)}/s",
        "matmul": ", ".join(
            f"{dtype} {show_count(curve.peak)}FLOP/s ± {curve.measurement_error:.0%}" for dtype, curve in device.matmul.items()
        ),
        "attention": ", ".join(f"{dtype} {show_count(curve.peak)}FLOP/s" for dtype, curve in device.attention.items()),
        "launch": show_seconds(device.launch_seconds.value),
        "host": f"{host.cores} cores, {show_bytes(host.memory_bytes.value)}, AdamW {show_count(host.update.peak)} parameters/s",
    }
    if machine.copies is not None:
        rows["copies"] = f"up {show_bytes(machine.copies.up.peak)}/s, down {show_bytes(machine.copies.down.peak)}/s"
    if (disk := machine.disk) is not None:
        rates = f"read {show_bytes(disk.read.peak)}/s, write {show_bytes(disk.write.peak)}/s, both {show_bytes(disk.both.peak)}/s"
        rows["disk"] = f"{rates}, {show_bytes(disk.free_bytes.value)} free"
    show_rows(rows, console)


@dataclass(frozen=True)
class Beside:
    """A figure as it was forecast, with its error, and as it was measured."""

    name: str
    predicted: float
    error: float | None
    measured: float | None
    show: Callable[[float], str]


def show_forecast_beside_measured(
    plan: Plan, seconds: float, clipped_share: float, peak_bytes: int, console: Console, largest: Plan | None = None
) -> None:
    """Of a run that has moved to another plan: its steps beside the last one, its peak beside the largest."""
    step = _step_beside(plan.forecast, seconds, clipped_share)
    peak = _peak_beside("device", (largest or plan).forecast, peak_bytes, plan.device_kind)
    console.print(_beside_measured([step, peak]))


def _peak_beside(tier: TierName, forecast: Forecast, measured: int, kind: DeviceKind | None) -> Beside:
    """What tensors take. Where that is all that the plan's own line of memory counts, it has the same band; else it says so."""
    predicted, error, name = forecast.peak_bytes[tier], forecast.peak_error, f"{tier} peak"
    if tier == "device":
        name = "memory peak" if kind == "cpu" else name
        if forecast.reserved_bytes == predicted:
            error = forecast.reserved_error
        else:
            name += ", allocated"
    return Beside(name, predicted, error, measured or None, show_bytes)


def _step_beside(forecast: Forecast, seconds: float, clipped_share: float) -> Beside:
    """The forecast for as many clipped steps as there were."""
    clipped = f", {clipped_share:.0%} clipped" if forecast.has_slower_steps and clipped_share else ""
    return Beside(f"median step{clipped}", forecast.seconds_with(clipped_share), forecast.step_error, seconds, show_seconds)


def show_check(check: Check, console: Console, kind: DeviceKind | None = None) -> None:
    """Predicted beside measured: the step, what it is spent on, and each tier's peak; then how far it is from plain PyTorch."""
    forecast, split = check.forecast, dict(check.forecast.split_seconds)
    again, launches = split.pop("recompute", 0.0), split.pop("exposed launch", 0.0)
    rows = [_step_beside(forecast, check.step_seconds, check.clipped_share)]
    for name, measured in check.split_seconds.items():
        predicted, label = split.get(name, 0.0), f"  {name}"
        if name == "compute":
            predicted += launches  # a device that waits for its host looks as if it computed
        if name == "compute" and again:
            predicted, label = predicted + again, "  compute, recompute"
        if predicted or measured:
            rows.append(Beside(label, predicted, None, measured, show_seconds))
    for tier in TIERS:
        if forecast.peak_bytes[tier] or check.peak_bytes[tier]:
            rows.append(_peak_beside(tier, forecast, check.peak_bytes[tier], kind))
    console.print(_beside_measured(rows))
    show_rows(dict(_found(check)), console)


def _beside_measured(rows: Sequence[Beside]) -> Table:
    table = Table("", "forecast", "measured", "against forecast")
    for row in rows:
        band = "" if row.error is None else f" ± {row.error:.0%}"
        measured = "not measured" if row.measured is None else row.show(row.measured)
        off = against(row.measured, row.predicted) if row.measured and row.predicted else ""
        table.add_row(row.name, f"{row.show(row.predicted)}{band}", measured, off)
    return table


def _found(check: Check) -> Iterator[tuple[str, str]]:
    parity = check.parity
    if parity is None:
        yield "plain PyTorch", f"not compared: {check.no_parity}"
    else:
        differences = f"losses off by {parity.loss_difference:.1e}, weights by {parity.weight_difference:.1e}"
        yield "plain PyTorch", f"{parity.steps} steps of {parity.compared}: {differences}"
    yield "pace", f"not corrected: {check.no_pace}" if check.pace is None else f"{check.pace.choice}; later plans account for it"
    if check.correction is not None:
        yield "margin", f"{check.correction.error:.0%} of the memory; later plans leave it free"


def show_match(match: Match, console: Console) -> None:
    """What of a model comes from a folder of weights, what does not, and what the folder has besides."""
    table = Table.grid(padding=(0, 2))
    for kind, name, count in match.rows:
        colour = {"missing": "red", "unexpected": "yellow", "matched": "green"}.get(kind, "")
        table.add_row(Text(kind, style=colour), Text(str(count), justify="right"), Text(name))
    console.print(Text(f"weights from {match.folder}: " + match.counted))
    console.print(table)


@contextmanager
def shown_progress(doing: str, console: Console) -> Iterator[Callable[[str, float], None]]:
    """A bar for work that reports what it does and how far it is; silent without a terminal."""
    columns = (TextColumn(doing), BarColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=1.0)
        yield lambda what, share: progress.update(task, completed=share, description=what)
