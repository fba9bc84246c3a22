"""Autograd as users bend it: hooks, functions and checkpoints of their own, gradients of gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from ..case import Chain, Refused, Residual, Trial, adamw, hostile, squared, trial, vectors
from .losses import NO_MEAN


def hooked(hang: Any, **options: Any) -> Trial:
    """A chain that `hang` has put hooks on."""

    def make() -> nn.Module:
        model = Chain()
        hang(model)
        return model

    return trial(make, squared, vectors(), **options)


@hostile(also=("both",))
def forward_hooks_that_change_outputs() -> Trial:
    def hang(model: Chain) -> None:
        for block in model.blocks:
            block.register_forward_hook(lambda module, args, out: out * 0.9)
            block.register_forward_pre_hook(lambda module, args: (args[0] + 0.1,))

    return hooked(hang)


@hostile(also=("both",))
def a_forward_hook_that_keeps_features() -> Trial:
    """The loss reads what a hook has kept of a block."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.features: dict[str, Tensor] = {}
            self.blocks[1].register_forward_hook(lambda module, args, out: self.features.update(middle=out))

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        value = squared(model, batch)
        return value + 0.1 * model.features["middle"].square().mean()

    return trial(Net(), loss, vectors())


@hostile(also=("both",), cut=NO_MEAN)
def a_forward_hook_that_counts() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0
            self.blocks[1].register_forward_hook(self.count)

        def count(self, module: nn.Module, args: Any, out: Tensor) -> Tensor:
            self.calls += 1
            return out * (1 - 0.02 * self.calls)

    return trial(Net(), squared, vectors())


@hostile(also=("both",))
def full_backward_hooks() -> Trial:
    def hang(model: Chain) -> None:
        for block in model.blocks:
            block.register_full_backward_hook(lambda module, into, out: tuple(0.5 * each for each in into))
            block.register_full_backward_pre_hook(lambda module, out: tuple(1.1 * each for each in out))

    return hooked(hang)


@hostile(also=("both",))
def tensor_hooks_in_forward() -> Trial:
    class Hooked(Residual):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            if out.requires_grad:
                out.register_hook(lambda gradient: gradient.clamp(-1e-3, 1e-3))
            return out

    return trial(lambda: Chain(Hooked), squared, vectors())


@hostile(also=("both", "ranks"))
def parameter_hooks_that_scale() -> Trial:
    def hang(model: Chain) -> None:
        for each in model.blocks.parameters():
            each.register_hook(lambda gradient: gradient * 0.5)

    return trial(hung(hang), squared, vectors())


def hung(hang: Any) -> nn.Module:
    torch.manual_seed(3)
    model = Chain()
    hang(model)
    return model


@hostile()
def parameter_hooks_that_mask() -> Trial:
    """A pruned layer stays pruned."""

    def hang(model: Chain) -> None:
        mask = (torch.arange(16 * 8).view(16, 8) % 3 > 0).float()
        model.stem.weight.data.mul_(mask)
        model.stem.weight.register_hook(lambda gradient: gradient * mask)

    return trial(hung(hang), squared, vectors())


@hostile(cut=NO_MEAN)
def post_accumulate_hooks_that_clip() -> Trial:
    def hang(model: Chain) -> None:
        def clip(parameter: nn.Parameter) -> None:
            parameter.grad.clamp_(-1e-2, 1e-2)  # type: ignore[union-attr]

        for each in model.parameters():
            each.register_post_accumulate_grad_hook(clip)

    return trial(hung(hang), squared, vectors())


@hostile(cut=NO_MEAN)
def a_hook_that_sets_the_gradient_to_none() -> Trial:
    def hang(model: Chain) -> None:
        def drop(parameter: nn.Parameter) -> None:
            parameter.grad = None

        model.stem.weight.register_post_accumulate_grad_hook(drop)

    return trial(hung(hang), squared, vectors())


@hostile(cut=NO_MEAN)
def an_update_in_a_hook_while_backward_runs() -> Trial:
    """The optimizer in backward: each parameter steps in its own hook, and its gradient is gone."""

    def hang(model: Chain) -> None:
        def step(parameter: nn.Parameter) -> None:
            with torch.no_grad():
                parameter.sub_(parameter.grad, alpha=0.05)
            parameter.grad = None

        model.head.weight.register_post_accumulate_grad_hook(step)

    return trial(hung(hang), squared, vectors())


OTHER_OUTPUT = Refused(r"(?is)recomputes blocks\.0, and its output differs when it is run again.*use a plan that keeps it")


