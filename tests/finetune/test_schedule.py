"""Learning rates by step, beside transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from anyfit.finetune.schedule import SCHEDULES, Schedule, part_of


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_schedule_is_that_of_transformers(name: str, warmup: int) -> None:
    rates: list[list[float]] = []
    for make in (
        Schedule(name, 20, warmup),
        lambda optimizer: transformers.get_scheduler(
            name if name != "constant" else "constant_with_warmup", optimizer, num_warmup_steps=warmup, num_training_steps=20
        ),
    ):
        optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.5)
        scheduler = make(optimizer)
        rates.append([])
        for _ in range(20):
            rates[-1].append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            scheduler.step()
    assert rates[0] == pytest.approx(rates[1], abs=1e-12)


@pytest.mark.parametrize("text", ["5", "110%", "-3", "five", "%", "5.5"])
def test_a_part_is_a_number_or_a_share(text: str) -> None:
    if text == "5":
        assert part_of(100, text, "--eval") == 5
        assert part_of(100, "2.5 %", "--eval") == 2
        return
    too_much = "there is no more than all of it; " if text == "110%" else ""
    with pytest.raises(ValueError, match=f"--eval {text}: {too_much}give a share such as 5%, or a number"):
        part_of(100, text, "--eval")


def test_an_unknown_schedule_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"--schedule cosin is not known; did you mean 'cosine'\?"):
        Schedule("cosin", 10, 0)
