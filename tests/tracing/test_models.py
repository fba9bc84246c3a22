"""Models as people train them, from their configuration alone: what a trace forecasts beside the closed formula, a trace of every
layer, and a real pass."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AutoConfig

import anyfit
from anyfit.tracing.recorder import NotPeriodic
from anyfit.tracing.repeats import find_repeats
from anyfit.tracing.trace import trace, trace_fake
from anyfit.values.graph import Graph
from tests.models import Convolutional, Tangled, byte_batches, image_batches, image_loss, next_byte_loss, tiny_gpt
from tests.tracing.test_trace import really_live

ROWS, LENGTH, VOCABULARY = 2, 64, 128
Device = Literal["cpu", "cuda"]

DECODER = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
DECODER |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": VOCABULARY, "pad_token_id": 0}
DECODER |= {"bos_token_id": 0, "eos_token_id": 0}
ENCODER = {"num_hidden_layers": 8, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
WHISPER = {f"{side}_{what}": size for side in ("encoder", "decoder") for what, size in (("layers", 8), ("attention_heads", 4))}
WHISPER |= {"encoder_ffn_dim": 128, "decoder_ffn_dim": 128, "d_model": 64, "max_source_positions": 64}
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}

# As small as they go with every kind of layer in them, and as deep as it takes for repetition to be made use of.
CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_layer": 8, "n_embd": 64, "n_head": 4, "n_positions": LENGTH, "attn_pdrop": 0.0, **TOKENS},
    "llama": DECODER,
    "qwen3": DECODER,
    "gemma3_text": DECODER
    | {"num_hidden_layers": 12, "sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"] * 6},
    "bert": ENCODER | {"vocab_size": VOCABULARY},
    "t5": {"num_layers": 8, "d_model": 64, "d_kv": 16, "d_ff": 128, "num_heads": 4, "vocab_size": VOCABULARY},
    "vit": ENCODER | {"image_size": 64, "patch_size": 8},
    "mixtral": DECODER | {"num_local_experts": 4},
    "mamba": {"num_hidden_layers": 8, "hidden_size": 32, "state_size": 4, **TOKENS},
    "convnext": {"hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 9, 2], "image_size": 64},
    "whisper": {**WHISPER, **TOKENS, "decoder_start_token_id": 0},
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 32, 64], "depths": [2, 2, 8, 2], "layer_type": "basic"},
}
SLOW = {"qwen3", "gemma3_text", "t5", "mamba", "whisper"}
OWN = ("wandering", "tiny_gpt", "tangled", "convolutional")
NOT_PERIODIC = {"wandering"}  # what it computes between its blocks goes into the next: it is traced in full


def shared_out(*names: str) -> list[Any]:
    """The quick models in every run of the tests, the slow ones in the full tier."""
    return [pytest.param(name, marks=pytest.mark.full if name in SLOW else ()) for name in names]


class Wandering(nn.Module):
    """Python control flow, tied weights, a parameter no batch uses, and blocks that are built alike but not run alike."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, 32)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)) for _ in range(8))
        self.rarely = nn.Linear(32, 32)
        self.unused = nn.Parameter(torch.zeros(7))
        self.head = nn.Linear(32, 256, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for index, block in enumerate(self.blocks):
            x = x + block(x) if index % 3 else block(F.layer_norm(x, (32,)))
            if index > 5:
                break
        if ids.shape[1] > 1000:
            x = self.rarely(x)
        while x.dim() < 4:
            x = x.unsqueeze(0)
        return self.head(x.squeeze(0))


@functools.cache
def job_for(name: str, precision: Literal["fp32", "bf16"] = "fp32") -> anyfit.Job:
    if name in OWN:
        made: dict[str, Callable[[], nn.Module]] = {"tiny_gpt": tiny_gpt, "tangled": Tangled, "convolutional": Convolutional}
        return anyfit.Job(
            model=made.get(name, Wandering),
            loss=image_loss if name == "convolutional" else next_byte_loss,
            optimizer=lambda model: torch.optim.AdamW([each for each in model.parameters() if each.requires_grad]),
            sample=image_batches(1, ROWS)[0] if name == "convolutional" else byte_batches(1, ROWS)[0],
            batch_size=ROWS,
            precision=precision,
        )
    config = AutoConfig.for_model(name, **CONFIGURATIONS[name])
    length = 16 if name == "mamba" else LENGTH  # its layers loop over the tokens in Python
    return anyfit.Job.from_huggingface(config, batch_size=ROWS, length=length, precision=precision)


def recomputing(job: anyfit.Job) -> anyfit.Job:
    def make() -> nn.Module:
        model: Any = job.build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    return replace(job, model=make)


def in_full(job: anyfit.Job, device: Device) -> Graph:
    return trace_fake(job, [ROWS], device, lambda _blocks: [])[0]


@pytest.mark.parametrize("name", shared_out(*CONFIGURATIONS, "wandering"))
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.full)])
def test_what_repetition_writes_in_is_what_a_trace_of_every_layer_finds(name: str, device: Device) -> None:
    job = job_for(name, "bf16" if device == "cuda" else "fp32")
    if name in NOT_PERIODIC:
        with pytest.raises(NotPeriodic):
            trace_fake(job, [ROWS], device, find_repeats)
        short = trace(job, ROWS, device)
    else:
        found: list[Any] = []
        short = trace_fake(job, [ROWS], device, lambda blocks: found.extend(find_repeats(blocks)) or found)[0]
        assert found
    full = in_full(job, device)
    assert short.ops == full.ops
    assert short.parameters == full.parameters

    def sorted_values(graph: Graph) -> list[tuple[Any, ...]]:
        return sorted(
            (value.born, value.dies, value.bytes, value.kind, value.block, value.reads, value.writes) for value in graph.values
        )

    assert sorted_values(short) == sorted_values(full)
    assert replace(short, values=full.values) == full
    assert all(value.born <= moment <= value.dies for value in short.values for moment in (*value.reads, *value.writes))


