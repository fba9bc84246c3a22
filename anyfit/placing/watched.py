"""Watched parameters: torch calls `__torch_function__` before any op that takes one, and so weights are ready for every op.

User code may write weights: in place, through views and `.data`, or by putting another tensor in their place. A parameter counts
the writes into it and its views. So an edit of weights that live elsewhere is found and written back: when the op returns, when
they leave the device, and before a step or a reader needs them. A numpy array counts nothing: it is a read-only copy.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from anyfit.values.call import leaves

from .chunks import ChunkState, ModelState, quietly

_Tensor: Any = torch.Tensor  # whose properties are typed as what they give


class Watched(nn.Parameter):
    """A parameter that tells its residency when it is used."""

    anyfit: tuple[Any, str, int]  # its residency, its name, its chunk

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with quietly():
            return func(*args, **(kwargs or {})) if func in FACTS else called(func, args, kwargs or {})


class Present(Watched):
    """The same while its weights are fresh and stay on the device: ops go straight to torch, and are not slowed down. Writes are
    counted by torch; `data`, whose writes it does not count, and gradients are looked after here."""

    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def data(self) -> Any:
        return _asked(DATA, self)

    @data.setter
    def data(self, given: Tensor) -> None:
        _asked(SET_DATA, self, given)

    @property
    def grad(self) -> Any:
        return _asked(READ_GRADIENT, self)

    @grad.setter
    def grad(self, given: Tensor | None) -> None:
        _asked(SET_GRADIENT, self, given)

    @grad.deleter
    def grad(self) -> None:
        _asked(SET_GRADIENT, self, None)

    def detach(self) -> Any:
        return _asked(torch.Tensor.detach, self)


def _asked(func: Callable[..., Any], *args: Any) -> Any:
    if not torch._C._is_torch_function_enabled():  # by the engine
        return func(*args)
    with quietly():
        return _looked_at(args[0].anyfit[0], func, args, args[0])


_kinds: dict[Any, type[Watched]] = {}


def is_plain_kind(kind: type) -> bool:
    """Whether a parameter is of no class of the user's own."""
    return kind in (nn.Parameter, Watched, Present)


def watched_kind(kind: type[nn.Parameter], by: type[Watched] = Watched) -> type[Watched]:
    """A parameter of the user's own class keeps what that class has."""
    if kind is nn.Parameter:
        return by
    if (kind, by) not in _kinds:
        bases = (kind, by) if hasattr(kind, "comes_first") else (by, kind)
        _kinds[kind, by] = type(kind.__name__, bases, {})
    return _kinds[kind, by]


# What may be asked of a parameter that is not there.
PROPERTIES = (
    "shape", "dtype", "device", "requires_grad", "is_leaf", "grad_fn", "layout", "ndim", "is_cuda", "is_meta", "is_sparse",
    "is_quantized", "is_nested", "itemsize", "nbytes", "names", "output_nr", "retains_grad", "is_cpu", "is_xpu", "is_mps",
    "_backward_hooks", "_post_accumulate_grad_hooks", "_version", "_base",
)  # fmt: skip
FACTS = {getattr(torch.Tensor, name).__get__ for name in PROPERTIES if hasattr(torch.Tensor, name)} | {
    torch.Tensor.size, torch.Tensor.dim, torch.Tensor.numel, torch.Tensor.nelement, torch.Tensor.element_size,
    torch.Tensor.is_floating_point, torch.Tensor.is_complex, torch.Tensor.register_hook, torch.Tensor.__len__,
    torch.Tensor.register_post_accumulate_grad_hook, torch.Tensor.requires_grad_, torch.Tensor.__hash__,
    _Tensor.requires_grad.__set__, torch.is_floating_point, torch.is_complex, torch.numel, torch.Tensor.is_pinned,
    torch.Tensor.get_device, torch.Tensor.ndimension, torch.Tensor.__dir__,
}  # fmt: skip
READ_GRADIENT, SET_GRADIENT = _Tensor.grad.__get__, _Tensor.grad.__set__
DATA, SET_DATA = _Tensor.data.__get__, _Tensor.data.__set__
LENDS = {DATA, torch.Tensor.detach, torch.detach}
LOOKS = {READ_GRADIENT, SET_GRADIENT, SET_DATA} | LENDS


