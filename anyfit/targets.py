"""What the command line can be pointed at: the demo, a size preset, a Hugging Face configuration, or a function of the user's;
and a machine.

`job_for(target)` makes the Job. Everything but a function takes `--batch`, `--seq`, `--dtype` and `--optimizer`, and Hugging Face
models take `--lora`; a function decides them in the Job it returns. All take `--real-run`, `--agree` and `--no-compile`.
`module_costs` sums a traced pass by module (`--depth`).
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .values.doing import doing
from .values.graph import Graph
from .values.job import OPTIMIZERS, Job
from .values.machine import Machine
from .values.profile import BlockCost
from .values.record import nearest

if TYPE_CHECKING:
    from torch import nn
    from torch.optim import Optimizer

BATCH, SEQ = 8, 1024


@dataclass(frozen=True)
class Size:
    """A model by its shape alone: a Hugging Face model type and what its configuration says."""

    kind: str
    options: Mapping[str, Any]
    positions: str  # the option that says how long a sample may be; it grows with --seq
    seq: int = SEQ  # when none is asked for


def _gpt2(layers: int, hidden: int, heads: int, seq: int = SEQ) -> Size:
    options = {"n_layer": layers, "n_embd": hidden, "n_head": heads, "vocab_size": 50304, "n_positions": seq}
    without_dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    return Size("gpt2", options | without_dropout, "n_positions", seq)


def _llama(layers: int, hidden: int, heads: int, intermediate: int, *, tied: bool = False) -> Size:
    options = {"num_hidden_layers": layers, "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": 8}
    options |= {"intermediate_size": intermediate, "vocab_size": 128256, "max_position_embeddings": 8192}
    return Size("llama", options | {"tie_word_embeddings": tied}, "max_position_embeddings")


SIZES: Mapping[str, Size] = {
    "gpt2-small": _gpt2(12, 768, 12),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt2-4b": _gpt2(32, 3072, 24),
    "gpt2-10b": _gpt2(48, 4096, 32),
    "gpt2-13b": _gpt2(40, 5120, 40),
    "gpt2-15b": _gpt2(18, 8192, 64),
    "gpt2-20b": _gpt2(24, 8192, 64),
    "llama-1b": _llama(16, 2048, 32, 8192, tied=True),  # Llama 3.2
    "llama-8b": _llama(32, 4096, 32, 14336),
    "llama-70b": _llama(80, 8192, 64, 28672),
    "gpt3-175b": _gpt2(96, 12288, 96, seq=2048),
}


def machine_for(
    name: str | None,
    gpus: int | None,
    nodes: int | None,
    device_memory: str | None,
    host_memory: str | None,
    disk: str | None = None,
) -> Machine:
    """The machine that is here, within these limits; or one that is described, as if it had so much, which is said where it has
    less."""
    machine = machine_as_asked(name, gpus, nodes, device_memory, host_memory, disk)
    for line in () if name is None else machine.beyond(Machine.load(name).with_devices(gpus, nodes)):
        print(line, file=sys.stderr)
    return machine


def machine_as_asked(
    name: str | None,
    gpus: int | None,
    nodes: int | None,
    device_memory: str | None,
    host_memory: str | None,
    disk: str | None = None,
) -> Machine:
    """The same, without a word."""
    from . import probe

    if name is None:
        return probe().with_devices(gpus, nodes).with_limits(device_memory, host_memory, disk)
    return Machine.load(name).with_devices(gpus, nodes).as_if(device_memory, host_memory, disk)


@doing("making the job")
def job_for(
    target: str,
    *,
    batch: int | None = None,
    seq: int | None = None,
    dtype: str | None = None,
    optimizer: str | None = None,
    lora: int | None = None,
    real_run: bool | None = None,
    agree: Sequence[str] | None = None,
    no_compile: bool = False,
    ranks: int = 1,
) -> Job:
    """The Job a target stands for; None is its own default, of `batch` for each rank."""
    if ":" in target:
        given = {"--batch": batch, "--seq": seq, "--dtype": dtype, "--optimizer": optimizer, "--lora": lora}
        named = [name for name, value in given.items() if value is not None]
        if named:
            raise ValueError(f"{named[0]} is not for functions; {target} decides it in the Job it returns")
        job = _job_of_function(target)
        job = replace(job, real_run=job.real_run if real_run is None else real_run, agree=(*job.agree, *(agree or ())))
        return replace(job, compile=False) if no_compile else job
    if optimizer is not None:
        optimizer_class(optimizer)  # before anything is built
    if target == "demo":
        from . import demo

        if lora is not None:
            raise ValueError("--lora is for Hugging Face models, and the demo is none")

        job = demo.job(
            batch_size=batch or demo.BATCH * ranks, length=seq or demo.LENGTH, precision=dtype or demo.default_precision()
        )
    elif target in SIZES:
        size = SIZES[target]
        options = {**size.options, size.positions: max(size.options[size.positions], seq or 0)}
        config = _quiet_transformers().AutoConfig.for_model(size.kind, **options)
        job = _job_of_config(config, batch or BATCH * ranks, seq or size.seq, dtype, lora)
    else:
        job = _job_of_config(_config_named(target), batch or BATCH * ranks, seq, dtype, lora)
    job = replace(job, real_run=real_run, agree=tuple(agree or ()), compile=False if no_compile else None)
    return job if optimizer is None else with_optimizer(job, optimizer)


def tell_of_default(target: str) -> None:
    """On stderr, where a target is a kind of model alone: it may be meant as a folder that is not here."""
    if target == "demo" or target in SIZES or set(target) & set(":/.") or Path(target).exists():
        return
    kinds = _quiet_transformers().CONFIG_MAPPING
    if target in kinds:
        here = [name for name in folders_here() if target in name.lower()]
        print(
            f"{target} is no folder here: this is about the default {kinds[target].__name__} of transformers; for another model, "
            f"name its folder or config.json{f', such as {here[0]}' if here else ''}",
            file=sys.stderr,
        )


def folders_here() -> list[str]:
    """Names of Hugging Face folders in the one that the command line is used in."""
    return sorted(file.parent.name for file in Path().glob("*/config.json"))


def name_of(target: str) -> str:
    """What a target is called; "" for a function, whose model has a class of its own."""
    return "" if ":" in target else Path(target).resolve().name if Path(target).exists() else target


def _quiet_transformers() -> Any:
    """transformers, which from now on logs errors alone."""
    try:
        import transformers
    except ImportError:
        raise ImportError("sizes and Hugging Face models need transformers: pip install 'anyfit[hf]'") from None
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def _config_named(target: str) -> Any:
    """The configuration in a folder or file, of a model type, or of a name on the Hugging Face hub (organisation/model)."""
    on_disk = Path(target).exists()
    if not on_disk and (target.endswith((".py", ".json")) or target.startswith((".", "/")) or target.count("/") > 1):
        raise FileNotFoundError(f"no file {target}")
    if target.endswith(".py"):
        raise ValueError(f"{target} is a file; name the function in it that returns a Job: {target}:job")
    transformers = _quiet_transformers()
    if not on_disk and "/" not in target and target not in transformers.CONFIG_MAPPING:
        near = nearest(target, (*folders_here(), "demo", *SIZES, *transformers.CONFIG_MAPPING))
        fetch = f"hf download ORGANISATION/MODEL --local-dir {target}"
        if "?" in near and re.search(r"\d[bm]\b", target.lower()):  # as models on the hub are called
            near = f"; fetch it ({fetch}){near.replace(';', ', or', 1)}"
        kinds = (
            f"; give a Hugging Face folder ({fetch} makes one), config.json or model "
            "type, a size such as gpt2-4b, 'demo', or a function: file.py:function or package.module:function"
        )
        raise ValueError(f"{target!r} is no folder here, and no size or model type that is known{near if '?' in near else kinds}")
    from .values.huggingface import config_of

    return config_of(target)


def _job_of_config(config: Any, batch: int, seq: int | None, dtype: str | None, lora: int | None) -> Job:
    from .values.huggingface import longest_sample, reads_text
    from .values.huggingface_adapters import lora_config

    longest = longest_sample(config)
    if seq is not None and not reads_text(config):
        raise ValueError(
            f"--seq is for models of text, and {type(config).__name__} reads images of a size of its own; leave it out"
        )
    if seq is not None and longest is not None and seq > longest:
        raise ValueError(f"--seq {seq} is more than the {longest} positions of {type(config).__name__}; --seq {longest} fits")
    length = seq or min(SEQ, longest or SEQ)
    options: dict[str, Any] = {} if dtype is None else {"precision": dtype}
    if lora is not None:
        options["adapter"] = lora_config(lora)
    return Job.from_huggingface(config, batch_size=batch, length=length, **options)


def optimizer_class(name: str) -> Any:
    """An optimizer of torch's by its name, in any case."""
    from torch import optim

    classes = {
        key.lower(): made
        for key, made in vars(optim).items()
        if isinstance(made, type) and issubclass(made, optim.Optimizer) and made is not optim.Optimizer
    }
    if name.lower() not in classes:
        raise ValueError(f"--optimizer {name}: torch.optim has none of that name{nearest(name.lower(), classes)}")
    return classes[name.lower()]


