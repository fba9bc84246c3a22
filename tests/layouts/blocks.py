"""One block of each of many models, with the arguments that its model calls it with. All sizes divide by 2, 3 and 4."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

ROWS, LENGTH, HIDDEN, HEADS, VOCABULARY = 12, 24, 48, 12, 96
DROPPING = ", dropping"
TOKENS = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
DECODER = {
    "hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS,
    "num_key_value_heads": HEADS, "head_dim": 4, "max_position_embeddings": 64, "use_cache": False, **TOKENS,
}  # fmt: skip
ENCODER = {"hidden_size": HIDDEN, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": HEADS}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "experts_implementation": "batched_mm"}
IMAGES = {"image_size": 32, "patch_size": 8, "num_channels": 3}


class Called(NamedTuple):
    block: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def fresh(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments with gradients of their own."""
        leaf: Callable[[Any], Any] = lambda each: (  # noqa: E731
            each.detach().clone().requires_grad_(each.requires_grad) if isinstance(each, Tensor) else each
        )
        return torch.utils._pytree.tree_map(leaf, (self.args, self.kwargs))  # type: ignore[no-any-return]


def _tokens(count: int = LENGTH) -> Tensor:
    return torch.randint(3, VOCABULARY, (ROWS, count), generator=torch.Generator().manual_seed(1))


def _padded() -> dict[str, Tensor]:
    mask = torch.ones(ROWS, LENGTH, dtype=torch.long)
    mask[::2, LENGTH // 2 :] = 0
    return {"input_ids": _tokens(), "attention_mask": mask}


def _images() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(ROWS, 3, 32, 32, generator=torch.Generator().manual_seed(1))}


def _halves() -> dict[str, Tensor]:
    return {"input_ids": _tokens(), "decoder_input_ids": _tokens()}


def _sound() -> dict[str, Tensor]:
    features = torch.randn(ROWS, 12, 2 * LENGTH, generator=torch.Generator().manual_seed(1))
    return {"input_features": features, "decoder_input_ids": _tokens()}


def _words() -> dict[str, Tensor]:
    return {"input_ids": _tokens()}


def _few_words() -> dict[str, Tensor]:
    return {"input_ids": _tokens(12)}


class Family(NamedTuple):
    model: str
    kind: str
    options: dict[str, Any]
    path: str  # of the block
    batch: Callable[[], dict[str, Tensor]] = _words


