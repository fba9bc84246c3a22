"""Tiers: the kinds of memory that state lies in, the ways between them and the device, and what a run holds of each.

`HostSlabs` takes host memory in large slabs and gives stretches of them. Those that are copied to or from a GPU are pinned, a
slab at a time: torch's own pinned allocator would round every request up to a power of two. Beside a GPU slabs lie in huge pages,
which several threads touch while the model is being placed: no step waits for them, and pinning is quick.

On a GPU torch's allocator knows what is held. On the CPU device a `LiveBytes` mode watches the storages of a step.
"""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.kernels.pages import in_huge_pages, nodes, show_to_children, touch
from anyfit.values.graph import PAGE_BYTES
from anyfit.values.plan import TierName
from anyfit.values.units import show_bytes

from .lanes import Label, Lanes, Ticket
from .stock import Stock

_cuda: Any = torch.cuda
Ranges = Iterable[tuple[int, int]]  # (start, end) in elements
After = Sequence[Ticket | None]
SLAB_BYTES = {True: 2**28, False: 2**24}  # beside a GPU, and elsewhere
LEAST_IN_A_SLAB = 16
PREPARERS = 8  # threads: one does not keep up with the memory
LEAST_DIVIDED_BYTES = 2**22  # of an array, over several nodes: some huge pages for each


