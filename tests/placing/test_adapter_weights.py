"""PEFT's models from plain folders: the base's weights and the adapter's own are those of PEFT itself, or the job is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import anyfit
from anyfit.placing.weights import opened
from anyfit.values.weights import Weights
from tests.families import FAMILIES, saved
from tests.machines import small_machine
from tests.oracle import PlainBf16, PlainFp32, assert_bit_equal
from tests.plans import AWAY, hand_written

peft: Any = pytest.importorskip("peft")
ROWS = 4
TARGETS = {"gpt2": ["c_attn"], "bert": ["query"], "t5": ["q", "v"]}  # else those of decoders


def lora(family: str = "llama", **options: Any) -> Any:
    usual = {"r": 4, "target_modules": TARGETS.get(family, ["q_proj", "v_proj"]), "fan_in_fan_out": family == "gpt2"}
    return peft.LoraConfig(**usual | options)


def job_of(folder: Path, adapter: Any, **options: Any) -> anyfit.Job:
    options = {"precision": "fp32", "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)} | options
    return anyfit.Job.from_huggingface(folder, batch_size=ROWS, length=8, adapter=adapter, **options)


def adapted_by_peft(folder: Path, family: str, adapter: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return peft.get_peft_model(getattr(transformers, FAMILIES[family][0]).from_pretrained(folder), adapter)


def started(job: anyfit.Job) -> anyfit.Run:
    return anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine())


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_starts_with_what_peft_makes_of_its_folder(tmp_path: Path, family: str) -> None:
    saved(tmp_path, family)
    with started(job_of(tmp_path, lora(family), seed=3)) as run:
        plain = adapted_by_peft(tmp_path, family, lora(family), seed=3)
        assert_bit_equal(run.state_dict(), plain.state_dict())
        assert [name for name, each in run.model.named_parameters() if each.requires_grad] == [
            name for name, each in plain.named_parameters() if each.requires_grad
        ]


@pytest.mark.parametrize(
    "options",
    [
        {"init_lora_weights": "gaussian"},
        {"init_lora_weights": "orthogonal", "use_rslora": True},
        {"modules_to_save": ["lm_head"], "bias": "all"},
        {"target_modules": ["embed_tokens", "lm_head", "o_proj"]},
        {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}},
    ],
    ids=str,
)
def test_whatever_peft_adapts_starts_as_it_does_there(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, "llama")
    with started(job_of(tmp_path, lora(**options))) as run:
        assert_bit_equal(run.state_dict(), adapted_by_peft(tmp_path, "llama", lora(**options)).state_dict())


def test_experts_that_transformers_fuses_may_be_adapted(tmp_path: Path) -> None:
    saved(tmp_path, "qwen3 moe")
    adapter = lora(target_parameters=["mlp.experts.gate_up_proj", "mlp.experts.down_proj"])
    with started(job_of(tmp_path, adapter)) as run:
        assert_bit_equal(run.state_dict(), adapted_by_peft(tmp_path, "qwen3 moe", adapter).state_dict())


def test_a_model_of_ones_own_function_finds_its_base_too(tmp_path: Path) -> None:
    saved(tmp_path, "llama")

    def build() -> nn.Module:
        config = transformers.AutoConfig.from_pretrained(tmp_path)
        made: nn.Module = peft.get_peft_model(transformers.AutoModelForCausalLM.from_config(config), lora())
        return made

    job = anyfit.Job(**{**vars(job_of(tmp_path, None)), "model": build})
    with started(job) as run:
        assert_bit_equal(run.state_dict(), adapted_by_peft(tmp_path, "llama", lora()).state_dict())


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_steps_are_those_of_plain_pytorch_with_the_base_on_the_host(tmp_path: Path, precision: Any) -> None:
    saved(tmp_path, "llama")
    job = job_of(tmp_path, lora(init_lora_weights=False), precision=precision, clip_norm=0.1)
    plain = adapted_by_peft(tmp_path, "llama", lora(init_lora_weights=False)).train()
    oracle = (PlainFp32 if precision == "fp32" else PlainBf16)(job, plain)
    with started(job) as run:
        first = run.state_dict()
        for _ in range(3):
            assert float(run.step(job.sample)) == oracle.step(job.sample, 1)
        assert_bit_equal(run.state_dict(), oracle.weights())
        changed = {name for name, each in run.state_dict().items() if not torch.equal(each, first[name])}
    assert changed == {name for name, each in run.model.named_parameters() if each.requires_grad}


# ---------------------------------------------------------------------- adapters that PEFT saved


def saved_adapter(base: Path, folder: Path, **options: Any) -> dict[str, Tensor]:
    """The weights of a model, base and adapter, of which PEFT saved the adapter."""
    model = adapted_by_peft(base, "llama", lora(init_lora_weights=False, **options))
    with torch.no_grad():
        for name, each in model.named_parameters():
            if "modules_to_save" in name or "magnitude" in name:
                each.add_(0.5)
    model.save_pretrained(folder)
    state: dict[str, Tensor] = model.state_dict()
    return state


@pytest.mark.parametrize("options", [{}, {"use_dora": True}, {"modules_to_save": ["lm_head"]}], ids=str)
def test_an_adapter_that_peft_saved_is_gone_on_with(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path / "base", "llama")
    weights = saved_adapter(tmp_path / "base", tmp_path / "adapter", **options)
    with started(job_of(tmp_path / "base", tmp_path / "adapter")) as run:
        assert_bit_equal(run.state_dict(), weights)
        assert any(each.requires_grad for each in run.model.parameters())
        run.step(run.job.sample)


def test_an_adapter_of_another_model_is_refused(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    saved_adapter(tmp_path / "base", tmp_path / "adapter")
    weights = Weights(tmp_path / "base", adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"has besides .*v_proj.*one of 4.*from_huggingface\(base, adapter=folder\)"):
        started(job_of(tmp_path / "base", lora(target_modules=["q_proj"]), weights=weights))
    with pytest.raises(ValueError, match=r"q_proj.lora_A.default.weight is \[4, 32\] in the folder and \[2, 32\] in the model"):
        started(job_of(tmp_path / "base", lora(r=2), weights=weights))
    with pytest.raises(ValueError, match="is for a PeftModel, and the job's model is LlamaForCausalLM"):
        started(job_of(tmp_path / "base", None, weights=weights))


def test_a_folder_without_an_adapter_and_a_pickled_one_are_refused(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    saved_adapter(tmp_path / "base", tmp_path / "adapter")
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_config\.json"):
        job_of(tmp_path / "base", tmp_path / "base")
    (tmp_path / "adapter" / "adapter_model.safetensors").rename(tmp_path / "adapter" / "adapter_model.bin")
    with pytest.raises(FileNotFoundError, match=r"holds no adapter_model\.safetensors.*adapter_model\.bin.*pickle"):
        started(job_of(tmp_path / "base", tmp_path / "adapter"))


@pytest.mark.parametrize("options", [{"use_dora": True}, {"init_lora_weights": "pissa"}, {"init_lora_weights": "olora"}], ids=str)
def test_adapters_that_begin_with_the_bases_weights_are_refused(tmp_path: Path, options: dict[str, Any]) -> None:
    saved(tmp_path, "llama")
    with pytest.raises(ValueError, match=r"looks at the base's weights.*Job\(model=peft.get_peft_model\("):
        opened(job_of(tmp_path, lora(**options)))


def test_a_model_that_was_adapted_with_its_weights_is_trained_as_it_is(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    made = adapted_by_peft(tmp_path, "llama", lora(use_dora=True))
    job = anyfit.Job(**{**vars(job_of(tmp_path, None)), "model": made, "weights": None})
    with anyfit.start(job, machine=small_machine()) as run:
        run.step(job.sample)


def test_what_cannot_be_an_adapter_is_refused(tmp_path: Path) -> None:
    saved(tmp_path, "llama")
    with pytest.raises(TypeError, match=r"such as peft\.LoraConfig\(r=16\), or a folder, got int"):
        job_of(tmp_path, 16)
    saved_adapter(tmp_path, tmp_path / "adapter")
    with pytest.raises(ValueError, match="adapts weights, and llama has none"):
        anyfit.Job.from_huggingface("llama", batch_size=ROWS, length=8, adapter=tmp_path / "adapter")
    with pytest.raises(ValueError, match=r"adapt a model by peft\.get_peft_model"):
        anyfit.Job.from_huggingface(saved(tmp_path, "llama"), batch_size=ROWS, length=8, adapter=lora())
