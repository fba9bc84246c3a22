"""Residency: weights that live on the host are on the device when an op needs them, and at no other time.

Parameters of such chunks are made `Watched`: torch calls their `__torch_function__` before any op that takes them, whoever
wrote that op, so a chunk is fetched at op precision and nothing has to be known about modules. What autograd saves for
backward is not kept but written down as (chunk, offset, shape, stride); backward fetches the chunk again.

The order in which one step touches chunks is the forecast for the next: chunks are fetched ahead of it, and the one whose next
use is furthest away makes room. A step that differs fetches on demand. A slot is overwritten only when nobody holds a view of
it (its storage's use count says) and after all that the computation was given so far.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes

from .chunks import ChunkState, ModelState, quietly
from .edits import Lent, Versions, take_over
from .lanes import Lanes, Ticket

_Tensor: Any = torch.Tensor  # whose properties are typed as what they give
LOOK_AHEAD = 64  # touches in which a step that left the forecast order is looked for again


class Watched(nn.Parameter):
    """A parameter that tells its residency when it is used."""

    anyfit: tuple[Residency, str, int]  # whose it is, its name, its chunk

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with quietly():
            if func in FACTS:
                return func(*args, **kwargs)
            watched = [item for item in _leaves((args, kwargs)) if isinstance(item, Watched) and hasattr(item, "anyfit")]
            if not watched:  # a copy the user made
                return func(*args, **kwargs)
            return watched[0].anyfit[0].call(func, args, kwargs, watched)


def watched_kind(kind: type[nn.Parameter]) -> type[Watched]:
    """A parameter of the user's own class keeps what that class has."""
    return Watched if kind is nn.Parameter else type(kind.__name__, (Watched, kind), {})


def _properties(*names: str) -> set[Any]:
    return {getattr(torch.Tensor, name).__get__ for name in names if hasattr(torch.Tensor, name)}


# What may be asked of a parameter that is not there.
FACTS = _properties(
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "itemsize", "nbytes", "names", "output_nr", "retains_grad", "is_cpu", "is_xpu", "is_mps",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base",
) | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.register_hook, torch.Tensor.__len__,
    torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.requires_grad_, torch.Tensor.__hash__,
    _Tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.is_pinned,
    torch.Tensor.get_device, torch.Tensor.ndimension, torch.Tensor.__dir__,
}  # fmt: skip
READ_GRADIENT, SET_GRADIENT, SET_DATA = _Tensor.grad.__get__, _Tensor.grad.__set__, _Tensor.data.__set__
LENDS = {_Tensor.data.__get__, torch.Tensor.detach, torch.detach}


def _leaves(nest: Any) -> Iterator[Any]:
    for item in nest:
        if isinstance(item, tuple | list):
            yield from _leaves(item)
        elif isinstance(item, dict):
            yield from _leaves(item.values())
        else:
            yield item


def _untransformed() -> contextlib.AbstractContextManager[Any]:
    """Inside, no transform of torch.func is at work: what it would make of a weight is gone when the transform is."""
    if torch._C._functorch.peek_interpreter_stack() is None:
        return contextlib.nullcontext()
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    return temporarily_clear_interpreter_stack()


def _outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Inside, views of weights are made that serve after the user's inference mode too."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()


def uses_of(tensor: Tensor) -> int:
    """How many tensors hold its memory."""
    return int(torch._C._storage_Use_Count(tensor.untyped_storage()._cdata))


