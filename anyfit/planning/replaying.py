"""Blocks op by op, or from recordings: CUDA graphs that the host launches at once (placing/replayed.py).

A recording costs the device what its ops cost, and copies of inputs, results and, where they move, weights; it costs the host a
few launches. Its memory is held all along: what the largest block reads, writes and has while it runs, which all share, and all
that kept blocks keep. So both kinds of plan are searched whole.

What a host takes to launch a model's ops is the least certain of all figures: the model's own Python is in it, and hosts are
shared. A recorded step that waited for launches took nearly twice as long as forecast (benchmarks/results/families, 2026-11-18).
So plans are compared by what they take if launching takes what it is forecast to, and if it takes LAUNCH_DOUBT times that:

    minimise    seconds(plan) + seconds(plan, launches LAUNCH_DOUBT times as slow)
    over        the best plan op by op, and the best with recordings
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from anyfit.values.plan import Decision, Plan
from anyfit.values.precision import ELEMENT_BYTES, PRECISIONS
from anyfit.values.profile import BlockCost, ChoiceCost, Pass, Profile, Replay, Timing
from anyfit.values.timing import shared_bytes
from anyfit.values.units import show_seconds

from .fastest import Found, fastest
from .simulation import simulate

LAUNCH_DOUBT = 2.0
LEAST_GAIN = 0.03  # of a step, to be worth its memory and what can go wrong
RUNNING = 1.15  # of what a block has live at its fullest: what the allocator adds
WORTH_RECORDING = 0.5  # times what replaying it takes of the host: a block's launches op by op, which may take longer
OWN_BYTES = 84 * 2**20  # of the recordings' stream: workspaces of matrix products, and ends of segments


def best_launched(profile: Profile, finish: Callable[[Found], Plan], found: Found | None = None) -> Plan | None:
    """The best plan, with blocks op by op or replayed. `found`: the fastest op by op, where it is known."""
    found = fastest(profile) if found is None else found
    if found is None or not can_replay(profile):
        return None if found is None else finish(found)
    plain, doubted = _seconds(found), _doubted_seconds(found)
    recorded = fastest(with_recordings(profile)) if doubted > (1 + LEAST_GAIN) * plain else None
    if recorded is None:
        return finish(found)
    gain = (plain + doubted - _seconds(recorded) - _doubted_seconds(recorded)) / 2
    return _decided(finish(recorded), profile, gain) if gain > LEAST_GAIN * (plain + doubted) / 2 else finish(found)


def can_replay(profile: Profile) -> bool:
    if profile.host is None or not profile.host.overlaps or profile.divisions:
        return False
    return any(block.may_be_replayed for each in profile.passes for block in each.blocks)


def _seconds(found: Found) -> float:
    return found.chosen.step_seconds if found.offer is None else found.offer.seconds


def _doubted_seconds(found: Found) -> float:
    """Of a step whose launches take longer than they are forecast to."""
    if found.offer is None:
        whole = next(each for each in found.profile.passes if each.micro_batch == found.micro_batch)
        more = whole.replayed.slowed_alone_seconds(LAUNCH_DOUBT, 1.0) - whole.replayed.alone_seconds
        return found.chosen.step_seconds + found.profile.batch_size / whole.micro_batch * more
    space, offer = found.in_space
    candidate, rates = offer.candidate, space.evaluation.rates
    whole, launching = candidate.profile_pass, rates.host.launching

    def slowed(timing: Timing | None) -> Timing | None:
        return timing and timing.slowed(LAUNCH_DOUBT, 1.0)

    def block_of(block: BlockCost) -> BlockCost:
        choices = {name: replace(each, timing=slowed(each.timing)) for name, each in block.choices.items()}
        replays = {name: replace(each, launch_seconds=LAUNCH_DOUBT * each.launch_seconds) for name, each in block.replays.items()}
        return replace(block, choices=choices, replays=replays)

    segments = tuple(replace(each, timing=slowed(each.timing)) for each in whole.segments)
    doubted = replace(whole, segments=segments, blocks=tuple(map(block_of, whole.blocks)))
    costs = {name: LAUNCH_DOUBT * getattr(launching, name) for name in vars(launching) if name.endswith("_seconds")}
    slower = replace(rates, host=replace(rates.host, launching=replace(launching, **costs)))
    return simulate(replace(candidate, profile_pass=doubted), slower).step_seconds


def with_recordings(profile: Profile) -> Profile:
    """The same where every block that can be is replayed."""
    assert profile.host is not None
    weight_bytes = ELEMENT_BYTES[PRECISIONS[profile.precision].weight]
    seconds, rate = profile.host.launching.replay_seconds, profile.memory_bytes_per_second

    def block_of(block: BlockCost, launched: float, work: int) -> BlockCost:
        again = block.choices.get("recompute")
        if again is None or not block.may_be_replayed or launched < WORTH_RECORDING * 2 * seconds:
            return block
        weights, inputs, keeps = weight_bytes * block.parameters, again.kept_bytes, block.choices["keep"].kept_bytes
        # Of one recording: in and out of fixed memory, half of them with gradients.
        moved, moved_kept = 3 * weights + 4 * inputs, 2 * weights + 5 * inputs
        fixed, outside = 2 * weights + 4 * inputs, weights + 4 * inputs
        running, running_kept = (int(RUNNING * max(each, 0)) + OWN_BYTES for each in (work, work - keeps))
        replays = {
            "recompute": Replay(seconds, moved / rate, fixed, running, 0, outside),
            "keep": Replay(seconds, moved_kept / rate, fixed, running_kept, 2 * inputs, outside),
        }
        alone = Timing.on_device(again.device_seconds)
        choices = {**block.choices, "recompute": ChoiceCost(inputs, 0, again.device_seconds, alone)}
        return replace(block, replays=replays, choices=choices)

    def pass_of(each: Pass) -> Pass:
        launched, work = [0.0] * len(each.blocks), [0] * len(each.blocks)
        for segment in each.segments:
            launched[segment.block] += segment.played.launch_seconds
            work[segment.block] = max(work[segment.block], segment.work_bytes)
        launched[each.segments[0].block] = 0.0  # it also waits for the batch, which is no part of a recording
        blocks = tuple(map(block_of, each.blocks, launched, work))
        # They count however few blocks are replayed: a plan that replays one more never takes more of them.
        recorded = shared_bytes(block.replays["recompute"] for block in blocks if block.replays)
        return replace(each, blocks=blocks, recorded_bytes=recorded)

    return replace(profile, passes=tuple(map(pass_of, profile.passes)))


def _decided(plan: Plan, profile: Profile, gain: float) -> Plan:
    """The plan with its recomputed blocks replayed, and why."""
    recorded = with_recordings(profile)
    whole = next(each for each in recorded.passes if each.micro_batch == plan.micro_batch)
    may = [(block.name, block.replays) for block in whole.blocks]
    stages = tuple(
        replace(each, replayed=tuple(path for path, replays in may if each.activations.get(path, "keep") in replays))
        for each in plan.stages
    )
    count = sum(len(each.replayed) for each in stages)
    blocks = "1 block" if count == 1 else f"{count} blocks"
    why = f"launched op by op a step may take {show_seconds(gain)} more, as hosts vary"
    decision = Decision("replay", f"{blocks} launched at once, as CUDA graphs", why)
    return replace(plan, stages=stages, decisions=(*plan.decisions, decision))
