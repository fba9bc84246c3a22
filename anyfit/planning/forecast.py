"""What a step is expected to take, of seconds and of memory.

With everything resident and all activations kept it is arithmetic:

    seconds(m)   = B / m * pass_seconds(m) + passes(m) * adding_seconds + update_seconds
    passes(m)    = ceil(B / m)        (a smaller last micro-batch costs its share; of one pass, nothing is added up)
    peak(m)      = state + workspaces + max(pass_peak(m), gradients + update scratch)
    reserved(m)  = max(peak(m), what the allocator was seen to reserve) + context

With several micro-batches a step, gradient sums are held all along; with one, each gradient lives from its birth to the update.
Where blocks are replayed, what they keep is held all along: gradients come on top.
All else is simulated; of a job that clips twice, with updates that begin before the norm is known and with such that wait for it,
and once more with a single step that is clipped.
"""

from __future__ import annotations

from dataclasses import replace

from anyfit.values.plan import Clipping, Forecast, Wear
from anyfit.values.profile import Pass, Profile
from anyfit.values.timing import shared_bytes

from .candidate import add_seconds, rates_of
from .evaluation import Offer
from .space import Space


def forecast(profile: Profile, each: Pass) -> Forecast:
    """What a step costs when this pass is its micro-batch."""
    state, update = profile.state, profile.update
    accumulation = passes_of(profile.batch_size, each.micro_batch)
    passes = profile.batch_size / each.micro_batch
    if accumulation == 1:
        peak = state.resident + max(each.peak_bytes, state.gradients + update.scratch_bytes)
    else:
        peak = state.resident + state.accumulators + max(each.peak_bytes_accumulating, update.scratch_bytes)
    peak += profile.workspace_bytes
    launches = passes * each.launch_wait_seconds
    compute = passes * (each.seconds - each.seconds_recompute) - launches
    recorded = 0
    if each.recorded_bytes:
        launches = passes * (each.replayed.alone_seconds - each.replayed.device_seconds)
        compute = passes * (each.replayed.device_seconds - each.seconds_recompute)
        replays = [block.replays["keep"] for block in each.blocks if block.replays]
        recorded = shared_bytes(replays) + sum(replay.own_bytes for replay in replays)
        recorded += min(state.gradients, each.kept_for_good_bytes)
        peak += recorded
    recompute = passes * each.seconds_recompute
    updated = update.seconds + (accumulation > 1) * accumulation * profile.trainable * add_seconds(profile)
    seconds = compute + recompute + updated + launches
    return Forecast(
        step_seconds=seconds,
        step_error=profile.time_error,
        split_seconds={"compute": compute, "recompute": recompute, "update": updated, "exposed launch": launches},
        peak_bytes={"device": peak, "host": 0, "disk": 0},
        peak_error=profile.memory_error,
        reserved_bytes=max(each.reserved_bytes + recorded, peak) + profile.context_bytes,
        reserved_error=profile.reserved_error,
        samples_per_second=profile.batch_size / seconds,
        tokens_per_second=passes * each.tokens / seconds,
        compute_share=passes * each.flops / seconds / profile.peak_flops_per_second,
        start_seconds=start_seconds(profile, 0),
        clipping=_clipping(profile, seconds, seconds),  # no update begins before the norm is known
    )


def _clipping(profile: Profile, clipped_seconds: float, redone_seconds: float) -> Clipping | None:
    return None if profile.clipped_steps is None else Clipping(clipped_seconds, redone_seconds, profile.clipped_share)


def forecast_of(space: Space, offer: Offer) -> Forecast:
    """What a step of an offer costs, by its simulation."""
    profile, simulated = space.profile, offer.simulated
    plain, fitted = forecast(profile, offer.candidate.profile_pass), profile.calibration
    seconds = split_seconds(profile, offer)
    total = sum(seconds.values())
    share = plain.step_seconds / total
    exchanged = offer.candidate.accumulation * offer.candidate.profile_pass.exchange_seconds  # along a tensor axis
    clipping = None
    if profile.clipped_steps is not None:
        redone = space.evaluation.redone_seconds(offer) - simulated.step_seconds
        clipping = _clipping(profile, total + offer.clipped.step_seconds - simulated.step_seconds, total + redone)
    return replace(
        plain,
        step_seconds=total,
        step_error=max(plain.step_error, fitted.offload_time_error.value)
        + profile.link_error * (simulated.exchange_seconds + exchanged) / total
        + (0.0 if profile.disk is None else profile.disk.error * seconds["exposed disk"] / total),
        split_seconds=seconds,
        peak_bytes={
            "device": offer.footprint.device_bytes,
            "host": offer.footprint.host_bytes,
            "disk": offer.footprint.disk_bytes,
        },
        peak_error=max(plain.peak_error, fitted.offload_peak_error.value),
        reserved_bytes=space.evaluation.reserved_bytes(offer.footprint),
        reserved_error=profile.offload_error,
        samples_per_second=plain.samples_per_second * share,
        tokens_per_second=plain.tokens_per_second * share,
        compute_share=plain.compute_share * share,
        start_seconds=start_seconds(profile, offer.footprint.host_bytes),
        clipping=clipping,
        wear=_wear(profile, offer),
    )


def _wear(profile: Profile, offer: Offer) -> Wear | None:
    if profile.disk is None or not offer.uses_disk:
        return None
    pairs = zip(offer.candidate.chunks, offer.candidate.placements, strict=True)
    written = sum(chunk.optimizer_bytes for chunk, placement in pairs if placement.route == "disk" and chunk.gradient_bytes)
    return Wear(written, profile.disk.endurance_bytes, profile.disk.endurance_source)


def split_seconds(profile: Profile, offer: Offer) -> dict[str, float]:
    """What a step that is not clipped is spent on."""
    candidate, simulated, waits = offer.candidate, offer.simulated, offer.simulated.waits_seconds
    whole = profile.batch_size / candidate.micro_batch / candidate.accumulation  # of its passes: the last may be smaller
    own = candidate.accumulation * candidate.profile_pass.seconds_recompute  # what the model recomputes without being told to
    exchanged = candidate.accumulation * candidate.slowness(rates_of(profile)) * candidate.profile_pass.exchange_seconds
    seconds = {
        "compute": whole * (simulated.compute_seconds - own - exchanged),
        "recompute": whole * (simulated.recompute_seconds + own),
        "exposed update": waits["update"] + waits["gradients"],
        "exposed disk": waits["disk"],
        "exposed offload": waits["fetch"] + waits["activations"],
        "exposed communication": waits["exchange"] + whole * exchanged,
        "exposed launch": waits["launch"],
    }
    seconds["update"] = simulated.step_seconds - (simulated.compute_seconds + simulated.recompute_seconds) - sum(waits.values())
    return seconds


def mean_seconds(profile: Profile, offer: Offer) -> float:
    """By which offers are compared; `forecast_of` has one simulation more, of a single clipped step."""
    return sum(split_seconds(profile, offer).values()) + offer.seconds - offer.simulated.step_seconds


def start_seconds(profile: Profile, host_bytes: int) -> float:
    """To place the state beside a GPU; on a CPU nobody has measured it."""
    if profile.host is None or not profile.host.overlaps:
        return 0.0
    fitted = profile.calibration
    placed = profile.parameters / fitted.placed_parameters_per_second.value
    return fitted.start_seconds.value + placed + host_bytes / fitted.readied_bytes_per_second.value


def passes_of(batch_size: int, micro_batch: int) -> int:
    return -(-batch_size // micro_batch)
