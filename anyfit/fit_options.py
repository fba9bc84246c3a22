"""The options of `anyfit fit`, and how its command line is read: a script's own arguments follow its name, and anyfit's options
may follow a folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from .options import Command, finite


class FitCommand(Command):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with self.naming_ours():
            found = self.make_parser(ctx).parse_args(args=list(args))[0]
        named, after = found.get("script"), found.get("arguments") or ()
        if isinstance(named, str) and not Path(named).is_file():
            ctx.allow_interspersed_args = Path(named).is_dir() or "--data" in after
        return super().parse_args(ctx, args)


What = Annotated[
    Path | None,
    Argument(metavar="[SCRIPT|FOLDER]", help="your training script, or a Hugging Face folder; the demo when not given"),
]
Arguments = Annotated[list[str] | None, Argument(help="the script's own arguments")]

# Of fine-tuning a folder.
Data = Annotated[Path | None, Option("--data", help="of a folder: a .jsonl or .parquet of chats, instructions or text")]
Evaluation = Annotated[str | None, Option("--eval", help="of a folder: a share such as 5%, so many examples, or another file")]
EvalEvery = Annotated[
    int | None, Option("--eval-every", min=1, help="of a folder: steps between evaluations and samples; a tenth of a run, or 5")
]
Epochs = Annotated[int | None, Option("--epochs", min=1, help="of a folder: times through the data; 3")]
LearningRate = Annotated[float | None, Option("--lr", help="of a folder: the largest learning rate; 2e-5, or 2e-4 with --lora")]
ScheduleName = Annotated[str | None, Option("--schedule", help="of a folder: cosine, linear or constant, after the warm-up")]
Warmup = Annotated[str | None, Option("--warmup", help="of a folder: a share of the steps, or so many; 3%")]
Packing = Annotated[
    bool | None,
    Option("--packing/--no-packing", help="of a folder: several samples a row, or one, padded", show_default=False),
]
Samples = Annotated[int | None, Option("--samples", min=0, help="of a folder: answers written at every evaluation; 3")]

Lora = Annotated[int | None, Option("--lora", min=1, help="of a folder: train adapters of this rank alone; its weights stay")]

ReportTo = Annotated[str | None, Option("--report-to", help="tensorboard, wandb, or both with a comma between")]
Folder = Annotated[Path | None, Option("--folder", help="the run folder; runs/<time> when not given")]
Resume = Annotated[Path | None, Option("--resume", help="go on exactly where the run in this folder stopped")]
Steps = Annotated[int | None, Option("--steps", min=1, help="steps in all (demo)")]
Seed = Annotated[int | None, Option("--seed", min=0, help="of weights and data order (demo, folder)")]
PlanFile = Annotated[Path | None, Option("--plan", help="a plan file; made anew when not given")]
SaveEvery = Annotated[int | None, Option("--save-every", min=0, help="steps between checkpoints; 0: at the end")]
Keep = Annotated[int | None, Option("--keep", min=1, help="checkpoints that stay, the newest ones; 2")]
KeepEvery = Annotated[int | None, Option("--keep-every", min=0, help="and those whose step is a multiple of this stay as well")]
LogEvery = Annotated[int, Option("--log-every", min=1, help="steps between lines, without a terminal")]
Deterministic = Annotated[bool, Option("--deterministic", help="two runs give the same bits")]
Timeline = Annotated[
    Path | None, Option("--timeline", help="write what each lane did in a few steps to this .json, and draw it beside")
]
FitGpus = Annotated[
    int | None, Option("--gpus", min=1, help="on so many GPUs of this machine, a process each; without GPUs, on its CPU")
]
Ranks = Annotated[int | None, Option("--ranks", min=1, help="in so many processes, whatever GPUs there are: they may share one")]
Restarts = Annotated[
    int | None, Option("--restarts", min=0, help="times that ranks which die are started again, from the last checkpoint")
]
DiskFolder = Annotated[
    Path | None,
    Option("--disk-folder", help="where optimizer state lies that the plan has on the disk; the roomiest usual folder"),
]
AnyFileSystem = Annotated[bool, Option("--any-file-system", help="also one in memory, or behind a network")]
HangSeconds = Annotated[
    float | None,
    Option("--hang-seconds", min=1, callback=finite, help="a rank that waits longer for the others gives up; 600"),
]
