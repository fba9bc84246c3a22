"""Two ranks start from a folder that transformers saved, and what they trained goes back to it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
import transformers
from safetensors.torch import save_file

from anyfit.running.export import export
from anyfit.values.plan import Placement
from tests.oracle import PlainBf16, PlainFp32, assert_bit_equal

from .folders import job_of, refusal_of_others, start_and_measure, started_in_part, tokens, trained
from .pool import pool_of

AWAY = Placement(
    weights="host",
    gradients="host",
    optimizer="host",
    update="host",
    weight_shards=2,
    gradient_shards=2,
    optimizer_shards=2,
)
TINY = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
TINY |= {"vocab_size": 100, "max_position_embeddings": 64}


def saved_llama(folder: Path, dtype: torch.dtype = torch.float32, **options: Any) -> Path:
    torch.manual_seed(5)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | options)).to(dtype)
    model.save_pretrained(folder, max_shard_size="20KB")
    return folder


def large_llama(folder: Path, layers: int) -> Path:
    """One whose weights are all alike: drawing them would take long."""
    wide = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": layers, "vocab_size": 16_000}
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY | wide))
    model.config.save_pretrained(folder)
    tensors = {name: torch.full(each.shape, 0.01, dtype=torch.bfloat16) for name, each in model.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("layers", [3, pytest.param(24, marks=pytest.mark.full)])
def test_starting_from_a_folder_takes_little_more_than_a_ranks_share(tmp_path: Path, layers: int) -> None:
    small, large = saved_llama(tmp_path / "small"), large_llama(tmp_path / "large", layers)
    for found in pool_of(2).run(start_and_measure, small, large, AWAY, 2**24):
        assert found["everything"] > 2 * 10**8
        assert found["share"] < 0.51 * found["everything"]
        # Low halves, which are half of the share, are zero where a file has bf16, and nothing is written there.
        assert 0.5 * found["share"] < found["peak"] < 1.3 * found["share"], found


@pytest.mark.parametrize(
    ("precision", "dtype", "tied"),
    [
        ("fp32", torch.float32, False),
        ("bf16", torch.float32, True),
        ("bf16", torch.bfloat16, False),
        ("fp32", torch.bfloat16, True),
    ],
)
def test_what_two_ranks_train_from_a_folder_gives_the_same_logits_in_transformers(
    tmp_path: Path, precision: Literal["bf16", "fp32"], dtype: torch.dtype, tied: bool
) -> None:
    steps = 3
    folder = saved_llama(tmp_path / "first", dtype, tie_word_embeddings=tied)
    mine, other = pool_of(2).run(trained, folder, AWAY, precision, steps, tmp_path / "saved")
    assert_bit_equal(mine["last"], other["last"])

    plain: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    assert_bit_equal(mine["first"], plain.state_dict())
    oracle = (PlainFp32 if precision == "fp32" else PlainBf16)(job_of(folder, precision), plain)
    losses = [oracle.step(tokens(step, TINY["vocab_size"]), 2) for step in range(steps)]
    torch.testing.assert_close(mine["losses"], losses, rtol=1e-5, atol=0)
    assert_bit_equal(mine["last"], oracle.weights())

    export(tmp_path / "saved", tmp_path / "out", shard_bytes=20_000)
    again, said = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(said.values())
    assert again.dtype == {"fp32": torch.float32, "bf16": torch.bfloat16}[precision]
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == tied
    with torch.no_grad():
        logits = again.eval()(input_ids=tokens(0, TINY["vocab_size"])["input_ids"]).logits
    assert torch.equal(logits, mine["logits"])


@pytest.mark.full
def test_an_adapter_that_two_ranks_train_on_a_base_from_a_folder_is_the_one_that_peft_loads(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    folder, lora = saved_llama(tmp_path / "first"), peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"])
    mine, other = pool_of(2).run(trained, folder, AWAY, "fp32", 3, tmp_path / "saved", lora)
    assert_bit_equal(mine["last"], other["last"])

    torch.manual_seed(0)
    plain = peft.get_peft_model(transformers.AutoModelForCausalLM.from_pretrained(folder), lora).train()
    assert_bit_equal(mine["first"], plain.state_dict())
    oracle = PlainFp32(job_of(folder, "fp32", adapter=lora), plain)
    losses = [oracle.step(tokens(step, TINY["vocab_size"]), 2) for step in range(3)]
    torch.testing.assert_close(mine["losses"], losses, rtol=1e-5, atol=0)
    assert_bit_equal(mine["last"], oracle.weights())

    export(tmp_path / "saved", tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(transformers.AutoModelForCausalLM.from_pretrained(folder), tmp_path / "adapter")
    assert_bit_equal(again.state_dict(), mine["last"])


@pytest.mark.parametrize("placement", [AWAY, Placement(optimizer_shards=2)])
def test_what_a_pattern_leaves_out_is_rank_0s_on_all_ranks(tmp_path: Path, placement: Placement) -> None:
    folder = saved_llama(tmp_path / "folder")
    mine, other = pool_of(2).run(started_in_part, folder, placement)
    assert_bit_equal(mine, other)
    torch.manual_seed(5)
    first = transformers.LlamaForCausalLM(transformers.LlamaConfig(**TINY)).state_dict()
    for name, each in mine.items():
        assert torch.equal(each, first[name]) == ("layers" in name or name == "model.norm.weight"), name
        assert torch.isfinite(each).all()


def test_ranks_with_other_folders_are_told_apart(tmp_path: Path) -> None:
    folders = [saved_llama(tmp_path / "a"), saved_llama(tmp_path / "b", torch.bfloat16)]
    for said in pool_of(2).run(refusal_of_others, folders):
        assert "weights" in said
