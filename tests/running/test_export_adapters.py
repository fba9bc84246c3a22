"""What an export writes of a model that PEFT adapted is what PEFT would write: the adapter, or the plain model with it merged."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

import anyfit
from anyfit import cli
from anyfit.running.export import export, export_merged
from tests.families import FAMILIES, saved
from tests.machines import small_machine
from tests.oracle import assert_bit_equal
from tests.plans import AWAY, hand_written

peft: Any = pytest.importorskip("peft")
ROWS = 4


def lora(**options: Any) -> Any:
    return peft.LoraConfig(**{"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": False} | options)


def trained(base: Path, checkpoint: Path, adapter: Any, **options: Any) -> Any:
    """What PEFT has after the same training: a model of its own, with the weights of the run."""
    usual = {"precision": "fp32", "optimizer": lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2)}
    source: Any = base
    if getattr(adapter, "use_dora", False):  # begins with the weights of its base
        source, adapter = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(base), adapter), None
    job = anyfit.Job.from_huggingface(source, batch_size=ROWS, length=8, adapter=adapter, **usual | options)
    with anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine()) as run:
        run.step(job.sample)
        run.save(checkpoint)
        weights = run.state_dict()
        name = type(run.model.get_base_model()).__name__  # type: ignore[operator]
        plain = peft.get_peft_model(getattr(transformers, name).from_pretrained(base), run.model.peft_config["default"])
    plain.load_state_dict(weights)
    return plain


def adapter_in(folder: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    config = json.loads((folder / "adapter_config.json").read_text())
    in_any_order = {name: sorted(config[name] or ()) for name in ("target_modules", "target_parameters")}  # PEFT has sets
    return load_file(folder / "adapter_model.safetensors"), config | in_any_order


KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("llama", {}),
    "dora": ("llama", {"use_dora": True, "target_modules": ["down_proj"], "task_type": "CAUSAL_LM"}),
    "copies and biases": ("llama", {"modules_to_save": ["lm_head"], "bias": "all", "use_rslora": True}),
    "embeddings": ("llama", {"target_modules": ["embed_tokens", "o_proj"]}),
    "tied": ("llama, tied", {"target_modules": "all-linear", "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"o_proj": 32}}),
    "transposed": ("gpt2", {"target_modules": ["c_attn", "c_proj"], "fan_in_fan_out": True}),
    "experts": ("qwen3 moe", {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}),
}


@pytest.mark.filterwarnings("ignore:Setting `save_embedding_layers`")
@pytest.mark.parametrize("kind", KINDS)
def test_the_adapter_is_the_one_that_peft_saves_and_the_merged_model_the_one_that_it_merges(tmp_path: Path, kind: str) -> None:
    family, options = KINDS[kind]
    saved(tmp_path / "base", family)
    (tmp_path / "base" / "tokenizer.json").write_text("words")
    plain = trained(tmp_path / "base", tmp_path / "saved", lora(**options))
    done = export(tmp_path / "saved", tmp_path / "adapter")
    plain.save_pretrained(tmp_path / "by_peft")
    (mine, my_config), (theirs, their_config) = (adapter_in(tmp_path / each) for each in ("adapter", "by_peft"))
    assert_bit_equal(mine, theirs)
    assert my_config == their_config
    assert (done.tensors, done.files) == (len(mine), 1)
    assert ("tokenizer.json" in done.beside) == (kind != "dora")  # a model knows of no folder

    made_by: Any = getattr(transformers, FAMILIES[family][0])
    loaded = peft.PeftModel.from_pretrained(made_by.from_pretrained(tmp_path / "base"), tmp_path / "adapter")
    assert_bit_equal(loaded.state_dict(), plain.state_dict())

    export_merged(tmp_path / "saved", tmp_path / "merged", shard_bytes=20_000)
    merged, said = made_by.from_pretrained(tmp_path / "merged", output_loading_info=True)
    assert not any(said.values())
    assert_bit_equal(merged.state_dict(), plain.merge_and_unload().state_dict())


def test_a_run_goes_on_with_the_adapter_that_another_exported(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    plain = trained(tmp_path / "base", tmp_path / "saved", lora(use_dora=False, lora_alpha=2))
    export(tmp_path / "saved", tmp_path / "adapter")
    job = anyfit.Job.from_huggingface(
        tmp_path / "base", batch_size=ROWS, length=8, precision="fp32", adapter=tmp_path / "adapter"
    )
    with anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine()) as run:
        assert_bit_equal(run.state_dict(), plain.state_dict())


def test_several_adapters_lie_in_folders_of_their_names_and_the_active_one_is_merged(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")

    def adapted() -> Any:
        torch.manual_seed(1)
        model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base"), lora())
        model.add_adapter("other", lora(r=2, target_modules=["o_proj", "q_proj"]))
        model.set_adapter("other")
        return model

    job = anyfit.Job.from_huggingface(adapted(), batch_size=ROWS, length=8, precision="fp32")
    with anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine()) as run:
        run.save(tmp_path / "saved")
    assert export(tmp_path / "saved", tmp_path / "adapters").files == 2
    adapted().save_pretrained(tmp_path / "by_peft")
    for inside in (".", "other"):
        mine, theirs = (adapter_in(tmp_path / each / inside) for each in ("adapters", "by_peft"))
        assert_bit_equal(mine[0], theirs[0])
        assert mine[1] == theirs[1]
    export_merged(tmp_path / "saved", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_bit_equal(merged.state_dict(), adapted().merge_and_unload().state_dict())


def test_a_run_in_bf16_exports_its_weights_or_their_masters(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama", torch.bfloat16)
    plain = trained(tmp_path / "base", tmp_path / "saved", lora(), precision="bf16")
    export(tmp_path / "saved", tmp_path / "own")
    assert {each.dtype for each in adapter_in(tmp_path / "own")[0].values()} == {torch.bfloat16}
    export(tmp_path / "saved", tmp_path / "masters", dtype="fp32")
    plain.float().save_pretrained(tmp_path / "by_peft")
    assert_bit_equal(adapter_in(tmp_path / "masters")[0], adapter_in(tmp_path / "by_peft")[0])
    export_merged(tmp_path / "saved", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.dtype == torch.bfloat16
    expected = plain.merge_and_unload().state_dict()  # merged in fp32, and rounded once
    for name, each in merged.state_dict().items():
        torch.testing.assert_close(each.float(), expected[name].float(), rtol=2**-8, atol=0)


def test_the_command_line_merges_when_it_is_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "base", "llama")
    trained(tmp_path / "base", tmp_path / "saved", lora())
    for words in (["adapter"], ["merged", "--merge"]):
        monkeypatch.setattr("sys.argv", ["anyfit", "export", str(tmp_path / "saved"), str(tmp_path / words[0]), *words[1:]])
        with pytest.raises(SystemExit) as ended:
            cli.main()
        assert not ended.value.code
    said = capsys.readouterr().out
    assert "8 tensors of" in said
    assert "21 tensors of" in said
    assert (tmp_path / "adapter" / "adapter_config.json").is_file()
    assert (tmp_path / "merged" / "config.json").is_file()


@pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`")
def test_what_cannot_be_merged_is_refused_by_name(tmp_path: Path) -> None:
    saved(tmp_path / "tied", "llama, tied")
    trained(tmp_path / "tied", tmp_path / "saved", lora(target_modules=["embed_tokens"]))
    with pytest.raises(ValueError, match=r"embed_tokens\.base_layer\.weight is adapted and tied to .*lm_head\.weight"):
        export_merged(tmp_path / "saved", tmp_path / "out")
    tokens = lora(trainable_token_indices=[3, 4])
    model = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tied"), tokens)
    job = anyfit.Job.from_huggingface(model, batch_size=ROWS, length=8, precision="fp32")
    with anyfit.start(job, hand_written(job, AWAY, chunk_bytes=2**14), small_machine()) as run:
        run.save(tmp_path / "tokens")
        with run.weights() as whole:
            copy.deepcopy(whole).merge_and_unload().save_pretrained(tmp_path / "by_peft")  # as the refusal says
    assert "model.safetensors" in {each.name for each in (tmp_path / "by_peft").iterdir()}
    with pytest.raises(ValueError, match=r"token_adapter.*merge_and_unload\(\)"):
        export_merged(tmp_path / "tokens", tmp_path / "out")
    plain = anyfit.Job.from_huggingface(tmp_path / "tied", batch_size=ROWS, length=8)
    with anyfit.start(plain, hand_written(plain, AWAY, chunk_bytes=2**14), small_machine()) as run:
        run.save(tmp_path / "whole")
    with pytest.raises(ValueError, match="nothing to merge; export it as it is"):
        export_merged(tmp_path / "whole", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_other_kinds_of_adapters_are_exported_or_refused_and_always_saved(tmp_path: Path) -> None:
    saved(tmp_path / "base", "llama")
    scaled = peft.IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"])
    plain = trained(tmp_path / "base", tmp_path / "scaled", scaled)
    export(tmp_path / "scaled", tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base")
    assert_bit_equal(peft.PeftModel.from_pretrained(base, tmp_path / "adapter").state_dict(), plain.state_dict())
    export_merged(tmp_path / "scaled", tmp_path / "merged")
    merged = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert_bit_equal(merged.state_dict(), plain.merge_and_unload().state_dict())

    trained(tmp_path / "base", tmp_path / "prompts", peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"))
    with pytest.raises(ValueError, match=r"PROMPT_TUNING saves other tensors.*model\.save_pretrained\(folder\)"):
        export(tmp_path / "prompts", tmp_path / "out")
    with pytest.raises(ValueError, match=r"merge_and_unload\(\)"):
        export_merged(tmp_path / "prompts", tmp_path / "out")


@pytest.mark.parametrize("name", ["../up", "a.b", "a/b"])
def test_an_adapter_is_written_inside_of_its_folder_alone(tmp_path: Path, name: str) -> None:
    saved(tmp_path / "base", "llama")
    trained(tmp_path / "base", tmp_path / "saved", lora())
    from anyfit.running.export import _checked, _opened

    tensors, facts = _opened(tmp_path / "saved")
    facts = facts | {"adapters": {name: facts["adapters"]["default"]}, "active": [name]}
    with pytest.raises(ValueError, match="does not describe its model"):
        _checked(facts, tensors, tmp_path)
