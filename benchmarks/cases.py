"""The training steps that forecasts are held to: name -> Job, by configuration alone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

import anyfit
from anyfit import demo


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # a Hugging Face model type, or "demo"
    batch: int
    length: int = 0  # tokens a sample, for models of text
    precision: str = "bf16"
    recompute: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # of the configuration
    calibrates: bool = False  # cost-model constants may be fitted to it; the others are held out

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def roughness(self) -> dict[str, str]:
        """What a recorded row says of a case whose passes the curves price badly: why."""
        return {"rough": ROUGH[self.kind]} if self.kind in ROUGH else {}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> Case:
        return cls(**document)


ROUGH = {
    "resnet": "convolutions, which no curve knows well",
    "convnext": "convolutions, which no curve knows well",
    "mixtral": "routed experts, which no curve knows well",
}


def llama(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": heads // 4,
        "intermediate_size": 4 * hidden,
        "max_position_embeddings": 8192,
        **more,
    }


def gpt2(layers: int, hidden: int, heads: int, **more: Any) -> dict[str, Any]:
    return {"n_layer": layers, "n_embd": hidden, "n_head": heads, **more}


NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
GPT2_4B = gpt2(32, 3072, 24, **NO_DROPOUT)
LLAMA_1B = llama(16, 2048, 32)
QWEN3 = {"num_hidden_layers": 28, "hidden_size": 1024, "intermediate_size": 3072, "num_attention_heads": 16}
QWEN3 |= {"num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}
BERT_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
T5_LARGE = {"d_model": 1024, "d_ff": 4096, "num_layers": 24, "num_heads": 16}
VIT_LARGE = {"num_hidden_layers": 24, "hidden_size": 1024, "num_attention_heads": 16, "intermediate_size": 4096}
MIXTRAL = llama(8, 1024, 16, num_local_experts=8, intermediate_size=2048)

CASES = (
    Case("gpt2-small", "gpt2", 16, 1024, calibrates=True),
    Case("gpt2-small-fp32", "gpt2", 8, 512, "fp32"),
    Case("gpt2-medium", "gpt2", 16, 1024, options=gpt2(24, 1024, 16)),
    Case("gpt2-xl", "gpt2", 8, 1024, options=gpt2(48, 1600, 25)),
    Case("gpt2-xl-recompute", "gpt2", 16, 1024, recompute=True, options=gpt2(48, 1600, 25)),
    Case("gpt2-4b", "gpt2", 8, 1024, options=GPT2_4B, calibrates=True),
    Case("gpt2-4b-recompute", "gpt2", 8, 1024, recompute=True, options=GPT2_4B),
    Case("llama-1b", "llama", 4, 2048, options=LLAMA_1B, calibrates=True),
    Case("llama-1b-recompute", "llama", 4, 4096, recompute=True, options=LLAMA_1B),
    Case("llama-1b-fp32", "llama", 2, 1024, "fp32", options=LLAMA_1B),
    Case("llama-3b", "llama", 4, 2048, options=llama(28, 3072, 24)),
    Case("qwen3-0.6b", "qwen3", 16, 1024, options=QWEN3),
    Case("qwen3-0.6b-recompute", "qwen3", 8, 2048, recompute=True, options=QWEN3),
    Case("bert-base", "bert", 256, 128, calibrates=True),
    Case("bert-large", "bert", 32, 512, options=BERT_LARGE),
    Case("bert-base-fp32", "bert", 16, 512, "fp32"),
    Case("t5-base", "t5", 32, 512, options={"d_model": 768, "d_ff": 3072, "num_layers": 12, "num_heads": 12}),
    Case("t5-large-recompute", "t5", 32, 512, recompute=True, options=T5_LARGE),
    Case("vit-base", "vit", 128, calibrates=True),
    Case("vit-large", "vit", 128, options=VIT_LARGE),
    Case("vit-base-fp32", "vit", 64, precision="fp32"),
    Case("mixtral-small", "mixtral", 16, 1024, options=MIXTRAL),
    Case("mixtral-small-long", "mixtral", 8, 4096, options=MIXTRAL),
    Case("resnet50", "resnet", 128, calibrates=True),
    Case("resnet50-fp32", "resnet", 64, precision="fp32"),
    Case("convnext-tiny", "convnext", 256),
    Case("plain-gpt", "demo", 64, 512, options={"width": 768, "layers": 12, "heads": 12}),
    Case("plain-gpt-wide", "demo", 16, 1024, options={"width": 2048, "layers": 8, "heads": 16}, calibrates=True),
    Case("plain-gpt-fp32", "demo", 64, 256, "fp32", options={"width": 512, "layers": 8, "heads": 8}),
)

GEMMA3_1B = {"num_hidden_layers": 26, "hidden_size": 1152, "intermediate_size": 6912, "num_attention_heads": 4}
GEMMA3_1B |= {"num_key_value_heads": 1, "vocab_size": 262144, "sliding_window": 512, "max_position_embeddings": 32768}
# Steps that are many small ops, which the launching host bounds. benchmarks/planned.py has them, and no constant is held to them.
SMALL_OPS = (
    Case("gpt2-xl-short", "gpt2", 4, 512, options=gpt2(48, 1600, 25, n_positions=512, **NO_DROPOUT)),
    Case("gemma3-1b", "gemma3_text", 4, 1024, options=GEMMA3_1B),
)


def is_alike(row: Mapping[str, Any]) -> bool:
    """Whether a recorded row's model is the same under this version of transformers."""
    needs = row.get("only_with")
    return needs is None or bool(needs["transformers"] == version("transformers"))


def models_own_loss(model: nn.Module, batch: Mapping[str, Any]) -> torch.Tensor:
    """With whole logits, as benchmarks/profiler.py recorded it, and not in slices as `Job.from_huggingface` has it."""
    value: torch.Tensor = model(**batch).loss
    return value


def job_of(case: Case) -> anyfit.Job:
    """The case as a job that runs its batch in one pass."""
    torch_options: dict[str, Any] = {"precision": case.precision, "micro_batch": case.batch, "clip_norm": 1.0}
    if case.kind == "demo":
        return anyfit.Job(
            model=lambda: demo.GPT(length=case.length, **case.options),
            loss=demo.loss,
            optimizer=demo.optimizer,
            sample=torch.zeros(case.batch, case.length + 1, dtype=torch.long),
            batch_size=case.batch,
            **torch_options,
        )
    from transformers import AutoConfig

    config = AutoConfig.for_model(case.kind, **case.options)
    job = anyfit.Job.from_huggingface(
        config, batch_size=case.batch, length=case.length or None, loss=models_own_loss, **torch_options
    )
    if not case.recompute:
        return job

    def recomputing() -> nn.Module:
        model: Any = job.build()
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        return model  # type: ignore[no-any-return]

    return anyfit.Job(**{**vars(job), "model": recomputing})
