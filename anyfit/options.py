"""Options that several verbs of the command line share."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Annotated, Any

import typer
from typer import Argument, Option
from typer.core import TyperCommand

from .values.best_batch import parse_batch
from .values.precision import PRECISIONS
from .values.units import parse_bytes

LEAST_BARE = 2**16  # bytes: who asks for fewer has forgotten the unit


def size(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """A size of bytes above nothing, before anything is measured or traced."""
    try:
        if text is not None and parse_bytes(text) == 0:
            raise ValueError("give more than nothing, such as 24GiB")
        if text is not None and text.isdecimal() and int(text) < LEAST_BARE:
            raise ValueError(f"that is {text} bytes; did you mean {text}GiB?")
    except ValueError as error:
        raise ValueError(f"{parameter.opts[0]} {text}: {error}") from None
    return text


def precision(parameter: typer.CallbackParam, name: str | None) -> str | None:
    """One that is known, before anything is built."""
    if name is not None and name not in PRECISIONS:
        raise ValueError(f"{parameter.opts[0]} {name}: {' or '.join(PRECISIONS)} today")
    return name


def samples(_parameter: typer.CallbackParam, text: str | None) -> str | None:
    """A number of samples, or that the best is to be found, before anything is built."""
    try:
        if text is not None:
            parse_batch(text)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    return text


def finite(parameter: typer.CallbackParam, seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise ValueError(f"{parameter.opts[0]} {seconds}: give a number of seconds, such as 600")
    return seconds


# What other tools call an option that we have, or have no need of.
ELSEWHERE = {
    "--lr": ("learning-rate", "max-lr"),
    "--epochs": ("num-train-epochs", "num-epochs", "n-epochs", "max-epochs"),
    "--batch": ("batch-size", "train-batch-size", "global-batch-size", "per-device-train-batch-size", "micro-batch-size"),
    "--seq": (
        "max-seq-length", "max-seq-len", "seq-length", "seq-len", "sequence-len", "sequence-length", "max-length",
        "model-max-length", "context-length", "block-size", "cutoff-len",
    ),
    "--data": ("dataset", "dataset-name", "dataset-path", "data-path", "train-file", "train-data", "train-dataset"),
    "--eval": ("eval-file", "eval-dataset", "validation-file", "validation-split-percentage", "val-size", "val-set-size"),
    "--eval-every": ("eval-steps", "eval-interval"),
    "--save-every": ("save-steps", "save-interval"),
    "--keep": ("save-total-limit",),
    "--log-every": ("logging-steps", "log-interval"),
    "--schedule": ("lr-scheduler", "lr-scheduler-type", "scheduler"),
    "--warmup": ("warmup-ratio", "warmup-steps"),
    "--optimizer": ("optim",),
    "--dtype": ("bf16", "fp16", "fp32", "precision", "mixed-precision", "torch-dtype"),
    "--lora": ("lora-r", "lora-rank", "use-lora", "use-peft"),
    "--folder": ("output", "output-dir", "out-dir", "save-dir", "run-name"),
    "--resume": ("resume-from-checkpoint",),
    "--steps": ("max-steps", "num-steps", "max-iters"),
    "--gpus": ("devices", "num-gpus", "num-processes", "nproc-per-node"),
}  # fmt: skip
NEEDLESS = {
    "the plan decides that": (
        "gradient-accumulation-steps", "gradient-checkpointing", "deepspeed", "fsdp", "zero-stage", "device-map", "offload",
        "cpu-offload", "torch-compile",
    ),
    "name the folder itself: anyfit fit FOLDER": ("model", "model-name", "model-name-or-path", "base-model"),
    "gradients are clipped to a norm of 1": ("max-grad-norm", "clip-norm", "gradient-clipping"),
    "the optimizer has torch's own; for another, write a script": ("weight-decay",),
    "--lora adapts every linear layer, with an alpha of twice its rank; for others, write a script": (
        "lora-alpha", "lora-dropout", "lora-target-modules", "target-modules",
    ),
    "anyfit runs no code of a folder": ("trust-remote-code",),
    "a run is on this machine, and anyfit plan is for any": ("machine",),
}  # fmt: skip


class Command(TyperCommand):
    """A verb that knows what other tools call its options."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        with self.naming_ours():
            return super().parse_args(ctx, args)

    @contextmanager
    def naming_ours(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            refused: Any = error
            hint = self._known_as(refused.option_name) if hasattr(error, "possibilities") else None  # no such option
            if hint is not None:
                refused.message, refused.possibilities = f"{refused.message}; {hint}", None
            elif hasattr(error, "message"):
                refused.message = _in_words(refused.message)
            raise

    def _known_as(self, option: str) -> str | None:
        name, ours = option.lstrip("-").replace("_", "-"), {each: found for found in self.params for each in found.opts}
        known = next((known for known, others in ELSEWHERE.items() if name in others), f"--{name}")
        if known in ours:
            return f"it is {known} here ({getattr(ours[known], 'help', '')})"
        return next((f"leave it out: {why}" for why, others in NEEDLESS.items() if name in others), None)


def _in_words(message: str) -> str:
    """What a value should be, without the parser's own words.

    >>> _in_words("Input should be a valid integer, unable to parse string as an integer")
    'give a whole number'
    >>> _in_words("Input should be greater than or equal to 1")
    'give 1 or more'
    """
    for kind, wanted in {"integer": "a whole number", "number": "a number"}.items():
        if message.startswith(f"Input should be a valid {kind}"):
            return f"give {wanted}"
    return re.sub(r"^Input should be greater than or equal to (\S+)$", r"give \1 or more", message)


Target = Annotated[
    str,
    Argument(
        help="'demo'; a size such as gpt2-4b, llama-8b or gpt3-175b; a Hugging Face model type, folder or config.json; "
        "or a function that returns an anyfit.Job: package.module:function or file.py:function"
    ),
]
Batch = Annotated[int | None, Option("--batch", min=1, help="samples a step, of all GPUs together")]
PlanBatch = Annotated[
    str | None,
    Option(
        "--batch",
        callback=samples,
        help="samples a step, of all GPUs together; best (or best:256): as many of up to 64 (256) as give most tokens/s",
        metavar="INTEGER|best",
    ),
]
Seq = Annotated[int | None, Option("--seq", min=1, help="tokens a sample; bytes, for the demo")]
Dtype = Annotated[str | None, Option("--dtype", callback=precision, help="bf16 or fp32")]
OptimizerName = Annotated[str | None, Option("--optimizer", help="adamw, adam, sgd, or another class of torch.optim")]
Lora = Annotated[
    int | None, Option("--lora", min=1, help="train LoRA adapters of this rank, on a Hugging Face model that is frozen otherwise")
]
RealRun = Annotated[
    bool | None,
    Option(
        "--real-run/--no-real-run",
        help="let the model run for real, on the CPU, where its forward needs the values of tensors; a small one may by itself",
        show_default=False,
    ),
]
Agree = Annotated[
    list[str] | None,
    Option("--agree", help="to a difference from plain PyTorch: mean-of-micro-batches, batch-norm-of-micro-batches; repeatable"),
]
NoCompile = Annotated[bool, Option("--no-compile", help="no block is compiled")]
Gpus = Annotated[int | None, Option("--gpus", min=1, help="as if each node had so many GPUs")]
Nodes = Annotated[int | None, Option("--nodes", min=1, help="as if there were so many nodes")]
MeshAxes = Annotated[
    str | None,
    Option(
        "--mesh",
        help="ranks as axes, such as data=2,tensor=4: along the tensor axis they hold each block together, along a pipeline axis "
        "other blocks each",
    ),
]
LayoutOption = Annotated[
    str | None, Option("--layout", help="how a tensor axis cuts blocks: data, megatron, sequence or ulysses")
]
# What a user decides of a plan, by the field of values/forced.py.
ScheduleName = Annotated[str | None, Option("--schedule", help="of a pipeline: 1f1b or interleaved")]
Chunks = Annotated[int | None, Option("--chunks", min=1, help="stages that each rank of a pipeline has")]
MicroBatch = Annotated[int | None, Option("--micro-batch", min=1, help="samples of a rank that go through the model at once")]
ActivationsOfAll = Annotated[
    str | None,
    Option("--activations", help="of all blocks: keep, selective (recompute but for the costly ops) or recompute"),
]
Shard = Annotated[
    str | None,
    Option("--shard", help="over the data axis: none, optimizer, gradients (and it) or all; over 8 of its ranks: all=8"),
]
MachineName = Annotated[str | None, Option("--machine", help="a preset or a machine file; this machine when not given")]
DeviceMemory = Annotated[
    str | None, Option("--device-memory", callback=size, help="use no more than this of a device, such as 24GiB")
]
HostMemory = Annotated[str | None, Option("--host-memory", callback=size, help="use no more than this of the host's memory")]
# of a machine that is described, and may be described otherwise
PlanDeviceMemory = Annotated[
    str | None,
    Option("--device-memory", callback=size, help="use no more than this of a device; with --machine, as if it had so much"),
]
PlanHostMemory = Annotated[
    str | None,
    Option("--host-memory", callback=size, help="use no more than this of the host; with --machine, as if it had so much"),
]
Disk = Annotated[
    str | None,
    Option("--disk", callback=size, help="let optimizer state lie on the disk, no more than this; it wears the drive"),
]
Json = Annotated[bool, Option("--json", help="print JSON, for programs")]
