"""Writes down every op below autograd, and when each storage is born and dies.

Autograd itself decides what lives: the recorder only watches. A storage is born with the op that returns it and dies when
torch lets go of it, which a weak reference tells. Ops of backward are ascribed to the module whose saved tensors they
unpack; a recomputed forward runs its modules again and so names itself.
"""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, unset_fake_temporarily
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack, _pop_mode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils.flop_counter import flop_registry

from anyfit.values.call import Call, Other, TensorForm, TheDevice, TorchName
from anyfit.values.graph import LEAST_OFFLOAD_BYTES, PAGE_BYTES, Op, OpKind, Phase, ValueKind
from anyfit.values.units import show_bytes

from .around import TooDear
from .needs import Needs, SavedView, is_whole, storage_of, tensors_in, transforms_told, written_by

aten = torch.ops.aten
# Reads only the rows it is asked for, however large the table.
GATHERS = {aten.embedding, aten.index_select, aten.gather, aten.index, aten.slice_backward}
LOOKS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}  # give Python a number
META = torch.device("meta")
ASKS_A_FAKE = torch.ops.prim.device.default  # goes through the dispatcher for fakes alone: no real pass has these calls
LARGEST_FACT = 2**25  # elements


@dataclass
class Storage:
    bytes: int
    kind: ValueKind
    born: int
    dies: int | None
    block: int
    saved_by: int = -1  # as in Value
    is_cached: bool = False  # by autocast, which keeps what it made of a weight whether a block is recomputed or not
    reads: list[int] = field(default_factory=list)  # ops, ascending
    writes: list[int] = field(default_factory=list)  # ops that change it in place, ascending


class NotPeriodic(Exception):  # noqa: N818  (an answer, not a fault)
    """What was run does not repeat the way the blocks' structure promised."""


