"""Several samples in a row: none is lost, and none sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st

from anyfit.finetune.packing import Packed, Unpacked, digest, packed
from anyfit.finetune.tokens import Sample, _sample
from anyfit.values.huggingface_loss import loss
from tests.finetune import tiny


@given(st.lists(st.integers(1, 20), max_size=40))
def test_every_sample_is_in_one_row_and_no_row_is_too_long(lengths: list[int]) -> None:
    rows = packed(lengths, 20)
    assert sorted(index for row in rows for index in row) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in row) <= 20 for row in rows)
    assert rows == packed(lengths, 20)
    # Any two rows are longer together than one may be, or they would be one: at most twice the fewest rows, and one.
    assert len(rows) <= 2 * sum(lengths) / 20 + 1


def drawn(count: int, longest: int) -> list[Sample]:
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [
        _sample(torch.randint(250, (each,), generator=generator).numpy(), [place >= each // 3 for place in range(each)])
        for each in lengths
    ]


FAMILIES = {
    "qwen3": tiny.config(),
    "llama": transformers.LlamaConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2
    ),
    "mistral": transformers.MistralConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        sliding_window=5,
    ),
    "gemma3": transformers.Gemma3TextConfig(
        vocab_size=259, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=8, sliding_window=5,
    ),
    "gpt2": transformers.GPT2Config(
        vocab_size=259, n_embd=32, n_layer=2, n_head=4, n_positions=64, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    ),
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_the_loss_and_gradients_of_packed_rows_are_those_of_the_samples_one_by_one(family: str) -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(FAMILIES[family])
    for parameter in model.parameters():  # so that what a token sees matters
        torch.nn.init.normal_(parameter, std=0.3)
    samples = drawn(9, 20)
    rows = Packed.of(samples, 24, padding=258)
    assert len(rows) < len(samples)
    total, weight = loss(model, rows.collate([rows[index] for index in range(len(rows))]))
    total.backward()
    whole = [parameter.grad.clone() for parameter in model.parameters()]
    model.zero_grad()
    one_by_one = [loss(model, Unpacked(samples, 24, padding=258).collate([sample])) for sample in samples]
    torch.stack([each for each, _ in one_by_one]).sum().backward()
    torch.testing.assert_close(total, sum(each for each, _ in one_by_one), rtol=1e-5, atol=0)
    assert float(weight) == sum(float(each) for _, each in one_by_one) == sum(sample.learnt for sample in samples)
    for mine, parameter in zip(whole, model.parameters(), strict=True):
        torch.testing.assert_close(mine, parameter.grad, rtol=1e-3, atol=1e-4 * float(parameter.grad.abs().max()))


def test_padded_samples_have_the_loss_of_the_samples_one_by_one() -> None:
    model: Any = transformers.AutoModelForCausalLM.from_config(tiny.config())
    samples = drawn(5, 20)
    rows = Unpacked(samples, 24, padding=258)
    batch = rows.collate(samples)
    assert batch["input_ids"].shape == (5, max(map(len, samples)))
    total, weight = loss(model, batch)
    one_by_one = [loss(model, rows.collate([sample])) for sample in samples]
    torch.testing.assert_close(total, sum(each for each, _ in one_by_one), rtol=1e-5, atol=0)
    assert float(weight) == sum(float(each) for _, each in one_by_one)


def test_the_digest_tells_other_tokens_other_answers_and_another_order_apart() -> None:
    first, second = drawn(2, 20)
    other_answers = _sample(first.ids, [False] * (len(first) - 1) + [True])
    found = {digest(each) for each in ([first, second], [second, first], [other_answers, second], [first])}
    assert len(found) == 4
