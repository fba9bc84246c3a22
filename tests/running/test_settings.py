"""A checkpoint and the job that goes on from it: what belongs together is found by name, and what differs is refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.lr_scheduler import (
    ChainedScheduler,
    ConstantLR,
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    OneCycleLR,
    SequentialLR,
    StepLR,
)

import anyfit
from anyfit.running.run import Run
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import hand_written
from tests.plans import started as placed

ROWS, WIDTH = 4, 6


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))


def mean_square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def other_loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).abs().mean()


def groups(*settings: tuple[str, float], **options: Any) -> Callable[[nn.Module], Optimizer]:
    """AdamW with a group for each of these modules, with a rate of its own."""

    def make(model: nn.Module) -> Optimizer:
        return AdamW([{"params": model.get_submodule(name).parameters(), "lr": lr} for name, lr in settings], **options)

    return make


def adamw(**options: Any) -> Callable[[nn.Module], Optimizer]:
    return lambda model: AdamW(model.parameters(), **options)


def job_for(**options: Any) -> anyfit.Job:
    defaults = {"loss": mean_square, "optimizer": adamw(lr=0.01), "precision": "fp32", "sample": batches(1)[0]}
    return anyfit.Job(model, **({"batch_size": ROWS} | defaults | options))


def batches(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(ROWS, WIDTH, generator=generator) for _ in range(count)]


def started(job: anyfit.Job) -> Run:
    return placed(job, hand_written(job))


def saved_by(job: anyfit.Job, folder: Path, steps: int = 2) -> Path:
    with started(job) as run:
        for batch in batches(steps):
            run.step(batch)
        run.save(folder / "saved")
    return folder / "saved"


def assert_refused(job: anyfit.Job, folder: Path, said: str) -> None:
    with started(job) as run:
        before, rates = run.state_dict(), [dict(group, params=None) for group in run.optimizer.param_groups]
        scheduled = None if run.scheduler is None else dict(run.scheduler.state_dict())
        with pytest.raises(ValueError, match=said):
            run.resume(folder)
        assert_bit_equal(run.state_dict(), before)
        assert [dict(group, params=None) for group in run.optimizer.param_groups] == rates
        assert scheduled == (None if run.scheduler is None else run.scheduler.state_dict())
        assert run.steps == 0


def test_groups_in_another_order_keep_their_own_learning_rates(tmp_path: Path) -> None:
    job = job_for(optimizer=groups(("0", 0.1), ("2", 0.001)))
    expected = train_plainly(job, batches(4))[1]
    folder = saved_by(job, tmp_path)
    with started(job_for(optimizer=groups(("2", 0.001), ("0", 0.1)))) as run:
        run.resume(folder)
        for batch in batches(4)[2:]:
            run.step(batch)
        assert [group["lr"] for group in run.optimizer.param_groups] == [0.001, 0.1]
        assert_bit_equal(run.state_dict(), expected)


def stepped(optimizer: Optimizer) -> StepLR:
    return StepLR(optimizer, 1, 0.5)


OTHER_OPTIMIZERS: dict[str, tuple[Any, str]] = {
    "another class": (lambda model: SGD(model.parameters(), lr=0.1), r"trained with AdamW; Job\(optimizer=\) makes SGD"),
    "one group": (adamw(lr=0.1), r"in 2 parameter groups, and Job\(optimizer=\) makes 1"),
    "other members": (
        lambda model: AdamW([{"params": [model[0].weight], "lr": 0.1}, {"params": [model[0].bias, *model[2].parameters()]}]),
        r"other parameter groups: '0.weight' was in that of '0.bias', and .* has it in one of its own",
    ),
    "another rate": (groups(("0", 0.1), ("2", 0.02)), r"begun with lr = 0.001 for the group of '2.bias', .* gives 0.02; .*\[1\]"),
    "other betas": (groups(("0", 0.1), ("2", 0.001), betas=(0.5, 0.9)), r"betas = \(0.9, 0.999\)"),
    "another setting": (groups(("0", 0.1), ("2", 0.001), amsgrad=True), "begun with amsgrad = False"),
}


@pytest.mark.parametrize(("optimizer", "said"), OTHER_OPTIMIZERS.values(), ids=OTHER_OPTIMIZERS)
def test_another_optimizer_is_refused_by_name(optimizer: Any, said: str, tmp_path: Path) -> None:
    folder = saved_by(job_for(optimizer=groups(("0", 0.1), ("2", 0.001))), tmp_path)
    assert_refused(job_for(optimizer=optimizer), folder, said)


def test_how_a_step_is_made_is_as_given_now(tmp_path: Path) -> None:
    folder = saved_by(job_for(optimizer=adamw(foreach=True)), tmp_path)
    with started(job_for(optimizer=adamw(foreach=False))) as run:
        run.resume(folder)
        assert run.optimizer.param_groups[0]["foreach"] is False


def test_groups_in_another_order_are_refused_where_a_scheduler_counts_on_it(tmp_path: Path) -> None:
    folder = saved_by(job_for(optimizer=groups(("0", 0.1), ("2", 0.001)), scheduler=stepped), tmp_path)
    job = job_for(optimizer=groups(("2", 0.001), ("0", 0.1)), scheduler=stepped)
    assert_refused(job, folder, r"groups were in another order \(that of '0.bias' was first\)")


def sequence(second: Callable[[Optimizer], Any]) -> Callable[[Optimizer], Any]:
    return lambda optimizer: SequentialLR(optimizer, [ConstantLR(optimizer), second(optimizer)], milestones=[3])


def chained(second: Callable[[Optimizer], Any]) -> Callable[[Optimizer], Any]:
    return lambda optimizer: ChainedScheduler([ConstantLR(optimizer), second(optimizer)], optimizer)


def one_cycle(steps: int) -> Callable[[Optimizer], Any]:
    return lambda optimizer: OneCycleLR(optimizer, max_lr=0.1, total_steps=steps)


def cosine(optimizer: Optimizer) -> CosineAnnealingLR:
    return CosineAnnealingLR(optimizer, 10)


OTHER_SCHEDULERS: dict[str, tuple[Any, Any, str]] = {
    "another class": (stepped, cosine, r"the scheduler StepLR, and Job\(scheduler=\) makes CosineAnnealingLR"),
    "none": (stepped, None, "saved with a scheduler"),
    "some": (None, stepped, "saved without a scheduler"),
    "another inside": (sequence(stepped), sequence(cosine), r"SequentialLR\(ConstantLR, StepLR\), .* CosineAnnealingLR\)"),
    "another in a chain": (chained(stepped), chained(LinearLR), r"ChainedScheduler\(ConstantLR, StepLR\)"),
    "another length": (one_cycle(20), one_cycle(30), r"begun with scheduler.total_steps = 20, .* gives 30"),
    "another factor": (stepped, lambda o: StepLR(o, 1, 0.1), r"scheduler.gamma = 0.5"),
    "another inside, its factor": (
        sequence(stepped),
        sequence(lambda o: StepLR(o, 1, 0.1)),
        r"scheduler._schedulers\[1\].gamma = 0.5",
    ),
}


@pytest.mark.parametrize(("before", "after", "said"), OTHER_SCHEDULERS.values(), ids=OTHER_SCHEDULERS)
@pytest.mark.filterwarnings("ignore:The epoch parameter", "ignore:Detected call of")
def test_another_scheduler_is_refused_by_name(before: Any, after: Any, said: str, tmp_path: Path) -> None:
    folder = saved_by(job_for(scheduler=before), tmp_path)
    assert_refused(job_for(scheduler=after), folder, said)


class Warming:
    """A rate with a memory."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, step: int) -> float:
        self.calls += 1
        return 1 / (self.calls + step)


