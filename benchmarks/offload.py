"""How fast does a model train that does not fit: anyfit, FSDP2, DeepSpeed and Colossal-AI under the same cap, and the bound?

    python -m benchmarks.offload [--jobs ...] [--systems ...] [--steps 10] [--warmup 3] [--repeats 1] [--record] [--add FILE]
    python -m benchmarks.offload --picture FILE

Each system runs each job in a process of its own, in turns when there are repeats; the figure is the median over them. A peer
takes part when it can be imported: a folder with it on PYTHONPATH is enough. A job that does not fit is tried again as
`benchmarks.peers` says. --record writes its file anew after every process; --add FILE begins with what a results file has of
other systems and jobs. --picture draws docs/offload.svg from such a file.

The bound is what no schedule on this machine could beat: see `bound_seconds`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

import psutil
import torch

from anyfit.values.units import show_count

from . import peers, record
from .peers import CONTEXT_BYTES, GIB, JOBS, MODELS, SYSTEMS, Job
from .picture import framed

ROOT = Path(__file__).parent.parent
PICTURE = ROOT / "docs" / "offload.svg"
SPARE_HOST_BYTES = 4 * GIB  # a system that leaves less is stopped: the machine would stop something else
SPARE_BYTES_OF_PLANNED = GIB // 2  # one that knows what is free, and plans for that, may take more of it

PARTED = 18 / 26  # of an update's traffic: weights alone, or moments alone
Row = dict[str, Any]
COMPUTE = "compute"  # a system that only computes: what the bounds need to know
OWN = ("anyfit", COMPUTE)

# ---------------------------------------------------------------------- the bound


@dataclass(frozen=True)
class Box:
    """What the parts of the machine do while all of them are busy, measured on one H200 with 16 cores."""

    updates_per_second: float = 3.4e9  # parameters, by AdamW on the CPU
    copied_per_second: float = 38e9  # bytes, each way at once
    host_bytes: int = 125 * GIB
    device_bytes: int = 139 * GIB


@dataclass(frozen=True)
class Split:
    """Shares of the parameters: where their optimizer states live and are updated, and whose weights are not on the device."""

    resident: float
    streamed: float
    host: float
    away_host: float = 0.0  # of `host`
    away_streamed: float = 0.0  # of `streamed`
    early_host: float = 0.0  # of `host`: may be updated in backward, into a second generation
    early_streamed: float = 0.0  # of `streamed`

    @property
    def away(self) -> float:
        return self.away_host + self.away_streamed


@dataclass(frozen=True)
class Schedule:
    """How the work of a step may overlap."""

    step_seconds: Callable[[Split, float, float, Box], float]  # of a split, parameters, seconds of compute, machine
    held_gradient_bytes: int  # a parameter: kept until the norm of all is known
    is_exact: bool = False  # and so an early update takes a second generation


def freely(split: Split, parameters: float, compute_seconds: float, box: Box) -> float:
    up = 4 * split.away + 2 * (split.host - split.away_host) + 10 * split.streamed + 2 * split.away_streamed
    down = 2 * split.host + 10 * split.streamed + 2 * split.away_streamed
    copies = parameters * max(up, down) / box.copied_per_second
    return max(compute_seconds, parameters * split.host / box.updates_per_second, copies)


def exactly(split: Split, parameters: float, compute_seconds: float, box: Box) -> float:
    early = 10 * split.early_streamed
    copies = parameters * (max(2 * split.away, 2 * split.host) + early)
    backward = max(compute_seconds * 3 / 4, copies / box.copied_per_second)
    in_backward = backward * box.updates_per_second / parameters  # that the host has time for
    early_host = min(split.early_host, in_backward)  # more would only make it longer
    up = 2 * split.host + 10 * split.streamed - early + 2 * split.away_streamed  # never less than what goes down
    late_host = split.host - early_host
    parted = min(late_host, (in_backward - early_host) / PARTED)
    on_host = parameters * (late_host - (1 - PARTED) * parted) / box.updates_per_second
    return backward + max(compute_seconds / 4, on_host, parameters * up / box.copied_per_second)


FREE = Schedule(freely, 0)
EXACT = Schedule(exactly, 2, is_exact=True)


def bound_seconds(
    parameters: float,
    compute_seconds: float,
    device_bytes: float,
    schedule: Schedule,
    *,
    activation_bytes: float = 0,
    slot_bytes: float = 0,
    box: Box | None = None,
) -> tuple[float, Split]:
    """The least time of a step over all splits, in steps of 1 %, and the split that has it.

    A share r of the optimizer states is resident on the device, s is streamed through it for the update, h = 1 - r - s is updated
    on the host; a share a of the weights is away from the device, first those of h, then those of s (a_s). `compute_seconds` is
    forward, recomputation and backward without any traffic. With P parameters, C the compute, B bytes/s each way, U updates/s,
    masters split in two halves (weights 2 bytes, the other half and the moments 10) and max() for what runs at once:

        free   max(C, hP/U, P/B max(up, down))
               up = 4a + 2 (h - a_h) + 10 s + 2 a_s    weights away come for forward and for backward; updated weights come back
               down = 2 h + 10 s + 2 a_s               gradients of host chunks; streamed states
        exact  b + max(1/4 C, (h - e_h - 4/13 p) P/U, P/B (2 h + 10 (s - e_s) + 2 a_s))
               b = max(3/4 C, P/B (max(2 a, 2 h) + 10 e_s)), and as much of e_h and then of 9/13 p as b has time for

    In `free` everything overlaps with everything, as if nothing were ever clipped. In `exact` gradients are clipped exactly: an
    update begins before backward ends only into a second generation of its state, for which the host has to have room, of shares
    e_h of h and e_s of s. The others run into the next forward, which is 1/4 of the compute where blocks are recomputed; of a
    share p the host leaves moments for backward: 18 bytes a parameter for weights and as many for moments, where both at once
    take 26. Weights that are away come once in backward and once, updated, in forward.

        device   P (12 r + 2 (s + h - a)) + max(activations, P g (r + s)) + slots if a > 0 <= device_bytes
        host     P (10 (s + h) + 2 h + 2 a_s + g h + 10 (e_h + e_s)) <= the machine's

    with g = 2 bytes of gradients that `exact` has to hold until the norm is known, and 0 in `free`; they come as activations go.
    Of all a the least that fits is taken: a schedule is never faster for having more away. Among equals the least is away, then
    the most resident.
    """
    box = box or Box()
    best: tuple[float, Split] | None = None
    for percent_resident in range(101):
        for percent_streamed in range(101 - percent_resident):
            resident, streamed = percent_resident / 100, percent_streamed / 100
            host = (100 - percent_resident - percent_streamed) / 100
            held = schedule.held_gradient_bytes
            passing = max(activation_bytes, parameters * held * (resident + streamed))
            whole = parameters * (12 * resident + 2 * (streamed + host)) + passing
            away = 0.0 if whole <= device_bytes else (whole + slot_bytes - device_bytes) / (2 * parameters)
            if away > streamed + host:
                continue
            split = Split(resident, streamed, host, min(away, host), max(away - host, 0.0))
            on_host = 10 * (streamed + host) + (2 + held) * host + 2 * split.away_streamed
            if parameters * on_host > box.host_bytes:
                continue
            room = (box.host_bytes / parameters - on_host) / 10
            for each in _with_early(split, room) if schedule.is_exact else (split,):
                seconds = schedule.step_seconds(each, parameters, compute_seconds, box)
                if best is None or (seconds, each.away, -resident) < (best[0], best[1].away, -best[1].resident):
                    best = seconds, each
    if best is None:
        raise ValueError(
            f"no split of {parameters / 1e9:.1f} B parameters fits: give more device_bytes or a box with more host_bytes"
        )
    return best


def _with_early(split: Split, room: float) -> Iterator[Split]:
    """The same with updates in backward, as the host has room for them: some that are streamed, and then its own."""
    room = max(room, 0.0)
    for tenth in range(11):
        early = min(split.streamed, room) * tenth / 10
        yield replace(split, early_streamed=early, early_host=min(split.host, room - early))


# Tokens a second of GPT-2 4b, all on the GPU in bf16, by batch: for jobs whose plain run is not among the rows.
PLAIN_4B = {8: 16_671, 32: 17_304}


def compute_seconds(job: Job, medians: Iterable[Row]) -> float:
    """Of one step when everything is on the device: as it was measured by itself (`measure_compute`), else of the plain run with
    this batch, else of the recorded one, by FLOPs."""
    for system in (COMPUTE, "plain"):
        for row in medians:
            plain = JOBS[row["job"]]
            is_alike = replace(plain, cap_bytes=None) == replace(job, cap_bytes=None, clip_norm=plain.clip_norm)
            if is_alike and row["system"] == system and row["error"] is None:
                return float(row["step_seconds"])
    nearest = min(PLAIN_4B, key=lambda batch: abs(batch - job.batch))
    return job.tokens / PLAIN_4B[nearest] * job.flops_per_token / Job("4b", job.batch).flops_per_token


def bounds(job: Job, medians: Iterable[Row]) -> dict[str, Row]:
    """By schedule, what a results file says of a job's bound."""
    box = Box()
    compute = compute_seconds(job, medians)
    device_bytes = (job.cap_bytes or box.device_bytes) - CONTEXT_BYTES
    beside = {"activation_bytes": job.activation_bytes, "slot_bytes": 2 * job.block_bytes}
    found = {}
    for name, schedule in (("free", FREE), ("exact", EXACT)):
        seconds, split = bound_seconds(job.parameters, compute, device_bytes, schedule, **beside, box=box)
        found[name] = {
            "step_seconds": seconds,
            "tokens_per_second": job.tokens / seconds,
            "compute_seconds": compute,
            "split": asdict(split),
        }
    return found


