"""The search: every micro-batch that was profiled, everything resident on one device; the fastest that fits wins. Where none
does, the same with part of the model state on the host (offload.py).

    minimise    seconds(m), and where several are within TIE of the least, the number of passes
    with        seconds(m) = B / m * pass_seconds(m) + update_seconds        (a smaller last micro-batch costs its share)
    over        m in the profiled micro-batches
    subject to  (1 + error) * reserved(m) <= device limit
    where       peak(m) = state + workspaces + max(pass_peak(m), gradients + update scratch)
                reserved(m) = max(peak(m), what the allocator was seen to reserve) + context

With several micro-batches a step, gradient sums are held all along; with one, each gradient lives from its birth to the update.
"""

from __future__ import annotations

from dataclasses import replace

from anyfit.values.plan import AXES, TIERS, Alternative, Decision, Fingerprint, Forecast, NoPlan, Plan, Stage
from anyfit.values.profile import Pass, Profile
from anyfit.values.units import show_bytes, show_seconds

from .offload import Offload, offloads

OFFLOAD_PEAK_ERROR = 0.08  # of peak memory: gradients that go down early are counted as if they all stayed to the peak, at most
OFFLOAD_ERROR = 0.6  # of step time, where part of the state is on the host: the shares that hide are rough
TIE = 0.05  # two forecasts closer than this are not told apart: the one with fewer passes has less that can go wrong


def search(profile: Profile) -> Plan:
    """The best plan for this profile, or NoPlan with the smallest shortfall."""
    forecasts = {each.micro_batch: forecast(profile, each) for each in profile.passes}
    limit = profile.device_limit_bytes

    fitting = [micro_batch for micro_batch, each in forecasts.items() if each.needed_bytes <= limit]
    if not fitting:
        return _offloaded(profile, forecasts)
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
    state = Decision("model state", "all on the device", f"it fits, {show_bytes(limit - chosen.needed_bytes)} to spare")
    return _plan(profile, best, chosen, state, alternatives)


def _plan(
    profile: Profile,
    micro_batch: int,
    chosen: Forecast,
    state: Decision,
    alternatives: tuple[Alternative, ...],
    placed: Offload | None = None,
) -> Plan:
    limits = (profile.device_limit_bytes, profile.host_limit_bytes, profile.disk_limit_bytes)
    return Plan(
        model=profile.model,
        machine=profile.machine,
        parameters=profile.parameters,
        precision=profile.precision,
        batch_size=profile.batch_size,
        micro_batch=micro_batch,
        accumulation=_accumulation(profile.batch_size, micro_batch),
        mesh=dict.fromkeys(AXES, 1),
        stages=(Stage(0, profile.blocks - 1, {}),),
        chunk_bytes=profile.offload_chunk_bytes if placed else profile.chunk_bytes,
        chunks=placed.chunks if placed else (),
        slots=placed.slots if placed else 0,
        prefetch=placed.prefetch if placed else 0,
        limit_bytes=dict(zip(TIERS, limits, strict=True)),
        forecast=chosen,
        decisions=(
            state,
            Decision("micro-batch", _passes(profile.batch_size, micro_batch), _why(chosen, alternatives)),
            *([Decision("trace", "a real run", "; ".join(profile.notes))] if profile.notes else []),
        ),
        alternatives=alternatives,
        fingerprint=Fingerprint(profile.model_fingerprint, profile.machine_fingerprint),
    )


