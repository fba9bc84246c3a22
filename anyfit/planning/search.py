"""The search: every micro-batch that was profiled, everything resident on one device; the fastest that fits wins.

    minimise    seconds(m), and where several are within TIE of the least, ceil(B / m)
    with        seconds(m) = ceil(B / m) * pass_seconds(m) + update_seconds
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit
    where       peak(m) = state + max(pass_peak(m), gradients + update scratch), reserved(m) = overhead * peak(m) + context

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

    def needed(micro_batch: int) -> int:
        return with_margin(forecasts[micro_batch])

    fitting = [micro_batch for micro_batch in forecasts if needed(micro_batch) <= limit]
    if not fitting:
        raise _no_plan(profile, forecasts)
    least = min(forecasts[micro_batch].step_seconds for micro_batch in fitting)
    best = max(each for each in fitting if forecasts[each].step_seconds <= (1 + TIE) * least)
    alternatives = tuple(
        Alternative(
            decision="micro-batch",
            choice=_passes(profile.batch_size, micro_batch),
            step_seconds=other.step_seconds,
            device_bytes=other.reserved_bytes,
            fits=needed(micro_batch) <= limit,
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
        stages=(Stage(0, profile.blocks - 1, tuple("keep" for _ in range(profile.blocks))),),
        chunk_bytes=profile.chunk_bytes,
        limit_bytes={"device": limit, "host": profile.host_limit_bytes, "disk": profile.disk_limit_bytes},
        forecast=chosen,
        decisions=(
            Decision("model state", "all on the device", f"it fits, {show_bytes(limit - with_margin(chosen))} to spare"),
            Decision("micro-batch", _passes(profile.batch_size, best), _why(chosen, alternatives)),
        ),
        alternatives=alternatives,
        fingerprint=Fingerprint(profile.model_fingerprint, profile.machine_fingerprint),
    )


def forecast(profile: Profile, each: Pass) -> Forecast:
    """What a step costs when this pass is its micro-batch."""
    state, update = profile.state, profile.update
    accumulation = _accumulation(profile.batch_size, each.micro_batch)
    # A smaller last micro-batch costs its share of a whole one.
    passes = profile.batch_size / each.micro_batch
    if accumulation == 1:
        peak = state.resident + max(each.peak_bytes, state.gradients + update.widened_bytes + update.scratch_bytes)
    else:
        peak = state.resident + state.accumulators + max(each.peak_bytes_accumulating, update.scratch_bytes)
    compute = passes * (each.seconds - each.seconds_recompute)
    recompute = passes * each.seconds_recompute
    seconds = compute + recompute + update.seconds
    return Forecast(
        step_seconds=seconds,
        step_error=profile.time_error,
        split_seconds={"compute": compute, "recompute": recompute, "update": update.seconds},
        peak_bytes={"device": peak, "host": 0, "disk": 0},
        peak_error=profile.memory_error,
        reserved_bytes=int(peak * profile.allocator_overhead) + profile.context_bytes,
        samples_per_second=profile.batch_size / seconds,
        tokens_per_second=passes * each.tokens / seconds,
        compute_share=passes * each.flops / seconds / profile.peak_flops_per_second,
    )


def with_margin(forecast: Forecast) -> int:
    """Reserved bytes at the far end of the error band: what must fit."""
    return int(forecast.reserved_bytes * (1 + forecast.peak_error))


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
    room = chosen.reserved_bytes - best.device_bytes
    return (
        f"{best.choice} would take {show_seconds(abs(later))} {'more' if later >= 0 else 'less'} a step and "
        f"{show_bytes(abs(room))} {'less' if room >= 0 else 'more'} memory"
    )


def _no_plan(profile: Profile, forecasts: dict[int, Forecast]) -> NoPlan:
    micro_batch = min(forecasts, key=lambda each: with_margin(forecasts[each]))
    least = with_margin(forecasts[micro_batch])
    shortfall = least - profile.device_limit_bytes
    state = profile.state.resident
    where = next(each.peak_at for each in profile.passes if each.micro_batch == micro_batch)
    return NoPlan(
        f"{profile.model} does not fit: it needs {show_bytes(shortfall)} more device memory than the "
        f"{show_bytes(profile.device_limit_bytes)} allowed, even with micro-batches of {micro_batch} "
        f"({show_bytes(state)} of it model state; the peak is at {where}). "
        f"--device-memory {-(-least // 2**20)}MiB fits" + _hint(micro_batch),
        shortfall,
    )


def _hint(micro_batch: int) -> str:
    if micro_batch > 1:
        return "; a smaller micro_batch takes less"
    return "; shorter samples take less"