def test_a_rate_that_remembers_goes_on(tmp_path: Path) -> None:
    job = job_for(scheduler=lambda optimizer: LambdaLR(optimizer, Warming()))
    expected = train_plainly(job, batches(4))[1]
    folder = saved_by(job, tmp_path)
    with started(job) as run:
        run.resume(folder)
        for batch in batches(4)[2:]:
            run.step(batch)
        assert_bit_equal(run.state_dict(), expected)


def test_another_job_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = saved_by(job_for(), tmp_path)
    capsys.readouterr()
    job = job_for(precision="bf16", clip_norm=1.0, loss=other_loss, batch_size=2 * ROWS)
    with started(job) as run:
        run.resume(folder)
    said = capsys.readouterr().err
    assert "saved with precision fp32, and goes on with bf16" in said
    assert "saved with clip_norm None, and goes on with 1.0" in said
    assert "mean_square, and goes on with tests.running.test_settings.other_loss" in said
    assert f"saved with batch_size {ROWS}, and goes on with {2 * ROWS}" in said
    assert f"the next one to hand over is number {2 + 1}" in said
    with started(job_for()) as run:
        run.resume(loaded(job_for(), tmp_path / "loaded", 1))
    assert capsys.readouterr().err == ""


def loaded(job: anyfit.Job, folder: Path, batches_drawn: int) -> Path:
    with started(job) as run:
        for _, batch in zip(range(batches_drawn), run.loader(list(batches(10)[0].repeat(10, 1))), strict=False):
            run.step(batch)
        run.save(folder / "saved")
    return folder / "saved"