def optimizer_named(name: str, **settings: float) -> Callable[[nn.Module], Optimizer]:
    """An optimizer of torch's of what is trained, with torch's own settings but for these."""
    made_by = optimizer_class(name)

    def make(model: nn.Module) -> Optimizer:
        try:
            made: Optimizer = made_by([parameter for parameter in model.parameters() if parameter.requires_grad], **settings)
        except (TypeError, ValueError) as error:  # it wants more than parameters, or others
            raise ValueError(
                f"--optimizer {name}: torch.optim.{made_by.__name__} cannot be made as it is for this model: {error}. "
                f"These can: {', '.join(OPTIMIZERS)}; for another, write a function that returns a Job"
            ) from error
        return made

    return make


def with_optimizer(job: Job, name: str) -> Job:
    return replace(job, optimizer=optimizer_named(name))


def _job_of_function(target: str) -> Job:
    place, _, name = target.rpartition(":")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise FileNotFoundError(f"no file {place}")
        spec = importlib.util.spec_from_file_location(Path(place).stem, place)
        assert spec is not None
        assert spec.loader is not None
        module: Any = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        sys.path.insert(0, str(Path(place).parent.resolve()))
        spec.loader.exec_module(module)
    else:
        sys.path.insert(0, "")
        module = importlib.import_module(place)
    make = getattr(module, name, None)
    if make is None:
        raise ValueError(f"{place} has no {name!r}")
    job = make() if callable(make) and not isinstance(make, Job) else make
    if not isinstance(job, Job):
        raise TypeError(f"{target} gave {type(job).__name__}, not an anyfit.Job")
    return job


