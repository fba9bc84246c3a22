"""The systems that `benchmarks.offload` holds anyfit against, and the jobs: plain PyTorch, FSDP2, DeepSpeed, Colossal-AI.

Each trains the same GPT-2 from the same weights on the same batch, with AdamW, clipping by the norm and recomputed blocks, and
gives one row of figures. `measure` is meant for a process of its own: caps and process groups are of the whole process.

No system is held back: what can be pinned is pinned, the settings are those its documents recommend, and a job that does not fit
is tried again with the batch in parts (`attempts`). SETTINGS says in sentences what was done, and goes into the results.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import math
import os
import resource
import statistics
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import HashStore

from .cases import Case, gpt2, job_of
from .profiler import quickly_built

GIB = 2**30
CONTEXT_BYTES = 2**29  # what CUDA takes outside torch's allocator
LR, WEIGHT_DECAY = 1e-4, 0.01
VOCABULARY = 50304  # a multiple of 64, as it is usually made: products with 50257 columns are slow
NEVER, ALWAYS = 1e6, 1e-2  # limits of the norm that no step is over, and that every step is over
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
MODELS = {
    "4b": gpt2(32, 3072, 24, vocab_size=VOCABULARY, n_positions=1024, **NO_DROPOUT),
    "10b": gpt2(48, 4096, 32, vocab_size=VOCABULARY, n_positions=1024, **NO_DROPOUT),
    "tiny": gpt2(2, 64, 4, vocab_size=257, n_positions=64, bos_token_id=0, eos_token_id=0, **NO_DROPOUT),
}


@dataclass(frozen=True)
class Job:
    """A training step: the model, the batch, and the GPU memory that all of it may take."""

    model: str
    batch: int
    cap_bytes: int | None = None
    clip_norm: float = NEVER
    compiled: bool = False  # blocks through torch.compile
    kept: bool = False  # activations, which are made again otherwise

    @property
    def case(self) -> Case:
        return Case(f"gpt2-{self.model}", "gpt2", self.batch, MODELS[self.model]["n_positions"], options=MODELS[self.model])

    @property
    def tokens(self) -> int:
        return self.batch * self.case.length

    @property
    def parameters(self) -> int:
        options = MODELS[self.model]
        layers, hidden = options["n_layer"], options["n_embd"]
        return int(layers * (12 * hidden + 13) * hidden + (options["vocab_size"] + options["n_positions"] + 2) * hidden)

    @property
    def flops_per_token(self) -> int:
        """Of forward and backward, without what is recomputed; attention as if it were not causal."""
        options = MODELS[self.model]
        return int(6 * self.parameters + 12 * options["n_layer"] * options["n_embd"] * options["n_positions"])

    @property
    def activation_bytes(self) -> int:
        """The least that recomputation takes: the input of each block, and the inside of one (16 hidden widths)."""
        options = MODELS[self.model]
        return int(2 * self.tokens * options["n_embd"] * (options["n_layer"] + 1 + 16))

    @property
    def block_bytes(self) -> int:
        hidden = MODELS[self.model]["n_embd"]
        return int(2 * (12 * hidden + 13) * hidden)


JOBS = {
    "4b batch 8 cap 24": Job("4b", 8, 24 * GIB),
    "4b batch 8 cap 24 clipping": Job("4b", 8, 24 * GIB, ALWAYS),
    "4b batch 32 cap 24": Job("4b", 32, 24 * GIB),
    "4b batch 32 cap 24 clipping": Job("4b", 32, 24 * GIB, ALWAYS),
    "4b batch 8 cap 12": Job("4b", 8, 12 * GIB),
    "10b batch 8 cap 24": Job("10b", 8, 24 * GIB),
    "10b batch 16 cap 24": Job("10b", 16, 24 * GIB),
    "4b batch 8 no cap": Job("4b", 8),
    "4b batch 8 no cap compiled": Job("4b", 8, compiled=True),
    "4b batch 8 no cap kept": Job("4b", 8, kept=True),
    "4b batch 32 no cap": Job("4b", 32),
    "tiny": Job("tiny", 4),
    "tiny clipping": Job("tiny", 4, clip_norm=ALWAYS),
}


Step = Callable[[], tuple[Tensor, Any]]  # the loss, and the norm of the gradients before they were clipped


@dataclass(frozen=True)
class Attempt:
    """What may be changed for a job that does not fit."""

    parts: int = 1  # the batch is run in so many, and the gradients are added up
    margin: float = 0.0  # Gemini: how much of the GPU memory it finds free goes to optimizer states


@dataclass(frozen=True)
class System:
    prepare: Callable[[Job, Attempt, str], Step]
    settings: str
    needs: str | None = None  # a module that may not be there
    attempts: Sequence[Attempt] = (Attempt(), Attempt(parts=2), Attempt(parts=4))
    offloads: bool = True

    @property
    def is_there(self) -> bool:
        return self.needs is None or find_spec(self.needs) is not None


# ---------------------------------------------------------------------- the same model and batch for all


def build(job: Job, dtype: torch.dtype, device: str, *, reentrant: bool = False) -> Any:
    """With the weights that `anyfit.start` gets for the same case and seed; blocks recompute."""
    torch.manual_seed(0)
    model: Any = quickly_built(job_of(job.case)).build()
    for parameter in model.parameters():  # which are all views of the same numbers
        parameter.data = parameter.data.to(device, dtype, copy=True)
    if not job.kept:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": reentrant})
    return model.train()


def parts_of(job: Job, attempt: Attempt, device: str) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, job.case.options["vocab_size"], (job.batch, job.case.length), generator=generator)
    return list(ids.to(device).chunk(attempt.parts))


def loss_of(model: Any, ids: Tensor) -> Tensor:
    loss: Tensor = model(input_ids=ids, labels=ids).loss
    return loss


def backward(model: Any, parts: Sequence[Tensor]) -> Tensor:
    """Of the mean loss, which it returns."""
    return torch.stack([backward_of_part(model, ids, len(parts)) for ids in parts]).sum()


def backward_of_part(model: Any, ids: Tensor, parts: int) -> Tensor:
    loss = loss_of(model, ids) / parts
    loss.backward()
    return loss.detach()


# ---------------------------------------------------------------------- plain PyTorch, everything on the device


def resident(job: Job, device: str) -> Any:
    model = build(job, torch.bfloat16, device).to(device)
    if job.compiled:
        for block in model.transformer.h:
            block.compile()
    return model


def plain(job: Job, attempt: Attempt, device: str) -> Step:
    model, parts = resident(job, device), parts_of(job, attempt, device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> tuple[Tensor, Any]:
        loss = backward(model, parts)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return loss, norm

    return step


def plain_with_masters(job: Job, attempt: Attempt, device: str) -> Step:
    model, parts = resident(job, device), parts_of(job, attempt, device)
    weights = list(model.parameters())
    masters = [weight.detach().float() for weight in weights]
    optimizer = torch.optim.AdamW(masters, lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> tuple[Tensor, Any]:
        loss = backward(model, parts)
        for weight, master in zip(weights, masters, strict=True):
            master.grad, weight.grad = weight.grad.float(), None
        norm = torch.nn.utils.clip_grad_norm_(masters, job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            torch._foreach_copy_(weights, masters)
        return loss, norm

    return step


# ---------------------------------------------------------------------- the peers


def join(backend: str) -> None:
    """A process group of this process alone, which needs no port."""
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)


def fsdp2(job: Job, attempt: Attempt, device: str) -> Step:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard

    join("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
    parts = parts_of(job, attempt, device)
    model = build(job, torch.float32, "cpu")
    shard = partial(
        fully_shard,
        mesh=init_device_mesh(device, (1,)),
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16),
        offload_policy=CPUOffloadPolicy(pin_memory=True) if device == "cuda" else OffloadPolicy(),
    )
    for block in model.transformer.h:
        shard(block)
    shard(model)
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY, fused=True)

    def step() -> tuple[Tensor, Any]:
        losses = []
        for index, ids in enumerate(parts):
            model.set_requires_gradient_sync(index + 1 == len(parts))
            losses.append(backward_of_part(model, ids, len(parts)))
        norm: Any = torch.nn.utils.clip_grad_norm_(model.parameters(), job.clip_norm)
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum(), norm.full_tensor()

    return step


def deepspeed(job: Job, attempt: Attempt, device: str, *, stage: int) -> Step:
    if device == "cpu":
        os.environ["DS_ACCELERATOR"] = "cpu"
    join("nccl" if device == "cuda" else "gloo")
    parts = parts_of(job, attempt, device)
    to_host = {"device": "cpu", "pin_memory": device == "cuda"}
    zero = {"stage": stage, "overlap_comm": True, "contiguous_gradients": True, "offload_optimizer": to_host}
    config = {
        "train_micro_batch_size_per_gpu": job.batch // attempt.parts,
        "gradient_accumulation_steps": attempt.parts,
        "gradient_clipping": job.clip_norm,
        "bf16": {"enabled": True},
        "zero_optimization": zero | ({"offload_param": to_host} if stage == 3 else {}),
        "optimizer": {"type": "AdamW", "params": {"lr": LR, "weight_decay": WEIGHT_DECAY}},
    }
    model = build(job, torch.bfloat16, "cpu")
    for buffer in model.buffers():
        buffer.data = buffer.data.to(device)
    engine, *_ = importlib.import_module("deepspeed").initialize(
        model=model, model_parameters=list(model.parameters()), config=config
    )

    def step() -> tuple[Tensor, Any]:
        losses = []
        for ids in parts:
            loss = loss_of(engine, ids)
            engine.backward(loss)
            engine.step()
            losses.append(loss.detach())
        return torch.stack(losses).mean(), engine.get_global_grad_norm()

    return step


def gemini(job: Job, attempt: Attempt, device: str) -> Step:
    join("nccl" if device == "cuda" else "gloo")
    memory = importlib.import_module("colossalai.legacy.utils.memory")
    plugins = importlib.import_module("colossalai.booster.plugin")
    if job.cap_bytes:  # its placement goes by the whole GPU otherwise
        memory.colo_set_process_memory_fraction(fraction_of(job.cap_bytes))
    plugin = plugins.GeminiPlugin(
        placement_policy="auto",
        precision="fp16",
        pin_memory=True,
        max_norm=job.clip_norm,
        enable_gradient_accumulation=attempt.parts > 1,
        gpu_margin_mem_ratio=attempt.margin,
        hidden_dim=job.case.options["n_embd"],
        initial_scale=2**10,  # so that no step overflows and is left out
    )
    booster = importlib.import_module("colossalai.booster").Booster(plugin=plugin)
    parts = parts_of(job, attempt, device)
    model = build(job, torch.float16, "cpu", reentrant=True)
    adam = importlib.import_module("colossalai.nn.optimizer").HybridAdam(model.parameters(), lr=LR, weight_decay=WEIGHT_DECAY)
    model, optimizer, *_ = booster.boost(model, adam)

    def step() -> tuple[Tensor, Any]:
        optimizer._current_grad_norm = math.inf  # stays when a step overflows
        scale = optimizer.mix_precision_mixin.loss_scale
        losses = []
        for ids in parts:
            loss = loss_of(model, ids) / len(parts)
            booster.backward(loss, optimizer)
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return torch.stack(losses).sum(), optimizer._current_grad_norm / scale

    return step


SYSTEMS = {
    "plain": System(
        plain,
        "Everything on the GPU in bf16: weights, gradients and moments, no fp32 masters; torch's fused AdamW; clip_grad_norm_.",
        offloads=False,
    ),
    "plain fp32 masters": System(
        plain_with_masters,
        "Everything on the GPU: bf16 weights and gradients, fp32 masters and moments, gradients cast for the update and clipped "
        "by clip_grad_norm_, torch's fused AdamW on the masters, one multi-tensor copy back to the weights.",
        offloads=False,
    ),
    "fsdp2": System(
        fsdp2,
        "fully_shard on every block and the root, CPUOffloadPolicy with pinned memory, bf16 computation and reduction over fp32 "
        "weights, torch's fused AdamW on the CPU, clip_grad_norm_; parts of a batch add up without synchronising.",
    ),
    "deepspeed zero-2": System(
        partial(deepspeed, stage=2),
        "ZeRO-2, optimizer on the CPU with pinned memory (DeepSpeedCPUAdam), overlap_comm, contiguous_gradients, bf16 with fp32 "
        "masters, gradient_clipping.",
        needs="deepspeed",
    ),
    "deepspeed zero-3": System(
        partial(deepspeed, stage=3),
        "ZeRO-3, parameters and optimizer on the CPU with pinned memory (DeepSpeedCPUAdam), overlap_comm, contiguous_gradients, "
        "bf16 with fp32 masters, gradient_clipping.",
        needs="deepspeed",
    ),
    "colossalai gemini": System(
        gemini,
        "GeminiPlugin with placement auto, told of the cap; pinned memory, HybridAdam, fp16 (its Adam on the CPU has no bf16), "
        "max_norm; 0.9 of the GPU memory it finds free goes to optimizer states, 0.6 or none where that does not fit.",
        needs="colossalai",
        attempts=[Attempt(1, 0.9), Attempt(1, 0.6), Attempt(1, 0.0), Attempt(2, 0.6), Attempt(2, 0.0)],
    ),
}
SETTINGS = {name: system.settings for name, system in SYSTEMS.items()} | {
    "anyfit": "bf16 weights with fp32 masters and moments, exact clipping; the loss of the language model in slices of tokens, "
    "as is its default. Under a cap by anyfit.start, which is told the cap and nothing else; without one everything is resident, "
    "and blocks recompute or are compiled as plain PyTorch's are (benchmarks/mixed.py).",
    "all": "GPT-2 of Hugging Face with its own loss and scaled_dot_product_attention, sequences of 1024, each block recomputed "
    "unless the job says kept, AdamW with lr 1e-4 and weight decay 0.01, one batch of random tokens for all steps; the cap holds "
    "for torch's allocator and leaves 0.5 GiB of the named memory to CUDA. What does not fit runs again with the batch in 2 and "
    "in 4 parts.",
}


def versions() -> dict[str, str]:
    """Of the peers that are there; torch's is with the file's provenance."""
    found = {}
    for name in sorted({system.needs for system in SYSTEMS.values() if system.needs and system.is_there}):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:  # a bare folder
            found[name] = "unknown"
    return found


# ---------------------------------------------------------------------- one row


def fraction_of(cap_bytes: int) -> float:
    """Of the GPU's memory, for torch's allocator."""
    return min(1.0, (cap_bytes - CONTEXT_BYTES) / torch.cuda.get_device_properties(0).total_memory)


def empty_row(system: str, job: str) -> dict[str, Any]:
    """What a row has, of a run that gave nothing."""
    names = ("step_seconds", "step_seconds_all", "tokens_per_second", "reserved_bytes", "most_resident_bytes", "start_seconds")
    more = ("first_step_seconds", "loss_first", "loss_last", "clipped_share", "error")
    return {"system": system, "job": job, **dict.fromkeys(names + more)}


def measure(system: str, job_name: str, steps: int, warmup: int, *, device: str = "cuda", attempt: int = 0) -> dict[str, Any]:
    """`steps` steps after `warmup`, in this process, which is good for nothing else afterwards."""
    job, asked = JOBS[job_name], SYSTEMS[system].attempts[attempt]
    row = empty_row(system, job_name) | {"parts": asked.parts}
    try:
        if device == "cuda":
            torch.cuda.set_device(0)
            torch.cuda.set_per_process_memory_fraction(fraction_of(job.cap_bytes) if job.cap_bytes else 1.0)
        began = time.perf_counter()
        step = SYSTEMS[system].prepare(job, asked, device)
        _synchronize(device)
        row["start_seconds"] = time.perf_counter() - began
        seconds, losses, norms = [], [], []
        for _ in range(warmup + steps):
            began = time.perf_counter()
            loss, norm = step()
            _synchronize(device)
            seconds.append(time.perf_counter() - began)
            losses.append(float(loss))
            norms.append(None if norm is None else float(norm))
    except Exception as error:
        traceback.print_exc()
        return row | {"error": _in_short(error)}
    median = statistics.median(seconds[warmup:])
    known = [norm for norm in norms if norm is not None]
    if not all(map(math.isfinite, known[warmup:])):
        row["error"] = "a step overflowed and was left out"
    return row | {
        "step_seconds": median,
        "step_seconds_all": seconds,
        "tokens_per_second": job.tokens / median,
        "reserved_bytes": torch.cuda.max_memory_reserved() if device == "cuda" else 0,
        "most_resident_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024,
        "first_step_seconds": seconds[0],
        "loss_first": losses[0],
        "loss_last": losses[-1],
        "clipped_share": sum(norm > job.clip_norm for norm in known) / len(known) if known else None,
    }


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _in_short(error: Exception) -> str:
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    out_of_memory = isinstance(error, torch.OutOfMemoryError) or "No enough CUDA memory" in said
    return "out of memory" if out_of_memory else said[:200]
