"""Adam and AdamW on a GPU: the formula of adamw.py in one pass over a chunk that lies there, written in Triton.

Every number is computed as in adamw.cpp: the same fp32 operations in the same order, fused multiply-adds where they stand and
nowhere else, square roots and quotients to the nearest float, denormals kept. So the bits are those of the CPU's kernel, but
where torch's own square roots on the CPU are not the nearest, and the CPU's kernel follows them (see adamw.cpp).

Triton comes with torch's CUDA builds, not with this package: it is imported when a GPU is first asked for.
"""

from __future__ import annotations

import ctypes
import functools
import importlib
import sys
import threading
from typing import Any

import torch
from torch import Tensor

from .adamw import Ranges, Settings, State, refuse_unfit

BLOCK = 1024  # elements of a program
WARPS = 8  # so that a thread has 4 elements: 16 bytes of fp32, the widest load, and one layout for all that is loaded
AS_WRITTEN = {"enable_fp_fusion": False, "enable_reflect_ftz": False}  # nothing contracted, denormals not taken for zeros

tl: Any = None  # triton.language, once it is needed, and then these are its types: Triton looks them up by name
pointer = Any
int64 = int
float32 = float
constexpr = Any


def can_run_on_gpu(device: torch.device | str | int) -> bool:
    """Whether `adamw_on_gpu` runs on this device. Tries it once on each GPU, which compiles it: a second or two."""
    device = torch.device(device)
    if device.type != "cuda" or not torch.cuda.is_available() or torch.version.hip is not None:
        return False
    try:
        importlib.import_module("triton")
    except ImportError:
        return False
    return _works(torch.cuda.current_device() if device.index is None else device.index)