def test_another_batch_size_goes_on_at_the_same_sample_or_is_refused(tmp_path: Path) -> None:
    folder = loaded(job_for(), tmp_path, 6)
    with started(job_for(batch_size=3 * ROWS)) as run:
        run.resume(folder)
        assert run.loader(list(batches(10)[0].repeat(10, 1))).position == 2
    assert_refused(job_for(batch_size=5), folder, "after 24 samples in batches of 4, where no batch of 5 begins")


def test_another_order_of_the_data_is_refused(tmp_path: Path) -> None:
    folder = loaded(job_for(), tmp_path, 2)
    assert_refused(job_for(seed=1), folder, r"order of the data that seed 0 gives, and Job\(seed=1\) gives another")
    with started(job_for()) as run:
        run.resume(folder)
        with pytest.raises(ValueError, match=r"of 40 samples, and this dataset has 12"):
            run.loader(list(batches(3)[0].repeat(3, 1)))


INSANE: dict[str, tuple[Callable[[Any], Any], str]] = {
    "rate of NaN": (lambda p: p["groups"][0]["settings"].update(lr=float("nan")), "lr of the parameters is nan"),
    "negative rate": (lambda p: p["groups"][0]["settings"].update(lr=-7), "lr of the parameters is -7"),
    "rate that is a word": (lambda p: p["groups"][0]["settings"].update(lr="x"), "lr of the parameters is 'x'"),
    "infinite rate": (lambda p: p["groups"][0]["settings"].update(lr=float("inf")), "lr of the parameters is inf"),
    "no rate": (lambda p: p["groups"][0]["settings"].pop("lr") and None, "no 'lr' of the parameters"),
    "betas of one": (lambda p: p["groups"][0]["settings"].update(betas={"!tuple": [0.9, 1.0]}), "betas of the parameters are"),
    "one beta": (lambda p: p["groups"][0]["settings"].update(betas=0.9), "betas of the parameters is 0.9"),
    "negative decay": (lambda p: p["groups"][0]["settings"].update(weight_decay=-1.0), "weight_decay of the parameters is -1.0"),
    "a flag that is a number": (lambda p: p["groups"][0]["settings"].update(amsgrad=3), "amsgrad of the parameters is 3"),
    "counts under 0": (
        lambda p: p["optimizer_scalars"]["0.bias"].update(step={"!number": ["float32", -1.0]}),
        "optimizer's step of 0.bias is -1.0",
    ),
    "counts of NaN": (
        lambda p: p["optimizer_scalars"]["0.bias"].update(step={"!number": ["float32", float("nan")]}),
        "optimizer's step of 0.bias is nan",
    ),
    "a scheduler's rate of NaN": (lambda p: p["scheduler"].update(_last_lr=[float("nan")]), "_last_lr of the scheduler is nan"),
    "a scheduler's rate below 0": (lambda p: p["scheduler"].update(base_lrs=[-1.0]), "base_lrs of the scheduler is -1.0"),
    "a scheduler before its start": (lambda p: p["scheduler"].update(last_epoch=-4), "last_epoch of the scheduler is -4"),
    "a scheduler's factor, a word": (lambda p: p["scheduler"].update(gamma="x"), "gamma of the scheduler is 'x'"),
    "rates of three groups": (lambda p: p["scheduler"].update(_last_lr=[0.1] * 3), "_last_lr of the scheduler has 3"),
}


