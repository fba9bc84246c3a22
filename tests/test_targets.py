"""What the command line can be pointed at becomes a Job of the right shapes."""

from __future__ import annotations

import contextlib
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

import anyfit
from anyfit import Machine, targets
from anyfit.tracing import trace
from anyfit.values.job import OPTIMIZERS, Job
from tests.machines import small_machine


def parameters_of(job: Job) -> int:
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in job.build().parameters())


@pytest.mark.parametrize(
    ("size", "billions"),
    [
        ("gpt2-small", 0.124),
        ("gpt2-xl", 1.56),
        ("gpt2-4b", 3.8),
        ("gpt2-10b", 9.9),
        ("gpt2-15b", 14.9),
        ("gpt2-20b", 19.7),
        ("llama-1b", 1.236),
        ("llama-8b", 8.03),
        ("llama-70b", 70.55),
        ("gpt3-175b", 174.6),
    ],
)
def test_a_size_has_the_parameters_of_its_name(size: str, billions: float) -> None:
    assert size in targets.SIZES
    assert parameters_of(targets.job_for(size)) / 1e9 == pytest.approx(billions, rel=0.01)


@pytest.mark.parametrize(("size", "length"), [("gpt2-small", 1024), ("llama-8b", 1024), ("gpt3-175b", 2048)])
def test_a_size_has_its_own_batch_and_length(size: str, length: int) -> None:
    job = targets.job_for(size)
    assert (job.batch_size, job.precision) == (8, "bf16")
    assert job.sample["input_ids"].shape == (8, length)


def test_adapters_are_pefts_and_train_alone(tmp_path: Path) -> None:
    peft: Any = pytest.importorskip("peft")
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 50}
    config = AutoConfig.for_model("llama", **sizes, max_position_embeddings=16)
    config.save_pretrained(tmp_path)
    job = targets.job_for(str(tmp_path), batch=2, seq=8, dtype="fp32", lora=4)
    theirs = peft.get_peft_model(LlamaForCausalLM(config), peft.LoraConfig(r=4, target_modules="all-linear"))
    trained = {name: each.shape for name, each in theirs.named_parameters() if each.requires_grad}
    assert {name: each.shape for name, each in job.build().named_parameters() if each.requires_grad} == trained
    profile = anyfit.profile(job, small_machine())
    count = sum(shape.numel() for shape in trained.values())
    assert profile.trainable == count
    assert (profile.state.optimizer, profile.state.gradients) == (8 * count, 4 * count)
    with anyfit.start(job, machine=small_machine()) as run:
        before = run.state_dict()
        run.step(job.sample)
        run.step(job.sample)
        after = run.state_dict()
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == set(trained)


def test_options_apply_to_a_size() -> None:
    job = targets.job_for("gpt2-small", batch=2, seq=4096, dtype="fp32", optimizer="sgd")
    assert (job.batch_size, job.precision) == (2, "fp32")
    assert job.sample["input_ids"].shape == (2, 4096)  # the positions grow with it
    assert type(job.optimizer(torch.nn.Linear(2, 2))) is torch.optim.SGD


def test_options_apply_to_the_demo() -> None:
    job = targets.job_for("demo", batch=3, seq=16, dtype="fp32", optimizer="NAdam")
    assert job.sample.shape == (3, 17)
    assert type(job.optimizer(torch.nn.Linear(2, 2))) is torch.optim.NAdam


@pytest.mark.parametrize(("name", "made"), [("adamw", "AdamW"), ("ADAM", "Adam"), ("rmsprop", "RMSprop"), ("Adagrad", "Adagrad")])
def test_an_optimizer_is_known_by_its_name_in_any_case(name: str, made: str) -> None:
    assert type(targets.job_for("demo", optimizer=name).optimizer(torch.nn.Linear(2, 2))).__name__ == made


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_optimizers_that_errors_name_are_learnt_and_run(name: str) -> None:
    job = targets.job_for("demo", batch=2, seq=16, dtype="fp32", optimizer=name)
    assert trace(job, 2).update.name == name
    with contextlib.closing(anyfit.start(job, machine=small_machine())) as run:
        assert math.isfinite(run.step(job.sample))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("lbfgs", "LBFGS steps with a closure that runs the model many times, and a step here runs it once; these"),
        (
            "sparseadam",
            r"SparseAdam does not step ordinary parameters with dense gradients on the CPU \(.*\); these of .* do: AdamW",
        ),
        ("eager", r"--optimizer eager: torch.optim.Eager cannot be made .* missing 1 required .*'pace'\. These can: AdamW, Adam"),
    ],
)
def test_an_optimizer_that_cannot_be_used_is_one_error_that_names_those_that_can(
    name: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Eager(torch.optim.SGD):
        def __init__(self, params: Any, pace: float) -> None:
            super().__init__(params, lr=pace)

    monkeypatch.setattr(torch.optim, "Eager", Eager, raising=False)
    job = targets.job_for("demo", batch=2, seq=16, optimizer=name)
    with pytest.raises(ValueError, match=message) as error:
        trace(job, 2)
    assert not getattr(error.value, "__notes__", None)


def test_a_model_type_is_a_target_with_the_length_it_allows() -> None:
    assert targets.job_for("bert").sample["input_ids"].shape == (8, 512)
    assert targets.job_for("vit", batch=2).sample["pixel_values"].shape == (2, 3, 224, 224)
    assert targets.job_for("whisper", batch=1).sample["labels"].shape == (1, 448)


@pytest.mark.parametrize("inside", ["", "config.json"])
def test_a_folder_and_its_file_are_targets_whatever_dtype_they_were_saved_in(tmp_path: Path, inside: str) -> None:
    config: Any = AutoConfig.for_model("gpt2", n_layer=2, n_embd=32, n_head=2, dtype="float16", vocab_size=64)
    config.save_pretrained(tmp_path)
    job = targets.job_for(str(tmp_path / inside), batch=2, seq=16, dtype="fp32")
    graph = trace(job, 2)
    assert {parameter.dtype for parameter in graph.parameters} == {"float32"}
    assert len(graph.blocks) == 3


def test_a_function_takes_no_options() -> None:
    for option in ({"batch": 1}, {"seq": 1}, {"dtype": "fp32"}, {"optimizer": "sgd"}):
        with pytest.raises(ValueError, match=f"--{next(iter(option))} is not for functions"):
            targets.job_for("anyfit.demo:job", **option)  # type: ignore[arg-type]
    assert isinstance(targets.job_for("anyfit.demo:job"), Job)


def test_without_transformers_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    for target in ("gpt2-small", "llama"):
        with pytest.raises(ImportError, match=r"need transformers: pip install 'anyfit\[hf\]'"):
            targets.job_for(target)
    assert isinstance(targets.job_for("demo"), Job)


def test_the_costs_of_modules_add_up_to_those_of_their_parents() -> None:
    job = targets.job_for("gpt2-small", batch=2, seq=32)
    graph = trace(job, 2, "cuda")
    modules = {module.name: module for module in targets.module_costs(job, graph, Machine.load("h200"), 4)}
    layers = [modules[f"transformer.h.{index}"] for index in range(12)]
    for column in ("parameters", "flops_forward", "flops_backward", "seconds_forward", "seconds_backward", "kept_bytes"):
        in_layers = sum(getattr(layer, column) for layer in layers)
        assert getattr(modules["transformer.h"], column) == pytest.approx(in_layers)
    assert modules["transformer.h.0.attn"].kind == "GPT2Attention"
    assert modules["transformer.h.0.attn"].parameters == 4 * 768**2 + 4 * 768
    assert "transformer.h.0.attn.c_attn" not in modules
