"""Samples to rows of one length: several samples in a row, one after the other, so that little of a batch is padding.

Each sample of a row counts its positions from 0. By that transformers sees where one ends (`find_packed_sequence_indices`), and
lets no token attend to another sample; and the first token of a sample is never learnt, so that none is predicted from the sample
before. The loss of packed rows is therefore that of their samples one by one (tests/finetune/test_packing.py). Whether the model
at hand keeps its samples apart is tried before the first step (`looks.refuse_leaks`).
"""

from __future__ import annotations

import bisect
import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy

from anyfit.values.tokens import IGNORED

from .tokens import Sample

if TYPE_CHECKING:
    from torch import Tensor


def packed(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Indices of the samples of each row: the longest first, each into the fullest row that has room (best fit decreasing).

    >>> packed([3, 5, 2, 6, 1], 8)
    [[3, 2], [1, 0]]
    """
    rows: list[list[int]] = []
    with_space: dict[int, list[int]] = defaultdict(list)  # by space left, rows that have it
    spaces: list[int] = []  # the keys of these, in order
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        length = lengths[index]
        place = bisect.bisect_left(spaces, length)
        if place == len(spaces):
            row, space = len(rows), room
            rows.append([])
        else:
            space = spaces[place]
            row = with_space[space].pop()
            if not with_space[space]:
                del spaces[place]
        rows[row].append(index)
        left = space - length
        if left:
            if not with_space[left]:
                bisect.insort(spaces, left)
            with_space[left].append(row)
    return rows


@dataclass(frozen=True)
class Packed:
    """Samples in rows: what `run.loader` draws from, with `collate`."""

    samples: Sequence[Sample]
    rows: Sequence[Sequence[int]]
    length: int  # of a row
    padding: int  # the token that fills what is left

    @classmethod
    def of(cls, samples: Sequence[Sample], length: int, padding: int) -> Packed:
        return cls(samples, packed([len(each) for each in samples], length), length, padding)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.row([self.samples[each] for each in self.rows[index]])

    def row(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        import torch

        ids = numpy.full(self.length, self.padding, dtype=numpy.int64)
        labels = numpy.full(self.length, IGNORED, dtype=numpy.int64)
        positions = numpy.empty(self.length, dtype=numpy.int64)
        start = 0
        for sample in samples:
            stop = start + len(sample)
            ids[start:stop] = sample.ids
            labels[start:stop] = numpy.where(sample.is_answer, sample.ids, IGNORED)
            positions[start:stop] = numpy.arange(len(sample))
            start = stop
        positions[start:] = numpy.arange(self.length - start)
        return {
            name: torch.from_numpy(each) for name, each in (("input_ids", ids), ("labels", labels), ("position_ids", positions))
        }

    def learnt(self, index: int) -> int:
        """Tokens of a row that count in the loss."""
        return sum(self.samples[each].learnt for each in self.rows[index])

    def blank(self) -> dict[str, Tensor]:
        """A row of nothing but padding."""
        return self.row([])

    def largest(self, count: int) -> dict[str, Tensor]:
        """A batch like those to come."""
        return self.collate([self[index % len(self)] for index in range(count)])

    @staticmethod
    def collate(rows: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
        import torch

        return {name: torch.stack([row[name] for row in rows]) for name in rows[0]}


@dataclass(frozen=True)
class Unpacked:
    """A sample a row; a batch is as long as its longest. What follows a sample is neither learnt nor seen by it."""

    samples: Sequence[Sample]
    length: int  # of the longest row that may come
    padding: int

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Sample:
        return self.samples[index]

    def learnt(self, index: int) -> int:
        return self.samples[index].learnt

    def blank(self) -> Sample:
        return Sample(numpy.full(1, self.padding, dtype=numpy.int32), numpy.zeros(1, dtype=numpy.bool_))

    def largest(self, count: int) -> dict[str, Tensor]:
        """A batch as long as any to come."""
        longest = max(self.samples, key=len)
        return self.collate([longest, *(self[index % len(self)] for index in range(count - 1))])

    def collate(self, samples: Sequence[Sample]) -> dict[str, Tensor]:
        import torch

        longest = max(map(len, samples))
        ids = numpy.full((len(samples), longest), self.padding, dtype=numpy.int64)
        labels = numpy.full((len(samples), longest), IGNORED, dtype=numpy.int64)
        for row, sample in enumerate(samples):
            ids[row, : len(sample)] = sample.ids
            labels[row, : len(sample)] = numpy.where(sample.is_answer, sample.ids, IGNORED)
        return {"input_ids": torch.from_numpy(ids), "labels": torch.from_numpy(labels)}


def digest(samples: Sequence[Sample]) -> str:
    """Of all tokens and what is learnt of them: the same for the same data."""
    found: Any = hashlib.sha256()
    for sample in samples:
        found.update(len(sample).to_bytes(8))
        found.update(sample.ids.tobytes())
        found.update(sample.is_answer.tobytes())
    return str(found.hexdigest()[:16])
