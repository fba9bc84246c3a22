"""Seconds that no simulation of a candidate is under, in a small part of the time that one takes.

A step takes at least what the computation does in it, waits apart:

    passes + gradients put in staging buffers + norm + updates of resident chunks, and starting the other updates

and what the host takes from one norm to the next: to start updates, and to launch all passes.

Where host and device share cores, all copies and updates come on top, but for what a disk reads and writes. Else there are lanes
that do one job at a time: the host's updates, copies to the device, copies from it, the disk. Steps are alike, so between the end
of one forward and the end of the next a lane has jobs for every chunk that is updated elsewhere. No job begins before its head is
over, and its tail still follows when it is done:

    head    backward until the chunk's gradients are complete, or until the norm is known; its own jobs before
    tail    its own jobs after; forward from its first use on

Of the jobs that may begin, the one with the longest tail runs, and gives way to one with a longer tail: no order ends earlier.

Offloaded activations have jobs between the beginning of a step and its end:

    head    to the host: all passes before, and forward until the block is over; back: also its copy to the host, and backward
            until the offloaded block after it
    tail    its copy back; backward from the block on, all passes after, norm and updates

Exchanges between ranks have a lane too: sums of gradients, all-gathers of fresh weights, and all-gathers for each use, but for
weights that slots may still hold.

Lanes do not slow each other here, weights are fetched once, and a staging buffer is always free: all else that a simulation has
makes it longer. So does every chunk more, and the first that is not resident slows the computation: the bound of some chunks is
one of all.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from typing import Literal, NamedTuple

from anyfit.values.precision import SUM_BYTES

from .candidate import ADDED, ONE_PHASE, Candidate, Rates
from .simulation.clock import DONE
from .simulation.computation import RANK_PASSES


class Job(NamedTuple):
    lane: Literal["host", "up", "down", "disk"]
    head: float
    seconds: float
    tail: float


def least_seconds(candidate: Candidate, rates: Rates, again: float = 0.0) -> float:
    """`again`: seconds of every pass that blocks are recomputed besides, whichever they are."""
    pairs = list(zip(candidate.chunks, candidate.placements, strict=True))
    shards, division, passes = candidate.shards, candidate.division, candidate.accumulation
    resident = sum(chunk.elements for chunk, placement in pairs if placement.route == "resident" and chunk.is_updated)
    given = sum(chunk.elements for chunk, _ in pairs if chunk.gradient_bytes)
    sent = sum(chunk.elements for chunk, placement in pairs if chunk.gradient_bytes and placement.gradients == "host")
    norm = rates.norm_seconds * given / shards + division.norm_seconds
    if passes > 1:
        norm += (rates.host_norm_seconds - rates.norm_seconds) * sent / shards
    reduced = 0 if division.is_alone else passes if division.gradients else 1  # times, of gradients that stay
    staged = reduced * (given - sent) + passes * sent
    slowness = candidate.slowness(rates)
    again *= slowness
    segments = [slowness * seconds for seconds in candidate.segment_seconds]
    one_pass = sum(segments) + again
    after = norm + candidate.ending_seconds(rates.update_seconds * resident / shards, rates)
    added = (passes > 1) * (passes * given - staged)
    least = passes * one_pass + rates.gather_seconds * staged + rates.add_seconds * added + after
    if rates.host.overlaps:
        least = max(least, _launched(candidate, rates, norm))
    exchanged = _exchanged(candidate)
    jobs = list(_jobs(candidate, rates, segments, one_pass, norm, again))
    moving = list(_moving(candidate, rates, segments, one_pass, after - again)) if candidate.offloaded else []
    on_disk = [job for job in jobs if job.lane == "disk"]
    if not rates.host.overlaps:
        by_cores = sum(job.seconds for job in (*jobs, *moving) if job.lane != "disk")
        return max(least + by_cores + exchanged, _over(on_disk))
    lanes = [on_disk, *([job for job in jobs if job.lane == lane] for lane in ("host", "up", "down"))]
    lanes += [[job for job in moving if job.lane == lane] for lane in ("up", "down")]
    return max(least, exchanged, *map(_over, lanes))


def _launched(candidate: Candidate, rates: Rates, norm: float) -> float:
    """From norm to norm: the host starts the updates and launches all passes; of a rank's, those that are played."""
    passes = candidate.accumulation if candidate.division.is_alone else min(candidate.accumulation, RANK_PASSES)
    return norm + candidate.ending_seconds(0.0, rates) + passes * candidate.launch_seconds


