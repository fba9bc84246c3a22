"""How much of the bandwidth each of the common ops reaches: `a + b` says little about a layer norm.

Every op of OPERATIONS is called as the recorder of a pass sees it, on rows of 1024 elements: bfloat16 on a GPU, float32
on a CPU. Its bytes are the recorder's too: everything read plus everything written, small and large. All ops of one
size share their inputs, so that a GPU with little memory is not filled by them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .meters import Effort, Ladder, Work, climb, timer_of

aten = torch.ops.aten
WIDTH = 1024  # of a row
HEADS = 16
CHANNELS, IMAGE = 64, 64  # elements of an image in one channel: 8 x 8
# Bytes of an op's main input.
INPUT_BYTES = {
    "cpu": tuple(2**10 * size for size in (64, 512, 4096, 16384)),
    "cuda": tuple(2**10 * size for size in (64, 2048, 32768, 262144)),
}
MOST_TENSORS = 12  # of an input's size: what the inputs and the results of one size hold at once


@dataclass(frozen=True)
class Material:
    """What the ops of one size work on."""

    inputs: torch.Tensor
    other: torch.Tensor
    gradient: torch.Tensor
    scale: torch.Tensor  # of a row
    probabilities: torch.Tensor
    mask: torch.Tensor
    words: torch.Tensor  # one for each row

    @staticmethod
    def make(device: torch.device, size_bytes: int) -> Material:
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        generator = torch.Generator(device).manual_seed(0)
        rows = max(1, size_bytes // WIDTH // dtype.itemsize)
        inputs, other, gradient = (torch.randn(rows, WIDTH, device=device, dtype=dtype, generator=generator) for _ in range(3))
        return Material(
            inputs,
            other,
            gradient,
            scale=torch.ones(WIDTH, device=device, dtype=dtype),
            probabilities=aten._softmax(inputs, -1, False),
            mask=other > -1.3,
            words=torch.randint(rows, (rows,), device=device, generator=generator),
        )


@dataclass(frozen=True)
class Calls:
    """Calls of one op, each with the same bytes: `run` makes all of them, and gives the result of the last."""

    run: Callable[[], Any]
    reads: tuple[torch.Tensor, ...]  # by the last
    count: int = 1


def operation_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By op: bytes/s by bytes."""
    sizes = [size for size in INPUT_BYTES[device.type] if MOST_TENSORS * size <= room_bytes]
    material = functools.cache(functools.partial(Material.make, device))

    def ladder(name: str) -> Ladder:
        def prepare(size: int) -> tuple[float, Work]:
            calls = CALLS[name](material(size))
            return touched_bytes(calls), calls.run

        count = CALLS[name](material(sizes[0])).count
        return climb(f"op {name}", sizes, prepare, timer_of(device), effort, calls=count)

    return {name: ladder(name) for name in CALLS}


def touched_bytes(calls: Calls) -> float:
    """Read and written by one call."""
    result = calls.run()
    written = [result] if isinstance(result, torch.Tensor) else list(result)
    return float(sum(tensor.numel() * tensor.element_size() for tensor in (*calls.reads, *written)))


def _plain(op: Callable[..., Any], tensors: tuple[torch.Tensor, ...], *settings: object) -> Calls:
    """A call that takes its tensors first, and reads all of them."""
    return Calls(lambda: op(*tensors, *settings), tensors)


def _layer_norm(given: Material) -> Calls:
    scale = given.scale
    return Calls(lambda: aten.native_layer_norm(given.inputs, [WIDTH], scale, scale, 1e-5), (given.inputs, scale, scale))


def _layer_norm_backward(given: Material) -> Calls:
    inputs, gradient, scale = given.inputs, given.gradient, given.scale
    _, mean, deviation = aten.native_layer_norm(inputs, [WIDTH], scale, scale, 1e-5)
    return Calls(
        lambda: aten.native_layer_norm_backward(gradient, inputs, [WIDTH], mean, deviation, scale, scale, [True] * 3),
        (gradient, inputs, mean, deviation, scale, scale),
    )


