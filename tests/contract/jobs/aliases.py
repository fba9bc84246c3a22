"""Weights that are reached by other ways than their parameter, and weights that are edited."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import anyfit

from ..case import Chain, Refused, Residual, Trial, hostile, sgd, squared, tokens, trial, vectors
from .losses import NO_MEAN

# What plans by hand are told, that would lose an alias or an edit.
SHARED = Refused(r"(?is)shares its memory|not lie in order")
EDITED_AND_RECOMPUTED = Refused(r"(?is)recomputes \S+ and it edits its parameter \S+ in forward; use a plan that keeps it")


class Tied(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Residual(width) for _ in range(2))
        self.head = nn.Linear(width, 50, bias=False)
        self.tie()

    def tie(self) -> None:
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, ids: Tensor) -> Tensor:
    return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())


@hostile(also=("both", "resumed", "ranks"))
def tied_by_attribute() -> Trial:
    return trial(Tied, next_token, tokens())


@hostile(also=("both", "resumed"), host=SHARED, both=SHARED)
def tied_by_data() -> Trial:
    """Two parameters with one storage: each has a gradient and a momentum of its own."""

    class ByData(Tied):
        def tie(self) -> None:
            self.head.weight.data = self.embed.weight.data

    return trial(ByData, next_token, tokens())


@hostile()
def tied_across_blocks() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.blocks[2].up.weight = self.blocks[0].up.weight  # type: ignore[union-attr]
            self.blocks[1] = self.blocks[0]

    return trial(Net, squared, vectors())


@hostile(host=SHARED)
def tied_to_a_transposed_view() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.down = nn.Parameter(self.stem.weight.data.T)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(self.stem(x), self.down)

    return trial(Net, squared, vectors())


@hostile(also=("resumed",), host=SHARED)
def a_buffer_that_views_a_weight() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("view", self.stem.weight.data[0])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * self.view.sum()

    return trial(Net, squared, vectors())


@hostile(host=SHARED)
def an_attribute_that_is_a_detached_weight() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.kept = self.head.weight.detach()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.1 * self.kept.mean()

    return trial(Net(), squared, vectors())


@hostile(host=SHARED)
def overlapping_views_as_parameters() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            whole = torch.randn(24, 8) * 0.2
            self.first, self.second = nn.Parameter(whole[:16]), nn.Parameter(whole[8:])

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + F.linear(x, self.first)[:, :8] + F.linear(x, self.second)[:, 8:]

    return trial(Net, squared, vectors())


@hostile(host=SHARED)
def parameters_of_one_flat_tensor() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.flat = torch.cat([each.detach().flatten() for each in self.parameters()])
            at = 0
            for each in self.parameters():
                each.data = self.flat[at : at + each.numel()].view_as(each)
                at += each.numel()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + 0.01 * self.flat.abs().mean()

    return trial(Net(), squared, vectors())


@hostile()
def an_expanded_parameter() -> Trial:
    """One element in storage, sixteen to read: torch refuses to write to it in place."""

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.ones(8).as_strided((8,), (1,)))

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.gain

    return trial(Net, squared, vectors())


@hostile(host=SHARED)
def a_transposed_parameter_and_a_branch_on_contiguity() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.turned = nn.Parameter((torch.randn(8, 8) * 0.2).T)

        def forward(self, x: Tensor) -> Tensor:
            scale = 1.0 if self.turned.is_contiguous() else 0.5
            return super().forward(x) + scale * F.linear(x, self.turned)

    return trial(Net, squared, vectors())


@hostile(host=SHARED)
def channels_last_weights() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Conv2d(3, 8, 3, padding=1)
            self.blocks = nn.ModuleList(nn.Conv2d(8, 8, 3, padding=1) for _ in range(2))
            self.head = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x.view(-1, 1, 2, 4).expand(-1, 3, -1, -1).contiguous(memory_format=torch.channels_last))
            for block in self.blocks:
                x = F.relu(block(x))
            scale = 1.0 if self.stem.weight.is_contiguous(memory_format=torch.channels_last) else 0.5
            return self.head(x.mean((2, 3))) * scale

    return trial(lambda: Net().to(memory_format=torch.channels_last), squared, vectors())


@hostile()
def weights_clamped_in_forward() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            self.head.weight.data.clamp_(-0.15, 0.15)
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(also=("both",), recomputed=EDITED_AND_RECOMPUTED, both=EDITED_AND_RECOMPUTED)
def weights_clamped_in_a_block() -> Trial:
    class Clamped(Residual):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-0.15, 0.15)
            return super().forward(x)

    return trial(lambda: Chain(Clamped), squared, vectors())


@hostile()
def a_row_set_to_zero_in_forward() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight[0].zero_()
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(host=Refused(r"(?is)read-only as a numpy array.*edit the tensor, or use a plan"))
def weights_edited_through_numpy() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            if self.head.weight.device.type != "meta":
                self.head.weight.detach().numpy()[0] = 0.0
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(cut=NO_MEAN)
def weights_edited_by_foreach() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                torch._foreach_mul_(list(self.parameters()), 0.995)
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(cut=NO_MEAN)
def weights_replaced_by_data() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            self.head.weight.data = self.head.weight.data * 0.99
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(cut=NO_MEAN)
def weights_normalised_in_forward() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                self.head.weight.copy_(F.normalize(self.head.weight, dim=1))
            return super().forward(x)

    return trial(Net, squared, vectors())


@hostile(also=("both",), recomputed=EDITED_AND_RECOMPUTED, both=EDITED_AND_RECOMPUTED)
def embedding_with_max_norm() -> Trial:
    """Renormalises its rows in place, in forward."""

    class Net(Tied):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16, max_norm=1.0)

        def tie(self) -> None:
            pass

    return trial(Net, next_token, tokens())


@hostile()
def a_weight_kept_by_a_hook_as_a_view() -> Trial:
    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            rows = self.head.weight.view(-1)[:8]
            out = super().forward(x)
            return out * (1 + 0.1 * rows)

    return trial(Net, squared, vectors())


@hostile()
def weights_read_by_functional_call() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        scaled = {name: 1.01 * each for name, each in model.named_parameters()}
        out = torch.func.functional_call(model, scaled, (batch["x"],))
        return (out - batch["y"]).square().mean()

    return trial(Chain, loss, vectors())


@hostile()
def weights_swapped_for_others_in_forward() -> Trial:
    """A hypernetwork that sets another's weights as attributes."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem = nn.Linear(8, 16)
            self.code = nn.Parameter(torch.randn(4))
            self.make = nn.Linear(4, 16 * 8)

        def forward(self, x: Tensor) -> Tensor:
            return F.linear(self.stem(x).relu(), self.make(self.code).view(8, 16))

    return trial(Net, squared, vectors())


