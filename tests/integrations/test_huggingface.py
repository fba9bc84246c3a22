"""AnyfitTrainer beside transformers' Trainer: the same script, the same numbers."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BertConfig, BertForTokenClassification, Trainer, TrainingArguments

import anyfit
from anyfit.integrations.huggingface import AnyfitMixin, AnyfitTrainer

from .trainers import ARGUMENTS, Events, assert_close, logged, model_of, padded, texts, trained

SHORT = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "no"}
TIGHT = "500KiB"  # a whole batch of four texts does not fit


class Runs:
    """One training by each, with dropout and all that is saved, which several tests look at."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.events = folder, {"plain": Events(), "anyfit": Events()}
        self.plain, self.anyfit = (
            trained(kind, folder / name, dropout=0.1, options={"callbacks": [self.events[name]]})
            for name, kind in (("plain", Trainer), ("anyfit", AnyfitTrainer))
        )


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Runs:
    return Runs(tmp_path_factory.mktemp("runs"))


def weights_of(trainer: Any) -> list[Tensor]:
    return list(trainer.model.state_dict().values())


def test_every_number_that_is_logged_is_that_of_trainer(runs: Runs) -> None:
    assert logged(runs.anyfit) == logged(runs.plain)
    assert {"loss", "grad_norm", "learning_rate", "epoch", "step"} <= set(logged(runs.plain)[0])


def test_callbacks_are_told_the_same_in_the_same_order(runs: Runs) -> None:
    assert runs.events["anyfit"].seen == runs.events["plain"].seen


def test_the_best_model_is_loaded_and_is_the_same(runs: Runs) -> None:
    best = [Path(each.state.best_model_checkpoint).name for each in (runs.anyfit, runs.plain)]
    assert best == ["checkpoint-2", "checkpoint-2"]
    assert all(map(torch.equal, weights_of(runs.anyfit), weights_of(runs.plain)))


def test_a_checkpoint_holds_a_model_that_transformers_loads(runs: Runs) -> None:
    loaded = [
        AutoModelForCausalLM.from_pretrained(runs.folder / name / "checkpoint-8", dtype=torch.float32)
        for name in ("anyfit", "plain")
    ]
    assert all(map(torch.equal, *(each.state_dict().values() for each in loaded)))


def test_a_resumed_run_logs_the_same_as_one_that_was_not_stopped(runs: Runs, capfd: pytest.CaptureFixture[str]) -> None:
    resumed = trained(AnyfitTrainer, runs.folder / "anyfit", resume="checkpoint-4", dropout=0.1)
    assert logged(resumed)[:-1] == logged(runs.plain)[:-1]  # the last is a mean over the steps since
    assert all(map(torch.equal, weights_of(resumed), weights_of(runs.plain)))
    assert "run.loader" not in capfd.readouterr().err  # the Trainer skips what it has seen


def test_after_training_the_model_is_the_users_again(runs: Runs) -> None:
    assert {type(each) for each in runs.anyfit.model.parameters()} == {nn.Parameter}
    found, wanted = runs.anyfit.evaluate(), runs.plain.evaluate()
    assert found["eval_loss"] == wanted["eval_loss"]
    with pytest.raises(RuntimeError, match="this trainer has trained"):
        runs.anyfit.train()


# ---------------------------------------------------------------------- batches that do not fit


class Planned(AnyfitTrainer):
    """Keeps the plan of its run."""

    def _step(self, window: Any) -> Tensor:
        self.plan = self.run.plan
        return super()._step(window)