def _exchanged(candidate: Candidate) -> float:
    """Seconds of a step that the link between ranks is busy."""
    division, passes = candidate.division, candidate.accumulation
    if division.is_alone:
        return 0.0
    found, put_together = 0.0, [0.0] * len(candidate.chunks)
    for index, (chunk, placement) in enumerate(zip(candidate.chunks, candidate.placements, strict=True)):
        if chunk.gradient_bytes:
            times = passes if division.gradients or placement.gradients == "host" else 1
            found += times * division.reduction(is_cut=chunk.is_cut).seconds(SUM_BYTES * chunk.elements)
        if division.shards > 1 and (division.weights or placement.weights == "host"):
            put_together[index] = division.gather.seconds(chunk.weights_bytes)
        elif division.shards > 1 and chunk.gradient_bytes and chunk.is_updated:
            found += division.gather.seconds(chunk.weights_bytes)
    for phase in ("forward", "backward"):
        pairs = zip(candidate.profile_pass.segments, candidate.uses, strict=True)
        used = {index for segment, each in pairs if segment.phase == phase for index in each}
        longest = sorted((put_together[index] for index in used), reverse=True)
        found += passes * sum(longest[candidate.slots :])
    return found


def _moving(candidate: Candidate, rates: Rates, seconds: list[float], one_pass: float, after_passes: float) -> Iterator[Job]:
    """Of the blocks whose activations move. Moments are counted from the beginning of the step."""
    forward_over: dict[int, float] = {}
    backward_begins: dict[int, float] = {}
    now = 0.0
    for segment, took in zip(candidate.profile_pass.segments, seconds, strict=True):
        if segment.phase == "backward":
            backward_begins.setdefault(segment.block, now)
        now += took
        if segment.phase == "forward":
            forward_over[segment.block] = now
    after = {before: block for block, before in candidate.before.items()}
    for block in candidate.offloaded:
        size = candidate.offloaded_bytes(block)
        down, up = size / rates.host.down_bytes_per_second, size / rates.host.up_bytes_per_second
        for number in range(candidate.accumulation):
            earlier = number * one_pass
            tail = (candidate.accumulation - number) * one_pass - backward_begins[block] + after_passes
            landed = forward_over[block] + down
            yield Job("down", earlier + forward_over[block], down, up + tail)
            yield Job("up", earlier + max(landed, backward_begins[after.get(block, block)]), up, tail)


