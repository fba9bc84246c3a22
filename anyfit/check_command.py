"""`anyfit check`: a few real steps beside their forecast, and beside plain PyTorch."""

from __future__ import annotations

from pathlib import Path

from . import profile as make_profile
from .ending import end
from .planning import search
from .planning.answers import as_change
from .probing.cache import keep_correction, keep_pace
from .running.check import check as run_check
from .showing.printing import console, print_json
from .targets import job_for, machine_for, tell_of_default
from .tracing.blocks import kinds_of
from .values.plan import Plan


def check(
    target: str,
    plan: Path | None,
    batch: int | None,
    seq: int | None,
    dtype: str | None,
    optimizer: str | None,
    lora: int | None,
    real_run: bool | None,
    agree: list[str] | None,
    steps: int,
    device_memory: str | None,
    host_memory: str | None,
    disk: str | None,
    as_json: bool,
) -> None:
    job = job_for(target, batch=batch, seq=seq, dtype=dtype, optimizer=optimizer, lora=lora, real_run=real_run, agree=agree)
    tell_of_default(target)
    given = None if plan is None else Plan.load(plan)
    machine = machine_for(None, None, None, device_memory, host_memory, disk)
    made_of = make_profile(job, machine, ranks=1)
    chosen = given or search(made_of, typed=lambda *enough: None if machine.lacks(enough[0]) else as_change(*enough))
    found = run_check(job, chosen, made_of, machine, steps, kinds_of)
    if found.pace is not None:
        keep_pace(machine, found.pace)
    if found.correction is not None:
        keep_correction(machine, found.correction)
    if as_json:
        print_json(found.to_json())
    else:
        from .showing.terminal import show_check

        show_check(found, console(), machine.device.kind)
    if found.parity is not None and not found.parity.agrees:
        end(ValueError("the steps differ from plain PyTorch's by more than rounding explains"))