@pytest.mark.parametrize("name", shared_out(*CONFIGURATIONS, *OWN))
def test_the_bytes_of_parameters_and_gradients_are_the_models(name: str) -> None:
    job = job_for(name)
    graph = trace(job, ROWS)
    model = job.build()
    bytes_of = {each: parameter.numel() * job.dtypes(model)[each].itemsize for each, parameter in model.named_parameters()}
    traced = {each.name: each.elements * getattr(torch, each.dtype).itemsize for each in graph.parameters}
    assert traced == bytes_of
    gradients = sum(value.bytes for value in graph.values if value.kind == "gradient")
    assert gradients == sum(traced[each.name] for each in graph.parameters if each.used)


def test_the_unused_parameter_and_the_tie_of_a_plain_module_are_seen() -> None:
    by_name = {each.name: each for each in trace(job_for("wandering"), ROWS).parameters}
    assert {name for name, each in by_name.items() if not each.used} == {
        "unused",
        *(f"{module}.{what}" for module in ("rarely", "blocks.7.0", "blocks.7.2") for what in ("weight", "bias")),
    }
    assert by_name["embed.weight"].names == ("embed.weight", "head.weight")


# ---------------------------------------------------------------------- FLOPs


def matmul_weights(name: str) -> int:
    """Weights that every token is multiplied with."""
    hidden, layers = 64, 8
    if name == "gpt2":
        return layers * 12 * hidden**2 + hidden * VOCABULARY
    keys_and_values = 2 * hidden * (2 * 16)  # two heads of 16
    return layers * (2 * hidden**2 + keys_and_values + 3 * hidden * 128) + hidden * VOCABULARY


@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_flops_are_those_of_the_closed_formula(name: str, device: Device) -> None:
    graph = trace(job_for(name, "bf16" if device == "cuda" else "fp32"), ROWS, device)
    products = 2 * ROWS * LENGTH * matmul_weights(name)
    attention = 8 * 2 * 2 * ROWS * LENGTH**2 * 64  # scores and mixing of every layer, the masked half counted too
    head = 2 * ROWS * LENGTH * 64 * VOCABULARY  # whose loss, in slices, makes its gradients in forward
    # backward: two products for each of forward's; for attention five, since the scores are made again
    for phase, flops in (
        ("forward", products + attention + 2 * head),
        ("backward", 2 * (products - head) + 5 * attention / 2),
    ):
        assert sum(op.flops for op in graph.ops if op.phase == phase) == pytest.approx(flops, rel=0.01)
    counted = sum(op.flops for op in graph.ops if op.kind == "attention")
    assert counted == pytest.approx(7 * attention / 2, rel=0.01)


# ---------------------------------------------------------------------- the live peak


def traced_peak(job: anyfit.Job) -> int:
    graph = trace(job, ROWS)
    return max(graph.live_bytes("kept")) - sum(value.bytes for value in graph.values if value.kind == "input")


@pytest.mark.parametrize("name", shared_out(*CONFIGURATIONS, *OWN))
def test_the_live_peak_is_that_of_a_real_pass(name: str) -> None:
    job = job_for(name)
    assert traced_peak(job) == pytest.approx(really_live(job), rel=0.01)


@pytest.mark.parametrize("name", shared_out(*sorted(CONFIGURATIONS.keys() - {"convnext", "resnet"})))  # they cannot
def test_the_live_peak_is_that_of_a_real_pass_when_the_model_recomputes(name: str) -> None:
    job = recomputing(job_for(name))
    peak = traced_peak(job)
    assert peak == pytest.approx(really_live(job), rel=0.01)
    assert peak < 0.9 * traced_peak(job_for(name))
