"""What forward reads and changes: a block that is recomputed must see it as it was, and change it once."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from ..case import ROWS, Chain, Refused, Residual, Trial, classified, hostile, images, labelled, squared, trial, vectors

EVERYWHERE = ("both", "selective", "resumed")
STATISTICS = Refused(r"(?is)batch.?norm|statistic|cut|micro.?batch")
CHANGES = Refused(r"(?is)chang|state|cut|micro.?batch")  # as many times as there are passes


def chained(block: Any) -> Trial:
    return trial(lambda: Chain(block), squared, vectors())


class Around(Residual):
    """A residual block with something of its own after it."""

    def forward(self, x: Tensor) -> Tensor:
        return self.after(super().forward(x))

    def after(self, x: Tensor) -> Tensor:
        raise NotImplementedError


@hostile(also=(*EVERYWHERE, "ranks"), cut=STATISTICS, ranks=STATISTICS)
def batch_norm() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU())

    return chained(block)


@hostile(cut=STATISTICS)
def batch_norm_with_cumulative_average() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width, momentum=None), nn.ReLU())

    return trial(lambda: Chain(block), squared, vectors())


@hostile()
def batch_norm_kept_in_evaluation_mode() -> Trial:
    class Frozen(nn.BatchNorm1d):
        def train(self, mode: bool = True) -> Any:
            return super().train(False)

    def block(width: int) -> nn.Module:
        made = nn.Sequential(nn.Linear(width, width), Frozen(width), nn.ReLU())
        return made.train()

    return chained(block)


@hostile(cut=CHANGES)
def instance_norm_with_running_statistics() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(width, width, 3, padding=1), nn.InstanceNorm2d(width, track_running_stats=True))

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.stem, self.blocks = nn.Conv2d(3, 8, 1), nn.ModuleList(block(8) for _ in range(2))
            self.head = nn.Linear(8, 5)

        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for each in self.blocks:
                x = x + each(x)
            return self.head(x.mean((2, 3)))

    return trial(Net, classified, images())


@hostile(also=EVERYWHERE, cut=CHANGES)
def spectral_norm_of_a_linear() -> Trial:
    """Each forward takes one power iteration."""

    def block(width: int) -> nn.Module:
        return nn.Sequential(spectral_norm(nn.Linear(width, width)), nn.Tanh())

    return chained(block)


@hostile(cut=CHANGES)
def spectral_norm_of_the_old_kind() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.utils.spectral_norm(nn.Linear(width, width)), nn.Tanh())

    return chained(block)


@hostile(also=EVERYWHERE)
def weight_norm_of_a_linear() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(weight_norm(nn.Linear(width, width)), nn.Tanh())

    return chained(block)


@hostile()
def parametrized_symmetric_weight() -> Trial:
    class Symmetric(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight.triu() + weight.triu(1).mT

    def block(width: int) -> nn.Module:
        linear = nn.Linear(width, width)
        nn.utils.parametrize.register_parametrization(linear, "weight", Symmetric())
        return nn.Sequential(linear, nn.Tanh())

    return chained(block)


@hostile(also=EVERYWHERE, cut=CHANGES)
def exponential_mean_in_a_buffer() -> Trial:
    class Mean(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("mean", torch.zeros(width))

        def after(self, x: Tensor) -> Tensor:
            self.mean.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
            return x - 0.1 * self.mean

    return chained(Mean)


@hostile(also=EVERYWHERE, cut=CHANGES)
def a_buffer_that_is_replaced() -> Trial:
    class Mean(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("mean", torch.zeros(width))

        def after(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - 0.1 * self.mean

    return chained(Mean)


@hostile(also=EVERYWHERE, cut=CHANGES)
def a_buffer_that_is_not_saved() -> Trial:
    class Mean(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("last", torch.zeros(width), persistent=False)

        def after(self, x: Tensor) -> Tensor:
            out = x + 0.1 * self.last
            self.last.copy_(x.detach().mean(0))
            return out

    return chained(Mean)


@hostile(also=EVERYWHERE, cut=CHANGES)
def a_plain_attribute_that_changes() -> Trial:
    class Counting(Around):
        scale = 1.0

        def after(self, x: Tensor) -> Tensor:
            self.scale = 0.97 * self.scale
            return x * self.scale

    return chained(Counting)


@hostile(also=EVERYWHERE, cut=CHANGES)
def a_counter_that_warms_up() -> Trial:
    class Warming(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.calls = 0

        def after(self, x: Tensor) -> Tensor:
            self.calls += 1
            return x * min(1.0, 0.1 * self.calls)

    return chained(Warming)


@hostile(also=("both",), cut=CHANGES)
def a_counter_in_a_dictionary() -> Trial:
    class Warming(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.told: dict[str, Any] = {"calls": 0, "scales": []}

        def after(self, x: Tensor) -> Tensor:
            self.told["calls"] += 1
            self.told["scales"].append(1.0)
            return x * (1 - 0.05 * len(self.told["scales"]))

    return chained(Warming)


@hostile(cut=CHANGES)
def a_counter_in_a_class() -> Trial:
    class Warming(Around):
        calls = 0

        def after(self, x: Tensor) -> Tensor:
            type(self).calls += 1
            return x * (1 - 0.01 * type(self).calls)

    return chained(Warming)


@hostile(cut=CHANGES)
def a_counter_in_another_object() -> Trial:
    told = {"calls": 0}

    class Warming(Around):
        def after(self, x: Tensor) -> Tensor:
            told["calls"] += 1
            return x * (1 - 0.01 * told["calls"])

    return chained(Warming)


@hostile(cut=CHANGES)
def a_tensor_attribute_that_is_no_buffer() -> Trial:
    class Mean(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.mean = torch.zeros(width)

        def after(self, x: Tensor) -> Tensor:
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            return x - 0.1 * self.mean

    return chained(Mean)


@hostile(also=EVERYWHERE, cut=CHANGES)
def vector_quantisation_with_a_moving_codebook() -> Trial:
    class Quantised(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("codes", torch.randn(6, width))
            self.register_buffer("sizes", torch.ones(6))

        def after(self, x: Tensor) -> Tensor:
            nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
            hot = F.one_hot(nearest, 6).to(x.dtype)
            self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
            self.codes.mul_(0.9).add_(hot.T @ x.detach() / self.sizes[:, None], alpha=0.1)
            return x + 0.5 * (self.codes[nearest] - x.detach())

    return chained(Quantised)


@hostile(also=EVERYWHERE, cut=CHANGES)
def memory_bank_of_earlier_samples() -> Trial:
    class Bank(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Chain(out=8)
            self.register_buffer("bank", F.normalize(torch.randn(12, 8), dim=-1))
            self.register_buffer("at", torch.zeros((), dtype=torch.long))

        def forward(self, x: Tensor) -> Tensor:
            out = F.normalize(self.body(x), dim=-1)
            logits = out @ self.bank.clone().T / 0.2
            self.bank.index_copy_(0, (self.at + torch.arange(len(out))) % 12, out.detach())
            self.at.add_(len(out)).remainder_(12)
            return logits

    return trial(Bank, classified, labelled())


@hostile(draws=True, also=EVERYWHERE)
def dropout() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.Dropout(0.3), nn.ReLU())

    return chained(block)


@hostile(draws=True)
def feature_and_alpha_dropout() -> Trial:
    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.AlphaDropout(0.2), nn.SELU(), nn.RReLU())

    return chained(block)


@hostile(draws=True, also=EVERYWHERE)
def noise_in_forward() -> Trial:
    class Noisy(Around):
        def after(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn_like(x)

    return chained(Noisy)


@hostile(also=EVERYWHERE, cut=CHANGES)
def layer_drop_by_pythons_random() -> Trial:
    class Dropped(Around):
        def forward(self, x: Tensor) -> Tensor:
            return x if random.random() < 0.3 else super().forward(x)

        def after(self, x: Tensor) -> Tensor:
            return x * (0.9 + 0.2 * random.random())

    return chained(Dropped)


@hostile(also=("both", "resumed"), cut=CHANGES)
def layer_drop_over_blocks() -> Trial:
    """As in BART: the model leaves out whole blocks."""

    class Dropping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                if random.uniform(0, 1) < 0.4:
                    continue
                x = block(x)
            return self.head(x)

    return trial(Dropping, squared, vectors())


@hostile(draws=True, also=("both",))
def layer_drop_by_torchs_random() -> Trial:
    class Dropping(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for block in self.blocks:
                keep = (torch.rand(()) < 0.6).to(x.dtype)
                x = keep * block(x) + (1 - keep) * x
            return self.head(x)

    return trial(Dropping, squared, vectors())


@hostile(draws=True)
def stochastic_depth_by_sample() -> Trial:
    class Depth(Residual):
        def forward(self, x: Tensor) -> Tensor:
            keep = (torch.rand(len(x), 1) < 0.7).to(x.dtype) / 0.7
            return x + keep * (super().forward(x) - x)

    return chained(Depth)


@hostile(also=EVERYWHERE, cut=CHANGES)
def numpys_random_in_forward() -> Trial:
    class Noisy(Around):
        def after(self, x: Tensor) -> Tensor:
            return x + torch.from_numpy(np.random.randn(x.shape[-1]).astype(np.float32)) * 0.1

    return chained(Noisy)


@hostile(also=EVERYWHERE, cut=CHANGES)
def a_torch_generator_of_its_own() -> Trial:
    class Noisy(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.generator = torch.Generator().manual_seed(5)

        def after(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn(x.shape[-1], generator=self.generator)

    return trial(Chain(Noisy), squared, vectors())


@hostile(also=("both", "resumed"), cut=CHANGES)
def a_numpy_generator_of_its_own() -> Trial:
    class Noisy(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.generator = np.random.default_rng(5)

        def after(self, x: Tensor) -> Tensor:
            return x * float(self.generator.uniform(0.8, 1.2))

    return chained(Noisy)


@hostile(cut=CHANGES)
def a_generator_outside_the_model() -> Trial:
    generator = torch.Generator().manual_seed(5)

    class Noisy(Around):
        def after(self, x: Tensor) -> Tensor:
            return x + 0.1 * torch.randn(x.shape[-1], generator=generator)

    return chained(Noisy)


@hostile(also=("both", "selective"))
def a_cache_that_blocks_append_to() -> Trial:
    """As keys and values: each block reads what earlier ones left."""

    class Attending(Residual):
        def forward(self, x: Tensor, cache: list[Tensor]) -> Tensor:  # type: ignore[override]
            cache.append(x)
            return super().forward(x) + 0.1 * torch.stack(cache).mean(0)

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x, cache = self.stem(x), []
            for block in self.blocks:
                x = block(x, cache)
            return self.head(x)

    return trial(lambda: Net(Attending), squared, vectors())


@hostile(also=("both",))
def a_cache_object_of_keys_and_values() -> Trial:
    class Cache:
        def __init__(self) -> None:
            self.keys: dict[int, Tensor] = {}

        def update(self, layer: int, key: Tensor) -> Tensor:
            self.keys[layer] = torch.cat([self.keys[layer], key], 1) if layer in self.keys else key
            return self.keys[layer]

    class Attending(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.query, self.key, self.layer = nn.Linear(width, width), nn.Linear(width, width), 0

        def forward(self, x: Tensor, cache: Cache) -> Tensor:
            keys = cache.update(self.layer, self.key(x))
            return x + F.scaled_dot_product_attention(self.query(x), keys, keys)

    class Net(Chain):
        def __init__(self) -> None:
            super().__init__(Attending)
            for layer, block in enumerate(self.blocks):
                block.layer = layer  # type: ignore[assignment]

        def forward(self, x: Tensor) -> Tensor:
            x, cache = self.stem(x)[:, None] * torch.linspace(0.5, 1, 3)[:, None], Cache()
            for block in self.blocks:
                x = block(x, cache)
            return self.head(x.mean(1))

    return trial(Net, squared, vectors())


@hostile(also=("both",))
def a_block_that_changes_its_input_in_place() -> Trial:
    class InPlace(Residual):
        def forward(self, x: Tensor) -> Tensor:
            out = super().forward(x)
            return out.mul_(0.9).add_(0.1)

    return chained(InPlace)


@hostile()
def an_input_that_is_overwritten() -> Trial:
    """The block's own input is gone by the time it would be recomputed."""

    class Overwriting(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x) * 1.0
            held = torch.zeros_like(x)
            for block in self.blocks:
                with torch.no_grad():
                    held.copy_(x)
                x = 0.5 * block(held + 0 * x)
            return self.head(x)

    return trial(Overwriting, squared, vectors())


