"""What a GPU's kernels take for themselves while they run: partial sums, copies in another layout, accumulators in fp32.

The rules are torch's own where torch decides. For what cuDNN and cuBLAS decide they were read off the allocator's record of
training steps on an H200 (torch 2.11): each says how close it came. They are little of what is allocated, and much of what is
reserved: a workspace a little larger than any hole takes a segment of its own, and that stays.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

from anyfit.values.call import Call, TensorForm
from anyfit.values.precision import ELEMENT_BYTES

THREADS_A_PROCESSOR = 2048
TILE = 128  # rows and columns of a product that one processor works on


@dataclass(frozen=True)
class Workspace:
    """Taken when the op has made so many of its results, and given back before it goes on."""

    after: int
    bytes: int


@cache
def workspaces(text: str, processors: int) -> tuple[Workspace, ...]:
    """Those of the call with this text on a GPU of so many processors, in order."""
    call = Call.read(text)
    found = RULES[call.op](call, processors) if call.op in RULES else []
    return tuple(each for each in found if each.bytes)


def _of_reduction(call: Call, processors: int) -> list[Workspace]:
    """Partial sums of the threads that share an output (ATen/native/cuda/Reduce.cuh, setReduceConfig): to the byte. Large where
    the rows of a matrix are added up, as for a bias's gradient; where each row is summed by itself, one block of threads does it.
    """
    source, dims = call.arguments[0], call.arguments[1] if len(call.arguments) > 1 else None
    reduced = range(len(source.shape)) if not dims else [dim % len(source.shape) for dim in dims]
    fastest = [dim for dim, stride in enumerate(source.stride) if stride == 1 and source.shape[dim] > 1]
    if not fastest or fastest[-1] in reduced:
        return []
    inputs = math.prod(source.shape[dim] for dim in reduced)
    outputs = math.prod(source.shape) // max(inputs, 1)
    vector = next(size for size in (4, 2, 1) if source.shape[fastest[-1]] % size == 0)
    threads = 512 // vector
    width = min(_power_of_two(outputs // vector), 32)
    height = min(_power_of_two(inputs), threads // width)
    width = min(_power_of_two(outputs // vector), threads // height)
    if inputs < min(16 * height, 256):
        return []
    values = -(-inputs // height)  # for a thread to add up
    blocks = -(-outputs // (vector * width))
    wanted = processors * (THREADS_A_PROCESSOR // (width * height))
    if values < 256 or blocks > wanted:
        return []
    shares = max(min(-(-wanted // blocks), -(-values // 16)), -(-values // 256))
    return [Workspace(1, 4 * outputs * shares * width * vector)] if shares > 1 else []


def _power_of_two(number: int) -> int:
    """The largest that is not above."""
    return 1 << (max(number, 1).bit_length() - 1)


def _of_convolution(call: Call, _: int) -> list[Workspace]:
    source, weight, stride, groups = (call.arguments[index] for index in (0, 1, 3, 8))
    if groups != 1 or _is_product(source, weight, stride):  # in groups of one channel torch has its own; others were not seen
        return []
    stride, padding, dilation = call.arguments[3:6]
    pixels = 1
    for dim, size in enumerate(source.shape[2:]):
        step, around, apart = (each[dim if len(each) > 1 else 0] for each in (stride, padding, dilation))
        pixels *= (size + 2 * around - apart * (weight.shape[2 + dim] - 1) - 1) // step + 1
    return [Workspace(1, _copies(source, weight, source.shape[0] * weight.shape[0] * pixels * ELEMENT_BYTES[source.dtype]))]


def _of_convolution_backward(call: Call, processors: int) -> list[Workspace]:
    """For the gradient of the input as in forward; for that of the weight, partial sums in fp32 as well."""
    result, source, weight, stride, groups, wanted = (call.arguments[index] for index in (0, 1, 2, 4, 9, 10))
    if groups != 1:
        return []
    copies, is_product = _copies(source, weight, _bytes(result)), _is_product(source, weight, stride)
    exact = 4 * math.prod(weight.shape)
    tiles = -(-weight.shape[0] // TILE) * -(-math.prod(weight.shape[1:]) // TILE)
    sums = copies + exact * max(processors // tiles, 1)  # of as many tiles as there are processors
    return [
        Workspace(1, copies if wanted[0] and not is_product else 0),
        Workspace(2, min(sums, source.shape[0] * exact) if is_product else sums),  # a product may do with one a sample
    ]


def _is_product(source: TensorForm, weight: TensorForm, stride: Sequence[int]) -> bool:
    """A kernel of one pixel, which cuDNN runs as a matrix product where pixels can be read four at a time."""
    return math.prod(weight.shape[2:]) == 1 and set(stride) == {1} and math.prod(source.shape[2:]) % 4 == 0


def _copies(source: TensorForm, weight: TensorForm, result_bytes: int) -> int:
    """cuDNN's fast kernels want channels last: input and result are copied, and a weight of more than one pixel. Over ResNet-50's
    convolutions in bf16 and fp32, forward and input gradient come within 200 bytes in nine of ten, and weight gradients within
    10 % but for the smallest pictures."""
    channels = source.shape[1]
    if ELEMENT_BYTES[source.dtype] == 2:
        channels = -(-channels // 8) * 8  # of a picture's three it makes eight
    copied = _bytes(source) // source.shape[1] * channels + result_bytes
    if math.prod(weight.shape[2:]) > 1:
        copied += _bytes(weight) // weight.shape[1] * channels
    return copied + 256  # a header


def _of_cudnn_attention_backward(call: Call, _: int) -> list[Workspace]:
    """The query's gradient in fp32 and a number for each row: to the byte in GPT-2."""
    *batch, rows, width = call.arguments[1].shape
    return [Workspace(3, 4 * math.prod(batch) * rows * (width + 1) + 256)]


