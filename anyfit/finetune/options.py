"""What a fine-tuning was told, and what was decided where nothing was said; kept in the run folder, so that a resumed run is the
same run."""

from __future__ import annotations

import math
import shlex
from dataclasses import dataclass
from pathlib import Path

from anyfit.values.precision import PRECISIONS
from anyfit.values.record import nearest

from .schedule import part_of, refuse_unknown

EPOCHS = 3
LEARNING_RATE, LORA_LEARNING_RATE = 2e-5, 2e-4
SCHEDULE = "cosine"
WARMUP = "3%"
OPTIMIZER = "adamw"
SAMPLES = 3  # that the model writes at every look
CLIP_NORM = 1.0


def usual_learning_rate(lora: int | None) -> float:
    """Where none was given: adapters begin at nothing, and learn faster."""
    return LEARNING_RATE if lora is None else LORA_LEARNING_RATE


@dataclass(frozen=True)
class Options:
    model: str  # the folder it starts from
    data: str  # a file
    evaluation: str | None  # a share of the examples, a number of them, or another file
    epochs: int
    batch_size: int | None  # rows a step
    length: int | None  # tokens a row
    packing: bool | None
    precision: str
    seed: int
    learning_rate: float
    schedule: str
    warmup: str  # a share of the steps, or a number of them
    optimizer: str
    eval_every: int | None  # steps between looks
    samples: int
    report_to: tuple[str, ...]
    save_every: int | None
    keep: int
    keep_every: int
    deterministic: bool
    device_memory: str | None
    host_memory: str | None
    lora: int | None = None  # the rank of adapters, where these alone are trained
    steps: int | None = None  # in all
    digest: str | None = None  # of the samples
    disk: str | None = None  # that optimizer state may take of it

    def __post_init__(self) -> None:
        refuse_unknown(self.schedule)
        part_of(100, self.warmup, "--warmup")
        if self.precision not in PRECISIONS:
            raise ValueError(f"--dtype {self.precision} is not known{nearest(self.precision, PRECISIONS)}")
        if not (math.isfinite(self.learning_rate) and self.learning_rate > 0):
            raise ValueError(f"--lr {self.learning_rate}: give a learning rate above 0, such as {LEARNING_RATE}")
        if self.evaluation is not None and self.evaluation_file is None:
            part_of(100, self.evaluation, "--eval")
            if float(self.evaluation.rstrip("% ")) == 0:
                raise ValueError(f"--eval {self.evaluation} evaluates nothing: leave it out, or give a share such as 5%")
        is_asked = self.steps is None  # else all was decided
        if is_asked and self.eval_every is not None and self.evaluation is None and not self.samples:
            raise ValueError("--eval-every: there is nothing to look at; give --eval 5%, or --samples 3")

    @property
    def typed(self) -> str:
        """On a command line, but for the folder."""
        told = {
            "--data": self.data, "--epochs": self.epochs, "--eval": self.evaluation, "--batch": self.batch_size,
            "--seq": self.length, "--lr": f"{self.learning_rate:g}", "--lora": self.lora,
            "--report-to": ",".join(self.report_to) or None,
        }  # fmt: skip
        return " ".join(f"{name} {shlex.quote(str(value))}" for name, value in told.items() if value is not None)

    @property
    def evaluation_file(self) -> Path | None:
        text = self.evaluation
        return Path(text) if text is not None and Path(text).suffix in (".jsonl", ".json", ".parquet") else None
