"""How fast the device multiplies matrices, attends, convolves, and starts an op, each as training asks for it.

Products are `linear(x, w)` on square-ish shapes with their result freshly allocated, as in a forward pass. Data is
random: a GPU fed zeros draws less power and so runs faster than it ever will in training. Attention is causal and its
FLOPs are counted whole, 4 x batch x heads x length² x width, as Graph counts them; so a kernel that skips the masked
half may stand above the matmul rate. Unaligned products are the two of a backward pass whose gradient has an odd number
of columns, as that of a vocabulary of 50257 words. A convolution is read together with its backward, twice its FLOPs.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from .meters import Effort, Ladder, Meter, Work, climb, pace_timer_of, rate_meter, timer_of

aten = torch.ops.aten
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

# Edges of square products. 36 is 1e5 FLOPs: below it there is nothing but the launch.
MATMUL_EDGES = {
    "cpu": (36, 64, 128, 256, 512, 1024, 2048),
    "cuda": (36, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384),
}
# (batch, heads, length, width of a head), FLOPs ascending.
ATTENTION_SHAPES = {
    "cpu": ((1, 2, 16, 32), (1, 4, 64, 32), (2, 4, 128, 64), (2, 8, 256, 64), (2, 12, 512, 64), (2, 12, 1024, 64)),
    "cuda": (
        (1, 4, 64, 64),
        (2, 8, 256, 64),
        (4, 12, 512, 64),
        (4, 16, 1024, 64),
        (4, 32, 2048, 64),
        (4, 32, 2048, 128),
        (4, 32, 4096, 128),
    ),
}
# Of what follows there are few sizes, because it is a correction to what stands above.
UNALIGNED_EDGES = {"cpu": (64, 256, 512, 1024), "cuda": (64, 1024, 4096, 8192)}
BACKWARD_SHAPES = {
    "cpu": ((1, 4, 64, 32), (2, 4, 128, 64), (2, 8, 256, 64), (2, 12, 512, 64)),
    "cuda": ((1, 4, 64, 64), (4, 12, 512, 64), (4, 32, 2048, 64), (4, 32, 4096, 128)),
}
# (batch, channels in and out, height and width).
CONVOLUTION_SHAPES = {
    "cpu": ((1, 64, 8), (1, 64, 28), (1, 128, 28), (4, 256, 14)),
    "cuda": ((4, 64, 28), (32, 64, 56), (128, 256, 14), (128, 512, 14)),
}


def matmul_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By dtype: FLOP/s by FLOPs of one product. `room_bytes` bounds what one product may hold."""
    generator = torch.Generator(device).manual_seed(0)

    def ladder(name: str, dtype: torch.dtype) -> Ladder:
        def prepare(edge: int) -> tuple[float, Work]:
            inputs = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
            weight = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
            return 2.0 * edge**3, lambda: functional.linear(inputs, weight)

        edges = [edge for edge in MATMUL_EDGES[device.type] if 16 * edge**2 <= room_bytes]
        return climb(f"{name} products", edges, prepare, timer_of(device), effort)

    return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def attention_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By dtype: FLOP/s by FLOPs of one causal forward call."""
    generator = torch.Generator(device).manual_seed(0)

    def ladder(name: str, dtype: torch.dtype) -> Ladder:
        def prepare(shape: tuple[int, int, int, int]) -> tuple[float, Work]:
            batch, heads, length, width = shape
            query, key, value = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(3))
            return 4.0 * batch * heads * length**2 * width, lambda: functional.scaled_dot_product_attention(
                query, key, value, is_causal=True
            )

        shapes = [shape for shape in ATTENTION_SHAPES[device.type] if 20 * math.prod(shape) <= room_bytes]
        return climb(f"{name} attention", shapes, prepare, timer_of(device), effort)

    return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def unaligned_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By dtype: FLOP/s by FLOPs of one product with an operand whose rows have an odd length."""
    generator = torch.Generator(device).manual_seed(0)

    def ladder(name: str, dtype: torch.dtype) -> Ladder:
        def prepare(edge: int) -> tuple[float, Work]:
            odd = edge + 1
            inputs = torch.randn(edge, edge, device=device, generator=generator).to(dtype)
            weight = torch.randn(odd, edge, device=device, generator=generator).to(dtype)
            gradient = torch.randn(edge, odd, device=device, generator=generator).to(dtype)
            return 2.0 * edge * edge * odd, lambda: (gradient @ weight, gradient.t() @ inputs)

        edges = [edge for edge in UNALIGNED_EDGES[device.type] if 32 * edge**2 <= room_bytes]
        return climb(f"{name} unaligned products", edges, prepare, timer_of(device), effort, calls=2)

    return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def attention_backward_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By dtype: FLOP/s by FLOPs of the backward of one causal call: five products where the forward has two."""
    generator = torch.Generator(device).manual_seed(0)

    def ladder(name: str, dtype: torch.dtype) -> Ladder:
        def prepare(shape: tuple[int, int, int, int]) -> tuple[float, Work]:
            batch, heads, length, width = shape
            query, key, value, gradient = (torch.randn(shape, device=device, generator=generator).to(dtype) for _ in range(4))
            inputs = [tensor.requires_grad_() for tensor in (query, key, value)]
            with torch.enable_grad():
                output = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
            # Through autograd, because which kernel it is depends on the device, the dtype and the shape.
            return 10.0 * batch * heads * length**2 * width, lambda: torch.autograd.grad(
                output, inputs, gradient, retain_graph=True
            )

        shapes = [shape for shape in BACKWARD_SHAPES[device.type] if 40 * math.prod(shape) <= room_bytes]
        return climb(f"{name} attention backward", shapes, prepare, timer_of(device), effort)

    return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def convolution_ladders(device: torch.device, effort: Effort, room_bytes: float) -> dict[str, Ladder]:
    """By dtype: FLOP/s by the mean FLOPs of a 3x3 convolution and its backward."""
    generator = torch.Generator(device).manual_seed(0)

    def ladder(name: str, dtype: torch.dtype) -> Ladder:
        def prepare(shape: tuple[int, int, int]) -> tuple[float, Work]:
            batch, channels, edge = shape
            image = (batch, channels, edge, edge)
            inputs, gradient = (torch.randn(image, device=device, generator=generator).to(dtype) for _ in range(2))
            weight = torch.randn(channels, channels, 3, 3, device=device, generator=generator).to(dtype)
            setting = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)  # stride, padding, dilation; not transposed; one group

            def both() -> None:
                aten.convolution(inputs, weight, None, *setting)
                aten.convolution_backward(gradient, inputs, weight, None, *setting, [True, True, False])

            forward_flops = 2.0 * 9 * channels**2 * batch * edge**2
            return 1.5 * forward_flops, both

        shapes = [shape for shape in CONVOLUTION_SHAPES[device.type] if 24 * shape[0] * shape[1] * shape[2] ** 2 <= room_bytes]
        return climb(f"{name} convolutions", shapes, prepare, timer_of(device), effort, calls=2)

    return {name: ladder(name, dtype) for name, dtype in DTYPES.items()}


def launch_meter(device: torch.device, effort: Effort) -> Meter:
    """Seconds from the start of one op to the start of the next, when the ops do next to nothing."""
    total, number = torch.ones(1, device=device), torch.ones(1, device=device)
    rate, _ = rate_meter("op launch", lambda: total.add_(number), 1.0, pace_timer_of(device), effort)
    return Meter(rate.label, lambda: 1.0 / rate.read())