def module_costs(job: Job, graph: Graph, machine: Machine, depth: int) -> list[BlockCost]:
    """What each module of the traced job costs with all that is in it, parents first, down to `depth` names in its path."""
    import torch

    from .costing.times import pass_seconds

    with torch.device("meta"):
        classes = {path: type(module).__name__ for path, module in job.build().named_modules()}

    columns = ("parameters", "flops_forward", "flops_backward", "seconds_forward", "seconds_backward", "seconds_recompute")
    sums: dict[str, dict[str, Any]] = {
        path: dict.fromkeys((*columns, "kept_bytes"), 0) for path in classes if not path or path.count(".") < depth
    }

    def add(path: str, column: str, amount: float) -> None:
        """To all modules that the path lies in, itself included, as far as they are shown."""
        names = path.split(".")[:depth] if path else []
        for count in range(len(names) + 1):
            sums[".".join(names[:count])][column] += amount

    for op, seconds in zip(graph.ops, pass_seconds(graph, machine), strict=True):
        add(op.module, f"flops_{op.phase}", op.flops)
        add(op.module, f"seconds_{op.phase}", seconds)
        if op.recomputes:
            add(op.module, "seconds_recompute", seconds)
    for parameter in graph.parameters:
        add(parameter.name.rpartition(".")[0], "parameters", parameter.elements)
    for value in graph.values:
        if graph.kept(value):
            add(graph.ops[value.born].module, "kept_bytes", value.bytes)
    return [BlockCost(name=path, kind=classes[path], **amounts) for path, amounts in sums.items()]