# ---------------------------------------------------------------------- the runs


def measure_anyfit(job_name: str, steps: int, warmup: int) -> Row:
    from . import mixed

    is_capped = JOBS[job_name].cap_bytes is not None
    starting = partial(mixed.start_planned, job_name) if is_capped else partial(mixed.start, job_name, {})
    return peers.empty_row("anyfit", job_name) | mixed.measure(job_name, steps, warmup, starting)


def measure_compute(job_name: str, steps: int, warmup: int, device: str = "cuda") -> Row:
    """Forward, recomputation and backward alone, in bf16: of a quarter of the layers and of half, and from there of all."""
    job = JOBS[job_name]
    layers = MODELS[job.model]["n_layer"]
    few, more = max(layers // 4, 1), max(layers // 2, 2)
    seconds = [_compute_of(job, count, steps, warmup, torch.device(device)) for count in (few, more)]
    step = seconds[0] + (seconds[1] - seconds[0]) * (layers - few) / (more - few)
    figures = {"step_seconds": step, "tokens_per_second": job.tokens / step, "layers": [few, more], "seconds_of_layers": seconds}
    return peers.empty_row(COMPUTE, job_name) | figures


def _compute_of(job: Job, layers: int, steps: int, warmup: int, device: torch.device) -> float:
    from transformers import AutoConfig, AutoModelForCausalLM

    with device:
        options = {**MODELS[job.model], "n_layer": layers}
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model("gpt2", **options), dtype=torch.bfloat16)
        ids = torch.randint(0, options["vocab_size"], (job.batch, job.case.length))
    model.gradient_checkpointing_enable({"use_reentrant": False})
    took = []
    for _ in range(warmup + steps):
        begun = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        loss.item()
        if device.type == "cuda":
            torch.cuda.synchronize()
        took.append(time.perf_counter() - begun)
        model.zero_grad(set_to_none=True)
    return statistics.median(took[warmup:])


