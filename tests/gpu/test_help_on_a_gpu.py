"""Chunks of the host that the GPU updates instead have the bits they would have had."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch

import anyfit
from tests.models import byte_batches, next_byte_loss, tiny_gpt
from tests.oracle import assert_bit_equal
from tests.placing.test_help import CHUNK_BYTES, ROWS, slow_host
from tests.plans import AWAY, ON_HOST, STREAMED, chunk_count, hand_written, started

pytestmark = pytest.mark.gpu
STEPS = 20


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("speculates", [False, True])
@pytest.mark.parametrize("placement", [ON_HOST, AWAY])
@pytest.mark.parametrize(("clip_norm", "accumulation"), [(0.3, 1), (1e6, 1), (0.3, 2)])
def test_a_helped_host_leaves_the_same_bits(
    precision: Any, speculates: bool, placement: Any, clip_norm: float, accumulation: int
) -> None:
    job = anyfit.Job(
        model=tiny_gpt,
        loss=next_byte_loss,
        sample=byte_batches(1, ROWS)[0],
        batch_size=ROWS,
        micro_batch=ROWS // accumulation,
        precision=precision,
        clip_norm=clip_norm,
        optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-3),
    )
    count = chunk_count(job, CHUNK_BYTES)
    placement = replace(placement, speculates=speculates)
    found = []
    for last in (placement, STREAMED):
        plan = hand_written(job, *[placement] * (count - 1), last, chunk_bytes=CHUNK_BYTES, slots=8, accumulation=accumulation)
        with started(job, plan, slow_host(accumulation), "cuda") as run:
            timeline = run.record()
            for batch in byte_batches(STEPS, ROWS):
                run.step(batch)
            found.append({name: tensor.cpu() for name, tensor in run.state_dict().items()})
            events = timeline.document("a test")["traceEvents"]
        lifted = {int(chunk[1]) for event in events if (chunk := re.match(r"lift state of chunk (\d+)", event["name"]))}
        assert bool(lifted - {count - 1}) == (last is STREAMED)
    assert_bit_equal(*found)
