"""What a checkpoint does with bytes, on the thread that calls and without Python's lock: adding them up, copying them, and
putting exact numbers together from their halves (split.py).

In C++ (bytes.cpp); where that is not built, zlib and numpy do the same. Not torch: it would wake a team of threads for each one
that copies, and those would take turns with the ones that train.
"""

from __future__ import annotations

import ctypes
import threading
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .native import NotBuilt, library

AT_ONCE = 2**16  # elements that numpy goes through in several passes: they stay in the cache


def is_native() -> bool:
    """Whether the C++ is built. The first call on a machine builds it, which takes a second or two."""
    return _library() is not None


def crc32(data: Tensor | bytes | bytearray | memoryview, value: int = 0) -> int:
    """zlib.crc32, several times as fast where the processor can."""
    flat = data.numpy() if isinstance(data, Tensor) else np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    run = _library()
    if run is None or not run.anyfit_folds():
        return zlib.crc32(flat.data, value)
    return int(run.anyfit_crc32(flat.ctypes.data, flat.nbytes, value))


def merge(high: Tensor, low: Tensor, out: Tensor, *, past_cache: bool = False) -> None:
    """Writes the fp32 numbers of (bf16 `high`, int16 `low`) into `out`, all flat and on the host. Past the cache is for what is
    not read again soon."""
    _check("merged", high, low, out)
    if (high.dtype, low.dtype, out.dtype) != (torch.bfloat16, torch.int16, torch.float32):
        raise ValueError(f"{high.dtype} and {low.dtype} cannot be merged into {out.dtype}")
    run = _library()
    if run is not None:
        run.anyfit_merge(high.data_ptr(), low.data_ptr(), out.data_ptr(), out.numel(), past_cache)
        return
    halves, lows, bits = high.view(torch.int16).numpy(), low.numpy(), out.view(torch.int32).numpy()
    for start in range(0, len(bits), AT_ONCE):
        part = slice(start, start + AT_ONCE)
        np.copyto(bits[part], halves[part])
        np.left_shift(bits[part], 16, out=bits[part])
        np.add(bits[part], lows[part], out=bits[part])


def copy(source: Tensor, out: Tensor, *, past_cache: bool = False) -> None:
    """The same bytes, both flat and on the host. Past the cache is for what is not read again soon."""
    _check("copied", source, out)
    if source.dtype != out.dtype:
        raise ValueError(f"{source.dtype} is not copied to {out.dtype}")
    run = _library()
    if run is not None:
        run.anyfit_copy(source.data_ptr(), out.data_ptr(), out.nbytes, past_cache)
    else:
        np.copyto(out.view(torch.uint8).numpy(), source.view(torch.uint8).numpy())


def _check(what: str, *tensors: Tensor) -> None:
    count = tensors[0].numel()
    for each in tensors:
        if each.numel() != count or each.dim() != 1 or not each.is_contiguous() or not each.is_cpu:
            shapes = ", ".join(f"{tuple(tensor.shape)} on {tensor.device}" for tensor in tensors)
            raise ValueError(f"what is {what} is flat, of one length and on the host, each without gaps: {shapes}")


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
    found.anyfit_merge.argtypes, found.anyfit_merge.restype = [pointer, pointer, pointer, size, number], None
    found.anyfit_copy.argtypes, found.anyfit_copy.restype = [pointer, pointer, size, number], None
    return found
