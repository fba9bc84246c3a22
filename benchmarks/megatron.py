"""Megatron-LM's runs on A100s in 2021, and its GPT op by op, for benchmarks/published.py. The model is priced, and never trained.

attention   unfused: scores, softmax, dropout and context are ops of their own, and each reads and writes all scores
softmax     theirs scales, masks and normalises in one kernel; so the softmax here stands for all three, and nothing else is
            done to the scores
bias, GeLU  theirs are one kernel; here the product adds the bias, which is as many bytes
dropout     0.1, of scores and of what is added to the residual; theirs adds that in the same kernel, and here it is an op of
            its own: 11 bytes of an element instead of 7, of what is small beside the scores
layout      the sequence comes first, as theirs, so that heads are views and only the context is copied
loss        of whole logits in fp32; the head is the embedding
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

import anyfit
from anyfit import Machine, Plan
from anyfit.costing.links import Links
from anyfit.forcing import kept_to
from anyfit.meshing import Axes
from anyfit.pipelining import sends_of
from anyfit.planning.meshes import MeshChoice, search_meshes
from anyfit.profiling import meshes_of, staged
from anyfit.values.division import Exchange
from anyfit.values.forced import Forced

LENGTH, WORDS, DROPOUT = 2048, 51200, 0.1


@dataclass(frozen=True)
class Shape:
    heads: int
    width: int
    layers: int

    @property
    def parameters(self) -> int:
        """As the paper counts them: 12 l h^2 (1 + 13 / (12 h) + (V + s) / (12 l h))."""
        return 12 * self.layers * self.width**2 + 13 * self.layers * self.width + (WORDS + LENGTH) * self.width

    def flops(self, samples: int) -> float:
        """Of a step that recomputes every block, as the paper counts them: 96 B s l h^2 (1 + s / (6 h) + V / (16 l h))."""
        more = LENGTH / (6 * self.width) + WORDS / (16 * self.layers * self.width)
        return 96 * samples * LENGTH * self.layers * self.width**2 * (1 + more)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.norm_attention = nn.LayerNorm(shape.width)
        self.queries_keys_values = nn.Linear(shape.width, 3 * shape.width)
        self.mix = nn.Linear(shape.width, shape.width)
        self.norm_think = nn.LayerNorm(shape.width)
        self.widen = nn.Linear(shape.width, 4 * shape.width)
        self.narrow = nn.Linear(4 * shape.width, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + F.dropout(self.mix(self.attention(self.norm_attention(x))), DROPOUT)
        return x + F.dropout(self.narrow(F.gelu(self.widen(self.norm_think(x)))), DROPOUT)

    def attention(self, x: Tensor) -> Tensor:
        length, batch, width = x.shape
        packed = self.queries_keys_values(x).view(length, batch * self.heads, 3 * width // self.heads)
        queries, keys, values = (each.transpose(0, 1) for each in packed.chunk(3, -1))
        shares = F.dropout(torch.softmax(queries @ keys.transpose(1, 2), -1), DROPOUT)
        return (shares @ values).transpose(0, 1).reshape(length, batch, width)


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, shape.width)
        self.places = nn.Embedding(LENGTH, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, WORDS, bias=False)
        self.head.weight = self.words.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.words(ids.t()) + self.places(torch.arange(ids.shape[1], device=ids.device)).unsqueeze(1)
        x = F.dropout(x, DROPOUT)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def loss(model: nn.Module, ids: Tensor) -> Tensor:
    logits: Tensor = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].t().flatten())


@dataclass(frozen=True)
class Run:
    """Of table 1: full recomputation, no state sharded, no sequence parallelism; interleaved where a rank has several stages."""

    name: str
    shape: Shape
    tensor: int
    pipeline: int
    gpus: int
    samples: int  # of a step, on all GPUs
    published: float
    micro_batch: int
    stages_a_rank: int = 1
    unit = "TFLOP/s"
    tolerance = 0.20

    @property
    def data(self) -> int:
        return self.gpus // (self.tensor * self.pipeline)

    @property
    def lengths(self) -> dict[str, int]:
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.pipeline}

    @property
    def machine(self) -> Machine:
        return Machine.load("a100-node").with_devices(8, self.gpus // 8)

    @property
    def job(self) -> anyfit.Job:
        return anyfit.Job(
            model=lambda: GPT(self.shape),
            loss=loss,
            optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-4),
            sample=torch.zeros(1, LENGTH + 1, dtype=torch.long),
            batch_size=self.samples,
            clip_norm=1.0,
        )

    @property
    def said(self) -> str:
        axes = " x ".join(f"{length} {name}" for name, length in self.lengths.items() if length > 1)
        stages = f", {self.stages_a_rank} stages a rank" if self.stages_a_rank > 1 else ""
        return f"{axes}{stages}, micro-batch {self.micro_batch}, all recomputed"

    def rate(self, seconds: float) -> float:
        """TFLOP/s of a GPU, recomputation counted."""
        return self.shape.flops(self.samples) / seconds / self.gpus / 1e12

    def configured(self, room: str) -> Plan:
        """With nothing left to choose, in any memory up to `room`."""
        machine = self.machine.as_if(device_memory=room)
        job, grid = replace(self.job, micro_batch=self.micro_batch), machine.rank_grid()
        axes = Axes.of(self.lengths, "megatron" if self.tensor > 1 else None)
        forced = Forced(activations="recompute", shard="none")
        if axes.has_stages:
            forced = replace(forced, chunks=self.stages_a_rank)
            meshes = [self._sending(each, machine) for each in staged(job, machine, grid, axes, divides_words=True)]
        else:
            meshes = meshes_of(job, machine, grid, axes)
        return search_meshes(kept_to(meshes, forced), asked=True)

    def _sending(self, mesh: MeshChoice, machine: Machine) -> MeshChoice:
        """Each rank of a tensor axis sends its part of what the next stage reads, which is gathered there (section 4.1)."""
        assert mesh.pipeline is not None
        pipeline = mesh.pipeline()
        gather = Links(machine, *machine.rank_grid()).cost("all_gather", self.tensor)
        sends = tuple(
            Exchange(each.latency_seconds + gather.latency_seconds, each.seconds_per_byte / self.tensor + gather.seconds_per_byte)
            for each in sends_of(machine, machine.rank_grid(), pipeline.ranks)
        )
        return replace(mesh, pipeline=lambda: replace(pipeline, sends=sends))


# Micro-batches and stages a rank are of its authors' scripts (Megatron-LM, examples/sc21/run_table_1.sh), all else of the paper.
RUNS = (
    Run("GPT 1.7B", Shape(24, 2304, 24), 1, 1, 32, 512, 137, micro_batch=16),
    Run("GPT 7.5B", Shape(32, 4096, 36), 4, 1, 128, 512, 142, micro_batch=16),
    Run("GPT 18.4B", Shape(48, 6144, 40), 8, 1, 256, 1024, 135, micro_batch=8),
    Run("GPT 76.1B", Shape(80, 10240, 60), 8, 4, 1024, 1792, 140, micro_batch=2, stages_a_rank=3),
    Run("GPT 310.1B", Shape(128, 16384, 96), 8, 16, 1920, 2160, 155, micro_batch=1, stages_a_rank=2),
    Run("GPT 1008B", Shape(160, 25600, 128), 8, 64, 3072, 3072, 163, micro_batch=1),
)
