"""The search of the knobs: the device is filled, and what looks best is improved by single steps.

    minimise    simulated seconds, the mean of clipped steps and others where the job clips (evaluation.py)
    over        the knobs of one micro-batch size (knobs.py)
    subject to  (1 + error) * reserved bytes <= device limit
                host bytes <= host limit
                disk bytes <= disk limit

Where somebody has allowed a disk, as few chunks of a point lie there as leave the others room on the host.

For each rung, share that is streamed, share that the host does first, with speculation and without, the device is filled: as many
chunks resident as fit. Where nothing fits with none resident, as few chunks as possible are away; or, for a host that is short,
all that are not resident. The same is done with half of the blocks and with all of them offloaded, the others kept. These points
are simulated in the order of a bound that no simulation is under, until it passes the best simulation. The best few are improved
by single steps of every knob for as long as that helps, and tried with a few other numbers of offloaded blocks. On a CPU nothing
is offloaded: its own cores would do the copies.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from itertools import product

from .evaluation import Evaluation, Offer
from .knobs import Knobs

RUNGS = 9  # of a ladder that are tried at first
STREAMED = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
MORE_STREAMED = (0.0, 0.05, 0.1, 0.15)  # where that is too much for the host, which has no gradients of what is streamed
HOST_FIRST = (0.0, 0.12)
SECANTS = 6  # steps of a secant search; then it is halved
TRIED = 48  # that are simulated at first, of all STARTS
STARTS, ROUNDS = 4, 10  # that are improved, and by how many single steps at most
CLOSE = 1.1  # times the best before it: what may become better still
WORTH = 0.002  # of a step: less is no reason to change a plan


class LocalSearch:
    def __init__(self, evaluation: Evaluation) -> None:
        self._evaluation, self._candidates = evaluation, evaluation.candidates
        self._count = len(evaluation.candidates.chunks)
        self._is_gpu = evaluation.candidates.is_gpu
        self._shares_streamed = STREAMED if self._is_gpu else (0.0,)
        self.least = cache(self._least)

    def _least(self, micro_batch: int) -> Knobs:
        """What needs least of the device."""
        last = Knobs(micro_batch, rung=self._candidates.last_rung(micro_batch))
        ways = product(self._candidates.some_offloaded(micro_batch), self._candidates.before_larger_slots())
        points = [last._replace(offloaded=offloaded, away=away) for offloaded, away in ways]
        return min(points, key=lambda knobs: self._evaluation.reserved_bytes(self._evaluation.footprint(knobs)))

    def least_host_bytes(self, micro_batch: int) -> int | None:
        """What the host has to hold at least, of what fits the device; None where nothing does."""
        evaluation, least = self._evaluation, self.least(micro_batch)
        if not evaluation.fits_device(evaluation.footprint(least)):
            return None
        for offloaded in (0, least.offloaded):  # what is offloaded takes of the host, if only it fits without
            starts = [Knobs(micro_batch, least.rung, offloaded, streamed=share) for share in self._shares_streamed]
            filled = [knobs for start in starts for knobs in self.fillings(start)]
            if filled:
                filled += [on_disk for knobs in filled for on_disk in self._all_on_disk(knobs)]
                return min(evaluation.host_bytes(evaluation.footprint(knobs)) for knobs in filled)
        return None

    def _all_on_disk(self, knobs: Knobs) -> Iterator[Knobs]:
        """With as much there as it has room for: of all chunks, and of all that are not large."""
        evaluation, candidates = self._evaluation, self._candidates
        if not evaluation.may_use_disk:
            return

        def fits(on_disk: int) -> bool:
            there = knobs._replace(on_disk=on_disk)
            return evaluation.footprint(there).disk_bytes <= evaluation.profile.disk_limit_bytes

        for count in {len(candidates.to_disk(knobs.resident)), candidates.few_to_disk(knobs.resident)}:
            there = knobs._replace(on_disk=most(count, fits))
            if evaluation.fits_device(evaluation.footprint(there)):
                yield there

    def least_on_device(self, micro_batch: int) -> Knobs:
        """What needs least of the device with nothing on the host."""
        return Knobs(micro_batch, rung=self._candidates.last_rung(micro_batch), resident=self._count)

    def on_device(self, micro_batch: int, **forced: float) -> Offer | None:
        """With nothing on the host, and as little recomputed as fits; None where nothing does."""
        if forced.get("offloaded"):
            return None
        last, all_stay = self._candidates.last_rung(micro_batch), {**forced, "resident": self._count}
        kept = [Knobs(micro_batch, **{**all_stay, "rung": last - more}) for more in range(last + 1)]  # type: ignore[arg-type]
        if "rung" in forced:
            kept = [kept[last - int(forced["rung"])]]
        if not self._fits(kept[0]):
            return None
        return self._evaluation.offer(kept[most(len(kept) - 1, lambda more: self._fits(kept[more]))])

    def best(self, micro_batch: int, under: float = math.inf, starts: int = STARTS, **forced: float) -> Offer | None:
        """The fastest that fits, with these knobs as they are; None where nothing fits, or nothing takes less than `under`."""
        seconds = self._evaluation.seconds
        tried: list[Knobs] = []
        least = under
        filled = sorted(self._filled(micro_batch, forced, under), key=lambda pair: pair[0])
        for bound, knobs in filled[: TRIED * starts // STARTS]:
            if bound >= least:
                break
            if self._evaluation.is_under(knobs, CLOSE * least):
                tried.append(knobs)
                least = min(least, seconds(knobs))
        first = sorted(tried, key=seconds)[:starts]
        rounds = ROUNDS * starts // STARTS
        improved = [self._improved(knobs, forced, rounds) for knobs in first if seconds(knobs) < CLOSE * least]
        if improved and not any(knobs.offloaded for knobs in improved):
            offloaded = self._with_offloaded(min(improved, key=seconds), forced)
            improved += [self._improved(knobs, forced, rounds) for knobs in offloaded]
        return self._evaluation.offer(min(improved, key=seconds)) if improved else None

    def best_like(self, offer: Offer) -> Offer | None:
        """The fastest that fits with the knobs of an offer in chunks of another size, the device filled anew, or a step from
        there; of any knobs, where there is nothing so."""
        filled = [] if offer.knobs is None else self.fillings(offer.knobs._replace(resident=0, away=0))
        fitting = [near for each in filled if (near := self._near(each)) is not None]
        if not fitting:
            return self.best(offer.candidate.micro_batch, starts=1)
        return self._evaluation.offer(self._improved(min(fitting, key=self._evaluation.seconds), {}, rounds=1))

    def _filled(self, micro_batch: int, forced: Mapping[str, float], under: float) -> Iterator[tuple[float, Knobs]]:
        """For every choice of the other knobs, the device as full as it can be; but of those that take longer than `under` in
        any case."""
        taken = self.least_host_bytes(micro_batch)
        if taken is None or taken > self._evaluation.profile.host_limit_bytes:
            return
        last = self._candidates.last_rung(micro_batch)
        some = sorted({min(2, last)} | {round(step * last / (RUNGS - 1)) for step in range(RUNGS)})  # all kept may just not fit
        speculates = (False, True) if self._is_gpu else (False,)
        offloaded = [Knobs(micro_batch, 0, count) for count in self._candidates.some_offloaded(micro_batch)[-2:] if count]
        points = [*(Knobs(micro_batch, rung) for rung in some), *offloaded]
        kept = [each for each in points if self._pass_seconds(each) < under]
        for point, streamed in product(kept, self._shares_streamed):
            for more in MORE_STREAMED if self._is_gpu else (0.0,):
                start = point._replace(streamed=round(streamed + more, 3))
                if start.streamed > 1 or not _is_forced(start, forced, "rung", "offloaded", "streamed"):
                    continue
                filled = product(self.fillings(start), HOST_FIRST if self._is_gpu else (0.0,), speculates)
                ways = [self._near(knobs._replace(host_first=first, speculates=guess)) for knobs, first, guess in filled]
                fitting = [near for near in ways if near is not None and _is_forced(near, forced)]
                yield from ((self._evaluation.bound(near), near) for near in fitting)
                if fitting:
                    break

    def _pass_seconds(self, knobs: Knobs) -> float:
        """Of all passes of a step, and nothing else."""
        candidate = self._candidates.of(knobs)
        device, launch = sum(candidate.segment_seconds), candidate.launch_seconds
        if self._is_gpu and not candidate.division.is_alone:
            device *= self._evaluation.rates.calibration.overlap_slowdown.value
        return candidate.accumulation * max(device, launch)

    def fillings(self, knobs: Knobs) -> Iterator[Knobs]:
        filled = self.fill(knobs)
        if filled is not None:
            yield filled
        if filled is not None and filled.away:
            far = [knobs._replace(resident=stay, away=self._count - stay) for stay in range(self._count + 1)]
            yield far[fullest(self._count, lambda stay: self._evaluation.excess_bytes(far[stay]))]

    def fill(self, knobs: Knobs) -> Knobs | None:
        excess, count = self._evaluation.excess_bytes, self._count
        if excess(knobs) <= 0:
            return knobs._replace(resident=fullest(count, lambda stay: excess(knobs._replace(resident=stay))))
        kept = fullest(count, lambda kept: excess(knobs._replace(away=count - kept)))
        if excess(filled := knobs._replace(away=count - kept)) <= 0:
            return filled
        least = self.least(knobs.micro_batch)  # a few chunks away take more, in slots, than they leave
        return least if knobs._replace(away=least.away) == least and excess(least) <= 0 else None

    def _near(self, knobs: Knobs) -> Knobs | None:
        """The same, or with a chunk or two less on the device: who updates first, and into what, changes little of its memory."""
        for fewer in range(3):
            resident = max(knobs.resident - fewer, 0)
            away = knobs.away + fewer - (knobs.resident - resident) if knobs.away else 0
            near = self._with_disk(knobs._replace(resident=resident, away=min(away, self._count - resident)))
            if near is not None:
                return near
        return None

    def _with_disk(self, knobs: Knobs) -> Knobs | None:
        """The same with as few chunks on the disk as leave the others room on the host; None where it does not fit so. A disk is
        the slowest tier: there is no reason for more."""
        evaluation, candidates = self._evaluation, self._candidates
        if self._fits(none := knobs._replace(on_disk=0)):
            return none
        limit, few = evaluation.profile.host_limit_bytes, candidates.few_to_disk(knobs.resident)

        def excess(on_disk: int) -> int:
            return evaluation.host_bytes(evaluation.footprint(knobs._replace(on_disk=on_disk))) - limit

        if not evaluation.may_use_disk or excess(0) <= 0:  # it is the device that has no room
            return None
        # From the first on, as its carriers take room, each leaves more of the host, but for large ones.
        counts = [few - fullest(few - 1, lambda fewer: excess(few - fewer))] if few else []
        counts += range(few + 1, len(candidates.to_disk(knobs.resident)) + 1)
        ways = (knobs._replace(on_disk=count) for count in counts)
        return next((each for each in ways if self._fits(each)), None)

    def _fits(self, knobs: Knobs) -> bool:
        return self._evaluation.fits(self._evaluation.footprint(knobs))

    def _improved(self, knobs: Knobs, forced: Mapping[str, float], rounds: int) -> Knobs:
        for _ in range(rounds):
            near = [each for each in self._fitted_neighbours(knobs) if _is_forced(each, forced) and self._is_sound(each)]
            best = knobs
            for each in sorted(near, key=lambda each: (self._evaluation.bound(each), str(each))):
                if self._is_better(each, best):
                    best = each
            if best == knobs:
                break
            knobs = best
        return knobs

    def _with_offloaded(self, knobs: Knobs, forced: Mapping[str, float]) -> list[Knobs]:
        """The same with some blocks offloaded, and the device filled anew, where that is better."""
        some = self._candidates.some_offloaded(knobs.micro_batch)[1:]
        others = [knobs._replace(offloaded=offloaded, resident=0, away=0) for offloaded in some]
        filled = [near for each in others for full in self.fillings(each) if (near := self._near(full)) is not None]
        return [each for each in filled if _is_forced(each, forced) and self._is_better(each, knobs)]

    def _is_better(self, knobs: Knobs, than: Knobs) -> bool:
        return self._evaluation.is_under(knobs, self._evaluation.seconds(than) * (1 - WORTH))

    def _is_sound(self, knobs: Knobs) -> bool:
        """It fits, and weights are not away only to fill slots that take as much."""
        return not 0 < knobs.away <= self._candidates.wanted_slots and self._fits(knobs)

    def _fitted_neighbours(self, knobs: Knobs) -> set[Knobs]:
        found = set(self._neighbours(knobs))
        if not self._evaluation.may_use_disk:
            return found
        return {fitted for each in found if (fitted := self._with_disk(each)) is not None}

    def _neighbours(self, knobs: Knobs) -> Iterator[Knobs]:
        """A step of one knob, or of two that share the memory; the device is filled again where that leaves room."""
        count, last = self._count, self._candidates.last_rung(knobs.micro_batch)
        for step in (-4, -2, -1, 1, 2, 4):
            if 0 <= knobs.resident + step <= count - knobs.away:
                yield knobs._replace(resident=knobs.resident + step)
            if 0 <= knobs.away + step <= count - knobs.resident:
                yield knobs._replace(away=knobs.away + step)
            if 0 <= knobs.rung + step <= last:
                yield from self._and_filled(knobs._replace(rung=knobs.rung + step))
            if knobs.offloaded and 0 <= knobs.offloaded + step <= len(self._candidates.offloadable(knobs.micro_batch)):
                yield from self._and_filled(knobs._replace(offloaded=knobs.offloaded + step))
        for share in (-0.15, -0.05, -0.02, 0.02, 0.05, 0.15) if self._is_gpu else ():
            streamed, first = (round(min(max(now + share, 0.0), 1.0), 3) for now in (knobs.streamed, knobs.host_first))
            yield from self._and_filled(knobs._replace(streamed=streamed))
            yield from self._and_filled(knobs._replace(host_first=first))

    def _and_filled(self, knobs: Knobs) -> Iterator[Knobs]:
        yield knobs
        filled = self.fill(knobs._replace(resident=0, away=0))
        if filled is not None:
            yield filled


def _is_forced(knobs: Knobs, forced: Mapping[str, float], *names: str) -> bool:
    """Whether these knobs, or all, are as they were to be."""
    return all(getattr(knobs, name) == value for name, value in forced.items() if not names or name in names)


def most(count: int, fits: Callable[[int], bool]) -> int:
    """The largest number up to `count` that fits, where all smaller ones do; 0 where none does."""
    return bisect_left(range(1, count + 1), True, key=lambda number: not fits(number))


def fullest(count: int, excess: Callable[[int], int]) -> int:
    """Secant search for the largest number up to `count` whose size is not in excess, where it grows about evenly."""
    low, high = 0, count
    seen: list[tuple[int, int]] = []
    while low < high:
        middle = (low + high + 1) // 2
        if 2 <= len(seen) <= SECANTS:
            (one, its), (other, others) = seen[-2:]
            if (others - its) * (other - one) > 0:
                middle = min(max(math.floor(other - others * (other - one) / (others - its)), low + 1), high)
        seen.append((middle, excess(middle)))
        low, high = (middle, high) if seen[-1][1] <= 0 else (low, middle - 1)
    return low