def _batch_norm(given: Material) -> Calls:
    """By the op that picks cuDNN's kernel where training would. It returns more than native_batch_norm."""
    tensors = _of_batch_norm(given)
    return Calls(lambda: aten._batch_norm_impl_index(*tensors, True, 0.1, 1e-5, True)[:3], tensors)


def _batch_norm_backward(given: Material) -> Calls:
    tensors, gradients = _of_batch_norm(given), _images(given.gradient)
    images, scale, _, *running = tensors
    _, *saved, reserve, kernel = aten._batch_norm_impl_index(*tensors, True, 0.1, 1e-5, True)
    rest = (scale, *running, *saved)
    return Calls(
        lambda: aten._batch_norm_impl_index_backward(kernel, images, gradients, *rest, True, 1e-5, [True] * 3, reserve),
        (gradients, images, *rest),
    )


def _of_batch_norm(given: Material) -> tuple[torch.Tensor, ...]:
    """Images, scale, bias, running mean and variance."""
    scale = given.scale[:CHANNELS].clone()
    return _images(given.inputs), scale, scale, torch.zeros_like(scale), torch.ones_like(scale)


def _images(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(-1, CHANNELS, 8, IMAGE // 8)


def _cast_and_back(given: Material) -> Calls:
    narrow, wide = given.inputs.to(torch.bfloat16), given.inputs.to(torch.float32)

    def both() -> Any:
        aten._to_copy(narrow, dtype=torch.float32)
        return aten._to_copy(wide, dtype=torch.bfloat16)

    return Calls(both, (wide,), count=2)


def _transposing_copy(given: Material) -> Calls:
    rows = len(given.inputs)
    batch = rows // 1024 if rows > 1024 and rows % 1024 == 0 else 1  # sequences of a thousand rows or so at most
    heads_first = given.inputs.view(-1, HEADS, rows // batch, WIDTH // HEADS).transpose(1, 2)
    return Calls(lambda: aten.clone(heads_first, memory_format=torch.contiguous_format), (heads_first,))


CALLS: dict[str, Callable[[Material], Calls]] = {
    "native_layer_norm": _layer_norm,
    "native_layer_norm_backward": _layer_norm_backward,
    "_softmax": lambda given: _plain(aten._softmax, (given.inputs,), -1, False),
    "_softmax_backward_data": lambda given: _plain(
        aten._softmax_backward_data, (given.gradient, given.probabilities), -1, given.inputs.dtype
    ),
    "_log_softmax": lambda given: _plain(aten._log_softmax, (given.inputs,), -1, False),
    "_log_softmax_backward_data": lambda given: _plain(
        aten._log_softmax_backward_data, (given.gradient, given.probabilities), -1, given.inputs.dtype
    ),
    "native_dropout": lambda given: _plain(aten.native_dropout, (given.inputs,), 0.1, True),
    "native_dropout_backward": lambda given: _plain(aten.native_dropout_backward, (given.gradient, given.mask), 1 / 0.9),
    "native_batch_norm": _batch_norm,
    "native_batch_norm_backward": _batch_norm_backward,
    "sum": lambda given: _plain(aten.sum, (given.gradient,), [0], True),  # a bias's gradient
    "cat": lambda given: Calls(lambda: aten.cat([given.inputs, given.other], -1), (given.inputs, given.other)),
    "_to_copy": _cast_and_back,
    "clone": _transposing_copy,
    "gelu": lambda given: _plain(aten.gelu, (given.inputs,)),
    "gelu_backward": lambda given: _plain(aten.gelu_backward, (given.gradient, given.inputs)),
    "silu": lambda given: _plain(aten.silu, (given.inputs,)),
    "silu_backward": lambda given: _plain(aten.silu_backward, (given.gradient, given.inputs)),
    "tanh": lambda given: _plain(aten.tanh, (given.inputs,)),
    "mul": lambda given: _plain(aten.mul, (given.inputs, given.other)),
    "add": lambda given: _plain(aten.add, (given.inputs, given.other)),
    "embedding_dense_backward": lambda given: _plain(
        aten.embedding_dense_backward, (given.gradient, given.words), len(given.words), -1, False
    ),
    "linalg_vector_norm": lambda given: _plain(aten.linalg_vector_norm, (given.gradient,), 2),
}
