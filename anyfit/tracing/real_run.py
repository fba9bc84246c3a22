"""The user's model and batch as they are, on the CPU: for a model whose forward needs values that fakes do not have.

The recorder watches this pass as it watches one over fakes. The model is built in this host's memory, so its size is compared
with what is free first; and a CPU has no kernel for a GPU's attention, so one is lent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.values.batches import repeated, with_rows
from anyfit.values.job import Batch, Job
from anyfit.values.memento import Memento
from anyfit.values.nests import is_dense
from anyfit.values.units import show_bytes

from .needs import arguments_of
from .stand_in import CPU, largest_sample, refuse_unmade, swapped

aten = torch.ops.aten
FUSED = ("_scaled_dot_product_cudnn_attention", "_scaled_dot_product_efficient_attention")
LENT = {getattr(aten, f"{name}{suffix}") for name in FUSED for suffix in ("", "_backward")}


def refuse_unless_it_can_run(job: Job, model: nn.Module, free_bytes: float) -> None:
    """Before it is made: by the model that `sized_model` gives."""
    refuse_unmade(model)
    dtypes = job.dtypes(model)
    parameters = dict(model.named_parameters())
    unmade = next((name for name, parameter in parameters.items() if model is job.model and parameter.is_meta), None)
    if unmade is not None:
        raise ValueError(
            f"a real run needs real weights, and {unmade} is on the meta device; give Job a function that makes them"
        )
    held = sum(each.numel() * dtypes[name].itemsize * (2 if each.requires_grad else 1) for name, each in parameters.items())
    needed = max(bytes_of(model), held + sum(buffer.numel() * buffer.element_size() for buffer in model.buffers()))
    if needed > free_bytes:
        raise ValueError(
            f"a real run of {type(model).__name__} needs {show_bytes(needed)} of this host's memory for weights and gradients "
            f"alone, and {show_bytes(free_bytes)} are free; run it where there is more, or keep values out of the forward: then "
            "real_run is not needed, and no memory either"
        )


@contextmanager
def real_model(job: Job, memento: Memento) -> Iterator[nn.Module]:
    """The job's model on the CPU in the run's precision; one that was given has its own tensors again afterwards."""
    if not isinstance(job.model, nn.Module):
        torch.default_generator.manual_seed(job.seed)  # the CPU's alone: the caller puts it back
    model = job.build()
    dtypes = job.dtypes(model)
    if model is not job.model:
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.to(dtypes[name])  # one after the other: never all of them twice
            parameter.grad = None
        yield model.to(CPU)
        return

    def parameter_like(name: str, parameter: nn.Parameter) -> nn.Parameter:
        held = parameter.detach().to(CPU, dtypes[name], copy=True)
        return nn.Parameter(held, requires_grad=parameter.requires_grad)

    with swapped(model, memento, parameter_like, lambda buffer: buffer.detach().to(CPU, copy=True)):
        yield model


def real_batch(job: Job, rows: int) -> Batch:
    """`rows` samples of the job's largest, its own again where it has fewer."""
    sample = largest_sample(job, rows)

    def copied(tensor: Tensor) -> Tensor:
        return tensor.clone(memory_format=torch.contiguous_format) if is_dense(tensor) else tensor.clone()  # it may be written to

    return job.prepare(with_rows(sample, job.rows(sample), rows, lambda tensor: repeated(tensor, rows), copied), CPU)


def bytes_of(model: nn.Module) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


class LentKernels(TorchDispatchMode):
    """A GPU's fused attention on a CPU: torch's own result, in outputs of the GPU's sizes. Gradients are zeros: none is read."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._overloadpacket not in LENT:
            return func(*args, **kwargs)
        sizes = func(*pytree.tree_map_only(Tensor, lambda tensor: _empty_like(tensor, "meta"), args), **kwargs)
        made = pytree.tree_map_only(Tensor, lambda tensor: _empty_like(tensor, "cpu").zero_(), sizes)
        if not func._overloadpacket.__name__.endswith("backward"):
            given = arguments_of(func, args, kwargs)
            query, key, value, bias = (given[name] for name in ("query", "key", "value", "attn_bias"))
            how = {"is_causal": given.get("is_causal", False), "scale": given.get("scale")}
            is_grouped = key.shape[-3] != query.shape[-3]
            made[0].copy_(F.scaled_dot_product_attention(query, key, value, bias, enable_gqa=is_grouped, **how))
        return made


def _empty_like(tensor: Tensor, device: str) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
