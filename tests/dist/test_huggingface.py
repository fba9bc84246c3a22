"""Padded Hugging Face batches over two ranks, which have very different numbers of labels: as one process with all of them."""

from __future__ import annotations

import pytest
import torch

from anyfit.placing import place
from anyfit.placing.ranks import Ranks
from anyfit.running.run import Run
from tests.heads import HEADS, ROWS, batch_of
from tests.plans import hand_written
from tests.running.test_huggingface_training import STEPS, assert_alike, counted_tokens, job_for, plainly

from .pool import HANG_SECONDS, pool_of
from .work import Trained, told


def train(name: str, accumulation: int) -> tuple[list[float], list[float], list[float], Trained]:
    head = HEADS[name]
    job = job_for(head)
    ranks = Ranks.of_process_group(HANG_SECONDS)
    plan = hand_written(job, chunk_bytes=2**14, ranks=2, accumulation=accumulation)
    losses, norms, tokens, share = [], [], [], ROWS // 2
    with Run(job, plan, place(job, plan, job.build(), torch.device("cpu"), ranks=ranks)) as run:
        for step in range(STEPS):
            mine = {key: each[ranks.index * share :][:share] for key, each in batch_of(head, step).items()}
            losses.append(float(run.step(mine)))
            norms.append(run.metrics.gradient_norm)
            tokens.append(counted_tokens(run))
        return losses, norms, tokens, told(run, [], [], 0)


@pytest.mark.parametrize(("name", "accumulation"), [("causal, sliced", 3), ("masked", 1), ("text", 3), ("images", 1)])
def test_padded_batches_of_two_ranks_train_as_one_process_with_all_of_them(name: str, accumulation: int) -> None:
    losses, norms, weights = plainly(HEADS[name])
    masks = [batch_of(HEADS[name], step).get("attention_mask") for step in range(STEPS)]
    for found_losses, found_norms, tokens, each in pool_of(2).run(train, name, accumulation):
        assert found_losses == pytest.approx(losses, rel=1e-6)
        assert found_norms == pytest.approx(norms, rel=1e-6)
        assert tokens == [pytest.approx(found if mask is None else mask.sum()) for found, mask in zip(tokens, masks, strict=True)]
        assert_alike(each.weights, weights)
