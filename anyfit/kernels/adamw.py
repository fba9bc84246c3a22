"""Adam and AdamW on the CPU: one pass over a flat chunk whose masters are split (see split.py) or plain fp32.

For each element, in fp32, with the scalars computed in float64 and rounded once, as torch's single-tensor AdamW does:

    g = gradient * scale            (-g to maximize)
    p = p * (1 - lr * weight_decay)                     decoupled: AdamW
    g = g + weight_decay * p                            otherwise: Adam
    m = m + (1 - beta1) * (g - m)
    v = beta2 * v + (1 - beta2) * g * g
    p = p - lr / (1 - beta1^step) * m / (sqrt(v) / sqrt(1 - beta2^step) + eps)

`adamw` runs it in C++ (adamw.cpp) on threads of its own, without Python's lock: 26 bytes of memory traffic a parameter with
bf16 gradients. Masters and moments can be updated one after the other, with 18 bytes each: where masters are waited for and the
host has nothing to do later. `adamw_in_torch` is the same in plain torch: what the kernel is tested against, and what runs where
it cannot be built. Both give the bits that torch.optim.AdamW(foreach=False) gives on the same machine.
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Literal, get_args

import torch
from torch import Tensor

from .native import NotBuilt, library
from .pages import Nodes, nodes
from .split import merge, split

SLICE_ELEMENTS = 2**18  # of the twin: its scratch stays in the cache
CACHE_LINE_BYTES = 64
VECTORS = {"AVX2": 1, "AVX512": 2}  # what torch calls them; with anything else on x86 it has no fused multiply-add
NEAREST, NEWTONS, TORCHS = range(3)  # kinds of square roots: which torch takes, depends on its build and on the processor


@dataclass(frozen=True)
class Settings:
    """Of a parameter group, as torch names them. `decoupled`: AdamW's weight decay, not Adam's."""

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    decoupled: bool = True
    maximize: bool = False


@dataclass(frozen=True)
class State:
    """One generation of a chunk: flat contiguous tensors of the same number of elements."""

    weights: Tensor  # bf16 with `low` (the high halves), or fp32 without
    low: Tensor | None  # int16
    m: Tensor  # fp32: torch's exp_avg
    v: Tensor  # fp32: torch's exp_avg_sq

    @property
    def tensors(self) -> list[Tensor]:
        return self.of("all")

    def of(self, part: Part) -> list[Tensor]:
        masters = [] if part == "moments" else [self.weights, self.low]
        moments = [] if part == "masters" else [self.m, self.v]
        return [tensor for tensor in (*masters, *moments) if tensor is not None]


Ranges = Sequence[tuple[int, int]]
Part = Literal["all", "masters", "moments"]


def adamw(
    state: State,
    gradient: Tensor,
    settings: Settings,
    step: int,
    *,
    out: State | None = None,
    scale: float | None = None,
    ranges: Ranges | None = None,
    part: Part = "all",
    threads: int = 1,
    as_on_gpu: bool = False,
    waits: bool = True,
) -> Begun | None:
    """One update of a chunk, in place, or from `state` into `out`.

    gradient   bf16 or fp32, flat, as long as the chunk
    step       the count after this update: 1 in the first. Where parameters of a chunk have counts of their own, each count is
               a call with its `ranges`: the first into `out`, the others on `out` in place
    out        where the new state goes; each of its tensors is the same as in `state`, or shares no memory with any other.
               What lies outside the ranges is copied
    scale      a factor of the gradient, applied in fp32 before anything else
    ranges     (start, end) in elements, ascending and disjoint: what is updated. All when not given
    part       what of the state: where `can_be_parted` says so, first the masters and then the moments come to the same as all
    threads    how many share the work, the calling one included; the n-th always begins with the n-th stretch of the chunk. On
               several nodes of memory the calling one only waits. Plain torch has its own number
    as_on_gpu  the bits of adamw_gpu.py, where `can_be_as_on_gpu`: square roots to the nearest float, and not this processor's
    waits      until it is done. Without, it begins after those that were begun before, on threads that do not rest between
               the two, and what is returned says when it is over; None where it is

    Written behind autograd's back: it does not see that these tensors have changed.
    """
    job = _Job(state, gradient, settings, step, out or state, 1.0 if scale is None else scale, ranges, part, threads, as_on_gpu)
    run = _kernel()
    if run is None:
        _in_torch(job)
        return None
    return run(job, waits=waits)


def adamw_in_torch(
    state: State,
    gradient: Tensor,
    settings: Settings,
    step: int,
    *,
    out: State | None = None,
    scale: float | None = None,
    ranges: Ranges | None = None,
    part: Part = "all",
    threads: int = 1,
) -> None:
    """The same as `adamw` in plain torch, on torch's own threads."""
    _in_torch(_Job(state, gradient, settings, step, out or state, 1.0 if scale is None else scale, ranges, part, threads))


