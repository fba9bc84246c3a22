"""Parameters of all shapes, frozen, unused, lazy, low-rank."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import Chain, Refused, Residual, Trial, adamw, hostile, squared, tokens, trial, vectors
from .aliases import next_token
from .losses import NO_MEAN, Texts


class Extra(Chain):
    """A chain with one more parameter, that its output is multiplied with."""

    def __init__(self, extra: Tensor, **options: Any) -> None:
        super().__init__(**options)
        self.extra = nn.Parameter(extra)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + self.extra.sum())


@hostile(also=("both", "resumed", "ranks"))
def a_parameter_without_dimensions() -> Trial:
    return trial(lambda: Extra(torch.tensor(0.1)), squared, vectors())


@hostile(also=("resumed",))
def adamw_of_a_parameter_without_dimensions() -> Trial:
    return trial(lambda: Extra(torch.tensor(0.1)), squared, vectors(), adamw, clip_norm=0.5)


@hostile(also=("resumed", "ranks"))
def a_parameter_without_elements() -> Trial:
    return trial(lambda: Extra(torch.zeros(0, 4)), squared, vectors(), adamw)


@hostile(also=("ranks",))
def unused_parameters() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.unused = nn.Linear(16, 16)

    return trial(Net, squared, vectors(), adamw)


@hostile(also=("both",), cut=NO_MEAN)
def parameters_used_by_some_batches() -> Trial:
    """Which ones, the batch says."""

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x, way = self.stem(x), int(x[0, 0].item() > 0)
            return self.head(self.blocks[2 * way](x))

    return trial(Net, squared, vectors(rows=4), adamw)


@hostile(also=("both",), cut=NO_MEAN)
def parameters_used_by_some_steps() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            x = self.stem(x)
            for block in self.blocks[: 1 + self.calls % 3]:
                x = block(x)
            return self.head(x)

    return trial(Net, squared, vectors(), adamw)


@hostile(also=("both", "selective", "resumed", "ranks"))
def frozen_body() -> Trial:
    def make() -> nn.Module:
        model = Chain()
        model.blocks.requires_grad_(False)
        return model

    return trial(make, squared, vectors())


@hostile(also=("both", "selective"))
def frozen_stem() -> Trial:
    def make() -> nn.Module:
        model = Chain()
        model.stem.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    return trial(make, squared, vectors(), adamw)


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.up.weight, std=0.1)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


@hostile(also=("both", "selective", "resumed", "ranks"))
def lora() -> Trial:
    def block(width: int) -> nn.Module:
        made = Residual(width).requires_grad_(False)
        made.up, made.down = LowRank(made.up), LowRank(made.down)  # type: ignore[assignment]
        return made

    return trial(lambda: Chain(block), squared, vectors(), adamw)


@hostile(also=("both", "selective"))
def dora() -> Trial:
    class Directed(LowRank):
        def __init__(self, base: nn.Linear) -> None:
            super().__init__(base)
            self.size = nn.Parameter(base.weight.norm(dim=1).detach().clone())

        def forward(self, x: Tensor) -> Tensor:
            weight = self.base.weight + self.up.weight @ self.down.weight
            return F.linear(x, self.size[:, None] * weight / weight.norm(dim=1, keepdim=True).detach(), self.base.bias)

    def block(width: int) -> nn.Module:
        made = Residual(width).requires_grad_(False)
        made.up, made.down = Directed(made.up), Directed(made.down)  # type: ignore[assignment]
        return made

    return trial(lambda: Chain(block), squared, vectors(), adamw)


@hostile(also=("both",))
def prompt_tuning() -> Trial:
    class Prompted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.texts = Texts().requires_grad_(False)
            self.prompt = nn.Parameter(torch.randn(2, 16) * 0.1)

        def forward(self, ids: Tensor) -> Tensor:
            x = torch.cat([self.prompt.expand(len(ids), -1, -1), self.texts.embed(ids)], 1)
            for block in self.texts.blocks:
                x = x + block(x.cumsum(1) / x.shape[1])
            return self.texts.head(x[:, 2:])

    return trial(Prompted, next_token, tokens())


THAWED = Refused(r"(?is)stem.*requires_grad_.*anyfit\.start")


@hostile(without=("cut",), ample=THAWED, tight=THAWED, recomputed=THAWED, host=THAWED)
def thawed_after_some_steps() -> Trial:
    def make() -> nn.Module:
        model = Chain()
        model.stem.requires_grad_(False)
        return model

    def train(run: Any, batches: Any) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            if index == 4:
                run.model.stem.requires_grad_(True)
            losses.append(float(run.step(batch)))
        return losses

    def plainly(job: Any, model: Any, batches: Any) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for index, batch in enumerate(batches):
            if index == 4:
                model.stem.requires_grad_(True)
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    def everything(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05)

    return trial(make, squared, vectors(), everything, train=train, plainly=plainly)


@hostile(without=("cut",))
def frozen_after_some_steps() -> Trial:
    def train(run: Any, batches: Any) -> list[float]:
        losses = []
        for index, batch in enumerate(batches):
            if index == 4:
                run.model.stem.requires_grad_(False)
            losses.append(float(run.step(batch)))
        return losses

    def plainly(job: Any, model: Any, batches: Any) -> list[float]:
        optimizer, losses = job.optimizer(model), []
        for index, batch in enumerate(batches):
            if index == 4:
                model.stem.requires_grad_(False)
            loss = job.loss(model, batch)
            loss.backward()
            optimizer.step()
            model.zero_grad()
            losses.append(float(loss.detach()))
        return losses

    return trial(Chain, squared, vectors(), adamw, train=train, plainly=plainly)


LAZY = Refused(r"(?is)lazy|uninitiali[sz]ed")


@hostile(ample=LAZY, tight=LAZY, recomputed=LAZY, host=LAZY, cut=LAZY)
def a_lazy_module() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.head = nn.LazyLinear(16), nn.Linear(16, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.stem(x).relu())

    return trial(Net, squared, vectors())


DOUBLE = Refused(r"(?is)float64")


@hostile(ample=DOUBLE, tight=DOUBLE, recomputed=DOUBLE, host=DOUBLE, cut=DOUBLE)
def double_precision() -> Trial:
    batches = [{key: value.double() for key, value in batch.items()} for batch in vectors()]
    return trial(lambda: Chain().double(), squared, batches)


@hostile()
def complex_numbers_from_real_weights() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, 2) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            there = torch.fft.rfft(super().forward(x), dim=-1) * torch.view_as_complex(self.filter)
            return torch.fft.irfft(there, n=8, dim=-1)

    return trial(Net, squared, vectors())


COMPLEX = Refused(r"(?is)complex")


@hostile(host=COMPLEX)
def complex_weights() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.filter = nn.Parameter(torch.randn(5, dtype=torch.complex64) * 0.5)

        def forward(self, x: Tensor) -> Tensor:
            return torch.fft.irfft(torch.fft.rfft(super().forward(x), dim=-1) * self.filter, n=8, dim=-1)

    return trial(Net, squared, vectors())


@hostile()
def integer_parameters() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.order = nn.Parameter(torch.arange(7, -1, -1), requires_grad=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)[:, self.order]

    return trial(Net, squared, vectors())


@hostile(cut=NO_MEAN)
def embedding_with_padding_scaled_by_frequency() -> Trial:
    class Net(Texts):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16, padding_idx=3, scale_grad_by_freq=True)

    return trial(Net, next_token, tokens())


SPARSE = Refused(r"(?is)sparse")


@hostile(host=SPARSE)
def sparse_gradients() -> Trial:
    class Net(Texts):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(50, 16, sparse=True)

    return trial(Net, next_token, tokens(), lambda m: torch.optim.SGD(m.parameters(), lr=0.05))


@hostile()
def embedding_bag_and_bilinear() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.pair = nn.EmbeddingBag(50, 16), nn.Bilinear(16, 16, 8)

        def forward(self, ids: Tensor) -> Tensor:
            bag = self.bag(ids)
            return self.pair(bag, bag.flip(0) * 0 + bag)

    return trial(Net, lambda model, ids: model(ids).square().mean() + model(ids).sum(1).sin().mean(), tokens())


@hostile()
def a_list_and_a_dict_of_parameters() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.many = nn.ParameterList([nn.Parameter(torch.randn(8, 8) * 0.3) for _ in range(3)])
            self.named = nn.ParameterDict({"shift": nn.Parameter(torch.zeros(8)), "size": nn.Parameter(torch.ones(8))})

        def forward(self, x: Tensor) -> Tensor:
            for each in self.many:
                x = torch.tanh(x @ each)
            return x * self.named["size"] + self.named["shift"]

    return trial(Net, squared, vectors())


@hostile()
def a_parameter_at_the_root_and_one_in_no_module() -> Trial:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.randn(8, 12) * 0.3), nn.Parameter(torch.randn(12, 8) * 0.3)

        def forward(self, x: Tensor) -> Tensor:
            return torch.tanh(x @ self.first) @ self.second

    return trial(Net, squared, vectors())


@hostile()
def one_parameter_larger_than_all_others() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(400, 8)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) + self.table((x[:, 0].abs() * 100).long() % 400)

    return trial(Net, squared, vectors(), adamw)


@hostile()
def a_subclass_of_parameter() -> Trial:
    class Own(nn.Parameter):
        decay = 0.5

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.head.weight = Own(self.head.weight.data)
            self.head.weight.note = "kept"  # type: ignore[attr-defined]

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        assert model.head.weight.note == "kept"
        return squared(model, batch) + 1e-2 * model.head.weight.decay * model.head.weight.square().sum()

    return trial(Net, loss, vectors())


@hostile()
def a_model_given_as_a_module() -> Trial:
    torch.manual_seed(3)
    return trial(Chain(), squared, vectors())


@hostile()
def a_model_without_blocks() -> Trial:
    return trial(lambda: nn.Linear(8, 8), squared, vectors())