def _of_efficient_attention_backward(call: Call, _: int) -> list[Workspace]:
    """The output times its gradient; then the query's gradient in fp32, 16 bytes more for each 64 rows: to the byte in BERT."""
    query = call.arguments[1]
    *batch, rows, width = query.shape
    exact = 4 * math.prod(batch) * rows * width
    return [Workspace(3, _bytes(query)), Workspace(3, exact + 16 * math.prod(batch) * -(-rows // 64))]


def _of_safe_softmax(call: Call, _: int) -> list[Workspace]:
    """Which of the scores are -inf, a byte each."""
    return [Workspace(1, math.prod(call.arguments[0].shape))]


def _of_embedding_backward(call: Call, _: int) -> list[Workspace]:
    """Sums of the rows that go to one place, in fp32, ten rows to a sum (ATen/native/cuda/EmbeddingBackwardKernel.cu)."""
    rows, places, table = call.arguments[:3]
    count, width = math.prod(places.shape), rows.shape[-1]
    if count <= 3072:  # added one by one
        return []
    return [Workspace(1, 4 * (count // 10 + min(count, table)) * (-(-width // 32) * 32))]


def _bytes(form: TensorForm) -> int:
    return math.prod(form.shape) * ELEMENT_BYTES[form.dtype]


# By op, of a call and the GPU's processors: ops that share their work among all of these have sums for each.
RULES: Mapping[str, Callable[[Call, int], list[Workspace]]] = {
    "sum.dim_IntList": _of_reduction,
    "mean.dim": _of_reduction,
    "convolution.default": _of_convolution,
    "convolution_backward.default": _of_convolution_backward,
    "_scaled_dot_product_cudnn_attention_backward.default": _of_cudnn_attention_backward,
    "_scaled_dot_product_efficient_attention_backward.default": _of_efficient_attention_backward,
    "_safe_softmax.default": _of_safe_softmax,
    "embedding_dense_backward.default": _of_embedding_backward,
}