def systems_for(job: Job, asked: Sequence[str]) -> list[str]:
    """Those asked for; or anyfit with the offloading systems under a cap, with the plain ones without."""
    names = asked or ["anyfit", *(name for name, system in SYSTEMS.items() if system.offloads == (job.cap_bytes is not None))]
    return [name for name in names if name in OWN or SYSTEMS[name].is_there]


def run_apart(system: str, job: str, attempt: int, options: argparse.Namespace) -> Row:
    """A row from a process of its own, which is stopped when it takes too long or too much of the host's memory."""
    command = [sys.executable, "-m", "benchmarks.offload", "--one", system, "--job", job, "--attempt", str(attempt)]
    command += ["--steps", str(options.steps), "--warmup", str(options.warmup), "--device", options.device]
    with tempfile.TemporaryFile("w+") as output, tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=errors, start_new_session=True)
        stopped = _watch(process, options.timeout, SPARE_BYTES_OF_PLANNED if system in OWN else SPARE_HOST_BYTES)
        output.seek(0)
        errors.seek(0)
        rows = [json.loads(line.partition("ROW")[2]) for line in output if "ROW{" in line]
        said = errors.read()
    if rows:
        return dict(rows[-1])
    last = next((line for line in reversed(said.splitlines()) if line.strip()), "")
    died = "out of host memory" if process.returncode == -signal.SIGKILL else last[:200] or f"ended with {process.returncode}"
    return peers.empty_row(system, job) | {"error": stopped or died}


