"""The user's model and batch without their bytes: fake tensors that know shape, dtype and device, but hold nothing.

All fakes live on a fake CPU, whatever device will compute: fake CUDA tensors abort the process on a build without CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from anyfit.values.batches import repeated, with_rows
from anyfit.values.fakes import grouped_product
from anyfit.values.job import Batch, Job
from anyfit.values.memento import Memento
from anyfit.values.nests import is_dense, shape_of

aten = torch.ops.aten
CPU = torch.device("cpu")
LONG = 64  # steps of a sequence


class FakeMode(FakeTensorMode):
    """torch's, with two rules mended: it refuses grouped products outside bf16, and forgets what an LSTM keeps for backward."""

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self._kept: dict[tuple[Any, ...], int] = {}  # bytes, by shapes and settings of a layer

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is aten._grouped_mm.default and args[0].dtype != torch.bfloat16:
            with self:
                return grouped_product(func, args, kwargs or {})
        result: Any = super().__torch_dispatch__(func, types, args, kwargs)
        if func is not aten.mkldnn_rnn_layer.default:
            return result
        key = (torch.is_grad_enabled(), *(tuple(each.shape) for each in args[:7]), *map(str, args[7:]))
        if key not in self._kept:
            self._kept[key] = _kept_bytes(args)
        with self:
            return (*result[:3], torch.empty(self._kept[key], dtype=torch.uint8, device=CPU))


def _kept_bytes(args: Sequence[Any]) -> int:
    """Of a layer of an LSTM, by running it on zeros; of a long sequence by two parts of it."""

    def run(length: int) -> int:
        shapes = [(length, *args[0].shape[1:]), *(each.shape for each in args[1:7])]
        zeros = [torch.zeros(shape, dtype=each.dtype) for shape, each in zip(shapes, args[:7], strict=True)]
        kept: torch.Tensor | None = aten.mkldnn_rnn_layer(*zeros, *args[7:])[3]
        return 0 if kept is None else kept.nbytes  # none where no gradients are asked for

    length = int(args[0].shape[0])
    if length <= LONG:
        return run(length)
    part, half = run(LONG), run(LONG // 2)
    return part + (part - half) * (length - LONG) // (LONG // 2)


def sized_model(job: Job) -> nn.Module:
    """The job's model without bytes, where it is not made yet."""
    with torch.device("meta"):
        return job.build()


@contextmanager
def fake_model(job: Job, mode: FakeTensorMode, memento: Memento) -> Iterator[nn.Module]:
    """The job's model on fake tensors, in the run's precision, ties kept; one that was given has its own again afterwards."""
    model = sized_model(job)
    refuse_unmade(model)
    dtypes = job.dtypes(model)

    def parameter_like(name: str, parameter: nn.Parameter) -> nn.Parameter:
        held = torch.empty_strided(parameter.shape, parameter.stride(), dtype=dtypes[name], device="meta")
        return nn.Parameter(_as_fake(held, mode), requires_grad=parameter.requires_grad)

    if model is not job.model:
        memento = Memento(job, model)  # knows what was made with it
    with swapped(model, memento, parameter_like, lambda buffer: _as_fake(buffer, mode)):
        yield model


def fake_batch(job: Job, rows: int, mode: FakeTensorMode) -> Batch:
    """`rows` samples like the job's largest, as fakes."""
    sample = largest_sample(job, rows)

    def imitate(tensor: torch.Tensor, shape: Sequence[int] | None = None) -> torch.Tensor:
        if not is_dense(tensor):
            return mode.from_tensor(tensor if shape is None else repeated(tensor, rows))
        return torch.empty(tensor.shape if shape is None else shape, dtype=tensor.dtype, device=CPU)

    with mode:
        samples = with_rows(sample, job.rows(sample), rows, lambda each: imitate(each, (rows, *shape_of(each)[1:])), imitate)
        return job.prepare(samples, CPU)


def largest_sample(job: Job, rows: int) -> Batch:
    """The largest batch to expect, cut to so many rows where the user's `split` alone knows how."""
    sample = job.sample if job.max_sample is None else job.max_sample
    if job.split is not None:
        rest = job.batch_size - rows
        return job.cut(sample, [rows, rest] if rest else [rows])[0]
    return sample


def _as_fake(tensor: torch.Tensor, mode: FakeTensorMode) -> torch.Tensor:
    if isinstance(tensor, FakeTensor):
        return tensor
    if tensor.is_meta:
        return FakeTensor(mode, tensor, CPU)
    return mode.from_tensor(tensor)


@contextmanager
def swapped(
    model: nn.Module,
    memento: Memento,
    parameter_like: Callable[[str, nn.Parameter], nn.Parameter],
    buffer_like: Callable[[Tensor], Tensor],
) -> Iterator[None]:
    """Inside, the model computes with what these make of its parameters, by name, and buffers; tied ones stay one.

    A copy of a module would not do: patched forwards, hooks and wrappers know the original. So the module itself is run, with
    each tensor replaced wherever the job's code holds it (`values/memento.py` finds where), and put back afterwards."""
    instead: dict[int, Any] = {}  # by identity
    for name, parameter in model.named_parameters():
        instead[id(parameter)] = made = parameter_like(name, parameter)
        vars(made).update(_of_its_class(parameter, made))
        vars(made).update(vars(parameter))  # marks that the user has set, such as those an optimizer's groups go by
    for buffer in model.buffers():
        instead[id(buffer)] = buffer_like(buffer)
    for tensor in memento.tensors:  # made with the model, and held by something else: a constant, a second model
        if tensor.is_meta and id(tensor) not in instead:
            held = buffer_like(tensor)
            instead[id(tensor)] = nn.Parameter(held, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else held
    registered = [
        (tensors, name, tensor)
        for module in model.modules()
        for tensors in (module._parameters, module._buffers)
        for name, tensor in tensors.items()
        if tensor is not None
    ]
    try:
        memento.put(instead)
        for tensors, name, tensor in registered:
            tensors[name] = instead[id(tensor)]
        yield
    finally:
        for tensors, name, tensor in registered:
            tensors[name] = tensor  # type: ignore[assignment]


def _of_its_class(parameter: nn.Parameter, made: nn.Parameter) -> dict[str, Any]:
    """What a subclass of Parameter has that Parameter has not, for a tensor that cannot be of that class."""
    kinds = type(parameter).__mro__[: type(parameter).__mro__.index(nn.Parameter)]
    names = {name for kind in kinds for name in vars(kind) if not name.startswith("__")}
    held = {name: getattr(parameter, name) for name in names}
    return {name: MethodType(each.__func__, made) if isinstance(each, MethodType) else each for name, each in held.items()}


def refuse_unmade(model: nn.Module) -> None:
    """Lazy modules make their parameters in the first forward, from its shapes: after an optimizer was to have them."""
    for name, parameter in [*model.named_parameters(), *model.named_buffers()]:
        if torch.nn.parameter.is_lazy(parameter):
            module = model.get_submodule(name.rpartition(".")[0])
            raise ValueError(
                f"{name} has no shape yet: {type(module).__name__} makes it in its first forward; run the model once on a batch "
                "before it is trained, as its optimizer needs too: in the function that makes it, or before Job(model=model)"
            )
