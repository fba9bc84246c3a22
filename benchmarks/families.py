"""Models of many families: how fast beside plain PyTorch, and as forecast?

    python -m benchmarks.families [--jobs WORD ...] [--seconds 500] [--into FILE] [--traces FOLDER] [--record]
    python -m benchmarks.families --plain [--compiled] [--jobs WORD ...] [--rounds 5] ...

(a GPU and its host.) Without `--plain`, every job is planned as `anyfit.start` would, for all of the GPU's memory or for a third
of what the job needs with all state on the device, and trained for a few steps under a hard cap of that size, with a norm that
never or always is over the limit, and with blocks compiled where that was measured to pay: the step and its memory stand beside
the forecast, and beside what no plan is under (step_bound.py). Half of the jobs, chosen by a hash of their names, are held out
from every fit. Rows that are in `--into FILE` are not measured again, and new ones are added to it. `--traces FOLDER` keeps what
was traced; `--timelines FOLDER` has what each lane did when, over three steps of every job.

With `--plain`, a step with no cap stands beside plain PyTorch and the forecast, in interleaved rounds: the faster of bf16 weights
with fp32 masters and of autocast over fp32 weights, with fused AdamW and clipping, the same attention and the same micro-batch.
With `--plain --compiled` the blocks of both are compiled one by one, as torch.compile does it and as `Job(compile="fast")` does.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import math
import pickle
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import clip_grad_norm_

import anyfit
from anyfit.measuring import measure_blocks
from anyfit.planning import search
from anyfit.planning.enough import Enough
from anyfit.profiling import profiled, traced
from anyfit.values.graph import Graph
from anyfit.values.machine import Machine
from anyfit.values.nests import map_tensors

from . import record
from .own_models import QWEN3, clip_job, lora_job, unet_job, wav2vec2_job
from .peers import ALWAYS, CONTEXT_BYTES, GIB, NEVER
from .profiler import quickly_built
from .step_bound import bound_of

TRACERS = 12  # processes
WARM_UP, TIMED = 4, 8
CLIPPED_WARM_UP = 10  # a run waits for the norm after some steps that clip
STEPS_A_ROUND = 4
COMPILED_STEPS = 10**6  # for which plans are made that may compile: what is measured is the step
Row = dict[str, Any]
Step = Callable[[Any], Any]


@dataclass(frozen=True)
class Family:
    """A model by its Hugging Face configuration, or by a function that makes the job."""

    batch: int
    length: int | None = None  # tokens a sample
    kind: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    make: Callable[[int], anyfit.Job] | None = None

    def job(self) -> anyfit.Job:
        if self.make is not None:
            made = self.make(self.batch)
        else:
            from transformers import AutoConfig

            config = AutoConfig.for_model(self.kind, **self.options)
            made = anyfit.Job.from_huggingface(config, batch_size=self.batch, length=self.length, precision="bf16")
        return replace(made, optimizer=adamw)

    def batch_for(self, job: anyfit.Job) -> Any:
        """Of random tokens, pixels and classes: zeros alone would all go to one expert and one embedding."""
        generator = torch.Generator().manual_seed(0)
        words = int(self.options.get("vocab_size", 1000))

        def draw(tensor: Tensor) -> Tensor:
            if tensor.dtype.is_floating_point:
                return torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)
            return torch.randint(
                min(words, 1000) if tensor.dim() > 1 else 2, tensor.shape, dtype=tensor.dtype, generator=generator
            )

        return map_tensors(job.sample, draw)


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], 1e-5, fused=True)


def text(layers: int, width: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"num_hidden_layers": layers, "hidden_size": width, "num_attention_heads": heads, **more}


TOWER = {"layers": 24, "attention_heads": 16, "ffn_dim": 4096}
WHISPER = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in TOWER.items()}
GEMMA3 = text(26, 1152, 4, intermediate_size=6912, num_key_value_heads=1, vocab_size=262144, sliding_window=512)
MOE = text(16, 1024, 16, num_key_value_heads=4, head_dim=64, num_experts=32, num_experts_per_tok=4, moe_intermediate_size=512)
FAMILIES = {
    "gemma3-1b": Family(4, 1024, "gemma3_text", GEMMA3),
    "whisper-medium": Family(8, 256, "whisper", {"d_model": 1024, **WHISPER}),
    "qwen3-moe": Family(8, 1024, "qwen3_moe", {**MOE, "vocab_size": 50304}),
    "swin-large": Family(32, None, "swin", {"embed_dim": 192, "depths": [2, 2, 18, 2], "num_heads": [6, 12, 24, 48]}),
    "opt-1.3b": Family(8, 1024, "opt", text(24, 2048, 32, ffn_dim=8192, word_embed_proj_dim=2048)),
    "neox-1.4b": Family(8, 1024, "gpt_neox", text(24, 2048, 16, intermediate_size=8192)),
    "qwen3-1.7b": Family(8, 1024, "qwen3", QWEN3),
    "t5-large": Family(16, 512, "t5", {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}),
    "deberta-large": Family(16, 512, "deberta-v2", text(24, 1024, 16, intermediate_size=4096)),
    "vit-huge": Family(32, None, "vit", text(32, 1280, 16, intermediate_size=5120)),
    "convnext-large": Family(64, None, "convnext", {"depths": [3, 3, 27, 3], "hidden_sizes": [192, 384, 768, 1536]}),
    "mamba-370m": Family(8, 64, "mamba", {"num_hidden_layers": 24, "hidden_size": 1024}),
    "bloom-1b": Family(8, 1024, "bloom", {"n_layer": 24, "hidden_size": 1536, "n_head": 16}),
    "falcon-1b": Family(8, 1024, "falcon", text(24, 2048, 32, alibi=False)),
    "bart-large": Family(16, 512, "bart", {}),
    "dinov2-large": Family(32, None, "dinov2", text(24, 1024, 16)),
    "resnet-152": Family(128, None, "resnet", {"depths": [3, 8, 36, 3]}),
    "olmo2-1b": Family(4, 2048, "olmo2", text(16, 2048, 16, intermediate_size=8192)),
    "unet": Family(16, make=unet_job),
    "lora-qwen3-1.7b": Family(8, make=lora_job),
    "clip-large": Family(64, make=clip_job),
    "wav2vec2-large": Family(8, make=wav2vec2_job),
}


@dataclass(frozen=True)
class Job:
    family: str
    capped: bool = False  # to a third of what all state on the device needs
    clips: bool = False  # at every step
    compiles: bool = False  # blocks, where that was measured to be faster

    @property
    def name(self) -> str:
        words = {", a third of the memory": self.capped, ", clipping": self.clips, ", compiled": self.compiles}
        return self.family + "".join(word for word, is_so in words.items() if is_so)

    @property
    def is_held_out(self) -> bool:
        """From every fit; by the name alone, so that nobody chose."""
        return hashlib.sha256(self.name.encode()).digest()[0] % 2 == 0


KINDS: tuple[dict[str, bool], ...] = (
    {},
    {"capped": True},
    {"capped": True, "clips": True},
    {"compiles": True},
    {"capped": True, "compiles": True},
)
JOBS = {job.name: job for kind in KINDS for job in (Job(family, **kind) for family in FAMILIES)}


def traced_family(name: str) -> list[Graph]:
    torch.set_num_threads(1)
    return traced(FAMILIES[name].job(), "cuda")


def traced_families(names: Sequence[str], folder: Path | None) -> dict[str, list[Graph]]:
    """Each by a process of its own, before anything is measured: on a GPU machine traces take longer than all steps."""
    files = {} if folder is None else {name: folder / f"{name}.pickle" for name in names}
    found = {name: pickle.loads(file.read_bytes()) for name, file in files.items() if file.exists()}
    others = [name for name in names if name not in found]
    with ProcessPoolExecutor(TRACERS, get_context("spawn")) as tracers:
        found |= zip(others, tracers.map(traced_family, others), strict=True)
    for name in others if folder is not None else ():
        folder.mkdir(parents=True, exist_ok=True)
        files[name].write_bytes(pickle.dumps(found[name]))
    return found


def profile_for(training: anyfit.Job, graphs: list[Graph], machine: Machine) -> anyfit.Profile:
    """With the micro-batches alone that the best plan may have, as `anyfit.start` does it."""

    def of_first(count: int) -> anyfit.Profile:
        return profiled(training, graphs[:count], machine, (1, 1), training.batch_size)

    return next(filter(Enough(), map(of_first, range(1, len(graphs)))), None) or of_first(len(graphs))


def all_on_device_bytes(training: anyfit.Job, graphs: list[Graph], machine: Machine) -> int:
    """Of a plan with all state and all activations on the device, in one pass, op by op."""
    job = replace(training, replay=False)
    plan = search(profiled(job, graphs[:1], machine, (1, 1), job.batch_size))
    return plan.forecast.peak_bytes["device"]


def measured(
    job: anyfit.Job, batch: Any, profile: anyfit.Profile, machine: Machine, warm_up: int, timeline: Path | None
) -> tuple[Row, anyfit.Plan]:
    """Steps, and the plan that they were made by in the end: a start may plan anew."""
    began = time.perf_counter()
    with anyfit.start(quickly_built(job), machine=machine, profile=profile) as run:
        torch.cuda.synchronize()
        started = time.perf_counter() - began
        torch.cuda.reset_peak_memory_stats()
        seconds, clipped = [], 0
        for _ in range(warm_up + TIMED):
            begun = time.perf_counter()
            float(run.step(batch))
            seconds.append(time.perf_counter() - begun)
            clipped += run.metrics.gradient_norm > (job.clip_norm or math.inf)
        row = {
            "step_seconds": statistics.median(seconds[warm_up:]),
            "step_seconds_all": seconds,
            "allocated_bytes": torch.cuda.max_memory_allocated(),
            "reserved_bytes": torch.cuda.max_memory_reserved(),
            "start_seconds": started,
            "clipped": clipped,
        }
        if timeline is not None:
            recorded = run.record()
            while not recorded.is_done:
                run.step(batch)
            timeline.parent.mkdir(parents=True, exist_ok=True)
            timeline.write_text(json.dumps(recorded.document(timeline.stem)))
        return row, run.plan


def row_of(job: Job, graphs: list[Graph], machine: Machine, timelines: Path | None = None) -> Row:
    family, total = FAMILIES[job.family], torch.cuda.get_device_properties(0).total_memory
    eager = replace(family.job(), clip_norm=ALWAYS if job.clips else NEVER, compile=False)
    training = replace(eager, compile=None) if job.compiles else eager
    if job.compiles:
        measure_blocks(training, machine)
    cap = None if not job.capped else all_on_device_bytes(eager, graphs, machine) // 3
    limited = machine.with_limits(device_memory=cap)
    profile = profile_for(training, graphs, limited)
    torch.cuda.set_per_process_memory_fraction(1.0 if cap is None else min(1.0, max(cap - CONTEXT_BYTES, 0) / total))
    warm_up = CLIPPED_WARM_UP if job.clips else WARM_UP
    timeline = timelines and timelines / f"{job.name.replace(', ', '-').replace(' ', '-')}.json"
    real, plan = measured(training, family.batch_for(training), profile, limited, warm_up, timeline)
    bound = bound_of(profile, limited.device_limit_bytes - machine.device.context_bytes.value)
    return {
        "job": job.name,
        "family": job.family,
        "held_out": job.is_held_out,
        "cap_bytes": cap,
        "replayed": len(plan.replayed),
        "bound": bound and asdict(bound),
        "measured": real,
        "predicted_then": predicted(plan),
    }


def predicted(plan: anyfit.Plan) -> Row:
    forecast = plan.forecast
    return {
        "step_seconds": forecast.step_seconds,
        "device_bytes": forecast.peak_bytes["device"],
        "reserved_bytes": forecast.reserved_bytes,
    }


def line_of(row: Row) -> str:
    if "error" in row:
        return f"{row['job']:44} {row['error']}"
    real, then, bound = row["measured"], row["predicted_then"], row["bound"] or {"seconds": math.nan}
    return (
        f"{row['job']:44} {real['step_seconds']:6.3f} s, {real['step_seconds'] / bound['seconds']:.2f} of the bound, "
        f"forecast {then['step_seconds']:6.3f} "
        f"({then['step_seconds'] / real['step_seconds'] - 1:+6.1%}), GPU {real['allocated_bytes'] / GIB:5.1f} GiB "
        f"({then['device_bytes'] / real['allocated_bytes'] - 1:+5.1%}), started in "
        f"{real['start_seconds']:.0f} s, {row['replayed']} blocks replayed{', held out' * row['held_out']}"
    )


# ---------------------------------------------------------------------- plain PyTorch


def clipped_step(model: nn.Module, job: anyfit.Job, batch: Any, clip: Callable[[], object], autocast: bool) -> Tensor:
    moved = map_tensors(batch, lambda each: each.to("cuda", non_blocking=True))
    if not autocast:
        moved = map_tensors(moved, lambda each: each.bfloat16() if each.dtype.is_floating_point else each)
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        given: Any = job.loss(model, moved)
    loss: Tensor = given[0] / given[1] if isinstance(given, tuple) else given
    loss.backward()
    clip()
    return loss.detach()


def plain_model(job: anyfit.Job, compiled: Sequence[str]) -> nn.Module:
    """Its own modules, these blocks compiled."""
    model = quickly_built(job).build().to("cuda")
    for name in compiled:
        model.get_submodule(name).compile()
    return model


def with_masters(job: anyfit.Job, compiled: Sequence[str]) -> Step:
    """bf16 weights, fp32 masters, fused AdamW on these."""
    model = plain_model(job, compiled)
    trained: list[Tensor] = [each for each in model.parameters() if each.requires_grad]
    masters = [each.detach().float().clone() for each in trained]
    model.to(torch.bfloat16)
    for master in masters:
        master.grad = torch.empty_like(master)
    optimizer = torch.optim.AdamW(masters, 1e-5, fused=True)

    def step(batch: Any) -> Tensor:
        loss = clipped_step(model, job, batch, lambda: clip_grad_norm_(trained, 1.0), autocast=False)
        with torch.no_grad():
            pairs = [(master.grad, each.grad) for master, each in zip(masters, trained, strict=True) if each.grad is not None]
            torch._foreach_copy_([to for to, _ in pairs if to is not None], [of for _, of in pairs])
            optimizer.step()
            torch._foreach_copy_(trained, masters)
        for each in trained:
            each.grad = None
        return loss

    return step


def with_autocast(job: anyfit.Job, compiled: Sequence[str]) -> Step:
    model = plain_model(job, compiled)
    optimizer = adamw(model)

    def step(batch: Any) -> Tensor:
        loss = clipped_step(model, job, batch, lambda: clip_grad_norm_(model.parameters(), 1.0), autocast=True)
        optimizer.step()
        optimizer.zero_grad()
        return loss

    return step


def beside_plain(name: str, graphs: list[Graph], machine: Machine, rounds: int, *, compiled: bool) -> Row:
    family = FAMILIES[name]
    training = family.job()
    numerics: Any = "fast" if compiled else False  # as torch.compile's own, or as eager's
    training = replace(training, clip_norm=1.0, micro_batch=training.batch_size, compile=numerics)
    batch = family.batch_for(training)
    if compiled:
        measure_blocks(training, machine)
    began = time.perf_counter()
    profile = profiled(training, graphs[:1], machine, (1, 1), training.batch_size)
    plan = search(profile, COMPILED_STEPS)
    planned = time.perf_counter() - began
    blocks = [block.name for block in profile.passes[0].blocks if "recompute" in block.choices] if compiled else []
    with anyfit.start(quickly_built(training), plan, machine) as run:
        torch.cuda.reset_peak_memory_stats()
        for _ in range(WARM_UP):
            run.step(batch)
        allocated = torch.cuda.max_memory_allocated()
        steps = {"masters": with_masters(training, blocks), "autocast": with_autocast(training, blocks), "anyfit": run.step}
        seconds: dict[str, list[float]] = {each: [] for each in steps}
        for number in range(rounds + 1):  # the first warms up
            for each, step in steps.items():
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(STEPS_A_ROUND):
                    step(batch)
                torch.cuda.synchronize()
                if number:
                    seconds[each].append((time.perf_counter() - began) / STEPS_A_ROUND)
    plain = min(("masters", "autocast"), key=lambda each: statistics.median(seconds[each]))
    ratio = statistics.median(ours / theirs for ours, theirs in zip(seconds["anyfit"], seconds[plain], strict=True))
    compiles = {"blocks": len(blocks), "ours": len(plan.compiled)}
    real = {"step_seconds": statistics.median(seconds["anyfit"]), "allocated_bytes": allocated}
    found = {"family": name, "compiled": compiles, "plain": plain, "seconds": seconds, "ratio": ratio, "plan_seconds": planned}
    return {**found, "replayed": len(plan.replayed), "measured": real, "predicted_then": predicted(plan)}


def plain_line(row: Row) -> str:
    medians = {each: statistics.median(seconds) for each, seconds in row["seconds"].items()}
    shown = ", ".join(f"{each} {seconds * 1e3:.1f} ms" for each, seconds in medians.items())
    compiled = f", {row['compiled']['ours']} of {row['compiled']['blocks']} blocks compiled" if row["compiled"]["blocks"] else ""
    real, then = row["measured"], row["predicted_then"]
    return (
        f"{row['family']:20} {shown}; anyfit is {row['ratio']:.3f} of {row['plain']}{compiled}; forecast "
        f"{then['step_seconds'] * 1e3:.1f} ms ({then['step_seconds'] / real['step_seconds'] - 1:+.1%}), GPU "
        f"{real['allocated_bytes'] / GIB:.1f} GiB ({then['device_bytes'] / real['allocated_bytes'] - 1:+.1%}), "
        f"{row['replayed']} blocks replayed, planned in {row['plan_seconds']:.0f} s"
    )


# ---------------------------------------------------------------------- all of it


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(1.0)


def main() -> None:
    began = time.perf_counter()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="*", default=[""], help="those whose names have one of these words")
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--compiled", action="store_true", help="with --plain: the blocks of both")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1e9, help="begin nothing after so long")
    parser.add_argument("--into", type=Path, help="rows so far; new ones are added")
    parser.add_argument("--traces", type=Path, help="a folder of what was traced; new ones are added")
    parser.add_argument("--timelines", type=Path, help="a folder, for a trace file of three steps of each job")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    rows: list[Row] = json.loads(options.into.read_text()) if options.into and options.into.exists() else []
    known = {row.get("job", row["family"]) for row in rows}
    asked = (name for name in (FAMILIES if options.plain else JOBS) if any(word in name for word in options.jobs))
    names = [name for name in asked if name not in known]
    families = list(dict.fromkeys(name.partition(",")[0] for name in names))
    traces = traced_families(families, options.traces)
    machine = anyfit.probe()
    for name in names:
        if time.perf_counter() - began > options.seconds:
            print(f"{name} and those after it were not begun: {options.seconds:.0f} s are over", flush=True)
            break
        try:
            if options.plain:
                row = beside_plain(name, traces[name], machine, options.rounds, compiled=options.compiled)
            else:
                row = row_of(JOBS[name], traces[JOBS[name].family], machine, options.timelines)
        except (RuntimeError, MemoryError, ValueError, anyfit.NoPlan) as error:
            row = {"job": name, "family": name.partition(",")[0], "error": f"{type(error).__name__}: {str(error)[:300]}"}
        rows.append(row)
        print(f"{time.perf_counter() - began:4.0f} s  {plain_line(row) if 'ratio' in row else line_of(row)}", flush=True)
        free()
        if options.into:
            options.into.write_text(json.dumps(rows, indent=1) + "\n")
        if options.record:
            question = "beside-plain" + "-compiled" * options.compiled if options.plain else "families"
            record.write(question, {"rows": rows}, machine)


if __name__ == "__main__":
    main()