def adamw_on_gpu(
    state: State,
    gradient: Tensor,
    settings: Settings,
    step: int,
    *,
    out: State | None = None,
    scale: float | Tensor | None = None,
    ranges: Ranges | None = None,
) -> None:
    """One update of a chunk, as `adamw` does it, on the current stream of its GPU, which it never waits for. Ranges that touch
    take one launch. A scale that is a tensor there, of one fp32, is read when the GPU comes to it; where that is nan, the chunk
    stays as it is."""
    out = out or state
    stretches = _checked(state, out, gradient, step, ranges)
    known, asked = (1.0, scale) if isinstance(scale, Tensor) else (1.0 if scale is None else scale, None)
    if asked is not None and (out is not state or asked.dtype != torch.float32 or asked.numel() != 1):
        raise ValueError("a scale that is a tensor is one fp32, of an update in place")
    decoupled, lerp_weight = settings.decoupled, ctypes.c_float(1 - settings.beta1).value
    leans_on_old = lerp_weight < 0.5
    l2 = 0.0 if decoupled else settings.weight_decay
    tensors = (state.weights, state.low, state.m, state.v, gradient, out.weights, out.low, out.m, out.v)
    numbers = (
        (-1.0 if settings.maximize else 1.0) * known,
        1 - settings.lr * settings.weight_decay if decoupled else 1.0,
        l2,
        lerp_weight if leans_on_old else lerp_weight - 1,
        settings.beta2,
        1 - settings.beta2,
        (1 - settings.beta2**step) ** 0.5,
        settings.eps,
        -settings.lr / (1 - settings.beta1**step),
    )
    constants = (leans_on_old, l2 != 0, BLOCK)
    run = _kernel()
    with torch.cuda.device_of(state.weights):
        for start, end in stretches:
            first_block = start // BLOCK
            launch = run[((end - 1) // BLOCK + 1 - first_block,)]
            launch(*tensors, first_block, start, end, asked, *numbers, *constants, num_warps=WARPS, **AS_WRITTEN)
        if out is not state:
            _carry_over(state, out, stretches)


@torch.no_grad()
def _carry_over(state: State, out: State, stretches: list[tuple[int, int]]) -> None:
    """What lies between the stretches."""
    starts, ends = [0, *(end for _, end in stretches)], [*(start for start, _ in stretches), state.weights.numel()]
    for start, end in zip(starts, ends, strict=True):
        if start < end:
            for new, old in zip(out.tensors, state.tensors, strict=True):
                if new.data_ptr() != old.data_ptr():
                    new[start:end].copy_(old[start:end])


def _checked(state: State, out: State, gradient: Tensor, step: int, ranges: Ranges | None) -> list[tuple[int, int]]:
    """The stretches to update: ascending, with something between them."""
    refuse_unfit(state, out, gradient, step, state.weights.device)
    elements, done = state.weights.numel(), 0
    stretches: list[tuple[int, int]] = []
    for start, end in [(0, elements)] if ranges is None else ranges:
        if not done <= start <= end <= elements:
            raise ValueError(f"ranges must be ascending, disjoint and within 0 to {elements}: {ranges}")
        done = end
        if stretches and stretches[-1][1] == start:
            stretches[-1] = (stretches[-1][0], end)
        elif start < end:
            stretches.append((start, end))
    return stretches


def _update(
    weights: pointer,
    low: pointer,
    m: pointer,
    v: pointer,
    gradient: pointer,
    out_weights: pointer,
    out_low: pointer,
    out_m: pointer,
    out_v: pointer,
    first_block: int64,
    start: int64,
    end: int64,
    asked: pointer,
    factor: float32,
    decay: float32,
    l2: float32,
    coefficient: float32,
    beta2: float32,
    square_weight: float32,
    root_correction: float32,
    eps: float32,
    negative_step_size: float32,
    leans_on_old: constexpr,
    has_l2: constexpr,
    size: constexpr,
) -> None:
    """Blocks begin at multiples of their size, wherever a stretch does: loads and stores stay wide but at its two ends."""
    first = (first_block + tl.program_id(0)) * size
    part = first + tl.arange(0, size)
    if asked is not None:
        factor = factor * tl.load(asked)
        end = tl.where(factor == factor, end, start)  # of nan: nothing
    # fmt: off
    if (first >= start) & (first + size <= end):
        _update_part(
            weights, low, m, v, gradient, out_weights, out_low, out_m, out_v, part, None, factor, decay, l2, coefficient, beta2,
            square_weight, root_correction, eps, negative_step_size, leans_on_old, has_l2,
        )
    else:
        _update_part(
            weights, low, m, v, gradient, out_weights, out_low, out_m, out_v, part, (part >= start) & (part < end), factor, decay,
            l2, coefficient, beta2, square_weight, root_correction, eps, negative_step_size, leans_on_old, has_l2,
        )
    # fmt: on


def _update_part(
    weights: pointer,
    low: pointer,
    m: pointer,
    v: pointer,
    gradient: pointer,
    out_weights: pointer,
    out_low: pointer,
    out_m: pointer,
    out_v: pointer,
    part: pointer,
    mask: pointer,
    factor: float32,
    decay: float32,
    l2: float32,
    coefficient: float32,
    beta2: float32,
    square_weight: float32,
    root_correction: float32,
    eps: float32,
    negative_step_size: float32,
    leans_on_old: constexpr,
    has_l2: constexpr,
) -> None:
    g = tl.load(gradient + part, mask).to(tl.float32) * factor
    p = tl.load(weights + part, mask)
    if low is not None:  # the rule of split.py
        p = (p.to(tl.int16, bitcast=True).to(tl.int32) << 16) + tl.load(low + part, mask).to(tl.int32)
        p = p.to(tl.float32, bitcast=True)
    old_m = tl.load(m + part, mask)
    old_v = tl.load(v + part, mask)
    if has_l2:
        g = tl.fma(p, l2, g)
    new_m = tl.fma(coefficient, g - old_m, old_m if leans_on_old else g)
    new_v = tl.fma(square_weight * g, g, old_v * beta2)
    denominator = tl.div_rn(tl.sqrt_rn(new_v), root_correction) + eps
    p = p * decay + tl.div_rn(negative_step_size * new_m, denominator)
    tl.store(out_m + part, new_m, mask)
    tl.store(out_v + part, new_v, mask)
    if low is None:
        tl.store(out_weights + part, p, mask)
    else:
        # A GPU's own nan is 0x7FFFFFFF: rounded up it would be a weight of -0.0, and nobody would see it
        bits = tl.where(p == p, p.to(tl.int32, bitcast=True), 0x7FC00000)
        tl.store(out_weights + part, ((bits + 0x8000) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True), mask)
        tl.store(out_low + part, bits.to(tl.int16), mask)


_kernel_lock = threading.Lock()
_kernels: list[Any] = []  # one entry, once it has been asked for


def _kernel() -> Any:
    with _kernel_lock:
        if not _kernels:
            triton, tl = importlib.import_module("triton"), importlib.import_module("triton.language")
            types = {"pointer": tl.tensor, "int64": tl.int64, "float32": tl.float32, "constexpr": tl.constexpr}
            globals().update(types, tl=tl, _update_part=triton.jit(_update_part))
            # an int that is 1 or a multiple of 16 would be compiled for by itself
            _kernels.append(triton.jit(_update, do_not_specialize=["first_block", "start", "end"]))
        return _kernels[0]


@functools.cache
def _works(gpu: int) -> bool:
    """Triton may be there without a compiler of its own, or be too new or too old for this GPU."""
    high, low, m, v, gradient = torch.zeros(5, BLOCK, device=f"cuda:{gpu}").unbind()
    state = State(high.bfloat16(), low.short(), m, v)
    try:
        for scale in (None, gradient[0]):
            adamw_on_gpu(state, gradient.bfloat16(), Settings(lr=1.0), 1, scale=scale)
    except Exception as why:
        line = f"anyfit: Triton's kernels do not run on cuda:{gpu} ({why}); the update there takes torch's own operations"
        print(line, file=sys.stderr, flush=True)
        return False
    return True