def _writes_list(func: Any, args: Sequence[Any]) -> bool:
    """Whether it writes into a list of tensors, as torch._foreach_mul_ does: under a dispatch mode torch does not count that."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_") and bool(args) and isinstance(args[0], list | tuple)


class DeviceSlot:
    """A device buffer that weights of any chunk on the host can pass through. Its storage is its own."""

    def __init__(self, size: int, device: torch.device) -> None:
        self.flat = torch.empty(size, dtype=torch.uint8, device=device)
        self.storage = self.flat.untyped_storage()
        # The same bytes in another storage, for those that fill them: a collective lets go of its tensors some time after it is
        # done, and ranks would differ in what they find free.
        is_real = not self.flat.is_meta  # where memory is only counted there is none to be shared
        self._filled = torch.utils.dlpack.from_dlpack(self.flat) if is_real else self.flat
        self.state: ChunkState | None = None
        self.is_bound = False  # parameters are views of it
        self.ticket: Ticket | None = None  # of the upload
        self._alone = self._uses()

    def _uses(self) -> int:
        return uses_of(self.flat)

    @property
    def is_held(self) -> bool:
        """Somebody has a view of it besides the parameters bound to it."""
        bound = len(self.state.chunk.slots) if self.state is not None and self.is_bound else 0
        return self._uses() != self._alone + bound

    def weights(self) -> Tensor:
        assert self.state is not None
        return self.flat[: self.state.chunk.bytes].view(self.state.dtype)

    def to_fill(self) -> Tensor:
        """The same, not counted as held."""
        assert self.state is not None
        return self._filled[: self.state.chunk.bytes].view(self.state.dtype)


@dataclass(frozen=True)
class Saved:
    """What a saved tensor that is a view of a slot is replaced by, until backward asks for it."""

    chunk: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]


class Residency:
    def __init__(self, state: ModelState, lanes: Lanes, slots: int, prefetch: int) -> None:
        self._state, self._lanes, self._prefetch_depth = state, lanes, prefetch
        self.moved_gradients: set[str] = set()  # names whose gradient of this step has left autograd
        self.is_editing = False  # inside `run.weights()`
        self._fetched = {each.index for each in state.chunks if each.placement.weights == "host" or each.is_gathered}
        # Chunks that somebody may still be at work on when they are next used are watched too.
        self.watched = self._fetched | {
            each.index
            for each in state.chunks
            if each.chunk.is_updated and (each.placement.optimizer == "host" or each.is_spread)
        }
        largest = max((state.chunks[index].chunk.bytes for index in self._fetched), default=0)
        self._slot_bytes = largest
        self.added = 0  # slots beyond the plan's
        self.on_growth: Callable[[Tensor], None] = lambda _memory: None  # is told of the memory of one, and may refuse it
        self._slots = [DeviceSlot(largest, state.device) for _ in range(min(slots, len(self._fetched)))]
        self._slot_of: dict[int, DeviceSlot] = {}  # by chunk
        self._of_storage = {slot.storage._cdata: slot for slot in self._slots}
        self._absent = {
            slot.name: state.parameters[slot.name].data for index in self._fetched for slot in state.chunks[index].chunk.slots
        }
        self._kinds: dict[str, type[nn.Parameter]] = {}  # what each parameter is to the user
        for index in self.watched:
            for slot in state.chunks[index].chunk.slots:
                parameter: Any = state.parameters[slot.name]
                self._kinds[slot.name] = type(parameter)
                parameter.__class__ = watched_kind(type(parameter))
                parameter.anyfit = (self, slot.name, index)
        self._versions = Versions(
            {
                index: [(slot.name, state.parameters[slot.name]) for slot in state.chunks[index].chunk.slots]
                for index in self.watched
            }
        )
        self._alone = {
            index: uses_of(on_device) - len(state.chunks[index].chunk.slots)
            for index in self.watched - self._fetched
            if (on_device := state.chunks[index].on_device) is not None
        }  # how many hold weights on the device besides the parameters
        self._parted: set[int] = set()  # chunks on the device whose parameters wait for an update
        self.on_edit: Callable[[ChunkState], None] = lambda _state: None  # what was made of the old weights does not count
        self._learnt: list[int] = []  # chunks in the order the last step touched them
        self._positions: dict[int, list[int]] = {}  # in it
        self._seen: list[int] | None = None  # of the step under way; None between steps
        self._cursor = 0
        self._needed: set[int] = set()  # by the call under way
        self._is_ahead = False  # these are there, and so is what comes next
        self._pinned: list[int] = []  # by compiled modules under way
        self.undo: list[Callable[[], None]] = []  # what the end has to put back
        self.fetches = 0  # uploads so far
        self.misses = 0  # of them, those that somebody had to wait for

    # ------------------------------------------------------------------ an op with watched parameters

    def call(self, func: Callable[..., Any], args: Any, kwargs: dict[str, Any], watched: Sequence[Any]) -> Any:
        name = watched[0].anyfit[1]
        if func == READ_GRADIENT:
            if name in self.moved_gradients:
                raise RuntimeError(
                    f"the gradient of {name} has left for the host, as the plan says; run.metrics.gradient_norm is there "
                    "after the step, and a plan with gradients on the device keeps p.grad"
                )
            return func(*args, **kwargs)
        if func == SET_GRADIENT:
            if args[1] is not None:
                raise RuntimeError(f"p.grad of {name} cannot be set: its chunk is updated by the plan's own schedule")
            return func(*args, **kwargs)
        chunks = {each.anyfit[2] for each in watched}
        with _untransformed(), _outside_inference():
            self.touch(chunks)
        if func == SET_DATA:
            _set_data(name, watched[0], args[1])
            result = None
        elif func in LENDS:
            return watched[0].detach().as_subclass(Lent)
        else:
            result = func(*args, **kwargs)
        writes_list = _writes_list(func, args)
        for index in chunks:
            self.heed(index, is_written=writes_list)
        return result

    def heed(self, index: int, *, is_written: bool = False) -> None:
        """Takes over what user code has written into weights of the chunk; `is_written`: it is known to have."""
        name = self._versions.edited(index)
        if name is None and is_written:
            name = self._state.chunks[index].chunk.slots[0].name
        if name is None or self.is_editing:
            return
        state, slot = self._state.chunks[index], self._slot_of.get(index)
        if state.shards > 1:
            raise RuntimeError(
                f"{name} is edited, and its chunk is divided over ranks, where the edit would be lost; edit weights inside `with "
                "run.weights():`"
            )
        if (index in self._fetched and slot is None) or (state.fresh is not None and index not in self._fetched):
            raise RuntimeError(
                f"{name} is edited through a view that was kept while its weights were updated elsewhere, so the edit is lost; "
                "take the view anew (parameter.data, parameter[...]), or edit inside `with run.weights():`"
            )
        with torch.no_grad(), _disable_current_modes():
            on_device = slot.weights() if slot is not None else state.on_device
            assert on_device is not None
            take_over(state, on_device)
        self._versions.note(index)
        self.on_edit(state)

    def heed_all(self) -> None:
        for index in self.watched:
            self.heed(index)

    def refuse_kept(self) -> None:
        """Before weights are updated: whoever keeps a view of them would have the old ones from then on."""
        held = [slot for slot in self._slots if slot.state is not None and slot.state.chunk.is_updated and slot.is_held]
        if held:
            gc.collect()
        for slot in held:
            if slot.state is not None and slot.is_held:
                names = [each.name for each in slot.state.chunk.slots]
                raise RuntimeError(
                    f"a view of {' or '.join(names[:3])}{', …' if len(names) > 3 else ''} is kept from step to step, and these "
                    "weights live on the host, so that it would not follow the update; keep a clone() of it, take it anew in "
                    "every step, or use a plan with weights on the device"
                )

    def touch(self, chunks: Iterable[int]) -> None:
        """Makes the weights of these chunks ready for what the computation is given next."""
        needed = set(chunks)
        if self._is_ahead and needed == self._needed:  # as by the op before: most have parameters of the same chunk
            return
        self._needed, self._is_ahead = needed, False
        for index in needed:
            self._note(index)
            self.settle(self._state.chunks[index])
        for index in needed & self._fetched:
            slot = self._slot_of.get(index)
            if slot is None:
                self.misses += 1
                slot = self._load(self._state.chunks[index], self._make_room(index, at_all_costs=True))
            self._lanes.hold_computation(slot.ticket)
            slot.ticket = None
            self._bind(slot)
        self._is_ahead = self._fetch_ahead()

    def settle(self, state: ChunkState) -> None:
        """The computation waits for the chunk's update. A failed one is raised once, and started again by the next to ask."""
        if state.fresh is None and state.again is not None:
            state.fresh = state.again()
        if state.fresh is None:
            if state.index in self._parted:
                self._rejoin(state)
            return
        fresh, state.fresh = state.fresh, None
        try:
            self._lanes.hold_computation(fresh)
        except BaseException:
            self.drop(state)  # what was fetched ahead rested on it
            raise
        state.again = None
        if state.index in self._parted:
            self._rejoin(state)

    def part(self, state: ChunkState) -> None:
        """Its weights on the device will be old ones until the chunk is settled: who reads them past the watching gets none."""
        if state.index in self.watched and state.index not in self._fetched:
            self._is_ahead = False
            self._parted.add(state.index)
            with quietly():
                for each in state.chunk.slots:
                    self._state.parameters[each.name].data = self._state.absent.of(state, each)

    def _rejoin(self, state: ChunkState) -> None:
        self._parted.discard(state.index)
        assert state.on_device is not None
        with quietly():
            for each in state.chunk.slots:
                self._state.parameters[each.name].data = state.view(state.on_device, each)

    def part_all(self) -> None:
        """No weights are where parameters are, until an op asks for them."""
        self.drop_all()
        for state in self._state.chunks:
            self.part(state)

    def settle_weights(self) -> None:
        """The host waits until every weight is fresh. What is left of updates changes where no weights are."""
        for state in self._state.chunks:
            self.settle(state)
        self._lanes.so_far().wait()

    def settle_all(self) -> None:
        """The host waits until every update is done."""
        self.settle_weights()
        for state in self._state.chunks:
            state.finish()

    def drop_all(self) -> None:
        """No update is under way and no slot holds weights: their homes may be written."""
        self.settle_all()
        for index in list(self._slot_of):
            self.drop(self._state.chunks[index])

    # ------------------------------------------------------------------ compiled modules

    def watch_compiled(self, model: nn.Module) -> None:
        """A compiled module's ops are not seen one by one: all its weights are made ready before it is called."""
        for module in model.modules():
            if isinstance(module, torch.jit.ScriptModule):
                self._watch_scripted(module)
                continue
            attribute = "_compiled_call_impl" if module._compiled_call_impl is not None else "forward"
            compiled = getattr(module, attribute)
            if attribute == "forward" and not hasattr(compiled, "_torchdynamo_orig_callable"):
                continue
            watched = [parameter for parameter in module.parameters() if isinstance(parameter, Watched)]
            if watched:
                setattr(module, attribute, functools.partial(self._call_compiled, compiled, watched))
                self.undo.append(functools.partial(setattr, module, attribute, compiled))

    def _watch_scripted(self, module: nn.Module) -> None:
        """TorchScript reads weights itself: they are made ready before it is called."""
        chunks = {parameter.anyfit[2] for parameter in module.parameters() if isinstance(parameter, Watched)}
        forward = module.forward

        def ready(*args: Any, **kwargs: Any) -> Any:
            self.touch(chunks)
            self._pinned += chunks
            try:
                return forward(*args, **kwargs)
            finally:
                for index in chunks:
                    self._pinned.remove(index)

        if chunks:  # past its own setter, which takes scripted methods alone
            vars(module)["forward"] = ready
            self.undo.append(functools.partial(vars(module).pop, "forward"))

    def _call_compiled(self, compiled: Callable[..., Any], watched: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        chunks = {parameter.anyfit[2] for parameter in watched}
        self.touch(chunks)
        self._pinned += chunks
        for parameter in watched:
            parameter.__class__ = self._kinds[parameter.anyfit[1]]  # as it was compiled for
        try:
            return compiled(*args, **kwargs)
        finally:
            for parameter in watched:
                parameter.__class__ = watched_kind(type(parameter))
            for index in chunks:
                self._pinned.remove(index)

    # ------------------------------------------------------------------ the order of use

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Inside, saved tensors that are views of slots are replaced."""
        if not self._slots:
            yield
            return
        try:
            with torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack):
                yield
        except RuntimeError as error:
            if "support saved tensor hooks" in str(error):
                error.add_note(
                    "this plan has weights on the host, which needs such hooks; use a plan with all state on the device"
                )
            raise

    def begin(self) -> None:
        """A step begins: the last one's order is what to expect."""
        if self._seen:
            self._learnt = self._seen
            self._positions = {}
            for position, index in enumerate(self._learnt):
                self._positions.setdefault(index, []).append(position)
        self._seen, self._cursor = [], 0
        self._needed, self._is_ahead = set(), False
        self._fetch_ahead()

    def settle_kept(self) -> None:
        """Whoever keeps a view of weights on the device reads it without asking: it has to be fresh."""
        for index, alone in self._alone.items():
            state = self._state.chunks[index]
            bound = 0 if index in self._parted else len(state.chunk.slots)
            if state.fresh is not None and state.on_device is not None and uses_of(state.on_device) != alone + bound:
                self.settle(state)

    def end(self) -> None:
        """No step is under way: what is touched now is not learnt from."""
        if self._seen:
            self.begin()
        self._seen = None

    def forget(self) -> None:
        """The step under way was broken off: nothing is learnt from it."""
        self._seen, self._is_ahead = None, False

    def _note(self, index: int) -> None:
        if self._seen is None:
            return
        if not self._seen or self._seen[-1] != index:
            self._seen.append(index)
        if self._cursor and self._learnt[self._cursor - 1] == index:
            return
        window = self._learnt[self._cursor : self._cursor + LOOK_AHEAD]
        if index in window:
            self._cursor += window.index(index) + 1

    def _next_use(self, index: int) -> float:
        positions = self._positions.get(index)
        if not positions:
            return float("inf")
        place = bisect_left(positions, self._cursor)
        return positions[place] if place < len(positions) else positions[0] + len(self._learnt)

    # ------------------------------------------------------------------ slots

    def _fetch_ahead(self) -> bool:
        """Whether a step is under way, and all that it needs next is there or comes."""
        if self._seen is None or not self._prefetch_depth:
            return self._seen is not None
        coming: dict[int, None] = {}
        for index in itertools.islice(self._learnt, self._cursor, None):
            if index in self._fetched:
                coming[index] = None
                if len(coming) >= self._prefetch_depth:
                    break
        for index in coming:
            if index not in self._slot_of:
                slot = self._make_room(index, at_all_costs=False)
                if slot is None:
                    return False
                self._load(self._state.chunks[index], slot)
        return True

    def give_back(self) -> None:
        """Slots beyond the plan's, as far as nobody holds them."""
        for slot in [each for each in self._slots if not each.is_held][: self.added]:
            if slot.state is not None:
                self.drop(slot.state)
            self._slots.remove(slot)
            del self._of_storage[slot.storage._cdata]
            self.added -= 1

    def _make_room(self, index: int, *, at_all_costs: bool) -> Any:
        """An empty slot for the chunk. When nobody waits for it yet, only what is needed later makes room."""
        empty = [slot for slot in self._slots if slot.state is None and not slot.is_held]
        if empty:
            return empty[0]
        kept = {*self._needed, *self._pinned}
        free = [other for other, slot in self._slot_of.items() if other not in kept and not slot.is_held]
        last = max(free, key=self._next_use, default=None)
        if last is not None and (at_all_costs or self._next_use(last) > self._next_use(index)):
            slot = self._slot_of[last]
            self.drop(self._state.chunks[last])
            return slot
        if not at_all_costs:
            return None
        return self._one_more(index)

    def _one_more(self, index: int) -> DeviceSlot:
        """A slot beyond the plan's: rather more memory than a run that ends. At most one for every chunk."""
        if self.added >= len(self._fetched):
            held = sum(slot.is_held for slot in self._slots)
            raise RuntimeError(
                f"chunk {index} is needed and none of the {len(self._slots)} device slots can be freed: this op needs "
                f"{len(self._needed & self._fetched)}, and views of {held} are still held (by recomputed blocks, or by code that "
                "keeps weights); use a plan with more slots, or with smaller chunks"
            )
        with _disable_current_modes(), torch.inference_mode(False):
            slot = DeviceSlot(self._slot_bytes, self._state.device)
        self.on_growth(slot.flat)
        self.added += 1
        self._slots.append(slot)
        self._of_storage[slot.storage._cdata] = slot
        return slot

    @_disable_current_modes()  # whoever watches the model's ops (selective recomputation counts them) is not to see these
    def _load(self, state: ChunkState, slot: DeviceSlot) -> DeviceSlot:
        self.fetches += 1
        slot.state, self._slot_of[state.index] = state, slot
        whole = slot.to_fill()
        # Which buffer is the home is asked when the job runs: an update before it may put another in its place.
        label, after = f"fetch chunk {state.index}", (self._lanes.so_far(), state.fresh)
        own = whole[state.stretch] if state.is_gathered else whole
        slot.ticket = self._lanes.up.run(lambda: _copy(own, state.weights), after, label)
        if state.is_gathered:
            label = f"gather chunk {state.index}"
            state.ranks.ask("gather", label)
            slot.ticket = self._lanes.gather.run(lambda: self._gather(state, whole, own, label), (slot.ticket,), label)
        return slot

    def _bind(self, slot: DeviceSlot) -> None:
        """Parameters are views of the slot once the weights are in it, and not before: not all that read them ask first."""
        if slot.is_bound:
            return
        assert slot.state is not None
        weights = slot.weights()
        with quietly(), _disable_current_modes():
            for each in slot.state.chunk.slots:
                self._state.parameters[each.name].data = slot.state.view(weights, each)
        slot.is_bound = True

    def _gather(self, state: ChunkState, whole: Tensor, own: Tensor, label: str) -> None:
        ranks = state.ranks
        for rank, index in ranks.chosen("gather", state.shards, state.index).items():
            if index != state.index:
                mine, other = (self._state.chunks[each].chunk.slots[0].name for each in (state.index, index))
                raise RuntimeError(
                    f"rank {ranks.index} needs the weights of chunk {state.index} ({mine}) where rank {rank} needs those of "
                    f"chunk {index} ({other}): with weights that are divided over ranks every rank has to call the same modules; "
                    "use a plan with weight_shards 1"
                )
        ranks.gather("gather", state.shards, whole, own, label)

    def drop(self, state: ChunkState) -> None:
        """The chunk's weights leave the device."""
        self._is_ahead = False
        slot = self._slot_of.pop(state.index, None)
        if slot is not None:
            self._empty(slot, state)

    @_disable_current_modes()
    def _empty(self, slot: DeviceSlot, state: ChunkState) -> None:
        if slot.ticket is not None:
            with contextlib.suppress(BaseException):  # whoever waits for the update that failed gets it
                slot.ticket.reach()
        if self.is_editing:
            self._write_back(state, slot)
        elif slot.is_bound:
            self._slot_of[state.index] = slot
            try:
                self.heed(state.index)
            finally:
                del self._slot_of[state.index]
        with quietly():
            for each in state.chunk.slots if slot.is_bound else ():
                self._state.parameters[each.name].data = self._absent[each.name]
        slot.state, slot.ticket, slot.is_bound = None, None, False

    def _write_back(self, state: ChunkState, slot: DeviceSlot) -> None:
        edited = slot.weights()[state.stretch] if state.is_gathered else slot.weights()
        state.adopt(edited.to(state.weights.device, copy=True), state.weights)

    @contextmanager
    def editing(self) -> Iterator[None]:
        """Inside, weights may be edited; what lies in a slot is written back when it leaves, and at the end."""
        self.settle_all()
        self.is_editing = True
        try:
            yield
        finally:
            with quietly(), torch.no_grad():
                for slot in self._slots:
                    if slot.state is not None:
                        self.drop(slot.state)
                self.is_editing = False
                for index in self.watched:
                    self._versions.note(index)

    # ------------------------------------------------------------------ what autograd saves

    def pack(self, tensor: Tensor) -> Tensor | Saved:
        with quietly():
            has_storage = tensor.layout == torch.strided and not tensor.is_nested  # what is sparse or nested is nobody's weight
            slot = self._of_storage.get(tensor.untyped_storage()._cdata) if has_storage else None
            if slot is None or slot.state is None:
                if isinstance(tensor, Watched) and hasattr(tensor, "anyfit") and tensor.anyfit[2] in self._fetched:
                    return self._place_of(tensor)
                # Without its history, which autograd keeps itself: an op's own output would tie the graph into a knot, and
                # one that never goes backward would stay for good.
                return tensor if tensor.grad_fn is None else tensor.detach()
            return Saved(slot.state.index, tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())

    def _place_of(self, absent: Watched) -> Saved:
        """Of a parameter that is saved before anybody has read it: not the one that stands for it."""
        _, name, index = absent.anyfit
        offset = next(each.offset for each in self._state.chunks[index].chunk.slots if each.name == name)
        return Saved(index, absent.dtype, offset, absent.shape, torch.empty(absent.shape, device="meta").stride())

    def unpack(self, saved: Tensor | Saved) -> Tensor:
        if not isinstance(saved, Saved):
            return saved
        with quietly(), torch.no_grad():
            self.touch({saved.chunk})
            flat = self._slot_of[saved.chunk].flat
            usable = flat[: flat.numel() // saved.dtype.itemsize * saved.dtype.itemsize]
            return usable.view(saved.dtype).as_strided(saved.shape, saved.stride, saved.offset)

    # ------------------------------------------------------------------ the end

    @property
    def device_bytes(self) -> int:
        return sum(slot.flat.nbytes for slot in self._slots)

    def close(self) -> None:
        """Parameters are plain again, and hold their weights: on the device where they live there, else on the host. Those that
        ranks divide stay empty: no rank has room for all, and one that ends by itself cannot ask the others."""
        self.settle_all()
        for undo in self.undo:
            undo()
        with quietly():
            for index in self.watched:
                state = self._state.chunks[index]
                self.drop(state)
                for slot in state.chunk.slots:
                    parameter: Any = self._state.parameters[slot.name]
                    del parameter.anyfit
                    parameter.__class__ = self._kinds[slot.name]
                    if index in self._fetched and not state.is_gathered:
                        parameter.data = state.view(state.weights, slot)


def _set_data(name: str, parameter: Tensor, given: Tensor) -> None:
    """Of a parameter whose memory is the plan's: its values."""
    if given.shape != parameter.shape or given.dtype != parameter.dtype:
        kind = f"{given.dtype} of shape {tuple(given.shape)}"
        raise RuntimeError(f"{name}.data cannot become {kind}: it is part of a chunk of the plan")
    if isinstance(given, Lent) and given.data_ptr() != parameter.data_ptr():
        raise RuntimeError(
            f"{name}.data would become the memory of another weight; tie parameters as one object before the run starts: "
            "module.a.weight = module.b.weight"
        )
    parameter.detach().copy_(given)


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source, non_blocking=True)