class Recorder(TorchDispatchMode):
    """Records ops and storages while active."""

    def __init__(
        self,
        names: Mapping[int, str],  # by module identity
        block_of: Mapping[int, int],  # likewise
        outside: int,
        kernels: Callable[[], TorchFunctionMode] | None,  # for a recomputed forward: torch forgets function modes in backward
        room_bytes: float | None = None,  # what storages of real tensors may take; None where they are fakes
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops: list[Op] = []
        self.calls: list[str] = []  # the distinct ones
        self.storages: list[Storage] = []
        self.input_bytes: dict[int, int] = {}  # by block
        self.offload_bytes: dict[int, int] = {}  # likewise
        self.phase: Phase = "forward"
        self._names, self._block_of, self._outside, self._kernels = names, block_of, outside, kernels
        self._recomputing: TorchFunctionMode | None = None  # while a forward runs inside backward
        self._room_bytes = room_bytes
        self._casts = False  # autocast is at work
        self._live_bytes = 0
        self._calls = 0  # since the last op that was written down, views included
        self._places: dict[Any, int] = {}  # in `calls`, by a key that is quicker to make than the text
        self._stack: list[tuple[str, int]] = [("", outside)]
        self._backward_at: tuple[str, int] = ("", outside)
        self._known: dict[int, Storage | None] = {}  # by storage identity; None: not of this pass
        self._between = False  # blocks that are skipped, or after the last of them: the ops there are copies of others
        self._unwritten: dict[int, weakref.ref[Any]] = {}  # storages that such ops made, likewise
        self._since_block = 0  # ops since a block was left
        self._due: dict[
            int, list[Storage]
        ] = {}  # by that number: those that died there after a skipped block, and not after a run one
        self._parameters: dict[int, list[int]] = {}  # ops that read one, likewise
        self._saved: set[int] = set()  # likewise, by the block that forward is in
        self._savers: dict[int, set[int]] = {}  # blocks, by identity of the storage's record
        self._watched: list[weakref.ref[Any]] = []
        self.needs = Needs((), outside, lambda: outside)

    def leave_out(self, parameters: Iterable[torch.Tensor], buffers: Iterable[torch.Tensor]) -> None:
        """There before the pass, and counted elsewhere."""
        parameters = list(parameters)
        for tensor in (*parameters, *buffers):
            self._known[tensor.untyped_storage()._cdata] = None
        self._parameters = {tensor.untyped_storage()._cdata: [] for tensor in parameters}
        self.needs = Needs(parameters, self._outside, lambda: self._stack[-1][1])

    def count_input(self, tensor: torch.Tensor) -> None:
        for each in _tensors(tensor):
            self._meet(each, "input", self._outside)

    def reads_of(self, parameter: torch.Tensor) -> list[int]:
        """Ops that read one that was left out; none where the pass has given it other memory."""
        return self._parameters.get(parameter.untyped_storage()._cdata, [])

    def mark_gradient(self, tensor: torch.Tensor) -> Storage | None:
        storages = [self._known.get(each.untyped_storage()._cdata) for each in _tensors(tensor)]  # a sparse one has several
        for storage in storages:
            if storage is not None:
                storage.kind = "gradient"
        return storages[-1] if storages else None

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follows the modules as they are called, and the tensors that autograd saves."""
        hooks = (register_module_forward_pre_hook(self._enter), register_module_forward_hook(self._leave, always_call=True))
        with transforms_told(self.needs.of_transform), torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack):
            try:
                yield
            finally:
                for hook in hooks:
                    hook.remove()

    @contextmanager
    def backward(self) -> Iterator[None]:
        """Around the call of backward; no function mode that was entered for a recomputed forward outlives it."""
        self.phase = "backward"
        depth = len(_get_current_function_mode_stack())
        try:
            yield
        finally:
            while len(_get_current_function_mode_stack()) > depth:
                _pop_mode()

    def _enter(self, module: nn.Module, args: Any) -> None:
        here = self._stack[-1]
        block = self._block_of.get(id(module), here[1])
        if any(map(torch._C._functorch.is_functorch_wrapped_tensor, tensors_in(args))):
            self.needs.of_transform()
        if block != here[1]:
            if not self._between:
                self._due.clear()
            self._between = False
        if self.phase == "forward" and block != here[1]:
            handed = (tensor for tensor in _tensors(args) if tensor.dtype.is_floating_point)
            self.input_bytes[block] = self.input_bytes.get(block, 0) + sum(map(_bytes_of, handed))
            self._saved = set()
        self._stack.append((self._names.get(id(module), here[0]), block))
        self._casts = any(map(torch.is_autocast_enabled, ("cpu", "cuda"))) and torch.is_autocast_cache_enabled()
        if is_whole(module):
            self.needs.of_module(module)

    def _leave(self, _module: nn.Module, _args: Any, _output: Any) -> None:
        left = self._stack.pop()
        if left[1] != self._stack[-1][1] and not self._between:
            self._since_block = 0
            self._end_due()
        if self.phase == "backward":  # a recomputed module: the gradients that follow are its own
            self._backward_at = left

    def _pack(self, tensor: torch.Tensor) -> tuple[torch.Tensor | SavedView, tuple[str, int]]:
        storage = storage_of(tensor)
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            self.needs.of_transform()
        if self.phase == "forward" and storage is not None:
            self._save(storage, self._stack[-1][1])
        return self.needs.saved(tensor), self._stack[-1]

    def _save(self, storage: Any, block: int) -> None:
        identity = storage._cdata
        seen = self._known.get(identity)
        if seen is not None:
            self._savers.setdefault(id(seen), set()).add(block)
            seen.saved_by = block if self._savers[id(seen)] == {block} and not seen.is_cached else -1
        if block != self._outside and identity not in self._saved and identity not in self._parameters:
            self._saved.add(identity)
            if storage.nbytes() >= LEAST_OFFLOAD_BYTES:
                pages = -(-storage.nbytes() // PAGE_BYTES)
                self.offload_bytes[block] = self.offload_bytes.get(block, 0) + pages * PAGE_BYTES

    def _unpack(self, packed: tuple[torch.Tensor | SavedView, tuple[str, int]]) -> torch.Tensor:
        saved, self._backward_at = packed
        return saved.view() if isinstance(saved, SavedView) else saved

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is ASKS_A_FAKE:
            return META if args[0].fake_mode.in_kernel_invocation else args[0].fake_device  # as it would answer, only sooner
        if wrappers := [kind for kind in types if _is_a_wrapper(kind)]:
            self.needs.of_transform(f"a {wrappers[0].__name__}")
            return NotImplemented  # its own class takes it apart, into ops of plain tensors
        self._calls += 1
        inputs = _tensors((args, kwargs))
        real = self._room_bytes is None and not any(isinstance(tensor, FakeTensor) for tensor in inputs)  # among fakes
        if real and func in LOOKS:
            with unset_fake_temporarily():
                return func(*args, **kwargs)
        result = func(*args, **kwargs)
        if real and all(map(_is_small_fact, [*inputs, *_tensors(result)])):
            with unset_fake_temporarily():
                result = func(*args, **kwargs)
        outputs = _tensors(result)
        self.needs.of_op(inputs, outputs)
        if self._is_left_out(func, inputs, outputs):
            return result
        fresh = [tensor for tensor in outputs if tensor.untyped_storage()._cdata not in self._known]
        if not fresh and not func._schema.is_mutable:
            return result  # a view, or a look at sizes: costs nothing
        in_backward = self.phase == "backward"
        # Gradients are computed without grad mode; what comes before the engine runs is not recomputed either.
        recomputes = in_backward and torch.is_grad_enabled() and torch._C._current_graph_task_id() >= 0
        if in_backward and self._kernels is not None:
            self._follow(self._kernels, recomputes)
        module, block = self._backward_at if in_backward and len(self._stack) == 1 else self._stack[-1]
        packet = func._overloadpacket
        call = self._place_of(func, args, kwargs)
        self.ops.append(
            Op(
                name=_name_of(func),
                kind=_kind_of(packet),
                phase=self.phase,
                recomputes=recomputes,
                block=block,
                module=module,
                dtype=str((outputs or inputs)[0].dtype).removeprefix("torch.") if outputs or inputs else "float32",
                flops=_flops(packet, args, kwargs, result),
                bytes=_touched_bytes(packet, inputs, outputs),
                aligned=_is_aligned(inputs + outputs),
                calls=self._calls,
                call=call,
            )
        )
        self._calls = 0
        self._note_edges(inputs, _tensors(written_by(func, args, kwargs)) if func._schema.is_mutable else [])
        is_cached = self._casts and packet is aten._to_copy and inputs[0].untyped_storage()._cdata in self._parameters
        for tensor in fresh:
            self._meet(tensor, "activation", block, is_cached=is_cached)
        if self._stack[-1][1] == self._outside:
            self._since_block += 1
            self._end_due()
        return result

    def skipped(self) -> None:
        """A block has handed its input through. What the model does up to the next one, it does after the twin too."""
        self._between, self._since_block = True, 0

    def _end_due(self) -> None:
        """What died here after a skipped block dies here."""
        for storage in self._due.pop(self._since_block, ()):
            storage.dies = max(len(self.ops) - 1, 0)

    def _is_left_out(self, func: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> bool:
        """Whether an op is not written down. What it makes is for nobody else: a model that counts on it is not periodic."""
        unwritten, is_known = self._unwritten, self._known.__contains__
        is_between = self._between and self.phase == "forward" and self._stack[-1][1] == self._outside
        if not is_between:
            if unwritten and any(tensor.untyped_storage()._cdata in unwritten for tensor in inputs):
                raise NotPeriodic("what is computed between blocks is used later")
            return False
        if func._schema.is_mutable and any(is_known(tensor.untyped_storage()._cdata) for tensor in inputs):
            raise NotPeriodic("what is computed between blocks is written into what others read")
        fresh = [storage for storage in (each.untyped_storage() for each in outputs) if not is_known(storage._cdata)]
        fresh = [storage for storage in fresh if storage._cdata not in unwritten]
        for storage in fresh:
            unwritten[storage._cdata] = weakref.ref(storage, functools.partial(_forget, unwritten, storage._cdata))
        self._since_block += bool(fresh) or func._schema.is_mutable
        self._calls = 0
        return True

    def _note_edges(self, inputs: list[torch.Tensor], written: list[torch.Tensor]) -> None:
        """Of the op that was just written down."""
        moment = len(self.ops) - 1
        for tensor in inputs:
            identity = tensor.untyped_storage()._cdata
            seen = self._known.get(identity)
            _note(self._parameters.get(identity) if seen is None else seen.reads, moment)
        for tensor in written:
            seen = self._known.get(tensor.untyped_storage()._cdata)
            _note(None if seen is None else seen.writes, moment)

    def _place_of(self, func: Any, args: Any, kwargs: Any) -> int:
        key = (func, _key_of(args), *((name, _key_of(value)) for name, value in kwargs.items()))
        place = self._places.get(key)
        if place is None:
            described = {name: _described(value) for name, value in kwargs.items()}
            text = Call(_name_of(func), tuple(map(_described, args)), described).text()
            place = self._places[key] = self._places.setdefault(text, len(self.calls))
            if place == len(self.calls):
                self.calls.append(text)
        return place

    def _follow(self, kernels: Callable[[], TorchFunctionMode], recomputes: bool) -> None:
        """A recomputed forward has the kernels of the first. Backward drops modes by itself at times: one may be gone already."""
        if recomputes and self._recomputing is None:
            self._recomputing = kernels()
            self._recomputing.__enter__()
        elif not recomputes and self._recomputing is not None:
            if self._recomputing in _get_current_function_mode_stack():
                self._recomputing.__exit__(None, None, None)
            self._recomputing = None

    def _meet(self, tensor: torch.Tensor, kind: ValueKind, block: int, *, is_cached: bool = False) -> None:
        storage = tensor.untyped_storage()
        identity = storage._cdata
        if identity in self._known:
            return
        seen = Storage(storage.nbytes(), kind, max(len(self.ops) - 1, 0), None, block, is_cached=is_cached)
        self._known[identity] = seen
        self.storages.append(seen)
        self._watched.append(weakref.ref(storage, functools.partial(self._died, identity, seen)))
        self._live_bytes += seen.bytes
        if self._room_bytes is not None and self._live_bytes > self._room_bytes:
            raise TooDear(f"more than the {show_bytes(self._room_bytes)} of memory that are free")

    def _died(self, identity: int, seen: Storage, _reference: Any) -> None:
        seen.dies = max(len(self.ops) - 1, 0)
        if self._between and self.phase == "forward":
            self._due.setdefault(self._since_block, []).append(seen)
        self._known.pop(identity, None)
        self._live_bytes -= seen.bytes


def _forget(storages: dict[int, Any], identity: int, _reference: Any) -> None:
    storages.pop(identity, None)


def _note(moments: list[int] | None, moment: int) -> None:
    if moments is not None and moments[-1:] != [moment]:
        moments.append(moment)


def _name_of(func: Any) -> str:
    return str(func).removeprefix("aten.")


def _key_of(item: Any) -> Any:
    """Something that can be hashed, and is equal for arguments that are described alike."""
    if isinstance(item, torch.Tensor):
        return (item.dtype, item.shape, item.stride()) if _is_plain(item) else (str(item.layout), item.dtype)
    if isinstance(item, list | tuple):
        return tuple(map(_key_of, item))
    return type(item), item  # 1, 1.0 and True are equal, and not alike


def _described(item: Any) -> Any:
    if isinstance(item, torch.Tensor) and _is_plain(item):
        return TensorForm(str(item.dtype).removeprefix("torch."), tuple(item.shape), item.stride())
    if isinstance(item, list | tuple):
        return list(map(_described, item))
    if isinstance(item, torch.dtype | torch.layout | torch.memory_format):
        return TorchName(str(item).removeprefix("torch."))
    if isinstance(item, torch.device):
        return TheDevice()
    return item if item is None or isinstance(item, bool | int | float | str) else Other(type(item).__name__)


def _tensors(nest: Any) -> list[torch.Tensor]:
    """Those with a storage each: a sparse or nested one as its parts."""
    found: list[torch.Tensor] = []
    for tensor in tensors_in(nest):
        found += [tensor] if _is_plain(tensor) else _parts_of(tensor)
    return found


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether it has one shape, strides and a storage: a sparse or nested one has not."""
    return tensor.layout == torch.strided and not tensor.is_nested


def _parts_of(tensor: torch.Tensor) -> list[torch.Tensor]:
    """What a sparse or nested tensor is made of."""
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return []
    if tensor.layout in (torch.strided, torch.jagged):
        with torch.no_grad(), _disable_current_modes():  # no op of the pass
            return [tensor.values()]
    if tensor.layout == torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    return []


def _is_a_wrapper(kind: type) -> bool:
    """Whether tensors of this class hold others, such as nested ones."""
    return hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")


def _is_small_fact(tensor: torch.Tensor) -> bool:
    """Positions, masks and single numbers that do not depend on the batch are computed for real, so that the model's own
    branches on them (`torch.rand([]) < p`, `(positions == 0).all()`) go the way they would."""
    return tensor.dim() == 0 or (not tensor.dtype.is_floating_point and tensor.numel() <= LARGEST_FACT)


def _kind_of(packet: Any) -> OpKind:
    if "attention" in packet.__name__:
        return "attention"
    if packet in (aten.convolution, aten._convolution, aten.convolution_backward):
        return "convolution"
    return "matmul" if packet in flop_registry else "memory"


def _flops(packet: Any, args: Any, kwargs: Any, result: Any) -> int:
    if not all(map(_is_plain, tensors_in((args, kwargs, result)))):
        return 0  # by their shapes there is no knowing
    if "attention" in packet.__name__:  # torch's own formulas miss some kernels and grouped queries
        backward = packet.__name__.endswith("backward")
        query, key, value = args[1:4] if backward else args[:3]
        *batch, rows, width = query.shape
        product = 2 * math.prod(batch) * rows * key.shape[-2]
        return int(5 * product * width if backward else product * (width + value.shape[-1]))
    formula = flop_registry.get(packet)
    return int(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def _is_aligned(tensors: list[torch.Tensor]) -> bool:
    """Whether every row of every matrix starts on a 16-byte boundary: without that a product loses most of a GPU's speed."""
    return all(
        stride * tensor.element_size() % 16 == 0 or stride == 1
        for tensor in tensors
        if tensor.dim() >= 2
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True)
        if size > 1
    )


def _touched_bytes(packet: Any, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> int:
    written = sum(_bytes_of(tensor) for tensor in outputs)
    if packet in GATHERS:
        return 2 * written + sum(_bytes_of(tensor) for tensor in inputs if not tensor.dtype.is_floating_point)
    return written + sum(_bytes_of(tensor) for tensor in inputs)


def _bytes_of(tensor: torch.Tensor) -> int:
    # An expanded tensor reads its storage, not its shape.
    storage = storage_of(tensor)
    size = int(tensor.numel() * tensor.element_size())
    return size if storage is None else min(size, storage.nbytes())
