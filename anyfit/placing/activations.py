"""What a block's forward leaves for its backward: kept, recomputed, recomputed in part, or moved to the host and back.

`recompute.py` has the recomputation. An offloaded block's saved tensors go down as they are saved, by storage, so that views stay
views; when backward comes to a block, the saved tensors of the one before it start to come back.

The computation runs no further ahead of these copies than the plan has room for: a block begins when the one before the last is
on the host. Until then its memory is held, and is the computation's again in the order of its own stream. So the peak does not
depend on how fast copies are, nor on how far the host is ahead of the device.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.values.engine import OFFLOADED_AT_ONCE
from anyfit.values.graph import LEAST_OFFLOAD_BYTES
from anyfit.values.plan import Activations as Choice
from anyfit.values.record import nearest

from .chunks import quietly
from .gradients import Gradients
from .lanes import Label, Lanes, Task, Ticket
from .recompute import Recomputed, own_forward, stand_in
from .replayed import ReplayedBlocks
from .residency import Residency
from .slots import Saved
from .tiers import Tier

LEAST_BYTES = LEAST_OFFLOAD_BYTES


@dataclass(eq=False)
class Away:
    """A storage that went to the host."""

    block: Block
    nbytes: int
    host: Tensor
    down: Ticket
    back: Tensor | None = None  # bytes, on the device again
    up: Ticket | None = None
    views: int = 0  # saved tensors that still refer to it
    uses: list[Ticket] = field(default_factory=list)  # of the host's buffer: the last
    alive: Any = None  # calls back when the storage on the device dies


@dataclass(eq=False)
class Block:
    """One pass of one micro-batch through one offloaded block."""

    name: str
    before: Block | None
    storages: weakref.WeakSet[Away] = field(default_factory=weakref.WeakSet)  # the graph keeps them: without it they go at once
    going: list[tuple[Ticket, Tensor]] = field(default_factory=list)  # to the host, and the memory that is read


class Activations:
    def __init__(
        self,
        model: nn.Module,
        choices: Mapping[str, Choice],
        lanes: Lanes,
        host: Tier,
        residency: Residency,
        gradients: Gradients,
        to_replay: Collection[str] = (),
    ) -> None:
        self._lanes, self._host, self._residency, self._to_replay = lanes, host, residency, to_replay
        self.replayed = ReplayedBlocks(residency, lanes.device, gradients)
        self._undo: list[Callable[[], None]] = []
        self._inside: Block | None = None  # the offloaded block that forward is in
        self._last: Block | None = None
        self._known: dict[int, Away] = {}  # by storage, of the block that forward is in
        self._going: deque[Block] = deque()  # to the host, the first first
        self._watching = False
        self._spare: dict[int, list[tuple[Tensor, list[Ticket]]]] = {}  # host buffers by size, free after the last ticket
        with quietly():
            self._kept_out = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        modules = dict(model.named_modules())
        self.own_forwards: dict[str, Callable[..., Any]] = {}  # of blocks that another stands in for
        kept: dict[str, Choice] = dict.fromkeys(to_replay, "keep")
        for name, choice in (kept | dict(choices)).items():
            if name not in modules:
                raise ValueError(f"the plan names block {name!r}, and the model has none" + nearest(name, list(modules)))
            if choice != "keep" or name in to_replay:
                self.own_forwards[name] = own_forward(modules[name])
                self._undo.append(stand_in(modules[name], self._forward_of(name, modules[name], choice)))

    def _forward_of(self, name: str, module: nn.Module, choice: Choice) -> Callable[..., Any]:
        if choice == "offload":
            return functools.partial(self._offloaded, name, module.forward)
        if choice == "keep":
            return self.replayed.add(name, module)
        residency, is_selective = self._residency, choice == "selective"
        made = Recomputed(name, module, self._lanes.device, residency.pack, residency.unpack, selective=is_selective)
        return self.replayed.add(name, module, made) if name in self._to_replay else made

    def _offloaded(self, name: str, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled() or not self._watching:
            return forward(*args, **kwargs)
        around, self._inside = self._inside, Block(name, self._last)
        self._known = {}
        self._wait_for_all_but(OFFLOADED_AT_ONCE - 1)
        self._going.append(self._inside)
        try:
            with torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
                return forward(*args, **kwargs)
        finally:
            self._last, self._inside = self._inside, around
            self._known = {}

    def _wait_for_all_but(self, most: int) -> None:
        """The computation waits until no more than so many blocks are on their way to the host."""
        while len(self._going) > most:
            block = self._going.popleft()
            for ticket, _memory in block.going:
                self._lanes.hold_computation(ticket)
            block.going.clear()

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Around a forward: the chain of offloaded blocks begins anew."""
        self._wait_for_all_but(0)
        self._last, self._watching = None, True
        try:
            yield
        finally:
            self._last, self._watching = None, False

    def _pack(self, tensor: Tensor) -> Any:
        packed = self._residency.pack(tensor)
        if not isinstance(packed, Tensor) or self._inside is None or tensor.layout != torch.strided or tensor.is_nested:
            return packed
        with quietly(), torch.no_grad():
            storage = tensor.untyped_storage()
            if storage.nbytes() < LEAST_BYTES or tensor.device != self._lanes.device:
                return packed
            if storage._cdata in self._kept_out or isinstance(tensor, nn.Parameter):  # a weight
                return packed
            away = self._known.get(storage._cdata)
            if away is None:
                known, identity = self._known, storage._cdata
                known[identity] = away = self._send(tensor, self._inside)
                # Only for as long as the storage lives: its identity may be another's afterwards.
                away.alive = weakref.ref(storage, lambda _reference: known.pop(identity, None))
            away.views += 1
            return Saved.of(away, tensor)

    def _send(self, tensor: Tensor, block: Block) -> Away:
        whole = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(tensor.untyped_storage())
        spare = self._spare.setdefault(whole.numel(), [])
        host, used = spare.pop(0) if spare else (self._host.zeros(whole.numel(), torch.uint8), [])
        label = Label(Task.OFFLOAD, name=block.name)
        down = self._host.write(host, whole, (self._lanes.so_far(), *used), label, is_held=True)
        block.going.append((down, whole))
        away = Away(block, whole.numel(), host, down, uses=[down])
        weakref.finalize(away, spare.append, (host, away.uses))  # when backward is through, or its graph is dropped
        block.storages.add(away)
        return away

    def _fetch(self, away: Away) -> None:
        if away.back is None:
            away.back = back = torch.empty(away.nbytes, dtype=torch.uint8, device=self._lanes.device)
            host, after = away.host, (self._lanes.so_far(), away.down)
            away.up = self._host.read(lambda: host, back, after, Label(Task.RETURN, name=away.block.name))
            away.uses[:] = [away.up]

    def _unpack(self, packed: Any) -> Tensor:
        if not isinstance(packed, Saved) or not isinstance(packed.where, Away):
            return self._residency.unpack(packed)
        away = packed.where
        with torch.no_grad():
            self._wait_for_all_but(0)
            before = away.block.before
            for each in (away, *away.block.storages, *(before.storages if before is not None else ())):
                self._fetch(each)
            self._lanes.hold_computation(away.up)
            away.up = None
            assert away.back is not None
            view = packed.view(away.back)
            away.views -= 1
            if away.views <= 0:  # the last that asks: the view alone keeps it. A second backward would fetch it again
                away.block.storages.discard(away)
                away.back = None
            return view

    def close(self) -> None:
        for undo in self._undo:
            undo()
        self._undo.clear()
        self.replayed.close()
