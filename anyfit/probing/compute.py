"""How fast the device multiplies matrices, attends, and starts an op, each as training asks for it.

Products are `linear(x, w)` on square-ish shapes with their result freshly allocated, as in a forward pass. Data is
random: a GPU fed zeros draws less power and so runs faster than it ever will in training. Attention is causal and its
FLOPs are counted whole, 4 x batch x heads x length² x width, as Graph counts them; so a kernel that skips the masked
half may stand above the matmul rate.
"""

from __future__ import annotations

import math

import torch
from torch.nn import functional

from .meters import Effort, Ladder, Meter, Work, climb, rate_meter, timer_of

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


def launch_meter(device: torch.device, effort: Effort) -> Meter:
    """Seconds from the start of one op to the start of the next, when the ops do next to nothing."""
    total, number = torch.ones(1, device=device), torch.ones(1, device=device)
    rate, _ = rate_meter("op launch", lambda: total.add_(number), 1.0, timer_of(device), effort)
    return Meter(rate.label, lambda: 1.0 / rate.read())