def _watch(process: subprocess.Popen[bytes], timeout: float, spare_bytes: int) -> str | None:
    """Why it was stopped, if it was."""
    end = time.monotonic() + timeout
    while process.poll() is None:
        reason = None
        if time.monotonic() > end:
            reason = f"not done after {timeout:.0f} s"
        elif free_host_bytes() < spare_bytes:
            reason = f"left less than {spare_bytes / GIB:.1f} GiB of host memory"
        if reason:
            os.killpg(process.pid, signal.SIGKILL)  # it has a session of its own, with what it started
            process.wait()
            return reason
        time.sleep(0.25)
    return None


def free_host_bytes() -> int:
    """Of the machine, or of the control group where that has less."""
    free = int(psutil.virtual_memory().available)
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = (group / "memory.max").read_text().strip(), int((group / "memory.current").read_text())
        counts = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    cached = int(counts["active_file"]) + int(counts["inactive_file"])  # goes when memory is needed
    return free if limit == "max" else min(free, int(limit) - used + cached)


def run_all(options: argparse.Namespace) -> Row:
    """Every system on every job, `repeats` times around; the figures as they are recorded."""
    turns = [(system, name) for name in options.jobs for system in systems_for(JOBS[name], options.systems)]
    before = record.Recording(options.add).figures if options.add else {"rows": [], "versions": {}}
    rows, versions = [row for row in before["rows"] if (row["system"], row["job"]) not in turns], before["versions"]
    works: dict[tuple[str, str], int] = {}  # the attempt that fitted
    figures = figures_of(rows, versions)
    for repeat in range(options.repeats):
        for system, job in turns:
            attempt = works.get((system, job), 0)
            attempts = 1 if system in OWN else len(SYSTEMS[system].attempts)
            row = run_apart(system, job, attempt, options)
            while row["error"] == "out of memory" and attempt + 1 < attempts:
                attempt += 1
                row = run_apart(system, job, attempt, options)
            works[system, job] = attempt
            rows.append(row | {"repeat": repeat})
            print(line_of(row), flush=True)
            figures = figures_of(rows, versions | peers.versions())
            if options.record:
                record.write("offload", figures)
    return figures


def figures_of(rows: Sequence[Row], versions: dict[str, str]) -> Row:
    medians = [median_of(alike) for alike in _by_system_and_job(rows)]
    names = list(dict.fromkeys(row["job"] for row in medians))
    return {
        "settings": peers.SETTINGS,
        "versions": versions,
        "box": asdict(Box()),
        "jobs": {name: asdict(JOBS[name]) | {"parameters": JOBS[name].parameters} for name in names},
        "bounds": {name: bounds(JOBS[name], medians) for name in names},
        "medians": [row for row in medians if row["system"] != COMPUTE],
        "rows": list(rows),
    }


def _by_system_and_job(rows: Iterable[Row]) -> Iterator[list[Row]]:
    groups: dict[tuple[int, str], list[Row]] = {}
    order = {name: index for index, name in enumerate(JOBS)}
    for row in rows:
        groups.setdefault((order[row["job"]], row["system"]), []).append(row)
    for _, alike in sorted(groups.items(), key=lambda item: item[0][0]):
        yield alike


def median_of(rows: Sequence[Row]) -> Row:
    """Of one system on one job: the median of each figure over the runs that worked, or the last error when none did."""
    worked = [row for row in rows if row["error"] is None]
    if not worked:
        return {key: value for key, value in rows[-1].items() if key not in ("repeat", "step_seconds_all")}
    kept: Row = {}
    for key, value in worked[-1].items():
        if key == "repeat" or isinstance(value, list):
            continue
        numbers = [row[key] for row in worked if isinstance(row.get(key), int | float)]
        kept[key] = statistics.median(numbers) if len(numbers) == len(worked) else value
    return kept | {"runs": len(rows), "runs_that_failed": len(rows) - len(worked)}


