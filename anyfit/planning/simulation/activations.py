"""Activations that are offloaded: a block's go down when its forward is over, and come back up when backward comes to the
offloaded block after it."""

from __future__ import annotations

from collections import Counter
from functools import partial

from .clock import Signal, Work
from .step import Step


class OffloadedActivations:
    def __init__(self, step: Step) -> None:
        candidate = self._candidate = step.candidate
        self._resources, self._ledger = step.resources, step.ledger
        self._forwards = Counter(each.block for each in candidate.profile_pass.segments if each.phase == "forward")
        self._bytes = {block: candidate.offloaded_bytes(block) for block in candidate.offloaded}
        self.begin_pass()

    def begin_pass(self) -> None:
        self._forwards_left = {block: self._forwards[block] for block in self._bytes}
        self._landed = {block: Signal() for block in self._bytes}  # on the host
        self._returned = {block: Signal() for block in self._bytes}
        self._returning: set[int] = set()

    def forward_over(self, block: int) -> None:
        """Of one of its segments."""
        if block not in self._bytes:
            return
        self._forwards_left[block] -= 1
        if self._forwards_left[block] == 0:
            self._resources.use("down", "activations", self._bytes[block], self._landed[block].fire)

    def back(self, block: int) -> Work:
        """Those of a block are there again; and those of the one before it begin to come."""
        self._bring_back(block)
        before = self._candidate.before.get(block)
        if before is not None:
            self._bring_back(before)
        yield from self._ledger.wait("activations", self._returned[block])

    def _bring_back(self, block: int) -> None:
        if block not in self._returning:
            self._returning.add(block)
            back = self._returned[block].fire
            self._landed[block].then(partial(self._resources.use, "up", "activations", self._bytes[block], back))
