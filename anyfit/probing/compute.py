"""How fast the device multiplies matrices, attends, convolves and starts an op; and what an op of training costs the host.

Products are `linear(x, w)` on square shapes with their result freshly allocated, as in a forward pass. Data is random: a GPU fed
zeros draws less power and so runs faster than it ever will in training. Attention is causal and its FLOPs are counted whole,
4 x batch x heads x length² x width, as Graph counts them; so a kernel that skips the masked half may stand above the matmul rate.
Unaligned products are the two of a backward pass whose gradient has an odd number of columns, as that of a vocabulary of 50257
words. A convolution is read together with its backward, twice its FLOPs.

Small models are bound by what the host takes for a dispatcher call, with autograd, the allocator and Python. It is read on a few
transformer blocks, forward and backward, with tensors so tiny that their arithmetic costs nothing. Calls are counted below
autograd, views included, as the recorder of a pass counts them. Beside a GPU the same is read while the host updates and while
it copies: the threads that do this have caches, memory and Python's lock in common with the one that launches.
"""

from __future__ import annotations

import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, scaled_dot_product_attention
from torch.utils._python_dispatch import TorchDispatchMode

from anyfit.values.machine import Beside

from .meters import Effort, Ladder, Load, Meter, Work, beside, climb, pace_timer_of, rate_meter, timer_of

aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
BLOCKS, HEADS, WIDTH, LENGTH = 4, 2, 32, 8  # of the transformer that the host's calls are read on
LAUNCH_READINGS = 4  # so many times as long as others: beside a load they differ more
Shape = tuple[int, ...]
Draw = Callable[..., Tensor]  # random numbers of a shape
# Tensors of one call by kind of device, FLOPs ascending. The smallest square is 1e5 FLOPs: below it there is only the launch.
SQUARES = {
    "cpu": [(edge, edge) for edge in (36, 64, 128, 256, 512, 1024, 2048)],
    "cuda": [(edge, edge) for edge in (36, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)],
}
ATTENTION_SHAPES = {  # batch, heads, length, width of a head
    "cpu": [(1, 2, 16, 32), (1, 4, 64, 32), (2, 4, 128, 64), (2, 8, 256, 64), (2, 12, 512, 64), (2, 12, 1024, 64)],
    "cuda": [
        *((1, 4, 64, 64), (2, 8, 256, 64), (4, 12, 512, 64), (4, 16, 1024, 64)),
        *((4, 32, 2048, 64), (4, 32, 2048, 128), (4, 32, 4096, 128)),
    ],
}
# Of what follows there are few sizes, because it is a correction to what stands above.
ODD_SQUARES = {
    "cpu": [(edge, edge) for edge in (64, 256, 512, 1024)],
    "cuda": [(edge, edge) for edge in (64, 1024, 4096, 8192)],
}
BACKWARD_SHAPES = {
    "cpu": [(1, 4, 64, 32), (2, 4, 128, 64), (2, 8, 256, 64), (2, 12, 512, 64)],
    "cuda": [(1, 4, 64, 64), (4, 12, 512, 64), (4, 32, 2048, 64), (4, 32, 4096, 128)],
}
IMAGES = {  # batch, channels in and out, height, width
    "cpu": [(1, 64, 8, 8), (1, 64, 28, 28), (1, 128, 28, 28), (4, 256, 14, 14)],
    "cuda": [(4, 64, 28, 28), (32, 64, 56, 56), (128, 256, 14, 14), (128, 512, 14, 14)],
}