class MeanOfLabels(Trainer):
    """A loss of the user's own: a mean over the labels of a batch, without `num_items_in_batch`."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        outputs = model(**{name: each for name, each in inputs.items() if name != "labels"})
        loss = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class MeanOfLabelsPlanned(Planned, MeanOfLabels):
    pass


def tagger() -> BertForTokenClassification:
    """It takes `num_items_in_batch`, hands it to all of its layers, and its loss is a mean without it."""
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
    drops = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertForTokenClassification(BertConfig(**sizes, **drops, max_position_embeddings=32, num_labels=64))


def test_a_model_that_does_not_use_the_number_of_items_is_cut_by_its_labels(tmp_path: Path) -> None:
    small = anyfit.probe().with_limits(device_memory="200KiB")
    found = trained(Planned, tmp_path, options={"model": tagger(), "machine": small}, **SHORT)
    assert found.plan.micro_batch < 4
    assert_close(logged(found), logged(trained(Trainer, tmp_path, options={"model": tagger()}, **SHORT)))


@pytest.mark.parametrize("kinds", [(Planned, Trainer), (MeanOfLabelsPlanned, MeanOfLabels)])
def test_a_batch_that_does_not_fit_is_cut_and_trains_the_same(kinds: tuple[type, type], tmp_path: Path) -> None:
    small = anyfit.probe().with_limits(device_memory=TIGHT)
    found = trained(kinds[0], tmp_path / "cut", options={"machine": small})
    assert found.plan.micro_batch < 4
    assert found.plan.batch_size == 8
    plain = trained(kinds[1], tmp_path / "plain")
    assert_close(logged(found), logged(plain))
    weights = [each.clone() for each in weights_of(found)]
    assert found.evaluate()["eval_loss"] == pytest.approx(plain.evaluate()["eval_loss"], rel=1e-6)  # placed once more
    assert all(map(torch.equal, weights, weights_of(found)))
    assert {type(each) for each in found.model.parameters()} == {nn.Parameter}


def half_unlabelled(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    batch = padded(rows)
    batch["labels"] = torch.where(torch.arange(len(rows))[:, None] < len(rows) // 2, -100, batch["labels"])
    return batch


def test_a_piece_of_a_batch_may_have_no_label(tmp_path: Path) -> None:
    small = anyfit.probe().with_limits(device_memory=TIGHT)
    own = {"data_collator": half_unlabelled}
    found = trained(MeanOfLabelsPlanned, tmp_path, options={"machine": small, **own}, **SHORT)
    assert found.plan.micro_batch <= 2  # of batches of four
    assert_close(logged(found), logged(trained(MeanOfLabels, tmp_path, options=own, **SHORT)))


class Compared(Trainer):
    """A loss that compares the samples of a batch with each other."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Tensor:
        outputs = model(**inputs)
        loss = outputs.logits.mean(1).var(0).mean()
        return (loss, outputs) if return_outputs else loss


class ComparedPlanned(AnyfitMixin, Compared):
    pass


def test_a_loss_that_compares_samples_sees_the_batches_of_trainer_or_is_refused(tmp_path: Path) -> None:
    once = {"num_train_epochs": 0.25, **SHORT}
    found, wanted = (trained(kind, tmp_path, **once) for kind in (ComparedPlanned, Compared))
    assert logged(found) == logged(wanted)
    small, model = anyfit.probe().with_limits(device_memory=TIGHT), model_of()
    with pytest.raises(ValueError, match="lower per_device_train_batch_size to 2 and raise gradient_accumulation_steps to 4"):
        trained(ComparedPlanned, tmp_path, options={"machine": small, "model": model}, **once)
    assert {type(each) for each in model.parameters()} == {nn.Parameter}
    assert all(map(torch.equal, model.parameters(), model_of().parameters()))


# ---------------------------------------------------------------------- steps that are left out, and other ways to train


class Poisoned(AnyfitTrainer):
    """The gradients of its third update are not numbers."""

    def compute_loss(self, model: nn.Module, inputs: Any, *args: Any, **options: Any) -> Any:
        loss = super().compute_loss(model, inputs, *args, **options)
        return loss * float("nan") if self.is_stepping and self.state.global_step == 2 else loss


def test_a_step_that_is_left_out_does_not_step_the_scheduler(tmp_path: Path) -> None:
    found = trained(Poisoned, tmp_path, **SHORT, warmup_steps=0)
    rates = [entry["learning_rate"] for entry in logged(found) if "learning_rate" in entry]
    assert rates[2] == rates[3]
    assert len(set(rates)) == len(rates) - 1
    assert all(torch.isfinite(each).all() for each in found.model.parameters())


