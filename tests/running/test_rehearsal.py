"""A batch is cut only where that leaves the result as it is: tried before the first step, with losses that nobody prepared."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

import anyfit
from anyfit.running.rehearsal import adds_up, hooks_on_gradients
from anyfit.values.loss_rule import LossRule
from tests.machines import small_machine
from tests.plans import hand_written

ROWS, STEPS = 8, 6
Loss = Callable[[nn.Module, Any], Any]


def batches() -> list[dict[str, Tensor]]:
    """The first is without padding, as an example may be; then labels are ignored and masks empty where they please."""
    generator = torch.Generator().manual_seed(3)
    made = []
    for step in range(STEPS):
        labels, mask = torch.randint(0, 5, (ROWS, 3), generator=generator), torch.ones(ROWS, 3)
        if step:
            labels[torch.rand(ROWS, 3, generator=generator) < 0.5] = -100
            labels[0, 0], labels[2:4] = 1, -100  # a micro-batch of two in which nothing counts
            mask = (labels != -100).float()
        made.append({"x": torch.randn(ROWS, 3, 6, generator=generator), "labels": labels, "mask": mask})
    return made


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return model(batch["x"])


def each_token(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return logits(model, batch).square().mean(-1)


def cross_entropy(model: nn.Module, batch: dict[str, Tensor], **options: Any) -> Tensor:
    return F.cross_entropy(logits(model, batch).flatten(0, 1), batch["labels"].flatten(), **options)


CUT: dict[str, tuple[str, Loss]] = {
    "a mean": ("mean", lambda model, batch: each_token(model, batch).mean()),
    "mean squared error": ("mean", lambda model, batch: F.mse_loss(logits(model, batch), batch["x"][..., :5])),
    "a sum": ("sum", lambda model, batch: each_token(model, batch).sum()),
    "(sum, weight)": ("weighted", lambda model, batch: ((each_token(model, batch) * batch["mask"]).sum(), batch["mask"].sum())),
    "cross-entropy": ("divided", cross_entropy),
    "half of it, and a penalty": (
        "divided",
        lambda model, batch: cross_entropy(model, batch) / 2 + 0.01 * sum(each.square().sum() for each in model.parameters()),
    ),
    "with labels smoothed": ("divided", lambda model, batch: cross_entropy(model, batch, label_smoothing=0.1)),
    "with weights of classes": ("divided", lambda model, batch: cross_entropy(model, batch, weight=torch.arange(1.0, 6.0))),
    "a mean over a mask": (
        "divided",
        lambda model, batch: (each_token(model, batch) * batch["mask"]).sum() / batch["mask"].sum(),
    ),
}
WHOLE: dict[str, tuple[str, Loss]] = {
    "contrastive": (
        "compares samples",
        lambda model, batch: F.cross_entropy((h := logits(model, batch).flatten(1)) @ h.T, torch.arange(len(h))),
    ),
    "a mask's mean that is kept from 0": (
        "does not add up",
        lambda model, batch: (each_token(model, batch) * batch["mask"]).sum() / batch["mask"].sum().clamp(min=1),
    ),
    "a root": ("neither the mean nor the sum", lambda model, batch: each_token(model, batch).mean().sqrt()),
    "mixed samples": (
        "neither the mean nor the sum",
        lambda model, batch: F.mse_loss(model(batch["x"][torch.randperm(len(batch["x"]))]), batch["x"][..., :5]),
    ),
    "two counts": (
        "does not add up",
        lambda model, batch: (
            cross_entropy(model, batch) + (each_token(model, batch) * (batch["mask"][:, :1])).sum() / batch["mask"][:, 0].sum()
        ),
    ),
    "a batch's spread": (
        "divides by a number computed from the batch",
        lambda model, batch: each_token(model, {"x": batch["x"] / batch["x"].std(0).mean()}).mean(),
    ),
    "(mean, weight)": ("is the first a mean", lambda model, batch: (each_token(model, batch).mean(), batch["mask"].sum())),
}


def job_for(loss: Loss, model: Callable[[], nn.Module] | None = None, **options: Any) -> anyfit.Job:
    return anyfit.Job(
        model=model or (lambda: nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 5))),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
        sample=batches()[0],
        batch_size=ROWS,
        **{"precision": "fp32", **options},
    )


def assert_as_in_plain_pytorch(run: anyfit.Run) -> None:
    """Of whole batches."""
    torch.manual_seed(run.job.seed)
    model = run.job.build()
    optimizer = run.job.optimizer(model)
    for batch in batches():
        value = run.job.loss(model, batch)
        loss = value[0] / value[1] if isinstance(value, tuple) else value
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert float(run.step(batch)) == pytest.approx(float(loss.detach()), rel=1e-5)
    assert run.skipped == 0
    for name, expected in model.state_dict().items():
        torch.testing.assert_close(run.state_dict()[name], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", CUT)
def test_micro_batches_of_a_loss_make_the_batch_s(name: str) -> None:
    kind, loss = CUT[name]
    with anyfit.start(job_for(loss, micro_batch=2), machine=small_machine()) as run:
        assert run.plan.loss is not None
        assert (run.plan.loss.kind, run.plan.loss.proved, run.plan.accumulation) == (kind, True, 4)
        assert_as_in_plain_pytorch(run)


@pytest.mark.parametrize("name", WHOLE)
def test_a_loss_that_is_not_made_of_its_micro_batches_is_not_cut(name: str) -> None:
    said, loss = WHOLE[name]
    with pytest.raises(ValueError, match=rf"Job\(micro_batch=2\) cuts the batch.*{said}.*agree=\['mean-of-micro-batches'\]"):
        anyfit.start(job_for(loss, micro_batch=2), machine=small_machine())
    agreed = job_for(loss, micro_batch=2, agree=["mean-of-micro-batches"])
    with anyfit.start(agreed, machine=small_machine()) as run:
        assert run.plan.loss is not None
        assert run.plan.loss.kind == "mean"
        run.step(batches()[0])


def test_with_room_a_loss_is_neither_cut_nor_tried() -> None:
    calls: list[int] = []

    def contrastive(model: nn.Module, batch: Any) -> Tensor:
        calls.append(len(batch["x"]))
        return WHOLE["contrastive"][1](model, batch)

    with anyfit.start(job_for(contrastive), machine=small_machine()) as run:
        assert calls == []  # planning left no trace
        assert run.plan.micro_batch == ROWS
        assert_as_in_plain_pytorch(run)


def deep() -> nn.Module:
    """Mostly weights."""
    return nn.Sequential(nn.Linear(6, 256), *(nn.Linear(256, 256) for _ in range(6)), nn.Linear(256, 5))


def wide() -> nn.Module:
    """Mostly activations."""
    return nn.Sequential(nn.Linear(6, 4096), nn.GELU(), nn.Linear(4096, 5))


def test_under_a_limit_such_a_loss_is_planned_uncut() -> None:
    job = job_for(WHOLE["contrastive"][1], deep)
    need = anyfit.plan(job, small_machine()).forecast.needed_bytes
    with anyfit.start(job, machine=small_machine().with_limits(device_memory=need // 2)) as run:
        assert run.plan.micro_batch == ROWS
        assert_as_in_plain_pytorch(run)


def test_where_it_does_not_fit_uncut_the_verdict_says_why_it_is_not_cut() -> None:
    job = job_for(WHOLE["contrastive"][1], wide)
    tight = small_machine().with_limits(device_memory=int(0.8 * anyfit.plan(job, small_machine()).forecast.needed_bytes))
    with pytest.raises(anyfit.NoPlan, match=r"the batch is not cut: .*compares samples.*agree=\['mean-of-micro-batches'\]"):
        anyfit.start(job, machine=tight)
    with anyfit.start(job_for(WHOLE["contrastive"][1], wide, agree=["mean-of-micro-batches"]), machine=tight) as run:
        assert run.plan.micro_batch < ROWS


def test_batch_norms_are_cut_only_by_agreement() -> None:
    model = lambda: nn.Sequential(nn.Flatten(), nn.Linear(18, 8), nn.BatchNorm1d(8), nn.Linear(8, 5))  # noqa: E731
    loss = lambda model, batch: F.mse_loss(model(batch["x"]), batch["x"][:, 0, :5])  # noqa: E731
    with pytest.raises(ValueError, match=r"2 takes its statistics from the whole batch.*agree=\['batch-norm-of-micro-batches'\]"):
        anyfit.plan(job_for(loss, model, micro_batch=2), small_machine())
    agreed = job_for(loss, model, micro_batch=2, agree=["batch-norm-of-micro-batches"])
    with anyfit.start(agreed, machine=small_machine()) as run:
        before = {name: each.clone() for name, each in run.model.named_buffers()}
        assert float(before["2.num_batches_tracked"]) == 0  # the rehearsal left no trace
        run.step(batches()[0])
    uncut = job_for(loss, model)
    with anyfit.start(uncut, machine=small_machine()) as run:
        assert_as_in_plain_pytorch(run)


class Counting(nn.Module):
    """Anneals by the number of batches it has seen."""

    def __init__(self, buffered: bool) -> None:
        super().__init__()
        self.linear, self.buffered, self.seen = nn.Linear(6, 5), buffered, 0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.buffered:
            self.count += 1
            return self.linear(x) / (1 + self.count)
        self.seen += 1
        return self.linear(x) / (1 + self.seen)


@pytest.mark.parametrize("buffered", [True, False])
def test_a_forward_that_changes_the_model_runs_once_a_batch(buffered: bool) -> None:
    loss = CUT["mean squared error"][1]
    said = "count" if buffered else "seen"
    with pytest.raises(ValueError, match=f"cuts the batch, and the model.{said} changes in forward"):
        anyfit.start(job_for(loss, lambda: Counting(buffered), micro_batch=2), machine=small_machine())
    with anyfit.start(job_for(loss, lambda: Counting(buffered)), machine=small_machine()) as run:
        assert_as_in_plain_pytorch(run)


def test_a_plan_that_was_given_is_refused_by_what_it_does() -> None:
    job = job_for(WHOLE["contrastive"][1])
    with pytest.raises(ValueError, match=r"the plan cuts the batch, and the loss of 4 samples .*use a plan with micro_batch 8"):
        anyfit.start(job, hand_written(job, accumulation=4))


def test_a_verdict_is_kept_with_the_plan(tmp_path: Any) -> None:
    job = job_for(cross_entropy, micro_batch=2)
    with anyfit.start(job, machine=small_machine()) as run:
        run.plan.save(tmp_path / "plan.json")
    plan = anyfit.Plan.load(tmp_path / "plan.json")
    assert plan.rehearsed
    assert plan.loss == run.plan.loss
    with anyfit.start(job, plan.unbound()) as run:
        assert_as_in_plain_pytorch(run)


def test_an_agreement_that_is_not_known_is_refused() -> None:
    with pytest.raises(ValueError, match=r"agree=\['mean'\]\) is not known"):
        job_for(cross_entropy, agree=["mean"])
    with pytest.raises(TypeError, match="a list of names"):
        job_for(cross_entropy, agree="mean-of-micro-batches")


def test_a_plan_of_before_is_read_as_one_that_nobody_looked_at() -> None:
    job = job_for(cross_entropy)
    document = hand_written(job).to_json()
    document["version"] = 2
    del document["loss"], document["rehearsed"]
    plan = anyfit.Plan.from_json(document)
    assert plan.loss is None
    assert not plan.rehearsed
    assert LossRule("mean", "").may_be_cut


HOOKS: dict[str, tuple[bool, Any]] = {
    "a factor": (True, lambda gradient: gradient * 0.5),
    "a mask": (True, lambda gradient: gradient * (torch.arange(gradient.shape[-1]) % 2)),
    "in place": (True, lambda gradient: _scaled_in_place(gradient)),
    "a look": (True, lambda gradient: None),
    "clipped": (False, lambda gradient: gradient.clamp(-1e-2, 1e-2)),
    "clipped far out": (False, lambda gradient: gradient.clamp(-1e3, 1e3)),
    "clipped in place": (False, lambda gradient: _clipped_in_place(gradient)),
    "of length one": (False, lambda gradient: gradient / gradient.norm()),
    "without what is not finite": (False, lambda gradient: gradient.nan_to_num()),
    "one that fails": (False, lambda gradient: gradient @ gradient.new_ones(99)),
}


def _scaled_in_place(gradient: Tensor) -> None:
    gradient.mul_(2)


def _clipped_in_place(gradient: Tensor) -> None:
    gradient.clamp_(-1, 1)


@pytest.mark.parametrize("name", HOOKS)
def test_a_batch_is_cut_under_hooks_that_add_up(name: str) -> None:
    expected, hook = HOOKS[name]
    layer = nn.Linear(6, 5)
    layer.weight.register_hook(hook)
    found = hooks_on_gradients(layer)
    assert list(found) == ["weight"]
    assert adds_up(found["weight"][0], torch.device("cpu")) == expected


def test_a_hook_on_the_parameter_itself_may_do_anything() -> None:
    layer = nn.Linear(6, 5)
    layer.bias.register_post_accumulate_grad_hook(lambda parameter: None)
    assert not adds_up(hooks_on_gradients(layer)["bias"][0], torch.device("cpu"))


def test_packed_sequences_are_cut_though_they_need_their_order() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.LSTM(6, 6, batch_first=True)

        def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True)
            return nn.utils.rnn.pad_packed_sequence(self.body(packed)[0], batch_first=True, total_length=3)[0]

    sample = {"x": torch.randn(ROWS, 3, 6), "lengths": torch.tensor([3, 3, 3, 2, 2, 2, 1, 1])}
    job = anyfit.Job(
        Packed,
        lambda model, batch: model(batch["x"], batch["lengths"]).square().mean(),
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample,
        ROWS,
        micro_batch=2,
        precision="fp32",
        real_run=True,
    )
    with anyfit.start(job, machine=small_machine()) as run:
        assert run.plan.loss is not None
        assert run.plan.loss.kind == "mean"
        run.step(sample)


def test_where_memory_ends_the_loss_is_tried_on_fewer_samples() -> None:
    def loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        if isinstance(batch["x"], FakeTensor) or len(batch["x"]) <= 2:
            return cross_entropy(model, batch)
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1 GiB")

    sample = batches()[0]
    job = anyfit.Job(
        lambda: nn.Linear(6, 5),
        loss,
        lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        sample,
        ROWS,
        micro_batch=1,
        precision="fp32",
    )
    with anyfit.start(job, machine=small_machine()) as run:
        assert run.plan.loss is not None
        assert run.plan.loss.kind == "divided"
        run.step(sample)
