"""Small jobs for a Trainer, trained by transformers' own and by anyfit's, and what both have logged."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, TrainerCallback, TrainingArguments

VOCABULARY, LONGEST = 64, 18
TIMES = ("runtime", "per_second", "_time")
ARGUMENTS: Mapping[str, Any] = {
    "per_device_train_batch_size": 4, "gradient_accumulation_steps": 2, "num_train_epochs": 2, "learning_rate": 1e-2,
    "warmup_steps": 2, "max_grad_norm": 0.7, "logging_steps": 1, "eval_strategy": "steps", "eval_steps": 2, "save_steps": 2,
    "load_best_model_at_end": True, "report_to": [], "disable_tqdm": True, "use_cpu": True, "dataloader_pin_memory": False,
}  # fmt: skip


def model_of(dropout: float = 0.0) -> GPT2LMHeadModel:
    torch.manual_seed(0)
    drops = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), dropout)
    sizes = {"n_layer": 2, "n_embd": 32, "n_head": 2, "vocab_size": VOCABULARY, "n_positions": 32}
    return GPT2LMHeadModel(GPT2Config(**sizes, **drops, bos_token_id=0, eos_token_id=0))


def texts(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Of different lengths: batches are padded."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(6, LONGEST + 1, (count,), generator=generator).tolist()
    return [{"input_ids": torch.randint(0, VOCABULARY, (length,), generator=generator)} for length in lengths]


def padded(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    ids = torch.nn.utils.rnn.pad_sequence([row["input_ids"] for row in rows], batch_first=True, padding_value=-100)
    return {"input_ids": ids.clamp(min=0), "labels": ids, "attention_mask": (ids != -100).long()}


def trained(
    kind: type,
    folder: Path,
    resume: str | None = None,
    dropout: float = 0.0,
    options: Mapping[str, Any] | None = None,
    **args: Any,
) -> Any:
    """A trainer that has trained on 26 texts: the last window has one batch, of two."""
    options = {"model": model_of(dropout), "data_collator": padded, **(options or {})}
    arguments = TrainingArguments(output_dir=str(folder), **{**ARGUMENTS, **args})
    data = {"train_dataset": texts(26), "eval_dataset": texts(10, seed=1)}
    trainer = kind(args=arguments, **{**data, **options})
    with redirect_stdout(io.StringIO()):
        trainer.train(resume_from_checkpoint=None if resume is None else str(folder / resume))
    return trainer


def logged(trainer: Any) -> list[dict[str, float]]:
    """Every number that was logged, but for those that are of time."""
    return numbers(trainer.state.log_history)


def numbers(history: Sequence[Mapping[str, float]]) -> list[dict[str, float]]:
    return [{name: value for name, value in entry.items() if not name.endswith(TIMES)} for entry in history]


def assert_close(found: Sequence[Mapping[str, float]], wanted: Sequence[Mapping[str, float]]) -> None:
    """To more digits than are printed, which are four."""
    assert len(found) == len(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one == pytest.approx(other, rel=1e-6, abs=1e-9)


class Events(TrainerCallback):
    """Writes down what a callback is told, and when."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, float]] = []

    def __getattribute__(self, name: str) -> Any:
        if not name.startswith("on_"):
            return super().__getattribute__(name)

        def noted(_args: Any, state: Any, _control: Any, **given: Any) -> None:
            optimizer = given.get("optimizer")
            rate = -1.0 if optimizer is None or name == "on_train_end" else float(optimizer.param_groups[0]["lr"])
            self.seen.append((name, state.global_step, rate))

        return noted
