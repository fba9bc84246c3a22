"""Model state that does not fit on the device: how much of it stays there, and what the rest costs.

Two sweeps over the chunks, in order of use, each giving what it can to the device:

    optimizers      all weights on the device, optimizers of the first k chunks too; the host updates the others
    weights         the first k chunks' weights on the device, the others pass through slots; the host updates all

    device(k) = kept weights + resident optimizers + slots + gradient stages + what the pass itself holds
    step(k)   = compute + resident update + what the host's update and the fetches take beyond the compute that hides them

The largest k that fits wins in each sweep, and the first sweep over the second. The host's update of a chunk hides in the next
forward, fetches in all of the pass; on a CPU device, where host and device are the same cores, nothing hides.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from anyfit.values.plan import Placement
from anyfit.values.profile import ChunkCost, Pass, Profile

RESIDENT = Placement()
FROZEN_AWAY = Placement(weights="host", optimizer="host")
ON_HOST = Placement(gradients="host", optimizer="host", update="host")
AWAY = Placement(weights="host", gradients="host", optimizer="host", update="host")
SLOTS, PREFETCH = 4, 2
STAGES = 5  # buffers in which gradients gather before they go down
SCRATCH_BYTES = 8  # an element of the largest resident chunk with masters: those and the gradient, in fp32


@dataclass(frozen=True)
class Offload:
    """One way to place the chunks."""

    chunks: tuple[Placement, ...]
    slots: int
    prefetch: int
    device_bytes: int  # at the peak of a step
    host_bytes: int
    update_seconds: float  # of resident chunks
    exposed_update_seconds: float
    exposed_fetch_seconds: float


def offloads(profile: Profile, each: Pass, accumulation: int) -> Iterator[Offload]:
    """Placements from the most on the device to the least."""
    chunks = profile.chunks
    for kept in range(len(chunks) - 1, -1, -1):
        yield _weighed(profile, each, accumulation, [*[RESIDENT] * kept, *map(_on_host, chunks[kept:])])
    for kept in range(len(chunks) - 1, -1, -1):
        yield _weighed(profile, each, accumulation, [*map(_on_host, chunks[:kept]), *map(_away, chunks[kept:])])


def _on_host(chunk: ChunkCost) -> Placement:
    return ON_HOST if chunk.trainable else RESIDENT


def _away(chunk: ChunkCost) -> Placement:
    return AWAY if chunk.trainable else FROZEN_AWAY


def _weighed(profile: Profile, each: Pass, accumulation: int, placements: Sequence[Placement]) -> Offload:
    host = profile.host
    assert host is not None
    pairs = list(zip(profile.chunks, placements, strict=True))
    resident = [chunk for chunk, placement in pairs if placement.optimizer == "device"]
    sent = [chunk for chunk, placement in pairs if placement.gradients == "host"]
    fetched = [chunk for chunk, placement in pairs if placement.weights == "host"]
    slots = min(SLOTS, len(fetched))
    several = accumulation > 1

    gradients = sum(chunk.gradient_bytes for chunk in resident)
    sums = sum(4 * chunk.elements if several else 0 for chunk in resident if chunk.trainable)
    if several:
        during = max(each.peak_bytes_accumulating, profile.update.scratch_bytes if resident else 0)
    else:
        during = max(
            min(each.peak_bytes, each.peak_bytes_accumulating + gradients),
            gradients + (profile.update.scratch_bytes if resident else 0),
        )
    split = [chunk for chunk in resident if chunk.optimizer_bytes and chunk.weights_bytes == 2 * chunk.elements]
    device = (
        profile.state.buffers
        + profile.workspace_bytes
        + sum(chunk.weights_bytes for chunk, placement in pairs if placement.weights == "device")
        + sum(chunk.optimizer_bytes for chunk in resident)
        + SCRATCH_BYTES * max((chunk.elements for chunk in split), default=0)
        + slots * max((chunk.weights_bytes for chunk in fetched), default=0)
        + min(STAGES, len(sent)) * max((chunk.weights_bytes for chunk in sent), default=0)
        + sums
        + during
    )
    held = sum(chunk.weights_bytes + chunk.optimizer_bytes for chunk in sent)
    held += sum(chunk.weights_bytes for chunk in fetched if not chunk.trainable)
    held += sum(4 * chunk.elements if several else chunk.weights_bytes for chunk in sent)
    held += min(STAGES, len(sent)) * max((chunk.weights_bytes for chunk in sent), default=0) if several else 0

    trained = sum(chunk.elements for chunk in profile.chunks if chunk.optimizer_bytes) or 1
    on_host = sum(chunk.elements for chunk in sent if chunk.optimizer_bytes)
    update = on_host / host.updates_per_second
    fetch = accumulation * 2 * sum(chunk.weights_bytes for chunk in fetched) / host.up_bytes_per_second
    fetch += sum(chunk.gradient_bytes for chunk in sent) * accumulation / host.down_bytes_per_second
    passes = profile.batch_size / each.micro_batch
    if host.overlaps:
        forward = sum(block.seconds_forward for block in each.blocks)
        update = max(0.0, update - forward)
        fetch = max(0.0, fetch - passes * each.seconds)
    return Offload(
        chunks=tuple(placements),
        slots=slots,
        prefetch=min(PREFETCH, max(slots - 1, 0)),
        device_bytes=device,
        host_bytes=held,
        update_seconds=profile.update.seconds * (1 - on_host / trained),
        exposed_update_seconds=update,
        exposed_fetch_seconds=fetch,
    )
