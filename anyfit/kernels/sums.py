"""Adding up gradients on the host, in fp32: in C++ (adamw.cpp), or in plain torch where that is not built; and norms of them.

torch adds bf16 to fp32 several times slower than memory allows. The sums are the same: one rounding of the exact sum of two. Of a
norm torch's own threads would each be divided into as many more.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .adamw import compiled, is_native

ROW = 1024  # elements whose squares torch adds up in fp32


def norm(values: Tensor, *, threads: int = 1) -> Tensor:
    """In fp32. On the host torch adds all squares in fp32: of 20 million elements, 1e-3 is lost. C++ adds them in float64."""
    vector_norm: Callable[..., Tensor] = torch.linalg.vector_norm
    flat = values.detach().reshape(-1)
    if not flat.is_cpu:
        return vector_norm(flat, dtype=torch.float32)
    if flat.dtype in (torch.bfloat16, torch.float32) and is_native():
        flat = flat.contiguous()
        return root(_in_cpp()(None, flat.data_ptr(), flat.dtype == torch.bfloat16, True, flat.numel(), threads))
    even = flat.numel() // ROW * ROW
    rows = vector_norm(flat[:even].view(-1, ROW), dim=1, dtype=torch.float32)
    rest = vector_norm(flat[even:], dtype=torch.float32)
    return vector_norm(torch.cat([rows, rest.view(1)]), dtype=torch.float64).to(torch.float32)


def root(squares: float) -> Tensor:
    """The norm of what has this sum of squares."""
    return torch.tensor(math.sqrt(squares), dtype=torch.float32)


def add(total: Tensor, part: Tensor, *, is_first: bool, threads: int = 1) -> float | None:
    """Adds bf16 or fp32 `part` to the flat fp32 `total`, or makes it the total, unseen by autograd. C++ sums its squares too."""
    if total.dtype != torch.float32 or part.dtype not in (torch.bfloat16, torch.float32) or total.shape != part.shape:
        raise ValueError(f"{part.dtype} {tuple(part.shape)} cannot be added to {total.dtype} {tuple(total.shape)}")
    if not (total.is_contiguous() and part.is_contiguous() and total.device.type == part.device.type == "cpu"):
        raise ValueError("gradients to be added lie on the host, each without gaps")
    if not is_native():
        if is_first:
            total.copy_(part)
        else:
            total.add_(part)
        return None
    squares: float = _in_cpp()(total.data_ptr(), part.data_ptr(), part.dtype == torch.bfloat16, is_first, total.numel(), threads)
    return squares


@functools.cache
def _in_cpp() -> Any:
    run = compiled().anyfit_add
    run.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int32, ctypes.c_int32, ctypes.c_int64, ctypes.c_int32]
    run.restype = ctypes.c_double
    return run
