"""Profiles made up for tests: small round figures, or random ones."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from anyfit.planning.candidate import Candidate
from anyfit.values.calibration import Calibration
from anyfit.values.plan import Placement
from anyfit.values.profile import BlockCost, ChoiceCost, ChunkCost, DiskRates, Pass, Profile, Segment, StateBytes, UpdateCost

MIB, GIB = 2**20, 2**30


def block(name: str = "layers.0", **changes: Any) -> BlockCost:
    cost: dict[str, Any] = {
        "name": name,
        "kind": "Layer",
        "parameters": 1_000_000,
        "flops_forward": 2 * 10**9,
        "flops_backward": 4 * 10**9,
        "seconds_forward": 0.010,
        "seconds_backward": 0.020,
        "seconds_recompute": 0.0,
        "kept_bytes": 10 * MIB,
        "choices": {
            "keep": ChoiceCost(10 * MIB, 0, 0.0),
            "recompute": ChoiceCost(1 * MIB, 0, 0.010),
            "selective": ChoiceCost(4 * MIB, 0, 0.001),
            "offload": ChoiceCost(0, 10 * MIB, 0.004),
        },
    }
    return BlockCost(**cost | changes)


def one_pass(micro_batch: int, **changes: Any) -> Pass:
    cost: dict[str, Any] = {
        "micro_batch": micro_batch,
        "tokens": 100 * micro_batch,
        "blocks": (block(),),
        "segments": (Segment(0, "forward", 0.010, 20 * MIB), Segment(0, "backward", 0.020, 30 * MIB)),
        "peak_bytes": 100 * MIB * micro_batch,
        "peak_bytes_accumulating": 90 * MIB * micro_batch,
        "peak_at": "layers.0",
        "reserved_bytes": 0,
    }
    return Pass(**cost | changes)


def small_profile(**changes: Any) -> Profile:
    """1 GiB of state and 100 MiB a sample; halving the micro-batch halves a pass, and costs 1 ms more each."""
    profile: dict[str, Any] = {
        "model": "Net",
        "machine": "small",
        "precision": "fp32",
        "optimizer": "AdamW",
        "batch_size": 8,
        "parameters": 2_000_000,
        "trainable": 1_900_000,
        "state": StateBytes(200 * MIB, 100 * MIB, 600 * MIB, 24 * MIB, 100 * MIB, gradients=200 * MIB, accumulators=200 * MIB),
        "passes": tuple(
            one_pass(size, blocks=(block(seconds_forward=0.001 * size, seconds_backward=0.001 + 0.002 * size),))
            for size in (8, 4, 2, 1)
        ),
        "update": UpdateCost(seconds=0.002, scratch_bytes=10 * MIB),
        "blocks": 1,
        "chunk_bytes": 64 * MIB,
        "device_limit_bytes": 8 * GIB,
        "host_limit_bytes": 16 * GIB,
        "disk_limit_bytes": 0,
        "context_bytes": 0,
        "workspace_bytes": 0,
        "peak_flops_per_second": 1e12,
        "time_error": 0.25,
        "memory_error": 0.02,
        "reserved_error": 0.03,
        "model_fingerprint": "model-1",
        "machine_fingerprint": "machine-1",
        "calibration": Calibration.of("cuda"),
        "memory_bytes_per_second": 1e12,
    }
    return Profile(**profile | changes)


seconds = st.floats(1e-6, 1e3)
sizes = st.integers(0, 32 * GIB)


@st.composite
def profiles(draw: st.DrawFn) -> Profile:
    batch_size = draw(st.integers(1, 64))
    micro_batches = draw(st.lists(st.integers(1, batch_size), min_size=1, max_size=5, unique=True))
    passes = []
    for micro_batch in sorted(micro_batches, reverse=True):
        backward = draw(seconds)
        blocks = (
            block(seconds_forward=draw(seconds), seconds_backward=backward, seconds_recompute=backward * draw(st.floats(0, 1))),
        )
        names = ("peak_bytes", "peak_bytes_accumulating", "reserved_bytes")
        passes.append(one_pass(micro_batch, blocks=blocks, **{name: draw(sizes) for name in names}))
    return small_profile(
        batch_size=batch_size,
        passes=tuple(passes),
        state=draw(st.builds(StateBytes, *[sizes] * 7)),
        update=draw(st.builds(UpdateCost, seconds, sizes)),
        device_limit_bytes=draw(st.integers(GIB, 512 * GIB)),
        context_bytes=draw(st.integers(0, GIB)),
        workspace_bytes=draw(st.integers(0, GIB)),
        reserved_error=draw(st.floats(0, 0.2)),
        memory_bytes_per_second=draw(st.floats(1e9, 1e13)),
    )


PLACEMENTS = [
    Placement(),
    Placement(optimizer="host"),
    Placement(gradients="host", optimizer="host", update="host"),
    Placement(weights="host", gradients="host", optimizer="host", update="host"),
    Placement(weights="host", optimizer="host"),
    Placement(gradients="host", optimizer="disk", update="host"),
    Placement(weights="host", gradients="host", optimizer="disk", update="host"),
]
DISK = DiskRates(1e9, 0.8e9, 1e9, 0.1, 2**50, 10**15, "made up")


@st.composite
def candidates(draw: st.DrawFn, most_blocks: int = 5, most_chunks: int = 2, parameters: int = 100_000) -> Candidate:
    """A chain of blocks between an embedding and a head, each in a chunk or two, placed in any way."""
    count = draw(st.integers(1, most_blocks))
    milliseconds, size = st.floats(0.0001, 0.05), st.integers(1, 50)
    blocks = []
    for index in range(count):
        kept, again = draw(size) * MIB, draw(milliseconds)
        choices = {
            "keep": ChoiceCost(kept, 0, 0.0),
            "recompute": ChoiceCost(kept // 10, 0, again),
            "selective": ChoiceCost(kept // 2, 0, again / 3),
            "offload": ChoiceCost(0, kept, 2 * kept / 1e9),
        }
        blocks.append(block(f"layers.{index}", kept_bytes=kept, choices=choices))
    blocks.append(block("", kept_bytes=MIB, choices={}))
    forward = [count, *range(count), count]

    def segment(phase: Any, index: int) -> Segment:
        return Segment(index, phase, draw(milliseconds), blocks[index].kept_bytes + draw(size) * MIB)

    segments = tuple(segment("forward", index) for index in forward) + tuple(
        segment("backward", index) for index in reversed(forward)
    )
    seconds = {
        phase: [
            sum(each.seconds for each in segments if (each.block, each.phase) == (index, phase)) for index in range(count + 1)
        ]
        for phase in ("forward", "backward")
    }
    blocks = [
        replace(each, seconds_forward=seconds["forward"][index], seconds_backward=seconds["backward"][index])
        for index, each in enumerate(blocks)
    ]
    chunks, placements = [], []
    for index in [count, *range(count)]:
        for _ in range(draw(st.integers(1, most_chunks))):
            elements = draw(st.integers(1, 20)) * parameters
            trainable = draw(st.booleans()) or draw(st.booleans())
            gradient, optimizer = (2 * elements, 10 * elements) if trainable else (0, 0)
            chunks.append(ChunkCost(2 * elements, elements, trainable, gradient, optimizer, trainable, (index,), is_split=True))
            placement = draw(st.sampled_from(PLACEMENTS))
            if placement.optimizer == "host" and draw(st.booleans()):
                placement = replace(placement, speculates=True)
            placements.append(placement)
    activations = tuple(draw(st.sampled_from(sorted(each.choices))) if each.choices else "keep" for each in blocks)
    accumulation = draw(st.integers(1, 3))
    each = one_pass(4, blocks=tuple(blocks), segments=segments)
    slots = draw(st.integers(2, 6))
    return Candidate(each, accumulation, activations, tuple(chunks), tuple(placements), slots, draw(st.integers(0, slots)))  # type: ignore[arg-type]