@hostile()
def a_mask_buffer_written_by_the_model_for_its_blocks() -> Trial:
    class Masked(Residual):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("mask", torch.ones(width), persistent=False)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.mask.clone()

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for index, block in enumerate(self.blocks):
                block.mask.copy_((torch.arange(16) % (index + 2) > 0).to(x.dtype))  # type: ignore[union-attr]
                x = block(x)
                block.mask.fill_(0)  # type: ignore[union-attr]
            return self.head(x)

    return trial(lambda: Net(Masked), squared, vectors())


@hostile()
def an_attribute_set_from_outside_between_blocks() -> Trial:
    class Scaled(Residual):
        factor = 1.0

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.factor

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            x = self.stem(x)
            for index, block in enumerate(self.blocks):
                block.factor = 0.5 + 0.1 * index  # type: ignore[assignment]
                x = block(x)
                block.factor = 1.0  # type: ignore[assignment]
            return self.head(x)

    return trial(lambda: Net(Scaled), squared, vectors())


@hostile(also=("both",), cut=CHANGES)
def state_that_first_changes_in_a_later_step() -> Trial:
    class Late(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))
            self.register_buffer("shift", torch.zeros(width))

        def after(self, x: Tensor) -> Tensor:
            out = x + self.shift
            self.calls += 1
            self.shift.add_(x.detach().mean(0) * (self.calls > 6), alpha=0.05)
            return out

    return chained(Late)