@hostile(also=("both",), recomputed=OTHER_OUTPUT, both=OTHER_OUTPUT)
def hooks_of_all_modules() -> Trial:
    """Registered for whatever module runs, as profilers and debuggers do."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            handle = nn.modules.module.register_module_forward_hook(
                lambda module, args, out: out * 0.99 if isinstance(module, nn.LayerNorm) else None
            )
            try:
                return super().forward(x)
            finally:
                handle.remove()

    return trial(Net, squared, vectors())


class Straight(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return (x * 4).round() / 4

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


@hostile(also=("both",))
def straight_through_rounding() -> Trial:
    class Rounded(Residual):
        def forward(self, x: Tensor) -> Tensor:
            return Straight.apply(super().forward(x))

    return trial(lambda: Chain(Rounded), squared, vectors())


class OwnLinear(torch.autograd.Function):
    """Saves a weight, and reads it in backward; keeps one beside save_for_backward too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, kept: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.kept = kept
        return x @ weight.T * (1 + kept.mean())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:  # type: ignore[override]
        x, weight = ctx.saved_tensors
        scale = 1 + ctx.kept.mean()
        whole = (gradient * (x @ weight.T)).sum() / ctx.kept.numel()
        return gradient @ weight * scale, gradient.T @ x * scale, whole.expand_as(ctx.kept)


@hostile(also=("both",))
def own_function_that_keeps_a_weight_on_its_context() -> Trial:
    class Own(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.weight, self.kept = nn.Parameter(torch.randn(width, width) * 0.2), nn.Parameter(torch.zeros(width))

        def forward(self, x: Tensor) -> Tensor:
            return x + torch.tanh(OwnLinear.apply(x, self.weight, self.kept))

    return trial(lambda: Chain(Own), squared, vectors())


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return -0.3 * gradient


@hostile(cut=NO_MEAN)
def gradient_reversal() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.domain = nn.Linear(16, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            x = self.stem(x)
            for block in self.blocks:
                x = block(x)
            return self.head(x), self.domain(Reversed.apply(x))

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, domain = model(batch["x"])
        return (out - batch["y"]).square().mean() + F.cross_entropy(domain, (batch["x"][:, 0] > 0).long())

    return trial(Net, loss, vectors())


def checkpointed(**options: Any) -> Any:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, **options)
            return self.head(x)

    return Net


@hostile(also=("both", "selective"))
def the_users_own_checkpoints() -> Trial:
    return trial(checkpointed(use_reentrant=False), squared, vectors(), adamw)


@hostile(also=("both",))
def the_users_own_reentrant_checkpoints() -> Trial:
    return trial(checkpointed(use_reentrant=True), squared, vectors(), adamw)


@hostile(draws=True)
def checkpoints_with_dropout() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__(lambda width: nn.Sequential(nn.Linear(width, width), nn.Dropout(0.2), nn.Tanh()))

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(x)

    return trial(Net, squared, vectors())


@hostile()
def checkpoint_sequential_inside() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 8))

        def forward(self, x: Tensor) -> Tensor:
            return torch.utils.checkpoint.checkpoint_sequential(self.body, 2, x, use_reentrant=False)

    return trial(Net, squared, vectors())


@hostile(also=("both",))
def gradient_penalty() -> Trial:
    """The gradient by the input, squared: backward goes through backward."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        x = batch["x"].clone().requires_grad_(True)
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return (out - batch["y"]).square().mean() + 0.1 * (slope.norm(dim=1) - 1).square().mean()

    return trial(Chain, loss, vectors())


@hostile(also=("both",), cut=NO_MEAN)
def a_gradient_by_weights_within_the_loss() -> Trial:
    """GradNorm: weighs tasks by the norms of their gradients."""

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        near, small = (out - batch["y"]).square().mean(), out.square().mean()
        (slope,) = torch.autograd.grad(near, model.head.weight, retain_graph=True)
        return near + small * slope.norm().detach()

    return trial(Chain, loss, vectors())


@hostile(also=("both",))
def a_gradient_by_the_input_as_output() -> Trial:
    """Energy models: the prediction is a gradient itself."""

    class Energy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 24), nn.Linear(24, 1)

        def forward(self, x: Tensor) -> Tensor:
            with torch.enable_grad():
                x = x.detach().requires_grad_(True)
                energy = self.second(torch.tanh(self.first(x))).sum()
                (force,) = torch.autograd.grad(energy, x, create_graph=True)
            return -force

    return trial(Energy, squared, vectors())


@hostile(host=Refused(r"(?is)support saved tensor hooks.*use a plan with all state on the device"))
def gradients_of_each_sample_by_vmap() -> Trial:
    """vmap(grad) in the loss."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weights = {name: each.detach() for name, each in model.named_parameters()}

        def one(weights: Any, x: Tensor, y: Tensor) -> Tensor:
            return (torch.func.functional_call(model, weights, (x[None],))[0] - y).square().mean()

        slopes = torch.func.vmap(torch.func.grad(one), in_dims=(None, 0, 0))(weights, batch["x"], batch["y"])
        sizes = torch.stack([each.flatten(1).square().sum(1) for each in slopes.values()]).sum(0)
        off = (model(batch["x"]) - batch["y"]).square().mean(1)
        return (off / (1 + sizes.sqrt())).mean()

    return trial(Chain, loss, vectors())


