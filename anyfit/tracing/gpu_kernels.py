"""What a GPU does where a trace on a CPU does something else.

The fakes live on a fake CPU, so torch would pick CPU kernels for them. Attention and dropout are the two whose choice changes
what backward keeps: a GPU's attention never holds the scores, and its dropout keeps a mask of one byte an element.

Where a tensor gets gradients from several sides, autograd adds the later ones to the first, unless something else holds it. Under
a dispatch mode, as in a trace, each sum is a new storage, which a GPU does not have.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from torch.overrides import TorchFunctionMode

from .recorder import Recorder, Storage

aten = torch.ops.aten


class AsOnGpu(TorchFunctionMode):
    """Runs the ops that CUDA would dispatch to."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.scaled_dot_product_attention:
            return attention(*args, **kwargs)
        if func in (F.dropout, torch.dropout):
            return dropout(*args, **kwargs)
        return func(*args, **kwargs)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """A fused kernel wherever CUDA has one (half precision, or fp32 without grouped queries), else the plain formula. All fused
    kernels keep the same for backward: the output, and a number for each row. Rows must lie together, a mask's too. One of them
    makes gradients of the mask."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    head = query.shape[-1]
    fits = query.dim() == 4 and key.shape[-1] == value.shape[-1] == head and head % (8 if half else 4) == 0
    fits = fits and all(tensor.stride(-1) == 1 for tensor in (query, key, value, attn_mask) if tensor is not None)
    learns_mask = attn_mask is not None and attn_mask.requires_grad
    needs_backward = any(tensor.requires_grad for tensor in (query, key, value))
    after = (needs_backward, dropout_p, is_causal)
    if fits and half and head <= 256 and not learns_mask:
        fused = aten._scaled_dot_product_cudnn_attention
        return _tensor(fused(query, key, value, attn_mask, *after, False, scale=scale)[0])
    if fits and not enable_gqa:
        bias = _as_bias(attn_mask, query.dtype)
        if bias is not None:
            bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
        return _tensor(aten._scaled_dot_product_efficient_attention(query, key, value, bias, *after, scale=scale)[0])
    return _by_the_formula(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _as_bias(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=dtype).masked_fill(mask.logical_not(), float("-inf"))


def _by_the_formula(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """torch's unfused attention, step by step, with the GPU's dropout. Halves are computed in fp32 throughout."""
    dtype = query.dtype
    exact_query, key, value = (tensor.float() for tensor in (query, key, value))
    if key.shape[-3] != query.shape[-3]:
        repeats = query.shape[-3] // key.shape[-3]
        key, value = (tensor.repeat_interleave(repeats, dim=-3) for tensor in (key, value))
    half_scale = math.sqrt(scale if scale is not None else 1 / math.sqrt(query.shape[-1]))  # each factor takes its root
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    mask = _as_bias(mask, query.dtype)
    query = exact_query * half_scale  # both stay to the end of torch's function
    shares = torch.matmul(query, key.transpose(-2, -1) * half_scale)
    if mask is not None:
        shares = shares.add_(mask)
    shares = _tensor(aten._safe_softmax(shares, -1))
    shares = dropout(shares, dropout_p)
    returned = shares.to(dtype)  # torch's function gives the shares back as well, and makes them first
    result = torch.matmul(shares, value).to(dtype)
    del returned
    return result


def dropout(input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False, **renamed: Any) -> Tensor:
    training = renamed.get("train", training)  # torch.dropout's name for it
    if not training or p == 0.0:
        return input
    made = _tensor(aten.native_dropout(input, p, True)[0])
    return input.copy_(made) if inplace else made


def _tensor(value: Any) -> Tensor:
    assert isinstance(value, Tensor)
    return value


class GpuRecorder(Recorder):
    """Knows which sums of gradients a GPU's memory would not see."""

    def __init__(self, *about: Any) -> None:
        super().__init__(*about)
        self._sums: list[tuple[int, Storage, Storage]] = []  # the op, what it makes, and the summand it would add to

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.add.Tensor:
            return super().__torch_dispatch__(func, types, args, kwargs)
        before, count = self._summand(args), len(self.storages)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        if before is not None and len(self.storages) == count + 1 and self.storages[-1].bytes == before.bytes:
            self._sums.append((len(self.ops) - 1, self.storages[-1], before))
        return result

    def _summand(self, args: Any) -> Storage | None:
        """Autograd adds to the gradient that came first, but not where that is a view: its storage is its base's as well
        (torch/csrc/autograd/input_buffer.cpp). The few formulas of backward that add by themselves cannot be told apart."""
        in_backward = self.phase == "backward" and len(self._stack) == 1
        if not in_backward or args[0]._is_view():
            return None
        return self._known.get(args[0].untyped_storage()._cdata)

    def settle(self) -> set[int]:
        """After backward: gives every such sum the storage of its summand, if nothing else needs that. Identities of these."""
        stands_for: dict[int, Storage] = {}
        for moment, total, summand in self._sums:
            first = stands_for.get(id(summand), summand)
            if first.dies == moment:
                first.dies, first.kind = total.dies, total.kind
                first.reads, first.writes = first.reads + total.reads, [*first.writes, moment, *total.writes]
                stands_for[id(total)] = first
        self.storages = [storage for storage in self.storages if id(storage) not in stands_for]
        return set(stands_for)