def can_be_parted(settings: Settings) -> bool:
    """Moments do not need the masters of before."""
    return settings.decoupled or settings.weight_decay == 0


def is_native() -> bool:
    """Whether `adamw` runs in C++ here. Builds the kernel if that has not been tried: a few seconds, once."""
    return _kernel() is not None


def compiled() -> ctypes.CDLL:
    """adamw.cpp, where it `is_native`: one library, one pool of threads."""
    kernel = _kernel()
    assert kernel is not None
    return kernel.library


def can_be_as_on_gpu() -> bool:
    """Whether `as_on_gpu` gives the bits of a GPU here: with C++, on a processor with fused multiply-adds."""
    kernel = _kernel()
    return kernel is not None and kernel.vectors > 0


@dataclass(frozen=True)
class _Job:
    """An update that is known to touch nothing but its own elements."""

    state: State
    gradient: Tensor
    settings: Settings
    step: int
    out: State
    scale: float = 1.0
    ranges: Ranges | None = None
    part: Part = "all"
    threads: int = 1
    as_on_gpu: bool = False

    def __post_init__(self) -> None:
        refuse_unfit(self.state, self.out, self.gradient, self.step, torch.device("cpu"))
        elements, bounds = self.state.weights.numel(), list(chain.from_iterable(self.stretches))
        if bounds and (bounds[0] < 0 or bounds[-1] > elements or any(before > after for before, after in pairwise(bounds))):
            raise ValueError(f"ranges must be ascending, disjoint and within 0 to {elements}: {self.ranges}")
        if self.threads < 1:
            raise ValueError(f"threads={self.threads}: at least 1")
        if self.part != "all" and not can_be_parted(self.settings):
            decay = self.settings.weight_decay
            raise ValueError(f"part={self.part!r}: Adam's weight decay of {decay} needs masters and moments at once")

    @property
    def stretches(self) -> Ranges:
        return [(0, self.state.weights.numel())] if self.ranges is None else self.ranges

    @property
    def step_size(self) -> float:
        return self.settings.lr / (1 - self.settings.beta1**self.step)

    @property
    def root_correction(self) -> float:
        return float((1 - self.settings.beta2**self.step) ** 0.5)


def refuse_unfit(state: State, out: State, gradient: Tensor, step: int, device: torch.device) -> None:
    """Raises unless all are flat on this device and share no memory, but for arrays of `out` that are those of `state`."""
    elements = state.weights.numel()
    for which in (state,) if out is state else (state, out):
        _check("weights", which.weights, elements, device, torch.float32 if which.low is None else torch.bfloat16)
        if which.low is not None:
            _check("low", which.low, elements, device, torch.int16)
        _check("m", which.m, elements, device, torch.float32)
        _check("v", which.v, elements, device, torch.float32)
    if (state.low is None) != (out.low is None):
        raise ValueError("the masters of state and out must both be split (bf16 weights with low), or both be fp32")
    _check("gradient", gradient, elements, device, torch.bfloat16, torch.float32)
    moved = [new for old, new in zip(state.tensors, out.tensors, strict=True) if new.data_ptr() != old.data_ptr()]
    spans = [(each.data_ptr(), each.data_ptr() + each.nbytes) for each in (*state.tensors, *moved, gradient)]
    if any(one[0] < other[1] and other[0] < one[1] for one, other in combinations(spans, 2)):
        raise ValueError("two of the chunk's tensors share memory; only a tensor of out may be the same as its own in state")
    if step < 1:
        raise ValueError(f"step={step}: it counts from 1")


def _check(name: str, tensor: Tensor, elements: int, device: torch.device, *dtypes: torch.dtype) -> None:
    is_flat = tensor.shape == (elements,) and tensor.layout == torch.strided and tensor.is_contiguous()
    if tensor.dtype not in dtypes or tensor.device != device or not is_flat:
        wanted = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise ValueError(
            f"{name} must be a flat contiguous tensor of {elements} {wanted} on {device}, as the chunk's weights say; it is "
            f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
        )