def called(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """An op with watched parameters: their weights are made ready, and edits of them taken over. Every op of the user's code that
    takes a weight comes here, so it looks at no more than the op's own arguments."""
    given = (*args, *kwargs.values()) if kwargs else args
    kinds = list(map(type, given))
    watched = [
        each for each, kind in zip(given, kinds, strict=True) if issubclass(kind, Watched)
    ]  # isinstance is torch's, in Python
    has_lists = not watched or any(issubclass(kind, list | tuple | dict) for kind in kinds)
    if has_lists:
        watched = [each for each in leaves((args, kwargs)) if issubclass(type(each), Watched)]
    watched = [each for each in watched if hasattr(each, "anyfit")]
    if not watched:  # a copy the user made
        return func(*args, **kwargs)
    residency = watched[0].anyfit[0]
    if func in LOOKS:
        return _looked_at(residency, func, args, watched[0])
    chunks = {each.anyfit[2] for each in watched}
    residency.ready(chunks)
    result = func(*args, **kwargs)
    writes_list = has_lists and _writes_list(func, args)
    if writes_list or residency.versions.have_changed(watched):
        for index in chunks:
            residency.heed(index, is_written=writes_list)
    return result


def _looked_at(residency: Any, func: Callable[..., Any], args: Any, parameter: Any) -> Any:
    """A parameter's gradient or data, read or set."""
    name, index = parameter.anyfit[1:]
    if func == SET_DATA and args[1] is parameter:
        return None
    if func == READ_GRADIENT and name in residency.moved_gradients:
        if _is_converting():
            return None
        raise RuntimeError(
            f"the gradient of {name} has left for the host, as the plan says; run.metrics.gradient_norm is there "
            "after the step, and a plan with gradients on the device keeps p.grad"
        )
    if func == SET_GRADIENT and args[1] is not None:
        raise RuntimeError(f"p.grad of {name} cannot be set: its chunk is updated by the plan's own schedule")
    if func in (READ_GRADIENT, SET_GRADIENT):
        return func(*args)
    residency.ready({index})
    if func in LENDS:
        return parameter.detach().as_subclass(Lent)
    _set_data(name, parameter, args[1])
    residency.heed(index)
    return None


def _is_converting() -> bool:
    """Whether it is torch that asks, in `module.to(dtype)`, which some models call in forward. Of a gradient that is not there
    nothing is to be converted; a weight that would change is refused before."""
    frame = sys._getframe(1)
    while frame.f_code.co_filename == __file__ and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code is nn.Module._apply.__code__


def _set_data(name: str, parameter: Tensor, given: Tensor) -> None:
    """Of a parameter whose memory is the plan's: its values."""
    if given.shape != parameter.shape or given.dtype != parameter.dtype:
        kind = f"{given.dtype} of shape {tuple(given.shape)}"
        raise RuntimeError(
            f"{name}.data cannot become {kind}: it is part of a chunk of the plan; convert it where the model is made"
        )
    if isinstance(given, Lent) and given.data_ptr() != parameter.data_ptr():
        raise RuntimeError(
            f"{name}.data would become the memory of another weight; tie parameters as one object before the run starts: "
            "module.a.weight = module.b.weight"
        )
    parameter.detach().copy_(given)


def _writes_list(func: Any, args: Sequence[Any]) -> bool:
    """Whether it writes into a list of tensors, as torch._foreach_mul_ does: under a dispatch mode torch does not count that."""
    name = getattr(func, "__name__", "")
    return name.startswith("_foreach_") and name.endswith("_") and bool(args) and isinstance(args[0], list | tuple)


class Versions:
    """Of every parameter of some chunks: how often it has been written, as far as that is known."""

    def __init__(self, parameters: Mapping[int, list[tuple[str, nn.Parameter]]]) -> None:
        self._parameters = parameters
        with quietly():
            self._known = {name: each._version for members in parameters.values() for name, each in members}

    def edited(self, chunk: int) -> str | None:
        """A parameter of the chunk that has been written since."""
        with quietly():
            for name, each in self._parameters[chunk]:
                if each._version != self._known[name]:
                    return name
        return None

    def have_changed(self, parameters: Iterable[Any]) -> bool:
        """Whether one of these has been written since."""
        return any(each._version != self._known[each.anyfit[1]] for each in parameters)

    def note(self, chunk: int) -> None:
        with quietly():
            for name, each in self._parameters[chunk]:
                self._known[name] = each._version


class Lent(Tensor):
    """A weight without its history (`.data`, `.detach()`), or a view of one."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with quietly():
            result = func(*args, **(kwargs or {}))
            if func in AS_ARRAY:
                result = result.copy()
                result.flags.writeable = False
            elif type(result) is Tensor and args and isinstance(args[0], Lent) and _is_view(result, args[0]):
                return result.as_subclass(Lent)
            return result


AS_ARRAY: set[Any] = {Tensor.numpy, Tensor.__array__}


def _is_view(tensor: Tensor, other: Tensor) -> bool:
    return tensor.layout == torch.strided and tensor.untyped_storage()._cdata == other.untyped_storage()._cdata


class Bound:
    """Parameters that are views of buffers on the device, and modules that hold them: whether they still are."""

    def __init__(self, model: nn.Module, state: ModelState, watched: set[int]) -> None:
        self._homes: list[tuple[str, nn.Parameter, Tensor, int]] = []
        for each in state.chunks:
            if each.index in watched or each.on_device is None:
                continue
            for slot in each.chunk.slots:
                if slot.elements and slot.name not in state.kept:
                    mine = each.view(each.on_device, slot)
                    self._homes.append((slot.name, state.parameters[slot.name], mine, mine.data_ptr()))
        self._storages = {each.on_device.untyped_storage()._cdata for each in state.chunks if each.on_device is not None}
        names = {id(each): name for name, each in state.parameters.items()}
        self._holders = [
            (module._parameters, key, each, names[id(each)])
            for module in model.modules()
            if isinstance(module._parameters, dict)  # a scripted module has no others than it had
            for key, each in module._parameters.items()
            if each is not None and id(each) in names
        ]

    def refuse_replaced(self) -> None:
        """Raises where a module holds another parameter than it did at the start."""
        for name in [each[3] for each in self._holders if each[0].get(each[1]) is not each[2]]:
            raise RuntimeError(
                f"{name} is not the parameter any more that it was when the run started, so the run does not train it; "
                "change its values (copy_, load_state_dict), or start a new run: anyfit.start"
            )

    def take_back(self) -> None:
        """Takes over tensors that user code has put in the place of weights (`p.data = tensor`)."""
        with quietly():
            for name, parameter, mine, _address in [home for home in self._homes if home[1].data_ptr() != home[3]]:
                given = parameter.data
                if given.shape != mine.shape or given.dtype != mine.dtype or given.device != mine.device:
                    raise RuntimeError(
                        f"{name}.data was replaced by {_kind(given)}, and is {_kind(mine)} in this run: a run keeps weights as "
                        "they were when it started; convert them where the model is made"
                    )
                if given.untyped_storage()._cdata in self._storages:
                    raise RuntimeError(
                        f"{name}.data was made the memory of another weight; tie parameters as one object before the run starts: "
                        "module.a.weight = module.b.weight"
                    )
                mine.copy_(given)  # views of buffers, which have no history
                parameter.data = mine


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} of shape {tuple(tensor.shape)} on {tensor.device}"


def take_over(state: ChunkState, edited: Tensor) -> None:
    """Weights of a chunk as they were edited on the device, to where they live."""
    state.update.finish()
    if state.on_host is not None:
        state.adopt(edited if state.on_device is not None else edited.to(state.on_host.device, copy=True), state.on_host)