def _offloaded(profile: Profile, resident: dict[int, Forecast]) -> Plan:
    """The fastest plan with part of the model state on the host, or NoPlan."""
    found: dict[int, tuple[Forecast, Offload]] = {}
    forecasts = dict(resident)  # by micro-batch, the one that needs least
    least_host = None  # bytes, of those that fit the device
    for each in profile.passes:
        accumulation = _accumulation(profile.batch_size, each.micro_batch)
        for placed in offloads(profile, each, accumulation) if profile.host is not None else ():
            candidate = _forecast_offloaded(profile, each, placed)
            if candidate.needed_bytes < forecasts[each.micro_batch].needed_bytes:
                forecasts[each.micro_batch] = candidate
            if candidate.needed_bytes > profile.device_limit_bytes:
                continue
            if placed.host_bytes <= profile.host_limit_bytes:
                found[each.micro_batch] = candidate, placed
                break
            least_host = min(placed.host_bytes, least_host or placed.host_bytes)
    if not found and least_host is not None:
        raise _no_host(profile, least_host)
    if not found:
        raise _no_plan(profile, forecasts)
    best = min(found, key=lambda micro_batch: found[micro_batch][0].step_seconds)
    chosen, placed = found[best]
    least = min(each.needed_bytes for each in resident.values())
    alternatives = tuple(
        Alternative("micro-batch", _passes(profile.batch_size, size), other.step_seconds, other.needed_bytes, size in found)
        for size, other in ((size, found[size][0] if size in found else forecasts[size]) for size in forecasts)
        if size != best
    )
    state = Decision("model state", _where(profile, placed), f"all on the device would need {show_bytes(least)} at least")
    return _plan(profile, best, chosen, state, alternatives, placed)


def _where(profile: Profile, placed: Offload) -> str:
    away = sum(chunk.weights_bytes for chunk, where in zip(profile.chunks, placed.chunks, strict=True) if where.weights == "host")
    there = sum(where.optimizer == "device" for where in placed.chunks)
    choice = f"optimizer of {there} of {len(placed.chunks)} chunks on the device, of the others on the host"
    return choice + (f", and {show_bytes(away)} of weights, fetched through {placed.slots} slots" if away else "")


def _forecast_offloaded(profile: Profile, each: Pass, placed: Offload) -> Forecast:
    plain = forecast(profile, each)
    seconds = {
        **plain.split_seconds,
        "update": placed.update_seconds,
        "exposed update": placed.exposed_update_seconds,
        "exposed offload": placed.exposed_fetch_seconds,
    }
    total = sum(seconds.values())
    share = plain.step_seconds / total
    # What the allocator adds comes from the pass, not from the pools.
    added = plain.reserved_bytes - profile.context_bytes - plain.peak_bytes["device"]
    return replace(
        plain,
        step_seconds=total,
        step_error=max(plain.step_error, OFFLOAD_ERROR),
        split_seconds=seconds,
        peak_bytes={"device": placed.device_bytes, "host": placed.host_bytes, "disk": 0},
        peak_error=max(plain.peak_error, OFFLOAD_PEAK_ERROR),
        reserved_bytes=placed.device_bytes + added + profile.context_bytes,
        samples_per_second=plain.samples_per_second * share,
        tokens_per_second=plain.tokens_per_second * share,
        compute_share=plain.compute_share * share,
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
    state = f"{show_bytes(profile.state.resident)} of that is model state"
    if forecasts[micro_batch].peak_bytes["host"]:
        state = "with all the model state it can on the host"
    return NoPlan(
        f"{profile.model} does not fit: with micro-batches of {micro_batch} it needs {show_bytes(least)} of device memory "
        f"({state}; the peak is at {where}), and "
        f"{show_bytes(profile.device_limit_bytes)} are allowed: {show_bytes(shortfall)} too little. "
        f"A limit or a device of {-(-least // 2**20)}MiB fits; {_hint(micro_batch)}",
        shortfall,
    )


def _no_host(profile: Profile, least: int) -> NoPlan:
    shortfall = least - profile.host_limit_bytes
    return NoPlan(
        f"{profile.model} does not fit: what the device has no room for takes {show_bytes(least)} of host memory, and "
        f"{show_bytes(profile.host_limit_bytes)} are allowed: {show_bytes(shortfall)} too little. "
        f"--host-memory {-(-least // 2**20)}MiB fits, and so does more device memory",
        shortfall,
    )


def _hint(micro_batch: int) -> str:
    return "a smaller micro_batch takes less" if micro_batch > 1 else "shorter samples take less"