@hostile(also=("resumed",), cut=CHANGES)
def extra_state_of_a_module() -> Trial:
    class Extra(Around):
        def __init__(self, width: int) -> None:
            super().__init__(width)
            self.told = {"calls": 0, "scale": 1.0}

        def after(self, x: Tensor) -> Tensor:
            return x * self.told["scale"]

        def get_extra_state(self) -> Any:
            return copy.deepcopy(self.told)

        def set_extra_state(self, state: Any) -> None:
            self.told = dict(state)

    class Net(Chain):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                block.told["calls"] += 1  # type: ignore[index,operator]
                block.told["scale"] = 0.98 ** block.told["calls"]  # type: ignore[index,operator]
            return super().forward(x)

    return trial(lambda: Net(Extra), squared, vectors())


@hostile(also=("resumed",), cut=CHANGES)
def running_mean_of_the_loss_in_a_buffer() -> Trial:
    class Net(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("usual", torch.ones(()))

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        value = squared(model, batch)
        scaled = value / (model.usual + 0.1)
        model.usual.mul_(0.9).add_(value.detach(), alpha=0.1)
        return scaled

    return trial(Net, loss, vectors())


@hostile()
def a_switch_between_training_and_evaluation_within_the_loss() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        model.eval()
        with torch.no_grad():
            wanted = model(batch["x"]).detach()
        model.train()
        return squared(model, batch) + 0.1 * (model(batch["x"]) - wanted).square().mean()

    def block(width: int) -> nn.Module:
        return nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())

    return trial(lambda: Chain(block), loss, vectors())


assert ROWS
