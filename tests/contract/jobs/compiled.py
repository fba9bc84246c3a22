"""Scripts, traces and compiled code, which read weights past every hook."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import Chain, Residual, Trial, adamw, hostile, squared, trial, vectors


def affine(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, weight, bias))


class Scripted(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.second(torch.relu(self.first(x)))


def scripted(module: nn.Module) -> Any:
    return torch.jit.script(module)


@hostile(also=("both", "resumed"))
def a_scripted_block() -> Trial:
    def block(width: int) -> nn.Module:
        return scripted(Scripted(width))

    return trial(lambda: Chain(block), squared, vectors())


@hostile()
def a_scripted_model() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.body, self.head = nn.Linear(8, 16), Scripted(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.body(self.stem(x)))

    return trial(lambda: scripted(Net()), squared, vectors())


@hostile()
def a_traced_block() -> Trial:
    def block(width: int) -> nn.Module:
        with torch.device("cpu"):
            made = Scripted(width)
            return torch.jit.trace(made, torch.zeros(4, width))  # type: ignore[no-any-return]

    torch.manual_seed(3)
    return trial(Chain(block), squared, vectors())


@hostile()
def a_scripted_function_of_weights() -> Trial:
    function = torch.jit.script(affine)

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + function(x, self.head.weight[:, :8], self.head.bias)

    return trial(Net, squared, vectors())


def compiled(module: Any, backend: str) -> Any:
    return torch.compile(module, backend=backend)


@hostile(also=("both",))
def a_compiled_function_that_reads_weights() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.function = compiled(affine, "eager")

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.function(x, self.head.weight[:, :8], self.head.bias)

    return trial(Net, squared, vectors())


@hostile(also=("both",))
def a_compiled_block() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[1].compile(backend="aot_eager")

    return trial(Net, squared, vectors(), adamw)


@hostile()
def a_compiled_model() -> Trial:
    return trial(lambda: compiled(Chain(), "aot_eager"), squared, vectors())


@hostile()
def a_compiled_loss() -> Trial:
    return trial(Chain, compiled(squared, "eager"), vectors())


@hostile()
def flexible_attention_in_plain_ops() -> Trial:
    """einsum, as_strided, unfold and a custom op."""

    class Block(Residual):
        def forward(self, x: Tensor) -> Tensor:
            y = super().forward(x)
            pairs = torch.einsum("bi,ij->bj", y, self.up.weight[: y.shape[1]])
            return y + pairs.unfold(1, 2, 1).mean(-1).sum(-1, keepdim=True) * 0.01

    return trial(lambda: Chain(Block), squared, vectors())


OWN = torch.library.Library("contract", "DEF")
OWN.define("twice(Tensor x) -> Tensor")
OWN.impl("twice", lambda x: x * 2, "CompositeImplicitAutograd")


@torch.library.custom_op("contract::shifted", mutates_args=())
def shifted(x: Tensor, weight: Tensor) -> Tensor:
    return torch.from_numpy(x.detach().numpy() * weight.detach().numpy() + 1)


@shifted.register_fake
def _(x: Tensor, weight: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs)


def _slope(ctx: Any, gradient: Tensor) -> Any:
    x, weight = ctx.saved_tensors
    return gradient * weight, (gradient * x).sum(0)


shifted.register_autograd(_slope, setup_context=_keep)


@hostile(also=("both",))
def ops_of_the_users_own() -> Trial:
    class Own(Residual):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.size = nn.Parameter(torch.full((width,), 0.8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.ops.contract.twice(torch.ops.contract.shifted(super().forward(x), self.size)) / 2

    return trial(lambda: Chain(Own), squared, vectors())
