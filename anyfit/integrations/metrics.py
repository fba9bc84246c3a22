"""What TRL's SFTTrainer logs of its batches, where the plan has cut these: put together again from that of the pieces."""

from __future__ import annotations

from typing import Any

import torch

from .windows import Window, counted_in, pieces_of

BY_BATCH = ("entropy", "mean_token_accuracy")  # means over the labels of a batch, of all ranks; one an entry in a list


def is_sft(kind: type) -> bool:
    return kind.__name__ == "SFTTrainer" and kind.__module__.startswith("trl.")


def put_together(trainer: Any, window: Window, rows: int) -> None:
    """After a step of this window in pieces of so many rows."""
    groups = [pieces_of(batch, rows) for batch in window]
    if all(len(pieces) == 1 for pieces in groups):
        return
    counts = torch.tensor([counted_in(piece.inputs).next_labels for pieces in groups for piece in pieces])
    counts = trainer.accelerator.reduce(counts.to(trainer.args.device, torch.float64), reduction="sum").cpu()
    sizes = [len(pieces) for pieces in groups]
    for name in BY_BATCH:
        logged = trainer._metrics["train"][name]
        values = torch.tensor(logged[-len(counts) :], dtype=torch.float64)
        parts = zip(values.split(sizes), counts.split(sizes), strict=True)
        logged[-len(counts) :] = [float((value * count).sum() / count.sum().clamp(min=1)) for value, count in parts]