def _jobs(
    candidate: Candidate, rates: Rates, seconds: list[float], one_pass: float, norm_seconds: float, again: float
) -> Iterator[Job]:
    """Of the chunks that are updated elsewhere. Moments are counted from the end of the step's first forward."""
    host, passes, shards = rates.host, candidate.accumulation, candidate.shards
    disk = rates.disk
    fastest = max(disk.read_bytes_per_second, disk.write_bytes_per_second, disk.both_bytes_per_second) if disk else 1.0
    pairs = zip(candidate.profile_pass.segments, seconds, strict=True)
    forward = sum(took for segment, took in pairs if segment.phase == "forward")
    before, after = _around(candidate, seconds)
    backward_over = passes * one_pass - forward
    norm = backward_over + norm_seconds  # is known
    for index, (chunk, placement) in enumerate(zip(candidate.chunks, candidate.placements, strict=True)):
        if placement.route == "resident" or not chunk.is_updated or not chunk.gradient_bytes:
            continue
        if index not in before or index not in after:
            continue
        speculates, is_away = placement.speculates, placement.weights == "host"
        born, used = backward_over - again - after[index], forward - before[index]
        weights, optimizer, elements = (size / shards for size in (chunk.weights_bytes, chunk.optimizer_bytes, chunk.elements))
        up, down = weights / host.up_bytes_per_second, candidate.sent_bytes(chunk) / host.down_bytes_per_second
        if placement.update == "host":
            moved = optimizer / fastest if placement.route == "disk" else 0.0  # each way
            at_once = (1 - DONE) * elements / host.updates_per_second
            # where it waits for the norm, it may be parted: its second part takes nothing here
            is_whole = speculates or passes > 1 or moved > 0 or not host.overlaps
            update = at_once if is_whole else ONE_PHASE * at_once
            added = ADDED * at_once if passes > 1 else 0.0
            arrived = born + down + added
            begin = arrived if speculates else max(arrived + (norm_seconds if added else 0.0), norm + moved)
            rest = update + moved + up + used
            after_adding = (max(norm_seconds, update) if speculates else norm_seconds + update) + moved + up + used
            # Gradients are copied to the host, and added up, before the norm is taken: those of the last pass, and those of the
            # others as one job that may begin when the first of them come.
            for came, times in ((born, 1), (born - (passes - 1) * one_pass, passes - 1)) if passes > 1 else ((born, 1),):
                yield Job("down", came, times * down, added + rest)
                if added:
                    yield Job("host", came + down, times * added, after_adding)
            yield Job("host", begin, update, moved + up + used)
            yield Job("up", max(begin + update, norm) + moved, up, used)
            if moved and host.overlaps:
                yield Job("disk", norm, moved, rest)
                yield Job("disk", begin + update, moved, up + used)
            elif moved:  # what the cores do comes on top
                yield Job("disk", norm, moved, moved + used)
                yield Job("disk", norm + moved, moved, used)
            continue
        lifted = (optimizer + weights * is_away) / host.up_bytes_per_second
        lowered = (optimizer + weights * (is_away or speculates)) / host.down_bytes_per_second
        begin, fetched = (born if speculates else norm), up if speculates or is_away else 0.0
        yield Job("up", begin, lifted, lowered + fetched + used)
        yield Job("down", begin + lifted, lowered, fetched + used)
        yield Job("up", max(begin + lifted + lowered, norm), fetched, used)


def _around(candidate: Candidate, seconds: list[float]) -> tuple[dict[int, float], dict[int, float]]:
    """By chunk: seconds of forward before it is first used, and of backward after its gradients are complete."""
    before: dict[int, float] = {}
    after: dict[int, float] = {}
    segments = list(zip(candidate.profile_pass.segments, candidate.uses, seconds, strict=True))
    now = 0.0
    for segment, used, took in segments:
        if segment.phase == "forward":
            for index in used:
                before.setdefault(index, now)
            now += took
    now = 0.0
    for segment, used, took in reversed(segments):
        if segment.phase == "backward":
            until = now
            now += took
            for index in used:  # those of a rank come while the segment runs
                after.setdefault(index, until if candidate.division.is_alone else now)
    return before, after


def _over(jobs: list[Job]) -> float:
    """When the last tail is over."""
    waiting: list[tuple[float, float]] = []  # tails, the longest first, and seconds that are left
    now = over = 0.0
    for job in sorted(jobs, key=lambda job: job.head):
        while waiting and now < job.head:
            tail, left = heapq.heappop(waiting)
            worked = min(left, job.head - now)
            now += worked
            if worked < left:
                heapq.heappush(waiting, (tail, left - worked))
            else:
                over = max(over, now - tail)
        now = max(now, job.head)
        heapq.heappush(waiting, (-job.tail, job.seconds))
    while waiting:
        tail, left = heapq.heappop(waiting)
        now += left
        over = max(over, now - tail)
    return over
