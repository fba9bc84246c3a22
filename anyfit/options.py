"""Options that several verbs of the command line share."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from typer import Argument, Option

from .values.precision import PRECISIONS
from .values.units import parse_bytes


def size(parameter: typer.CallbackParam, text: str | None) -> str | None:
    """A size of bytes above nothing, before anything is measured or traced."""
    try:
        if text is not None and parse_bytes(text) == 0:
            raise ValueError("give more than nothing, such as 24GiB")
    except ValueError as error:
        raise ValueError(f"{parameter.opts[0]} {text}: {error}") from None
    return text


def precision(parameter: typer.CallbackParam, name: str | None) -> str | None:
    """One that is known, before anything is built."""
    if name is not None and name not in PRECISIONS:
        raise ValueError(f"{parameter.opts[0]} {name}: {' or '.join(PRECISIONS)} today")
    return name


def finite(parameter: typer.CallbackParam, seconds: float | None) -> float | None:
    if seconds is not None and not math.isfinite(seconds):
        raise ValueError(f"{parameter.opts[0]} {seconds}: give a number of seconds, such as 600")
    return seconds


Target = Annotated[
    str,
    Argument(
        help="'demo'; a size such as gpt2-4b, llama-8b or gpt3-175b; a Hugging Face model type, folder or config.json; "
        "or a function that returns an anyfit.Job: package.module:function or file.py:function"
    ),
]
Batch = Annotated[int | None, Option("--batch", min=1, help="samples a step, of all GPUs together")]
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
Json = Annotated[bool, Option("--json", help="print JSON, for programs")]