# ---------------------------------------------------------------------- for people


def line_of(row: Row) -> str:
    """Of one process as it ends."""
    name = f"{row['job']}, {row['system']}:"
    if row["error"]:
        return f"{name} {row['error']}"
    if row["system"] == COMPUTE:
        return f"{name} {row['step_seconds']:.3f} s a step"
    parts = f", batch in {row['parts']} parts" if row.get("parts", 1) > 1 else ""
    return (
        f"{name} {row['step_seconds']:.3f} s a step, {row['tokens_per_second']:,.0f} tokens/s, "
        f"GPU {row['reserved_bytes'] / GIB:.1f} GiB, host {row['most_resident_bytes'] / GIB:.1f} GiB, ready after "
        f"{row['start_seconds']:.0f} s, loss {row['loss_first']:.4f} to {row['loss_last']:.4f}{parts}"
    )


def table(figures: Row) -> str:
    """The medians and the bounds by job, the fastest first."""
    head = ["job", "system", "step s", "tokens/s", "GPU GiB", "host GiB", "start s", "first s", "clipped", "loss", ""]
    lines = [head]
    for job, bound in figures["bounds"].items():
        of_job = [row for row in figures["medians"] if row["job"] == job]
        for row in sorted(of_job, key=lambda row: -(row["tokens_per_second"] or 0)):
            if row["error"]:
                lines.append([job, row["system"], *[""] * 8, row["error"]])
                continue
            clipped = "" if row["clipped_share"] is None else f"{row['clipped_share']:.0%}"
            sizes = [f"{row['reserved_bytes'] / GIB:.1f}", f"{row['most_resident_bytes'] / GIB:.1f}"]
            times = [f"{row['start_seconds']:.0f}", f"{row['first_step_seconds']:.1f}"]
            notes = f"batch in {row['parts']:g} parts" if row.get("parts", 1) > 1 else ""
            rate = [f"{row['step_seconds']:.3f}", f"{row['tokens_per_second']:,.0f}"]
            lines.append([job, row["system"], *rate, *sizes, *times, clipped, f"{row['loss_last']:.4f}", notes])
        for name, found in bound.items():
            rate = [f"{found['step_seconds']:.3f}", f"{found['tokens_per_second']:,.0f}"]
            shares = ", ".join(f"{found['split'][share]:.0%} {share}" for share in ("resident", "streamed", "host"))
            lines.append([job, f"bound, {name}", *rate, *[""] * 6, shares])
    widths = [max(len(line[column]) for line in lines) for column in range(len(head))]
    aligned = [
        "  ".join(
            cell.ljust(width) if at in (0, 1, 10) else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(line.rstrip() for line in aligned)


# ---------------------------------------------------------------------- the picture

WIDTH, LEFT, RIGHT, TOP = 900, 170, 230, 44
ROW, BAR, GAP = 22, 15, 34
COLOURS = {"anyfit": "ours", "plain": "all", "plain fp32 masters": "all"}
SHOWN = {"deepspeed zero-3": "DeepSpeed ZeRO-3 offload", "fsdp2": "FSDP2 offload", "plain fp32 masters": "plain PyTorch"}
LIGHT = (
    ".ours { fill: #0072b2; } .peer { fill: #e69f00; } .all { fill: #8b9097; } "
    ".exact { stroke: #1f2328; stroke-width: 1.5; } .free { stroke: #1f2328; stroke-width: 1.5; stroke-dasharray: 3 3; }"
)
DARK = ".ours { fill: #4aa3df; } .exact, .free { stroke: #e6edf3; }"


def draw(figures: Row, about: Row) -> str:
    """Tokens a second by system for each job, as an SVG document; the bounds as lines across a job's bars."""
    found = [row["tokens_per_second"] for row in figures["medians"] if not row["error"]]
    found += [bound["free"]["tokens_per_second"] for bound in figures["bounds"].values()]
    scale = (WIDTH - LEFT - RIGHT) / max(found)
    parts, y = [], TOP
    for job, bound in figures["bounds"].items():
        of_job = sorted(
            (row for row in figures["medians"] if row["job"] == job), key=lambda row: -(row["tokens_per_second"] or 0)
        )
        parts.append(f'<text class="ink big" x="8" y="{y + 14}">{escape(_in_words(JOBS[job]))}</text>')
        y += ROW
        for name in ("exact", "free"):
            x = LEFT + bound[name]["tokens_per_second"] * scale
            said = f"bound, {name}: {bound[name]['step_seconds']:.3f} s, {bound[name]['tokens_per_second']:,.0f} tokens/s"
            below = y + ROW * len(of_job)
            across = f'<line class="{name}" x1="{x:.1f}" y1="{y - 2}" x2="{x:.1f}" y2="{below}">'
            parts.append(f"{across}<title>{escape(said)}</title></line>")
        for row in of_job:
            parts += _bar(row, y, scale)
            y += ROW
        y += GAP - ROW
    height = y + 30
    keys = (("exact", "bound where clipping is exact"), ("free", "bound where everything overlaps"))
    for index, (name, meaning) in enumerate(keys):
        x = LEFT + 250 * index
        parts.append(f'<line class="{name}" x1="{x}" y1="{y}" x2="{x}" y2="{y + 14}"/>')
        parts.append(f'<text class="ink" x="{x + 8}" y="{y + 11}">{meaning}</text>')
    title = f"Training under a cap on GPU memory, tokens a second, {about['gpu'] or about['processor']}"
    return framed(title, WIDTH, height, parts, LIGHT, DARK)


def _in_words(job: Job) -> str:
    """
    >>> _in_words(JOBS["4b batch 8 cap 24"])
    'GPT-2, 3.78 B parameters, batch 8 x 1024, in 24 GiB of GPU memory, every block recomputed'
    """
    cap = "" if job.cap_bytes is None else f", in {job.cap_bytes // GIB} GiB of GPU memory"
    blocks = "every activation kept" if job.kept else "every block recomputed"
    also = ", blocks compiled" * job.compiled + ", every step clipped" * (job.clip_norm == peers.ALWAYS)
    size = show_count(job.parameters)
    return f"GPT-2, {size} parameters, batch {job.batch} x {job.case.length}{cap}, {blocks}{also}"


def _bar(row: Row, y: int, scale: float) -> Iterator[str]:
    system = SHOWN.get(row["system"], row["system"])
    yield f'<text class="ink" x="{LEFT - 8}" y="{y + 12}" text-anchor="end">{escape(system)}</text>'
    if row["error"]:
        yield f'<text class="faint" x="{LEFT + 4}" y="{y + 12}">{escape(row["error"])}</text>'
        return
    width = row["tokens_per_second"] * scale
    kind = COLOURS.get(row["system"], "peer")
    yield f'<rect class="{kind}" x="{LEFT}" y="{y}" width="{width:.1f}" height="{BAR}" rx="2"/>'
    written = f"{row['tokens_per_second']:,.0f} tokens/s, {row['step_seconds']:.2f} s, {row['reserved_bytes'] / GIB:.1f} GiB"
    x = max(LEFT + width, 0) + 6
    yield f'<text class="ink halo" x="{x:.1f}" y="{y + 12}">{escape(written)}</text>'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", choices=list(JOBS), metavar="JOB", default=[n for n in JOBS if "tiny" not in n])
    parser.add_argument("--systems", nargs="+", choices=[*OWN, *SYSTEMS], metavar="SYSTEM", default=[])
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--add", type=Path, metavar="FILE", help="begin with what it has of other systems and jobs")
    parser.add_argument("--timeout", type=float, default=400, help="seconds a process may take")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw a results file and measure nothing")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--attempt", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        if options.one == "anyfit":
            row = measure_anyfit(options.job, options.steps, options.warmup)
        elif options.one == COMPUTE:
            row = measure_compute(options.job, options.steps, options.warmup, options.device)
        else:
            row = peers.measure(
                options.one, options.job, options.steps, options.warmup, device=options.device, attempt=options.attempt
            )
        print("\nROW" + json.dumps(row), flush=True)
        sys.stderr.flush()
        os._exit(0)  # process groups and engines that are torn down late may hang
    if options.picture:
        recorded = record.Recording(options.picture)
        PICTURE.write_text(draw(recorded.figures, recorded.about))
        print(PICTURE.relative_to(ROOT))
        return
    for name, system in SYSTEMS.items():
        if not system.is_there and (name in options.systems or not options.systems):
            print(f"{name}: left out, there is no module {system.needs}", flush=True)
    print(table(run_all(options)))


if __name__ == "__main__":
    main()