@hostile()
def jacobian_by_forward_mode() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, slope = torch.func.jvp(model, (batch["x"],), (torch.ones_like(batch["x"]),))
        return (out - batch["y"]).square().mean() + 1e-3 * slope.square().mean()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def an_inner_step_of_learning() -> Trial:
    """MAML: the loss after one step on other weights, through that step."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        weights = dict(model.named_parameters())
        inner = (torch.func.functional_call(model, weights, (batch["x"],)) - batch["y"]).square().mean()
        slopes = torch.autograd.grad(inner, list(weights.values()), create_graph=True)
        moved = {name: each - 0.1 * slope for (name, each), slope in zip(weights.items(), slopes, strict=True)}
        return (torch.func.functional_call(model, moved, (batch["x"] * 0.9,)) - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile(also=("both",), tolerance_when_cut=1e-2)
def the_users_own_autocast() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out = model(batch["x"])
        return (out.float() - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile(tolerance_when_cut=1e-2)
def autocast_in_a_block() -> Trial:
    class Mixed(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return super().forward(x).float()

    return trial(lambda: Chain(Mixed), squared, vectors())


@hostile(cut=NO_MEAN)
def a_backward_of_its_own_inside_the_loss() -> Trial:
    """Gradients of an auxiliary loss are added before the loss is returned."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if torch.is_grad_enabled():
            (0.1 * model(batch["x"]).square().mean()).backward()
        return squared(model, batch)

    return trial(Chain, loss, vectors())


@hostile()
def blocks_under_no_grad() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                x = self.blocks[0](self.stem(x))
            return self.head(self.blocks[2](self.blocks[1](x)))

    return trial(Net, squared, vectors(), adamw)


@hostile()
def blocks_in_inference_mode() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                shift = self.blocks[0](self.stem(x))
            x = self.stem(x) + shift.clone()
            return self.head(self.blocks[2](self.blocks[1](x)))

    return trial(Net, squared, vectors())


@hostile(also=("both",))
def in_place_operations() -> Trial:
    class InPlace(Residual):
        def forward(self, x: Tensor) -> Tensor:
            out = self.up(self.norm(x)).mul_(0.9)
            out[:, :4] = 0.5
            return self.down(F.relu(out, inplace=True)).add_(x)

    return trial(lambda: Chain(InPlace), squared, vectors())


@hostile(also=("both",))
def a_block_called_many_times() -> Trial:
    """A deep equilibrium, unrolled."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            y = torch.zeros_like(x)
            for _ in range(5):
                y = torch.tanh(self.blocks[0](y + x))
            return self.head(y)

    return trial(Net, squared, vectors())


@hostile(also=("both",), cut=NO_MEAN)
def a_block_of_many_inputs_and_outputs() -> Trial:
    class Many(Residual):
        def forward(self, x: Tensor, *, told: dict[str, Any], scale: float = 1.0) -> Any:  # type: ignore[override]
            out = super().forward(x) * scale + told["shift"][0]
            return {"out": out, "others": [out.mean(), (told["shift"][0] * 2,)], "name": "kept"}

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            told = {"shift": (x.mean(-1, keepdim=True),)}
            for block in self.blocks:
                given = block(x, told=told, scale=0.9)
                assert given["name"] == "kept"
                x, told = given["out"] + given["others"][0], {"shift": given["others"][1]}
            return self.head(x)

    return trial(lambda: Net(Many), squared, vectors(), lambda m: torch.optim.SGD(m.parameters(), lr=0.005))


@hostile(also=("both",))
def a_generator_of_layers() -> Trial:
    """Forward of a block is called past its hooks."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem.forward(x)
            for block in self.blocks:
                x = block.forward(x)
            return F.linear(x, self.head.weight, self.head.bias)

    return trial(Net, squared, vectors())


@hostile()
def a_patched_forward_that_closes_over_the_model() -> Trial:
    """As TRL does: the trace must not copy the module and lose its parameters."""

    def make() -> nn.Module:
        model = Chain()
        usual = model.forward

        def forward(x: Tensor) -> Tensor:
            return usual(x) * 0.5 + model.head(model.stem(x)) * 0.5

        model.forward = forward  # type: ignore[method-assign]
        return model

    return trial(make(), squared, vectors())


@hostile()
def a_patched_forward_of_a_factory() -> Trial:
    def make() -> nn.Module:
        model = Chain()
        usual = model.blocks[1].forward
        model.blocks[1].forward = lambda x: usual(x) * 0.5 + x  # type: ignore[method-assign]
        return model

    return trial(make, squared, vectors())


@hostile()
def a_loss_that_closes_over_the_module() -> Trial:
    """And does not use the model that it is given."""
    torch.manual_seed(3)
    mine = Chain()
    return trial(mine, lambda model, batch: squared(mine, batch), vectors())
