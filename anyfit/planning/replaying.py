"""Recomputed blocks op by op, or from recordings: CUDA graphs that the host launches at once (placing/replayed.py).

A recording costs the device what its ops cost, and copies of weights, inputs and results; it costs the host a few launches. Its
memory is its own and is held all along: fixed inputs and results of each distinct block, and what the largest block has while it
runs. So both kinds of plan are searched whole.

What a host takes to launch a model's ops is the least certain of all figures: the model's own Python is in it, and hosts are
shared. Steps that waited for launches were seen to take twice as long as forecast. So plans are compared where launching takes
LAUNCH_DOUBT times what it is forecast to:

    minimise    seconds(plan, launches LAUNCH_DOUBT times as slow)
    over        the best plan op by op; the best with recordings, if by the forecast it takes at most MOST_SLOWER times the other
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from anyfit.values.plan import Decision, Plan
from anyfit.values.precision import ELEMENT_BYTES, PRECISIONS
from anyfit.values.profile import BlockCost, ChoiceCost, Profile, Replay, Timing
from anyfit.values.units import show_seconds

from .fastest import Found, fastest
from .simulation import simulate

LAUNCH_DOUBT = 2.0
LEAST_GAIN = 0.03  # of a step, to be worth its memory and what can go wrong
MOST_SLOWER = 1.25
RUNNING = 1.25  # of what a block keeps for backward: the same, and what its ops have besides
WORKSPACE_BYTES = 2**26  # of matrix products, whose memory is the recordings' own too


def best_launched(profile: Profile, finish: Callable[[Found], Plan]) -> Plan | None:
    """The best plan, with recomputed blocks op by op or replayed."""
    found = fastest(profile)
    if found is None or found.offer is None or not _can_replay(profile):
        return None if found is None else finish(found)
    plain, doubted = found.offer.seconds, _doubted_seconds(found)
    recorded = fastest(with_recordings(profile)) if doubted > (1 + LEAST_GAIN) * plain else None
    if recorded is None or recorded.offer is None or recorded.offer.seconds > MOST_SLOWER * plain:
        return finish(found)
    gain = doubted - _doubted_seconds(recorded)
    return _decided(finish(recorded), profile, gain) if gain > LEAST_GAIN * doubted else finish(found)


def _can_replay(profile: Profile) -> bool:
    if profile.host is None or not profile.host.overlaps or profile.divisions:
        return False
    return any(block.may_be_replayed for each in profile.passes for block in each.blocks)


def _doubted_seconds(found: Found) -> float:
    """Of a step whose launches take longer than they are forecast to."""
    space, offer = found.in_space
    candidate, rates = offer.candidate, space.evaluation.rates
    whole, launching = candidate.profile_pass, rates.host.launching

    def slowed(timing: Timing | None) -> Timing | None:
        return timing and timing.slowed(LAUNCH_DOUBT, 1.0)

    def block_of(block: BlockCost) -> BlockCost:
        choices = {name: replace(each, timing=slowed(each.timing)) for name, each in block.choices.items()}
        replay = block.replay and replace(block.replay, launch_seconds=LAUNCH_DOUBT * block.replay.launch_seconds)
        return replace(block, choices=choices, replay=replay)

    segments = tuple(replace(each, timing=slowed(each.timing)) for each in whole.segments)
    doubted = replace(whole, segments=segments, blocks=tuple(map(block_of, whole.blocks)))
    costs = {name: LAUNCH_DOUBT * getattr(launching, name) for name in vars(launching) if name.endswith("_seconds")}
    slower = replace(rates, host=replace(rates.host, launching=replace(launching, **costs)))
    return simulate(replace(candidate, profile_pass=doubted), slower).step_seconds


def with_recordings(profile: Profile) -> Profile:
    """The same where every block that is recomputed is replayed."""
    assert profile.host is not None
    weight_bytes = ELEMENT_BYTES[PRECISIONS[profile.precision].weight]
    seconds, rate = profile.host.launching.replay_seconds, profile.memory_bytes_per_second

    def block_of(block: BlockCost) -> BlockCost:
        again = block.choices.get("recompute")
        if again is None or not block.may_be_replayed:
            return block
        weights, inputs = weight_bytes * block.parameters, again.kept_bytes
        moved = 3 * weights + 4 * inputs  # a recording: in and out of fixed memory, half of them with gradients
        running = int(RUNNING * block.choices["keep"].kept_bytes) + WORKSPACE_BYTES
        replay = Replay(seconds, moved / rate, 2 * weights + 4 * inputs, running)
        alone = Timing.on_device(again.device_seconds)
        choices = {**block.choices, "recompute": ChoiceCost(inputs, 0, again.device_seconds, alone)}
        return replace(block, replay=replay, choices=choices)

    # What is first in a pass also waits for the batch, which is no part of a recording.
    passes = (
        replace(
            each,
            blocks=tuple(
                block if index == each.segments[0].block else block_of(block) for index, block in enumerate(each.blocks)
            ),
        )
        for each in profile.passes
    )
    return replace(profile, passes=tuple(replace(each, recorded_bytes=_recorded_bytes(each.blocks)) for each in passes))


def _recorded_bytes(blocks: Sequence[BlockCost]) -> int:
    """Fixed bytes of each distinct block, and what the largest recording holds while it runs. They count however few blocks are
    recomputed: a plan that recomputes one more never takes more memory."""
    distinct = {(block.kind, block.parameters, block.flops_forward): block.replay for block in blocks}
    found = [each for each in distinct.values() if each is not None]
    return sum(each.fixed_bytes for each in found) + max((each.running_bytes for each in found), default=0)


def _decided(plan: Plan, profile: Profile, gain: float) -> Plan:
    """The plan with its recomputed blocks replayed, and why."""
    may = {block.name for each in with_recordings(profile).passes for block in each.blocks if block.replay is not None}
    stages = tuple(
        replace(each, replayed=tuple(path for path, choice in each.activations.items() if choice == "recompute" and path in may))
        for each in plan.stages
    )
    count = sum(len(each.replayed) for each in stages)
    blocks = "1 recomputed block" if count == 1 else f"{count} recomputed blocks"
    why = f"launched op by op a step may take {show_seconds(gain)} more, where the host is slow"
    decision = Decision("replay", f"{blocks} launched at once, as CUDA graphs", why)
    return replace(plan, stages=stages, decisions=(*plan.decisions, decision))
