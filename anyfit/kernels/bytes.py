"""What is done with bytes without Python's lock: checksums, copies, exact numbers from their halves (split.py) and back.

In C++ (bytes.cpp); where that is not built, zlib and numpy do the same. Not torch: it would wake a team of threads for each one
that copies, and those would take turns with the ones that train.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .native import NotBuilt, library

AT_ONCE = 2**16  # elements that numpy goes through in several passes: they stay in the cache


def crc32(data: Tensor | bytes | bytearray | memoryview, value: int = 0) -> int:
    """zlib.crc32, several times as fast where the processor can."""
    flat = data.numpy() if isinstance(data, Tensor) else np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    run = _library()
    if run is None or not run.anyfit_folds():
        return zlib.crc32(flat.data, value)
    return int(run.anyfit_crc32(flat.ctypes.data, flat.nbytes, value))


@dataclass(frozen=True)
class Move:
    """A copy; or, with `low`, bf16 `source` and int16 `low` merged into fp32 `out`. All are flat and on the host."""

    source: Tensor
    low: Tensor | None
    out: Tensor

    def __post_init__(self) -> None:
        tensors = [each for each in (self.source, self.low, self.out) if each is not None]
        dtypes = [each.dtype for each in tensors]
        if self.low is None and self.source.dtype != self.out.dtype:
            raise ValueError(f"{self.source.dtype} is not copied to {self.out.dtype}")
        if self.low is not None and dtypes != [torch.bfloat16, torch.int16, torch.float32]:
            raise ValueError(f"{self.source.dtype} and {self.low.dtype} cannot be merged into {self.out.dtype}")
        count = self.out.numel()
        if any(each.numel() != count or each.dim() != 1 or not each.is_contiguous() or not each.is_cpu for each in tensors):
            shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
            raise ValueError(f"what is moved is flat, of one length and on the host, each without gaps: {shapes}")

    @property
    def row(self) -> tuple[int, int, int, int]:
        """As the C++ has it."""
        source, out = self.source.data_ptr(), self.out.data_ptr()
        return (source, 0, out, self.out.nbytes) if self.low is None else (source, self.low.data_ptr(), out, self.out.numel())


def move_all(moves: Sequence[Move], *, past_cache: bool = False, nice: int = 0) -> None:
    """One after another, in one call. `past_cache`: they are not read again soon. The more `nice`, the more others come first."""
    run = _library()
    if run is not None:
        table = np.array([each.row for each in moves], np.int64)
        run.anyfit_move_all(table.ctypes.data, len(moves), past_cache, nice)
        return
    for each in moves:
        if each.low is None:
            np.copyto(each.out.view(torch.uint8).numpy(), each.source.view(torch.uint8).numpy())
        else:
            _merge(each.source.view(torch.int16).numpy(), each.low.numpy(), each.out.view(torch.int32).numpy())


def _merge(high: Any, low: Any, out: Any) -> None:
    for start in range(0, len(out), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        np.copyto(out[part], high[part])
        np.left_shift(out[part], 16, out=out[part])
        np.add(out[part], low[part], out=out[part])


def copy(source: Tensor, out: Tensor, *, past_cache: bool = False) -> None:
    move_all([Move(source, None, out)], past_cache=past_cache)


def split(exact: Tensor, high: Tensor, low: Tensor) -> None:
    """Writes fp32 `exact` as bf16 `high` and int16 `low`. All are flat, of one length, on the host and without gaps."""
    tensors = exact, high, low
    assert [each.dtype for each in tensors] == [torch.float32, torch.bfloat16, torch.int16]
    assert all(each.shape == exact.shape and each.dim() == 1 and each.is_contiguous() and each.is_cpu for each in tensors)
    run = _library()
    if run is not None:
        run.anyfit_split(*(each.data_ptr() for each in tensors), len(exact))
        return
    bits, highs, lows = exact.view(torch.int32).numpy().view(np.uint32), high.view(torch.int16).numpy(), low.numpy()
    for start in range(0, len(bits), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        np.copyto(lows[part], bits[part], casting="unsafe")  # keeps the low 16 bits
        np.copyto(highs[part], (bits[part] + np.uint32(0x8000)) >> np.uint32(16), casting="unsafe")


def populate(memory: Tensor, at_once: int, *, nice: int, ends: ctypes.c_int32) -> bool:
    """Has the kernel give memory to these bytes, so many at a time, until all have some or `ends` is not 0; whether it can."""
    run = _library()
    return run is not None and bool(run.anyfit_populate(memory.data_ptr(), len(memory), at_once, nice, ctypes.byref(ends)))


def touch(memory: Tensor, page_bytes: int, ends: ctypes.c_int32) -> bool:
    """Gets memory for each page of these bytes, which stay as they are, until `ends` is not 0; whether it can. They must be there
    all the time. Nobody else of this process waits for memory meanwhile, as beside `populate`."""
    run = _library()
    if run is not None:
        run.anyfit_touch(memory.data_ptr(), len(memory), page_bytes, ctypes.byref(ends))
    return run is not None


_lock = threading.Lock()
_libraries: list[Any] = []  # one entry, once it has been tried: None where it is not built


def _library() -> Any:
    if not _libraries:
        with _lock:
            if not _libraries:
                _libraries.append(_built())
    return _libraries[0]


def _built() -> Any:
    try:
        found = library(Path(__file__).with_name("bytes.cpp"))
    except NotBuilt:  # slower, and else the same; the update's kernel says what to install
        return None
    pointer, size, number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int32
    found.anyfit_folds.argtypes, found.anyfit_folds.restype = [], number
    found.anyfit_crc32.argtypes, found.anyfit_crc32.restype = [pointer, size, ctypes.c_uint32], ctypes.c_uint32
    found.anyfit_move_all.argtypes, found.anyfit_move_all.restype = [pointer, size, number, number], None
    found.anyfit_split.argtypes, found.anyfit_split.restype = [pointer, pointer, pointer, size], None
    found.anyfit_touch.argtypes, found.anyfit_touch.restype = [pointer, size, size, pointer], None
    found.anyfit_populate.argtypes, found.anyfit_populate.restype = [pointer, size, size, number, pointer], number
    return found
