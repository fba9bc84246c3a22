"""Losses: of which samples they are means, and of which they are none."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..case import ROWS, STEPS, Chain, Refused, Trial, adamw, classified, hostile, labelled, squared, tokens, trial, vectors

# What a loss is told that may not be cut.
NO_MEAN = Refused(r"(?is)cut|micro.?batch")


def masked(rows: int = ROWS, steps: int = STEPS) -> list[dict[str, Tensor]]:
    """Vectors with a mask that leaves each row another number of entries."""
    batches = vectors(rows=rows, steps=steps)
    for batch in batches:
        mask = torch.zeros(rows, 8)
        for row in range(rows):
            mask[row, : 1 + 2 * row] = 1.0
        batch["mask"] = mask
    return batches


class Texts(nn.Module):
    def __init__(self, width: int = 16, vocabulary: int = 50) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.blocks = nn.ModuleList(Chain(width=width, wide=width, out=width, count=1) for _ in range(2))
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@hostile(also=("both", "selective", "resumed", "ranks"))
def mean_squared_error() -> Trial:
    return trial(Chain, squared, vectors())


@hostile(also=("ranks",))
def mean_over_a_mask() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        off = (model(batch["x"]) - batch["y"]).square() * batch["mask"]
        return off.sum() / batch["mask"].sum()

    return trial(Chain, loss, masked())


@hostile(also=("ranks",))
def sum_and_weight() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        off = (model(batch["x"]) - batch["y"]).square() * batch["mask"]
        return off.sum(), batch["mask"].sum()

    return trial(Chain, loss, masked())


@hostile(also=("ranks",))
def cross_entropy_with_ignored_labels() -> Trial:
    def loss(model: nn.Module, ids: Tensor) -> Tensor:
        wanted = ids[:, 1:].masked_fill(torch.arange(1, ids.shape[1]) > ids[:, :1] % 7 + 1, -100)
        return F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), wanted.flatten())

    return trial(Texts, loss, tokens())


@hostile(also=("ranks",))
def labels_of_minus_100_in_the_batch() -> Trial:
    batches = [{"ids": ids, "labels": ids.clone()} for ids in tokens()]
    for batch in batches:
        for row in range(ROWS):
            batch["labels"][row, 2 + 2 * row :] = -100

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["ids"])[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    return trial(Texts, loss, batches)


@hostile(also=("ranks",), cut=NO_MEAN, ranks=NO_MEAN)
def contrastive_clip() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        left, right = F.normalize(model(batch["x"]), dim=-1), F.normalize(model(batch["y"]), dim=-1)
        logits = left @ right.T / 0.1
        same = torch.arange(len(logits))
        return (F.cross_entropy(logits, same) + F.cross_entropy(logits.T, same)) / 2

    return trial(Chain, loss, vectors(), adamw)


@hostile(cut=NO_MEAN)
def simclr_in_batch_negatives() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        both = F.normalize(torch.cat([model(batch["x"]), model(batch["x"] * 0.9 + 0.1)]), dim=-1)
        alike = both @ both.T / 0.5 - 1e9 * torch.eye(len(both))
        count = len(both) // 2
        return F.cross_entropy(alike, torch.arange(2 * count).roll(count))

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def triplets_of_neighbouring_samples() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        return F.triplet_margin_loss(out, out.roll(1, 0), out.roll(2, 0), margin=1.0)

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def variance_over_the_batch() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        return (out - batch["y"]).square().mean() + 0.1 * (1 - out.std(0)).relu().mean()

    return trial(Chain, loss, vectors())


@hostile()
def sum_over_the_batch() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return 0.02 * (model(batch["x"]) - batch["y"]).square().sum()

    return trial(Chain, loss, vectors())


@hostile()
def divided_by_a_fixed_number() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().sum() / 32.0

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def root_of_the_mean() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squared(model, batch).sqrt()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def largest_of_the_batch() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean(1).max()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def median_of_the_batch() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return (model(batch["x"]) - batch["y"]).square().mean(1).median()

    return trial(Chain, loss, vectors())


@hostile(cut=NO_MEAN)
def the_hardest_half_of_the_batch() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = (model(batch["x"]) - batch["y"]).square().mean(1)
        return each.topk(max(len(each) // 2, 1)).values.mean()

    return trial(Chain, loss, vectors())


@hostile()
def weighted_cross_entropy() -> Trial:
    """torch divides by the weights of the labels that are there."""
    weights = torch.tensor([1.0, 5.0, 0.2, 2.0, 0.5])

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], weight=weights)

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def label_smoothing() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(model(batch["x"]), batch["y"], label_smoothing=0.1)

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def focal_loss() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        each = F.cross_entropy(model(batch["x"]), batch["y"], reduction="none")
        return ((1 - torch.exp(-each)) ** 2 * each).mean()

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def hinge() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.multi_margin_loss(model(batch["x"]), batch["y"])

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def huber_and_quantile() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        off = batch["y"] - model(batch["x"])
        return torch.maximum(0.9 * off, -0.1 * off).mean() + F.huber_loss(model(batch["x"]), batch["y"])

    return trial(Chain, loss, vectors())


@hostile()
def learned_variance() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        mean, log = model(batch["x"]).chunk(2, -1)
        return F.gaussian_nll_loss(mean, batch["y"], F.softplus(log) + 0.1)

    return trial(lambda: Chain(out=16), loss, vectors())


@hostile(also=("ranks",))
def learned_weights_of_tasks() -> Trial:
    """Parameters without dimensions."""

    class Tasks(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Parameter(torch.tensor(0.1)), nn.Parameter(torch.tensor(-0.2))

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        near, small = (out - batch["y"]).square().mean(), out.abs().mean()
        return near * torch.exp(-model.first) + model.first + small * torch.exp(-model.second) + model.second

    return trial(Tasks, loss, vectors())


@hostile()
def ctc() -> Trial:
    generator = torch.Generator().manual_seed(3)
    batches = [
        {
            "x": torch.randn(ROWS, 12, 8, generator=generator),
            "y": torch.randint(1, 6, (ROWS, 4), generator=generator),
            "long": torch.full((ROWS,), 12),
            "wanted": torch.tensor([4, 3, 2, 4]),
        }
        for _ in range(STEPS)
    ]

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logs = model(batch["x"]).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(logs, batch["y"], batch["long"], batch["wanted"])

    return trial(lambda: Chain(out=6), loss, batches)


@hostile()
def crf_like_logsumexp() -> Trial:
    class Field(Chain):
        def __init__(self) -> None:
            super().__init__(out=6)
            self.moves = nn.Parameter(torch.randn(6, 6) * 0.1)

        def forward(self, x: Tensor) -> Tensor:
            scores = super().forward(x)
            score = scores[:, 0]
            for at in range(1, scores.shape[1]):
                score = torch.logsumexp(score[:, :, None] + self.moves, 1) + scores[:, at]
            return torch.logsumexp(score, -1) - scores[..., 0].sum(-1)

    generator = torch.Generator().manual_seed(3)
    batches = [torch.randn(ROWS, 5, 8, generator=generator) for _ in range(STEPS)]
    return trial(Field, lambda model, x: model(x).mean(), batches)


@hostile(ample=Refused(r"(?is)\(sum, weight\)"), without=("tight", "recomputed", "host", "cut"))
def a_loss_and_an_auxiliary_loss() -> Trial:
    """The second needs gradients: it is no weight."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
        out = model(batch["x"])
        return (out - batch["y"]).square().mean(), 0.1 * out.abs().mean()

    def plainly(job: Any, model: nn.Module, batches: Any) -> list[float]:
        raise AssertionError("refused")

    return trial(Chain, loss, vectors(), plainly=plainly)