@pytest.fixture(scope="module")
def scheduled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved_by(job_for(scheduler=stepped), tmp_path_factory.mktemp("scheduled"))


@pytest.mark.parametrize(("edit", "said"), INSANE.values(), ids=INSANE)
def test_numbers_that_no_run_can_have_are_refused_by_name(
    edit: Callable[[Any], Any], said: str, scheduled: Path, tmp_path: Path
) -> None:
    import shutil

    from .test_hostile import change

    folder = Path(shutil.copytree(scheduled, tmp_path / "saved"))
    change(folder, "progress.json", edit)
    assert_refused(job_for(scheduler=stepped), folder, said)


def edited(folder: Path, tensor: str, value: float) -> Path:
    """The checkpoint with one number of a tensor changed, and its checksums right."""
    from .test_hostile import put

    file = folder / "data-00000.safetensors"
    content = bytearray(file.read_bytes())
    length = int.from_bytes(content[:8], "little")
    start = 8 + length + json.loads(content[8 : 8 + length])[tensor]["data_offsets"][0]
    content[start : start + 4] = torch.tensor(value).numpy().tobytes()
    put(folder, file.name, bytes(content))
    return folder


@pytest.mark.parametrize(
    ("tensor", "value", "said"),
    [
        ("0.weight", float("nan"), "the weight 0.weight holds NaN: the run had diverged"),
        ("2.bias", float("-inf"), "the weight 2.bias is infinite"),
        ("0.weight/exp_avg", float("nan"), "optimizer's exp_avg of 0.weight holds NaN"),
        ("0.bias/exp_avg_sq", -1.0, "optimizer's exp_avg_sq of 0.bias is -1.0, and a mean of squares is not negative"),
    ],
)
def test_weights_and_moments_that_are_no_numbers_are_refused(tensor: str, value: float, said: str, tmp_path: Path) -> None:
    assert_refused(job_for(), edited(saved_by(job_for(), tmp_path), tensor, value), said)


class Masked(nn.Module):
    """A trained mask, some of which is never let through."""

    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.tensor([0.0, float("-inf"), 1.0, 0.0, 0.0, 0.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.mask.softmax(0)


def test_what_is_infinite_from_the_start_goes_on(tmp_path: Path) -> None:
    job = job_for()
    job = anyfit.Job(Masked, mean_square, adamw(lr=0.01), sample=job.sample, batch_size=ROWS, precision="fp32")
    expected = train_plainly(job, batches(3))[1]
    folder = saved_by(job, tmp_path)
    with started(job) as run:
        run.resume(folder)
        run.step(batches(3)[2])
        assert_bit_equal(run.state_dict(), expected)


@pytest.mark.parametrize("name", ["manifest.json", "metadata.json", "progress.json", "extra.json", "data-00000.safetensors"])
def test_a_link_in_a_checkpoint_is_not_followed(name: str, tmp_path: Path) -> None:
    folder = saved_by(job_for(), tmp_path)
    (folder / name).rename(tmp_path / "outside")
    (folder / name).symlink_to(tmp_path / "outside")
    assert_refused(job_for(), folder, f"{name} is a link, which may lead out")


def test_a_link_to_a_checkpoint_is_followed(tmp_path: Path) -> None:
    folder = saved_by(job_for(), tmp_path)
    (tmp_path / "latest").symlink_to(folder)
    with started(job_for()) as run:
        run.resume(tmp_path / "latest")
        assert run.steps == 2
        run.save(tmp_path / "latest")
        run.save(tmp_path / "latest")
        run.resume(tmp_path / "latest")
    assert folder.is_dir()


def test_a_pipe_in_a_checkpoint_is_not_waited_for(tmp_path: Path) -> None:
    import os

    folder = saved_by(job_for(), tmp_path)
    (folder / "plan.json").unlink()
    os.mkfifo(folder / "plan.json")
    assert_refused(job_for(), folder, "plan.json is not a file")