GPT2 = {"n_layer": 2, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": 64, "use_cache": False, **TOKENS}
STILL = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
T5 = {
    "d_model": HIDDEN,
    "d_kv": 4,
    "d_ff": 96,
    "num_layers": 2,
    "num_heads": HEADS,
    "use_cache": False,
    "dropout_rate": 0.0,
    **TOKENS,
}
WHISPER = {
    "d_model": HIDDEN, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": HEADS,
    "decoder_attention_heads": HEADS, "encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "num_mel_bins": 12,
    "max_source_positions": LENGTH, "max_target_positions": 48,
    "use_cache": False, "dropout": 0.0, "decoder_start_token_id": 1, **TOKENS,
}  # fmt: skip
NO_DROPOUT = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
FAMILIES: dict[str, Family] = {
    "gpt2": Family("GPT2Model", "gpt2", {**GPT2, **STILL}, "h.1"),
    "gpt2, dropout": Family("GPT2Model", "gpt2", GPT2, "h.1"),
    "gpt2, eager attention": Family("GPT2Model", "gpt2", {**GPT2, **STILL, "attn_implementation": "eager"}, "h.1"),
    "llama": Family("LlamaModel", "llama", DECODER, "layers.1"),
    "llama, grouped heads": Family("LlamaModel", "llama", {**DECODER, "num_attention_heads": 24}, "layers.1", _padded),
    "qwen3": Family("Qwen3Model", "qwen3", DECODER, "layers.1"),
    "gemma3": Family("Gemma3TextModel", "gemma3_text", {**DECODER, "sliding_window": 8}, "layers.1"),
    "bert": Family("BertModel", "bert", {**ENCODER, **NO_DROPOUT, **TOKENS}, "encoder.layer.1", _padded),
    "t5, encoder": Family("T5Model", "t5", T5, "encoder.block.1", _halves),
    "t5, decoder": Family("T5Model", "t5", T5, "decoder.block.0", _halves),
    "vit": Family("ViTModel", "vit", {**ENCODER, **NO_DROPOUT, **IMAGES}, "layers.1", _images),
    "swin": Family(
        "SwinModel", "swin", {**IMAGES, **NO_DROPOUT, "patch_size": 2, "embed_dim": 24, "depths": [2, 2], "num_heads": [3, 6],
                              "window_size": 4, "drop_path_rate": 0.0}, "encoder.layers.0.blocks.1", _images,
    ),
    "convnext": Family(
        "ConvNextModel", "convnext", {"hidden_sizes": [24, 48], "depths": [2, 2], "num_stages": 2, "patch_size": 2},
        "encoder.stages.0.layers.1", _images,
    ),
    "whisper, encoder": Family("WhisperModel", "whisper", WHISPER, "encoder.layers.1", _sound),
    "whisper, decoder": Family("WhisperModel", "whisper", WHISPER, "decoder.layers.1", _sound),
    "mixtral": Family("MixtralModel", "mixtral", {**DECODER, "num_local_experts": 12, **EXPERTS}, "layers.1", _few_words),
    "qwen3 moe": Family("Qwen3MoeModel", "qwen3_moe", {**DECODER, "num_experts": 12, **EXPERTS}, "layers.1", _few_words),
    "mamba": Family(
        "MambaModel", "mamba",
        {"hidden_size": HIDDEN, "num_hidden_layers": 2, "state_size": 4, "intermediate_size": 96, "time_step_rank": 3,
         "use_cache": False, **TOKENS}, "layers.1",
    ),
}  # fmt: skip


# By kind, what makes a family drop some of what it computes: in the stream, or where it has no such place, in attention.
DROPS: dict[str, dict[str, float]] = {
    "gpt2": dict.fromkeys(STILL, 0.1),
    **{kind: {"hidden_dropout_prob": 0.1} for kind in ("bert", "vit", "swin")},
    **{kind: {"attention_dropout": 0.1} for kind in ("llama", "qwen3", "gemma3_text", "mixtral", "qwen3_moe")},
    "t5": {"dropout_rate": 0.1},
    "whisper": {"dropout": 0.1},
    "convnext": {"drop_path_rate": 0.1},
    "mamba": {},
}


def _find(model: nn.Module, path: str) -> nn.Module:
    try:
        return model.get_submodule(path)
    except AttributeError:
        names = [name for name, _ in model.named_modules() if name.count(".") <= path.count(".") + 1]
        raise AssertionError(f"{path} is not among {names}") from None


def built(family: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, str, dict[str, Tensor]]:
    """A model in training, the path of the block that is looked at, and a batch. A family may be adapted, and may drop some."""
    torch.manual_seed(0)
    drops, family = family.endswith(DROPPING), family.removesuffix(DROPPING)
    if family in OWN:
        block, x = OWN[family]()
        another, _ = OWN[family]()
        model: nn.Module = nn.Sequential(block, another).to(dtype)
        for each in model.modules() if drops else ():
            if isinstance(each, nn.Dropout):
                each.p = 0.1
            elif isinstance(each, nn.MultiheadAttention):
                each.dropout = 0.1
        return model, "1", {"input": x.to(dtype)}
    import transformers  # here, so that ranks that train plain modules do not wait for it

    made_by, kind, options, path, batch = FAMILIES[family.removesuffix(", adapted")]
    transformers.logging.set_verbosity_error()
    options = options | DROPS[kind] if drops else dict(options)
    settings = {name: options.pop(name) for name in ("attn_implementation", "experts_implementation") if name in options}
    config = transformers.AutoConfig.for_model(kind, **options)
    for name, value in settings.items():
        setattr(config, f"_{name}", value)
    model = getattr(transformers, made_by)(config).to(dtype).train()
    if family.endswith(", adapted"):
        import peft

        adapter = peft.LoraConfig(r=12, target_modules=["q_proj", "v_proj"], lora_dropout=0.0)
        model = peft.get_peft_model(model, adapter).to(dtype).base_model.model  # type: ignore[arg-type]
    given = {name: each.to(dtype) if each.is_floating_point() else each for name, each in batch().items()}
    return model, path, given


def calls_of(model: nn.Module, blocks: list[nn.Module], batch: dict[str, Tensor]) -> list[Called]:
    """What a forward of the model gives to each of its blocks."""
    found: dict[nn.Module, Called] = {}

    def note(block: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[block] = Called(block, *Called(block, args, kwargs).fresh())

    handles = [block.register_forward_pre_hook(note, with_kwargs=True) for block in blocks]
    model(**batch)
    for handle in handles:
        handle.remove()
    return [found[block] for block in blocks]


def called(family: str, dtype: torch.dtype = torch.float64) -> Called:
    """One block and what its model gives it, in a training forward."""
    model, path, batch = built(family, dtype)
    (call,) = calls_of(model, [_find(model, path)], batch)
    return call


class Residual(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(HIDDEN, HEADS, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        attended: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return x + attended


def _rows() -> Tensor:
    return torch.randn(ROWS, LENGTH, HIDDEN, generator=torch.Generator().manual_seed(1))


OWN: dict[str, Callable[[], tuple[nn.Module, Tensor]]] = {
    "plain mlp": lambda: (
        Residual(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 96), nn.ReLU(), nn.Dropout(0.1), nn.Linear(96, HIDDEN)), _rows(),
    ),
    "plain attention": lambda: (SelfAttention(), _rows()),
    "plain convolution": lambda: (
        Residual(nn.Conv2d(24, 24, 3, padding=1), nn.GroupNorm(12, 24), nn.SiLU(), nn.Conv2d(24, 24, 1)),
        torch.randn(ROWS, 24, 12, 12, generator=torch.Generator().manual_seed(1)),
    ),
    "torch's encoder layer": lambda: (
        nn.TransformerEncoderLayer(HIDDEN, HEADS, 96, dropout=0.0, batch_first=True, norm_first=True), _rows(),
    ),
}  # fmt: skip
NAMES = [*FAMILIES, "llama, adapted", *OWN]
