"""torchtitan's runs of Llama in 2024, for benchmarks/published.py, with what its code does and a plan of anyfit's does not.

norms       each run's preset said which: `rmsnorm`, op by op in fp32, or `fused_rmsnorm`, one kernel. A layer norm without bias
            reads, writes and keeps the same bytes as the latter
selective   of each block the results of attention and of every second product stay, and all else is recomputed: of the seven
            products those of keys, of attention's output and of the gate's partner run again
loss        of whole logits in fp32, and here in slices, as of any job of a Hugging Face model
FSDP2       gathers weights into one buffer, and copies each from there: 4 bytes a parameter and gather, read and written
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from torch import nn

import anyfit
from anyfit import Machine, Plan
from anyfit.costing.times import op_seconds
from anyfit.planning.forcing import held_to
from anyfit.planning.meshes import MeshChoice, search_meshes
from anyfit.profiling import profiled, traced
from anyfit.values.forced import Activation, Forced
from anyfit.values.graph import Graph
from anyfit.values.machine import Curve, Figure
from anyfit.values.profile import BlockCost, ChoiceCost, Pass, Profile, Segment
from anyfit.values.timing import Timing

SIZES = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "intermediate_size", "vocab_size")
SHAPES = {
    "llama3-8b": dict(zip(SIZES, (32, 4096, 32, 8, 14336, 128256), strict=True)),
    "llama2-13b": dict(zip(SIZES, (40, 5120, 40, 40, 13824, 32000), strict=True)),
    "llama3-70b": dict(zip(SIZES, (80, 8192, 64, 8, 28672, 128256), strict=True)),
}
COPIED_BYTES = 4  # of a bf16 parameter, read and written
SHARE_STEPS = 10  # that halve what is left open of the H100s' share


def job_of(shape: Mapping[str, int], length: int, samples: int, *, fused_norms: bool) -> anyfit.Job:
    from transformers import AutoConfig

    config = AutoConfig.for_model("llama", **shape, max_position_embeddings=length, tie_word_embeddings=False)
    job = anyfit.Job.from_huggingface(config, batch_size=samples, length=length, clip_norm=1.0)
    return replace(job, model=lambda: _with_fused_norms(job.build())) if fused_norms else job


def _with_fused_norms(model: nn.Module) -> nn.Module:
    found = [(path, each) for path, each in model.named_modules() if type(each).__name__ == "LlamaRMSNorm"]
    for path, norm in found:
        weight: Any = norm.weight
        parent, _, name = path.rpartition(".")
        setattr(
            model.get_submodule(parent), name, nn.LayerNorm(len(weight), bias=False, device=weight.device, dtype=weight.dtype)
        )
    return model


@dataclass(frozen=True)
class Run:
    """All state sharded over all GPUs, the local batch in one pass."""

    name: str
    shape: str  # of SHAPES
    length: int
    gpus: int
    micro_batch: int  # a GPU's batch
    activations: Activation
    published: float
    tolerance: float
    fused_norms: bool = False
    is_slower_h100: bool = False
    unit = "tokens/s"

    @property
    def samples(self) -> int:
        return self.gpus * self.micro_batch

    @property
    def machine(self) -> Machine:
        if self.is_slower_h100:
            return slower_h100s(h100_share(), self.gpus // 8)
        return Machine.load("a100-node").with_devices(8, self.gpus // 8)

    @property
    def job(self) -> anyfit.Job:
        return job_of(SHAPES[self.shape], self.length, self.samples, fused_norms=self.fused_norms)

    @property
    def said(self) -> str:
        words = {"keep": "nothing", "selective": "selectively", "recompute": "all"}
        return f"FSDP over {self.gpus}, local batch {self.micro_batch}, {words[self.activations]} recomputed"

    def rate(self, seconds: float) -> float:
        """Tokens a second and GPU."""
        return self.micro_batch * self.length / seconds

    def configured(self, room: str) -> Plan:
        """With nothing left to choose, in any memory up to `room`."""
        return self.on(self.machine, room)

    def on(self, machine: Machine, room: str) -> Plan:
        graphs = graphs_of(self)
        machine, job = machine.as_if(device_memory=room), replace(self.job, micro_batch=self.micro_batch)
        profile = profiled(job, graphs, machine, machine.rank_grid(), self.samples, 0.0)
        found = as_it_ran(profile, {each.micro_batch: each for each in graphs}, machine)
        forced = Forced(activations=self.activations, shard="all")
        return search_meshes([MeshChoice.of(held_to(found, forced))], asked=True)


@cache
def graphs_of(run: Run) -> list[Graph]:
    return traced(replace(run.job, micro_batch=run.micro_batch), "cuda", run.gpus)


# A100 rows and their norms: docs/performance.md, and presets in train_configs of spring 2024. H100s: the December report.
RUNS = (
    Run("Llama 3 8B", "llama3-8b", 8192, 64, 1, "selective", 2973, 0.08),
    Run("Llama 2 13B", "llama2-13b", 4096, 64, 2, "keep", 2162, 0.08, fused_norms=True),
    Run("Llama 3 70B", "llama3-70b", 8192, 64, 1, "recompute", 331, 0.08),
    Run("Llama 3.1 8B", "llama3-8b", 8192, 8, 2, "selective", 5762, 0.01, is_slower_h100=True),
    Run("Llama 3.1 8B", "llama3-8b", 8192, 128, 2, "selective", 5605, 0.10, is_slower_h100=True),
)
FITTED = next(run for run in RUNS if run.is_slower_h100)  # what no datasheet prints of its cards is taken from it


# ---------------------------------------------------------------------- what its code does


def as_it_ran(profile: Profile, graphs: Mapping[int, Graph], machine: Machine) -> Profile:
    """`graphs`: by micro-batch."""
    return replace(profile, passes=tuple(_pass(each, graphs[each.micro_batch], machine) for each in profile.passes))


def _pass(each: Pass, graph: Graph, machine: Machine) -> Pass:
    again = _every_second_product(graph, machine)
    rate = machine.device.memory.peak / machine.device.calibration.curve_slowdown.value
    blocks = tuple(_block(block, *again.get(index, (0.0, 0))) for index, block in enumerate(each.blocks))
    copies = [COPIED_BYTES * block.parameters / rate for block in each.blocks]
    stretches: dict[tuple[int, str], int] = {}
    for segment in each.segments:
        stretches[segment.block, segment.phase] = stretches.get((segment.block, segment.phase), 0) + 1
    segments = (_later(one, copies[one.block] / stretches[one.block, one.phase]) for one in each.segments)
    return replace(each, blocks=blocks, segments=tuple(segments))


def _later(segment: Segment, seconds: float) -> Segment:
    timing = None if segment.timing is None else Timing.on_device(seconds).then(segment.timing)
    return replace(segment, seconds=segment.seconds + seconds, timing=timing)


def _block(block: BlockCost, seconds: float, size: int) -> BlockCost:
    """Recomputed selectively, with so many seconds more and so many bytes less."""
    if "selective" not in block.choices:
        return block
    known = block.choices["selective"]
    timing = None if known.timing is None else known.timing.then(Timing.on_device(seconds))
    selective = ChoiceCost(known.kept_bytes - size, known.moved_bytes, known.seconds + seconds, timing)
    return replace(block, choices={**block.choices, "selective": selective})


def _every_second_product(graph: Graph, machine: Machine) -> dict[int, tuple[float, int]]:
    """By block: seconds of its forward, and the bytes that they give."""
    found: dict[int, tuple[float, int]] = {}
    products: dict[int, list[int]] = {}
    for index, op in enumerate(graph.ops):
        if op.phase == "forward" and op.name == "mm.default" and graph.blocks[op.block].name:
            products.setdefault(op.block, []).append(index)
    seconds = op_seconds(graph, machine)
    given = {value.born: value.bytes for value in graph.values if value.kind == "activation"}
    for block, indices in products.items():
        second = indices[1::2]
        found[block] = sum(seconds[index][1] for index in second), sum(given.get(index, 0) for index in second)
    return found


# ---------------------------------------------------------------------- its H100s


def slower_h100s(share: float, nodes: int) -> Machine:
    """Cards with 96 GB of HBM2e at 2.4 TB/s and 500 W, where the preset's have HBM3 at 3.35 TB/s and 700 W: what their products
    and attention reach is not printed, and `share` of the preset's here."""
    machine = Machine.load("h100-node").with_devices(8, nodes)
    device, where = machine.device, "torchtitan, benchmarks/llama3_h100_202412_torchtitan.md: 96 GB HBM2e, 2.4 TB/s"

    def curves(known: Mapping[str, Curve], times: float) -> dict[str, Curve]:
        return {name: _times(curve, times) for name, curve in known.items()}

    device = replace(
        device,
        name="NVIDIA H100 96GB HBM2e, 500 W",
        memory_bytes=Figure(0.985 * 96e9, 0.01, f"datasheet: {where}; x0.985, the part that CUDA shows"),
        memory=_times(device.memory, 2.4 / 3.35),
        operations=curves(device.operations, 2.4 / 3.35),
        **{
            name: curves(getattr(device, name), share)
            for name in ("matmul", "matmul_unaligned", "attention", "attention_backward")
        },
    )
    return replace(machine, name="h100-hbm2e-node", device=device)


def _times(curve: Curve, times: float) -> Curve:
    return replace(curve, points=tuple((size, times * rate) for size, rate in curve.points))


@cache
def h100_share() -> float:
    """Taken from the run on 8 of these cards: with what share its forecast is what was published."""
    low, high = 0.5, 1.0
    for _ in range(SHARE_STEPS):
        share = (low + high) / 2
        seconds = FITTED.on(slower_h100s(share, FITTED.gpus // 8), "1TiB").forecast.step_seconds
        low, high = (low, share) if FITTED.rate(seconds) > FITTED.published else (share, high)
    return high
