"""What the ranks of a pipeline send each other: parcels of tensors.

A rank sends as its passes end, and does not wait for that. What it has sent is held until the other rank says, with whatever that
one sends next, how much it has received; or until the end of the step. It receives when it needs something, from one rank in the
order of sending; what comes before that is kept until it is asked for. So no rank waits with a send for another's computation,
and a wire may be one whose sends end only when they are received, and that knows no tags, as NCCL's.

A parcel is a few numbers, then a header (shapes ahead of tensors) where that was not sent before on this wire, then the tensors.
A rank that fails sends word of it on all wires, after what it has sent already.
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from anyfit.values.schedule import Pass, rank_of

PASSES: tuple[Pass, ...] = ("forward", "backward")
FAILED = len(PASSES)  # in the place of a pass


class LostError(RuntimeError):
    """Another rank of the pipeline has failed, or is gone."""


class Wire(Protocol):
    """Between the ranks of a pipeline, by their place in it. What one sends to another arrives in the order of sending."""

    def send(self, tensor: Tensor, to: int) -> Callable[[], object]:
        """Begins to; what comes back waits until it is received. The tensor is not changed meanwhile."""

    def receive(self, into: Tensor, source: int) -> None: ...


class Key(NamedTuple):
    of: Pass
    source: int  # stage
    to: int
    micro_batch: int


@dataclass(frozen=True, eq=False)
class Parcel:
    key: Key
    tensors: tuple[Tensor | None, ...]
    word: Any = None  # that pickles


class Going(NamedTuple):
    parcel: int  # its number on the way to that rank
    tensor: Tensor
    wait: Callable[[], object]


class Post:
    """One rank's."""

    def __init__(self, rank: int, ranks: int, wire: Wire) -> None:
        self._rank, self._ranks, self._wire = rank, ranks, wire
        self._others = [each for each in range(ranks) if each != rank]
        # Headers that went over a wire, by the number under which they are known at both ends.
        self._sent: dict[int, dict[bytes, int]] = {each: {} for each in self._others}
        self._received: dict[int, list[bytes]] = {each: [] for each in self._others}
        self._inbox: dict[Key, Parcel] = {}
        self._going: dict[int, deque[Going]] = {each: deque() for each in self._others}  # by rank, the first first
        self._given = dict.fromkeys(self._others, 0)  # parcels, so far
        self._taken = dict.fromkeys(self._others, 0)
        self._error: LostError | None = None
        self.waits = ""  # what the computation waits for

    def give(self, parcel: Parcel, to: int) -> None:
        self._raise_lost()
        if to == self._rank:
            self._inbox[parcel.key] = parcel
            return
        self._given[to] += 1
        key, known = parcel.key, self._sent[to]
        header = pickle.dumps((parcel.word, [None if each is None else _form(each) for each in parcel.tensors]))
        is_new = header not in known
        number = known.setdefault(header, len(known))
        length = len(header) if is_new else 0
        self._send(torch.tensor([PASSES.index(key.of), *key[1:], number, length, self._taken[to]]), to)
        if is_new:
            self._send(_bytes(header), to)
        for each in parcel.tensors:
            if each is not None and each.numel():
                self._send(_flat(each), to)

    def take(self, key: Key) -> Parcel:
        """Waits until it is there."""
        source = rank_of(key.source, self._ranks)
        while key not in self._inbox:
            self._raise_lost()
            self.waits = f"the {key.of} of micro-batch {key.micro_batch} by stage {key.source} of the pipeline"
            try:
                parcel = self._receive(source)
            except Exception as error:
                if not isinstance(error, LostError):
                    lost = LostError(f"rank {source} of the pipeline is gone ({' '.join(str(error).split()):.200})")
                    lost.__cause__ = error
                    error = lost
                self._error = error
                raise error from error.__cause__
            self._inbox[parcel.key] = parcel
        self.waits = ""
        return self._inbox.pop(key)

    def finish(self) -> None:
        """Waits until all that was given is received."""
        self._raise_lost()
        for each in self._others:
            self._let_go(each, self._given[each])

    def fail(self, error: BaseException) -> None:
        """Tells all others, in place of what they wait for."""
        told = f"{type(error).__name__}: {error}".encode()[:4096]
        if self._error is None:
            self._error = LostError(f"this rank has failed before: {told.decode(errors='replace')}")
        for each in self._others:
            self._send(torch.tensor([FAILED, 0, 0, 0, 0, len(told), 0]), each)
            self._send(_bytes(told), each)

    def _send(self, tensor: Tensor, to: int) -> None:
        self._going[to].append(Going(self._given[to], tensor, self._wire.send(tensor, to)))

    def _let_go(self, to: int, parcels: int) -> None:
        """Of so many, which have been received."""
        going = self._going[to]
        while going and going[0].parcel <= parcels:
            going.popleft().wait()

    def _receive(self, source: int) -> Parcel:
        first = torch.empty(7, dtype=torch.int64)
        self._wire.receive(first, source)
        of, stage, to, micro_batch, number, length, received = first.tolist()
        self._let_go(source, received)
        headers = self._received[source]
        if length:
            told = torch.empty(length, dtype=torch.uint8)
            self._wire.receive(told, source)
            headers.append(told.numpy().tobytes())
        if of == FAILED:
            raise LostError(f"rank {source} of the pipeline has failed: {headers[-1].decode(errors='replace')}")
        word, forms = pickle.loads(headers[number])
        tensors: list[Tensor | None] = []
        for form in forms:
            tensors.append(made := None if form is None else torch.empty_strided(form[0], form[1], dtype=form[2]))
            if made is not None and made.numel():
                self._wire.receive(_flat(made), source)
        self._taken[source] += 1
        return Parcel(Key(PASSES[of], stage, to, micro_batch), tuple(tensors), word)

    def _raise_lost(self) -> None:
        if self._error is not None:
            raise LostError(str(self._error)) from self._error


def packed(tensors: Sequence[Tensor | None]) -> tuple[Tensor | None, ...]:
    """On the host, each in one piece of memory, for a parcel."""
    return tuple(None if each is None else _packed(each.detach()) for each in tensors)


def _packed(tensor: Tensor) -> Tensor:
    on_host = tensor.cpu()
    return on_host if _is_in_one_piece(on_host) else on_host.contiguous()


def _is_in_one_piece(tensor: Tensor) -> bool:
    """Without gaps or overlaps, in whatever order its dimensions are."""
    expected = 1
    for stride, size in sorted((stride, size) for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1):
        if stride != expected:
            return False
        expected *= size
    return True


def _flat(tensor: Tensor) -> Tensor:
    """Its bytes, as they lie."""
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def _form(tensor: Tensor) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype


def _bytes(told: bytes) -> Tensor:
    return torch.frombuffer(bytearray(told), dtype=torch.uint8)
