"""One batch for the ranks of a tensor or pipeline axis: they hold a model together, so all have to see the same samples.

`run.loader` gives them the same. A user's own sampler, that knows of no axis, gives each rank a batch of its own:

    one part of what the axis is to see    each takes all parts, one after the other: so no sample is lost
    as much as the axis is to see          that of the first rank is sent to the others, and the run says so
    an evaluation's                        all see one after the other

Checksums tell, of a few bytes in every step.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from anyfit.kernels.bytes import crc32
from anyfit.layouts.axis import Axis, all_gather
from anyfit.values.batches import joined
from anyfit.values.job import Batch
from anyfit.values.nests import is_dense, map_tensors

DIFFER = (
    "ranks that hold the model together were given different batches, and each takes that of the first of them; give them the "
    "same: run.loader does, and a sampler of your own by run.ranks.replica of run.ranks.replicas"
)


def same_batch(
    batch: Batch,
    axis: Axis,
    device: torch.device,
    say: Callable[[str], None],
    *,
    rows: int | None = None,
    wanted: int | None = None,
    is_mute: bool = False,
) -> Batch:
    """What all ranks of the axis see: `wanted` samples, where each has a part of them, else the batch of the first. `rows`: how
    many this one has, where that is known. `is_mute`: none of its own is left."""
    if axis.n == 1:
        return batch
    are_alike, parts = _compared(batch, axis, device, rows, is_mute=is_mute)
    if rows and wanted == axis.n * rows and set(parts) == {rows}:
        return _one_of_parts(_of_all(batch, axis), rows)
    if are_alike:
        return batch
    if not is_mute:
        say(DIFFER)
    return _of_all(batch if axis.rank == 0 else None, axis)[0]


def different_batches(batch: Batch, axis: Axis, device: torch.device, *, is_mute: bool = False) -> list[Batch]:
    """All that ranks of the axis were given, for what may see one after the other; one, where they are alike."""
    if axis.n == 1 or _compared(batch, axis, device, None, is_mute=is_mute)[0]:
        return [batch]
    return _of_all(batch, axis)


def _compared(batch: Batch, axis: Axis, device: torch.device, rows: int | None, *, is_mute: bool) -> tuple[bool, list[int]]:
    """Whether all ranks of the axis have the same batch, and how many samples each."""
    known = torch.tensor([checksum(batch), is_mute, rows or 0], dtype=torch.int64, device=device)
    found = known.new_empty((axis.n, 3))
    all_gather(found.view(-1), known, group=axis.group)
    sums, mute, parts = found.t().tolist()
    if any(mute) and not all(mute):
        raise RuntimeError(
            "a rank has no more batches, and others that hold the model with it have: give all ranks of a tensor or pipeline "
            "axis the same number"
        )
    return len(set(sums)) == 1, parts


def _of_all(batch: Batch, axis: Axis) -> list[Batch]:
    """In order of the axis, on the host."""
    found: list[Batch] = [None] * axis.n
    dist.all_gather_object(found, map_tensors(batch, lambda tensor: tensor.cpu()), group=axis.group)
    return found


def _one_of_parts(parts: list[Batch], rows: int) -> Batch:
    try:
        return joined(parts, rows)
    except ValueError as error:
        raise ValueError(
            f"ranks that hold the model together have a part of a batch each, and {error}; pad them to one length, draw batches "
            "from run.loader, or plan without a tensor axis: anyfit.start(job, mesh={'tensor': 1})"
        ) from None


def checksum(batch: Any) -> int:
    """Of its structure and all its numbers; nothing of one that cannot be written down.

    >>> one, other = {"ids": torch.tensor([1, 2])}, {"ids": torch.tensor([1, 3])}
    >>> checksum(one) == checksum({"ids": torch.tensor([1, 2])}), checksum(one) == checksum(other)
    (True, False)
    """
    written = io.BytesIO()
    try:
        _Summing(written).dump(batch)
    except (pickle.PicklingError, TypeError, AttributeError):  # it could not be sent either; the losses will tell
        return 0
    return crc32(bytearray(written.getbuffer()))


class _Summing(pickle.Pickler):
    def persistent_id(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or not is_dense(value):
            return None
        flat = value.detach().cpu().contiguous().reshape(-1)
        return str(value.dtype), tuple(value.shape), crc32(flat.view(torch.uint8)) if flat.numel() else 0