@dataclass(frozen=True)
class Workload:
    """One kind of work: FLOP/s by FLOPs of one call."""

    label: str
    shapes: Mapping[str, Sequence[Shape]]
    held_bytes: int  # at once, for each element of the shape
    prepare: Callable[[Draw, Shape], tuple[float, Work]]
    calls: int = 1
    is_correction: bool = False  # to another that is read at length

    def ladders(self, device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
        """By dtype. `room_bytes` bounds what one call may hold."""
        generator, level = torch.Generator(device).manual_seed(0), effort.brief if self.is_correction else effort
        shapes = [shape for shape in self.shapes[device.type] if self.held_bytes * math.prod(shape) <= room_bytes]

        def ladder(name: str, dtype: torch.dtype) -> Ladder:
            def draw(*shape: int) -> Tensor:
                return torch.randn(shape, device=device, generator=generator).to(dtype)

            prepare = functools.partial(self.prepare, draw)
            return climb(f"{name} {self.label}", shapes, prepare, timer_of(device), level, self.calls)

        return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def _product(draw: Draw, shape: Shape) -> tuple[float, Work]:
    inputs, weight = draw(*shape), draw(*shape)
    return 2.0 * shape[0] ** 3, lambda: linear(inputs, weight)


def _unaligned(draw: Draw, shape: Shape) -> tuple[float, Work]:
    edge, odd = shape[0], shape[0] + 1
    inputs, weight, gradient = draw(edge, edge), draw(odd, edge), draw(edge, odd)
    return 2.0 * edge * edge * odd, lambda: (gradient @ weight, gradient.t() @ inputs)


def _attention(draw: Draw, shape: Shape) -> tuple[float, Work]:
    batch, heads, length, width = shape
    query, key, value = (draw(*shape) for _ in range(3))
    return 4.0 * batch * heads * length**2 * width, lambda: scaled_dot_product_attention(query, key, value, is_causal=True)


def _attention_backward(draw: Draw, shape: Shape) -> tuple[float, Work]:
    """Five products where the forward has two. Through autograd: which kernel it is depends on device, dtype and shape."""
    batch, heads, length, width = shape
    query, key, value, gradient = (draw(*shape) for _ in range(4))
    inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
    with torch.enable_grad():
        output = scaled_dot_product_attention(query, key, value, is_causal=True)
    flops = 10.0 * batch * heads * length**2 * width
    return flops, lambda: torch.autograd.grad(output, inputs, gradient, retain_graph=True)


def _convolution(draw: Draw, shape: Shape) -> tuple[float, Work]:
    """The mean FLOPs of a 3x3 convolution and its backward."""
    channels, inputs, gradient = shape[1], draw(*shape), draw(*shape)
    weight = draw(channels, channels, 3, 3)
    setting = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation; not transposed; one group

    def both() -> None:
        aten.convolution(inputs, weight, None, *setting)
        aten.convolution_backward(gradient, inputs, weight, None, *setting, [True, True, False])

    return 1.5 * 2.0 * 9 * channels * math.prod(shape), both


WORKLOADS = {  # by field of Device
    "matmul": Workload("products", SQUARES, 16, _product),
    "matmul_unaligned": Workload("unaligned products", ODD_SQUARES, 32, _unaligned, calls=2, is_correction=True),
    "attention": Workload("attention", ATTENTION_SHAPES, 20, _attention),
    "attention_backward": Workload("attention backward", BACKWARD_SHAPES, 40, _attention_backward, is_correction=True),
    "convolution": Workload("convolutions", IMAGES, 24, _convolution, calls=2, is_correction=True),
}


def launch_meter(device: torch.device, effort: Effort) -> Meter:
    """Seconds from the start of one op to the start of the next, when the ops do next to nothing."""
    total, number = torch.ones(1, device=device), torch.ones(1, device=device)
    return _seconds_meter("op launch", lambda: total.add_(number), 1, device, effort)


def host_meter(device: torch.device, effort: Effort) -> Meter:
    """Seconds of one dispatcher call."""
    step, calls = tiny_training(device)
    return _seconds_meter("training on the host", step, calls, device, effort)


def tiny_training(device: torch.device) -> tuple[Work, int]:
    """A step of a few blocks, and how many dispatcher calls it makes. Building the blocks draws random numbers."""
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = nn.Sequential(*(Block() for _ in range(BLOCKS))).to(device, dtype)
    hidden = torch.ones(1, LENGTH, WIDTH, device=device, dtype=dtype)

    def step() -> None:
        with torch.enable_grad():
            model(hidden).sum().backward()
        model.zero_grad()

    step()  # counted warm: the first step may do more
    with CallCounter() as counter:
        step()
    return step, counter.calls


def launch_slowdown_meters(device: torch.device, effort: Effort, loads: Mapping[Beside, Load]) -> dict[Beside, Meter]:
    """By load, how many times as long a call takes beside it. Means, and not the best part of a reading: a step waits for all of
    its launches."""
    step, _ = tiny_training(device)
    seconds = LAUNCH_READINGS * effort.reading_seconds

    def mean() -> float:
        step()
        count, began = 0, time.perf_counter()
        while count == 0 or time.perf_counter() - began < seconds:
            step()
            count += 1
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - began) / count

    def slowdown(load: Load) -> float:
        return max(beside(load, mean) / mean(), 1.0)

    return {name: Meter(f"launches beside {name}", functools.partial(slowdown, load)) for name, load in loads.items()}


def _seconds_meter(label: str, work: Work, calls: int, device: torch.device, effort: Effort) -> Meter:
    rate, _ = rate_meter(label, work, float(calls), pace_timer_of(device), effort)
    return Meter(label, lambda: 1.0 / rate.read())


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.into_heads, self.out_of_heads = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        query, key, value = (
            part.view(batch, length, HEADS, width // HEADS).transpose(1, 2)
            for part in self.into_heads(self.before_attention(hidden)).split(width, dim=2)
        )
        mixed = scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out_of_heads(mixed.transpose(1, 2).reshape(batch, length, width))
        return torch.add(hidden, self.mlp(self.before_mlp(hidden)))


class CallCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))
