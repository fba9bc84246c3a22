"""PEFT's LoRA and DoRA under limits of memory: the planner's own plans train them as plain PyTorch, and leave no step out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

import anyfit
from anyfit.values.no_plan import NoPlan
from tests.oracle import assert_bit_equal, train_plainly

peft: Any = pytest.importorskip("peft")
ROWS, STEPS, SMALLER = 8, 10, 0.9
SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 100,
    "pad_token_id": 0, "max_position_embeddings": 32,
}  # fmt: skip


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES, num_key_value_heads=2))


def bert() -> Any:
    return transformers.BertForMaskedLM(transformers.BertConfig(**SIZES))


ADAPTED = {llama: ["q_proj", "v_proj", "down_proj"], bert: ["query", "value", "output.dense"]}


def adapted(base: Callable[[], Any], *, dora: bool) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        options = {"r": 4, "lora_alpha": 8, "lora_dropout": 0.1, "use_dora": dora, "init_lora_weights": False}
        model: nn.Module = peft.get_peft_model(base().train(), peft.LoraConfig(target_modules=ADAPTED[base], **options))
        return model

    return build


def batch(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(3, 100, (ROWS, 24), generator=generator) for _ in range(2))
    return {"ids": ids, "labels": labels}


def loss(model: Any, batch: dict[str, Tensor]) -> Tensor:
    found: Tensor = model(input_ids=batch["ids"], labels=batch["labels"]).loss
    return found


def job_for(base: Callable[[], Any], *, dora: bool, precision: Any) -> anyfit.Job:
    return anyfit.Job(
        model=adapted(base, dora=dora),
        loss=loss,
        optimizer=lambda model: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=1e-2),
        sample=batch(0),
        batch_size=ROWS,
        micro_batch=ROWS,  # so that dropout draws the same numbers
        precision=precision,
    )


def limits(job: anyfit.Job, first: float) -> list[int]:
    """From a share of what an ample plan needs down to the least that plans."""
    machine = anyfit.probe()
    found, limit = [], int(first * anyfit.plan(job, machine).forecast.peak_bytes["device"])
    while True:
        try:
            anyfit.plan(job, machine.with_limits(device_memory=limit))
        except NoPlan:
            return found
        found.append(limit)
        limit = int(SMALLER * limit)


CASES = [(base, dora, precision) for base in (llama, bert) for dora in (False, True) for precision in ("fp32", "bf16")]


@pytest.mark.parametrize(
    ("base", "dora", "precision"),
    [CASES[0], *(pytest.param(*case, marks=[pytest.mark.full, pytest.mark.timeout(1800)]) for case in CASES[1:])],
)
def test_adapters_train_as_in_plain_pytorch_under_any_limit_that_plans(base: Any, dora: bool, precision: Any) -> None:
    job = job_for(base, dora=dora, precision=precision)
    batches = [batch(index) for index in range(STEPS)]
    plain_losses, plain_weights = train_plainly(job, batches)
    found = limits(job, 0.9)
    chosen = [found[0], found[-1]] if (base, dora, precision) == CASES[0] else found
    placed = set()
    for limit in chosen:
        with anyfit.start(job, machine=anyfit.probe().with_limits(device_memory=limit)) as run:
            losses = [float(run.step(each)) for each in batches]
            assert run.skipped == 0
            assert losses == pytest.approx(plain_losses, rel=1e-6)
            assert_bit_equal(run.state_dict(), plain_weights)
            placed |= {each.weights for each in run.plan.chunks} | set(run.plan.activations.values())
            state = run._engine.placed.state
            away = [each for each in state.chunks if each.placement.weights == "host"]
            placed |= {"frozen on the host" for each in away if not each.chunk.trainable}
            assert run.plan.trainable == sum(each.numel() for each in run.model.parameters() if each.requires_grad)
    assert "host" in placed  # the least has weights on the host, of blocks that are recomputed
    assert "frozen on the host" in placed
    assert "recompute" in placed
