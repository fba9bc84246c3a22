"""transformers with recomputed blocks and weights on the host: key-value caches, experts, layers shared or left out."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import anyfit
from tests.oracle import assert_bit_equal, train_plainly
from tests.plans import AWAY, hand_written, started

TOKENS = {"vocab_size": 100, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, **TOKENS}
DECODER = {**SMALL, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 32}
EXPERTS = {**DECODER, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
HALF = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "d_model": 32}
BART = {**HALF, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "encoder_layerdrop": 0.2, "decoder_layerdrop": 0.2, **TOKENS}
FAMILIES: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "bart": ("BartForConditionalGeneration", "bart", {**BART, "attention_dropout": 0.1, "max_position_embeddings": 32}, "layers"),
    "t5": (
        "T5ForConditionalGeneration",
        "t5",
        {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4, "decoder_start_token_id": 0, **TOKENS},
        "block",
    ),
    "falcon": ("FalconForCausalLM", "falcon", {**SMALL, "attention_dropout": 0.1, "hidden_dropout": 0.1}, "h"),
    "mixtral": ("MixtralForCausalLM", "mixtral", {**DECODER, "num_local_experts": 4, "num_experts_per_tok": 2}, "layers"),
    "qwen3 moe": ("Qwen3MoeForCausalLM", "qwen3_moe", {**EXPERTS, "num_experts": 4}, "layers"),
    "albert": (
        "AlbertForMaskedLM",
        "albert",
        {**SMALL, "embedding_size": 16, "hidden_dropout_prob": 0.1, "max_position_embeddings": 32},
        "albert_layers",
    ),
}  # fmt: skip
ROWS = 4


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(3, 100, (ROWS, 10), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


CASES = [(family, choice, experts) for family in FAMILIES for choice in ("recompute", "selective") for experts in (None, "eager")]
CASES = [case for case in CASES if case[2] is None or case[0] in ("mixtral", "qwen3 moe")]
SHARE = [("bart", "recompute", None), ("qwen3 moe", "selective", "eager")]


@pytest.mark.parametrize(
    ("family", "choice", "experts"),
    [pytest.param(*case, marks=[] if case in SHARE else [pytest.mark.full]) for case in CASES],
)
def test_recomputed_blocks_of_transformers_train_as_in_plain_pytorch(family: str, choice: Any, experts: Any) -> None:
    made_by, kind, options, part = FAMILIES[family]
    config = transformers.AutoConfig.for_model(kind, **options)
    if experts is not None:
        config._experts_implementation = experts

    def build() -> Any:
        return getattr(transformers, made_by)(config).train()

    def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
        found: Tensor = model(**batch).loss  # with its use_cache as it is
        return found

    job = anyfit.Job(
        model=build,
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
        sample=batch(0),
        batch_size=ROWS,
        precision="fp32",
    )
    names = [name for name, _ in build().named_modules()]
    blocks = [name for name in names if name.split(".")[-2:-1] == [part]]
    assert blocks
    plan = hand_written(job, AWAY, chunk_bytes=4096, slots=16, activations=dict.fromkeys(blocks, choice))
    batches = [batch(index) for index in range(5)]
    random.seed(1)
    with started(job, plan) as run:
        losses = [float(run.step(each)) for each in batches]
        assert run.skipped == 0
        weights = run.state_dict()
    random.seed(1)
    plain_losses, plain_weights = train_plainly(job, batches)
    assert losses == pytest.approx(plain_losses, rel=1e-6)
    assert_bit_equal(weights, plain_weights)
