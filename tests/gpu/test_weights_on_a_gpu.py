"""Weights from a folder come to a GPU, and to the host beside it, as they are in the files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from anyfit.placing import place
from anyfit.placing.weights import opened
from anyfit.running.run import Run
from anyfit.values.plan import Placement
from tests.models import byte_batches
from tests.oracle import assert_bit_equal
from tests.placing.test_weights import ROWS, gpt_folder, gpt_job
from tests.plans import AWAY, AWAY_STREAMED, ON_HOST, RESIDENT, STREAMED, hand_written

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("placement", [RESIDENT, STREAMED, ON_HOST, AWAY, AWAY_STREAMED])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_weights_come_to_a_gpu_as_they_are_in_the_folder(tmp_path: Path, placement: Placement, precision: Any) -> None:
    weights = gpt_folder(tmp_path)
    job = gpt_job(tmp_path, precision=precision)
    plan, found = hand_written(job, placement, chunk_bytes=8192, slots=8), opened(job)
    with Run(job, plan, place(job, plan, found.model, torch.device("cuda"), elements=found.elements)) as run:
        assert_bit_equal(run.state_dict(), weights)
        run.step(byte_batches(1, ROWS)[0])
