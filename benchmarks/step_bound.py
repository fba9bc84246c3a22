"""Seconds that no plan for a job under a cap is under, as a linear program; nothing in it comes from a plan.

A step is k passes of m samples. Of P trained parameters r are updated where they lie on the device, s are streamed through it for
the update, h are updated on the host; the weights of w of them, and f bytes of frozen ones, are away from the device. A block
keeps a share of what forward made, recomputes it, wholly or but for its costly ops, or moves it to the host and back. All shares
are continuous, everything overlaps with everything else, the norm is known when it is needed, nothing is fragmented, and nothing
is lost between two ops:

    minimise    T
    over        r, s, h, w, f >= 0;  keep, selective, recompute, offload >= 0 of each block, which add up to 1;  m
    subject to  r + s + h = P,  w <= s + h,  f <= F
                T >= k (device seconds of a pass + of what is recomputed) + r / (updates/s of the device)
                T >= h / (updates/s of the host)
                T >= (2 h + 10 s + 2 k w + 2 k f + k moved) / (bytes/s up)
                T >= (2 k h + 10 s + k moved) / (bytes/s down)
                T >= k (seconds of launching what lies outside blocks, + the less of a block's own and of two recordings')
                cap >= state + what ops of a stretch have live + what blocks before it keep, for every stretch of a pass
                cap >= state + 2 (r + s), the gradients that wait for the norm
                state = 12 r + 2 (s + h - w) + 4 (r + s) if k > 1 + buffers + F - f

A tied embedding is what forward needs first and backward leaves last. Its update does not overlap with anything, which this does
not know: where it is large and not resident, every plan takes longer.

Bytes are those of bf16 weights with exact masters and AdamW: weights 2, gradients 2, low halves and moments 10. Rates are the
best that the machine's file has, each measured alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog

from anyfit.values.profile import ChoiceCost, Pass, Profile

Vector = npt.NDArray[Any]
CHOICES = ("keep", "selective", "recompute", "offload")
STATE_BYTES, WEIGHT_BYTES, GRADIENT_BYTES, STREAMED_BYTES, SUM_BYTES = 12, 2, 2, 10, 4
RECORDINGS = 2  # forward and backward
STEP, RESIDENT, STREAMED, ON_HOST, AWAY, FROZEN_AWAY = range(6)  # columns, before those of blocks
Sum = Mapping[int, float]  # by column, its factor


@dataclass(frozen=True)
class Bound:
    seconds: float
    micro_batch: int
    parts: dict[str, float]  # seconds of each resource


def bound_of(profile: Profile, cap_bytes: float) -> Bound | None:
    """`cap_bytes` of the device, the runtime's own apart. None where nothing fits."""
    found = [_Program(profile, each, cap_bytes).solved() for each in profile.passes]
    return min((each for each in found if each is not None), key=lambda each: each.seconds, default=None)