class _Update(ctypes.Structure):
    """adamw.cpp's `Update`, field by field."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "low", "m", "v", "gradient")),
        *((name, ctypes.c_void_p) for name in ("out_weights", "out_low", "out_m", "out_v", "ranges")),
        *((name, ctypes.c_int64) for name in ("range_count", "elements")),
        *((name, ctypes.c_int32) for name in ("gradient_is_bf16", "vectors", "roots", "streams", "part", "threads")),
        *((name, ctypes.c_float) for name in ("scale", "decay", "l2", "lerp_weight", "beta2", "square_weight")),
        *((name, ctypes.c_float) for name in ("root_correction", "eps", "negative_step_size")),
    )


class _Kernel:
    def __init__(self) -> None:
        self.library = library(Path(__file__).with_name("adamw.cpp"))
        self.use(nodes())
        self._run, self._begin = self.library.anyfit_adamw, self.library.anyfit_adamw_begin
        self._run.argtypes, self._run.restype = [ctypes.POINTER(_Update)], None
        self._begin.argtypes, self._begin.restype = [ctypes.POINTER(_Update)], ctypes.c_void_p
        self.library.anyfit_is_over.argtypes = self.library.anyfit_forget.argtypes = [ctypes.c_void_p]
        self.library.anyfit_wait.argtypes = [ctypes.c_void_p, ctypes.POINTER(ctypes.c_double)]
        self.vectors = VECTORS.get(torch.backends.cpu.get_cpu_capability(), 0)
        self.kinds_of_roots = [NEAREST, NEWTONS, TORCHS] if self._knows_torchs_roots() else [NEAREST, NEWTONS]
        # Where torch's are of no kind that is known, at least the nearest: one ulp beside torch's at times.
        self.roots = next(filter(self._are_torchs, self.kinds_of_roots), NEAREST)

    def use(self, known: Nodes) -> None:
        """Threads are divided over these nodes, and bound to them where there are several. While nothing is being updated."""
        processors, counts = list(chain.from_iterable(known)), [len(each) for each in known]
        as_c = (ctypes.c_int32 * len(processors))(*processors), (ctypes.c_int32 * len(counts))(*counts)
        self.library.anyfit_use_nodes(*as_c, ctypes.c_int32(len(counts)))

    def _knows_torchs_roots(self) -> bool:
        """Where torch has MKL, it is in the same library."""
        try:
            found = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).vmsSqrt_64
        except (OSError, AttributeError):
            return False
        self.library.anyfit_use_roots(found)
        return True

    def _are_torchs(self, kind: int) -> bool:
        """Tried on updates that show each square root: of 16384 some hundred differ between any two kinds."""
        self.roots = kind
        squares = torch.linspace(1, 4, 2**14)
        kernels, twins = (State(torch.zeros_like(squares), None, torch.ones_like(squares), squares.clone()) for _ in range(2))
        settings, gradient = Settings(lr=1.0, eps=0.0), torch.zeros_like(squares)
        self(_Job(kernels, gradient, settings, 1, kernels))
        _in_torch(_Job(twins, gradient, settings, 1, twins))
        return torch.equal(kernels.weights, twins.weights)

    def __call__(self, job: _Job, *, waits: bool = True) -> Begun | None:
        state, out, settings = job.state, job.out, job.settings
        decoupled, stretches = settings.decoupled, job.stretches
        addresses = [(new.data_ptr(), old.data_ptr()) for new, old in zip(out.tensors, state.tensors, strict=True)]
        ranges = (ctypes.c_int64 * (2 * len(stretches)))(*map(int, chain.from_iterable(stretches)))
        update = _Update(
            **{name: getattr(state, name).data_ptr() for name in ("weights", "m", "v")},
            **{f"out_{name}": getattr(out, name).data_ptr() for name in ("weights", "m", "v")},
            low=None if state.low is None else state.low.data_ptr(),
            out_low=None if out.low is None else out.low.data_ptr(),
            gradient=job.gradient.data_ptr(),
            ranges=ctypes.addressof(ranges),
            range_count=len(stretches),
            elements=state.weights.numel(),
            gradient_is_bf16=job.gradient.dtype == torch.bfloat16,
            vectors=self.vectors,
            roots=NEAREST if job.as_on_gpu else self.roots,
            streams=all(new != old and new % CACHE_LINE_BYTES == 0 for new, old in addresses),
            part=get_args(Part).index(job.part),
            threads=min(job.threads, 2**16),
            scale=-job.scale if settings.maximize else job.scale,
            decay=1 - settings.lr * settings.weight_decay if decoupled else 1.0,
            l2=0.0 if decoupled else settings.weight_decay,
            lerp_weight=1 - settings.beta1,
            beta2=settings.beta2,
            square_weight=1 - settings.beta2,
            root_correction=job.root_correction,
            eps=settings.eps,
            negative_step_size=-job.step_size,
        )
        if waits:
            self._run(update)
            return None
        return Begun(self.library, self._begin(update), (job, ranges))


class Begun:
    """An update that the kernel's threads have begun, or will when they come to it. It is waited for as an event of a GPU is."""

    def __init__(self, library: ctypes.CDLL, handle: int, held: object) -> None:
        self._library, self._handle = library, handle
        self._held: object = held  # whatever the threads read and write
        self._lock = threading.Lock()
        self._times = (ctypes.c_double * 2)()
        self._is_known = False
        self._process, self._now_in = os.getpid(), os.getpid  # which outlives this module when Python ends
        self._then: Callable[[tuple[float, float]], None] | None = None

    def then(self, call: Callable[[tuple[float, float]], None]) -> None:
        """To be told, by whoever first waits for it, when it began and ended."""
        self._then = call

    def synchronize(self) -> None:
        self._library.anyfit_wait(self._handle, self._times)
        with self._lock:
            if not self._is_known:
                self._is_known, self._held = True, None
                if self._then is not None:
                    self._then((self._times[0], self._times[1]))

    def query(self) -> bool:
        return bool(self._library.anyfit_is_over(self._handle))

    def __del__(self) -> None:
        if self._process != self._now_in():  # a forked child, which has none of the threads
            return
        self.synchronize()
        self._library.anyfit_forget(self._handle)


