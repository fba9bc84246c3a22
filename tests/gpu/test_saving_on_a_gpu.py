"""Saves of a run on a GPU: what is on it, on the host and away is saved as it is, while training waits and beside the steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from anyfit.placing import stretches
from anyfit.running import checkpoint
from anyfit.running.run import Run
from anyfit.values.plan import Placement
from tests.models import Tangled, byte_batches, tiny_gpt
from tests.oracle import assert_bit_equal
from tests.plans import (
    AWAY,
    AWAY_STREAMED,
    ON_HOST,
    RESIDENT,
    STREAMED,
    chunk_count,
    hand_written,
    placed_of,
    random_delays,
    started,
)
from tests.running.test_checkpoint import ROWS, job_for

pytestmark = pytest.mark.gpu
KINDS = (RESIDENT, ON_HOST, AWAY, STREAMED, AWAY_STREAMED)


def adamw(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters())


def state_of(run: Run) -> dict[str, Tensor]:
    """All that a checkpoint holds, read in another way."""
    placed: Any = placed_of(run)
    weights = run.state_dict()
    found = {name: weights[name] for name, _ in [*run.model.named_parameters(), *run.model.named_buffers()]}
    for each in placed.updates.chunks:
        found |= {f"{slot.name}/{key}": values.cpu().clone() for slot, key, values in each.arrays()}
    return found


@pytest.mark.parametrize("fetched_bytes", [2**22, 1000])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("model", [tiny_gpt, Tangled])
@pytest.mark.parametrize("kinds", [KINDS, KINDS[::-1], (RESIDENT,)], ids=["mixed", "mixed the other way", "resident"])
def test_a_save_holds_the_state_when_it_began(
    model: Any, kinds: tuple[Placement, ...], precision: Any, fetched_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stretches, "FETCHED_BYTES", fetched_bytes)
    job = job_for(model, precision=precision, clip_norm=1.0, optimizer=adamw)
    placements = [kinds[index % len(kinds)] for index in range(chunk_count(job, 4096))]
    batches = byte_batches(6, ROWS)
    with started(job, hand_written(job, *placements, slots=16), random_delays(3), device="cuda") as run:
        run.step(batches[0])
        run.make_room_to_save()
        run.step(batches[1])
        expected = state_of(run)
        run.save(tmp_path / "waited for")
        torch.cuda.reset_peak_memory_stats()
        run.save(tmp_path / "waited for")
        assert torch.cuda.max_memory_allocated() == torch.cuda.memory_allocated()  # nothing is put together on the GPU
        run.save(tmp_path / "beside", wait=False)
        assert run.saving is not None
        assert run.saving.is_beside
        for batch in batches[2:]:
            run.step(batch)
        run.finish_saving()
    for name in ("waited for", "beside"):
        opened = checkpoint.open(tmp_path / name)
        opened.verify()
        assert_bit_equal({name: opened.read(name) for name in opened.tensors}, expected)