class _Program:
    """Of passes of one size."""

    def __init__(self, profile: Profile, each: Pass, cap_bytes: float) -> None:
        assert profile.host is not None
        self._profile, self._pass, self._rates = profile, each, profile.host
        self._count = -(-profile.batch_size // each.micro_batch)
        self._trained = sum(chunk.elements for chunk in profile.chunks if chunk.is_updated)
        self._frozen = sum(chunk.weights_bytes for chunk in profile.chunks if not chunk.is_updated)
        pairs = [(index, name) for index, block in enumerate(each.blocks) for name in CHOICES if name in block.choices]
        self._columns = {pair: FROZEN_AWAY + 1 + place for place, pair in enumerate(pairs)}
        self._rows: list[Sum] = []
        self._limits: list[float] = []
        self._resources = self._seconds()
        for fixed, of in self._resources.values():
            self._at_most(-fixed, {**of, STEP: -1.0})
        self._fit(cap_bytes)
        self._at_most(0.0, {AWAY: 1.0, STREAMED: -1.0, ON_HOST: -1.0})
        self._at_most(self._frozen, {FROZEN_AWAY: 1.0})

    def _at_most(self, limit: float, of: Sum) -> None:
        self._rows.append(of)
        self._limits.append(limit)

    def _each(self, of: Callable[[ChoiceCost], float]) -> Sum:
        blocks = self._pass.blocks
        return {column: of(blocks[index].choices[name]) for (index, name), column in self._columns.items()}

    def _seconds(self) -> dict[str, tuple[float, Sum]]:
        """Of each resource, what it takes in any case, and what depends on the choice."""
        count, host = self._count, self._rates
        up, down = host.up_bytes_per_second, host.down_bytes_per_second
        device = count * sum(segment.device_seconds for segment in self._pass.segments)
        update = self._profile.update.seconds / max(self._trained, 1)
        moved = self._each(lambda each: count * each.moved_bytes)
        rising, sinking = ({column: size / rate for column, size in moved.items()} for rate in (up, down))
        weights = 2 * count / up
        return {
            "computing": (device, {**self._each(lambda each: count * each.device_seconds), RESIDENT: update}),
            "host updates": (0.0, {ON_HOST: 1 / host.updates_per_second}),
            "copies up": (0.0, {**rising, ON_HOST: 2 / up, STREAMED: STREAMED_BYTES / up, AWAY: weights, FROZEN_AWAY: weights}),
            "copies down": (0.0, {**sinking, ON_HOST: 2 * count / down, STREAMED: STREAMED_BYTES / down}),
            "launching": (count * _least_launch(self._pass, host.launching.replay_seconds), {}),
        }

    def _fit(self, cap_bytes: float) -> None:
        sums, kept = SUM_BYTES * (self._count > 1), self._each(lambda each: each.kept_bytes)
        state: Sum = {RESIDENT: STATE_BYTES + sums, STREAMED: WEIGHT_BYTES + sums, ON_HOST: WEIGHT_BYTES}
        state = {**state, AWAY: -WEIGHT_BYTES, FROZEN_AWAY: -1.0}
        room = cap_bytes - self._profile.state.buffers - self._frozen
        forward = (segment.block for segment in self._pass.segments if segment.phase == "forward")
        order = {block: place for place, block in enumerate(dict.fromkeys(forward))}
        for segment in self._pass.segments:
            here = order.get(segment.block, 0)
            before = {column: kept[column] for (index, _), column in self._columns.items() if order.get(index, here) < here}
            self._at_most(room - segment.work_bytes, {**state, **before})
        if not sums:  # which are there instead
            self._at_most(room, {**state, RESIDENT: STATE_BYTES + GRADIENT_BYTES, STREAMED: WEIGHT_BYTES + GRADIENT_BYTES})

    def solved(self) -> Bound | None:
        scale = np.ones(FROZEN_AWAY + 1 + len(self._columns))
        scale[RESIDENT:FROZEN_AWAY], scale[FROZEN_AWAY] = max(self._trained, 1), max(self._frozen, 1)  # numbers of one size
        wholes: list[tuple[float, Sum]] = [(self._trained, {RESIDENT: 1.0, STREAMED: 1.0, ON_HOST: 1.0})]
        for index in {index for index, _ in self._columns}:
            wholes.append((1.0, {column: 1.0 for (block, _), column in self._columns.items() if block == index}))
        goal = _rows([{STEP: 1.0}], scale)[0]
        equal = _rows([of for _, of in wholes], scale), [size for size, _ in wholes]
        found = linprog(goal, _rows(self._rows, scale), self._limits, *equal, bounds=(0, None), method="highs")
        if not found.success:
            return None
        parts = {name: fixed + float(_rows([of], scale)[0] @ found.x) for name, (fixed, of) in self._resources.items()}
        return Bound(float(found.fun), self._pass.micro_batch, parts)


def _rows(sums: Sequence[Sum], scale: Vector) -> Vector:
    found = np.zeros((len(sums), len(scale)))
    for place, of in enumerate(sums):
        for column, factor in of.items():
            found[place, column] = factor * scale[column]
    return found


def _least_launch(each: Pass, replay_seconds: float) -> float:
    """That the host takes to launch it, with blocks op by op or at once, whichever is less."""
    found: dict[int, float] = {}
    for segment in each.segments:
        found[segment.block] = found.get(segment.block, 0.0) + segment.played.launch_seconds
    replayed = RECORDINGS * replay_seconds
    return sum(min(own, replayed) if each.blocks[index].may_be_replayed else own for index, own in found.items())