_kernel_lock = threading.Lock()
_kernels: list[_Kernel | None] = []  # one entry, once it has been tried


def _kernel() -> _Kernel | None:
    with _kernel_lock:
        if not _kernels:
            try:
                _kernels.append(_Kernel())
            except NotBuilt as why:
                _kernels.append(None)
                line = f"anyfit: {why}; the CPU update runs in plain torch, several times slower. Installing g++ makes it fast"
                print(line, file=sys.stderr, flush=True)
        return _kernels[0]


@torch.no_grad()
def _in_torch(job: _Job) -> None:
    for new, old in zip(job.out.of(job.part), job.state.of(job.part), strict=True):
        if new.data_ptr() != old.data_ptr():
            new.copy_(old)
    for start, end in job.stretches:
        for first in range(start, end, SLICE_ELEMENTS):
            _slice_in_torch(job, slice(first, min(first + SLICE_ELEMENTS, end)))


def _slice_in_torch(job: _Job, part: slice) -> None:
    """Updates a part of `out` in place; the operations are those of torch.optim.adam._single_tensor_adam."""
    settings = job.settings
    weights, m, v = job.out.weights[part], job.out.m[part], job.out.v[part]
    if job.part == "masters":
        m, v = job.state.m[part].clone(), job.state.v[part].clone()
    low = None if job.out.low is None else job.out.low[part]
    master = weights
    if low is not None:
        master = torch.empty_like(m)
        merge(weights, low, master)
    gradient = job.gradient[part].float()
    if job.scale != 1:
        gradient = gradient * job.scale
    if settings.maximize:
        gradient = -gradient
    if settings.weight_decay != 0:
        if settings.decoupled:
            if job.part != "moments":
                master.mul_(1 - settings.lr * settings.weight_decay)
        else:
            gradient = gradient.add(master, alpha=settings.weight_decay)
    m.lerp_(gradient, 1 - settings.beta1)
    v.mul_(settings.beta2).addcmul_(gradient, gradient, value=1 - settings.beta2)
    if job.part == "moments":
        return
    denominator = (v.sqrt() / job.root_correction).add_(settings.eps)
    master.addcdiv_(m, denominator, value=-job.step_size)
    if low is not None:
        split(master, weights, low)
