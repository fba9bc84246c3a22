"""All candidates of a profile in chunks of one size, and beside it in chunks of the others; and the best of them."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

from anyfit.values.profile import Profile

from .candidate import Candidate
from .evaluation import Evaluation, Offer
from .knobs import Candidates, Knobs
from .local_search import STARTS, WORTH, LocalSearch
from .polish import Polish, Tree

WORTH_LEAVING = 0.05  # of a step of several ranks: for less, nothing goes to the host


class Space:
    def __init__(self, profile: Profile) -> None:
        self.profile = profile
        self.candidates = Candidates(profile)
        self.is_gpu, self.division = self.candidates.is_gpu, self.candidates.division
        self.is_alone = self.division.is_alone
        self._at(Evaluation(profile, self.candidates))
        self._tree = Tree(self.evaluation)
        self.others = tuple(Space(profile.laid_out(layout)) for layout in profile.other_layouts)  # in chunks of other sizes

    def _at(self, evaluation: Evaluation) -> None:
        self.evaluation = evaluation
        self.local = LocalSearch(evaluation)
        self._without_disk: Space | None = None

    def with_limits_of(self, profile: Profile) -> Space:
        """The same for a profile that differs in its limits alone: what was weighed and simulated holds there too."""
        other = copy.copy(self)
        other.profile = profile
        other._at(self.evaluation.at_limits(profile))
        other._tree = self._tree.at_limits(other.evaluation)
        other.others = tuple(
            each.with_limits_of(profile.laid_out(layout)) for each, layout in zip(self.others, profile.other_layouts, strict=True)
        )
        return other

    def laid_out_like(self, candidate: Candidate) -> Space:
        """The space in whose chunks it is."""
        return next(each for each in self.sizes if each.profile.chunks == candidate.chunks)

    @property
    def sizes(self) -> tuple[Space, ...]:
        """Of chunks, the usual one first."""
        return self, *self.others

    @property
    def micro_batches(self) -> list[int]:
        return [each.micro_batch for each in self.profile.passes]

    @property
    def without_disk(self) -> Space:
        """The same with nothing on the disk."""
        if not self.evaluation.may_use_disk:
            return self
        if self._without_disk is None:
            self._without_disk = self.with_limits_of(replace(self.profile, disk_limit_bytes=0))
        return self._without_disk

    def best(self, micro_batch: int, under: float = math.inf, starts: int = STARTS, **forced: float) -> Offer | None:
        """The fastest that fits, with these knobs as they are; None where nothing fits, or nothing takes less than `under`. What
        lies on the disk wears it: nothing does where as much speed is to be had without."""
        if not self.evaluation.may_use_disk:
            return self._best(micro_batch, under, starts, **forced)
        without = self.without_disk.best(micro_batch, under, starts, **forced)
        under = under if without is None else min(under, (1 - WORTH) * without.seconds)
        found = self._best(micro_batch, under, starts, **forced)
        return without if found is None or found.seconds >= under else found

    def _best(self, micro_batch: int, under: float, starts: int, **forced: float) -> Offer | None:
        if not self.is_alone:
            return self._best_of_rank(micro_batch, under, starts, **forced)
        offer, polish = self.local.best(micro_batch, under, starts, **forced), Polish(self.evaluation, self._tree)
        if forced or not polish.is_for(micro_batch):
            return offer
        return polish.best(micro_batch, offer, self.local.least(micro_batch), under, starts)

    def _best_of_rank(self, micro_batch: int, under: float, starts: int, **forced: float) -> Offer | None:
        """What has nothing on the host; it is left for what is faster by WORTH_LEAVING at least."""
        stays = self.local.on_device(micro_batch, **forced)
        if stays is not None:
            under = min(under, (1 - WORTH_LEAVING) * stays.seconds)
        moves = self.local.best(micro_batch, under, starts, **forced)
        return stays if moves is None or moves.seconds >= under else moves

    def best_like(self, offer: Offer) -> Offer | None:
        """The fastest with the knobs of an offer in chunks of another size."""
        if not self.is_alone and not offer.uses_host:
            return self.local.on_device(offer.candidate.micro_batch)
        return (self if offer.uses_disk else self.without_disk).local.best_like(offer)

    def bound(self) -> float:
        """Seconds that nothing is under, however it is placed: all resident, but that resident updates take no time."""
        count, chunks = len(self.candidates.chunks), self.candidates.chunks
        update = self.evaluation.rates.update_seconds * sum(each.elements for each in chunks) / self.division.shards
        return min(self.evaluation.bound(Knobs(size, resident=count)) - update for size in self.micro_batches)

    def least_host_bytes(self, micro_batch: int) -> int | None:
        """What the host has to hold at least, in chunks of any size; None where nothing fits the device."""
        taken = (each.local.least_host_bytes(micro_batch) for each in self.sizes)
        return min((size for size in taken if size is not None), default=None)

    def least_needed_bytes(self) -> int:
        """Of the device, with nothing on the host, in chunks of any size."""
        evaluation, sizes = self.evaluation, self.micro_batches
        own = min(evaluation.needed_bytes(evaluation.footprint(self.local.least_on_device(size))) for size in sizes)
        return min(own, *(each.least_needed_bytes() for each in self.others)) if self.others else own


def space_of(profile: Profile) -> Space | None:
    """What else there is than all on the device with all activations kept; None where that is all."""
    return Space(profile) if profile.chunks and profile.host is not None else None