@hostile(ample=Refused(r"(?is)scalar"), without=("tight", "recomputed", "host", "cut"))
def a_loss_for_every_sample() -> Trial:
    return trial(Chain, lambda model, batch: (model(batch["x"]) - batch["y"]).square().mean(1), vectors())


@hostile(ample=Refused(r"(?is)dict|mapping"), without=("tight", "recomputed", "host", "cut"))
def a_dict_of_losses() -> Trial:
    return trial(Chain, lambda model, batch: {"loss": squared(model, batch)}, vectors())


@hostile(cut=NO_MEAN)
def detached_returns_of_the_batch() -> Trial:
    """Policy gradients with a baseline: the batch's own mean."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        logs = model(batch["x"]).log_softmax(-1)
        chosen = logs.gather(1, batch["y"][:, None])[:, 0]
        returns = batch["x"].sum(1).detach()
        return -(chosen * ((returns - returns.mean()) / (returns.std() + 1e-5))).mean()

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def dpo_with_a_frozen_reference() -> Trial:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.policy, self.reference = Texts(), Texts()
            self.reference.load_state_dict(self.policy.state_dict())
            self.reference.requires_grad_(False)

    def likely(model: nn.Module, ids: Tensor) -> Tensor:
        logs = model(ids[:, :-1]).log_softmax(-1)
        return logs.gather(2, ids[:, 1:, None]).sum((1, 2))

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            before = likely(model.reference, batch["chosen"]) - likely(model.reference, batch["rejected"])
        now = likely(model.policy, batch["chosen"]) - likely(model.policy, batch["rejected"])
        return -F.logsigmoid(0.5 * (now - before)).mean()

    batches = [{"chosen": ids, "rejected": ids.flip(1).contiguous()} for ids in tokens()]
    return trial(Pair, loss, batches)


@hostile()
def distillation_from_a_teacher_beside_the_model() -> Trial:
    torch.manual_seed(3)
    teacher = Chain(out=5).requires_grad_(False)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        with torch.no_grad():
            wanted = teacher(batch["x"]).softmax(-1)
        return F.kl_div(model(batch["x"]).log_softmax(-1), wanted, reduction="batchmean")

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile(cut=NO_MEAN)
def distillation_of_deeper_layers() -> Trial:
    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        x, total = model.stem(batch["x"]), torch.zeros(())
        for block in model.blocks:
            x = block(x)
            total = total + (x - x.detach().mean(-1, keepdim=True)).square().mean()
        return total + F.cross_entropy(model.head(x), batch["y"])

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile(also=("ranks",))
def padded_sequences_of_uneven_weight() -> Trial:
    """(sum, weight), where a whole half of the batch may weigh nothing."""
    batches = tokens()
    for index, ids in enumerate(batches):
        ids[index % 2 * 2 : index % 2 * 2 + 2, 3:] = 0

    def loss(model: nn.Module, ids: Tensor) -> tuple[Tensor, Tensor]:
        wanted = ids[:, 1:].flatten()
        total = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), wanted, ignore_index=0, reduction="sum")
        return total, (wanted != 0).sum()

    return trial(Texts, loss, batches)


@hostile()
def cross_entropy_of_large_logits() -> Trial:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return F.cross_entropy(100 * model(batch["x"]), batch["y"]) / math.log(5)

    return trial(lambda: Chain(out=5), loss, labelled(), clip_norm=0.5)


@hostile(cut=NO_MEAN)
def penalty_on_the_mean_of_the_batch() -> Trial:
    """Load balance of a router: a product of two means."""

    class Router(Chain):
        def __init__(self) -> None:
            super().__init__()
            self.router = nn.Linear(8, 4)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
            return super().forward(x), self.router(x).softmax(-1)

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out, shares = model(batch["x"])
        hard = F.one_hot(shares.argmax(-1), 4).float().mean(0)
        return (out - batch["y"]).square().mean() + 4 * (hard * shares.mean(0)).sum()

    return trial(Router, loss, vectors())


@hostile()
def penalty_on_the_weights() -> Trial:
    """Is no mean over samples, and yet the same for every part of the batch."""

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return squared(model, batch) + 1e-2 * sum(each.square().sum() for each in model.parameters())

    return trial(Chain, loss, vectors())


@hostile(cut=Refused(r"(?is)the loss changes in forward"))
def classification_with_accuracy_aside() -> Trial:
    """Reads a value of every batch on the way."""
    seen: list[float] = []

    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        out = model(batch["x"])
        seen.append(float((out.argmax(-1) == batch["y"]).float().mean()))
        return F.cross_entropy(out, batch["y"])

    return trial(lambda: Chain(out=5), loss, labelled())


@hostile()
def hinge_gan_of_two_losses_in_one() -> Trial:
    class Gan(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.generator, self.critic = Chain(), Chain(out=1)

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        fake = model.generator(batch["x"])
        critic = F.relu(1 - model.critic(batch["y"])).mean() + F.relu(1 + model.critic(fake.detach())).mean()
        for parameter in model.critic.parameters():
            parameter.requires_grad_(False)
        generator = -model.critic(fake).mean()
        for parameter in model.critic.parameters():
            parameter.requires_grad_(True)
        return critic + generator

    return trial(Gan, loss, vectors())


assert classified