@pytest.mark.parametrize(
    "args",
    [
        pytest.param({"optim": "sgd", "lr_scheduler_type": "cosine", "max_grad_norm": 0.0}, marks=pytest.mark.full),
        {"optim": "adafactor", "label_smoothing_factor": 0.1, "gradient_checkpointing": True},
        pytest.param(
            {"neftune_noise_alpha": 5.0, "gradient_accumulation_steps": 3, "per_device_train_batch_size": 5},
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda args: next(iter(args)),
)
def test_other_options_of_trainer_train_the_same(args: Mapping[str, Any], tmp_path: Path) -> None:
    shorter = {"num_train_epochs": 1, "save_strategy": "no", "load_best_model_at_end": False, **args}
    found, wanted = (trained(kind, tmp_path, **shorter) for kind in (AnyfitTrainer, Trainer))
    assert_close(logged(found), logged(wanted))


def test_an_optimizer_and_a_scheduler_of_the_users_own_are_used(tmp_path: Path) -> None:
    def made() -> dict[str, Any]:
        model = model_of()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return {"model": model, "optimizers": (optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5))}

    found, wanted = (trained(kind, tmp_path, options=made(), **SHORT) for kind in (AnyfitTrainer, Trainer))
    assert logged(found) == logged(wanted)
    assert logged(found)[2]["learning_rate"] == 0.05


@pytest.mark.full
def test_bf16_trains_bf16_weights_and_gives_back_fp32_ones(tmp_path: Path) -> None:
    found = trained(AnyfitTrainer, tmp_path, bf16=True)
    assert {each.dtype for each in found.model.parameters()} == {torch.float32}
    plain = trained(Trainer, tmp_path)
    losses = [[entry["loss"] for entry in logged(each) if "loss" in entry] for each in (found, plain)]
    assert losses[0] == pytest.approx(losses[1], rel=2e-2)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"fp16": True}, "fp16=True) cannot be honoured with anyfit; use bf16=True"),
        ({"torch_compile": True}, "torch_compile=True) cannot be honoured"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size=True) cannot be honoured"),
        ({"torch_empty_cache_steps": 4}, "torch_empty_cache_steps=4) cannot be honoured"),
        ({"ddp_find_unused_parameters": False}, "ddp_find_unused_parameters=False) cannot be honoured"),
        ({"bf16_full_eval": True}, "bf16_full_eval=True) cannot be honoured"),
        ({"debug": "underflow_overflow"}, "cannot be honoured"),
        ({"optim": "lomo"}, "optim='lomo') is not known to train the same"),
        ({"accelerator_config": {"split_batches": True}}, "'split_batches': True} cannot be honoured"),
    ],
)
def test_what_cannot_be_honoured_is_refused_by_name_before_training(args: Mapping[str, Any], said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        AnyfitTrainer(model=model_of(), args=TrainingArguments(str(tmp_path), **{**ARGUMENTS, **SHORT, **args}))


def test_a_model_in_bf16_is_refused_without_bf16(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=re.escape("the model has bfloat16 weights, and bf16=False")):
        trained(AnyfitTrainer, tmp_path, options={"model": model_of().bfloat16()})


def test_a_checkpoint_of_another_trainer_is_refused(runs: Runs) -> None:
    with pytest.raises(ValueError, match="has no anyfit folder: it was written by another Trainer"):
        trained(AnyfitTrainer, runs.folder / "plain", resume="checkpoint-4", dropout=0.1)


def test_a_subclass_whose_training_step_would_be_lost_is_refused(tmp_path: Path) -> None:
    class Own(Trainer):
        def training_step(self, *args: Any, **options: Any) -> Tensor:
            return super().training_step(*args, **options)

    class Mixed(AnyfitMixin, Own):
        pass

    with pytest.raises(TypeError, match=re.escape("Own.training_step would not be called with anyfit")):
        Mixed(model=model_of(), args=TrainingArguments(str(tmp_path), **ARGUMENTS), train_dataset=texts(8), data_collator=padded)