@hostile(cut=NO_MEAN)
def ema_teacher_inside_the_model() -> Trial:
    """BYOL: a copy follows the weights, moved at every forward."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.online = Chain()
            self.target = copy.deepcopy(self.online).requires_grad_(False)
            self.predict = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            with torch.no_grad():
                for mine, theirs in zip(self.target.parameters(), self.online.parameters(), strict=True):
                    mine.lerp_(theirs, 0.1)
                wanted = self.target(x + 0.1)
            return self.predict(self.online(x)), wanted

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mine, wanted = model(batch["x"])
        return (mine - wanted - batch["y"]).square().mean()

    return trial(Net, loss, vectors())


@hostile(without=("cut",))
def ema_teacher_beside_the_model() -> Trial:
    """Moved after each step, from run.weights()."""

    def training(run_weights: Any, teacher: nn.Module, model: nn.Module) -> None:
        with run_weights, torch.no_grad():
            for mine, theirs in zip(teacher.parameters(), model.parameters(), strict=True):
                mine.lerp_(theirs, 0.2)

    torch.manual_seed(3)
    teacher = Chain().requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch["x"])
        return squared(model, batch) + (model(batch["x"]) - wanted).square().mean()

    def train(run: anyfit.Run, batches: Sequence[Any]) -> list[float]:
        losses = []
        for batch in batches:
            losses.append(float(run.step(batch)))
            training(run.weights(), teacher, run.model)
        return losses

    def plainly(job: anyfit.Job, model: nn.Module, batches: Sequence[Any]) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for batch in batches:
            value = job.loss(model, batch)
            value.backward()
            optimizer.step()
            model.zero_grad()
            training(torch.no_grad(), teacher, model)
            losses.append(float(value.detach()))
        return losses

    return trial(Chain, loss, vectors(), sgd, train=train, plainly=plainly)