class HostSlabs:
    """Zeros in host memory, `limit_bytes` in all; from `arena` where one is given: pinned bytes that nobody else uses; or from a
    `stock`, as long as that lasts."""

    def __init__(
        self, device: torch.device, limit_bytes: int | None = None, arena: Tensor | None = None, stock: Stock | None = None
    ) -> None:
        self._pins = device.type == "cuda"
        self._arena, self._limit, self._nodes = arena, limit_bytes, nodes()
        self._open: dict[bool, tuple[Tensor, int]] = {}  # pinned or not: the slab at hand, and how much of it is taken
        self._alive: weakref.WeakSet[torch.UntypedStorage] = weakref.WeakSet()  # slabs that somebody has something of
        self._stock = stock
        self._pinned: list[Tensor] = []
        self._preparing: list[Future[None]] = []
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(PREPARERS, "anyfit slabs") if self._pins else None
        self.bytes = 0  # given to others
        self._taking = threading.Lock()  # an optimizer makes state in its first step, on any lane

    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool) -> Tensor:
        """A flat tensor; one that `crosses` is copied to or from the device, and may be once `prepared` has returned."""
        size = -(-elements * dtype.itemsize // PAGE_BYTES) * PAGE_BYTES
        pinned = crosses and self._pins
        with self._taking:
            self._take(size)
            if self._is_apart(size):
                return self._new_slab(size, pinned)[: elements * dtype.itemsize].view(dtype)
            slab, taken = self._open.get(pinned, (None, 0))
            if slab is None or taken + size > slab.numel():
                slab, taken = self._new_slab(SLAB_BYTES[self._pins], pinned), 0
            self._open[pinned] = slab, taken + size
            return slab[taken : taken + elements * dtype.itemsize].view(dtype)

    def _is_apart(self, size: int) -> bool:
        """A few of these would leave much of a slab over; or nodes divide it, and a slab is divided as if it were one array."""
        is_divided = len(self._nodes) > 1 and size >= LEAST_DIVIDED_BYTES
        return is_divided or size * LEAST_IN_A_SLAB > SLAB_BYTES[self._pins]

    def has_room(self, size: int) -> bool:
        return self._limit is None or self.bytes + size <= self._limit

    def _take(self, size: int) -> None:
        if not self.has_room(size):
            raise MemoryError(
                f"the plan's host memory is {show_bytes(self._limit or 0)}, of which {show_bytes(self.bytes)} are taken, and "
                f"{show_bytes(size)} more are needed; allow more (host_memory=), or place less on the host"
            )
        self.bytes += size

    def hold_apart(self, size: int) -> None:
        """Counts memory that somebody else takes, and does not pin."""
        with self._taking:
            self._take(size)

    def give_back(self, size: int) -> None:
        """Counts it no more."""
        with self._taking:
            self.bytes -= size

    def prepared(self) -> None:
        """Waits until all memory is there, and pinned where it crosses. What is taken later is so at once."""
        if self._pool is not None:
            self._pool.shutdown()
            self._pool = None
        if self._stock is not None:
            self._stock.close()
        while self._preparing:
            self._preparing.pop().result()

    def _new_slab(self, size: int, pinned: bool) -> Tensor:
        if self._arena is not None:
            slab, self._arena = self._arena[:size], self._arena[size:]
            if slab.numel() < size:
                raise MemoryError(f"the arena has {show_bytes(slab.numel())} left, and {show_bytes(size)} are needed")
            return slab.zero_()
        taken = None if self._stock is None else self._stock.take(size)
        slab = in_huge_pages(size) if taken is None else taken
        self._alive.add(slab.untyped_storage())
        if pinned:
            self._pinned.append(slab)
        if self._pool is not None:
            self._preparing.append(self._pool.submit(self._prepare, slab, pinned))
        elif self._pins:
            self._prepare(slab, pinned)
        return slab

    def _prepare(self, slab: Tensor, pinned: bool) -> None:
        touch(slab, self._nodes)
        if not pinned:
            return
        error = int(_cuda.cudart().cudaHostRegister(slab.data_ptr(), slab.numel(), 0))
        if error:
            raise MemoryError(
                f"{show_bytes(slab.numel())} of host memory could not be pinned (CUDA error {error}), of "
                f"{show_bytes(sum(each.numel() for each in self._pinned))} in all; try: ulimit -l unlimited"
            )

    def close(self) -> None:
        """Unpins. What was given to others stays readable, for processes that they fork too."""
        with contextlib.suppress(MemoryError):  # which whoever prepared has met
            self.prepared()
        if self._pinned:
            _cuda.synchronize()
        while self._pinned:
            _cuda.cudart().cudaHostUnregister(self._pinned.pop().data_ptr())
        for slab in list(self._alive):
            show_to_children(slab)


class Tier(ABC):
    """Memory of one kind. Reads and writes are begun here, and a ticket says when they are done."""

    def __init__(self, lanes: Lanes) -> None:
        self._lanes = lanes

    @abstractmethod
    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        """A flat buffer; one that `crosses` is read or written, and not only used where it is."""

    def read(self, home: Callable[[], Tensor], into: Tensor, after: After, label: Label) -> Ticket:
        """From a buffer to the device. `home` is asked for when its turn comes: an update before it may have moved it."""
        lane = self._lanes.up

        def copy() -> None:
            lane.uses([into])
            into.copy_(home(), non_blocking=True)

        return lane.run(copy, after, label)

    def write(
        self, home: Tensor, source: Tensor, after: After, label: Label, ranges: Ranges | None = None, *, is_held: bool = False
    ) -> Ticket:
        """From the device to a buffer: all of it, or ranges of elements that both have at the same offsets. `is_held`: whoever
        asks keeps the source until the computation has waited for the ticket."""
        lane = self._lanes.down

        def copy() -> None:
            if not is_held:
                lane.uses([source])
            for start, end in ((0, source.numel()),) if ranges is None else ranges:
                home[start:end].copy_(source[start:end], non_blocking=True)

        return lane.run(copy, after, label)


class DeviceTier(Tier):
    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        return torch.zeros(elements, dtype=dtype, device=self._lanes.device)


class HostTier(Tier):
    def __init__(self, lanes: Lanes, slabs: HostSlabs) -> None:
        super().__init__(lanes)
        self._slabs = slabs

    def zeros(self, elements: int, dtype: torch.dtype, *, crosses: bool = True) -> Tensor:
        return self._slabs.zeros(elements, dtype, crosses=crosses)


Tiers = Mapping[TierName, Tier]


# What carriers have beside moments, which have the optimizer's own names: no key of its state is two words.
LOW, WEIGHTS, LANDED = "low halves", "new weights", "landed gradients"


class Scratch:
    """Buffers by name, for chunks that are updated one after another. They grow to the largest that is asked for, and stay."""

    def __init__(self, device: torch.device, room: Callable[[int], Tensor] | None = None) -> None:
        """`room` gives so many bytes; torch's own where there is none."""
        self.device = device
        self._room = room or (lambda size: torch.empty(size, dtype=torch.uint8, device=device))
        self._buffers: dict[str, Tensor] = {}
        self._places: dict[tuple[str, int, torch.dtype], dict[str, Tensor]] = {}

    def places(self, name: str, key: int, flat: Tensor, make: Callable[[Tensor], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Views that `make` makes of a buffer which `flat` has given: once, as each takes the host a few microseconds."""
        found = self._places.get((name, key, flat.dtype))
        if found is None:
            found = self._places[name, key, flat.dtype] = make(flat)
        return found

    def flat(self, name: str, elements: int, dtype: torch.dtype = torch.float32) -> Tensor:
        size = elements * dtype.itemsize
        if name not in self._buffers or self._buffers[name].numel() < size:
            self._buffers[name] = self._room(size)
            self._places = {key: each for key, each in self._places.items() if key[0] != name}
        return self._buffers[name][:size].view(dtype)

    @property
    def bytes(self) -> int:
        return sum(buffer.nbytes for buffer in list(self._buffers.values()))  # a lane may add one meanwhile


class LiveBytes(TorchDispatchMode):
    """Peak bytes of the storages that ops make while active. Above `limit_bytes`, `exceeded` is called with them, and raises."""

    def __init__(self, limit_bytes: float = float("inf"), exceeded: Callable[[int], None] = lambda _bytes: None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.peak_bytes = 0
        self._limit, self._exceeded = limit_bytes, exceeded
        self._now = 0
        self._known: dict[int, weakref.ref[Any]] = {}

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """The user's compiled blocks stay compiled while it watches: torch would otherwise give them up for good."""
        return True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        there = set()
        for tensor in pytree.tree_leaves((args, kwargs)):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:
                there.add(tensor.untyped_storage()._cdata)
        result = func(*args, **kwargs)
        for tensor in pytree.tree_leaves(result):
            if isinstance(tensor, Tensor) and tensor.layout == torch.strided:  # of a sparse one its parts are seen
                storage = tensor.untyped_storage()
                if storage._cdata not in there and storage._cdata not in self._known:
                    self._watch(storage)
        return result

    def count(self, tensor: Tensor) -> None:
        """Memory that was made where no mode looks."""
        self._watch(tensor.untyped_storage())

    def _watch(self, storage: Any) -> None:
        identity, size = storage._cdata, storage.nbytes()

        def forget(_reference: Any) -> None:
            self._known.pop(identity, None)
            self._now -= size

        self._known[identity] = weakref.ref(storage, forget)
        self._now += size
        self.peak_bytes = max(self.peak_bytes, self._now)
        if self._now > self._limit:
            self._exceeded(self._now)


def let_segments_grow() -> None:
    """Lets torch's allocator remap free memory instead of keeping it for one size. The user's own settings are left alone."""
    if not any(os.environ.get(name) for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


def peak_bytes_of_gpu(device: torch.device) -> int:
    return torch.cuda.max_memory_allocated(device)
