"""The search: every micro-batch that was profiled, everything resident on one device; the fastest that fits wins.

    minimise    seconds(m), and where several are within TIE of the least, the number of passes
    with        seconds(m) = B / m * pass_seconds(m) + update_seconds        (a smaller last micro-batch costs its share)
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit
    where       peak(m) = state + workspaces + max(pass_peak(m), gradients + update scratch)
                reserved(m) = max(peak(m), what the allocator was seen to reserve) + context

With several micro-batches a step, gradient sums are held all along; with one, each gradient lives from its birth to the update.
"""

from __future__ import annotations

from anyfit.values.plan import AXES, Alternative, Decision, Fingerprint, Forecast, NoPlan, Plan, Stage
from anyfit.values.profile import Pass, Profile
from anyfit.values.units import show_bytes, show_seconds

TIE = 0.05  # two forecasts closer than this are not told apart: the one with fewer passes has less that can go wrong


def search(profile: Profile) -> Plan:
    """The best plan for this profile, or NoPlan with the smallest shortfall."""
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    limit = profile.device_limit_bytes

    fitting = [micro_batch for micro_batch, each in forecasts.items() if each.needed_bytes <= limit]
    if not fitting:
        raise _no_plan(profile, forecasts)
    least = min(forecasts[micro_batch].step_seconds for micro_batch in fitting)
    best = max(each for each in fitting if forecasts[each].step_seconds <= (1 + TIE) * least)
    alternatives = tuple(
        Alternative(
            decision="micro-batch",
            choice=_passes(profile.batch_size, micro_batch),
            step_seconds=other.step_seconds,
            device_bytes=other.needed_bytes,
            fits=other.needed_bytes <= limit,
        )
        for micro_batch, other in forecasts.items()
        if micro_batch != best
    )
    chosen = forecasts[best]
    return Plan(
        model=profile.model,
        machine=profile.machine,
        parameters=profile.parameters,
        precision=profile.precision,
        batch_size=profile.batch_size,
        micro_batch=best,
        accumulation=_accumulation(profile.batch_size, best),
        mesh=dict.fromkeys(AXES, 1),
        stages=(Stage(0, profile.blocks - 1, {}),),
        chunk_bytes=profile.chunk_bytes,
        chunks=(),
        slots=0,
        prefetch=0,
        limit_bytes={"device": limit, "host": profile.host_limit_bytes, "disk": profile.disk_limit_bytes},
        forecast=chosen,
        decisions=(
            Decision("model state", "all on the device", f"it fits, {show_bytes(limit - chosen.needed_bytes)} to spare"),
            Decision("micro-batch", _passes(profile.batch_size, best), _why(chosen, alternatives)),
            *([Decision("trace", "a real run", "; ".join(profile.notes))] if profile.notes else []),
        ),
        alternatives=alternatives,
        fingerprint=Fingerprint(profile.model_fingerprint, profile.machine_fingerprint),
    )


def forecast(profile: Profile, each: Pass) -> Forecast:
    """What a step costs when this pass is its micro-batch."""
    state, update = profile.state, profile.update
    accumulation = _accumulation(profile.batch_size, each.micro_batch)
    passes = profile.batch_size / each.micro_batch
    if accumulation == 1:
        peak = state.resident + max(each.peak_bytes, state.gradients + update.scratch_bytes)
    else:
        peak = state.resident + state.accumulators + max(each.peak_bytes_accumulating, update.scratch_bytes)
    peak += profile.workspace_bytes
    compute = passes * (each.seconds - each.seconds_recompute)
    recompute = passes * each.seconds_recompute
    seconds = compute + recompute + update.seconds
    return Forecast(
        step_seconds=seconds,
        step_error=profile.time_error,
        split_seconds={"compute": compute, "recompute": recompute, "update": update.seconds},
        peak_bytes={"device": peak, "host": 0, "disk": 0},
        peak_error=profile.memory_error,
        reserved_bytes=max(each.reserved_bytes, peak) + profile.context_bytes,
        reserved_error=profile.reserved_error,
        samples_per_second=profile.batch_size / seconds,
        tokens_per_second=passes * each.tokens / seconds,
        compute_share=passes * each.flops / seconds / profile.peak_flops_per_second,
    )


def _accumulation(batch_size: int, micro_batch: int) -> int:
    return -(-batch_size // micro_batch)


def _passes(batch_size: int, micro_batch: int) -> str:
    count = _accumulation(batch_size, micro_batch)
    return f"{batch_size} in one pass" if count == 1 else f"{micro_batch}, {count} passes a step"


def _why(chosen: Forecast, alternatives: tuple[Alternative, ...]) -> str:
    """The best rejected neighbour and its price."""
    if not alternatives:
        return "the only one asked for"
    best = min(alternatives, key=lambda other: other.step_seconds if other.fits else float("inf"))
    if not best.fits:
        least = min(alternatives, key=lambda other: other.device_bytes)
        return f"{least.choice} would need {show_bytes(least.device_bytes)} and does not fit"
    later = best.step_seconds - chosen.step_seconds
    room = chosen.needed_bytes - best.device_bytes
    memory = f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
    if later < 0:
        return f"the fewest passes; {best.choice} would take {show_seconds(-later)} less, too close to tell apart, and {memory}"
    return f"{best.choice} would take {show_seconds(later)} more a step and {memory}"


def _no_plan(profile: Profile, forecasts: dict[int, Forecast]) -> NoPlan:
    micro_batch = min(forecasts, key=lambda each: forecasts[each].needed_bytes)
    least = forecasts[micro_batch].needed_bytes
    shortfall = least - profile.device_limit_bytes
    where = next(each.peak_at for each in profile.passes if each.micro_batch == micro_batch)
    return NoPlan(
        f"{profile.model} does not fit: with micro-batches of {micro_batch} it needs {show_bytes(least)} of device memory "
        f"({show_bytes(profile.state.resident)} of that is model state; the peak is at {where}), and "
        f"{show_bytes(profile.device_limit_bytes)} are allowed: {show_bytes(shortfall)} too little. "
        f"A limit or a device of {-(-least // 2**20)}MiB fits; {_hint(micro_batch)}",
        shortfall,
    )


def _hint(micro_batch: int) -> str:
    return "a smaller micro_batch takes less" if micro_batch > 1 else "shorter samples take less"
