"""Losses of Hugging Face heads as (sum, weight): a padded batch cut anywhere has the loss and gradients of the whole.

The oracle is the model's own mean over the whole batch, and what backward makes of it.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import anyfit
from anyfit.values import huggingface_loss
from anyfit.values.batches import cut
from tests.heads import HEADS, ROWS, WHOLE, batch_of, model_of


def gradients_of(model: Any) -> Tensor:
    return torch.cat([each.grad.flatten() for each in model.parameters() if each.grad is not None])


@pytest.mark.parametrize("name", HEADS)
def test_a_padded_batch_cut_anywhere_has_the_loss_and_gradients_of_the_whole(name: str) -> None:
    model, batch = model_of(HEADS[name]), batch_of(HEADS[name])
    whole = model(**batch).loss
    whole.backward()
    expected = gradients_of(model)
    for size in (1, 2, 4, ROWS):
        sizes = [size] * (ROWS // size) + [ROWS % size] * (ROWS % size > 0)
        model.zero_grad()
        totals, weights = 0.0, 0.0
        for part in cut(batch, sizes):
            total, weight = huggingface_loss.loss(model, part)  # type: ignore[misc]
            total.backward()
            totals, weights = totals + float(total.detach()), weights + float(weight)
        assert totals / weights == pytest.approx(float(whole.detach()), rel=1e-6)
        assert (gradients_of(model) / weights - expected).norm() <= 1e-6 * expected.norm()


@pytest.mark.parametrize("name", WHOLE)
def test_losses_that_are_no_mean_over_the_same_labels_stay_the_models_own(name: str) -> None:
    model, batch = model_of(WHOLE[name]), batch_of(WHOLE[name])
    found = huggingface_loss.loss(model, batch)
    assert isinstance(found, Tensor)
    assert float(found.detach()) == pytest.approx(float(model(**batch).loss.detach()), rel=1e-6)


def test_no_mode_slows_the_layers_of_a_model_that_calls_its_decoder_directly() -> None:
    from torch.overrides import _get_current_function_mode_stack
    from transformers import AutoConfig

    options = {"hidden_size": 16, "num_attention_heads": 2, "ffn_dim": 32, "vocab_size": 50, "word_embed_proj_dim": 16}
    config = AutoConfig.for_model("opt", num_hidden_layers=1, max_position_embeddings=16, **options)
    job = anyfit.Job.from_huggingface(config, batch_size=2, length=8, precision="fp32")
    model, seen = job.build(), []
    layer = model.get_submodule("model.decoder.layers.0")
    layer.register_forward_pre_hook(lambda *_: seen.append(len(_get_current_function_mode_stack())))
    job.evaluate(model, job.sample)
    assert seen == [0]
